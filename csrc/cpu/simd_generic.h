// GCC vector extensions: the baseline of any machine (SSE2 on x86-64, NEON on Arm).
#pragma once
#include <cmath>
#include <cstring>

#define NEEDLE_INLINE static inline __attribute__((always_inline))

namespace needle::scalar {

struct V {
  static constexpr int N = 4;
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t Mask __attribute__((vector_size(16)));
  typedef uint32_t Bits __attribute__((vector_size(16)));
  F v;

  V() = default;
  V(F x) : v(x) {}
  V(float x) : v(F{x, x, x, x}) {}
  NEEDLE_INLINE V load(const float* p) {
    F x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  NEEDLE_INLINE V load_n(const float* p, int n) {
    F x = {};
    for (int i = 0; i < N; i++)
      if (i < n) x[i] = p[i];
    return x;
  }
  void store(float* p) const { std::memcpy(p, &v, sizeof v); }
  void store_n(float* p, int n) const {
    for (int i = 0; i < N; i++)
      if (i < n) p[i] = v[i];
  }
};

NEEDLE_INLINE V operator+(V a, V b) { return a.v + b.v; }
NEEDLE_INLINE V operator-(V a, V b) { return a.v - b.v; }
NEEDLE_INLINE V operator*(V a, V b) { return a.v * b.v; }
NEEDLE_INLINE V operator/(V a, V b) { return a.v / b.v; }
NEEDLE_INLINE V operator-(V a) { return -a.v; }
NEEDLE_INLINE V fma(V a, V b, V c) { return a.v * b.v + c.v; }
NEEDLE_INLINE V fnma(V a, V b, V c) { return c.v - a.v * b.v; }
NEEDLE_INLINE V::Mask lt(V a, V b) { return a.v < b.v; }
NEEDLE_INLINE V::Mask le(V a, V b) { return a.v <= b.v; }
NEEDLE_INLINE V::Mask eq(V a, V b) { return a.v == b.v; }
NEEDLE_INLINE V select(V::Mask m, V a, V b) { return m ? a.v : b.v; }
NEEDLE_INLINE V max(V a, V b) { return a.v > b.v ? a.v : b.v; }
NEEDLE_INLINE V min(V a, V b) { return a.v < b.v ? a.v : b.v; }
NEEDLE_INLINE V sqrt(V a) {
  for (int i = 0; i < V::N; i++) a.v[i] = __builtin_sqrtf(a.v[i]);
  return a;
}
NEEDLE_INLINE V abs(V a) { return (V::F)((V::Mask)a.v & 0x7fffffff); }
NEEDLE_INLINE V round(V a) {
  // Adding 2^23 of the same sign rounds to the nearest integer; larger values are integers already.
  const V magic = select(lt(a, V(0.f)), V(-8388608.f), V(8388608.f));
  V r = (a + magic) - magic;
  return select(lt(abs(a), V(8388608.f)), r, a);
}
NEEDLE_INLINE float reduce_add(V a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
NEEDLE_INLINE float reduce_max(V a) {
  float m = a.v[0];
  for (int i = 1; i < V::N; i++) m = a.v[i] > m ? a.v[i] : m;
  return m;
}
NEEDLE_INLINE V pow2(V n) { return (V::F)((__builtin_convertvector(n.v, V::Mask) + 127) << 23); }
NEEDLE_INLINE V ldexp(V x, V n) {  // in two factors, to reach subnormals and infinity
  V half = round(n * V(0.5f));
  return x * pow2(half) * pow2(n - half);
}
NEEDLE_INLINE V split(V x, V& m) {
  // Subtracting the bits of sqrt(1/2) puts the exponent step at sqrt(2) instead of 2.
  // Unsigned, because the bits of a negative x are below what a signed difference can hold.
  V::Bits bits = (V::Bits)x.v;
  V::Mask e = (V::Mask)(bits - 0x3f3504f3u) >> 23;
  m = (V::F)(bits - ((V::Bits)e << 23));
  return __builtin_convertvector(e, V::F);
}
NEEDLE_INLINE void spin_pause() { asm volatile("" ::: "memory"); }

}  // namespace needle::scalar
