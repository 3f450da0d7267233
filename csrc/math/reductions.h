// How reductions combine values.
#pragma once
#include <type_traits>

#include "math/maps.h"

namespace needle::NEEDLE_ISA {

// Floats add up in double, integers in int64.
template <class T>
using Accumulator = std::conditional_t<std::is_integral_v<T>, int64_t, double>;

// `limit`: where every value starts from. `exact`: whether every order gives the same result, in the values' own type.
struct Sum {
  static constexpr double limit = 0;
  static constexpr bool exact = false;
  template <class A>
  NEEDLE_MAP_INLINE A combine(A a, A b) {
    return a + b;
  }
};
struct Max {
  static constexpr double limit = -HUGE_VAL;
  static constexpr bool exact = true;
  template <class A>
  NEEDLE_MAP_INLINE A combine(A a, A b) {
    return maximum_map::apply(a, b, a, a);
  }
};
struct Min {
  static constexpr double limit = HUGE_VAL;
  static constexpr bool exact = true;
  template <class A>
  NEEDLE_MAP_INLINE A combine(A a, A b) {
    return minimum_map::apply(a, b, a, a);
  }
};
struct Product {
  static constexpr double limit = 1;
  static constexpr bool exact = false;
  template <class A>
  NEEDLE_MAP_INLINE A combine(A a, A b) {
    return a * b;
  }
};
struct Last {
  template <class A>
  NEEDLE_MAP_INLINE A combine(A, A b) {
    return b;
  }
};

// f(Last{}), f(Sum{}) and so on by the number that a call gives, its place among SCATTERS of
// needle/ops/shape/gather.py.
template <class F>
void with_reduction(int64_t number, const F& f) {
  switch (number) {
    case 0:
      return f(Last{});
    case 1:
      return f(Sum{});
    case 2:
      return f(Product{});
    case 3:
      return f(Max{});
    case 4:
      return f(Min{});
  }
}

// A T of what is there and what comes; bools as numbers.
template <class R, class T>
NEEDLE_MAP_INLINE T combined(T old, T value) {
  using A = std::conditional_t<std::is_same_v<T, bool>, int32_t, T>;
  return static_cast<T>(R::combine(static_cast<A>(old), static_cast<A>(value)));
}

}  // namespace needle::NEEDLE_ISA
