// Discrete Fourier transforms along an axis, real and complex. Stockham's stages of radix 2 to 13 on vectors: a lane is
// a row of its own, or a column of one long row (Bailey's two passes with a transpose between them). Lengths with
// larger primes are Bluestein's convolutions (IEEE Trans. Audio 18, 1970). Inverse transforms swap real and imaginary
// parts.
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

// One stage of radix R from x to y: `step` results of earlier stages lie side by side, `left` numbers of this one
// apart.
template <int R, bool last, class E, class T>
void stage(const E* xr, const E* xi, E* yr, E* yi, int64_t step, int64_t left, const T* w) {
  const int64_t m = R * left * step;
  T c[R / 2 + 1], s[R / 2 + 1];
  for (int k = 0; k <= R / 2; k++) c[k] = w[k * (m / R)], s[k] = -w[m + k * (m / R)];
  for (int64_t p = 0; p < left; p++) {
    T ur[R], ui[R];
    for (int k = 1; k < R; k++) ur[k] = w[p * k * step], ui[k] = w[m + p * k * step];
    for (int64_t q = 0; q < step; q++) {
      E a[R], b[R];
#pragma GCC unroll 16
      for (int k = 0; k < R; k++) a[k] = xr[q + step * (p + left * k)], b[k] = xi[q + step * (p + left * k)];
      butterfly<R>(a, b, c, s);
      E* to = yr + q + step * R * p;
      E* to_i = yi + q + step * R * p;
      to[0] = a[0], to_i[0] = b[0];
#pragma GCC unroll 16
      for (int k = 1; k < R; k++) {
        to[k * step] = last ? a[k] : a[k] * ur[k] - b[k] * ui[k];
        to_i[k * step] = last ? b[k] : a[k] * ui[k] + b[k] * ur[k];
      }
    }
  }
}

// All stages of a length; the result is in x, and y is for work.
template <class E, class T>
void stages(E*& xr, E*& xi, E*& yr, E*& yi, int64_t m, const T* w) {
  int64_t step = 1, left = m;
  while (left > 1) {
    int radix = 0;
    const auto run = [&]<int R>(std::integral_constant<int, R>) {
      if (radix || left % R) return;
      radix = R, left /= R;
      if (left == 1)
        stage<R, true>(xr, xi, yr, yi, step, left, w);
      else
        stage<R, false>(xr, xi, yr, yi, step, left, w);
    };
    run(std::integral_constant<int, 4>{}), run(std::integral_constant<int, 2>{});
    run(std::integral_constant<int, 3>{}), run(std::integral_constant<int, 5>{});
    run(std::integral_constant<int, 7>{}), run(std::integral_constant<int, 11>{});
    run(std::integral_constant<int, 13>{});
    step *= radix;
    E *r = xr, *i = xi;
    xr = yr, xi = yi, yr = r, yi = i;
  }
}

// A contiguous row seen as (m1, m2): columns, factors, a transpose and columns again. over(tasks, f): in turn or in
// threads.
template <class T, class Over>
void row(T* xr, T* xi, T* yr, T* yi, const Table<T>& t, const Exec* exec, const Over& over) {
  using E = Pack<T>;
  constexpr int64_t L = kLanes<T>;
  const int64_t longer = larger(t.m1, t.m2);
  const auto part = [&](int64_t first, int64_t end) { return smaller(L, end - first); };
  const auto columns = [&](int64_t first, int64_t width, int64_t length, const T* w, const T* re, const T* im, E** a) {
    E* p = scratch<E>(exec, 0, 4 * longer);
    for (int k = 0; k < 4; k++) a[k] = p + k * longer;
    const int64_t n = part(first, width);
    for (int64_t j = 0; j < length; j++) {
      if (n < L) a[0][j] = E{}, a[1][j] = E{};
      std::memcpy(a[0] + j, re + j * width + first, n * sizeof(T));
      std::memcpy(a[1] + j, im + j * width + first, n * sizeof(T));
    }
    stages(a[0], a[1], a[2], a[3], length, w);
    return n;
  };
  over(ceil_div(t.m2, L), [&](int64_t block) {
    E* a[4];
    const int64_t first = block * L, n = columns(first, t.m2, t.m1, t.rows, xr, xi, a);
    for (int64_t k = 0; k < t.m1; k++) {
      E u{}, v{};
      std::memcpy(&u, t.twist + k * t.m2 + first, n * sizeof(T));
      std::memcpy(&v, t.twist + t.m + k * t.m2 + first, n * sizeof(T));
      const E re = a[0][k], im = a[1][k];
      a[0][k] = re * u - im * v, a[1][k] = re * v + im * u;
    }
    transpose(yr + first * t.m1, t.m1, reinterpret_cast<const T*>(a[0]), L, t.m1, n);
    transpose(yi + first * t.m1, t.m1, reinterpret_cast<const T*>(a[1]), L, t.m1, n);
  });
  over(ceil_div(t.m1, L), [&](int64_t block) {
    E* a[4];
    const int64_t first = block * L, n = columns(first, t.m1, t.m2, t.columns, yr, yi, a);
    for (int64_t k = 0; k < t.m2; k++) {
      std::memcpy(xr + k * t.m1 + first, a[0] + k, n * sizeof(T));
      std::memcpy(xi + k * t.m1 + first, a[1] + k, n * sizeof(T));
    }
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
      transpose(to, L, p + at[0], rows.lanes > 1 ? at[1] - at[0] : 0, rows.lanes, count);
    else
      for (int64_t j = 0; j < count; j++)
        for (int l = 0; l < rows.lanes; l++) to[j * L + l] = p[at[l] + j * stride];
  }
}

// `count` numbers times `scale` to rows of `size`, zeros behind them.
template <class E, class T>
void put(E* x, T* p, const Rows& rows, int k, int64_t stride, int64_t count, int64_t size, T scale) {
  const int64_t* at = rows.at[k];
  if (scale != 1)
    for (int64_t j = 0; j < count; j++) x[j] = x[j] * scale;
  if constexpr (sizeof(E) == sizeof(T)) {
    if (stride == 1) std::memcpy(p + at[0], x, count * sizeof(T));
    for (int64_t j = 0; j < count && stride != 1; j++) p[at[0] + j * stride] = x[j];
  } else {
    constexpr int L = kLanes<T>;
    const T* from = reinterpret_cast<const T*>(x);
    const bool even = rows.even(k);
    if (even && rows.lanes == L && at[1] - at[0] == 1)
      for (int64_t j = 0; j < count; j++) std::memcpy(p + at[0] + j * stride, from + j * L, sizeof(E));
    else if (even && stride == 1)
      transpose(p + at[0], rows.lanes > 1 ? at[1] - at[0] : 0, from, L, count, rows.lanes);
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
    for (int64_t k = 0; k < core && t.halved; k++) yr[2 * k] = xr[k], yr[2 * k + 1] = xi[k];
    return put(t.halved ? yr : xr, o.yr, rows, 2, o.stride[2], smaller(n, o.out_size), o.out_size, o.scale);
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
  E* from = t.halved ? yr : xr;
  take(from, o.re, rows, 0, o.stride[0], count), clear(from, count, n);
  if (t.halved)
    for (int64_t k = 0; k < core; k++) xr[k] = yr[2 * k], xi[k] = yr[2 * k + 1];
  else
    clear(xi, 0, n);
  complex_transform(xr, xi, yr, yi, t, run);
  E *zr = xr, *zi = xi;
  if (t.halved) {
    xr[core] = xr[0], xi[core] = xi[0];
    const T half = T(0.5);
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
                [&](E*& xr, E*& xi, E*& yr, E*& yi) { stages(xr, xi, yr, yi, t.m, t.direct); });
    });
  }
  const auto in_turn = [](int64_t tasks, const auto& f) {
    for (int64_t i = 0; i < tasks; i++) f(i);
  };
  const auto shared = [&](int64_t tasks, const auto& f) { parallel_for(exec, tasks, f); };
  const auto one = [&](int64_t r, int slot, const auto& over) {
    T* p = scratch<T>(exec, slot, 4 * size);
    transform(p, p + size, p + 2 * size, p + 3 * size, o, rows_from(r, 1), t,
              [&](T*& xr, T*& xi, T*& yr, T*& yi) { row(xr, xi, yr, yi, t, exec, over); });
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
