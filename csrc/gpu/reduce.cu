// Sum, mean, maximum and minimum over any set of dimensions, and argmax. Floats add up in float for at most kFlush
// terms and from there on in double, integers in int64.
#include "gpu/strided.cuh"
#include "gpu/team.cuh"
#include "math/reductions.h"

namespace needle::gpu {
namespace {

constexpr int kFlush = 64, kAtOnce = 4;

using device::Accumulator;

// Every output is the reduction of `count` elements, in `parts` of `piece` elements that make partial results.
template <class T>
struct Reduction {
  Loop<2> kept;     // input, output; sorted by the input's strides
  Loop<1> reduced;  // input
  const T* in;
  T* out;
  Accumulator<T>* partial;  // parts x outputs, or null
  uint32_t outputs, count, piece;
  Accumulator<T> start;  // the neutral element
  T low;                 // the same as a T
  double scale;          // of a mean, else 0
};

template <class T>
__device__ __forceinline__ void finish(const Reduction<T>& r, int64_t at, Accumulator<T> value) {
  r.out[at] = static_cast<T>(r.scale != 0 ? static_cast<Accumulator<T>>(static_cast<double>(value) * r.scale) : value);
}
template <class T>
__device__ __forceinline__ void write(const Reduction<T>& r, uint32_t output, int64_t at, Accumulator<T> value) {
  if (r.partial) {
    r.partial[static_cast<int64_t>(blockIdx.y) * r.outputs + output] = value;
  } else {
    finish(r, at, value);
  }
}

// The elements begin, begin + step, ... of an output, of which kAtOnce are loaded together.
template <class Op, class T>
__device__ __forceinline__ Accumulator<T> reduce_elements(const Reduction<T>& r, const T* from, uint32_t begin,
                                                          uint32_t end, uint32_t step) {
  using A = Accumulator<T>;
  A total = r.start;
#pragma unroll 1
  while (begin < end) {
    T sum = r.low;
#pragma unroll 1
    for (int n = 0; n < kFlush && begin < end; n += kAtOnce, begin += kAtOnce * step) {
      T element[kAtOnce];
#pragma unroll
      for (uint32_t k = 0; k < kAtOnce; k++) {
        element[k] = r.low;
        if (begin + k * step >= end) continue;
        int64_t at[1];
        r.reduced.locate(begin + k * step, at);
        element[k] = from[at[0]];
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; k++) {
        if constexpr (std::is_integral<T>::value || std::is_same<Op, device::Product>::value) {
          total = Op::combine(total, static_cast<A>(element[k]));
        } else {
          sum = Op::combine(sum, element[k]);
        }
      }
    }
    total = Op::combine(total, static_cast<A>(sum));
  }
  return total;
}

// A thread per output: neighbouring threads read neighbouring elements where outputs are neighbours in the input.
template <class Op, class T>
__global__ void GPU_BOUNDS(kThreads, 4) reduce_columns(Reduction<T> r) {
  const uint32_t output = blockIdx.x * blockDim.x + threadIdx.x;
  if (output >= r.outputs) return;
  int64_t at[2];
  r.kept.locate(output, at);
  const uint32_t begin = blockIdx.y * r.piece, end = r.count - begin < r.piece ? r.count : begin + r.piece;
  write(r, output, at[1], reduce_elements<Op>(r, r.in + at[0], begin, end, 1));
}

template <class Op, class A>
__device__ __forceinline__ A combine_lanes(A v) {
#pragma unroll
  for (int bits = WAVE / 2; bits > 0; bits /= 2) v = Op::combine(v, shfl_xor<WAVE>(v, bits));
  return v;
}

// A block per output, of as many waves as the launch gives it.
template <class Op, class T>
__global__ void GPU_BOUNDS(kThreads, 4) reduce_rows(Reduction<T> r) {
  using A = Accumulator<T>;
  struct Waves {
    A value[kThreads / WAVE];
  };
  GPU_SHARED(Waves, waves);
  const uint32_t output = blockIdx.x;
  int64_t at[2];
  r.kept.locate(output, at);
  const uint32_t begin = blockIdx.y * r.piece, end = r.count - begin < r.piece ? r.count : begin + r.piece;
  A total = reduce_elements<Op>(r, r.in + at[0], begin + threadIdx.x, end, blockDim.x);
  total = combine_lanes<Op>(total);
  if (lane_id() == 0) waves.value[threadIdx.x / WAVE] = total;
  block_sync();
  if (threadIdx.x != 0) return;
  for (unsigned w = 1; w < blockDim.x / WAVE; w++) total = Op::combine(total, waves.value[w]);
  write(r, output, at[1], total);
}

// Partial results of each output to one, by `lanes` lanes: one, or all of a wave.
template <class Op, class T, int lanes>
__global__ void GPU_BOUNDS(kThreads, 4) combine_parts(Reduction<T> r, int parts) {
  const uint32_t output = (blockIdx.x * kThreads + threadIdx.x) / lanes;
  if (output >= r.outputs) return;  // of waves that combine together all lanes leave
  Accumulator<T> total = r.start;
#pragma unroll 4
  for (int part = static_cast<int>(threadIdx.x % lanes); part < parts; part += lanes)
    total = Op::combine(total, r.partial[static_cast<int64_t>(part) * r.outputs + output]);
  if (lanes > 1) total = combine_lanes<Op>(total);
  if (threadIdx.x % lanes != 0) return;
  int64_t at[2];
  r.kept.locate(output, at);
  finish(r, at[1], total);
}

unsigned blocks_of(uint32_t n, uint32_t size) { return n / size + (n % size != 0); }

template <class Op, class T, class Args>
void reduce_as(const char* name, const Args& c, bool mean) {
  const View &in = c.in.x, &out = c.out.y;
  Reduction<T> r = {};
  device::split_dimensions(in, out, r.kept, r.reduced);
  r.kept.finish(name), r.reduced.finish(name);
  r.in = in.as<T>(), r.out = out.as<T>();
  r.outputs = static_cast<uint32_t>(r.kept.total), r.count = static_cast<uint32_t>(r.reduced.total);
  r.low = from_double<T>(Op::limit), r.start = from_double<Accumulator<T>>(Op::limit);
  r.scale = mean ? 1.0 / static_cast<double>(r.count) : 0;
  if (r.outputs == 0) return;

  // Lanes take what is contiguous: outputs, or the elements of one; of short rows each has one.
  const bool columns = (r.count <= WAVE && r.outputs >= kThreads) ||
                       (r.reduced.stride[0][r.reduced.rank - 1] != 1 && r.kept.stride[0][r.kept.rank - 1] == 1 &&
                        r.kept.shape[r.kept.rank - 1] >= WAVE / 2);
  unsigned block = columns || r.count > 8 * WAVE ? kThreads : WAVE;
  if (columns && r.outputs < kThreads) block = blocks_of(r.outputs, WAVE) * WAVE;
  const unsigned blocks = columns ? blocks_of(r.outputs, block) : r.outputs;
  // Too few blocks for the device: each output's elements are shared.
  const uint32_t least = columns ? 64 : 16 * kThreads,
                 wanted = 4u * static_cast<unsigned>(device_units()) * (columns ? kThreads / block : 1);
  uint32_t parts = blocks < wanted && r.count > 2 * least ? blocks_of(wanted, blocks) : 1;
  if (parts > blocks_of(r.count, least)) parts = blocks_of(r.count, least);
  r.piece = r.count ? blocks_of(r.count, parts) : 1;
  parts = r.count ? blocks_of(r.count, r.piece) : 1;
  if (parts > 1)
    r.partial = static_cast<Accumulator<T>*>(
        c.exec->scratch(0, static_cast<size_t>(parts) * r.outputs * sizeof(Accumulator<T>)));
  launch(columns ? reduce_columns<Op, T> : reduce_rows<Op, T>, dim3(blocks, parts), block, 0, stream_of(c), r);
  if (parts == 1) return;
  const int lanes = parts < WAVE / 2 ? 1 : WAVE;
  const unsigned combining = blocks_of(r.outputs, kThreads / lanes);
  launch(lanes == 1 ? combine_parts<Op, T, 1> : combine_parts<Op, T, WAVE>, dim3(combining), kThreads, 0, stream_of(c),
         r, static_cast<int>(parts));
}

template <class Op, class Args>
void reduce(const char* name, const Args& c, bool mean = false) {
  with_type<Args::In::x_dtypes>(c.in.x.dtype, [&](auto t) { reduce_as<Op, decltype(t)>(name, c, mean); });
}

template <class T>
struct Search {
  Loop<2> kept;  // input, output
  const T* in;
  int64_t* out;
  int64_t stride;
  uint32_t outputs, count;
};

// Whether element a, number i, comes before element b, number j: a NaN counts as the largest, as in torch.
template <class T>
__device__ __forceinline__ bool precedes(T a, int64_t i, T b, int64_t j) {
  const bool a_nan = a != a, b_nan = b != b;
  if (a_nan || b_nan) return a_nan && (!b_nan || i < j);
  return a > b || (a == b && i < j);
}

// A wave per output.
template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) find_largest(Search<T> s) {
  const uint32_t output = blockIdx.x * (kThreads / WAVE) + threadIdx.x / WAVE;
  if (output >= s.outputs) return;  // the whole wave leaves
  int64_t at[2];
  s.kept.locate(output, at);
  const T* from = s.in + at[0];
  uint32_t first = static_cast<uint32_t>(lane_id());
  int64_t best = first < s.count ? first : 0;  // lanes beyond the end search again what lane 0 found
  T top = from[best * s.stride];
#pragma unroll 1
  for (uint32_t i = first + WAVE; i < s.count; i += WAVE) {
    T x = from[i * s.stride];
    if (precedes<T>(x, i, top, best)) top = x, best = i;
  }
#pragma unroll
  for (int bits = WAVE / 2; bits > 0; bits /= 2) {
    T x = shfl_xor<WAVE>(top, bits);
    int64_t i = shfl_xor<WAVE>(best, bits);
    if (precedes<T>(x, i, top, best)) top = x, best = i;
  }
  if (lane_id() == 0) s.out[at[1]] = best;
}

template <class T>
void argmax_as(const argmax_args& c) {
  const int axis = static_cast<int>(c.attr.axis);
  const View &in = c.in.x, &out = c.out.y;
  Search<T> s = {};
  for (int d = 0; d < in.rank; d++) {
    int64_t strides[2] = {in.stride[d], out.stride[d]};
    if (d != axis) s.kept.add(in.shape[d], strides);
  }
  s.kept.finish("argmax");
  s.in = in.as<T>(), s.out = out.as<int64_t>(), s.stride = in.stride[axis];
  if (in.shape[axis] > INT32_MAX)
    fail("argmax", "an axis has at most 2^31 - 1 elements", std::to_string(in.shape[axis]));
  s.outputs = static_cast<uint32_t>(s.kept.total), s.count = static_cast<uint32_t>(in.shape[axis]);
  if (s.outputs == 0 || s.count == 0) return;
  launch(find_largest<T>, dim3(blocks_of(s.outputs, kThreads / WAVE)), kThreads, 0, stream_of(c), s);
}

// What a block's threads find of n elements, or of their squares, in `to`.
template <class T, bool squares>
__global__ void GPU_BOUNDS(kThreads, 4) sum_up(const T* x, int64_t n, double* to) {
  double total = 0;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const double v = static_cast<double>(x[i]);
    total += squares ? v * v : v;
  }
  total = BlockTeam().sum(total);
  if (threadIdx.x == 0) to[blockIdx.x] = total;
}

}  // namespace

void sum_squares(const sum_squares_args& c) {
  const int64_t n = c.in.x.size();
  const dim3 blocks = n > 0 ? grid_for((n + 7) / 8, 8) : dim3(1);
  double* parts = static_cast<double*>(c.exec->scratch(0, sizeof(double) * blocks.x));
  with_type<sum_squares_args::In::x_dtypes>(c.in.x.dtype, [&](auto t) {
    using T = decltype(t);
    launch(sum_up<T, true>, blocks, kThreads, 0, stream_of(c), c.in.x.as<const T>(), n, parts);
  });
  launch(sum_up<double, false>, dim3(1), kThreads, 0, stream_of(c), parts, static_cast<int64_t>(blocks.x),
         c.out.y.as<double>());
}

void sum(const sum_args& c) { reduce<device::Sum>("sum", c); }
void mean(const mean_args& c) { reduce<device::Sum>("mean", c, true); }
void prod(const prod_args& c) { reduce<device::Product>("prod", c); }
void max(const max_args& c) { reduce<device::Max>("max", c); }
void min(const min_args& c) { reduce<device::Min>("min", c); }

void argmax(const argmax_args& c) {
  with_type<argmax_args::In::x_dtypes>(c.in.x.dtype, [&](auto t) { argmax_as<decltype(t)>(c); });
}

}  // namespace needle::gpu
