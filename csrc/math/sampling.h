// What a place of a grid reads of an image along an axis, on any lane type L (Jaderberg et al., arXiv 1506.02025).
#pragma once
#include "math/maps.h"

namespace needle::NEEDLE_ISA {

enum Mode { kBilinear, kNearest, kBicubic };
enum Padding { kZeros, kBorder, kReflection };

struct SamplingRule {
  int mode, padding;
  bool corners;
};

// A coordinate within an axis, and its slope by the one before. NaN stays.
template <class L>
NEEDLE_MAP_INLINE L padded(const SamplingRule& s, L x, L size, L* slope) {
  if (s.padding == kZeros) return x;
  const L zero(0), one(1), last = size - one;
  if (s.padding == kReflection) {  // the distance to the nearest of the places that are the first edge again
    const L low(s.corners ? 0.f : -0.5f), half(0.5f), span = s.corners ? last : size;
    const L from = x - low, away = from - round(from * (half / span)) * (span + span);
    const auto wide = lt(zero, span);
    *slope = select(wide, select(lt(away, zero), -*slope, *slope), zero);
    x = select(wide, abs(away) + low, x * zero);
  }
  *slope = select(lt(zero, x), select(lt(x, last), *slope, zero), zero);
  return max(zero, min(last, x));
}

// Keys' kernel at a distance, and its slope.
template <class L>
NEEDLE_MAP_INLINE L cubic(L x, L* slope) {
  const L a(-0.75f), one(1), d = abs(x);
  const auto near = le(d, one);
  const L close = ((a + L(2)) * d - (a + L(3))) * d * d + one, far = ((d - L(5)) * d + L(8)) * d * a - L(4) * a;
  const L of_close = (L(3) * (a + L(2)) * d - L(2) * (a + L(3))) * d, of_far = ((L(3) * d - L(10)) * d + L(8)) * a;
  const L of_distance = select(near, of_close, of_far);
  *slope = select(lt(x, L(0)), -of_distance, of_distance);
  return select(near, close, far);
}

// tap(k, element, weight, slope of the weight by the grid's number) of number g of a grid along an axis of `size`.
template <class L, class F>
NEEDLE_MAP_INLINE void taps_along(const SamplingRule& s, L g, L size, const F& tap) {
  const L zero(0), one(1), half(0.5f), last = size - one;
  const L x = s.corners ? (g + one) * (last * half) : ((g + one) * size - one) * half;
  const L scale = (s.corners ? last : size) * half;
  const auto inside = [&](int k, L place, L weight, L slope) __attribute__((always_inline)) {
    const L element = max(min(place, last), zero);
    const auto there = eq(place, element);
    tap(k, element, select(there, weight, weight * zero), select(there, slope, zero));  // a NaN stays
  };
  if (s.mode == kBicubic) {
    const L first = floor(x);
    for (int k = 0; k < 4; k++) {
      const L step(static_cast<float>(k - 1));
      L change, unused(0);
      const L weight = cubic(x - first - step, &change);
      inside(k, padded(s, first + step, size, &unused), weight, change * scale);
    }
    return;
  }
  L slope = scale;
  const L at = padded(s, x, size, &slope);
  if (s.mode == kNearest) return inside(0, round(at), one, zero);
  const L first = floor(at);
  inside(0, first, first + one - at, -slope);
  inside(1, first + one, at - first, slope);
}

}  // namespace needle::NEEDLE_ISA
