// Loops over strided arrays: dimensions sorted and merged, cut into tasks; conversion between dtypes; lanes of f32 and
// f64.
#pragma once
#include <cmath>
#include <cstring>

#include "cpu/simd.h"
#include "math/maps.h"

namespace needle::NEEDLE_ISA {

// Lanes of a float type: V for f32, one double for f64, so that a kernel is written once for both.
NEEDLE_INLINE V load(const float* p) { return V::load(p); }
NEEDLE_INLINE double load(const double* p) { return *p; }
NEEDLE_INLINE V load_n(const float* p, int n) { return V::load_n(p, n); }
NEEDLE_INLINE double load_n(const double* p, int) { return *p; }
NEEDLE_INLINE void store(float* p, V v) { v.store(p); }
NEEDLE_INLINE void store(double* p, double v) { *p = v; }
NEEDLE_INLINE void store_n(float* p, V v, int n) { v.store_n(p, n); }
NEEDLE_INLINE void store_n(double* p, double v, int) { *p = v; }
NEEDLE_INLINE double reduce_add(double a) { return a; }
NEEDLE_INLINE double reduce_max(double a) { return a; }
template <class T>
struct LanesOf {
  using type = V;
  static constexpr int width = V::N;
};
template <>
struct LanesOf<double> {
  using type = double;
  static constexpr int width = 1;
};

// f(i, n) for every vector of [0, size): n lanes from element i, fewer in the last call.
template <class T, class F>
NEEDLE_INLINE void for_lanes(int64_t size, const F& f) {
  constexpr int N = LanesOf<T>::width;
  int64_t i = 0;
  for (; i + N <= size; i += N) f(i, N);
  if (i < size) f(i, static_cast<int>(size - i));
}
template <class T>
NEEDLE_INLINE auto load_lanes(const T* p, int n) {
  return n == LanesOf<T>::width ? load(p) : load_n(p, n);
}
template <class T, class L>
NEEDLE_INLINE void store_lanes(T* p, L v, int n) {
  n == LanesOf<T>::width ? store(p, v) : store_n(p, v, n);
}

// `value` as a T; infinities and large values become the limits of an integer type.
template <class T>
NEEDLE_INLINE T from_double(double value) {
  if constexpr (T(0.5) == T(0)) {
    constexpr T high = static_cast<T>(~(uint64_t{1} << (8 * sizeof(T) - 1)));
    if (value >= static_cast<double>(high)) return high;
    if (value <= -static_cast<double>(high)) return -high - 1;
  }
  return static_cast<T>(value);
}

// Calls f(T{}) with the element type of a dtype.
template <class F>
NEEDLE_INLINE void with_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::f64:
      return f(double{});
    case DType::i32:
      return f(int32_t{});
    case DType::i64:
      return f(int64_t{});
    case DType::b8:
      return f(bool{});
  }
}

template <class T, class S>
NEEDLE_INLINE void convert(T* out, int64_t out_stride, const S* in, int64_t in_stride, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i * out_stride] = static_cast<T>(in[i * in_stride]);
}

// Items per task, so that a task has at least `least` units of work and a thread gets up to eight tasks.
NEEDLE_INLINE int64_t grain(const Exec* exec, int64_t items, int64_t work_per_item, int64_t least = 16384) {
  if (exec->threads == 1 || items * work_per_item <= 2 * least) return larger(items, 1);
  int64_t by_work = ceil_div(least, larger(work_per_item, 1));
  return larger(by_work, ceil_div(items, 8 * static_cast<int64_t>(exec->threads)));
}

// f(begin, end) over [0, items), in tasks.
template <class F>
NEEDLE_INLINE void parallel_ranges(const Exec* exec, int64_t items, int64_t work_per_item, const F& f) {
  if (items <= 0) return;
  int64_t g = grain(exec, items, work_per_item);
  parallel_for(exec, ceil_div(items, g), [&](int64_t t) { f(t * g, smaller(items, (t + 1) * g)); });
}

// N arrays of one shape. Dimensions of size 1 are gone, the rest are sorted by the first array's stride, large to
// small, and neighbours that all arrays step through as one are merged. Rank is at least 1.
template <int N>
struct Loop {
  int rank = 0;
  int64_t shape[kMaxRank];
  int64_t stride[N][kMaxRank];

  void add(int64_t size, const int64_t* strides) {
    if (size == 1) return;
    int d = rank++;
    for (; d > 0 && magnitude(stride[0][d - 1]) < magnitude(strides[0]); d--) {
      shape[d] = shape[d - 1];
      for (int k = 0; k < N; k++) stride[k][d] = stride[k][d - 1];
    }
    shape[d] = size;
    for (int k = 0; k < N; k++) stride[k][d] = strides[k];
  }

  void merge() {
    int last = 0;
    for (int d = 1; d < rank; d++) {
      bool one = true;
      for (int k = 0; k < N; k++) one = one && stride[k][last] == stride[k][d] * shape[d];
      if (one) {
        shape[last] *= shape[d];
      } else {
        last++;
        shape[last] = shape[d];
      }
      for (int k = 0; k < N; k++) stride[k][last] = stride[k][d];
    }
    if (rank == 0) {
      shape[0] = 1;
      for (int k = 0; k < N; k++) stride[k][0] = 1;
    }
    rank = rank == 0 ? 1 : last + 1;
  }

  int64_t inner() const { return shape[rank - 1]; }
  int64_t outer() const {  // iterations of all but the innermost dimension
    int64_t n = 1;
    for (int d = 0; d < rank - 1; d++) n *= shape[d];
    return n;
  }

 private:
  static int64_t magnitude(int64_t s) { return s < 0 ? -s : s; }
};

template <int N>
NEEDLE_INLINE Loop<N> loop_over(const View* const* views) {
  Loop<N> l;
  for (int d = 0; d < views[0]->rank; d++) {
    int64_t strides[N];
    for (int k = 0; k < N; k++) strides[k] = views[k]->stride[d];
    l.add(views[0]->shape[d], strides);
  }
  l.merge();
  return l;
}

// Steps through the first `rank` dimensions of a loop; `at[k]` is the element offset in array k.
template <int N>
struct Odometer {
  const Loop<N>& loop;
  int rank;
  int64_t index[kMaxRank];
  int64_t at[N];

  NEEDLE_INLINE Odometer start(const Loop<N>& loop, int rank, int64_t position) {
    Odometer o{loop, rank, {}, {}};
    for (int k = 0; k < N; k++) o.at[k] = 0;
    for (int d = rank - 1; d >= 0; d--) {
      o.index[d] = position % loop.shape[d];
      position /= loop.shape[d];
      for (int k = 0; k < N; k++) o.at[k] += o.index[d] * loop.stride[k][d];
    }
    return o;
  }
  void next() {
    for (int d = rank - 1; d >= 0; d--) {
      for (int k = 0; k < N; k++) at[k] += loop.stride[k][d];
      if (++index[d] < loop.shape[d]) return;
      for (int k = 0; k < N; k++) at[k] -= loop.shape[d] * loop.stride[k][d];
      index[d] = 0;
    }
  }
};

// Element i of a vector of int32 or int64.
NEEDLE_INLINE int64_t number_at(const View& v, int64_t i) {
  return v.dtype == DType::i32 ? v.as<int32_t>()[i * v.stride[0]] : v.as<int64_t>()[i * v.stride[0]];
}

}  // namespace needle::NEEDLE_ISA
