// How reductions combine values.
#pragma once
#include <type_traits>

#include "math/maps.h"

namespace needle::NEEDLE_ISA {

// Floats add up in double, integers in int64.
template <class T>
using Accumulator = std::conditional_t<std::is_integral_v<T>, int64_t, double>;

// `limit`: where every value starts from.
struct Sum {
  static constexpr double limit = 0;
  template <class A>
  NEEDLE_MAP_INLINE A combine(A a, A b) {
    return a + b;
  }
};
struct Max {
  static constexpr double limit = -HUGE_VAL;
  template <class A>
  NEEDLE_MAP_INLINE A combine(A a, A b) {
    return maximum_map::apply(a, b, a, a);
  }
};
struct Min {
  static constexpr double limit = HUGE_VAL;
  template <class A>
  NEEDLE_MAP_INLINE A combine(A a, A b) {
    return minimum_map::apply(a, b, a, a);
  }
};

}  // namespace needle::NEEDLE_ISA
