// Steps of optimisers, in place on contiguous parameters and state.
#include "cpu/strided.h"

namespace needle::NEEDLE_ISA {
namespace {

// f(T{}, i, n) for every vector of the parameters.
template <class F>
NEEDLE_INLINE void for_parameters(const Call& c, const F& f) {
  int64_t size = 1;
  for (int d = 0; d < c.out[0].rank; d++) size *= c.out[0].shape[d];
  auto run = [&](auto t) {
    using T = decltype(t);
    constexpr int64_t kPiece = 4096;
    parallel_ranges(c.exec, ceil_div(size, kPiece), kPiece, [&](int64_t begin, int64_t end) {
      int64_t first = begin * kPiece;
      for_lanes<T>(smaller(size, end * kPiece) - first, [&](int64_t i, int n) { f(t, first + i, n); });
    });
  };
  c.out[0].dtype == DType::f32 ? run(float{}) : run(double{});
}

}  // namespace

// torch.optim.SGD: the first step starts the velocity at the gradient.
void sgd_step(const Call& c) {
  bool nesterov = c.i(4), first = c.i(5);
  for_parameters(c, [&](auto t, int64_t i, int n) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    auto number = [](double x) { return L(static_cast<T>(x)); };
    T *p = c.out[0].as<T>() + i, *velocity = c.out[1].as<T>() + i;
    L w = load_lanes(p, n), g = load_lanes(c.in[0].as<T>() + i, n) + number(c.attr[3]) * w;
    L momentum = number(c.attr[1]);
    L v = first ? g : momentum * load_lanes(velocity, n) + number(1 - c.attr[2]) * g;
    store_lanes(velocity, v, n);
    store_lanes(p, w - number(c.attr[0]) * (nesterov ? g + momentum * v : v), n);
  });
}

// The course's rule: the velocity is a running mean of gradients.
void needle_sgd_step(const Call& c) {
  for_parameters(c, [&](auto t, int64_t i, int n) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    auto number = [](double x) { return L(static_cast<T>(x)); };
    T *p = c.out[0].as<T>() + i, *velocity = c.out[1].as<T>() + i;
    L w = load_lanes(p, n), g = load_lanes(c.in[0].as<T>() + i, n) + number(c.attr[2]) * w;
    L u = number(c.attr[1]) * load_lanes(velocity, n) + number(1 - c.attr[1]) * g;
    store_lanes(velocity, u, n);
    store_lanes(p, w - number(c.attr[0]) * u, n);
  });
}

// torch.optim.Adam, and AdamW when `decoupled`.
void adam_step(const Call& c) {
  double lr = c.attr[0], beta1 = c.attr[1], beta2 = c.attr[2], eps = c.attr[3], decay = c.attr[4], step = c.attr[5];
  bool decoupled = c.i(6);
  double step_size = lr / (1 - ::pow(beta1, step)), root = 1 / ::sqrt(1 - ::pow(beta2, step));
  for_parameters(c, [&](auto t, int64_t i, int n) {
    using T = decltype(t);
    using L = typename LanesOf<T>::type;
    auto number = [](double x) { return L(static_cast<T>(x)); };
    T *p = c.out[0].as<T>() + i, *mp = c.out[1].as<T>() + i, *vp = c.out[2].as<T>() + i;
    L w = load_lanes(p, n), g = load_lanes(c.in[0].as<T>() + i, n);
    if (decoupled)
      w = w * number(1 - lr * decay);
    else
      g = g + number(decay) * w;
    L m = number(beta1) * load_lanes(mp, n) + number(1 - beta1) * g;
    L v = number(beta2) * load_lanes(vp, n) + number(1 - beta2) * g * g;
    store_lanes(mp, m, n);
    store_lanes(vp, v, n);
    store_lanes(p, w - number(step_size) * m / (sqrt(v) * number(root) + number(eps)), n);
  });
}

}  // namespace needle::NEEDLE_ISA
