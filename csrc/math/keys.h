// The order of elements of every dtype, as unsigned numbers.
#pragma once
#include <type_traits>

#include "math/maps.h"

namespace needle::NEEDLE_ISA {

template <class T>
using KeyOf = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

// An element as an unsigned number that has its place in the order: NaN behind all, both zeros the same. By bits alone:
// kernels compare subnormal numbers as zeros.
template <class Key, Key kSign, Key kInfinity>
NEEDLE_MAP_INLINE Key key_of_bits(Key bits) {
  const Key size = bits & ~kSign;
  if (size > kInfinity) return static_cast<Key>(~Key(0));
  return size == 0 ? kSign : bits == size ? bits | kSign : ~bits;
}
NEEDLE_MAP_INLINE uint32_t key_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return key_of_bits<uint32_t, 0x80000000u, 0x7f800000u>(bits);
}
NEEDLE_MAP_INLINE uint64_t key_of(double x) {
  uint64_t bits;
  __builtin_memcpy(&bits, &x, 8);
  return key_of_bits<uint64_t, 0x8000000000000000u, 0x7ff0000000000000u>(bits);
}
NEEDLE_MAP_INLINE uint32_t key_of(int32_t x) { return static_cast<uint32_t>(x) ^ 0x80000000u; }
NEEDLE_MAP_INLINE uint64_t key_of(int64_t x) { return static_cast<uint64_t>(x) ^ 0x8000000000000000u; }
NEEDLE_MAP_INLINE uint32_t key_of(bool x) { return x; }

}  // namespace needle::NEEDLE_ISA
