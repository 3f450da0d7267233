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
NEEDLE_MAP_INLINE double wide_log(double x) { return ::log(x); }
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

// To all digits of a double, since results of the gamma function's relatives are small differences: logarithms, and
// sines and cosines up to pi / 2.
template <class W>
NEEDLE_MAP_INLINE W full_log(W x) {
  W m;
  const W e = split(x, m), s = (m - W(1.0)) / (m + W(1.0)), z = s * s;
  const W series =
      polynomial(z, 1. / 23, 1. / 21, 1. / 19, 1. / 17, 1. / 15, 1. / 13, 1. / 11, 1. / 9, 1. / 7, 1. / 5, 1. / 3);
  return log_of(x, fma(e, W(0.69314718055994531), fma(s * z + s * z, series, s + s)));
}
NEEDLE_MAP_INLINE double full_log(double x) { return ::log(x); }
template <class W>
NEEDLE_MAP_INLINE W full_sine(W r) {
  return r * polynomial(r * r, 1. / 51090942171709440000., -1. / 121645100408832000., 1. / 355687428096000.,
                        -1. / 1307674368000., 1. / 6227020800., -1. / 39916800, 1. / 362880, -1. / 5040, 1. / 120,
                        -1. / 6, 1.);
}
template <class W>
NEEDLE_MAP_INLINE W full_cosine(W r) {
  return polynomial(r * r, 1. / 2432902008176640000., -1. / 6402373705728000., 1. / 20922789888000., -1. / 87178291200.,
                    1. / 479001600, -1. / 3628800, 1. / 40320, -1. / 720, 1. / 24, -0.5, 1.);
}

// What relatives of the gamma function need: Stirling's series is for arguments from kFar on, recurrences lead there,
// and reflection from below 1/2.
constexpr int kFar = 10;
template <class W>
struct GammaArgument {
  decltype(lt(W(), W())) below;
  W far;             // 1/2 or more, moved up by kFar where it is below that
  W product, slope;  // of the factors that lead there, or 1; its derivative, or 0
  W angle;           // pi times the distance from the nearest whole number
};
template <class W>
NEEDLE_MAP_INLINE GammaArgument<W> gamma_argument(W x) {
  GammaArgument<W> g;
  g.below = lt(x, W(0.5));
  const W near = select(g.below, W(1.0) - x, x);
  const auto low = lt(near, W(static_cast<double>(kFar)));
  g.far = select(low, near + W(static_cast<double>(kFar)), near);
  W product = near, slope(1.0);
  for (int k = 1; k < kFar; k++) {
    const W factor = near + W(static_cast<double>(k));
    slope = fma(slope, factor, product);
    product = product * factor;
  }
  g.product = select(low, product, W(1.0)), g.slope = select(low, slope, W(0.0));
  const W y = max(W(-0x1p50), x);  // all are whole below
  g.angle = (y - round(y)) * W(3.14159265358979324);
  return g;
}

template <class W>
NEEDLE_MAP_INLINE W wide_lgamma(W x) {
  const auto g = gamma_argument(x);
  const W inverse = W(1.0) / g.far, zero(0.0), limit(HUGE_VAL);
  const W rest =
      polynomial(inverse * inverse, 1. / 156, -691. / 360360, 1. / 1188, -1. / 1680, 1. / 1260, -1. / 360, 1. / 12);
  const W series = fma(g.far - W(0.5), full_log(g.far), fma(rest, inverse, W(0.91893853320467274) - g.far));
  // Sines near 0 would let the quotient overflow: 2^64 is left out of it.
  const W sine = select(g.below, abs(full_sine(g.angle)) * W(0x1p64), W(1.0));
  const W moved = full_log(g.product / sine);
  const W y = select(g.below, moved + W(45.506149441685900) - series, series - moved);  // log pi + 64 log 2
  return select(eq(abs(x), limit), limit, select(eq((x - W(1.0)) * (x - W(2.0)), zero), zero, y));
}
template <class W>
NEEDLE_MAP_INLINE W wide_digamma(W x) {
  const auto g = gamma_argument(x);
  const W inverse = W(1.0) / g.far, square = inverse * inverse;
  const W rest =
      polynomial(square, -3617. / 8160, 1. / 12, -691. / 32760, 1. / 132, -1. / 240, 1. / 252, -1. / 120, 1. / 12);
  const W above = full_log(g.far) - fma(W(0.5), inverse, rest * square) - g.slope / g.product;
  const W mirrored = above - W(3.14159265358979324) * full_cosine(g.angle) / full_sine(g.angle);
  const W pole = select(eq(x, W(0.0)), W(-1.0) / x, W(NAN));
  return select(g.below, select(eq(g.angle, W(0.0)), pole, mirrored), above);
}

// The inverse of erf for 0 <= x, within 1e-9 of it: x times a polynomial, in w = -log(1 - x^2) up to 5, else in
// sqrt(w).
template <class W>
NEEDLE_MAP_INLINE W erfinv_near(W x, W w) {
  return x * polynomial(w - W(2.5), 1.22940792636e-10, 4.35114729532e-10, -1.08528758427e-08, 1.64871768635e-08,
                        4.78635260884e-07, -3.42617595189e-06, -4.9958551016e-06, 0.000218263923144, -0.00125270811332,
                        -0.00417732492193, 0.246640276795, 1.50140935173);
}
template <class W>
NEEDLE_MAP_INLINE W erfinv_far(W x, W w) {
  return x * polynomial(sqrt(w) - W(3.179586801558725), -3.26691203012e-05, 0.00010642201118, -5.42236743707e-05,
                        -0.000350747456685, 0.00114046044046, -0.00213055063911, 0.00315875871942, -0.00454314190326,
                        0.00624387050955, 1.0044430858, 3.01313011207);
}
template <class W>
NEEDLE_MAP_INLINE W erfinv_log(W x) {
  return -wide_log((W(1.0) - x) * (W(1.0) + x));
}
template <class W>
NEEDLE_MAP_INLINE W wide_erfinv(W x) {
  const W a = abs(x), w = erfinv_log(a), one(1.0);
  const W z = select(lt(w, W(5.0)), erfinv_near(x, w), erfinv_far(x, max(W(5.0), w)));
  return select(lt(a, one), z, select(eq(a, one), x * W(HUGE_VAL), W(NAN)));
}
NEEDLE_MAP_INLINE float erfinv(float x) { return static_cast<float>(wide_erfinv(static_cast<double>(x))); }
template <class T>
NEEDLE_MAP_NOINLINE T erfinv(T x) {
  if (all_lanes(lt(abs(x), T(0.996f)), x))
    return in_double(x, x, [](auto x, auto) { return erfinv_near(x, erfinv_log(x)); });
  return in_double(x, x, [](auto x, auto) { return wide_erfinv(x); });
}

#define NEEDLE_IN_DOUBLE(name)                                                                              \
  NEEDLE_MAP_INLINE double name(double x) { return wide_##name(x); }                                        \
  NEEDLE_MAP_INLINE float name(float x) { return static_cast<float>(wide_##name(static_cast<double>(x))); } \
  template <class T>                                                                                        \
  NEEDLE_MAP_NOINLINE T name(T x) {                                                                         \
    return in_double(x, x, [](auto w, auto) { return wide_##name(w); });                                    \
  }
NEEDLE_IN_DOUBLE(lgamma)
NEEDLE_IN_DOUBLE(digamma)
#undef NEEDLE_IN_DOUBLE

}  // namespace needle::NEEDLE_ISA
