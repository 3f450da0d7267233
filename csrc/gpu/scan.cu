// Sums, products and places of maxima of all elements up to each along an axis.
#include <algorithm>

#include "gpu/lines.cuh"
#include "math/keys.h"
#include "math/reductions.h"

namespace needle::gpu {
namespace {

constexpr uint32_t kItems = 8, kTile = kItems * kThreads;  // of a thread and a block at a time

// What is known of some neighbouring elements, and of these and those behind them.
template <class T>
struct RunningSum {
  using In = T;
  using Out = T;
  using State = device::Accumulator<T>;
  __device__ static __forceinline__ State start() { return 0; }
  __device__ static __forceinline__ State of(T x, uint32_t) { return static_cast<State>(x); }
  __device__ static __forceinline__ State combine(const State& a, const State& b) { return a + b; }
  __device__ static __forceinline__ Out result(const State& s) { return static_cast<T>(s); }
};
template <class T>
struct RunningProduct : RunningSum<T> {
  using State = std::conditional_t<std::is_integral_v<T>, uint64_t, double>;  // which may wrap around
  __device__ static __forceinline__ State start() { return 1; }
  __device__ static __forceinline__ State of(T x, uint32_t) { return static_cast<State>(x); }
  __device__ static __forceinline__ State combine(const State& a, const State& b) { return a * b; }
  __device__ static __forceinline__ T result(const State& s) { return static_cast<T>(s); }
};
template <class T>
struct RunningMax {
  using In = T;
  using Out = int64_t;
  struct State {
    device::KeyOf<T> key;
    uint32_t number;
  };
  __device__ static __forceinline__ State start() { return {0, 0}; }
  __device__ static __forceinline__ State of(T x, uint32_t i) { return {device::key_of(x), i}; }
  __device__ static __forceinline__ State combine(const State& a, const State& b) { return b.key >= a.key ? b : a; }
  __device__ static __forceinline__ Out result(const State& s) { return s.number; }
};

template <class Op>
struct Scan {
  Lines<2> lines;  // result, elements
  const typename Op::In* x;
  typename Op::Out* y;
  typename Op::State* parts;  // of each line what is before its pieces, or null
  uint32_t size, piece, pieces;
};

// The elements i, i + 1, ... of a line below `end`, loaded together.
template <class T>
__device__ __forceinline__ void load_items(T (&v)[kItems], const T* x, int64_t step, uint32_t i, uint32_t end) {
#pragma unroll
  for (uint32_t k = 0; k < kItems; k++)
    if (i + k < end) v[k] = x[(i + k) * step];
}

// A thread per line.
template <class Op>
__global__ void GPU_BOUNDS(kThreads, 4) scan_lines(Scan<Op> s) {
  const uint32_t line = blockIdx.x * kThreads + threadIdx.x;
  if (line >= s.lines.count) return;
  int64_t at[2];
  s.lines.across.locate(line, at);
  typename Op::State state = Op::start();
#pragma unroll 1
  for (uint32_t i = 0; i < s.size; i += kItems) {
    typename Op::In x[kItems];
    load_items(x, s.x + at[1], s.lines.step[1], i, s.size);
#pragma unroll
    for (uint32_t k = 0; k < kItems; k++) {
      if (i + k >= s.size) continue;
      state = Op::combine(state, Op::of(x[k], i + k));
      s.y[at[0] + (i + k) * s.lines.step[0]] = Op::result(state);
    }
  }
}

// A block per line or piece of one, tile by tile; with `only` it leaves the piece's last state in `parts` alone.
template <class Op, bool only>
__global__ void GPU_BOUNDS(kThreads, 4) scan_pieces(Scan<Op> s) {
  using State = typename Op::State;
  struct Block {
    State of[kThreads];
  };
  GPU_SHARED(Block, block);
  const uint32_t thread = threadIdx.x, begin = blockIdx.y * s.piece;
  const uint32_t end = s.size - begin < s.piece ? s.size : begin + s.piece;
  State* part = s.parts + (static_cast<int64_t>(blockIdx.x) * s.pieces + blockIdx.y);
  int64_t at[2];
  s.lines.across.locate(blockIdx.x, at);
  State carry = only || !s.parts ? Op::start() : *part;
#pragma unroll 1
  for (uint32_t tile = begin; tile < end; tile += kTile) {
    const uint32_t first = tile + thread * kItems;
    typename Op::In x[kItems];
    load_items(x, s.x + at[1], s.lines.step[1], first, end);
    State mine = Op::start();
#pragma unroll
    for (uint32_t k = 0; k < kItems; k++)
      if (first + k < end) mine = Op::combine(mine, Op::of(x[k], first + k));
    block_sync();  // until everyone has read what the last tile left here
    block.of[thread] = mine;
    block_sync();
#pragma unroll 1
    for (uint32_t distance = 1; distance < kThreads; distance *= 2) {
      if (thread >= distance) mine = Op::combine(block.of[thread - distance], mine);
      block_sync();
      block.of[thread] = mine;
      block_sync();
    }
    if constexpr (!only) {
      State state = thread == 0 ? carry : Op::combine(carry, block.of[thread - 1]);
#pragma unroll
      for (uint32_t k = 0; k < kItems; k++) {
        if (first + k >= end) continue;
        state = Op::combine(state, Op::of(x[k], first + k));
        s.y[at[0] + (first + k) * s.lines.step[0]] = Op::result(state);
      }
    }
    carry = Op::combine(carry, block.of[kThreads - 1]);
  }
  if (only && thread == 0) *part = carry;
}

// Of each line's pieces what is before them.
template <class Op>
__global__ void GPU_BOUNDS(kThreads, 4) scan_parts(Scan<Op> s) {
  const uint32_t line = blockIdx.x * kThreads + threadIdx.x;
  if (line >= s.lines.count) return;
  typename Op::State* part = s.parts + static_cast<int64_t>(line) * s.pieces;
  typename Op::State before = Op::start();
#pragma unroll 1
  for (uint32_t p = 0; p < s.pieces; p++) {
    const typename Op::State here = part[p];
    part[p] = before;
    before = Op::combine(before, here);
  }
}

template <class Op, class Args>
Scan<Op> scan_of(const char* name, const Args& c, bool reverse) {
  const View &x = c.in.x, &y = c.out.y;
  Scan<Op> s = {};
  s.lines = lines_of(name, {&y, &x}, c.attr.axis);
  s.size = static_cast<uint32_t>(x.shape[c.attr.axis]);
  s.x = x.template as<const typename Op::In>(), s.y = y.template as<typename Op::Out>();
  if (reverse && s.size > 0) {
    s.x += (s.size - 1) * s.lines.step[1], s.y += (s.size - 1) * s.lines.step[0];
    for (int64_t& step : s.lines.step) step = -step;
  }
  return s;
}

template <class Op>
void launch_lines(const Scan<Op>& s, gpuStream_t stream) {
  if (s.lines.count && s.size) launch(scan_lines<Op>, dim3(pieces_of(s.lines.count, kThreads)), kThreads, 0, stream, s);
}

// Lines that are short, or many and beside each other, are a thread's; others a block's, or, few of them, several
// blocks'.
template <class Op, class Args>
void scan(const char* name, const Args& c, bool reverse = false) {
  Scan<Op> s = scan_of<Op>(name, c, reverse);
  const gpuStream_t stream = stream_of(c);
  const uint32_t units = static_cast<uint32_t>(device_units());
  const bool beside = s.lines.step[1] != 1 && s.lines.step[1] != -1;
  if (s.size < kTile / 8 || s.lines.count == 0 || (beside && s.lines.count >= 32 * units))
    return launch_lines(s, stream);
  const uint32_t tiles = pieces_of(s.size, kTile), wanted = std::min(tiles, pieces_of(4 * units, s.lines.count));
  s.piece = pieces_of(tiles, wanted) * kTile;
  s.pieces = pieces_of(s.size, s.piece);
  const dim3 grid(s.lines.count, s.pieces);
  if (s.pieces > 1) {
    const size_t parts = static_cast<size_t>(s.lines.count) * s.pieces;
    s.parts = static_cast<typename Op::State*>(c.exec->scratch(0, parts * sizeof(typename Op::State)));
    launch(scan_pieces<Op, true>, grid, kThreads, 0, stream, s);
    launch(scan_parts<Op>, dim3(pieces_of(s.lines.count, kThreads)), kThreads, 0, stream, s);
  }
  launch(scan_pieces<Op, false>, grid, kThreads, 0, stream, s);
}

// dx[k] is the product of x before k times s[k] = dy[k] + x[k + 1] s[k + 1]; a thread per line.
template <class T>
struct ProductGrad {
  Lines<3> lines;  // dx, x, dy
  T* dx;
  const T *x, *dy;
  double* before;  // of all lines the products, one step after the other
  uint32_t size;
};

template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) product_grad(ProductGrad<T> g) {
  const uint32_t line = blockIdx.x * kThreads + threadIdx.x;
  if (line >= g.lines.count) return;
  int64_t at[3];
  g.lines.across.locate(line, at);
  const T *x = g.x + at[1], *dy = g.dy + at[2];
  double product = 1, next = 0, sum = 0;
#pragma unroll 4
  for (uint32_t i = 0; i < g.size; i++) {
    g.before[static_cast<int64_t>(i) * g.lines.count + line] = product;
    product *= static_cast<double>(x[i * g.lines.step[1]]);
  }
#pragma unroll 4
  for (uint32_t i = g.size; i-- > 0;) {
    sum = static_cast<double>(dy[i * g.lines.step[2]]) + next * sum;
    next = static_cast<double>(x[i * g.lines.step[1]]);
    g.dx[at[0] + i * g.lines.step[0]] = static_cast<T>(g.before[static_cast<int64_t>(i) * g.lines.count + line] * sum);
  }
}

}  // namespace

void cumsum(const cumsum_args& c) {
  with_type<cumsum_args::In::x_dtypes>(
      c.in.x.dtype, [&](auto t) { scan<RunningSum<decltype(t)>>("cumsum", c, c.attr.reverse != 0); });
}

void cummax(const cummax_args& c) {
  with_type<cummax_args::In::x_dtypes>(c.in.x.dtype, [&](auto t) { scan<RunningMax<decltype(t)>>("cummax", c); });
}

// One after the other: in pieces, products that nobody asked for could overflow.
void cumprod(const cumprod_args& c) {
  with_type<cumprod_args::In::x_dtypes>(c.in.x.dtype, [&](auto t) {
    launch_lines(scan_of<RunningProduct<decltype(t)>>("cumprod", c, false), stream_of(c));
  });
}

void cumprod_grad(const cumprod_grad_args& c) {
  const View &x = c.in.x, &dy = c.in.dy, &dx = c.out.dx;
  if (dx.size() == 0) return;
  with_type<cumprod_grad_args::In::x_dtypes>(x.dtype, [&](auto t) {
    using T = decltype(t);
    ProductGrad<T> g = {};
    g.lines = lines_of("cumprod_grad", {&dx, &x, &dy}, c.attr.axis);
    g.dx = dx.as<T>(), g.x = x.as<const T>(), g.dy = dy.as<const T>();
    g.size = static_cast<uint32_t>(x.shape[c.attr.axis]);
    g.before = static_cast<double*>(c.exec->scratch(0, sizeof(double) * x.size()));
    launch(product_grad<T>, dim3(pieces_of(g.lines.count, kThreads)), kThreads, 0, stream_of(c), g);
  });
}

}  // namespace needle::gpu
