// Steps of optimisers, in place on contiguous parameters and state. A call steps any number of parameters: outputs are
// a parameter and its state, then the next parameter and its state; inputs are their gradients.
#include "cpu/strided.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kPiece = 4096;  // elements that one thread takes at a time

NEEDLE_INLINE int64_t pieces(const View& v) { return ceil_div(v.size(), kPiece); }

// f(T{}, out, in, i, n) for every vector of every parameter, whose outputs start at `out`.
template <class F>
NEEDLE_INLINE void for_parameters(const Call& c, int outputs, const F& f) {
  int64_t total = 0;
  for (int g = 0; g < c.n_in; g++) total += pieces(c.out[g * outputs]);
  parallel_ranges(c.exec, total, kPiece, [&](int64_t begin, int64_t end) {
    int64_t first = 0;  // the first piece of parameter g
    for (int g = 0; g < c.n_in && first < end; g++) {
      const View *out = c.out + g * outputs, *in = c.in + g;
      const int64_t from = larger(begin - first, 0) * kPiece, to = smaller((end - first) * kPiece, out->size());
      first += pieces(*out);
      if (from >= to) continue;
      auto run = [&](auto t) {
        using T = decltype(t);
        for_lanes<T>(to - from, [&](int64_t i, int n) { f(t, out, in, from + i, n); });
      };
      out->dtype == DType::f32 ? run(float{}) : run(double{});
    }
  });
}

// The gradient with weight decay; without, weights stay out of it: 0 times infinity is NaN.
template <class L>
NEEDLE_INLINE L decayed(L g, L w, L decay, bool on) {
  return on ? g + decay * w : g;
}

}  // namespace

// torch.optim.SGD: the first step starts the velocity at the gradient; without momentum it is not touched.
void sgd_step(const Call& c) {
  bool moves = c.attr[1] != 0, decays = c.attr[3] != 0, nesterov = c.i(4), first = c.i(5);
  for_parameters(c, 2, [&](auto t, const View* out, const View* in, int64_t i, int n) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    auto number = [](double x) { return L(static_cast<T>(x)); };
    T *p = out[0].as<T>() + i, *velocity = out[1].as<T>() + i;
    L w = load_lanes(p, n), g = decayed(load_lanes(in->as<T>() + i, n), w, number(c.attr[3]), decays);
    L momentum = number(c.attr[1]);
    L v = first ? g : momentum * load_lanes(velocity, n) + number(1 - c.attr[2]) * g;
    if (moves) store_lanes(velocity, v, n);
    store_lanes(p, w - number(c.attr[0]) * (nesterov ? g + momentum * v : v), n);
  });
}

// The course's rule: the velocity is a running mean of gradients.
void needle_sgd_step(const Call& c) {
  bool decays = c.attr[2] != 0;
  for_parameters(c, 2, [&](auto t, const View* out, const View* in, int64_t i, int n) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    auto number = [](double x) { return L(static_cast<T>(x)); };
    T *p = out[0].as<T>() + i, *velocity = out[1].as<T>() + i;
    L w = load_lanes(p, n), g = decayed(load_lanes(in->as<T>() + i, n), w, number(c.attr[2]), decays);
    L u = number(c.attr[1]) * load_lanes(velocity, n) + number(1 - c.attr[1]) * g;
    store_lanes(velocity, u, n);
    store_lanes(p, w - number(c.attr[0]) * u, n);
  });
}

// torch.optim.Adam, and AdamW when `decoupled`; the largest second moment is not touched unless `amsgrad`.
void adam_step(const Call& c) {
  double lr = c.attr[0], beta1 = c.attr[1], beta2 = c.attr[2], eps = c.attr[3], decay = c.attr[4], step = c.attr[5];
  bool decoupled = c.i(6), amsgrad = c.i(7);
  double step_size = lr / (1 - ::pow(beta1, step)), root = 1 / ::sqrt(1 - ::pow(beta2, step));
  for_parameters(c, 4, [&](auto t, const View* out, const View* in, int64_t i, int n) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    auto number = [](double x) { return L(static_cast<T>(x)); };
    T *p = out[0].as<T>() + i, *mp = out[1].as<T>() + i, *vp = out[2].as<T>() + i;
    L w = load_lanes(p, n), g = load_lanes(in->as<T>() + i, n);
    if (decoupled)
      w = w * number(1 - lr * decay);
    else
      g = decayed(g, w, number(decay), decay != 0);
    L m = number(beta1) * load_lanes(mp, n) + number(1 - beta1) * g;
    L v = number(beta2) * load_lanes(vp, n) + number(1 - beta2) * g * g;
    store_lanes(mp, m, n);
    store_lanes(vp, v, n);
    if (amsgrad) {
      T* largest = out[3].as<T>() + i;
      v = max(load_lanes(largest, n), v);
      store_lanes(largest, v, n);
    }
    store_lanes(p, w - number(step_size) * m / (sqrt(v) * number(root) + number(eps)), n);
  });
}

// torch.optim.RMSprop: running mean of squares, momentum, running mean; the last two are not touched unless used.
void rmsprop_step(const Call& c) {
  bool decays = c.attr[3] != 0, centered = c.i(5);
  for_parameters(c, 4, [&](auto t, const View* out, const View* in, int64_t i, int n) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    auto number = [](double x) { return L(static_cast<T>(x)); };
    auto running = [&](const View& v, L x) {
      T* p = v.as<T>() + i;
      L mean = number(c.attr[1]) * load_lanes(p, n) + number(1 - c.attr[1]) * x;
      store_lanes(p, mean, n);
      return mean;
    };
    T* p = out[0].as<T>() + i;
    L w = load_lanes(p, n), g = decayed(load_lanes(in->as<T>() + i, n), w, number(c.attr[3]), decays);
    L spread = running(out[1], g * g);
    if (centered) {
      L mean = running(out[3], g);
      spread = spread - mean * mean;
    }
    L step = g / (sqrt(spread) + number(c.attr[2]));
    if (c.attr[4] != 0) {
      T* velocity = out[2].as<T>() + i;
      step = number(c.attr[4]) * load_lanes(velocity, n) + step;
      store_lanes(velocity, step, n);
    }
    store_lanes(p, w - number(c.attr[0]) * step, n);
  });
}

}  // namespace needle::NEEDLE_ISA
