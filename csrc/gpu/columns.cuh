// Sums over the columns of a matrix or the channels of images, shared out among enough blocks to fill the device: a
// thread walks down a column of a block's piece, blocks merge what their threads found, one block per column the rest.
#pragma once
#include <algorithm>

#include "gpu/quad.cuh"
#include "gpu/team.cuh"

namespace needle::gpu {

// (N, C, S) views of any strides as columns of elements T, one per channel: of Quads a column is four channels where
// these are neighbours in memory (`last`), else an element is four pixels.
template <class T>
struct Columns {
  T* data;
  int64_t n, c, s;
  Divisor pixels;
  Columns(const View& v, bool last)
      : data(reinterpret_cast<T*>(v.as<Scalar<T>>())),
        n(v.stride[0] / kLanes<T>),
        c(last ? v.stride[1] : v.stride[1] / kLanes<T>),
        s(last ? v.stride[2] / kLanes<T> : v.stride[2]),
        pixels(last ? v.shape[2] : v.shape[2] / kLanes<T>) {}
  __device__ __forceinline__ T* at(int64_t column, uint32_t i) const {
    const uint32_t image = pixels.quotient(i);
    return data + (image * n + column * c + (i - image * pixels.d) * s);
  }
};

// What is known of some elements of a column: their sum and that of their products with another, or their mean and the
// sum of squared deviations from it.
template <class T>
struct Total {
  T first, second;
  Scalar<T> count;
};

// What totals that are sums derive from.
struct Sums {
  template <class U>
  __device__ static __forceinline__ void merge(Total<U>& t, const Total<U>& other) {
    t.first += other.first;
    t.second += other.second;
  }
};

// Elements begin, begin + step, ... of a column, of which a thread loads kAtOnce together.
struct Share {
  uint32_t column, begin, end, step;
};

template <class T>
constexpr int kAtOnce = std::is_same_v<T, float> ? 8 : 4;

// Those from i on; 0 where there are no more.
template <class T>
__device__ __forceinline__ void load(T (&v)[kAtOnce<T>], const Columns<T>& x, const Share& s, uint32_t i) {
#pragma unroll
  for (int k = 0; k < kAtOnce<T>; k++) v[k] = i + k * s.step < s.end ? read(x.at(s.column, i + k * s.step)) : T(0);
}

// How blocks share columns out: `width` neighbouring ones, a power of two, and `piece` elements of each.
struct Walk {
  uint32_t columns, size, piece;
  int width, parts;
  bool last;

  __device__ __forceinline__ Share share() const {
    const uint32_t row = threadIdx.x / width, begin = blockIdx.y * piece;
    return {blockIdx.x * width + threadIdx.x % width, begin + row, size - begin < piece ? size : begin + piece,
            static_cast<uint32_t>(kTeamThreads / width)};
  }
};

// The totals of all threads whose numbers are the same modulo `width`, in the first of them.
template <class Op, class T>
__device__ __forceinline__ void merge_block(Total<T>& mine, int width) {
  struct Block {
    Total<T> of[kTeamThreads];
  };
  GPU_SHARED(Block, block);
  const int thread = static_cast<int>(threadIdx.x);
  block.of[thread] = mine;
#pragma unroll 1
  for (int half = kTeamThreads / 2; half >= width; half /= 2) {
    block_sync();
    if (thread >= half) continue;
    Op::merge(mine, block.of[thread + half]);
    block.of[thread] = mine;
  }
}

// Of a Quad's lanes, which are channels or belong to one.
template <class Op, class T>
__device__ __forceinline__ void finish(const Op& op, int64_t column, const Total<T>& total, bool last) {
  Total<Scalar<T>> one = {0, 0, 0};
#pragma unroll
  for (int k = 0; k < kLanes<T>; k++) {
    if (last) one = {0, 0, 0};
    Op::merge(one, {lane(total.first, k), lane(total.second, k), total.count});
    if (last || k == kLanes<T> - 1) op.finish(last ? column * kLanes<T> + k : column, one, last);
  }
}

// A block's totals go to `parts`, or are all there is.
template <class Op, class T>
__global__ void GPU_BOUNDS(kTeamThreads, 4) sum_columns(Op op, Walk w, Total<T>* parts) {
  const Share s = w.share();
  Total<T> total = {T(0), T(0), 0};
  if (s.column < w.columns) total = op.sum(s, w.last);
  merge_block<Op>(total, w.width);
  if (threadIdx.x >= static_cast<unsigned>(w.width) || s.column >= w.columns) return;
  if (parts) {
    parts[static_cast<int64_t>(blockIdx.y) * w.columns + s.column] = total;
  } else {
    finish(op, s.column, total, w.last);
  }
}

// A block per column.
template <class Op, class T>
__global__ void GPU_BOUNDS(kTeamThreads, 4) merge_parts(Op op, Walk w, const Total<T>* parts) {
  Total<T> total = {T(0), T(0), 0};
  for (int part = static_cast<int>(threadIdx.x); part < w.parts; part += kTeamThreads)
    Op::merge(total, parts[static_cast<int64_t>(part) * w.columns + blockIdx.x]);
  merge_block<Op>(total, 1);
  if (threadIdx.x == 0) finish(op, blockIdx.x, total, w.last);
}

inline bool channels_last(const View& v) {
  return v.shape[1] > 1 && v.stride[1] == 1 && (v.shape[2] == 1 || v.stride[2] != 1);
}

// f(element type, whether channels are walked as neighbours), of views of one shape.
template <const char* letters, class F>
void with_elements(std::initializer_list<const View*> views, const F& f) {
  const View& x = **views.begin();
  const bool last = channels_last(x);
  bool wide = true;
  for (const View* v : views) wide = wide && quads(*v, last ? 1 : 2);
  if (wide) return f(Quad{}, last);
  with_type<letters>(x.dtype, [&](auto t) { f(t, last); });
}

// A walk over a view (N, C, S) that fills the device.
template <class T>
Walk walk_over(const View& x, bool last) {
  auto pieces = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  const int64_t columns = last ? x.shape[1] / kLanes<T> : x.shape[1];
  const int64_t size = x.shape[0] * (last ? x.shape[2] : x.shape[2] / kLanes<T>);
  int width = 1;
  while (last && width < columns && width < 32) width *= 2;
  const int64_t across = std::max<int64_t>(1, pieces(columns, width)), least = 2 * kAtOnce<T> * (kTeamThreads / width);
  const int64_t wanted = std::min(pieces(8 * device_units(), across), pieces(size, least));
  const int64_t piece = std::max<int64_t>(1, pieces(size, std::max<int64_t>(1, wanted)));
  const int parts = static_cast<int>(std::max<int64_t>(1, pieces(size, piece)));
  return {
      static_cast<uint32_t>(columns), static_cast<uint32_t>(size), static_cast<uint32_t>(piece), width, parts, last};
}

inline dim3 grid_of(const Walk& w) { return dim3((w.columns + w.width - 1) / w.width, static_cast<unsigned>(w.parts)); }

// op.sum(share, last) of every thread's share, merged in one order for op.finish(channel, total, last).
template <class T, class Op>
void launch_sums(const Op& op, const Walk& w, const Exec* exec) {
  const gpuStream_t stream = static_cast<gpuStream_t>(exec->stream);
  Total<T>* totals = nullptr;
  if (w.parts > 1) totals = static_cast<Total<T>*>(exec->scratch(0, sizeof(Total<T>) * w.parts * w.columns));
  launch(sum_columns<Op, T>, grid_of(w), kTeamThreads, 0, stream, op, w, totals);
  if (w.parts > 1) launch(merge_parts<Op, T>, dim3(w.columns), kTeamThreads, 0, stream, op, w, totals);
}

}  // namespace needle::gpu
