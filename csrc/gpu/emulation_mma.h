// The matrix instructions that mma.cuh calls, after the vendors' documents and knowing nothing of how mma.cuh loads: a
// lane lays what its registers hold where the document says it belongs in A and B; when its whole wave has, it adds up
// the sums that the document gives to it. Sums are float32, one k after the other; hardware's own order is not
// modelled.
#pragma once
#include "gpu/gemm.cuh"

namespace needle::gpu {

inline uint16_t half_bits(float v) {  // to nearest, ties to even
  uint32_t bits, sign;
  std::memcpy(&bits, &v, 4);
  sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return 0x7fff;
  if (bits < 0x38800000)
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(__builtin_rintf(__builtin_fabsf(v) * 0x1p24f)));
  bits += 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | (bits >= 0x47800000 ? 0x7c00 : (bits - 0x38000000) >> 13));
}

inline float float_of(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}

// The number that a matrix instruction finds in the lower bits of a register.
template <int P>
float number(uint32_t bits) {
  if constexpr (P == kTf32) return float_of(bits & ~0x1fffu);  // whatever the 13 lowest are
  if constexpr (P == kBfloat16) return float_of(bits << 16);
  float low = static_cast<float>(bits & 1023), v = 0;
  int exponent = bits >> 10 & 31;
  if (exponent == 31) v = low > 0 ? __builtin_nanf("") : __builtin_inff();
  if (exponent < 31) v = exponent ? __builtin_ldexpf(1024 + low, exponent - 25) : low * 0x1p-24f;
  return bits & 0x8000 ? -v : v;
}

// The matrices of this lane's next instruction.
inline emulation::Matrices& matrices() {
  emulation::Device& d = emulation::device();
  return d.wave[d.current / emulation::kWave].matrices[emulation::turn(d)];
}

#if NEEDLE_WAVE == 32

template <int P>
auto convert(float v) {  // as cvt.rn, and as cvt.rna for TF32: ties away from zero
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  if constexpr (P == kFloat16)
    return half_bits(v);
  else if constexpr (P == kBfloat16)
    return v != v ? uint16_t{0x7fff} : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  else
    return v != v ? v : float_of((bits + 0x1000) & ~0x1fffu);
}

// mma.sync.aligned: m16n8k8 for kTf32, m16n8k16 for halves. The formulas are those of the PTX ISA, "Matrix fragments
// for mma.m16n8k8" and "for mma.m16n8k16 with floating point type", for elements a0 ... of A (row, k), b0 ... of B
// (k, column) and c0 to c3; a register holds one of TF32 or two halves, the lower bits first.
template <int P>
GPU_UNSEEN void mma_sync(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  const int group = lane_id() >> 2, member = lane_id() % 4;
  emulation::Matrices& m = matrices();
  if constexpr (P == kTf32) {
    for (int i = 0; i < 4; i++)
      m.a[i == 0 || i == 2 ? group : group + 8][i < 2 ? member : member + 4] = number<P>(a[i]);
    for (int i = 0; i < 2; i++) m.b[i == 0 ? member : member + 4][group] = number<P>(b[i]);
  } else {
    for (int i = 0; i < 8; i++) {
      const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
      const int k = member * 2 + (i & 1) + (i < 4 ? 0 : 8);
      m.a[row][k] = number<P>(a[i / 2] >> 16 * (i & 1) & 0xffff);
    }
    for (int i = 0; i < 4; i++)
      m.b[member * 2 + (i & 1) + (i < 2 ? 0 : 8)][group] = number<P>(b[i / 2] >> 16 * (i & 1) & 0xffff);
  }
  emulation::meet_wave(emulation::kMatrix + P);
  for (int i = 0; i < 4; i++) {
    const int row = i < 2 ? group : group + 8, column = member * 2 + (i & 1);
    for (int k = 0; k < (P == kTf32 ? 8 : 16); k++) c[i] += m.a[row][k] * m.b[k][column];
  }
}

#else

using Float4 = float __attribute__((vector_size(16)));
using Half4 = uint16_t __attribute__((vector_size(8)));
using Short4 = int16_t __attribute__((vector_size(8)));

// v_mfma_f32_16x16x16_f16 and _bf16_1k, v_mfma_f32_16x16x4_f32 for kTf32. The formulas are those that AMD's matrix
// instruction calculator prints for CDNA 2 and 3, "register to matrix element mapping": of element e of a lane's
// registers A is (lane % 16, E floor(lane / 16) + e), where E is the number of them, B the same with (k, column), and
// of its register g C and D are (4 floor(lane / 16) + g, lane % 16).
template <int P, class T>
GPU_UNSEEN Float4 mfma(T a, T b, Float4 c) {
  const int quarter = lane_id() / 16, line = lane_id() % 16;
  emulation::Matrices& m = matrices();
  if constexpr (P == kTf32) {
    m.a[line][quarter] = a;
    m.b[quarter][line] = b;
  } else {
    for (int e = 0; e < 4; e++) {
      m.a[line][4 * quarter + e] = number<P>(static_cast<uint16_t>(a[e]));
      m.b[4 * quarter + e][line] = number<P>(static_cast<uint16_t>(b[e]));
    }
  }
  emulation::meet_wave(emulation::kMatrix + P);
  for (int g = 0; g < 4; g++)
    for (int k = 0; k < (P == kTf32 ? 4 : 16); k++) c[g] += m.a[4 * quarter + g][k] * m.b[k][line];
  return c;
}

#endif

}  // namespace needle::gpu
