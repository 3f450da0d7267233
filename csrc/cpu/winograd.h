// Winograd's minimal filtering F(m x m, 3 x 3) (Lavin and Gray, arXiv 1509.09308): its transforms in one dimension.
#pragma once
#include <cstring>

#include "cpu/tile.h"

namespace needle::NEEDLE_ISA {

// Filters are transformed in double precision: 16 lanes take four vectors of two, four or eight.
typedef double Double __attribute__((vector_size(4 * V::N)));
typedef float HalfVector __attribute__((vector_size(2 * V::N)));
constexpr int kDoubles = V::N / 2;

// Points 0, 1, -1, inf: fewer additions than a direct sum, hence the more accurate one.
struct Winograd2 {
  static constexpr int kOut = 2, kIn = 4;

  NEEDLE_INLINE void filter(const Double* g, Double* o) {
    const Double even = .5 * g[0], odd = .5 * g[1], last = .5 * g[2];
    o[0] = g[0];
    o[1] = even + odd + last;
    o[2] = even - odd + last;
    o[3] = g[2];
  }
  NEEDLE_INLINE void input(const V* d, V* o) {
    o[0] = d[0] - d[2];
    o[1] = d[1] + d[2];
    o[2] = d[2] - d[1];
    o[3] = d[3] - d[1];
  }
  NEEDLE_INLINE void output(const V* m, V* o) {
    o[0] = m[0] + (m[1] + m[2]);
    o[1] = m[3] + (m[1] - m[2]);
  }
};

// Points 0, +-a, +-b, inf with a = 3/4, b = 3/2: every input coefficient is exact, and the error half of that of the
// usual 0, +-1, +-2.
struct Winograd4 {
  static constexpr int kOut = 4, kIn = 6;
  static constexpr double a = .75, b = 1.5, fa = 1 / (2 * a * a * (a * a - b * b)),
                          fb = 1 / (2 * b * b * (b * b - a * a));

  NEEDLE_INLINE void filter(const Double* g, Double* o) {
    const Double even_a = fa * g[0], odd_a = fa * a * g[1], last_a = fa * a * a * g[2];
    const Double even_b = fb * g[0], odd_b = fb * b * g[1], last_b = fb * b * b * g[2];
    o[0] = 1 / (a * a * b * b) * g[0];
    o[1] = even_a + odd_a + last_a;
    o[2] = even_a - odd_a + last_a;
    o[3] = even_b + odd_b + last_b;
    o[4] = even_b - odd_b + last_b;
    o[5] = g[2];
  }
  NEEDLE_INLINE void input(const V* d, V* o) {
    const V sum(static_cast<float>(a * a + b * b)), product(static_cast<float>(a * a * b * b));
    const V va(static_cast<float>(a)), vb(static_cast<float>(b)), aa(static_cast<float>(a * a)),
        bb(static_cast<float>(b * b));
    const V even_a = fnma(bb, d[2], d[4]), odd_a = fnma(bb, d[1], d[3]);
    const V even_b = fnma(aa, d[2], d[4]), odd_b = fnma(aa, d[1], d[3]);
    o[0] = fma(product, d[0], fnma(sum, d[2], d[4]));
    o[1] = fma(va, odd_a, even_a);
    o[2] = fnma(va, odd_a, even_a);
    o[3] = fma(vb, odd_b, even_b);
    o[4] = fnma(vb, odd_b, even_b);
    o[5] = fma(product, d[1], fnma(sum, d[3], d[5]));
  }
  NEEDLE_INLINE void output(const V* m, V* o) {
    const V va(static_cast<float>(a)), vb(static_cast<float>(b)), aa(static_cast<float>(a * a)),
        bb(static_cast<float>(b * b));
    const V aaa(static_cast<float>(a * a * a)), bbb(static_cast<float>(b * b * b));
    const V even_a = m[1] + m[2], odd_a = m[1] - m[2], even_b = m[3] + m[4], odd_b = m[3] - m[4];
    o[0] = m[0] + (even_a + even_b);
    o[1] = fma(vb, odd_b, va * odd_a);
    o[2] = fma(bb, even_b, aa * even_a);
    o[3] = fma(bbb, odd_b, fma(aaa, odd_a, m[5]));
  }
};

// A transform along columns, then along rows: f makes M vectors of A. store(y, x, value) for y < rows, x < columns.
template <void (*f)(const V*, V*), int A, int M, class Load, class Store>
NEEDLE_INLINE void both_ways(int rows, int columns, const Load& load, const Store& store) {
  V half[M][A];
#pragma GCC unroll 6
  for (int x = 0; x < A; x++) {
    V column[A], o[M];
#pragma GCC unroll 6
    for (int y = 0; y < A; y++) column[y] = load(y, x);
    f(column, o);
#pragma GCC unroll 6
    for (int y = 0; y < M; y++) half[y][x] = o[y];
  }
#pragma GCC unroll 6
  for (int y = 0; y < M; y++) {
    if (y >= rows) break;
    V o[M];
    f(half[y], o);
#pragma GCC unroll 6
    for (int x = 0; x < M; x++) {
      if (x >= columns) break;
      store(y, x, o[x]);
    }
  }
}

// Filters of 16 outputs for one input, [tap][16], results `u_xi` apart.
template <class F>
NEEDLE_INLINE void winograd_filter(const float* g, float* u, int64_t u_xi) {
  constexpr int A = F::kIn;
  for (int lane = 0; lane < kBlock; lane += kDoubles) {
    Double half[A][3];
#pragma GCC unroll 3
    for (int x = 0; x < 3; x++) {
      Double column[3], o[A];
#pragma GCC unroll 3
      for (int y = 0; y < 3; y++) {
        HalfVector v;
        std::memcpy(&v, g + (y * 3 + x) * kBlock + lane, sizeof v);
        column[y] = __builtin_convertvector(v, Double);
      }
      F::filter(column, o);
#pragma GCC unroll 6
      for (int y = 0; y < A; y++) half[y][x] = o[y];
    }
#pragma GCC unroll 6
    for (int y = 0; y < A; y++) {
      Double o[A];
      F::filter(half[y], o);
#pragma GCC unroll 6
      for (int x = 0; x < A; x++) {
        const HalfVector v = __builtin_convertvector(o[x], HalfVector);
        std::memcpy(u + (y * A + x) * u_xi + lane, &v, sizeof v);
      }
    }
  }
}

// d: kIn x kIn blocks of 16 channels, rows `d_row` apart; results `v_xi` apart.
template <class F>
NEEDLE_INLINE void winograd_input(const float* d, int64_t d_row, float* v, int64_t v_xi) {
  constexpr int A = F::kIn;
  for (int lane = 0; lane < kBlock; lane += V::N)
    both_ways<F::input, A, A>(
        A, A, [&](int y, int x) { return V::load(d + y * d_row + x * kBlock + lane); },
        [&](int y, int x, V value) { value.store(v + (y * A + x) * v_xi + lane); });
}

// kOut x kOut pixels from kIn x kIn products `m_xi` apart, given to `store(y, x, lane, value)` where y < rows, x <
// cols.
template <class F, class Store>
NEEDLE_INLINE void winograd_output(const float* m, int64_t m_xi, int rows, int cols, const Store& store) {
  constexpr int A = F::kIn;
  for (int lane = 0; lane < kBlock; lane += V::N)
    both_ways<F::output, A, F::kOut>(
        rows, cols, [&](int y, int x) { return V::load(m + (y * A + x) * m_xi + lane); },
        [&](int y, int x, V value) { store(y, x, lane, value); });
}

}  // namespace needle::NEEDLE_ISA
