// A wave multiplies tiles on the matrix units: 16 x 16 sums += 16 rows x 16 k of A times 16 rows x 16 k of B,
// transposed. mma.sync on CUDA, MFMA on CDNA; with portable.cuh the only file that knows them apart. The emulation runs
// the lines of either, by its wave's width, on instructions modelled after the vendors' documents (emulation_mma.h).
//
//   Element<P>, convert<P>(float)      how precision P stores a number in shared memory
//   Fragment<P>.load(tile, stride)     16 rows of 16 neighbouring elements, `stride` elements apart, from shared memory
//   Sums.add(a, b)                     kSums float32 of each lane, which stand at (Sums::row(e), Sums::column(e))
//   words of shared memory             word<P>(a, b) holds kPack<P> elements: one of TF32, else two, the first below
//   RowSums.add(a, b)                  sums of kRows rows alone: e is in RowSums::row(which(e)), the row's other sums
//   in
//                                      lanes that across() combines; kBeside of them stand side by side
//   Fragment<P>.take(row_sums)         these 16 x 16 values as the next product's first operand; k of its second one
//   lies
//                                      at Fragment<P>::place(k)
//
// CDNA has no TF32 on all targets: there kTf32 runs the float32 matrix instructions, which are exact.
#pragma once
#include "gpu/gemm.cuh"
#if defined(NEEDLE_EMULATION)
#include "gpu/emulation_mma.h"
#endif

namespace needle::gpu {

template <int P>
using Element = std::conditional_t<P == kTf32, float, uint16_t>;

template <int P>
constexpr int kPack = 4 / sizeof(Element<P>);

// ---- the instructions themselves -----------------------------------------------------------------------------------

#if defined(__HIP__)

using Float4 = __attribute__((ext_vector_type(4))) float;
using Half4 = __attribute__((ext_vector_type(4))) _Float16;
using Short4 = __attribute__((ext_vector_type(4))) short;

__device__ __forceinline__ uint16_t half_bits(float v) {
  return __builtin_bit_cast(uint16_t, static_cast<_Float16>(v));
}

template <int P, class T>
__device__ __forceinline__ Float4 mfma(T a, T b, Float4 c) {
#if defined(__AMDGCN__)
  if constexpr (P == kFloat16) c = __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0);
  if constexpr (P == kBfloat16) c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0);
  if constexpr (P == kTf32) c = __builtin_amdgcn_mfma_f32_16x16x4f32(a, b, c, 0, 0, 0);
#endif
  return c;
}

#elif !defined(NEEDLE_EMULATION)

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

// c (16 x 8) += a (16 x k) b (k x 8), where k is 8 for kTf32 and 16 for halves.
template <int P>
__device__ __forceinline__ void mma_sync(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
#define NEEDLE_MMA(shape, types)                                \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." types  \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "   \
               "{%0,%1,%2,%3};"                                 \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  if constexpr (P == kTf32) NEEDLE_MMA("m16n8k8", "tf32.tf32");
  if constexpr (P == kFloat16) NEEDLE_MMA("m16n8k16", "f16.f16");
  if constexpr (P == kBfloat16) NEEDLE_MMA("m16n8k16", "bf16.bf16");
#undef NEEDLE_MMA
}

#endif

// ---- which lane holds what -----------------------------------------------------------------------------------------

#if NEEDLE_WAVE == 64

template <int P>
__device__ __forceinline__ Element<P> convert(float v) {
  if constexpr (P == kFloat16) return half_bits(v);
  if constexpr (P == kBfloat16) {
    uint32_t bits = __builtin_bit_cast(uint32_t, v);
    return v != v ? 0x7fff : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  return static_cast<Element<P>>(v);
}

template <int P>
__device__ __forceinline__ uint32_t word(float a, float b) {
  if constexpr (P == kTf32) return __builtin_bit_cast(uint32_t, a);
  if constexpr (P != kTf32) return convert<P>(a) | static_cast<uint32_t>(convert<P>(b)) << 16;
}

struct RowSums;

// Lane l holds row l % 16 and k = 4 (l / 16) and the next three.
template <int P>
struct Fragment {
  using Four = std::conditional_t<P == kTf32, Float4, std::conditional_t<P == kFloat16, Half4, Short4>>;
  Four v;
  __device__ __forceinline__ void load(const Element<P>* tile, int stride) {
    v = read_vector<Four>(tile + lane_id() % 16 * stride + lane_id() / 16 * 4);
  }
  __device__ __forceinline__ void take(const RowSums& sums);
  __device__ static __forceinline__ int place(int k) { return k; }
};

struct Sums {
  static constexpr int kSums = 256 / WAVE;
  Float4 v = {};
  __device__ static __forceinline__ int row(int e) { return lane_id() / 16 * 4 + e; }
  __device__ static __forceinline__ int column(int) { return lane_id() % 16; }
  template <int P>
  __device__ __forceinline__ void add(const Fragment<P>& a, const Fragment<P>& b) {
    if constexpr (P == kTf32) {
#pragma unroll
      for (int k = 0; k < 4; k++) v = mfma<P>(a.v[k], b.v[k], v);  // each takes one k of every four
    } else {
      v = mfma<P>(a.v, b.v, v);
    }
  }
};

// The product turned: sums then lie as an operand does.
struct RowSums : Sums {
  static constexpr int kRows = 1, kBeside = 4;
  __device__ static __forceinline__ int which(int) { return 0; }
  __device__ static __forceinline__ int row(int) { return Sums::column(0); }
  __device__ static __forceinline__ int column(int e) { return Sums::row(e); }
  template <int P>
  __device__ __forceinline__ void add(const Fragment<P>& a, const Fragment<P>& b) {
    Sums::add(b, a);
  }
  template <class F>
  __device__ static __forceinline__ float across(float v, const F& combine) {
    v = combine(v, shfl_xor<WAVE>(v, 16));
    return combine(v, shfl_xor<WAVE>(v, 32));
  }
};

template <int P>
__device__ __forceinline__ void Fragment<P>::take(const RowSums& sums) {
  if constexpr (P == kTf32) {
    v = sums.v;
  } else {
    const uint64_t low = word<P>(sums.v[0], sums.v[1]), high = word<P>(sums.v[2], sums.v[3]);
    v = __builtin_bit_cast(Four, low | high << 32);
  }
}

#else

template <int P>
__device__ __forceinline__ uint32_t word(float a, float b) {
#if defined(NEEDLE_EMULATION)
  if constexpr (P == kTf32) return __builtin_bit_cast(uint32_t, convert<P>(a));
  if constexpr (P != kTf32) return convert<P>(a) | static_cast<uint32_t>(convert<P>(b)) << 16;
#else
  uint32_t bits;
  if constexpr (P == kTf32) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(a));
  if constexpr (P == kFloat16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(b), "f"(a));
  if constexpr (P == kBfloat16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(b), "f"(a));
  return bits;
#endif
}

struct RowSums;

// Register 4 s + 2 h + r of lane l holds row l / 4 + 8 r and word l % 4 + 4 h + 8 s: one float or two halves.
template <int P>
struct Fragment {
  static constexpr int kWords = P == kTf32 ? 16 : 8;
  uint32_t v[kWords / 2];
  __device__ __forceinline__ void load(const Element<P>* tile, int stride) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(tile);
    int distance = stride * kWords / 16, at = lane_id() / 4 * distance + lane_id() % 4;
#pragma unroll
    for (int i = 0; i < kWords / 2; i++) v[i] = read_vector<uint32_t>(words + at + i % 2 * 8 * distance + i / 2 * 4);
  }
  __device__ __forceinline__ void take(const RowSums& sums);
  // A lane's sums are of neighbouring columns, an operand of TF32 has k and k + 4 in it.
  __device__ static __forceinline__ int place(int k) { return P == kTf32 ? k / 8 * 8 + k % 2 * 4 + k % 8 / 2 : k; }
};

struct Sums {
  static constexpr int kSums = 256 / WAVE;
  float v[kSums] = {};  // columns 0 to 7, then 8 to 15
  __device__ static __forceinline__ int row(int e) { return lane_id() / 4 + e / 2 % 2 * 8; }
  __device__ static __forceinline__ int column(int e) { return lane_id() % 4 * 2 + e % 2 + e / 4 * 8; }
  template <int P>
  __device__ __forceinline__ void add(const Fragment<P>& a, const Fragment<P>& b) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int s = 0; s < Fragment<P>::kWords / 2; s += 4)
        mma_sync<P>(v + 4 * n, a.v[s], a.v[s + 1], a.v[s + 2], a.v[s + 3], b.v[s + n], b.v[s + n + 2]);
    }
  }
};

struct RowSums : Sums {
  static constexpr int kRows = 2, kBeside = 2;
  __device__ static __forceinline__ int which(int e) { return e / 2 % 2; }
  __device__ static __forceinline__ int row(int i) { return Sums::row(2 * i); }
  template <class F>
  __device__ static __forceinline__ float across(float v, const F& combine) {
    return wave_reduce<4>(v, combine);
  }
};

template <int P>
__device__ __forceinline__ void Fragment<P>::take(const RowSums& sums) {
#pragma unroll
  for (int i = 0; i < kWords / 2; i++) {
    if constexpr (P == kTf32) v[i] = word<P>(sums.v[i / 4 * 4 + i % 2 * 2 + i / 2 % 2], 0);
    if constexpr (P != kTf32) v[i] = word<P>(sums.v[2 * i], sums.v[2 * i + 1]);
  }
}

#endif

}  // namespace needle::gpu
