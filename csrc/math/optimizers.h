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

// What Adam and its relatives share: weight decay, in the gradient or `decoupled` from it, and running means of the
// gradient and of its square.
template <class T, class L>
struct Moments {
  enum { kMean = 1, kSquare };
  L beta1, beta2, fresh1, fresh2, eps, decay, shrink;
  bool decays, decoupled;

  template <class Attr>
  explicit Moments(const Attr& a)
      : beta1(static_cast<T>(a.beta1)),
        beta2(static_cast<T>(a.beta2)),
        fresh1(static_cast<T>(1 - a.beta1)),
        fresh2(static_cast<T>(1 - a.beta2)),
        eps(static_cast<T>(a.eps)),
        decay(static_cast<T>(a.weight_decay)),
        shrink(static_cast<T>(1 - a.lr * a.weight_decay)),
        decays(a.weight_decay != 0),
        decoupled(a.decoupled != 0) {}

  // The new means, written to the state; w and g as weight decay leaves them.
  template <class State>
  NEEDLE_MAP_INLINE void move(const Moments& r, L& w, L& g, L& mean, L& square, const State& s) {
    if (r.decoupled)
      w = w * r.shrink;
    else
      g = decayed(g, w, r.decay, r.decays);
    mean = r.beta1 * s.read(kMean) + r.fresh1 * g;
    square = r.beta2 * s.read(kSquare) + r.fresh2 * g * g;
    s.write(kMean, mean);
    s.write(kSquare, square);
  }
};

// torch.optim.Adam, and AdamW when `decoupled`; the largest second moment is not touched unless `amsgrad`.
template <class T, class L>
struct Adam : Moments<T, L> {
  enum { kLargest = 3 };
  L size, root;  // of a step; of its second correction
  bool amsgrad;

  template <class Attr>
  explicit Adam(const Attr& a)
      : Moments<T, L>(a),
        size(static_cast<T>(a.lr / (1 - ::pow(a.beta1, a.step)))),
        root(static_cast<T>(1 / ::sqrt(1 - ::pow(a.beta2, a.step)))),
        amsgrad(a.amsgrad != 0) {}

  template <class State>
  NEEDLE_MAP_INLINE void step(const Adam& r, L& w, L g, const State& s) {
    L m, v;
    Adam::move(r, w, g, m, v, s);
    if (r.amsgrad) {
      v = max(s.read(kLargest), v);  // in this order NaN stays NaN
      s.write(kLargest, v);
    }
    w = w - r.size * m / (sqrt(v) * r.root + r.eps);
  }
};

// torch.optim.NAdam: steps of sizes `gradient_rate` and `mean_rate` along the gradient and its mean.
template <class T, class L>
struct NAdam : Moments<T, L> {
  L gradient_rate, mean_rate, root;

  template <class Attr>
  explicit NAdam(const Attr& a)
      : Moments<T, L>(a),
        gradient_rate(static_cast<T>(a.gradient_rate)),
        mean_rate(static_cast<T>(a.mean_rate)),
        root(static_cast<T>(1 / ::sqrt(1 - ::pow(a.beta2, a.step)))) {}

  template <class State>
  NEEDLE_MAP_INLINE void step(const NAdam& r, L& w, L g, const State& s) {
    L m, v;
    NAdam::move(r, w, g, m, v, s);
    w = w - (r.gradient_rate * g + r.mean_rate * m) / (sqrt(v) * r.root + r.eps);
  }
};

// torch.optim.RAdam: the mean, `size` long, over the root of squares once that is `rectified`.
template <class T, class L>
struct RAdam : Moments<T, L> {
  L size;
  bool rectified;

  template <class Attr>
  explicit RAdam(const Attr& a) : Moments<T, L>(a), size(static_cast<T>(a.size)), rectified(a.rectified != 0) {}

  template <class State>
  NEEDLE_MAP_INLINE void step(const RAdam& r, L& w, L g, const State& s) {
    L m, v;
    RAdam::move(r, w, g, m, v, s);
    w = w - (r.rectified ? r.size * m / (sqrt(v) + r.eps) : r.size * m);
  }
};

// torch.optim.Adamax: the mean over the largest gradient so far, which fades by beta2.
template <class T, class L>
struct Adamax {
  enum { kMean = 1, kLargest };
  L beta1, fresh1, beta2, eps, decay, size;
  bool decays;

  template <class Attr>
  explicit Adamax(const Attr& a)
      : beta1(static_cast<T>(a.beta1)),
        fresh1(static_cast<T>(1 - a.beta1)),
        beta2(static_cast<T>(a.beta2)),
        eps(static_cast<T>(a.eps)),
        decay(static_cast<T>(a.weight_decay)),
        size(static_cast<T>(a.lr / (1 - ::pow(a.beta1, a.step)))),
        decays(a.weight_decay != 0) {}

  template <class State>
  NEEDLE_MAP_INLINE void step(const Adamax& r, L& w, L g, const State& s) {
    g = decayed(g, w, r.decay, r.decays);
    L m = r.beta1 * s.read(kMean) + r.fresh1 * g, n = max(r.beta2 * s.read(kLargest), abs(g) + r.eps);
    s.write(kMean, m);
    s.write(kLargest, n);
    w = w - r.size * m / n;
  }
};

// Lion (Chen et al., arXiv 2302.06675): the sign of the gradient mixed with its mean; weight decay apart from both.
template <class T, class L>
struct Lion {
  enum { kMean = 1 };
  L lr, beta1, fresh1, beta2, fresh2, shrink;

  template <class Attr>
  explicit Lion(const Attr& a)
      : lr(static_cast<T>(a.lr)),
        beta1(static_cast<T>(a.beta1)),
        fresh1(static_cast<T>(1 - a.beta1)),
        beta2(static_cast<T>(a.beta2)),
        fresh2(static_cast<T>(1 - a.beta2)),
        shrink(static_cast<T>(1 - a.lr * a.weight_decay)) {}

  template <class State>
  NEEDLE_MAP_INLINE void step(const Lion& r, L& w, L g, const State& s) {
    L m = s.read(kMean), mixed = r.beta1 * m + r.fresh1 * g, zero = L(T(0));
    s.write(kMean, r.beta2 * m + r.fresh2 * g);
    L by = select(lt(zero, mixed), r.lr, select(lt(mixed, zero), zero - r.lr, mixed));  // NaN stays NaN
    w = w * r.shrink - by;
  }
};

// torch.optim.Adagrad: over the root of the sum of squares, `initial` before the first step; `lr` is that of this step.
template <class T, class L>
struct Adagrad {
  enum { kSum = 1 };
  L lr, eps, decay, initial;
  bool decays, first;

  template <class Attr>
  explicit Adagrad(const Attr& a)
      : lr(static_cast<T>(a.lr)),
        eps(static_cast<T>(a.eps)),
        decay(static_cast<T>(a.weight_decay)),
        initial(static_cast<T>(a.initial)),
        decays(a.weight_decay != 0),
        first(a.first != 0) {}

  template <class State>
  NEEDLE_MAP_INLINE void step(const Adagrad& r, L& w, L g, const State& s) {
    g = decayed(g, w, r.decay, r.decays);
    L sum = (r.first ? r.initial : s.read(kSum)) + g * g;
    s.write(kSum, sum);
    w = w - r.lr * g / (sqrt(sum) + r.eps);
  }
};

// torch.optim.Adadelta: the gradient times the root of past steps' squares over that of the gradients'.
template <class T, class L>
struct Adadelta {
  enum { kSquare = 1, kMoved };
  L lr, rho, fresh, eps, decay;
  bool decays;

  template <class Attr>
  explicit Adadelta(const Attr& a)
      : lr(static_cast<T>(a.lr)),
        rho(static_cast<T>(a.rho)),
        fresh(static_cast<T>(1 - a.rho)),
        eps(static_cast<T>(a.eps)),
        decay(static_cast<T>(a.weight_decay)),
        decays(a.weight_decay != 0) {}

  template <class State>
  NEEDLE_MAP_INLINE void step(const Adadelta& r, L& w, L g, const State& s) {
    g = decayed(g, w, r.decay, r.decays);
    L v = r.rho * s.read(kSquare) + r.fresh * g * g, moved = s.read(kMoved);
    L by = sqrt(moved + r.eps) / sqrt(v + r.eps) * g;
    s.write(kSquare, v);
    s.write(kMoved, r.rho * moved + r.fresh * by * by);
    w = w - r.lr * by;
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
