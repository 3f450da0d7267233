// The maps of kernels/maps.def as functors, and `activate`, on any lane type T: a SIMD vector V, float, double,
// int32_t, int64_t. On the CPU "cpu/simd.h" comes first and gives V and the namespace; a GPU source defines
// NEEDLE_MAP_INLINE before.
#pragma once
#include <math.h>
#include <stdint.h>

#ifndef NEEDLE_MAP_INLINE
#define NEEDLE_MAP_INLINE static inline __attribute__((always_inline))
#endif
#ifndef NEEDLE_MAP_NOINLINE
#define NEEDLE_MAP_NOINLINE static inline __attribute__((noinline))
#endif
#ifndef NEEDLE_ISA
#define NEEDLE_ISA device
#endif

namespace needle {
enum Activation {
  kNone,
#define ACTIVATION(code, name, cost, choice) code,
#include "kernels/activations.def"
#undef ACTIVATION
  kActivations  // how many
};
enum { kCheap, kDear, kOnce, kEach };  // of activations.def
}  // namespace needle

namespace needle::NEEDLE_ISA {

// The lane operations that "cpu/simd.h" gives for V, for one element.
#define NEEDLE_SCALAR_LANE(T)                                 \
  NEEDLE_MAP_INLINE T max(T a, T b) { return a > b ? a : b; } \
  NEEDLE_MAP_INLINE T min(T a, T b) { return a < b ? a : b; } \
  NEEDLE_MAP_INLINE T abs(T a) { return a < T(0) ? -a : a; }  \
  NEEDLE_MAP_INLINE bool lt(T a, T b) { return a < b; }       \
  NEEDLE_MAP_INLINE bool le(T a, T b) { return a <= b; }      \
  NEEDLE_MAP_INLINE bool eq(T a, T b) { return a == b; }      \
  NEEDLE_MAP_INLINE T select(bool m, T a, T b) { return m ? a : b; }
NEEDLE_SCALAR_LANE(float)
NEEDLE_SCALAR_LANE(double)
NEEDLE_SCALAR_LANE(int32_t)
NEEDLE_SCALAR_LANE(int64_t)
#undef NEEDLE_SCALAR_LANE

// Without an FMA unit the C function is emulated in software, hundreds of times slower than a product and a sum.
#if defined(__FMA__) || defined(__CUDACC__) || defined(__HIPCC__)
NEEDLE_MAP_INLINE float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
NEEDLE_MAP_INLINE double fma(double a, double b, double c) { return ::fma(a, b, c); }
#else
NEEDLE_MAP_INLINE float fma(float a, float b, float c) { return a * b + c; }
NEEDLE_MAP_INLINE double fma(double a, double b, double c) { return a * b + c; }
#endif
NEEDLE_MAP_INLINE float fnma(float a, float b, float c) { return fma(-a, b, c); }
NEEDLE_MAP_INLINE float ldexp(float x, float n) { return ::ldexpf(x, static_cast<int>(n)); }
NEEDLE_MAP_INLINE float split(float x, float& m) {
  int e;
  m = ::frexpf(x, &e);
  if (m < 0.70710678f) m *= 2, e--;
  return static_cast<float>(e);
}

// Functions of the C library; of one double also those whose float form is a polynomial below.
#define NEEDLE_C1(name, c_name) \
  NEEDLE_MAP_INLINE double name(double x) { return ::c_name(x); }
#define NEEDLE_C1F(name, c_name) \
  NEEDLE_C1(name, c_name)        \
  NEEDLE_MAP_INLINE float name(float x) { return ::c_name##f(x); }
#define NEEDLE_C2F(name)                                                     \
  NEEDLE_MAP_INLINE double name(double x, double y) { return ::name(x, y); } \
  NEEDLE_MAP_INLINE float name(float x, float y) { return ::name##f(x, y); }
NEEDLE_C1(exp, exp)
NEEDLE_C1(log, log)
NEEDLE_C1(log1p, log1p)
NEEDLE_C1(expm1, expm1)
NEEDLE_C1(tanh, tanh)
NEEDLE_C1(erf, erf)
NEEDLE_C1F(sqrt, sqrt)
NEEDLE_C1F(round, rint)
NEEDLE_C1F(trunc, trunc)
NEEDLE_C1F(sin, sin)
NEEDLE_C1F(cos, cos)
NEEDLE_C1F(tan, tan)
NEEDLE_C1F(asin, asin)
NEEDLE_C1F(acos, acos)
NEEDLE_C1F(atan, atan)
NEEDLE_C1F(sinh, sinh)
NEEDLE_C1F(cosh, cosh)
NEEDLE_C1F(asinh, asinh)
NEEDLE_C1F(acosh, acosh)
NEEDLE_C1F(atanh, atanh)
NEEDLE_C1F(erfc, erfc)
NEEDLE_C1F(exp2, exp2)
NEEDLE_C1F(log2, log2)
NEEDLE_C1F(log10, log10)
NEEDLE_C2F(pow)
NEEDLE_C2F(atan2)
NEEDLE_C2F(fmod)
NEEDLE_C2F(copysign)
#undef NEEDLE_C1
#undef NEEDLE_C1F
#undef NEEDLE_C2F

// Vectors go through functions of floats lane by lane where a vector form would not pay.
template <class T, class F>
NEEDLE_MAP_INLINE T each_lane(T x, T y, const F& f) {
  float a[T::N], b[T::N];
  x.store(a), y.store(b);
  for (int i = 0; i < T::N; i++) a[i] = f(a[i], b[i]);
  return T::load(a);
}
// sqrt(x^2 + y^2) without overflow; an infinity counts more than a NaN beside it.
template <class T>
NEEDLE_MAP_INLINE T hypot(T x, T y) {
  const T a = abs(x), b = abs(y), large = max(a, b), ratio = min(a, b) / large, limit(HUGE_VALF);
  const T length = select(lt(T(0), large), large * sqrt(T(1) + ratio * ratio), a + b);
  return select(eq(a, limit), a, select(eq(b, limit), b, select(eq(a + b, a + b), length, a + b)));
}

template <class T>
NEEDLE_MAP_INLINE T floor(T x) {
  T r = round(x);
  return select(lt(x, r), r - T(1), r);
}

// Whole quotients and remainders as torch has them: those of floats are Python's, those of integers wrap. An integer
// divided by 0 gives 0.
struct Fmod {
  template <class T>
  NEEDLE_MAP_INLINE T apply(T a, T b) {
    if constexpr (T(0.5) != T(0))
      return fmod(a, b);
    else
      return b == T(0) || b == T(-1) ? T(0) : static_cast<T>(a % b);
  }
};
struct Remainder {
  template <class T>
  NEEDLE_MAP_INLINE T apply(T a, T b) {
    const T rest = Fmod::apply(a, b);
    return rest != T(0) && (b < T(0)) != (rest < T(0)) ? rest + b : rest;
  }
};
struct TruncDivide {
  template <class T>
  NEEDLE_MAP_INLINE T apply(T a, T b) {
    if constexpr (T(0.5) != T(0))
      return trunc(a / b);
    else if (b == T(-1))
      return static_cast<T>(0 - static_cast<uint64_t>(a));
    else
      return b == T(0) ? T(0) : static_cast<T>(a / b);
  }
};
struct FloorDivide {
  template <class T>
  NEEDLE_MAP_INLINE T apply(T a, T b) {
    const T rest = Fmod::apply(a, b);
    const T less = rest != T(0) && (b < T(0)) != (rest < T(0)) ? T(1) : T(0);
    if constexpr (T(0.5) != T(0)) {
      if (b == T(0)) return a / b;
      const T quotient = (a - rest) / b - less;  // a whole number but for its rounding
      if (quotient == T(0)) return copysign(T(0), a / b);
      const T whole = floor(quotient);
      return quotient - whole > T(0.5) ? whole + T(1) : whole;
    } else {
      return TruncDivide::apply(a, b) - less;
    }
  }
};
struct Power {
  template <class T>
  NEEDLE_MAP_INLINE T apply(T a, T b) {
    if (b < T(0)) return a == T(1) ? T(1) : a == T(-1) ? (b % 2 ? T(-1) : T(1)) : T(0);
    uint64_t product = 1, factor = static_cast<uint64_t>(a);
    for (; b; b /= 2, factor *= factor)
      if (b % 2) product *= factor;
    return static_cast<T>(product);
  }
};
NEEDLE_MAP_INLINE int32_t pow(int32_t a, int32_t b) { return Power::apply(a, b); }
NEEDLE_MAP_INLINE int64_t pow(int64_t a, int64_t b) { return Power::apply(a, b); }

#define NEEDLE_WHOLE(F, name)                                                     \
  NEEDLE_MAP_INLINE float name(float a, float b) { return F::apply(a, b); }       \
  NEEDLE_MAP_INLINE double name(double a, double b) { return F::apply(a, b); }    \
  NEEDLE_MAP_INLINE int32_t name(int32_t a, int32_t b) { return F::apply(a, b); } \
  NEEDLE_MAP_INLINE int64_t name(int64_t a, int64_t b) { return F::apply(a, b); }
NEEDLE_WHOLE(Fmod, c_remainder)
NEEDLE_WHOLE(Remainder, remainder)
NEEDLE_WHOLE(TruncDivide, trunc_divide)
NEEDLE_WHOLE(FloorDivide, floor_divide)
#undef NEEDLE_WHOLE
template <class T>
NEEDLE_MAP_INLINE T trunc_divide(T x, T y) {
  return each_lane(x, y, [](float a, float b) { return TruncDivide::apply(a, b); });
}

#define NEEDLE_BITS(name, sign)        \
  template <class T>                   \
  NEEDLE_MAP_INLINE T name(T a, T b) { \
    return a sign b;                   \
  }
NEEDLE_BITS(bits_and, &)
NEEDLE_BITS(bits_or, |)
NEEDLE_BITS(bits_xor, ^)
#undef NEEDLE_BITS

}  // namespace needle::NEEDLE_ISA

#include "math/functions.h"
#include "math/wide.h"

namespace needle::NEEDLE_ISA {

template <class T>
NEEDLE_MAP_INLINE T sigmoid(T x) {
  return T(1) / (T(1) + exp(-x));
}
template <class T>
NEEDLE_MAP_INLINE T hardsigmoid(T x) {
  return min(T(6), max(T(0), x + T(3))) * T(1.0 / 6);
}
template <class T>
NEEDLE_MAP_INLINE T elu(T x, T alpha) {
  return select(lt(x, T(0)), alpha * expm1(min(T(0), x)), x);
}
// exp(-a^2 / 2) for 0 <= a <= 15, as 2^n 2^r with r in [-1/2, 1/2].
template <class T>
NEEDLE_MAP_INLINE T gaussian(T a) {
  T s = a * T(-0.72134752f), n = round(s * a), r = fma(s, a, -n);
  return ldexp(exp2_small(r), n);
}
// The normal distribution below x, and e = exp(-x^2 / 2). Its tail is e times a quotient fitted to erfcx up to 6 (6e-8
// of it; up to 15, where it ends, 5e-5), so that no digits are lost where 1 + erf(x) cancels.
template <class T>
NEEDLE_MAP_INLINE T normal_below(T x, T& e) {
  T a = min(T(15.f), abs(x));
  e = gaussian(a);
  T tail = e * polynomial(a, 1.36326730e-2f, 1.04481947e-1f, 3.34601899e-1f, 4.99999970e-1f) /
           polynomial(a, 3.41926259e-2f, 2.61344844e-1f, 8.79562491e-1f, 1.46708475f, 1.f);
  return select(lt(x, T(0.f)), tail, T(1.f) - tail);
}
NEEDLE_MAP_INLINE double normal_below(double x, double& e) {
  e = ::exp(-0.5 * x * x);
  return 0.5 * ::erfc(-0.70710678118654752 * x);
}
template <class T>
NEEDLE_MAP_INLINE T gelu(T x) {
  T e;
  return x * normal_below(x, e);
}
template <class T>
NEEDLE_MAP_INLINE T gelu_grad(T x, T dy) {
  T e, below = normal_below(x, e);
  return dy * (below + x * T(0.39894228040143268) * e);
}
template <class T>
NEEDLE_MAP_INLINE T gelu_tanh(T x) {  // x (1 + tanh u) / 2 = x / (1 + exp(-2 u))
  return x / (T(1) + exp(x * fma(x * x, T(-0.071354816272600), T(-1.5957691216057308))));
}
template <class T>
NEEDLE_MAP_INLINE T gelu_tanh_grad(T x, T dy) {
  T z = x * x, s = sigmoid(x * (T(1.5957691216057308) + T(0.071354816272600) * z));
  return dy * s * (T(1) + x * (T(1) - s) * (T(1.5957691216057308) + T(0.2140644488178) * z));
}
template <class T>
NEEDLE_MAP_INLINE T silu_grad(T x, T dy) {
  T s = sigmoid(x);
  return dy * s * (T(1) + x * (T(1) - s));
}

// tanh(log(1 + e^x)), which is 1 from 20 on.
template <class T>
NEEDLE_MAP_INLINE T tanh_softplus(T x) {
  T e = exp(min(T(20), x)), n = e * (e + T(2));
  return n / (n + T(2));
}
template <class T>
NEEDLE_MAP_INLINE T mish_grad(T x, T dy) {
  T t = tanh_softplus(x);
  return dy * (t + x * sigmoid(x) * (T(1) - t * t));
}

constexpr int count_words(const char* text) {
  int n = *text != 0;
  for (; *text; text++) n += *text == ' ';
  return n;
}

// relu_map::apply(x, p, q), add_map::apply(x, y, p, q), where_map::apply(x, y, z, p, q), ... for every row of maps.def.
#define NEEDLE_MAP(name, n_inputs, letters, attrs, expr, ...)                            \
  struct name##_map {                                                                    \
    static constexpr int arity = n_inputs, attributes = count_words(attrs);              \
    static constexpr char dtypes[] = letters;                                            \
    template <class T>                                                                   \
    NEEDLE_MAP_INLINE T apply(__VA_ARGS__, [[maybe_unused]] T p, [[maybe_unused]] T q) { \
      return expr;                                                                       \
    }                                                                                    \
  };
#define UNARY(name, dtypes, attrs, expr) NEEDLE_MAP(name, 1, dtypes, attrs, expr, T x)
#define BINARY(name, dtypes, attrs, expr) NEEDLE_MAP(name, 2, dtypes, attrs, expr, T x, T y)
#define TERNARY(name, dtypes, attrs, expr) NEEDLE_MAP(name, 3, dtypes, attrs, expr, T x, T y, T z)
#include "kernels/maps.def"
#undef UNARY
#undef BINARY
#undef TERNARY
#undef NEEDLE_MAP

template <class Map, class T>
NEEDLE_MAP_INLINE T apply_map(const T (&x)[Map::arity], T p, T q) {
  if constexpr (Map::arity == 1) return Map::apply(x[0], p, q);
  if constexpr (Map::arity == 2) return Map::apply(x[0], x[1], p, q);
  if constexpr (Map::arity == 3) return Map::apply(x[0], x[1], x[2], p, q);
}

// Out of line: inlined into an epilogue these would cost its loop registers even when they are not used.
template <class A, class T>
NEEDLE_MAP_NOINLINE T activate_out_of_line(int code, A alpha, T x) {
  switch (code) {
#define ACTIVATION(code, name, cost, choice)                               \
  case code:                                                               \
    if constexpr (cost == kDear) return name##_map::apply(x, T(alpha), x); \
    break;
#include "kernels/activations.def"
#undef ACTIVATION
  }
  return x;
}

// alpha: of the type of a lane's elements.
template <class A, class T>
NEEDLE_MAP_INLINE T activate(int code, A alpha, T x) {
  switch (code) {
    case kNone:
      return x;
#define ACTIVATION(code, name, cost, choice)                                \
  case code:                                                                \
    if constexpr (cost == kCheap) return name##_map::apply(x, T(alpha), x); \
    break;
#include "kernels/activations.def"
#undef ACTIVATION
  }
  return activate_out_of_line(code, alpha, x);
}

// Calls body(f) with the activation as f(x), so that a loop in `body` does not choose again for every vector.
template <class Body>
NEEDLE_MAP_INLINE void with_activation(int code, float alpha, const Body& body) {
  switch (code) {
    case kNone:
      return body([](auto x) { return x; });
#define ACTIVATION(code, name, cost, choice)                                                       \
  case code:                                                                                       \
    if constexpr (choice == kOnce) return body([](auto x) { return name##_map::apply(x, x, x); }); \
    break;
#include "kernels/activations.def"
#undef ACTIVATION
  }
  body([=](auto x) { return activate(code, alpha, x); });
}

}  // namespace needle::NEEDLE_ISA
