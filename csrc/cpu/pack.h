// Packing: strided weights into columns of 16 lanes, at the speed of memory for the strides that weights have.
#pragma once
#include "cpu/tile.h"

namespace needle::NEEDLE_ISA {

// Lane l of column c is data[l * s_lane + c * s_column] for l in [first, last), and zero for other lanes.
struct Lanes {
  const float* data;
  int64_t s_lane, s_column;
  int64_t first, last;
};

// Where columns go: 16 lanes from 16 * `block` on of column c to data + block * panel + 16 * rows[c * step], or to
// 16 * c there if `rows` is null.
struct Panels {
  float* data;
  int64_t blocks, panel;
  const int32_t* rows = nullptr;
  int64_t step = 1;
};
void pack_lanes(const Lanes& from, int64_t columns, const Panels& to);

// Weights before they are packed: of each group, and how far outputs, inputs, groups and taps lie apart. Taps are in
// the order in which they lie in memory: flipped axes are turned round, and tap (kh, kw) is the one at position(kh,
// kw).
struct Weights {
  int64_t groups, outputs, inputs, taps_h, taps_w, taps;
  const float* data;
  int64_t s_output, s_input, s_group, s_h, s_w;
  bool flip_h, flip_w;

  // w: (outputs, inputs / groups, kernel height, kernel width).
  static Weights of(const View& w, int64_t groups);
  // w: (inputs, outputs / groups, kernel height, kernel width).
  static Weights of_transposed(const View& w, int64_t groups);
  int64_t position(int64_t kh, int64_t kw) const {
    return (flip_h ? taps_h - 1 - kh : kh) * taps_w + (flip_w ? taps_w - 1 - kw : kw);
  }
};

// Blocks of 16 outputs from `output` on and inputs [i0, i1) of all groups, zero beyond the last and between groups. The
// tap at position t of input i is column (i - i0) * taps + t.
void pack_inputs(const Weights& w, int64_t output, int64_t i0, int64_t i1, const Panels& to);

// f(first, last, i0, i1) for all of `inputs` of all blocks of 16 outputs. Where outputs are nearer to each other in
// memory than inputs, four blocks come at once, as a line has outputs of several, and for the same `few` inputs then
// the next four: rows of memory are read from end to end, a few at a time. Else `many` inputs come at once.
template <class F>
void pack_parallel(const Exec* exec, int64_t s_output, int64_t s_input, int64_t blocks, int64_t inputs, int64_t few,
                   int64_t many, double work, const F& f) {
  const bool inside = (s_output < 0 ? -s_output : s_output) < (s_input < 0 ? -s_input : s_input);
  const int64_t together = inside ? 4 : 1, step = inside ? few : many;
  const int64_t units = ceil_div(blocks, together), parts = ceil_div(inputs, step);
  parallel_parts(exec, units * parts, work, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at++) {
      const int64_t first = (inside ? at % units : at / parts) * together,
                    i = (inside ? at / units : at % parts) * step;
      f(first, smaller(first + together, blocks), i, smaller(i + step, inputs));
    }
  });
}

}  // namespace needle::NEEDLE_ISA
