// Functions of vectors (and the exponentials of single numbers on devices) that C libraries have for single numbers:
// within 2.4 units in the last place. Arguments that they do not serve go through the C library lane by lane. Part of
// "math/maps.h".
#pragma once

namespace needle::NEEDLE_ISA {

// first x^n + ... + last, n being the number of `rest`.
template <class T, class F, class... C>
NEEDLE_MAP_INLINE T polynomial(T x, F first, C... rest) {
  T s = T(first);
  ((s = fma(x, s, T(rest))), ...);
  return s;
}

// x = n ln 2 + r and e^r - 1 for |r| <= ln 2 / 2; polynomial of Cephes expf.
template <class T>
NEEDLE_MAP_INLINE T exp_parts(T x, T& n) {
  n = round(x * T(1.44269504f));
  T r = fnma(n, T(-2.12194440e-4f), fnma(n, T(0.693359375f), x));
  T s = polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                   5.0000001201e-1f);
  return fma(r * r, s, r);
}
template <class T>
NEEDLE_MAP_INLINE T exp(T x) {
  T n, m = exp_parts(min(T(89.f), max(T(-104.f), x)), n);
  return ldexp(m + T(1.f), n);
}
// For x <= 0.
template <class T>
NEEDLE_MAP_INLINE T expm1(T x) {
  T n, m = exp_parts(max(T(-104.f), x), n), power = ldexp(T(1.f), n);
  return fma(power, m, power - T(1.f));
}

// x = m 2^e, m in [sqrt(1/2), sqrt(2)); f = m - 1, and the rest of log m beyond f - f^2 / 2, a polynomial of Cephes
// logf.
template <class T>
NEEDLE_MAP_INLINE T log_parts(T x, T& e, T& f) {
  auto subnormal = lt(x, T(1.17549435e-38f));
  T m;
  e = split(select(subnormal, x * T(8388608.f), x), m);
  e = select(subnormal, e - T(23.f), e);
  f = m - T(1.f);
  T z = f * f;
  T s = polynomial(f, 7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                   -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f);
  return f * z * s;
}
// A logarithm of x, y where that is a number above 0.
template <class T>
NEEDLE_MAP_INLINE T log_of(T x, T y) {
  y = select(lt(x, T(HUGE_VALF)), y, x);
  return select(lt(T(0.f), x), y, select(eq(x, T(0.f)), T(-HUGE_VALF), T(NAN)));
}
template <class T>
NEEDLE_MAP_INLINE T log(T x) {
  T e, f, rest = log_parts(x, e, f);
  rest = fma(e, T(-2.12194440e-4f), rest);
  return log_of(x, fma(e, T(0.693359375f), f + fnma(f * f, T(0.5f), rest)));
}
template <class T>
NEEDLE_MAP_INLINE T log2(T x) {
  T e, f, rest = log_parts(x, e, f);
  return log_of(x, fma(f + fnma(f * f, T(0.5f), rest), T(1.44269504f), e));
}
template <class T>
NEEDLE_MAP_INLINE T log10(T x) {
  T e, f, rest = log_parts(x, e, f);
  rest = (f + fnma(f * f, T(0.5f), rest)) * T(0.434294482f);
  return log_of(x, fma(e, T(0.301029996f), fma(e, T(-1.43209880e-8f), rest)));
}

// For x in [0, 1]: 2 atanh(x / (2 + x)).
template <class T>
NEEDLE_MAP_INLINE T log1p(T x) {
  T s = x / (T(2.f) + x), z = s * s;
  T q = polynomial(z, 2.80067533e-1f, 2.80030280e-1f, 4.00214374e-1f, 6.66664183e-1f);
  return fma(s * z, q, s + s);
}

template <class T>
NEEDLE_MAP_INLINE T tanh(T x) {
  T a = abs(x), z = x * x;
  T s = polynomial(z, -5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f);
  T near = select(eq(z, T(0.f)), x, fma(x * z, s, x));  // the sum alone would make 0 of -0
  T far = T(1.f) - T(2.f) / (exp(a + a) + T(1.f));
  return select(lt(a, T(0.625f)), near, select(lt(x, T(0.f)), -far, far));
}

// Polynomials of N. Juffa (erff within 1 ulp): in x^2 up to 0.92, above 1 - exp(polynomial in |x|).
template <class T>
NEEDLE_MAP_INLINE T erf(T x) {
  T t = min(T(4.f), abs(x)), z = x * x, z4 = t * t;
  T n =
      polynomial(z, -5.96761703e-4f, 4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f, -3.76125336e-1f, 1.28379166e-1f);
  n = fma(x, n, x);
  T s = fma(t, T(-1.72853470e-5f), T(3.83197126e-4f));
  s = fma(s, z4, fma(t, T(-3.88396438e-3f), T(2.42546219e-2f)));
  s = fma(t, s, T(-1.06777877e-1f));
  s = fma(t, s, T(-6.34846687e-1f));
  s = fma(t, s, T(-1.28717512e-1f));
  T far = T(1.f) - exp(fma(t, s, -t));
  return select(lt(t, T(0.921875f)), n, select(lt(x, T(0.f)), -far, far));
}

// Whether the condition holds for all lanes.
template <class M, class T>
NEEDLE_MAP_INLINE bool all_lanes(M mask, T like) {
  (void)like;
  return reduce_max(select(mask, T(0.f), T(1.f))) == 0.f;
}

// x = n pi / 2 + r, n a whole number below 2^13, by parts of pi / 2 whose products with it are exact, with or without
// an FMA unit: r has all of its digits. n's rest of a division by 4 is returned.
template <class T>
NEEDLE_MAP_INLINE T quarter_turns(T x, T& r) {
  const T n = round(x * T(0.636619772f));
  r = fnma(n, T(1.5703125f), x);
  r = fnma(n, T(4.837512969970703e-4f), r);
  r = fnma(n, T(7.549533620476723e-8f), r);
  r = fnma(n, T(2.5633440682570896e-12f), r);
  return n - T(4.f) * floor(n * T(0.25f));
}
constexpr float kMostTurns = 8192;  // pi / 2

// The sine of x + shift pi / 2.
template <class T>
NEEDLE_MAP_INLINE T shifted_sine(T x, float shift) {
  T r, turns = quarter_turns(x, r) + T(shift);  // 0 to 4
  const T z = r * r;
  const T sine = fma(r * z, polynomial(z, 2.83124086e-6f, -1.98530048e-4f, 8.33337940e-3f, -1.66666672e-1f), r);
  const T cosine =
      fma(z, polynomial(z, -2.89181742e-7f, 2.48224478e-5f, -1.38889812e-3f, 4.16666679e-2f, -0.5f), T(1.f));
  const auto odd = eq(abs(turns - T(2.f)), T(1.f));
  const T y = select(odd, cosine, select(eq(z, T(0.f)), r, sine));  // the sum alone would make 0 of -0
  return select(eq(max(turns, T(2.f)), min(turns, T(3.f))), -y, y);
}
template <class T>
NEEDLE_MAP_INLINE T sin(T x) {
  if (!all_lanes(le(abs(x), T(kMostTurns)), x)) return each_lane(x, x, [](float a, float) { return ::sinf(a); });
  return shifted_sine(x, 0);
}
template <class T>
NEEDLE_MAP_INLINE T cos(T x) {
  if (!all_lanes(le(abs(x), T(kMostTurns)), x)) return each_lane(x, x, [](float a, float) { return ::cosf(a); });
  return shifted_sine(x, 1);
}

constexpr float kPi = 3.14159265f, kPiRest = -8.74227766e-8f;  // which together are pi

// For 0 <= x <= 1.
template <class T>
NEEDLE_MAP_INLINE T atan_small(T x) {
  const T z = x * x;
  return fma(x * z,
             polynomial(z, -1.78214419e-3f, 1.08662713e-2f, -3.10935341e-2f, 5.78788705e-2f, -8.39920789e-2f,
                        1.09508611e-1f, -1.42640144e-1f, 1.99985296e-1f, -3.33332986e-1f),
             x);
}
// pi / 2 - x.
template <class T>
NEEDLE_MAP_INLINE T from_right(T x) {
  return T(kPi / 2) + (T(kPiRest / 2) - x);
}
template <class T>
NEEDLE_MAP_INLINE T atan(T x) {
  const T a = abs(x);
  const auto large = lt(T(1.f), a);
  const T y = atan_small(select(large, T(1.f) / a, a));
  return copysign(select(large, from_right(y), y), x);
}
template <class T>
NEEDLE_MAP_INLINE T atan2(T y, T x) {
  const T a = abs(x), b = abs(y), large = max(a, b), small = min(a, b);
  if (!all_lanes(lt(a + b, T(HUGE_VALF)), x)) return each_lane(y, x, [](float s, float t) { return ::atan2f(s, t); });
  T angle = atan_small(select(lt(T(0.f), large), small / large, T(0.f)));
  angle = select(lt(a, b), from_right(angle), angle);
  angle = select(lt(copysign(T(1.f), x), T(0.f)), T(kPi) + (T(kPiRest) - angle), angle);
  return copysign(angle, y);
}

// The arc sine of 0 <= x <= 1/2.
template <class T>
NEEDLE_MAP_INLINE T asin_small(T x) {
  const T z = x * x;
  return fma(x * z, polynomial(z, 4.22197208e-2f, 2.41481625e-2f, 4.54766564e-2f, 7.49524906e-2f, 1.66667536e-1f), x);
}
template <class T>
NEEDLE_MAP_INLINE T asin(T x) {
  const T a = abs(x);
  const auto near = le(a, T(0.5f));
  const T half = asin_small(select(near, a, sqrt(fnma(T(0.5f), a, T(0.5f)))));
  return copysign(select(near, half, from_right(half + half)), x);
}
template <class T>
NEEDLE_MAP_INLINE T acos(T x) {
  const T a = abs(x);
  const auto near = le(a, T(0.5f)), left = lt(x, T(0.f));
  const T half = asin_small(select(near, a, sqrt(fnma(T(0.5f), a, T(0.5f)))));
  const T far = select(left, T(kPi) + (T(kPiRest) - (half + half)), half + half);
  return select(near, from_right(select(left, -half, half)), far);
}

constexpr float kMostExponent = 88;  // of e
template <class T>
NEEDLE_MAP_INLINE T sinh(T x) {
  const T a = abs(x);
  if (!all_lanes(le(a, T(kMostExponent)), x)) return each_lane(x, x, [](float b, float) { return ::sinhf(b); });
  const T z = x * x, e = T(0.5f) * exp(a);
  const T near = fma(a * z, polynomial(z, 2.78392508e-6f, 1.98426351e-4f, 8.33331142e-3f, 1.66666672e-1f), a);
  return copysign(select(lt(a, T(1.f)), near, e - T(0.25f) / e), x);
}
template <class T>
NEEDLE_MAP_INLINE T cosh(T x) {
  const T a = abs(x);
  if (!all_lanes(le(a, T(kMostExponent)), x)) return each_lane(x, x, [](float b, float) { return ::coshf(b); });
  const T e = T(0.5f) * exp(a);
  return e + T(0.25f) / e;
}
template <class T>
NEEDLE_MAP_INLINE T atanh(T x) {
  const T a = abs(x), z = x * x;
  const T near = fma(
      a * z,
      polynomial(z, 1.77325636e-1f, 5.08933663e-2f, 1.18364111e-1f, 1.42211899e-1f, 2.00026035e-1f, 3.33332986e-1f), a);
  return copysign(select(le(a, T(0.5f)), near, T(0.5f) * log((T(1.f) + a) / (T(1.f) - a))), x);
}

// 2^r for -1/2 <= r <= 1/2.
template <class T>
NEEDLE_MAP_INLINE T exp2_small(T r) {
  return polynomial(r, 1.53264831e-4f, 1.33908098e-3f, 9.61850584e-3f, 5.55035993e-2f, 2.40226477e-1f, 6.93147182e-1f,
                    1.f);
}
template <class T>
NEEDLE_MAP_INLINE T exp2(T x) {
  const T within = min(T(130.f), max(T(-152.f), x)), n = round(within);
  return ldexp(exp2_small(within - n), n);
}

// Remainders as C's fmod, which are exact: the quotient, rounded, is at most one too large.
template <class T>
NEEDLE_MAP_INLINE T c_remainder(T x, T y) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  const T a = abs(x), b = abs(y), ratio = a / b;
  if (all_lanes(lt(ratio, T(4194304.f)), x) && all_lanes(lt(b, T(HUGE_VALF)), x)) {
    const T rest = fnma(floor(ratio), b, a);
    return copysign(select(lt(rest, T(0.f)), rest + b, rest), x);
  }
#endif
  return each_lane(x, y, [](float s, float t) { return ::fmodf(s, t); });
}
// 1 where a remainder as C's has another sign than y, else 0.
template <class T>
NEEDLE_MAP_INLINE T is_across(T rest, T y) {
  const T one(1.f), zero(0.f);
  const T apart = abs(select(lt(y, zero), one, zero) - select(lt(rest, zero), one, zero));
  return select(eq(rest, zero), zero, apart);
}
template <class T>
NEEDLE_MAP_INLINE T remainder(T x, T y) {
  const T rest = c_remainder(x, y);
  return select(eq(is_across(rest, y), T(1.f)), rest + y, rest);
}
template <class T>
NEEDLE_MAP_INLINE T floor_divide(T x, T y) {
  const T rest = c_remainder(x, y), quotient = (x - rest) / y - is_across(rest, y), whole = floor(quotient);
  const T nearest = select(lt(T(0.5f), quotient - whole), whole + T(1.f), whole);
  const T zero = copysign(T(0.f), x / y);
  return select(eq(y, T(0.f)), x / y, select(eq(quotient, T(0.f)), zero, nearest));
}

}  // namespace needle::NEEDLE_ISA
