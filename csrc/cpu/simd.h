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
NEEDLE_INLINE Ints whole(V x) { return __builtin_convertvector(x.v, Ints); }
NEEDLE_INLINE int32_t whole(double x) { return static_cast<int32_t>(x); }
#if !defined(NEEDLE_ISA_AVX512)
NEEDLE_INLINE V pow2(V n) { return (decltype(n.v))((__builtin_convertvector(n.v, Ints) + 127) << 23); }
NEEDLE_INLINE V ldexp(V x, V n) {  // in two factors, to reach subnormals and infinity
  const V half = round(n * V(0.5f));
  return x * pow2(half) * pow2(n - half);
}
#endif

// Half of the lanes of V in double, for functions of floats that would lose digits in float ("math/wide.h").
struct Wide {
  static constexpr int N = V::N / 2;
  typedef double D __attribute__((vector_size(sizeof(V))));
  typedef int64_t Mask __attribute__((vector_size(sizeof(V))));
  typedef uint64_t Words __attribute__((vector_size(sizeof(V))));
  typedef float Floats __attribute__((vector_size(sizeof(V) / 2)));
  D v;

  Wide() = default;
  Wide(D x) : v(x) {}
  Wide(double x) : v(x - D{}) {}
  NEEDLE_INLINE Wide load(const float* p) {
    Floats x;
    __builtin_memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, D);
  }
  void store(float* p) const {
    const Floats x = __builtin_convertvector(v, Floats);
    __builtin_memcpy(p, &x, sizeof x);
  }
};
NEEDLE_INLINE Wide operator+(Wide a, Wide b) { return a.v + b.v; }
NEEDLE_INLINE Wide operator-(Wide a, Wide b) { return a.v - b.v; }
NEEDLE_INLINE Wide operator*(Wide a, Wide b) { return a.v * b.v; }
NEEDLE_INLINE Wide operator/(Wide a, Wide b) { return a.v / b.v; }
NEEDLE_INLINE Wide operator-(Wide a) { return (Wide::D)((Wide::Mask)a.v ^ INT64_MIN); }
NEEDLE_INLINE Wide::Mask lt(Wide a, Wide b) { return a.v < b.v; }
NEEDLE_INLINE Wide::Mask le(Wide a, Wide b) { return a.v <= b.v; }
NEEDLE_INLINE Wide::Mask eq(Wide a, Wide b) { return a.v == b.v; }
NEEDLE_INLINE Wide select(Wide::Mask m, Wide a, Wide b) { return m ? a.v : b.v; }
NEEDLE_INLINE Wide max(Wide a, Wide b) { return select(lt(b, a), a, b); }
NEEDLE_INLINE Wide min(Wide a, Wide b) { return select(lt(a, b), a, b); }
NEEDLE_INLINE Wide abs(Wide a) { return (Wide::D)((Wide::Mask)a.v & INT64_MAX); }
NEEDLE_INLINE Wide copysign(Wide a, Wide b) {
  return (Wide::D)(((Wide::Mask)a.v & INT64_MAX) | ((Wide::Mask)b.v & INT64_MIN));
}
NEEDLE_INLINE Wide fma(Wide a, Wide b, Wide c) { return (Wide::D)fused(a.v, b.v, c.v); }
NEEDLE_INLINE Wide fnma(Wide a, Wide b, Wide c) { return fma(-a, b, c); }
NEEDLE_INLINE Wide sqrt(Wide a) { return (Wide::D)root(a.v); }
constexpr double kWhole = 0x1.8p52;  // beside which doubles are whole numbers, in their last bits, too
NEEDLE_INLINE Wide round(Wide a) { return (a.v + kWhole) - kWhole; }  // of |a| up to 2^51
NEEDLE_INLINE Wide ldexp(Wide x, Wide n) {                            // of n from -1022 to 1023
  return x.v * (Wide::D)((Wide::Words)(n.v + (kWhole + 1023)) << 52);
}
NEEDLE_INLINE Wide split(Wide x, Wide& m) {
  const Wide::Words bits = (Wide::Words)x.v, e = (bits - 0x3fe6a09e667f3bcdu + (uint64_t(1023) << 52)) >> 52;
  m = (Wide::D)(bits - ((e - 1023) << 52));
  return (Wide::D)(e | 0x4330000000000000u) - (0x1p52 + 1023);
}

template <class F>
NEEDLE_INLINE V in_double(V x, V y, const F& f) {
  float a[V::N], b[V::N];
  x.store(a), y.store(b);
  for (int i = 0; i < V::N; i += Wide::N) f(Wide::load(a + i), Wide::load(b + i)).store(a + i);
  return V::load(a);
}

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
