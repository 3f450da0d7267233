// The vector type V of the ISA this file is compiled for, all in namespace needle::NEEDLE_ISA so that no inline
// function of one ISA can be linked into another. Every wrapper has the same members; Block is 16 floats in kPerBlock
// vectors. NEEDLE_REGISTER_BLOCKS: how many of them the registers hold.
//
//   V::N                lanes            V::load / store(p)       unaligned
//   V::load_n(p, n)     first n lanes, others 0               store_n(p, n)
//   V::pick(p, at)      lane i is p[at[i]], 0 <= at[i] < 16, all of them in one of the vectors there
//   fma(a, b, c) = a*b + c   fnma = c - a*b    max/min as x86: the second operand when either is NaN
//   lt/le/eq -> Mask, select(mask, a, b) = mask ? a : b
//   round: nearest even      ldexp(x, n) = x 2^n for integral n, results down to subnormals and up to infinity
//   split(x, m) = e: x = m * 2^e, m in [sqrt(1/2), sqrt(2)), for normal x > 0
#pragma once
#include <cmath>
#include <cstdint>

#include "kernels/rows.h"

#define NEEDLE_INLINE static inline __attribute__((always_inline))

#if defined(NEEDLE_ISA_AVX512)
#define NEEDLE_ISA avx512
#define NEEDLE_REGISTER_BLOCKS 32
#include "cpu/simd_avx512.h"
#elif defined(NEEDLE_ISA_AVX2)
#define NEEDLE_ISA avx2
#define NEEDLE_REGISTER_BLOCKS 8
#include "cpu/simd_avx2.h"
#elif defined(NEEDLE_ISA_NEON)
#define NEEDLE_ISA neon
#define NEEDLE_REGISTER_BLOCKS 8
#include "cpu/simd_neon.h"
#else
#define NEEDLE_ISA scalar
#define NEEDLE_REGISTER_BLOCKS 4
#include "cpu/simd_generic.h"
#endif

namespace needle::NEEDLE_ISA {

// What GCC's vectors can do themselves, of any length.
typedef int32_t Ints __attribute__((vector_size(sizeof(V))));
typedef uint32_t Bits __attribute__((vector_size(sizeof(V))));
NEEDLE_INLINE V operator+(V a, V b) { return a.v + b.v; }
NEEDLE_INLINE V operator-(V a, V b) { return a.v - b.v; }
NEEDLE_INLINE V operator*(V a, V b) { return a.v * b.v; }
NEEDLE_INLINE V operator/(V a, V b) { return a.v / b.v; }
NEEDLE_INLINE V operator-(V a) { return (decltype(a.v))((Ints)a.v ^ INT32_MIN); }  // not -a.v: GCC moves that about
NEEDLE_INLINE V abs(V a) { return (decltype(a.v))((Ints)a.v & 0x7fffffff); }
NEEDLE_INLINE V copysign(V a, V b) { return (decltype(a.v))(((Ints)a.v & 0x7fffffff) | ((Ints)b.v & INT32_MIN)); }
NEEDLE_INLINE V split(V x, V& m) {
  // Subtracting the bits of sqrt(1/2) puts the exponent step at sqrt(2) instead of 2.
  // Unsigned, because the bits of a negative x are below what a signed difference can hold.
  const Bits bits = (Bits)x.v;
  const Ints e = (Ints)(bits - 0x3f3504f3u) >> 23;
  m = (decltype(x.v))(bits - ((Bits)e << 23));
  return __builtin_convertvector(e, decltype(x.v));
}
#if !defined(NEEDLE_ISA_AVX512)
NEEDLE_INLINE V pow2(V n) { return (decltype(n.v))((__builtin_convertvector(n.v, Ints) + 127) << 23); }
NEEDLE_INLINE V ldexp(V x, V n) {  // in two factors, to reach subnormals and infinity
  const V half = round(n * V(0.5f));
  return x * pow2(half) * pow2(n - half);
}
#endif

constexpr int kBlock = 16;  // channels per block of every blocked layout
constexpr int kPerBlock = kBlock / V::N;
constexpr int kRegisters = NEEDLE_REGISTER_BLOCKS * kPerBlock;
NEEDLE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
NEEDLE_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
NEEDLE_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory of the calling thread for `count` numbers (Exec::scratch).
template <class T>
NEEDLE_INLINE T* scratch(const Exec* exec, int slot, int64_t count) {
  return static_cast<T*>(exec->scratch(slot, count * sizeof(T)));
}

}  // namespace needle::NEEDLE_ISA
