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

}  // namespace needle::NEEDLE_ISA
