// Steps of optimisers, in place on contiguous parameters and state. A call steps any number of parameters: outputs are
// a parameter and its state, then the next parameter and its state; inputs are their gradients.
#include "cpu/strided.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kPiece = 4096;  // elements that one thread takes at a time

NEEDLE_INLINE int64_t pieces(const View& v) { return ceil_div(v.size(), kPiece); }

// f(T{}, out, grad, i, n) for every vector of every parameter.
template <class Args, class F>
NEEDLE_INLINE void for_parameters(const Args& c, const F& f) {
  int64_t total = 0;
  for (int g = 0; g < c.groups; g++) total += pieces(c.out[g].parameter);
  parallel_ranges(c.exec, total, kPiece, [&](int64_t begin, int64_t end) {
    int64_t first = 0;  // the first piece of parameter g
    for (int g = 0; g < c.groups && first < end; g++) {
      const auto& out = c.out[g];
      const View& parameter = out.parameter;
      const int64_t from = larger(begin - first, 0) * kPiece, to = smaller((end - first) * kPiece, parameter.size());
      first += pieces(parameter);
      if (from >= to) continue;
      auto run = [&](auto t) {
        using T = decltype(t);
        for_lanes<T>(to - from, [&](int64_t i, int n) { f(t, out, c.in[g].grad.template as<T>(), from + i, n); });
      };
      parameter.dtype == DType::f32 ? run(float{}) : run(double{});
    }
  });
}

template <class T>
NEEDLE_INLINE T* element(const View& v, int64_t i) {
  return v.as<T>() + i;
}

// The gradient with weight decay; without, weights stay out of it: 0 times infinity is NaN.
template <class L>
NEEDLE_INLINE L decayed(L g, L w, L decay, bool on) {
  return on ? g + decay * w : g;
}

}  // namespace

// torch.optim.SGD: the first step starts the velocity at the gradient; without momentum it is not touched.
void sgd_step(const sgd_step_args& c) {
  bool moves = c.attr.momentum != 0, decays = c.attr.weight_decay != 0, nesterov = c.attr.nesterov,
       first = c.attr.first;
  for_parameters(c, [&](auto t, const auto& out, const auto* grad, int64_t i, int n) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    auto number = [](double x) { return L(static_cast<T>(x)); };
    T *p = element<T>(out.parameter, i), *velocity = element<T>(out.velocity, i);
    L w = load_lanes(p, n), g = decayed(load_lanes(grad + i, n), w, number(c.attr.weight_decay), decays);
    L momentum = number(c.attr.momentum);
    L v = first ? g : momentum * load_lanes(velocity, n) + number(1 - c.attr.dampening) * g;
    if (moves) store_lanes(velocity, v, n);
    store_lanes(p, w - number(c.attr.lr) * (nesterov ? g + momentum * v : v), n);
  });
}

// The course's rule: the velocity is a running mean of gradients.
void needle_sgd_step(const needle_sgd_step_args& c) {
  bool decays = c.attr.weight_decay != 0;
  for_parameters(c, [&](auto t, const auto& out, const auto* grad, int64_t i, int n) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    auto number = [](double x) { return L(static_cast<T>(x)); };
    T *p = element<T>(out.parameter, i), *velocity = element<T>(out.velocity, i);
    L w = load_lanes(p, n), g = decayed(load_lanes(grad + i, n), w, number(c.attr.weight_decay), decays);
    L u = number(c.attr.momentum) * load_lanes(velocity, n) + number(1 - c.attr.momentum) * g;
    store_lanes(velocity, u, n);
    store_lanes(p, w - number(c.attr.lr) * u, n);
  });
}

// torch.optim.Adam, and AdamW when `decoupled`; the largest second moment is not touched unless `amsgrad`.
void adam_step(const adam_step_args& c) {
  double lr = c.attr.lr, beta1 = c.attr.beta1, beta2 = c.attr.beta2, eps = c.attr.eps, decay = c.attr.weight_decay,
         step = c.attr.step;
  bool decoupled = c.attr.decoupled, amsgrad = c.attr.amsgrad;
  double step_size = lr / (1 - ::pow(beta1, step)), root = 1 / ::sqrt(1 - ::pow(beta2, step));
  for_parameters(c, [&](auto t, const auto& out, const auto* grad, int64_t i, int n) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    auto number = [](double x) { return L(static_cast<T>(x)); };
    T *p = element<T>(out.parameter, i), *mp = element<T>(out.mean, i), *vp = element<T>(out.square, i);
    L w = load_lanes(p, n), g = load_lanes(grad + i, n);
    if (decoupled)
      w = w * number(1 - lr * decay);
    else
      g = decayed(g, w, number(decay), decay != 0);
    L m = number(beta1) * load_lanes(mp, n) + number(1 - beta1) * g;
    L v = number(beta2) * load_lanes(vp, n) + number(1 - beta2) * g * g;
    store_lanes(mp, m, n);
    store_lanes(vp, v, n);
    if (amsgrad) {
      T* largest = element<T>(out.largest, i);
      v = max(load_lanes(largest, n), v);
      store_lanes(largest, v, n);
    }
    store_lanes(p, w - number(step_size) * m / (sqrt(v) * number(root) + number(eps)), n);
  });
}

// torch.optim.RMSprop: running mean of squares, momentum, running mean; the last two are not touched unless used.
void rmsprop_step(const rmsprop_step_args& c) {
  bool decays = c.attr.weight_decay != 0, centered = c.attr.centered;
  for_parameters(c, [&](auto t, const auto& out, const auto* grad, int64_t i, int n) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    auto number = [](double x) { return L(static_cast<T>(x)); };
    auto running = [&](const View& v, L x) {
      T* p = element<T>(v, i);
      L mean = number(c.attr.alpha) * load_lanes(p, n) + number(1 - c.attr.alpha) * x;
      store_lanes(p, mean, n);
      return mean;
    };
    T* p = element<T>(out.parameter, i);
    L w = load_lanes(p, n), g = decayed(load_lanes(grad + i, n), w, number(c.attr.weight_decay), decays);
    L spread = running(out.square, g * g);
    if (centered) {
      L mean = running(out.mean, g);
      spread = spread - mean * mean;
    }
    L step = g / (sqrt(spread) + number(c.attr.eps));
    if (c.attr.momentum != 0) {
      T* velocity = element<T>(out.velocity, i);
      step = number(c.attr.momentum) * load_lanes(velocity, n) + step;
      store_lanes(velocity, step, n);
    }
    store_lanes(p, w - number(c.attr.lr) * step, n);
  });
}

}  // namespace needle::NEEDLE_ISA
