// Sums and maxima of rows, in lanes of f32 or f64. Sums of more than kSection terms are kept in double.
#pragma once
#include "cpu/strided.h"

namespace needle::NEEDLE_ISA {

constexpr int64_t kSection = 1024;

template <class T>
NEEDLE_INLINE T row_max(const T* x, int64_t n) {
  using L = typename LanesOf<T>::type;
  constexpr int N = LanesOf<T>::width;
  T top = static_cast<T>(-HUGE_VAL);
  int64_t i = 0;
  if (n >= N) {
    L v = load_lanes(x, N);
    for (i = N; i + N <= n; i += N) v = max(v, load_lanes(x + i, N));
    top = reduce_max(v);
  }
  for (; i < n; i++) top = x[i] > top ? x[i] : top;
  return top;
}

// Sum over a row of f(i, n) -> lanes, of which those beyond n are left out.
template <class T, class F>
NEEDLE_INLINE double row_sum(int64_t size, const F& f) {
  using L = typename LanesOf<T>::type;
  double total = 0;
  for (int64_t first = 0; first < size; first += kSection) {
    L sum(T(0));
    T rest[LanesOf<T>::width];
    int tail = 0;
    for_lanes<T>(smaller(kSection, size - first), [&](int64_t i, int n) {
      L v = f(first + i, n);
      if (n == LanesOf<T>::width)
        sum = sum + v;
      else
        store_lanes(rest, v, LanesOf<T>::width), tail = n;
    });
    T last = 0;
    for (int i = 0; i < tail; i++) last += rest[i];
    total += static_cast<double>(reduce_add(sum)) + static_cast<double>(last);
  }
  return total;
}

}  // namespace needle::NEEDLE_ISA
