#pragma once
#include <arm_neon.h>

namespace needle::neon {

struct V {
  static constexpr int N = 4;
  using Mask = uint32x4_t;
  float32x4_t v;

  V() = default;
  V(float32x4_t x) : v(x) {}
  V(float x) : v(vdupq_n_f32(x)) {}
  NEEDLE_INLINE V load(const float* p) { return vld1q_f32(p); }
  NEEDLE_INLINE V load_n(const float* p, int n) {
    if (n == N) return load(p);
    float32x4_t x = vdupq_n_f32(0);
    if (n > 0) x = vld1q_lane_f32(p, x, 0);
    if (n > 1) x = vld1q_lane_f32(p + 1, x, 1);
    if (n > 2) x = vld1q_lane_f32(p + 2, x, 2);
    return x;
  }
  NEEDLE_INLINE V pick(const float* p, const int32_t* at) {  // by bytes: 4 at, 4 at + 1, 4 at + 2, 4 at + 3
    const uint32x4_t lanes = vandq_u32(vreinterpretq_u32_s32(vld1q_s32(at)), vdupq_n_u32(N - 1));
    const uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100), lanes, 0x04040404);
    const uint8x16_t from = vreinterpretq_u8_f32(vld1q_f32(p + at[0] / N * N));
    return vreinterpretq_f32_u8(vqtbl1q_u8(from, vreinterpretq_u8_u32(bytes)));
  }
  void store(float* p) const { vst1q_f32(p, v); }
  void store_n(float* p, int n) const {
    if (n == N) return store(p);
    if (n > 0) vst1q_lane_f32(p, v, 0);
    if (n > 1) vst1q_lane_f32(p + 1, v, 1);
    if (n > 2) vst1q_lane_f32(p + 2, v, 2);
  }
};

NEEDLE_INLINE V fma(V a, V b, V c) { return vfmaq_f32(c.v, a.v, b.v); }
NEEDLE_INLINE V fnma(V a, V b, V c) { return vfmsq_f32(c.v, a.v, b.v); }
NEEDLE_INLINE V::Mask lt(V a, V b) { return vcltq_f32(a.v, b.v); }
NEEDLE_INLINE V::Mask le(V a, V b) { return vcleq_f32(a.v, b.v); }
NEEDLE_INLINE V::Mask eq(V a, V b) { return vceqq_f32(a.v, b.v); }
NEEDLE_INLINE V select(V::Mask m, V a, V b) { return vbslq_f32(m, a.v, b.v); }
NEEDLE_INLINE V max(V a, V b) { return select(lt(b, a), a, b); }  // not vmaxq, which makes NaN of either NaN
NEEDLE_INLINE V min(V a, V b) { return select(lt(a, b), a, b); }
NEEDLE_INLINE V sqrt(V a) { return vsqrtq_f32(a.v); }
NEEDLE_INLINE V round(V a) { return vrndnq_f32(a.v); }
NEEDLE_INLINE float64x2_t fused(float64x2_t a, float64x2_t b, float64x2_t c) { return vfmaq_f64(c, a, b); }
NEEDLE_INLINE float64x2_t root(float64x2_t a) { return vsqrtq_f64(a); }
NEEDLE_INLINE float reduce_add(V a) { return vaddvq_f32(a.v); }
NEEDLE_INLINE float reduce_max(V a) { return vmaxnmvq_f32(a.v); }

}  // namespace needle::neon
