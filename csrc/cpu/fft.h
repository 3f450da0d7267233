// Stages of discrete Fourier transforms on vectors whose lanes are rows, or columns of one row; transposes and pairs.
#pragma once
#include <utility>

#include "cpu/transpose.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kDirect = 4096;  // longest transform whose every element is a vector; needle/ops/fourier/table.py

template <class T>
struct PackOf {
  typedef T type __attribute__((vector_size(sizeof(V))));
};
template <class T>
using Pack = typename PackOf<T>::type;
template <class T>
constexpr int kLanes = sizeof(V) / sizeof(T);

// The parts of a table, each real parts and then imaginary ones.
template <class T>
struct Table {
  int64_t n, core, m, m1, m2;  // core: n, or half of it for real values; m: what stages run, core unless `chirped`
  bool chirped, halved;
  const T *direct, *rows, *columns, *twist, *chirp, *filter, *half;

  NEEDLE_INLINE Table of(const T* p, int64_t n, int64_t core, int64_t m, int64_t m1) {
    const auto part = [&](int64_t count, bool there) {
      const T* here = p;
      p += there ? 2 * count : 0;
      return here;
    };
    const bool split = m1 > 1, chirped = m != core, halved = n != core;
    return {n,
            core,
            m,
            m1,
            m / m1,
            chirped,
            halved,  // which are made in this order
            part(m, m <= kDirect),
            part(m1, split),
            part(m / m1, split),
            part(m, split),
            part(core, chirped),
            part(m, chirped),
            part(core + 1, halved)};
  }
};

// -- stages ----------------------------------------------------------------------------------------------------------

// R numbers a + ib transformed in place; c and s: cosine and sine of 2 pi k / R for k to R / 2, of odd R.
template <int R, class E, class T>
NEEDLE_INLINE void butterfly(E* a, E* b, const T* c, const T* s) {
  if constexpr (R == 2) {
    const E x = a[0], y = b[0];
    a[0] = x + a[1], b[0] = y + b[1];
    a[1] = x - a[1], b[1] = y - b[1];
  } else if constexpr (R == 4) {
    const E p = a[0] + a[2], q = b[0] + b[2], r = a[0] - a[2], t = b[0] - b[2];
    const E u = a[1] + a[3], v = b[1] + b[3], w = a[1] - a[3], x = b[1] - b[3];
    a[0] = p + u, b[0] = q + v;
    a[1] = r + x, b[1] = t - w;
    a[2] = p - u, b[2] = q - v;
    a[3] = r - x, b[3] = t + w;
  } else {
    constexpr int H = R / 2;
    E ta[H + 1], tb[H + 1], ua[H + 1], ub[H + 1];
    const E x = a[0], y = b[0];
#pragma GCC unroll 8
    for (int k = 1; k <= H; k++) {
      ta[k] = a[k] + a[R - k], tb[k] = b[k] + b[R - k];
      ua[k] = a[k] - a[R - k], ub[k] = b[k] - b[R - k];
      a[0] = a[0] + ta[k], b[0] = b[0] + tb[k];
    }
#pragma GCC unroll 8
    for (int j = 1; j <= H; j++) {
      E p = x, q = y, u = E{}, v = E{};
#pragma GCC unroll 8
      for (int k = 1; k <= H; k++) {
        const int at = j * k % R, place = at > H ? R - at : at;
        const T cosine = c[place], sine = at > H ? -s[place] : s[place];
        p += ta[k] * cosine, q += tb[k] * cosine;
        u += ub[k] * sine, v += ua[k] * sine;
      }
      a[j] = p + u, b[j] = q - v;
      a[R - j] = p - u, b[R - j] = q + v;
    }
  }
}

// Numbers as they lie in memory: `get` and `set` number k.
template <class E>
struct Plain {
  E *re, *im;
  NEEDLE_ALWAYS void get(int64_t k, E& a, E& b) const { a = re[k], b = im[k]; }
  NEEDLE_ALWAYS void set(int64_t k, E a, E b) const { re[k] = a, im[k] = b; }
};

// Columns `first` to first + n of a row seen as numbers of `width` columns.
template <class T, class Pointer>
struct Columns {
  using E = Pack<T>;
  Pointer re, im;
  int64_t width, first, n;
  T scale;
  NEEDLE_ALWAYS void get(int64_t k, E& a, E& b) const {
    const auto *r = re + k * width + first, *i = im + k * width + first;
    if (n == kLanes<T>) {
      std::memcpy(&a, r, sizeof a), std::memcpy(&b, i, sizeof b);
    } else {
      a = E{}, b = E{};
      for (int l = 0; l < n; l++) a[l] = r[l], b[l] = i[l];
    }
  }
  NEEDLE_ALWAYS void set(int64_t k, E a, E b) const {
    auto *r = re + k * width + first, *i = im + k * width + first;
    a = a * scale, b = b * scale;
    if (n == kLanes<T>)
      std::memcpy(r, &a, sizeof a), std::memcpy(i, &b, sizeof b);
    else
      for (int l = 0; l < n; l++) r[l] = a[l], i[l] = b[l];
  }
};

// Numbers that are multiplied by others on their way to memory.
template <class T>
struct Twisted {
  using E = Pack<T>;
  E *re, *im;
  Columns<T, const T*> by;
  NEEDLE_ALWAYS void set(int64_t k, E a, E b) const {
    E u, v;
    by.get(k, u, v);
    re[k] = a * u - b * v, im[k] = a * v + b * u;
  }
};

// One stage of radix R: `step` results of earlier stages lie side by side, `left` numbers of this one apart.
template <int R, bool last, class E, class T, class From, class To>
void stage(const From& from, const To& to, int64_t step, int64_t left, const T* w) {
  const int64_t m = R * left * step;
  T c[R / 2 + 1], s[R / 2 + 1];
  for (int k = 0; k <= R / 2; k++) c[k] = w[k * (m / R)], s[k] = -w[m + k * (m / R)];
  for (int64_t p = 0; p < left; p++) {
    T ur[R], ui[R];
    for (int k = 1; k < R; k++) ur[k] = w[p * k * step], ui[k] = w[m + p * k * step];
    for (int64_t q = 0; q < step; q++) {
      E a[R], b[R];
#pragma GCC unroll 16
      for (int k = 0; k < R; k++) from.get(q + step * (p + left * k), a[k], b[k]);
      butterfly<R>(a, b, c, s);
      to.set(q + step * R * p, a[0], b[0]);
#pragma GCC unroll 16
      for (int k = 1; k < R; k++) {
        const E x = last ? a[k] : a[k] * ur[k] - b[k] * ui[k], y = last ? b[k] : a[k] * ui[k] + b[k] * ur[k];
        to.set(q + step * (R * p + k), x, y);
      }
    }
  }
}

// f with the radix of the next stage of `left` numbers.
template <class F>
NEEDLE_INLINE void with_radix(int64_t left, const F& f) {
  if (left % 4 == 0) return f(std::integral_constant<int, 4>{});
  if (left % 2 == 0) return f(std::integral_constant<int, 2>{});
  if (left % 3 == 0) return f(std::integral_constant<int, 3>{});
  if (left % 5 == 0) return f(std::integral_constant<int, 5>{});
  if (left % 7 == 0) return f(std::integral_constant<int, 7>{});
  if (left % 11 == 0) return f(std::integral_constant<int, 11>{});
  return f(std::integral_constant<int, 13>{});
}

// All stages of a length from one place to another, with x and y for what is between.
template <class E, class T, class From, class To>
void stages(const From& from, const To& to, Plain<E> x, Plain<E> y, int64_t m, const T* w) {
  if (m == 1) {
    E a, b;
    from.get(0, a, b);
    return to.set(0, a, b);
  }
  int64_t step = 1, left = m;
  while (left > 1) {
    with_radix(left, [&](auto radix) {
      constexpr int R = decltype(radix)::value;
      left /= R;
      if (step == 1 && left == 1)
        stage<R, true, E>(from, to, step, left, w);
      else if (step == 1)
        stage<R, false, E>(from, y, step, left, w);
      else if (left == 1)
        stage<R, true, E>(x, to, step, left, w);
      else
        stage<R, false, E>(x, y, step, left, w);
      step *= R;
    });
    const Plain<E> other = x;
    x = y, y = other;
  }
}

// The same in place: the result is in x, and y is for work.
template <class E, class T>
void stages_between(E*& xr, E*& xi, E*& yr, E*& yi, int64_t m, const T* w) {
  int64_t step = 1, left = m;
  while (left > 1) {
    with_radix(left, [&](auto radix) {
      constexpr int R = decltype(radix)::value;
      left /= R;
      const Plain<E> x{xr, xi}, y{yr, yi};
      left == 1 ? stage<R, true, E>(x, y, step, left, w) : stage<R, false, E>(x, y, step, left, w);
      step *= R;
    });
    E *r = xr, *i = xi;
    xr = yr, xi = yi, yr = r, yi = i;
  }
}

// -- transposes ------------------------------------------------------------------------------------------------------

template <int H, bool upper, class E, size_t... I>
NEEDLE_INLINE E exchanged(E a, E b, std::index_sequence<I...>) {
  constexpr int L = sizeof...(I);
  return __builtin_shufflevector(a, b, ((I & H) ? int(L + I) - (upper ? 0 : H) : int(I) + (upper ? H : 0))...);
}

template <int H, class T>
NEEDLE_INLINE void exchange(Pack<T>* v) {
  constexpr auto lanes = std::make_index_sequence<kLanes<T>>{};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<T>; i++)
    if (!(i & H)) {
      const Pack<T> a = v[i], b = v[i + H];
      v[i] = exchanged<H, false>(a, b, lanes), v[i + H] = exchanged<H, true>(a, b, lanes);
    }
  if constexpr (H > 1) exchange<H / 2, T>(v);
}

// out[j * out_stride + i] = in[i * in_stride + j], i < m, j < n, in tiles of as many rows as a vector has lanes.
template <class T>
void turn(T* out, int64_t out_stride, const T* in, int64_t in_stride, int64_t m, int64_t n) {
  constexpr int L = kLanes<T>;
  const int64_t rows = m / L * L, columns = n / L * L;
  for (int64_t i = 0; i < rows; i += L)
    for (int64_t j = 0; j < columns; j += L) {
      Pack<T> v[L];
#pragma GCC unroll 16
      for (int k = 0; k < L; k++) std::memcpy(v + k, in + (i + k) * in_stride + j, sizeof v[k]);
      exchange<L / 2, T>(v);
#pragma GCC unroll 16
      for (int k = 0; k < L; k++) std::memcpy(out + (j + k) * out_stride + i, v + k, sizeof v[k]);
    }
  if (rows < m) transpose(out + rows, out_stride, in + rows * in_stride, in_stride, m - rows, columns);
  if (columns < n) transpose(out + columns * out_stride, out_stride, in + columns, in_stride, m, n - columns);
}

// A contiguous row seen as (m1, m2): columns, factors, a transpose and columns again, from `in` by y to x, which may be
// `in`. over(tasks, f): in turn or in threads.
template <class T, class Over>
void row(const T* in_re, const T* in_im, T* xr, T* xi, T* yr, T* yi, T scale, const Table<T>& t, const Exec* exec,
         const Over& over) {
  using E = Pack<T>;
  constexpr int64_t L = kLanes<T>;
  const int64_t longer = larger(t.m1, t.m2);
  const auto part = [&](int64_t block, int64_t width) { return smaller(L, width - block * L); };
  const auto memory = [&](Plain<E>* made) {
    E* p = scratch<E>(exec, 0, 4 * longer);
    made[0] = {p, p + longer}, made[1] = {p + 2 * longer, p + 3 * longer};
  };
  over(ceil_div(t.m2, L), [&](int64_t block) {
    Plain<E> a[2];
    memory(a);
    const int64_t first = block * L, n = part(block, t.m2);
    const Columns<T, const T*> from{in_re, in_im, t.m2, first, n, T(1)};
    const Columns<T, const T*> factors{t.twist, t.twist + t.m, t.m2, first, n, T(1)};
    stages(from, Twisted<T>{a[0].re, a[0].im, factors}, a[0], a[1], t.m1, t.rows);  // the last one may be in place
    turn(yr + first * t.m1, t.m1, reinterpret_cast<const T*>(a[0].re), L, t.m1, n);
    turn(yi + first * t.m1, t.m1, reinterpret_cast<const T*>(a[0].im), L, t.m1, n);
  });
  over(ceil_div(t.m1, L), [&](int64_t block) {
    Plain<E> a[2];
    memory(a);
    const int64_t first = block * L, n = part(block, t.m1);
    const Columns<T, const T*> from{yr, yi, t.m1, first, n, T(1)};
    stages(from, Columns<T, T*>{xr, xi, t.m1, first, n, scale}, a[0], a[1], t.m2, t.columns);
  });
}

// -- vectors of a row ------------------------------------------------------------------------------------------------

template <class T>
NEEDLE_INLINE Pack<T> load_pack(const T* p) {
  Pack<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
NEEDLE_INLINE void store_pack(T* p, Pack<T> v) {
  std::memcpy(p, &v, sizeof v);
}
template <int first, int step, class E, size_t... I>
NEEDLE_INLINE E picked(E a, E b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (first + step * int(I))...);
}
template <class T>
constexpr auto kEach = std::make_index_sequence<kLanes<T>>{};
template <class T>
NEEDLE_INLINE Pack<T> reversed(Pack<T> v) {
  return picked<kLanes<T> - 1, -1>(v, v, kEach<T>);
}
template <bool upper, class E, size_t... I>
NEEDLE_INLINE E woven(E a, E b, std::index_sequence<I...>) {
  constexpr int L = sizeof...(I), from = upper ? L / 2 : 0;
  return __builtin_shufflevector(a, b, (from + int(I) / 2 + (I % 2 ? L : 0))...);
}

// Every second number from the first on, and from the second on, and back. E: T, or vectors of rows.
template <class E, class T>
void part_pairs(const E* x, E* even, E* odd, int64_t n, T) {
  int64_t k = 0;
  if constexpr (sizeof(E) == sizeof(T))
    for (constexpr int L = kLanes<T>; k + L <= n; k += L) {
      const Pack<T> a = load_pack(x + 2 * k), b = load_pack(x + 2 * k + L);
      store_pack<T>(even + k, picked<0, 2>(a, b, kEach<T>)), store_pack<T>(odd + k, picked<1, 2>(a, b, kEach<T>));
    }
  for (; k < n; k++) even[k] = x[2 * k], odd[k] = x[2 * k + 1];
}
template <class E, class T>
void join_pairs(E* x, const E* even, const E* odd, int64_t n, T) {
  int64_t k = 0;
  if constexpr (sizeof(E) == sizeof(T))
    for (constexpr int L = kLanes<T>; k + L <= n; k += L) {
      const Pack<T> a = load_pack(even + k), b = load_pack(odd + k);
      store_pack<T>(x + 2 * k, woven<false>(a, b, kEach<T>)), store_pack<T>(x + 2 * k + L, woven<true>(a, b, kEach<T>));
    }
  for (; k < n; k++) x[2 * k] = even[k], x[2 * k + 1] = odd[k];
}

// y_k = f(x_k, x_{n-k}, w_k) for k to `count`, which is at most n + 1, of complex numbers.
template <class E, class T, class F>
void with_mirrored(const E* xr, const E* xi, E* yr, E* yi, int64_t n, int64_t count, const T* w, const F& f) {
  int64_t k = 0;
  const T* wi = w + n + 1;
  if constexpr (sizeof(E) == sizeof(T))
    for (constexpr int L = kLanes<T>; k + L <= count; k += L) {
      const int64_t other = n - k - L + 1;
      Pack<T> re, im;
      f(load_pack(xr + k), load_pack(xi + k), reversed<T>(load_pack(xr + other)), reversed<T>(load_pack(xi + other)),
        load_pack(w + k), load_pack(wi + k), re, im);
      store_pack<T>(yr + k, re), store_pack<T>(yi + k, im);
    }
  for (; k < count; k++) f(xr[k], xi[k], xr[n - k], xi[n - k], w[k], wi[k], yr[k], yi[k]);
}

}  // namespace
}  // namespace needle::NEEDLE_ISA
