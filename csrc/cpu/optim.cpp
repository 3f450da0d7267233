// Steps of optimisers, in place on contiguous parameters and state. A call steps any number of parameters: outputs are
// a parameter and its state, then the next parameter and its state; inputs are their gradients.

#include "cpu/strided.h"
#include "math/optimizers.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kPiece = 4096;  // elements that one thread takes at a time

NEEDLE_INLINE int64_t pieces(const View& v) { return ceil_div(v.size(), kPiece); }

// Lanes of a parameter (0) and its state from element i on.
template <class T>
struct State {
  const View* out;
  int64_t i;
  int n;

  T* at(int k) const { return static_cast<T*>(out[k].data) + i; }  // `as` would look at the dtype for every vector
  auto read(int k) const { return load_lanes(at(k), n); }
  template <class L>
  void write(int k, L v) const {
    store_lanes(at(k), v, n);
  }
};

template <template <class, class> class Rule, class Args>
void step(const Args& c) {
  int64_t total = 0;
  for (int g = 0; g < c.groups; g++) total += pieces(c.out[g].parameter);
  parallel_ranges(c.exec, total, kPiece, [&](int64_t begin, int64_t end) {
    int64_t first = 0;  // the first piece of parameter g
    for (int g = 0; g < c.groups && first < end; g++) {
      const View* out = &c.out[g].parameter;
      const int64_t from = larger(begin - first, 0) * kPiece, to = smaller((end - first) * kPiece, out->size());
      first += pieces(*out);
      if (from >= to) continue;
      with_type<Args::In::grad_dtypes>(out->dtype, [&]<class T>(T) {
        using L = typename LanesOf<T>::type;
        const Rule<T, L> rule(c.attr);
        const T* grad = c.in[g].grad.template as<T>() + from;
        for_lanes<T>(to - from, [&](int64_t i, int n) {
          const State<T> s = {out, from + i, n};
          L w = s.read(0);
          rule.step(rule, w, load_lanes(grad + i, n), s);
          s.write(0, w);
        });
      });
    }
  });
}

}  // namespace

void sgd_step(const sgd_step_args& c) { step<Sgd>(c); }
void needle_sgd_step(const needle_sgd_step_args& c) { step<NeedleSgd>(c); }
void adam_step(const adam_step_args& c) { step<Adam>(c); }
void rmsprop_step(const rmsprop_step_args& c) { step<RmsProp>(c); }
void nadam_step(const nadam_step_args& c) { step<NAdam>(c); }
void radam_step(const radam_step_args& c) { step<RAdam>(c); }
void adamax_step(const adamax_step_args& c) { step<Adamax>(c); }
void lion_step(const lion_step_args& c) { step<Lion>(c); }
void adagrad_step(const adagrad_step_args& c) { step<Adagrad>(c); }
void adadelta_step(const adadelta_step_args& c) { step<Adadelta>(c); }

void sum_squares(const sum_squares_args& c) {
  constexpr int kChains = 16;
  const int64_t n = c.in.x.size(), count = ceil_div(n, kPiece);
  double* sums = scratch<double>(c.exec, 2, count);
  with_type<sum_squares_args::In::x_dtypes>(c.in.x.dtype, [&](auto t) {
    const auto* x = c.in.x.as<decltype(t)>();
    parallel_ranges(c.exec, count, kPiece, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; piece++) {
        double chains[kChains] = {};
        const int64_t last = smaller(n, (piece + 1) * kPiece);
        int64_t i = piece * kPiece;
        for (; i + kChains <= last; i += kChains)
          for (int k = 0; k < kChains; k++) {
            const double v = static_cast<double>(x[i + k]);
            chains[k] += v * v;
          }
        for (; i < last; i++) chains[0] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
        sums[piece] = 0;
        for (double chain : chains) sums[piece] += chain;
      }
    });
  });
  double total = 0;
  for (int64_t piece = 0; piece < count; piece++) total += sums[piece];
  *c.out.y.as<double>() = total;
}

}  // namespace needle::NEEDLE_ISA
