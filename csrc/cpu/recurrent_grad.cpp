// Gradients of recurrent layers, backwards over time: of the gates before their activations, and of the first state.
#include "cpu/recurrent.h"

namespace needle::NEEDLE_ISA {
namespace {

// The gradient of h comes from `dy` (T, B, H) and from the gates of the step after: out[0] (T, B, gates H) times the
// weight's transpose. cell(step, row, column, lanes, dh, gate) gives gate(g, gradient of what h adds to gate g). dh0 is
// where a cell may keep the part of the gradient that goes by the gates.
template <int kGates, class Args, class Cell>
void backward(const Args& c, const View& w, const View& dy, const View& dgates, const View& dh0, const Cell& cell) {
  const Sequence s = {dy.shape[0], dy.shape[1], dy.shape[2], c.attr.reverse != 0};
  if (dh0.size() == 0) return;
  const int64_t K = kGates * s.H;
  Alternating gates = {nullptr, s.B, Alternating::stride(K)};
  gates.data = scratch<float>(c.exec, 3, 2 * s.B * gates.ld);
  std::memset(dh0.as<float>(), 0, s.B * s.H * 4);
  auto pack = [&](int64_t block, float* dst) {
    pack_columns(w.as<const float>(), w.stride[1], w.stride[0], K, s.H, block, block + 1, dst);
  };
  recur<1>(c.exec, s, s.T + 1, K, gates, false, pack,
           [&](int64_t back, int64_t m, int64_t column, int n, const float* p) __attribute__((always_inline)) {
             float* first = dh0.as<float>() + m * s.H + column;
             const V carried = load_lanes(first, n) + V::load(p);
             const int64_t step = s.T - 1 - back;
             if (step < 0) return store_lanes(first, carried, n);
             const V dh = carried + load_lanes(dy.as<const float>() + s.at(step, m, s.H) + column, n);
             float *to = dgates.as<float>() + s.at(step, m, K) + column, *next = gates.row(back + 1, m) + column;
             cell(s, step, m, column, n, dh, [&](int64_t g, V d) __attribute__((always_inline)) {
               store_lanes(to + g * s.H, d, n);
               store_lanes(next + g * s.H, d, n);
             });
           });
}

NEEDLE_INLINE V sigmoid_slope(V y) { return y * (V(1.f) - y); }
NEEDLE_INLINE V tanh_slope(V y) { return fnma(y, y, V(1.f)); }

}  // namespace

void rnn_grad(const rnn_grad_args& c) {
  const View &y = c.in.h, &dh0 = c.out.dh0;
  const bool relu = c.attr.relu;
  backward<1>(c, c.in.weight, c.in.dh, c.out.dgates, dh0,
              [&](const Sequence& s, int64_t step, int64_t m, int64_t column, int n, V dh, auto gate)
                  __attribute__((always_inline)) {
                    const V h = load_lanes(y.as<const float>() + s.at(step, m, s.H) + column, n);
                    gate(0, relu ? select(lt(V(0.f), h), dh, V(0.f)) : dh * tanh_slope(h));
                  });
}

void lstm_grad(const lstm_grad_args& c) {
  const View &c0 = c.in.c0, &cells = c.in.c, &kept = c.in.gates, &dc0 = c.out.dc0;
  const float* dc = c.in.dc.as<const float>();
  std::memset(dc0.as<float>(), 0, dc0.size() * 4);
  backward<4>(c, c.in.weight, c.in.dh, c.out.dgates, c.out.dh0,
              [&](const Sequence& s, int64_t step, int64_t m, int64_t column, int n, V dh, auto gate)
                  __attribute__((always_inline)) {
                    const float* k = kept.as<const float>() + s.at(step, m, 4 * s.H) + column;
                    const V i = load_lanes(k, n), f = load_lanes(k + s.H, n), g = load_lanes(k + 2 * s.H, n),
                            o = load_lanes(k + 3 * s.H, n);
                    const float* known = cells.as<const float>();
                    const V bent = tanh(load_lanes(known + s.at(step, m, s.H) + column, n));
                    const float* before = step ? known + s.at(step - 1, m, s.H) : c0.as<const float>() + m * s.H;
                    float* later = dc0.as<float>() + m * s.H + column;
                    V dcell = fma(dh * o, tanh_slope(bent), load_lanes(later, n));
                    if (dc) dcell = dcell + load_lanes(dc + s.at(step, m, s.H) + column, n);
                    gate(0, dcell * g * sigmoid_slope(i));
                    gate(1, dcell * load_lanes(before + column, n) * sigmoid_slope(f));
                    gate(2, dcell * i * tanh_slope(g));
                    gate(3, dh * bent * sigmoid_slope(o));
                    store_lanes(later, dcell * f, n);
                  });
}

// dgates: of what h adds to the gates, dprojected of what x adds.
void gru_grad(const gru_grad_args& c) {
  const View &h0 = c.in.h0, &states = c.in.h, &kept = c.in.kept, &dx = c.out.dprojected, &dh0 = c.out.dh0;
  backward<3>(c, c.in.weight, c.in.dh, c.out.dgates, dh0,
              [&](const Sequence& s, int64_t step, int64_t m, int64_t column, int n, V dh, auto gate)
                  __attribute__((always_inline)) {
                    const float* k = kept.as<const float>() + s.at(step, m, 4 * s.H) + column;
                    const V r = load_lanes(k, n), z = load_lanes(k + s.H, n), fresh = load_lanes(k + 2 * s.H, n),
                            recurred = load_lanes(k + 3 * s.H, n);
                    const float* before =
                        step ? states.as<const float>() + s.at(step - 1, m, s.H) : h0.as<const float>() + m * s.H;
                    const V dn = dh * (V(1.f) - z) * tanh_slope(fresh);
                    const V dr = dn * recurred * sigmoid_slope(r);
                    const V dz = dh * (load_lanes(before + column, n) - fresh) * sigmoid_slope(z);
                    float* to = dx.as<float>() + s.at(step, m, 3 * s.H) + column;
                    store_lanes(to, dr, n), store_lanes(to + s.H, dz, n), store_lanes(to + 2 * s.H, dn, n);
                    gate(0, dr), gate(1, dz), gate(2, dn * r);
                    store_lanes(dh0.as<float>() + m * s.H + column, dh * z, n);
                  });
}

}  // namespace needle::NEEDLE_ISA
