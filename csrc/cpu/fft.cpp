// Discrete Fourier transforms along an axis, real and complex. Stockham's stages of radix 2 to 13 on vectors: a lane is
// a row of its own, or a column of one long row (Bailey's two passes with a transpose between them). Lengths with
// larger primes are Bluestein's convolutions (IEEE Trans. Audio 18, 1970). Inverse transforms swap real and imaginary
// parts.
#include "cpu/fft.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kShared = 16384;                  // length from which threads share one row
enum Kind { kComplex, kMirrored, kHalf, kToReal };  // kMirrored: complex frequencies of real values

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
      const auto tangled = [](auto p, auto q, auto r, auto s, auto u, auto v, auto& re, auto& im) {
        const auto a = p - r, b = q + s;
        re = p + r + (a * v - b * u), im = q - s + (a * u + b * v);
      };
      with_mirrored(yr, yi, xr, xi, core, core, t.half, tangled);
    } else {
      for (int64_t k = 0; k < h; k++) xr[k] = yr[k], xi[k] = yi[k];
      for (int64_t k = h; k < n; k++) xr[k] = yr[n - k], xi[k] = -yi[n - k];
    }
    complex_transform(xi, xr, yi, yr, t, run);
    E* to = t.halved ? place(yr, o.yr, rows, 2, o.stride[2], n, o.out_size) : xr;
    if (t.halved) join_pairs(to, xr, xi, core, T());
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
    part_pairs(from, xr, xi, core, T());
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
    const auto untangled = [half](auto p, auto q, auto r, auto s, auto u, auto v, auto& re, auto& im) {
      const auto a = (p - r) * half, b = (q + s) * half;
      re = (p + r) * half + (b * u + a * v), im = (q - s) * half + (b * v - a * u);
    };
    with_mirrored(xr, xi, yr, yi, core, core + 1, t.half, untangled);
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
