// Steps of optimisers, for one element or lane L of numbers T. A rule is made of its row's attributes; step(rule, w, g,
// s) moves the parameter w by its gradient g. s.read(k) and s.write(k, v) reach its state, the row's output k, which is
// not touched unless it is used.
#pragma once
#include "math/maps.h"

namespace needle::NEEDLE_ISA {

// The gradient with weight decay; without, weights stay out of it: 0 times infinity is NaN.
template <class L>
NEEDLE_MAP_INLINE L decayed(L g, L w, L decay, bool on) {
  return on ? g + decay * w : g;
}

// torch.optim.SGD: the first step starts the velocity at the gradient; without momentum it is not touched.
template <class T, class L>
struct Sgd {
  enum { kVelocity = 1 };
  L lr, momentum, fresh, decay;
  bool decays, moves, nesterov, first;

  Sgd(double lr, double momentum, double dampening, double decay, bool moves, bool nesterov, bool first)
      : lr(static_cast<T>(lr)),
        momentum(static_cast<T>(momentum)),
        fresh(static_cast<T>(1 - dampening)),
        decay(static_cast<T>(decay)),
        decays(decay != 0),
        moves(moves),
        nesterov(nesterov),
        first(first) {}
  template <class Attr>
  explicit Sgd(const Attr& a)
      : Sgd(a.lr, a.momentum, a.dampening, a.weight_decay, a.momentum != 0, a.nesterov != 0, a.first != 0) {}

  template <class State>
  NEEDLE_MAP_INLINE void step(const Sgd& r, L& w, L g, const State& s) {
    g = decayed(g, w, r.decay, r.decays);
    L v = r.first ? g : r.momentum * s.read(kVelocity) + r.fresh * g;
    if (r.moves) s.write(kVelocity, v);
    w = w - r.lr * (r.nesterov ? g + r.momentum * v : v);
  }
};

// The course's rule: the velocity is a running mean of gradients.
template <class T, class L>
struct NeedleSgd : Sgd<T, L> {
  template <class Attr>
  explicit NeedleSgd(const Attr& a) : Sgd<T, L>(a.lr, a.momentum, a.momentum, a.weight_decay, true, false, false) {}
};

// torch.optim.Adam, and AdamW when `decoupled`; the largest second moment is not touched unless `amsgrad`.
template <class T, class L>
struct Adam {
  enum { kMean = 1, kSquare, kLargest };
  L beta1, beta2, fresh1, fresh2, eps, decay, shrink, size, root;  // of a step; of its second correction
  bool decays, decoupled, amsgrad;

  template <class Attr>
  explicit Adam(const Attr& a)
      : beta1(static_cast<T>(a.beta1)),
        beta2(static_cast<T>(a.beta2)),
        fresh1(static_cast<T>(1 - a.beta1)),
        fresh2(static_cast<T>(1 - a.beta2)),
        eps(static_cast<T>(a.eps)),
        decay(static_cast<T>(a.weight_decay)),
        shrink(static_cast<T>(1 - a.lr * a.weight_decay)),
        size(static_cast<T>(a.lr / (1 - ::pow(a.beta1, a.step)))),
        root(static_cast<T>(1 / ::sqrt(1 - ::pow(a.beta2, a.step)))),
        decays(a.weight_decay != 0),
        decoupled(a.decoupled != 0),
        amsgrad(a.amsgrad != 0) {}

  template <class State>
  NEEDLE_MAP_INLINE void step(const Adam& r, L& w, L g, const State& s) {
    if (r.decoupled)
      w = w * r.shrink;
    else
      g = decayed(g, w, r.decay, r.decays);
    L m = r.beta1 * s.read(kMean) + r.fresh1 * g, v = r.beta2 * s.read(kSquare) + r.fresh2 * g * g;
    s.write(kMean, m);
    s.write(kSquare, v);
    if (r.amsgrad) {
      v = max(s.read(kLargest), v);  // in this order NaN stays NaN
      s.write(kLargest, v);
    }
    w = w - r.size * m / (sqrt(v) * r.root + r.eps);
  }
};

// torch.optim.RMSprop: running mean of squares, momentum, running mean; the last two are not touched unless used.
template <class T, class L>
struct RmsProp {
  enum { kSquare = 1, kVelocity, kMean };
  L lr, alpha, fresh, eps, decay, momentum;
  bool moves, decays, centered;

  template <class Attr>
  explicit RmsProp(const Attr& a)
      : lr(static_cast<T>(a.lr)),
        alpha(static_cast<T>(a.alpha)),
        fresh(static_cast<T>(1 - a.alpha)),
        eps(static_cast<T>(a.eps)),
        decay(static_cast<T>(a.weight_decay)),
        momentum(static_cast<T>(a.momentum)),
        moves(a.momentum != 0),
        decays(a.weight_decay != 0),
        centered(a.centered != 0) {}

  template <class State>
  NEEDLE_MAP_INLINE L running(const RmsProp& r, int k, L x, const State& s) {
    L mean = r.alpha * s.read(k) + r.fresh * x;
    s.write(k, mean);
    return mean;
  }
  template <class State>
  NEEDLE_MAP_INLINE void step(const RmsProp& r, L& w, L g, const State& s) {
    g = decayed(g, w, r.decay, r.decays);
    L spread = running(r, kSquare, g * g, s);
    if (r.centered) {
      L mean = running(r, kMean, g, s);
      spread = spread - mean * mean;
    }
    L by = g / (sqrt(spread) + r.eps);
    if (r.moves) {
      by = r.momentum * s.read(kVelocity) + by;
      s.write(kVelocity, by);
    }
    w = w - r.lr * by;
  }
};

}  // namespace needle::NEEDLE_ISA
