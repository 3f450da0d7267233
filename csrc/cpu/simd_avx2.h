#pragma once
#include <immintrin.h>

namespace needle::avx2 {

struct V {
  static constexpr int N = 8;
  struct Mask {
    __m256 m;
  };
  __m256 v;

  V() = default;
  V(__m256 x) : v(x) {}
  V(float x) : v(_mm256_set1_ps(x)) {}
  NEEDLE_INLINE V load(const float* p) { return _mm256_loadu_ps(p); }
  NEEDLE_INLINE V load_n(const float* p, int n) { return _mm256_maskload_ps(p, tail(n)); }
  NEEDLE_INLINE V pick(const float* p, const int32_t* at) {
    const __m256i lanes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));  // of which three bits count
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(p + at[0] / N * N), lanes);
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store_n(float* p, int n) const { _mm256_maskstore_ps(p, tail(n), v); }
  NEEDLE_INLINE __m256i tail(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
};

NEEDLE_INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a.v, b.v, c.v); }
NEEDLE_INLINE V fnma(V a, V b, V c) { return _mm256_fnmadd_ps(a.v, b.v, c.v); }
NEEDLE_INLINE V max(V a, V b) { return _mm256_max_ps(a.v, b.v); }
NEEDLE_INLINE V min(V a, V b) { return _mm256_min_ps(a.v, b.v); }
NEEDLE_INLINE V sqrt(V a) { return _mm256_sqrt_ps(a.v); }
NEEDLE_INLINE V round(V a) { return _mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
NEEDLE_INLINE V::Mask lt(V a, V b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
NEEDLE_INLINE V::Mask le(V a, V b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ)}; }
NEEDLE_INLINE V::Mask eq(V a, V b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)}; }
NEEDLE_INLINE V select(V::Mask m, V a, V b) { return _mm256_blendv_ps(b.v, a.v, m.m); }
NEEDLE_INLINE __m256d fused(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }
NEEDLE_INLINE __m256d root(__m256d a) { return _mm256_sqrt_pd(a); }
NEEDLE_INLINE float reduce_add(V a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
NEEDLE_INLINE float reduce_max(V a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

}  // namespace needle::avx2
