// p-norms of differences, on any lane type L.
#pragma once
#include "math/maps.h"

namespace needle::NEEDLE_ISA {

// How differences are added up, how sums of parts are, and what becomes of the sum.
struct Added {
  template <class L>
  NEEDLE_MAP_INLINE L join(L a, L b) {
    return a + b;
  }
};
struct Norm0 : Added {
  template <class L>
  NEEDLE_MAP_INLINE L add(L total, L d, L) {
    return total + select(eq(d, L(0)), L(0), L(1));
  }
  template <class L>
  NEEDLE_MAP_INLINE L finish(L total, L) {
    return total;
  }
};
struct Norm1 : Added {
  template <class L>
  NEEDLE_MAP_INLINE L add(L total, L d, L) {
    return total + abs(d);
  }
  template <class L>
  NEEDLE_MAP_INLINE L finish(L total, L) {
    return total;
  }
};
struct Norm2 : Added {
  template <class L>
  NEEDLE_MAP_INLINE L add(L total, L d, L) {
    return fma(d, d, total);
  }
  template <class L>
  NEEDLE_MAP_INLINE L finish(L total, L) {
    return sqrt(total);
  }
};
struct NormMax {
  template <class L>
  NEEDLE_MAP_INLINE L add(L total, L d, L) {
    return join(total, abs(d));
  }
  template <class L>
  NEEDLE_MAP_INLINE L join(L a, L b) {
    return maximum_map::apply(a, b, a, a);
  }
  template <class L>
  NEEDLE_MAP_INLINE L finish(L total, L) {
    return total;
  }
};
struct NormP : Added {
  template <class L>
  NEEDLE_MAP_INLINE L add(L total, L d, L p) {
    return total + pow(abs(d), p);
  }
  template <class L>
  NEEDLE_MAP_INLINE L finish(L total, L p) {
    return pow(total, L(1) / p);
  }
};

// f(Norm{}) of the p-norm.
template <class F>
void with_norm(double p, const F& f) {
  if (p == 0) return f(Norm0{});
  if (p == 1) return f(Norm1{});
  if (p == 2) return f(Norm2{});
  if (p == HUGE_VAL) return f(NormMax{});
  f(NormP{});
}

}  // namespace needle::NEEDLE_ISA
