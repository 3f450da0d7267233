#pragma once
#include <immintrin.h>

namespace needle::avx512 {

struct V {
  static constexpr int N = 16;
  using Mask = __mmask16;
  __m512 v;

  V() = default;
  V(__m512 x) : v(x) {}
  V(float x) : v(_mm512_set1_ps(x)) {}
  NEEDLE_INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
  NEEDLE_INLINE V load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(tail(n), p); }
  NEEDLE_INLINE V pick(const float* p, const int32_t* at) {
    return _mm512_permutexvar_ps(_mm512_loadu_si512(at), _mm512_loadu_ps(p));
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store_n(float* p, int n) const { _mm512_mask_storeu_ps(p, tail(n), v); }
  NEEDLE_INLINE Mask tail(int n) { return static_cast<Mask>((1u << n) - 1); }
};

NEEDLE_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
NEEDLE_INLINE V fnma(V a, V b, V c) { return _mm512_fnmadd_ps(a.v, b.v, c.v); }
NEEDLE_INLINE V max(V a, V b) { return _mm512_max_ps(a.v, b.v); }
NEEDLE_INLINE V min(V a, V b) { return _mm512_min_ps(a.v, b.v); }
NEEDLE_INLINE V sqrt(V a) { return _mm512_sqrt_ps(a.v); }
NEEDLE_INLINE V round(V a) { return _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
NEEDLE_INLINE V::Mask lt(V a, V b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
NEEDLE_INLINE V::Mask le(V a, V b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ); }
NEEDLE_INLINE V::Mask eq(V a, V b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
NEEDLE_INLINE V select(V::Mask m, V a, V b) { return _mm512_mask_blend_ps(m, b.v, a.v); }
NEEDLE_INLINE __m512d fused(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }
NEEDLE_INLINE __m512d root(__m512d a) { return _mm512_sqrt_pd(a); }
NEEDLE_INLINE float reduce_add(V a) { return _mm512_reduce_add_ps(a.v); }
NEEDLE_INLINE float reduce_max(V a) { return _mm512_reduce_max_ps(a.v); }
NEEDLE_INLINE V ldexp(V x, V n) { return _mm512_scalef_ps(x.v, n.v); }

}  // namespace needle::avx512
