// Loops over strided arrays: dimensions sorted and merged, cut into tasks; conversion between dtypes; lanes of f32 and
// f64.
#pragma once
#include <cmath>
#include <cstring>

#include "cpu/simd.h"
#include "math/maps.h"
#include "math/strided.h"

namespace needle::NEEDLE_ISA {

// Lanes of a type: V for f32, else one number, so that a kernel is written once for all.
template <class T>
struct LanesOf {
  using type = T;
  static constexpr int width = 1;
};
template <>
struct LanesOf<float> {
  using type = V;
  static constexpr int width = V::N;
};
NEEDLE_INLINE double reduce_add(double a) { return a; }
NEEDLE_INLINE double reduce_max(double a) { return a; }

// f(i, n) for every vector of [0, size): n lanes from element i, fewer in the last call.
template <class T, class F>
NEEDLE_INLINE void for_lanes(int64_t size, const F& f) {
  constexpr int N = LanesOf<T>::width;
  int64_t i = 0;
  for (; i + N <= size; i += N) f(i, N);
  if (i < size) f(i, static_cast<int>(size - i));
}
template <class T>
NEEDLE_INLINE typename LanesOf<T>::type load_lanes(const T* p, int n) {
  if constexpr (LanesOf<T>::width > 1)
    return n == V::N ? V::load(p) : V::load_n(p, n);
  else
    return *p;
}
template <class T, class L>
NEEDLE_INLINE void store_lanes(T* p, L v, int n) {
  if constexpr (LanesOf<T>::width > 1)
    n == V::N ? v.store(p) : v.store_n(p, n);
  else
    *p = v;
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

// f(i) for every item, in tasks of neighbours.
template <class F>
NEEDLE_INLINE void parallel_each(const Exec* exec, int64_t items, int64_t work_per_item, const F& f) {
  parallel_ranges(exec, items, work_per_item, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) f(i);
  });
}

template <int N>
struct Loop : MergedLoop<N> {
  int64_t inner() const { return this->shape[this->rank - 1]; }
  int64_t outer() const {  // iterations of all but the innermost dimension
    int64_t n = 1;
    for (int d = 0; d < this->rank - 1; d++) n *= this->shape[d];
    return n;
  }
};

template <int N>
NEEDLE_INLINE Loop<N> loop_over(const View* const (&views)[N]) {
  Loop<N> l;
  add_dimensions(l, views);
  l.merge();
  return l;
}

// The dimension along which array k lies without gaps where it does not along the innermost one; -1 where there is
// none.
template <int N>
NEEDLE_INLINE int crossing(const Loop<N>& l, int k) {
  const int64_t* stride = l.stride[k];
  int d = l.rank - 1;
  if (stride[d] == 0 || stride[d] == 1) return -1;
  while (--d >= 0 && (stride[d] != 1 || l.shape[d] < 4)) {
  }
  return d;
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
    for (int d = rank - 1; d >= 0 && position; d--) {  // indices are zero
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
  // How many positions of the innermost row are left, and as many steps at once.
  int64_t left() const { return loop.shape[rank - 1] - index[rank - 1]; }
  void skip(int64_t n) {
    for (int k = 0; k < N; k++) at[k] += (n - 1) * loop.stride[k][rank - 1];
    index[rank - 1] += n - 1;
    next();
  }
};

// f(at, first, n) for pieces of the innermost rows of a loop, at most `most` elements of `work` each: n elements from
// element `first` of the row that begins at `at`.
template <int N, class F>
NEEDLE_INLINE void for_runs(const Exec* exec, const Loop<N>& loop, int64_t most, int64_t work, const F& f) {
  const int64_t n = loop.inner(), piece = smaller(n, most), pieces = ceil_div(n, larger(1, piece));
  // Not inlined, or it would be there twice: for one thread and for several.
  const auto walk = [&](int64_t begin, int64_t end) __attribute__((noinline)) {
    auto o = Odometer<N>::start(loop, loop.rank - 1, begin / pieces);
    int64_t part = begin % pieces;
    for (int64_t i = begin; i < end; i++) {
      f(o.at, part * piece, smaller(piece, n - part * piece));
      if (++part == pieces) o.next(), part = 0;
    }
  };
  parallel_ranges(exec, loop.outer() * pieces, piece * work, walk);
}

// `for_runs` whose pieces are worth a task, cut at multiples of `unit`, so that threads share a single long row.
template <int N, class F>
NEEDLE_INLINE void for_pieces(const Exec* exec, const Loop<N>& loop, int64_t unit, const F& f) {
  for_runs(exec, loop, ceil_div(grain(exec, loop.inner() * loop.outer(), 1), unit) * unit, 1, f);
}

// f(b, row, column, rows, columns) for tiles of matrices that stay in cache: pieces of long rows, several short ones.
template <class F>
NEEDLE_INLINE void for_tiles(const Exec* exec, int64_t matrices, int64_t rows, int64_t columns, int64_t work,
                             const F& f) {
  constexpr int64_t kMost = 1024;  // elements
  const int64_t width = larger(1, smaller(columns, kMost)), height = larger(1, smaller(rows, kMost / width));
  const int64_t down = ceil_div(rows, height), across = ceil_div(columns, width);
  parallel_each(exec, matrices * down * across, height * width * work, [&](int64_t t) {
    const int64_t row = t / across % down * height, column = t % across * width;
    f(t / across / down, row, column, smaller(height, rows - row), smaller(width, columns - column));
  });
}
// f(row, column) for every element of a tile; along columns where rows are too short to be worth a loop.
template <class F>
NEEDLE_INLINE void for_each_of(int64_t rows, int64_t columns, const F& f) {
  if (columns < 16)
    for (int64_t i = 0; i < columns; i++)
      for (int64_t r = 0; r < rows; r++) f(r, i);
  else
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < columns; i++) f(r, i);
}

// Element i of a vector of whole numbers, of the dtypes that a row lists.
template <const char* letters>
NEEDLE_INLINE int64_t number_at(const View& v, int64_t i) {
  int64_t number;
  with_type<letters>(v.dtype, [&](auto t) { number = v.as<decltype(t)>()[i * v.stride[0]]; });
  return number;
}

}  // namespace needle::NEEDLE_ISA
