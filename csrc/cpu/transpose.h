// Transposes by shuffles of four lanes, which are enough: they are memory bound.
#pragma once
#include <cstring>

#include "cpu/simd.h"

namespace needle::NEEDLE_ISA {

typedef float F4 __attribute__((vector_size(16)));

NEEDLE_INLINE F4 load4(const float* p) {
  F4 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
NEEDLE_INLINE void store4(float* p, F4 v) { std::memcpy(p, &v, sizeof v); }

// out[j * out_stride + i] = in[i * in_stride + j] for i, j in 0..3.
NEEDLE_INLINE void transpose4(float* out, int64_t out_stride, const float* in, int64_t in_stride) {
  F4 a = load4(in), b = load4(in + in_stride), c = load4(in + 2 * in_stride), d = load4(in + 3 * in_stride);
  F4 ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  F4 cd0 = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd1 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  store4(out, __builtin_shufflevector(ab0, cd0, 0, 1, 4, 5));
  store4(out + out_stride, __builtin_shufflevector(ab0, cd0, 2, 3, 6, 7));
  store4(out + 2 * out_stride, __builtin_shufflevector(ab1, cd1, 0, 1, 4, 5));
  store4(out + 3 * out_stride, __builtin_shufflevector(ab1, cd1, 2, 3, 6, 7));
}

}  // namespace needle::NEEDLE_ISA
