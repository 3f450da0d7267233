// Rotary position embedding (Su et al., arXiv 2104.09864) of heads in any order of memory.
#include "cpu/strided.h"

namespace needle::NEEDLE_ISA {
namespace {

// Two halves of a row: y1 = x1 cos1 - x2 sin1, y2 = x2 cos2 + x1 sin2.
void turn_halves(const float* x, const float* cos, const float* sin, int64_t half, float* y) {
  for_lanes<float>(half, [&](int64_t i, int n) {
    const auto at = [&](const float* p) { return load_lanes(p + i, n); };
    const V first = at(x), second = at(x + half);
    const V low = first * at(cos) - second * at(sin), high = second * at(cos + half) + first * at(sin + half);
    store_lanes(y + i, low, n);
    store_lanes(y + half + i, high, n);
  });
}

void turn_neighbours(const float* x, const float* cos, const float* sin, int64_t half, float* y) {
  for (int64_t i = 0; i < 2 * half; i += 2) {
    const float first = x[i], second = x[i + 1];
    y[i] = first * cos[i] - second * sin[i];
    y[i + 1] = second * cos[i + 1] + first * sin[i + 1];
  }
}

}  // namespace

void rotary(const rotary_args& c) {
  const View* given[] = {&c.out.y, &c.in.x, &c.in.cos, &c.in.sin};
  if (c.out.y.size() == 0) return;
  const int64_t half = c.out.y.shape[c.out.y.rank - 1] / 2;
  View rows[4];
  for (int k = 0; k < 4; k++) rows[k] = *given[k], rows[k].rank--;
  const Loop<4> loop = loop_over({&rows[0], &rows[1], &rows[2], &rows[3]});
  parallel_ranges(c.exec, loop.outer() * loop.inner(), 4 * half, [&](int64_t begin, int64_t end) {
    auto o = Odometer<4>::start(loop, loop.rank, begin);
    for (int64_t i = begin; i < end; i++, o.next()) {
      const auto at = [&](int k) { return rows[k].as<float>() + o.at[k]; };
      (c.attr.interleaved ? turn_neighbours : turn_halves)(at(1), at(2), at(3), half, at(0));
    }
  });
}

}  // namespace needle::NEEDLE_ISA
