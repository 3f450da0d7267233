// GCC vector extensions: the baseline of any machine (SSE2 on x86-64).
#pragma once
#include <cmath>
#include <cstring>

namespace needle::scalar {

struct V {
  static constexpr int N = 4;
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t Mask __attribute__((vector_size(16)));
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
  NEEDLE_INLINE V pick(const float* p, const int32_t* at) { return F{p[at[0]], p[at[1]], p[at[2]], p[at[3]]}; }
  void store(float* p) const { std::memcpy(p, &v, sizeof v); }
  void store_n(float* p, int n) const {
    for (int i = 0; i < N; i++)
      if (i < n) p[i] = v[i];
  }
};

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
typedef double F64 __attribute__((vector_size(16)));
NEEDLE_INLINE F64 fused(F64 a, F64 b, F64 c) { return a * b + c; }
NEEDLE_INLINE F64 root(F64 a) { return F64{__builtin_sqrt(a[0]), __builtin_sqrt(a[1])}; }
NEEDLE_INLINE V round(V a) {
  // Adding 2^23 of the same sign rounds to the nearest integer; larger values are integers already.
  const V magic = select(lt(a, V(0.f)), V(-8388608.f), V(8388608.f));
  const V r = (a.v + magic.v) - magic.v;
  return select(lt(max(a, V(-a.v)), V(8388608.f)), r, a);
}
NEEDLE_INLINE float reduce_add(V a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
NEEDLE_INLINE float reduce_max(V a) {
  float m = a.v[0];
  for (int i = 1; i < V::N; i++) m = a.v[i] > m ? a.v[i] : m;
  return m;
}

}  // namespace needle::scalar
