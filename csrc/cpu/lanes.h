// Lanes in another order, and lanes from places that lie apart: of vectors of floats, and of single doubles.
#pragma once
#include <utility>

#include "cpu/simd.h"

namespace needle::NEEDLE_ISA {

typedef float Four __attribute__((vector_size(16)));
#if defined(NEEDLE_ISA_AVX512)
NEEDLE_INLINE V join(const Four* f) {
  return __builtin_shufflevector(__builtin_shufflevector(f[0], f[1], 0, 1, 2, 3, 4, 5, 6, 7),
                                 __builtin_shufflevector(f[2], f[3], 0, 1, 2, 3, 4, 5, 6, 7), 0, 1, 2, 3, 4, 5, 6, 7, 8,
                                 9, 10, 11, 12, 13, 14, 15);
}
#elif defined(NEEDLE_ISA_AVX2)
NEEDLE_INLINE V join(const Four* f) { return __builtin_shufflevector(f[0], f[1], 0, 1, 2, 3, 4, 5, 6, 7); }
#else
NEEDLE_INLINE V join(const Four* f) { return f[0]; }
#endif

// Every second lane of a and then b, from lane `first` on; and their lanes in turns: the first or the second half.
template <int FIRST, int... I>
NEEDLE_INLINE V every_second(V a, V b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a.v, b.v, (2 * I + FIRST)...);
}
template <int FIRST>
NEEDLE_INLINE V every_second(V a, V b) {
  return every_second<FIRST>(a, b, std::make_integer_sequence<int, V::N>());
}
template <int HALF, int... I>
NEEDLE_INLINE V in_turns(V a, V b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a.v, b.v, (HALF * V::N / 2 + I / 2 + I % 2 * V::N)...);
}
template <int HALF>
NEEDLE_INLINE V in_turns(V a, V b) {
  return in_turns<HALF>(a, b, std::make_integer_sequence<int, V::N>());
}

// x = p[0], p[2], ... and y = p[1], p[3], ...
NEEDLE_INLINE void split_pairs(const float* p, V& x, V& y) {
  const V a = V::load(p), b = V::load(p + V::N);
  x = every_second<0>(a, b), y = every_second<1>(a, b);
}
NEEDLE_INLINE void split_pairs(const double* p, double& x, double& y) { x = p[0], y = p[1]; }

// The first lanes of `WIDTH` vectors, then their second lanes, ...; and the sums of stretches of WIDTH lanes.
template <int WIDTH, class L>
NEEDLE_INLINE void interleave(L* v) {
  if constexpr (WIDTH == 2) {
    const L a = v[0], b = v[1];
    v[0] = in_turns<0>(a, b), v[1] = in_turns<1>(a, b);
  } else if constexpr (WIDTH == 4) {
    L even[] = {v[0], v[2]}, odd[] = {v[1], v[3]};
    interleave<2>(even), interleave<2>(odd);
    for (int i = 0; i < 2; i++) v[2 * i] = in_turns<0>(even[i], odd[i]), v[2 * i + 1] = in_turns<1>(even[i], odd[i]);
  }
}
template <int WIDTH, class L>
NEEDLE_INLINE L sum_neighbours(const L* v) {
  if constexpr (WIDTH == 1) return v[0];
  if constexpr (WIDTH == 2) return every_second<0>(v[0], v[1]) + every_second<1>(v[0], v[1]);
  if constexpr (WIDTH == 4) {
    const L halves[] = {sum_neighbours<2>(v), sum_neighbours<2>(v + 2)};
    return sum_neighbours<2>(halves);
  }
}

// Lane i as p[at[i]]. Single reads: gather instructions take longer on most processors.
NEEDLE_INLINE V gather(const float* p, Ints at) {
  typedef uint64_t Pairs __attribute__((vector_size(sizeof(V))));
  const Pairs pairs = (Pairs)at;
  Four found[V::N / 4];
#pragma GCC unroll 4
  for (int i = 0; i < V::N / 4; i++) {
    const uint64_t a = pairs[2 * i], b = pairs[2 * i + 1];
    found[i] = Four{p[static_cast<int32_t>(a)], p[static_cast<int64_t>(a) >> 32], p[static_cast<int32_t>(b)],
                    p[static_cast<int64_t>(b) >> 32]};
  }
  return join(found);
}

// Lanes in stretches of `width` numbers, from p[at[0]], p[at[1]], ...
template <int WIDTH>
NEEDLE_INLINE V neighbours(const float* p, const int32_t* at) {
  Four found[V::N / 4];
#pragma GCC unroll 4
  for (int i = 0; i < V::N / 4; i++, at += 4 / WIDTH) {
    if constexpr (WIDTH == 1) found[i] = Four{p[at[0]], p[at[1]], p[at[2]], p[at[3]]};
    if constexpr (WIDTH == 4) __builtin_memcpy(&found[i], p + at[0], sizeof found[i]);
    if constexpr (WIDTH == 2) {
      typedef double Two __attribute__((vector_size(16)));
      double a, b;
      __builtin_memcpy(&a, p + at[0], sizeof a);
      __builtin_memcpy(&b, p + at[1], sizeof b);
      found[i] = (Four)Two{a, b};
    }
  }
  return join(found);
}
template <int WIDTH>
NEEDLE_INLINE double neighbours(const double* p, const int32_t* at) {
  return p[at[0]];
}
NEEDLE_INLINE double gather(const double* p, int32_t at) { return p[at]; }

}  // namespace needle::NEEDLE_ISA
