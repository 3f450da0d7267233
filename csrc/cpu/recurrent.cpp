// Recurrent layers over whole sequences: the input's part of the gates is given, the loop over time is here.
#include "cpu/recurrent.h"

namespace needle::NEEDLE_ISA {
namespace {

// projected (T, B, gates H) with dense rows, weight (H, gates H) of any strides, h0 (B, H), bias (gates H), h (T, B,
// H). cell(step, row, column, lanes, h, gate) gives the next h, where gate(g) is what h adds to gate g.
template <int kGates, class Args, class Cell>
void forward(const Args& c, const Cell& cell) {
  const View &out = c.out.h, &w = c.in.weight;
  const Sequence s = {out.shape[0], out.shape[1], out.shape[2], c.attr.reverse != 0};
  if (out.size() == 0) return;
  const float* bias = c.in.bias.template as<const float>();
  Alternating state = {nullptr, s.B, Alternating::stride(s.H)};
  state.data = scratch<float>(c.exec, 3, 2 * s.B * state.ld);
  for (int64_t m = 0; m < s.B; m++) std::memcpy(state.row(0, m), c.in.h0.template as<const float>() + m * s.H, s.H * 4);
  auto pack = [&](int64_t block, float* dst) {
    for (int64_t g = 0; g < kGates; g++)
      pack_columns(w.as<const float>() + g * s.H * w.stride[1], w.stride[0], w.stride[1], s.H, s.H, block, block + 1,
                   dst + g * s.H * kBlock);
  };
  recur<kGates>(c.exec, s, s.T, s.H, state, true, pack,
                [&](int64_t step, int64_t m, int64_t column, int n, const float* p) __attribute__((always_inline)) {
                  auto gate = [&](int64_t g) __attribute__((always_inline)) {
                    const V x = V::load(p + g * kBlock);
                    return bias ? x + load_lanes(bias + g * s.H + column, n) : x;
                  };
                  const V h = cell(s, step, m, column, n, load_lanes(state.row(step, m) + column, n), gate);
                  store_lanes(out.as<float>() + s.at(step, m, s.H) + column, h, n);
                  store_lanes(state.row(step + 1, m) + column, h, n);
                });
}

NEEDLE_INLINE const float* projected_at(const View& v, const Sequence& s, int64_t step, int64_t m, int64_t column) {
  return v.as<const float>() + s.time(step) * v.stride[0] + m * v.stride[1] + column;
}

}  // namespace

void rnn(const rnn_args& c) {
  const bool relu = c.attr.relu;
  forward<1>(c, [&](const Sequence& s, int64_t step, int64_t m, int64_t column, int n, V, auto gate)
                    __attribute__((always_inline)) {
                      const V x = load_lanes(projected_at(c.in.projected, s, step, m, column), n) + gate(0);
                      return relu ? max(V(0.f), x) : tanh(x);
                    });
}

// gates: i, f, g, o after their activations.
void lstm(const lstm_args& c) {
  forward<4>(c, [&](const Sequence& s, int64_t step, int64_t m, int64_t column, int n, V,
                    auto gate) __attribute__((always_inline)) {
    const float* x = projected_at(c.in.projected, s, step, m, column);
    float *kept = c.out.gates.as<float>() + s.at(step, m, 4 * s.H) + column, *cells = c.out.c.as<float>();
    auto total = [&](int64_t g) __attribute__((always_inline)) { return load_lanes(x + g * s.H, n) + gate(g); };
    const V i = sigmoid(total(0)), f = sigmoid(total(1)), g = tanh(total(2)), o = sigmoid(total(3));
    const float* before = step ? cells + s.at(step - 1, m, s.H) : c.in.c0.as<const float>() + m * s.H;
    const V cell = fma(f, load_lanes(before + column, n), i * g);
    store_lanes(kept, i, n), store_lanes(kept + s.H, f, n);
    store_lanes(kept + 2 * s.H, g, n), store_lanes(kept + 3 * s.H, o, n);
    store_lanes(cells + s.at(step, m, s.H) + column, cell, n);
    return o * tanh(cell);
  });
}

// kept: r, z, n after their activations beside what h added to n, (T, B, 4 H).
void gru(const gru_args& c) {
  forward<3>(c, [&](const Sequence& s, int64_t step, int64_t m, int64_t column, int n, V h, auto gate)
                    __attribute__((always_inline)) {
                      const float* x = projected_at(c.in.projected, s, step, m, column);
                      float* kept = c.out.kept.as<float>() + s.at(step, m, 4 * s.H) + column;
                      const V recurred = gate(2);
                      const V r = sigmoid(load_lanes(x, n) + gate(0)), z = sigmoid(load_lanes(x + s.H, n) + gate(1));
                      const V fresh = tanh(fma(r, recurred, load_lanes(x + 2 * s.H, n)));
                      store_lanes(kept, r, n), store_lanes(kept + s.H, z, n);
                      store_lanes(kept + 2 * s.H, fresh, n), store_lanes(kept + 3 * s.H, recurred, n);
                      return fma(z, h - fresh, fresh);
                    });
}

}  // namespace needle::NEEDLE_ISA
