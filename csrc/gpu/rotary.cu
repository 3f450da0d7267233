// Rotary position embedding (Su et al., arXiv 2104.09864) of heads in any order of memory, whose rows are contiguous.
#include "gpu/quad.cuh"
#include "gpu/strided.cuh"

namespace needle::gpu {
namespace {

struct Turn {
  Loop<4> rows;  // y, x, cos, sin
  float *y, *x, *cos, *sin;
  Divisor units;  // of a row: what its threads write twice of
  int64_t apart;  // from a first element to its second: half a row or, interleaved, 1
};

// (x1, x2) to (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2), T of each a thread.
template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) turn(Turn t, uint32_t total) {
  for_elements(total, [&](uint32_t i) {
    const uint32_t row = t.units.quotient(i);
    int64_t at[4];
    t.rows.locate(row, at);
    const int64_t first = static_cast<int64_t>(i - row * t.units.d) * kLanes<T> * (t.apart == 1 ? 2 : 1);
    auto place = [&](float* p, int k, bool second) {
      return reinterpret_cast<T*>(p + at[k] + first + (second ? t.apart : 0));
    };
    auto part = [&](float* p, int k, bool second) { return read(place(p, k, second)); };
    const T x1 = part(t.x, 1, false), x2 = part(t.x, 1, true);
    const T y1 = x1 * part(t.cos, 2, false) - x2 * part(t.sin, 3, false);
    const T y2 = x2 * part(t.cos, 2, true) + x1 * part(t.sin, 3, true);
    write(place(t.y, 0, false), y1), write(place(t.y, 0, true), y2);
  });
}

// Two pairs of neighbours a thread.
__global__ void GPU_BOUNDS(kThreads, 4) turn_neighbours(Turn t, uint32_t total) {
  for_elements(total, [&](uint32_t i) {
    const uint32_t row = t.units.quotient(i);
    int64_t at[4];
    t.rows.locate(row, at);
    auto place = [&](float* p, int k) { return reinterpret_cast<Quad*>(p + at[k]) + (i - row * t.units.d); };
    const Quad x = read(place(t.x, 1)), cos = read(place(t.cos, 2)), sin = read(place(t.sin, 3));
    write(place(t.y, 0), x * cos + Quad(-x.v[1], x.v[0], -x.v[3], x.v[2]) * sin);
  });
}

}  // namespace

void rotary(const rotary_args& c) {
  const View* views[] = {&c.out.y, &c.in.x, &c.in.cos, &c.in.sin};
  const int last = c.out.y.rank - 1;
  const int64_t size = c.out.y.size(), width = c.out.y.shape[last];
  if (size == 0) return;
  bool wide = true;
  View rows[4];
  for (int k = 0; k < 4; k++) {
    wide = wide && quads(*views[k], last);
    rows[k] = *views[k], rows[k].rank--;
  }
  const bool pairs = c.attr.interleaved != 0;
  Turn t = {};
  t.rows = loop_over("rotary", {&rows[0], &rows[1], &rows[2], &rows[3]});
  t.y = rows[0].as<float>(), t.x = rows[1].as<float>(), t.cos = rows[2].as<float>(), t.sin = rows[3].as<float>();
  t.apart = pairs ? 1 : width / 2;
  auto go = [&](auto kernel, int64_t units) {
    if (size > INT32_MAX) fail("rotary", "an array has at most 2^31 elements", std::to_string(size));
    t.units = units;
    const int64_t total = t.rows.total * units;
    launch(kernel, grid_for(total), kThreads, 0, stream_of(c), t, static_cast<uint32_t>(total));
  };
  if (wide && pairs) return go(turn_neighbours, width / 4);
  if (wide && width % 8 == 0) return go(turn<Quad>, width / 8);
  go(turn<float>, width / 2);
}

}  // namespace needle::gpu
