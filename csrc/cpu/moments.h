// Means and variances of rows, in lanes of f32 or f64.
#pragma once
#include "cpu/strided.h"

namespace needle::NEEDLE_ISA {

constexpr int64_t kMomentSection = 512;  // terms that are summed in the array's own type; sections are added in double
constexpr int kChains = 4;               // of sums, which hide the latency of an addition

// Adds to totals[0..SUMS) the sums of f(row, i, n, sums) over all rows; f adds its lanes to sums, lanes beyond n being
// zero.
template <class T, int SUMS, class F>
NEEDLE_INLINE void add_rows(double* totals, int64_t rows, int64_t size, const F& f) {
  using L = typename LanesOf<T>::type;
  constexpr int N = LanesOf<T>::width;
  const int64_t together = larger(1, kMomentSection / larger(1, size));  // rows of one section
  for (int64_t row = 0; row < rows; row += together)
    for (int64_t first = 0; first < size; first += kMomentSection) {
      const int64_t end = smaller(size, first + kMomentSection);
      L sums[kChains][SUMS];
      for (auto& chain : sums)
        for (L& s : chain) s = L(T(0));
      for (int64_t r = row; r < smaller(rows, row + together); r++) {
        int64_t i = first;
        for (; i + kChains * N <= end; i += kChains * N)
          for (int j = 0; j < kChains; j++) f(r, i + j * N, N, sums[j]);
        for_lanes<T>(end - i, [&](int64_t at, int n) { f(r, i + at, n, sums[0]); });
      }
      for (int k = 0; k < SUMS; k++)
        totals[k] += static_cast<double>(reduce_add((sums[0][k] + sums[1][k]) + (sums[2][k] + sums[3][k])));
    }
}

// v with zeros in the lanes beyond n: by comparison, since what was just stored is slow to load in part.
constexpr float kLanes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
NEEDLE_INLINE V first_lanes(V v, int n) { return select(lt(V::load(kLanes), V(static_cast<float>(n))), v, V(0.f)); }

// Lanes of x - mean, those beyond n zero.
template <class T, class L>
NEEDLE_INLINE L centred(const T* p, int n, L mean) {
  const L v = load_lanes(p, n) - mean;
  if constexpr (LanesOf<T>::width > 1)
    if (n < V::N) return first_lanes(v, n);
  return v;
}

// Mean and biased variance from the sum of the values, and from those of their distances from `centre` and the squares
// of these: E(x^2) - E(x)^2 would cancel. The second pass corrects the mean, so that equal numbers have theirs exactly:
// a norm divides what is left of them by the root of eps alone.
NEEDLE_INLINE void finish(double count, double total, double centre, double off, double squares, double* mean,
                          double* var) {
  off /= count;
  *mean = off == off ? centre + off : total / count;
  *var = max(0.0, squares / count - off * off);  // in this order not a number stays none
}

template <class T, class F>
NEEDLE_INLINE void statistics(int64_t rows, int64_t size, const F& row, double* mean, double* var) {
  using L = typename LanesOf<T>::type;
  double count = static_cast<double>(rows * size), total = 0, sums[2] = {0, 0};
  add_rows<T, 1>(&total, rows, size,
                 [&](int64_t r, int64_t i, int n, L* s) { s[0] = s[0] + load_lanes(row(r) + i, n); });
  const T centre = static_cast<T>(total / count);
  add_rows<T, 2>(sums, rows, size, [&](int64_t r, int64_t i, int n, L* s) {
    L d = centred(row(r) + i, n, L(centre));
    s[0] = s[0] + d;
    s[1] = fma(d, d, s[1]);
  });
  finish(count, total, static_cast<double>(centre), sums[0], sums[1], mean, var);
}

}  // namespace needle::NEEDLE_ISA
