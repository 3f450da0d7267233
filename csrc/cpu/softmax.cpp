// Softmax and its relatives over the rows of (M, D) views, whose rows are contiguous. Sums of more than kSection terms
// are kept in double.
#include "cpu/strided.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kSection = 1024;

template <class T>
T row_max(const T* x, int64_t n) {
  using L = typename LanesOf<T>::type;
  constexpr int N = LanesOf<T>::width;
  T top = static_cast<T>(-HUGE_VAL);
  int64_t i = 0;
  if (n >= N) {
    L v = load(x);
    for (i = N; i + N <= n; i += N) v = max(v, load(x + i));
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
    for_lanes<T>(minimum_of(kSection, size - first), [&](int64_t i, int n) {
      L v = f(first + i, n);
      if (n == LanesOf<T>::width)
        sum = sum + v;
      else
        store(rest, v), tail = n;
    });
    T last = 0;
    for (int i = 0; i < tail; i++) last += rest[i];
    total += static_cast<double>(reduce_add(sum)) + static_cast<double>(last);
  }
  return total;
}

// f(T{}, row) for every row.
template <class F>
NEEDLE_INLINE void for_each_row(const Call& c, int64_t work_per_element, const F& f) {
  const View& x = c.in[0];
  if (x.shape[1] == 0) return;
  auto run = [&](auto t) {
    parallel_ranges(c.exec, x.shape[0], work_per_element * x.shape[1], [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) f(t, r);
    });
  };
  x.dtype == DType::f32 ? run(float{}) : run(double{});
}

template <class T>
NEEDLE_INLINE T* row_of(const View& v, int64_t r) {
  return v.as<T>() + r * v.stride[0];
}

}  // namespace

void softmax(const Call& c) {
  int64_t d = c.in[0].shape[1];
  for_each_row(c, 4, [&](auto t, int64_t r) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    const T* x = row_of<T>(c.in[0], r);
    T* y = row_of<T>(c.out[0], r);
    L top = row_max(x, d);
    double sum = row_sum<T>(d, [&](int64_t i, int n) {
      L e = exp(load_lanes(x + i, n) - top);
      store_lanes(y + i, e, n);
      return e;
    });
    L scale(static_cast<T>(1 / sum));
    for_lanes<T>(d, [&](int64_t i, int n) { store_lanes(y + i, load_lanes(y + i, n) * scale, n); });
  });
}

void log_softmax(const Call& c) {
  int64_t d = c.in[0].shape[1];
  for_each_row(c, 4, [&](auto t, int64_t r) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    const T* x = row_of<T>(c.in[0], r);
    T* y = row_of<T>(c.out[0], r);
    L top = row_max(x, d);
    L shift(static_cast<T>(::log(row_sum<T>(d, [&](int64_t i, int n) { return exp(load_lanes(x + i, n) - top); }))));
    for_lanes<T>(d, [&](int64_t i, int n) { store_lanes(y + i, load_lanes(x + i, n) - top - shift, n); });
  });
}

void logsumexp(const Call& c) {
  int64_t d = c.in[0].shape[1];
  for_each_row(c, 4, [&](auto t, int64_t r) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    const T* x = row_of<T>(c.in[0], r);
    T top = row_max(x, d);
    if (top - top != 0) top = 0;  // infinite: the sum itself is 0 or infinite
    double sum = row_sum<T>(d, [&](int64_t i, int n) { return exp(load_lanes(x + i, n) - L(top)); });
    *row_of<T>(c.out[0], r) = static_cast<T>(top + ::log(sum));
  });
}

void softmax_grad(const Call& c) {
  int64_t d = c.in[0].shape[1];
  for_each_row(c, 2, [&](auto t, int64_t r) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    const T *y = row_of<T>(c.in[0], r), *dy = row_of<T>(c.in[1], r);
    T* dx = row_of<T>(c.out[0], r);
    L dot(
        static_cast<T>(row_sum<T>(d, [&](int64_t i, int n) { return load_lanes(y + i, n) * load_lanes(dy + i, n); })));
    for_lanes<T>(
        d, [&](int64_t i, int n) { store_lanes(dx + i, load_lanes(y + i, n) * (load_lanes(dy + i, n) - dot), n); });
  });
}

void log_softmax_grad(const Call& c) {
  int64_t d = c.in[0].shape[1];
  for_each_row(c, 4, [&](auto t, int64_t r) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    const T *y = row_of<T>(c.in[0], r), *dy = row_of<T>(c.in[1], r);
    T* dx = row_of<T>(c.out[0], r);
    L sum(static_cast<T>(row_sum<T>(d, [&](int64_t i, int n) { return load_lanes(dy + i, n); })));
    for_lanes<T>(
        d, [&](int64_t i, int n) { store_lanes(dx + i, load_lanes(dy + i, n) - exp(load_lanes(y + i, n)) * sum, n); });
  });
}

}  // namespace needle::NEEDLE_ISA
