// Distances between rows of two matrices, by differences: |a|^2 + |b|^2 - 2 a b would cancel between neighbours.
// Gradients.
#include "gpu/strided.cuh"
#include "math/norms.h"

namespace needle::gpu {
namespace {

constexpr int kDepth = 16, kAcross = 16;  // of a block's tile: terms at a time, threads along a side
static_assert(kAcross * kAcross == kThreads);
template <class Norm>
constexpr int kEach =
    std::is_same_v<Norm, device::NormP> ? 2 : 4;  // distances of a thread along a side, as registers allow
template <class Norm>
constexpr int kSide = kAcross * kEach<Norm>;

template <class T>
struct Matrix {  // (B, rows, columns)
  T* data;
  int64_t batch, row, column;
  Matrix(const View& v) : data(v.as<T>()), batch(v.stride[0]), row(v.stride[1]), column(v.stride[2]) {}
};

template <class T>
struct Distances {
  Matrix<T> a, b, y;
  uint32_t rows, columns, terms;
  Divisor down, across;  // tiles
  T p;
};

// Terms [first, first + kDepth) of `side` rows; 0 beyond them.
template <int side, class T>
__device__ __forceinline__ void load_tile(T (&to)[kDepth][side + 1], const Matrix<T>& m, const T* from, uint32_t row,
                                          uint32_t rows, uint32_t first, uint32_t terms) {
#pragma unroll
  for (uint32_t i = threadIdx.x; i < side * kDepth; i += kThreads) {
    const uint32_t r = i / kDepth, k = i % kDepth;
    const bool there = row + r < rows && first + k < terms;
    to[k][r] = there ? from[(row + r) * m.row + (first + k) * m.column] : T(0);
  }
}

template <class Norm, class T>
__global__ void GPU_BOUNDS(kThreads, 2) distance_tiles(Distances<T> d) {
  constexpr int each = kEach<Norm>, side = kSide<Norm>;
  struct Tiles {
    T a[kDepth][side + 1], b[kDepth][side + 1];
  };
  GPU_SHARED(Tiles, tiles);
  const uint32_t tile = d.across.quotient(blockIdx.x), batch = d.down.quotient(tile);
  const uint32_t row = (tile - batch * d.down.d) * side, column = (blockIdx.x - tile * d.across.d) * side;
  const uint32_t down = threadIdx.x / kAcross, across = threadIdx.x % kAcross;
  T totals[each][each] = {};
#pragma unroll 1
  for (uint32_t first = 0; first < d.terms; first += kDepth) {
    block_sync();
    load_tile<side>(tiles.a, d.a, d.a.data + batch * d.a.batch, row, d.rows, first, d.terms);
    load_tile<side>(tiles.b, d.b, d.b.data + batch * d.b.batch, column, d.columns, first, d.terms);
    block_sync();
    const uint32_t depth = d.terms - first < kDepth ? d.terms - first : kDepth;
#pragma unroll 1
    for (uint32_t k = 0; k < depth; k++) {
      T mine[each], other[each];
#pragma unroll
      for (int i = 0; i < each; i++) {
        mine[i] = tiles.a[k][down + i * kAcross];
        other[i] = tiles.b[k][across + i * kAcross];
      }
#pragma unroll
      for (int i = 0; i < each; i++)
#pragma unroll
        for (int j = 0; j < each; j++) totals[i][j] = Norm::add(totals[i][j], mine[i] - other[j], d.p);
    }
  }
  T* y = d.y.data + batch * d.y.batch;
#pragma unroll
  for (int i = 0; i < each; i++)
#pragma unroll
    for (int j = 0; j < each; j++) {
      const uint32_t r = row + down + i * kAcross, c = column + across + j * kAcross;
      if (r < d.rows && c < d.columns) y[r * d.y.row + c * d.y.column] = Norm::finish(totals[i][j], d.p);
    }
}

// A thread per element of da: the sum over rows of b of their weights times the differences or, of the 1-norm, their
// signs.
template <class T>
struct Pulled {
  Matrix<T> a, b, y, dy, da;
  uint32_t count, work;  // rows of b, elements of da
  Divisor rows, terms;
};

constexpr uint32_t kTerms = 64;  // that are summed in a row

template <bool signs, class T>
__global__ void GPU_BOUNDS(kThreads, 4) distance_grad(Pulled<T> g) {
  for_elements(g.work, [&](uint32_t i) {
    const uint32_t line = g.terms.quotient(i), batch = g.rows.quotient(line);
    const int64_t term = i - line * g.terms.d, row = line - batch * g.rows.d;
    const T mine = g.a.data[batch * g.a.batch + row * g.a.row + term * g.a.column];
    const T* b = g.b.data + (batch * g.b.batch + term * g.b.column);
    const T* sizes = g.y.data + (batch * g.y.batch + row * g.y.row);
    const T* slopes = g.dy.data + (batch * g.dy.batch + row * g.dy.row);
    T total = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < g.count; first += kTerms) {
      const uint32_t end = g.count - first < kTerms ? g.count : first + kTerms;
      T sum = 0;
#pragma unroll 4
      for (uint32_t j = first; j < end; j++) {
        const T slope = slopes[j * g.dy.column], d = mine - b[j * g.b.row];
        if constexpr (signs) {
          sum += slope * (d > 0 ? T(1) : d < 0 ? T(-1) : d);
        } else {
          const T size = sizes[j * g.y.column];
          sum += (size == 0 ? T(0) : slope / size) * d;
        }
      }
      total += sum;
    }
    g.da.data[batch * g.da.batch + row * g.da.row + term * g.da.column] = total;
  });
}

}  // namespace

// Rows of a (B, P, M) and b (B, R, M) to (B, P, R), in the p-norm.
void cdist(const cdist_args& c) {
  const View &a = c.in.a, &b = c.in.b, &y = c.out.y;
  if (y.size() == 0) return;
  if (a.shape[2] > INT32_MAX) fail("cdist", "rows have at most 2^31 - 1 elements", std::to_string(a.shape[2]));
  with_type<cdist_args::In::a_dtypes>(a.dtype, [&](auto t) {
    using T = decltype(t);
    device::with_norm(c.attr.p, [&](auto norm) {
      using Norm = decltype(norm);
      auto tiles = [](int64_t n) { return (n + kSide<Norm> - 1) / kSide<Norm>; };
      const int64_t down = tiles(y.shape[1]), across = tiles(y.shape[2]), blocks = y.shape[0] * down * across;
      if (blocks > INT32_MAX) fail("cdist", "at most 2^31 - 1 tiles of distances", std::to_string(blocks));
      const Distances<T> d = {a,
                              b,
                              y,
                              static_cast<uint32_t>(y.shape[1]),
                              static_cast<uint32_t>(y.shape[2]),
                              static_cast<uint32_t>(a.shape[2]),
                              down,
                              across,
                              static_cast<T>(c.attr.p)};
      launch(distance_tiles<Norm, T>, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream_of(c), d);
    });
  });
}

// The gradient of a from those of the distances y, p being 1 or 2.
void cdist_grad(const cdist_grad_args& c) {
  const View &a = c.in.a, &da = c.out.da;
  if (da.size() == 0) return;
  const int64_t work = a.shape[0] * a.shape[1] * a.shape[2];
  if (work > INT32_MAX || c.in.b.shape[1] > INT32_MAX)
    fail("cdist_grad", "arrays on a GPU have at most 2^31 - 1 elements", std::to_string(work));
  with_type<cdist_grad_args::In::a_dtypes>(a.dtype, [&](auto t) {
    using T = decltype(t);
    const Pulled<T> g = {
        a,          c.in.b,    c.in.y, c.in.dy, da, static_cast<uint32_t>(c.in.b.shape[1]), static_cast<uint32_t>(work),
        a.shape[1], a.shape[2]};
    launch(c.attr.p == 1 ? distance_grad<true, T> : distance_grad<false, T>, grid_for(g.work), kThreads, 0,
           stream_of(c), g);
  });
}

}  // namespace needle::gpu
