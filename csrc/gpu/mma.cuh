// A wave multiplies tiles on the matrix units: 16 x 16 sums += 16 rows x 16 k of A times 16 rows x 16 k of B,
// transposed. mma.sync on CUDA, MFMA on CDNA, plain loops in the emulation; with portable.cuh the only file that knows
// them apart.
//
//   Element<P>, convert<P>(float)      how precision P stores a number in shared memory
//   Fragment<P>.load(tile, stride)     16 rows of 16 neighbouring elements, `stride` elements apart, from shared memory
//   Sums.add(a, b)                     kSums float32 of each lane, which stand at (Sums::row(e), Sums::column(e))
//
// CDNA has no TF32 on all targets: there kTf32 runs the float32 matrix instructions, which are exact.
#pragma once
#include "gpu/gemm.cuh"

namespace needle::gpu {

template <int P>
using Element = std::conditional_t<P == kTf32, float, uint16_t>;

#if defined(NEEDLE_EMULATION)

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
template <int P>
Element<P> convert(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  if constexpr (P == kFloat16) return half_bits(v);
  if constexpr (P == kBfloat16)
    return v != v ? 0x7fff : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  if (v == v) bits = (bits + 0x1000) & ~0x1fffu;
  std::memcpy(&v, &bits, 4);
  return static_cast<Element<P>>(v);
}
template <int P>
float number(Element<P> e) {
  if constexpr (P == kFloat16) {
    float low = static_cast<float>(e & 1023), v = 0;
    int exponent = e >> 10 & 31;
    if (exponent == 31) v = low > 0 ? __builtin_nanf("") : __builtin_inff();
    if (exponent < 31) v = exponent ? __builtin_ldexpf(1024 + low, exponent - 25) : low * 0x1p-24f;
    return e & 0x8000 ? -v : v;
  } else if constexpr (P == kBfloat16) {
    uint32_t bits = static_cast<uint32_t>(e) << 16;
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
  } else {
    return e;
  }
}

template <int P>
struct Fragment {
  const Element<P>* tile;
  int stride;
  void load(const Element<P>* from, int distance) { tile = from, stride = distance; }
};

struct Sums {
  static constexpr int kSums = 256 / WAVE;
  float v[kSums] = {};
  static int row(int e) { return (e * WAVE + lane_id()) / 16; }
  static int column(int) { return lane_id() % 16; }
  template <int P>
  void add(const Fragment<P>& a, const Fragment<P>& b) {
    for (int e = 0; e < kSums; e++)
      for (int k = 0; k < 16; k++)
        v[e] += number<P>(a.tile[row(e) * a.stride + k]) * number<P>(b.tile[column(e) * b.stride + k]);
  }
};

#elif defined(__HIP__)

using Float4 = __attribute__((ext_vector_type(4))) float;
using Half4 = __attribute__((ext_vector_type(4))) _Float16;
using Short4 = __attribute__((ext_vector_type(4))) short;

template <int P>
__device__ __forceinline__ Element<P> convert(float v) {
  if constexpr (P == kFloat16) return __builtin_bit_cast(uint16_t, static_cast<_Float16>(v));
  if constexpr (P == kBfloat16) {
    uint32_t bits = __builtin_bit_cast(uint32_t, v);
    return v != v ? 0x7fff : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  return static_cast<Element<P>>(v);
}

// Lane l holds row l % 16 and k = 4 (l / 16) and the next three.
template <int P>
struct Fragment {
  std::conditional_t<P == kTf32, Float4, std::conditional_t<P == kFloat16, Half4, Short4>> v;
  __device__ __forceinline__ void load(const Element<P>* tile, int stride) {
    v = *reinterpret_cast<const decltype(v)*>(tile + lane_id() % 16 * stride + lane_id() / 16 * 4);
  }
};

struct Sums {
  static constexpr int kSums = 256 / WAVE;
  Float4 v = {};
  __device__ static __forceinline__ int row(int e) { return lane_id() / 16 * 4 + e; }
  __device__ static __forceinline__ int column(int) { return lane_id() % 16; }
  template <int P>
  __device__ __forceinline__ void add(const Fragment<P>& a, const Fragment<P>& b) {
#if defined(__AMDGCN__)
    if constexpr (P == kFloat16) v = __builtin_amdgcn_mfma_f32_16x16x16f16(a.v, b.v, v, 0, 0, 0);
    if constexpr (P == kBfloat16) v = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a.v, b.v, v, 0, 0, 0);
    if constexpr (P == kTf32) {
#pragma unroll
      for (int k = 0; k < 4; k++) v = __builtin_amdgcn_mfma_f32_16x16x4f32(a.v[k], b.v[k], v, 0, 0, 0);
    }
#endif
  }
};

#else

template <int P>
__device__ __forceinline__ Element<P> convert(float v) {
  if constexpr (P == kTf32) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
    return __uint_as_float(bits);
  } else {
    uint16_t bits;
    if constexpr (P == kFloat16) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    if constexpr (P == kBfloat16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
  }
}

// Register 4 s + 2 h + r of lane l holds row l / 4 + 8 r and word l % 4 + 4 h + 8 s: one float or two halves.
template <int P>
struct Fragment {
  static constexpr int kWords = P == kTf32 ? 16 : 8;
  uint32_t v[kWords / 2];
  __device__ __forceinline__ void load(const Element<P>* tile, int stride) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(tile);
    int distance = stride * kWords / 16, at = lane_id() / 4 * distance + lane_id() % 4;
#pragma unroll
    for (int i = 0; i < kWords / 2; i++) v[i] = words[at + i % 2 * 8 * distance + i / 2 * 4];
  }
};

struct Sums {
  static constexpr int kSums = 256 / WAVE;
  float v[kSums] = {};  // columns 0 to 7, then 8 to 15
  __device__ static __forceinline__ int row(int e) { return lane_id() / 4 + e / 2 % 2 * 8; }
  __device__ static __forceinline__ int column(int e) { return lane_id() % 4 * 2 + e % 2 + e / 4 * 8; }

#define NEEDLE_MMA(shape, types)                                \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." types  \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "   \
               "{%0,%1,%2,%3};"                                 \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) \
               : "r"(a.v[s]), "r"(a.v[s + 1]), "r"(a.v[s + 2]), "r"(a.v[s + 3]), "r"(b.v[s + n]), "r"(b.v[s + n + 2]))
  template <int P>
  __device__ __forceinline__ void add(const Fragment<P>& a, const Fragment<P>& b) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float* c = v + 4 * n;
#pragma unroll
      for (int s = 0; s < Fragment<P>::kWords / 2; s += 4) {
        if constexpr (P == kTf32) NEEDLE_MMA("m16n8k8", "tf32.tf32");
        if constexpr (P == kFloat16) NEEDLE_MMA("m16n8k16", "f16.f16");
        if constexpr (P == kBfloat16) NEEDLE_MMA("m16n8k16", "bf16.bf16");
      }
    }
  }
#undef NEEDLE_MMA
};

#endif

}  // namespace needle::gpu
