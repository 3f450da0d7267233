// Functions of vectors of floats that are computed in double, half of the lanes at a time, so that results are within
// 0.51 units in the last place without parts of sums and products. Part of "math/maps.h"; devices use their C library.
#pragma once

namespace needle::NEEDLE_ISA {

template <class W>
NEEDLE_MAP_INLINE W wide_log(W x) {
  W m;
  const W e = split(x, m), s = (m - W(1.0)) / (m + W(1.0)), z = s * s;
  const W series = polynomial(z, 1. / 13, 1. / 11, 1. / 9, 1. / 7, 1. / 5, 1. / 3);
  return log_of(x, fma(e, W(0.69314718055994531), fma(s * z + s * z, series, s + s)));
}
// Of x from -700 to 700.
template <class W>
NEEDLE_MAP_INLINE W wide_exp(W x) {
  const W n = round(x * W(1.4426950408889634)), r = fnma(n, W(0.69314718055994531), x);
  return ldexp(polynomial(r, 1. / 40320, 1. / 5040, 1. / 720, 1. / 120, 1. / 24, 1. / 6, 0.5, 1., 1.), n);
}
template <class W>
NEEDLE_MAP_INLINE W wide_sine(W r, W z) {
  return r * polynomial(z, 1. / 6227020800, -1. / 39916800, 1. / 362880, -1. / 5040, 1. / 120, -1. / 6, 1.);
}
template <class W>
NEEDLE_MAP_INLINE W wide_cosine(W z) {
  return polynomial(z, 1. / 479001600, -1. / 3628800, 1. / 40320, -1. / 720, 1. / 24, -0.5, 1.);
}

template <class T>
NEEDLE_MAP_INLINE T tan(T x) {
  if (!all_lanes(le(abs(x), T(262144.f)), x)) return each_lane(x, x, [](float a, float) { return ::tanf(a); });
  return in_double(x, x, [](auto w, auto) {
    using W = decltype(w);
    const W n = round(w * W(0.63661977236758134));
    const W r = fnma(n, W(6.0771005065061922e-11), fnma(n, W(1.5707963267341256), w));  // parts of pi / 2
    const W z = r * r, sine = wide_sine(r, z), cosine = wide_cosine(z);
    const W half = round(n * W(0.5));
    const auto odd = eq(abs(n - (half + half)), W(1.0));
    return select(odd, -cosine, sine) / select(odd, sine, cosine);
  });
}

template <class T>
NEEDLE_MAP_INLINE T asinh(T x) {
  return in_double(x, x, [](auto w, auto) {
    using W = decltype(w);
    const W a = abs(w), z = a * a;
    const W near = fma(a * z, polynomial(z, 3. / 40, -1. / 6), a);
    return copysign(select(lt(a, W(1e-3)), near, wide_log(a + sqrt(z + W(1.0)))), w);
  });
}
template <class T>
NEEDLE_MAP_INLINE T acosh(T x) {
  return in_double(x, x, [](auto w, auto) {
    using W = decltype(w);
    return wide_log(w + copysign(sqrt(fma(w, w, W(-1.0))), w));
  });
}

// exp(-x^2) times a quotient fitted to exp(x^2) erfc(x) up to 10.6, within 9e-11 of it.
template <class T>
NEEDLE_MAP_INLINE T erfc(T x) {
  return in_double(x, x, [](auto w, auto) {
    using W = decltype(w);
    const W a = min(W(10.6), abs(w));
    const W above = polynomial(a, 1.0145400463268811e-2, 9.3697752741976642e-2, 4.0510890478113282e-1,
                               1.0051646170491255, 1.4378132247755397, 9.9999999991120025e-1);
    const W below = polynomial(a, 1.7982274902316648e-2, 1.6607394103339701e-1, 7.2704941946175017e-1,
                               1.8643726519141108, 2.9008028976902378, 2.5661923798736068, 1.0);
    const W y = wide_exp(-(a * a)) * above / below;
    return select(lt(w, W(0.0)), W(2.0) - y, y);
  });
}

template <class T>
NEEDLE_MAP_NOINLINE T pow(T x, T y) {
  return in_double(x, y, [](auto base, auto exponent) {
    using W = decltype(base);
    const W zero(0.0), log = wide_log(abs(base)), limited = min(W(0x1p25), abs(exponent));
    const W power = select(eq(log, zero), zero, select(eq(exponent, zero), zero, exponent * log));
    const W size = wide_exp(min(W(200.0), max(W(-200.0), power)));
    const W half = limited * W(0.5);
    const auto whole = eq(round(limited), limited), even = eq(round(half), half);
    const W of_negative = select(whole, select(even, size, -size), select(lt(W(-HUGE_VAL), base), W(NAN), size));
    return select(lt(copysign(W(1.0), base), zero),
                  select(eq(base, zero), select(whole, of_negative, size), of_negative), size);
  });
}

}  // namespace needle::NEEDLE_ISA
