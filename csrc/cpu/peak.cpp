// The FMA peak of one core, measured beside the kernels that it judges.
#include "cpu/simd.h"

namespace needle::NEEDLE_ISA {

// out: (2,) floats: a checksum that keeps the loop alive, and the floating-point operations done. attrs: iterations
void fma_peak(const fma_peak_args& c) {
  constexpr int kChains = kRegisters == 32 ? 24 : 12;  // enough to hide the latency, few enough for the registers
  float* out = c.out.y.as<float>();
  V acc[kChains];
  const V scale = V(0.999f + out[0] * 1e-9f), shift = V(0.001f);
  for (int i = 0; i < kChains; i++) acc[i] = V(static_cast<float>(i));
  for (int64_t n = c.attr.iterations; n > 0; n--) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; i++) acc[i] = fma(acc[i], scale, shift);
  }
  float sum = 0;
  for (int i = 0; i < kChains; i++) sum += reduce_add(acc[i]);
  out[0] = sum;
  out[1] = static_cast<float>(c.attr.iterations * kChains * V::N * 2);
}

}  // namespace needle::NEEDLE_ISA
