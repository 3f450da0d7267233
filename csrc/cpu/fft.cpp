// Discrete Fourier transforms along an axis, real and complex. Stockham's stages of radix 2 to 13 on vectors: a lane is
// a row of its own, or a column of one long row (Bailey's two passes with a transpose between them). Lengths with
// larger primes are Bluestein's convolutions (IEEE Trans. Audio 18, 1970). Inverse transforms swap real and imaginary
// parts.
#include <utility>

#include "cpu/transpose.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kDirect = 4096;   // longest transform whose every element is a vector; needle/ops/fourier/table.py
constexpr int64_t kShared = 16384;  // length from which threads share one row
enum Kind { kComplex, kMirrored, kHalf, kToReal };  // kMirrored: complex frequencies of real values

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

// A contiguous row seen as (m1, m2): columns, factors, a transpose and columns again, from `in` by y to x, which may be `in`.
// over(tasks, f): in turn or in threads.
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

// -- rows in and out -------------------------------------------------------------------------------------------------

// Rows side by side in lanes, or a single one where E is T: at[k] is where they begin in array k.
struct Rows {
  int64_t at[4][16];
  int lanes;

  bool even(int k) const {
    for (int l = 2; l < lanes; l++)
      if (at[k][l] - at[k][l - 1] != at[k][1] - at[k][0]) return false;
    return true;
  }
};

template <class E, class T>
void take(E* x, const T* p, const Rows& rows, int k, int64_t stride, int64_t count) {
  const int64_t* at = rows.at[k];
  if constexpr (sizeof(E) == sizeof(T)) {
    if (stride == 1) std::memcpy(x, p + at[0], count * sizeof(T));
    for (int64_t j = 0; j < count && stride != 1; j++) x[j] = p[at[0] + j * stride];
  } else {
    constexpr int L = kLanes<T>;
    T* to = reinterpret_cast<T*>(x);
    const bool even = rows.even(k);
    if (rows.lanes < L) std::memset(to, 0, count * sizeof(E));
    if (even && rows.lanes == L && at[1] - at[0] == 1)
      for (int64_t j = 0; j < count; j++) std::memcpy(to + j * L, p + at[0] + j * stride, sizeof(E));
    else if (even && stride == 1)
      turn(to, L, p + at[0], rows.lanes > 1 ? at[1] - at[0] : 0, rows.lanes, count);
    else
      for (int64_t j = 0; j < count; j++)
        for (int l = 0; l < rows.lanes; l++) to[j * L + l] = p[at[l] + j * stride];
  }
}

// The first n numbers of rows, zeros beyond `count`: where they lie, or in x.
template <class E, class T>
const E* seen(E* x, const T* p, const Rows& rows, int k, int64_t stride, int64_t count, int64_t n) {
  if constexpr (sizeof(E) == sizeof(T))
    if (stride == 1 && count == n) return p + rows.at[k][0];
  take(x, p, rows, k, stride, count);
  for (int64_t j = count; j < n; j++) x[j] = E{};
  return x;
}

// Where results of rows are to be written before `put`: to their place, or to x.
template <class E, class T>
E* place(E* x, T* p, const Rows& rows, int k, int64_t stride, int64_t count, int64_t size) {
  if constexpr (sizeof(E) == sizeof(T))
    if (stride == 1 && size >= count) return p + rows.at[k][0];
  return x;
}

// `count` numbers times `scale` to rows of `size`, zeros behind them.
template <class E, class T>
void put(E* x, T* p, const Rows& rows, int k, int64_t stride, int64_t count, int64_t size, T scale) {
  const int64_t* at = rows.at[k];
  if (scale != 1)
    for (int64_t j = 0; j < count; j++) x[j] = x[j] * scale;
  if constexpr (sizeof(E) == sizeof(T)) {
    if (stride == 1 && x != p + at[0]) std::memcpy(p + at[0], x, count * sizeof(T));
    for (int64_t j = 0; j < count && stride != 1; j++) p[at[0] + j * stride] = x[j];
  } else {
    constexpr int L = kLanes<T>;
    const T* from = reinterpret_cast<const T*>(x);
    const bool even = rows.even(k);
    if (even && rows.lanes == L && at[1] - at[0] == 1)
      for (int64_t j = 0; j < count; j++) std::memcpy(p + at[0] + j * stride, from + j * L, sizeof(E));
    else if (even && stride == 1)
      turn(p + at[0], rows.lanes > 1 ? at[1] - at[0] : 0, from, L, count, rows.lanes);
    else
      for (int64_t j = 0; j < count; j++)
        for (int l = 0; l < rows.lanes; l++) p[at[l] + j * stride] = from[j * L + l];
  }
  for (int64_t j = count; j < size; j++)
    for (int l = 0; l < rows.lanes; l++) p[at[l] + j * stride] = 0;
}

// -- transforms ------------------------------------------------------------------------------------------------------

// The complex transform of table.core numbers from x to x; `run`: one of table.m.
template <class E, class T, class Run>
void complex_transform(E*& xr, E*& xi, E*& yr, E*& yi, const Table<T>& t, const Run& run) {
  if (!t.chirped) return run(xr, xi, yr, yi);
  const auto times = [&](const T* w, int64_t n) {
    for (int64_t k = 0; k < n; k++) {
      const E a = xr[k], b = xi[k];
      xr[k] = a * w[k] - b * w[n + k], xi[k] = a * w[n + k] + b * w[k];
    }
  };
  times(t.chirp, t.core);
  for (int64_t k = t.core; k < t.m; k++) xr[k] = E{}, xi[k] = E{};
  run(xr, xi, yr, yi);
  times(t.filter, t.m);
  run(xi, xr, yi, yr);
  times(t.chirp, t.core);
}

template <class T>
struct Operands {
  const T *re, *im;
  T *yr, *yi;
  int64_t stride[4], in_size, out_size;  // along the axis
  Kind kind;
  bool inverse;
  T scale, inner;
};

template <class E, class T, class Run>
void transform(E* xr, E* xi, E* yr, E* yi, const Operands<T>& o, const Rows& rows, const Table<T>& t, const Run& run) {
  const int64_t n = t.n, core = t.core, h = n / 2 + 1, ends = (n + 1) / 2;  // inner frequencies are 1 ... ends - 1
  const auto clear = [](E* x, int64_t from, int64_t to) {
    for (int64_t k = from; k < to; k++) x[k] = E{};
  };
  const auto inner = [&](E* a, E* b) {
    for (int64_t k = 1; k < ends && o.inner != 1; k++) a[k] = a[k] * o.inner, b[k] = b[k] * o.inner;
  };
  if (o.kind == kToReal) {
    const int64_t count = smaller(o.in_size, h);
    take(yr, o.re, rows, 0, o.stride[0], count), clear(yr, count, h);
    take(yi, o.im, rows, 1, o.stride[1], count), clear(yi, count, h);
    yi[0] = E{};
    if (n % 2 == 0) yi[n / 2] = E{};
    for (int64_t k = 1; k < h && !o.inverse; k++) yi[k] = -yi[k];
    inner(yr, yi);
    if (t.halved) {  // frequencies of the even numbers + i those of the odd ones
      for (int64_t k = 0; k < core; k++) {
        const E a = yr[k] - yr[core - k], b = yi[k] + yi[core - k];
        const T u = t.half[k], v = -t.half[core + 1 + k];
        xr[k] = yr[k] + yr[core - k] - (a * v + b * u);
        xi[k] = yi[k] - yi[core - k] + (a * u - b * v);
      }
    } else {
      for (int64_t k = 0; k < h; k++) xr[k] = yr[k], xi[k] = yi[k];
      for (int64_t k = h; k < n; k++) xr[k] = yr[n - k], xi[k] = -yi[n - k];
    }
    complex_transform(xi, xr, yi, yr, t, run);
    E* to = t.halved ? place(yr, o.yr, rows, 2, o.stride[2], n, o.out_size) : xr;
    for (int64_t k = 0; k < core && t.halved; k++) to[2 * k] = xr[k], to[2 * k + 1] = xi[k];
    return put(to, o.yr, rows, 2, o.stride[2], smaller(n, o.out_size), o.out_size, o.scale);
  }
  const int64_t count = smaller(o.in_size, n);
  if (o.kind == kComplex) {
    E *re = o.inverse ? xi : xr, *im = o.inverse ? xr : xi;
    take(re, o.re, rows, 0, o.stride[0], count), take(im, o.im, rows, 1, o.stride[1], count);
    clear(xr, count, n), clear(xi, count, n);
    complex_transform(xr, xi, yr, yi, t, run);
    const int64_t made = smaller(n, o.out_size);
    put(o.inverse ? xi : xr, o.yr, rows, 2, o.stride[2], made, o.out_size, o.scale);
    return put(o.inverse ? xr : xi, o.yi, rows, 3, o.stride[3], made, o.out_size, o.scale);
  }
  if (t.halved) {
    const E* from = seen(yr, o.re, rows, 0, o.stride[0], count, n);
    for (int64_t k = 0; k < core; k++) xr[k] = from[2 * k], xi[k] = from[2 * k + 1];
  } else {
    take(xr, o.re, rows, 0, o.stride[0], count), clear(xr, count, n), clear(xi, 0, n);
  }
  complex_transform(xr, xi, yr, yi, t, run);
  E *zr = xr, *zi = xi;
  if (t.halved) {
    xr[core] = xr[0], xi[core] = xi[0];
    const T half = T(0.5);
    const int64_t whole = o.kind == kMirrored ? n : h;
    yr = place(yr, o.yr, rows, 2, o.stride[2], whole, o.out_size);
    yi = place(yi, o.yi, rows, 3, o.stride[3], whole, o.out_size);
    for (int64_t k = 0; k <= core; k++) {
      const E a = (xr[k] - xr[core - k]) * half, b = (xi[k] + xi[core - k]) * half;
      const T u = t.half[k], v = t.half[core + 1 + k];
      yr[k] = (xr[k] + xr[core - k]) * half + (b * u + a * v);
      yi[k] = (xi[k] - xi[core - k]) * half + (b * v - a * u);
    }
    zr = yr, zi = yi;
  }
  inner(zr, zi);
  for (int64_t k = 0; k < h && o.inverse; k++) zi[k] = -zi[k];
  for (int64_t k = h; k < n && o.kind == kMirrored; k++) zr[k] = zr[n - k], zi[k] = -zi[n - k];
  const int64_t made = smaller(o.kind == kMirrored ? n : h, o.out_size);
  put(zr, o.yr, rows, 2, o.stride[2], made, o.out_size, o.scale);
  put(zi, o.yi, rows, 3, o.stride[3], made, o.out_size, o.scale);
}

template <class T, class Attr>
void run_all(const Exec* exec, const View& re, const View& im, const View& table, const View& yr, const View& yi,
             Kind kind, const Attr& attr) {
  const int axis = static_cast<int>(attr.axis);
  const auto t = Table<T>::of(table.as<T>(), attr.n, attr.core, attr.m, attr.m1);
  const View* views[] = {&re, &im, &yr, &yi};
  Operands<T> o{re.as<T>(),
                im.as<T>(),
                yr.as<T>(),
                yi.as<T>(),
                {},
                re.shape[axis],
                yr.shape[axis],
                kind,
                attr.inverse != 0,
                static_cast<T>(attr.scale),
                static_cast<T>(attr.inner)};
  View others[4];
  for (int k = 0; k < 4; k++) {
    o.stride[k] = views[k]->stride[axis];
    others[k] = *views[k], others[k].shape[axis] = 1;
  }
  if (yr.size() == 0) return;
  const Loop<4> loop = loop_over({&others[2], &others[0], &others[1], &others[3]});
  const int order[] = {2, 0, 1, 3};
  const int64_t count = loop.outer() * loop.inner(), size = larger(t.m, t.n + 2);
  const auto rows_from = [&](int64_t first, int lanes) {
    Rows rows{{}, lanes};
    auto place = Odometer<4>::start(loop, loop.rank, first);
    for (int l = 0; l < lanes; l++, place.next())
      for (int k = 0; k < 4; k++) rows.at[order[k]][l] = place.at[k];
    return rows;
  };
  constexpr int L = kLanes<T>;
  const bool beside = loop.stride[0][loop.rank - 1] == 1 && loop.stride[1][loop.rank - 1] == 1;
  if (t.m1 == 1 || (t.m <= kDirect && beside && count >= L / 2)) {
    using E = Pack<T>;
    return parallel_for(exec, ceil_div(count, L), [&](int64_t group) {
      E* p = scratch<E>(exec, 0, 4 * size);
      const Rows rows = rows_from(group * L, static_cast<int>(smaller(L, count - group * L)));
      transform(p, p + size, p + 2 * size, p + 3 * size, o, rows, t,
                [&](E*& xr, E*& xi, E*& yr, E*& yi) { stages_between(xr, xi, yr, yi, t.m, t.direct); });
    });
  }
  const auto in_turn = [](int64_t tasks, const auto& f) {
    for (int64_t i = 0; i < tasks; i++) f(i);
  };
  const auto shared = [&](int64_t tasks, const auto& f) { parallel_for(exec, tasks, f); };
  bool dense = kind == kComplex && !t.chirped && o.in_size >= t.n && o.out_size == t.n;
  for (int64_t stride : o.stride) dense = dense && stride == 1;
  const auto one = [&](int64_t r, int slot, const auto& over) {
    T* p = scratch<T>(exec, slot, 4 * size);
    if (dense) {  // from memory to memory
      const Rows rows = rows_from(r, 1);
      const T *a = o.re + rows.at[0][0], *b = o.im + rows.at[1][0];
      T *c = o.yr + rows.at[2][0], *d = o.yi + rows.at[3][0];
      return o.inverse ? row(b, a, d, c, p, p + size, o.scale, t, exec, over)
                       : row(a, b, c, d, p, p + size, o.scale, t, exec, over);
    }
    transform(p, p + size, p + 2 * size, p + 3 * size, o, rows_from(r, 1), t,
              [&](T*& xr, T*& xi, T*& yr, T*& yi) { row(xr, xi, xr, xi, yr, yi, T(1), t, exec, over); });
  };
  if (count < exec->threads && t.m >= kShared)
    for (int64_t r = 0; r < count; r++) one(r, 2, shared);
  else
    parallel_ranges(exec, count, 16 * t.m, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) one(r, 1, in_turn);
    });
}

}  // namespace

void fft(const fft_args& c) {
  const bool real = !c.in.im;
  const Kind kind = !real ? kComplex : c.attr.half ? kHalf : kMirrored;
  with_type<fft_args::In::re_dtypes>(c.in.re.dtype, [&](auto x) {
    run_all<decltype(x)>(c.exec, c.in.re, real ? c.in.re : static_cast<const View&>(c.in.im), c.in.table, c.out.out_re,
                         c.out.out_im, kind, c.attr);
  });
}

void fft_to_real(const fft_to_real_args& c) {
  with_type<fft_to_real_args::In::re_dtypes>(c.in.re.dtype, [&](auto x) {
    run_all<decltype(x)>(c.exec, c.in.re, c.in.im, c.in.table, c.out.y, c.out.y, kToReal, c.attr);
  });
}

}  // namespace needle::NEEDLE_ISA
