// The vector type V of the ISA this file is compiled for, all in namespace needle::NEEDLE_ISA so that no inline
// function of one ISA can be linked into another. Every wrapper has the same members; Block is 16 floats in kPerBlock
// vectors.
//
//   V::N                lanes            V::load / store(p)       unaligned
//   V::load_n(p, n)     first n lanes, others 0               store_n(p, n)
//   fma(a, b, c) = a*b + c   fnma = c - a*b    max/min as x86: the second operand when either is NaN
//   lt/le/eq -> Mask, select(mask, a, b) = mask ? a : b
//   round: nearest even      ldexp(x, n) = x 2^n for integral n, results down to subnormals and up to infinity
//   spin_pause(): tells the core that a loop waits for another thread
//   split(x, m) = e: x = m * 2^e, m in [sqrt(1/2), sqrt(2)), for normal x > 0
#pragma once
#include <cmath>
#include <cstdint>

#include "kernels/rows.h"

#if defined(NEEDLE_ISA_AVX512)
#define NEEDLE_ISA avx512
#include "cpu/simd_avx512.h"
#elif defined(NEEDLE_ISA_AVX2)
#define NEEDLE_ISA avx2
#include "cpu/simd_avx2.h"
#else
#define NEEDLE_ISA scalar
#include "cpu/simd_generic.h"
#endif

namespace needle::NEEDLE_ISA {
constexpr int kBlock = 16;  // channels per block of every blocked layout
constexpr int kPerBlock = kBlock / V::N;
NEEDLE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
NEEDLE_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
NEEDLE_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory of the calling thread for `count` numbers (Exec::scratch).
template <class T>
NEEDLE_INLINE T* scratch(const Exec* exec, int slot, int64_t count) {
  return static_cast<T*>(exec->scratch(slot, count * sizeof(T)));
}

}  // namespace needle::NEEDLE_ISA
