// torch.ops.needle_gradients.*: first derivatives of the ops of the same names, float32 on a CPU. What else there is
// (other dtypes and devices, derivatives of derivatives) torch2needle/bridges/torch_gradients.py has in torch's
// operations.
#include <torch/csrc/stable/library.h>

#include <cmath>

#include "torch/convolution.h"
#include "torch/folding.h"

namespace needle::torch_ops {
namespace {

using Tensors = std::vector<Tensor>;  // those that are needed, in order

// Which gradients are needed: bit i for that of the i-th operand.
struct Needs {
  int64_t bits;
  bool operator[](int i) const { return bits >> i & 1; }
};

// Dense memory in the layout of `t`.
View layout_of(const Tensor& t, float* data) {
  View v = view_of(t);
  v.data = data;
  if (!channels_last(t))
    for (int64_t i = v.rank - 1, n = 1; i >= 0; n *= v.shape[i--]) v.stride[i] = n;
  return v;
}

// The gradient before the activation whose output is y, in its layout; grad itself where there is none.
class BeforeActivation {
 public:
  BeforeActivation(const Tensor& grad, const Tensor& y, std::string_view activation)
      : grad_(grad), y_(y), kernel_(std::string(activation) + "_grad"), room_(activation == "none" ? 0 : y.numel()) {
    view = activation == "none" ? view_of(grad) : layout_of(y, room_.take(0));
  }
  void compute() {
    if (kernel_ != "none_grad") run_map(kernel_, y_, view, {view_of(y_), view_of(grad_)});
  }
  View view;

 private:
  const Tensor &grad_, &y_;
  std::string kernel_;
  Room room_;
};

// Sums over all axes but `axis`, into a vector.
void sum_along(const Tensor& t, const View& v, int axis, const Tensor& out) {
  View y = v;
  if (v.size() == v.shape[axis]) {  // nothing to add up
    const View row = view_of(out);
    y.rank = 1, y.shape[0] = v.shape[axis], y.stride[0] = v.stride[axis];
    return run<copy_args>(find("copy", t), t, {.x = y}, {.y = row}, {});
  }
  for (int i = 0; i < v.rank; i++)
    if (i != axis) y.shape[i] = 1, y.stride[i] = 0;
  y.stride[axis] = 1;
  y.data = out.data_ptr();
  run<sum_args>(find("sum", t), t, {.x = v}, {.y = y}, {});
}

void multiply(const Tensor& t, const View& a, const View& b, const View& y) {
  run<matmul_args>(find("matmul", t), t, {.a = a, .b = b, .bias = kAbsent}, {.y = y}, {.activation = 0, .alpha = 0});
}

// Of x (M, K), weight (N, K) and bias (N).
Tensors linear_bias_act(const Tensor& grad, const Tensor& x, const Tensor& w, const Tensor& y,
                        std::string_view activation, int64_t bits) {
  const Needs needs = {bits};
  const int64_t M = x.size(0), K = x.size(1), N = w.size(0);
  BeforeActivation before(grad, y, activation);
  Tensors grads;
  for (int i = 0; i < 3; i++)
    if (needs[i]) grads.push_back(i == 0 ? empty(x, {M, K}) : i == 1 ? empty(x, {N, K}) : empty(x, {N}));
  const double product = 2. * static_cast<double>(M) * static_cast<double>(w.numel());
  together(x, product * (needs[0] + needs[1]) + 8. * static_cast<double>(y.numel()), [&] {
    before.compute();
    const View &dy = before.view, image = view_of(x);
    auto next = grads.begin();
    if (needs[0]) multiply(x, dy, view_of(w), view_of(*next++));
    if (needs[1]) {
      View rows = dy;
      std::swap(rows.shape[0], rows.shape[1]), std::swap(rows.stride[0], rows.stride[1]);
      const View dw = view_of(*next++);
      if (M == 1)
        run_map("mul", x, dw, {broadcast(rows, dw.shape, 2), broadcast(image, dw.shape, 2)});
      else
        multiply(x, rows, image, dw);
    }
    if (needs[2]) sum_along(x, dy, 1, *next);
  });
  return grads;
}

// Of input and weight of a convolution, plain or transposed, and the sums of dy, a bias' gradient. `work` of either.
template <bool kTransposed>
Tensors convolution(const Tensor& grad, const Tensor& x, const Tensor& w, const Tensor& y, const Geometry& g,
                    std::string_view activation, Needs needs) {
  BeforeActivation before(grad, y, activation);
  Tensors grads;
  if (needs[0]) grads.push_back(empty(x, size_of(x), channels_last(x)));
  if (needs[1]) grads.push_back(empty(w, size_of(w)));
  if (needs[2]) grads.push_back(empty(w, {y.size(1)}));
  const View image = view_of(x), weight = view_of(w);
  together(x, work_of(kTransposed ? image : view_of(y), weight), [&] {
    before.compute();
    const View& dy = before.view;
    auto next = grads.begin();
    if (needs[0]) (kTransposed ? convolve : convolve_transposed)(x, dy, weight, kAbsent, view_of(*next++), g, {});
    if (needs[1]) convolve_weight_grad(x, kTransposed ? dy : image, kTransposed ? image : dy, view_of(*next++), g);
    if (needs[2]) sum_along(x, dy, 1, *next);
  });
  return grads;
}

Tensors conv2d_bias_act(const Tensor& grad, const Tensor& x, const Tensor& w, const Tensor& y, const Pair& stride,
                        const Pair& padding, const Pair& dilation, int64_t groups, std::string_view activation,
                        int64_t needs) {
  return convolution<false>(grad, x, w, y, {stride, padding, dilation, groups}, activation, {needs});
}

Tensors conv_transpose2d_bias_act(const Tensor& grad, const Tensor& x, const Tensor& w, const Tensor& y,
                                  const Pair& stride, const Pair& padding, const Pair& dilation, int64_t groups,
                                  std::string_view activation, int64_t needs) {
  return convolution<true>(grad, x, w, y, {stride, padding, dilation, groups}, activation, {needs});
}

// dw times a scale per output, and the sums of dw w before that; some outputs at a time, which stay in the cache.
void scale_weights(const Tensor& w, const View& dw, const View& scale, const Tensor* sums) {
  const int64_t outputs = w.size(0), floats = w.numel() / outputs, step = std::max<int64_t>(1, (1 << 15) / floats);
  const auto part = [](View v, int64_t first, int64_t count) {
    v.data = static_cast<float*>(v.data) + first * v.stride[0];
    v.shape[0] = count;
    return v;
  };
  each((outputs + step - 1) / step, [&](int64_t task) {
    const int64_t first = task * step, count = std::min(step, outputs - first);
    const View own = part(dw, first, count);
    if (sums) {
      Room room(count * floats);
      const View terms = view_of(room.take(0), {count, own.shape[1], own.shape[2], own.shape[3]});
      run<copy_args>(find("copy", w), w, {.x = part(view_of(w), first, count)}, {.y = terms}, {});  // in dw's layout
      run_map("mul", w, terms, {terms, own});
      View y = part(view_of(*sums), first, count);
      y.rank = 4;
      for (int i = 1; i < 4; i++) y.shape[i] = 1, y.stride[i] = 0;
      run<sum_args>(find("sum", w), w, {.x = terms}, {.y = y}, {});
    }
    run_map("mul", w, own, {own, per_channel(part(scale, first, count), own, 0)});
  });
}

// Of input, weight, bias, bn_weight and bn_bias. y = z * scale + shift with z = conv2d(x, w): the gradient of w times
// scale is that of the folded weights f, and the sum of dy z is that of f's gradient and w.
Tensors conv2d_bn_act(const Tensor& grad, const Tensor& x, const Tensor& w, const Maybe& bias, const Tensor& mean,
                      const Tensor& var, const Maybe& gamma, const Tensor& y, const Pair& stride, const Pair& padding,
                      const Pair& dilation, int64_t groups, double eps, std::string_view activation, int64_t bits) {
  const Needs needs = {bits};
  const Geometry g = {stride, padding, dilation, groups};
  const int64_t O = w.size(0);
  BeforeActivation before(grad, y, activation);
  const bool sums = needs[2] || needs[3] || needs[4], weights = needs[1] || needs[3], small = w.numel() <= y.numel();
  const Tensor dx = needs[0] ? empty(x, size_of(x), channels_last(x)) : x, dw = weights ? empty(w, size_of(w)) : w,
               total = empty(w, {O}), inverse = empty(w, {O}), scale = empty(w, {O}), dbias = empty(w, {O}),
               dgamma = empty(w, {O});
  Room scaled(needs[0] ? std::min(w.numel(), y.numel()) : 0);
  together(x, work_of(view_of(y), view_of(w)), [&] {
    before.compute();
    const View &dy = before.view, image = view_of(x), weight = view_of(w), i = view_of(inverse), s = view_of(scale);
    inverse_of(var, eps, i);
    if (gamma)
      run_map("mul", w, s, {i, view_of(*gamma)});
    else
      run<copy_args>(find("copy", w), w, {.x = i}, {.y = s}, {});
    if (needs[0]) {  // the smaller one of the two is scaled
      const View part = layout_of(small ? w : y, scaled.take(0));
      run_map("mul", w, part, {small ? weight : dy, per_channel(s, part, small ? 0 : 1)});
      convolve_transposed(x, small ? dy : part, small ? part : weight, kAbsent, view_of(dx), g, {});
    }
    if (sums) sum_along(x, dy, 1, total);
    if (weights) convolve_weight_grad(x, image, dy, view_of(dw), g);
    if (weights) scale_weights(w, view_of(dw), s, needs[3] ? &dgamma : nullptr);
    if (needs[3]) {
      const View d = view_of(dgamma), b = view_of(dbias);  // the sum of dy (z + bias - mean)
      if (bias)
        run_map("sub", w, b, {view_of(*bias), view_of(mean)});
      else
        run_map("neg", w, b, {view_of(mean)});
      run_map("mul", w, b, {b, view_of(total)});
      run_map("add", w, d, {d, b});
      run_map("mul", w, d, {d, i});
    }
    if (needs[2]) run_map("mul", w, view_of(dbias), {view_of(total), s});
  });
  Tensors grads;
  for (int i = 0; i < 5; i++)
    if (needs[i]) grads.push_back(i == 0 ? dx : i == 1 ? dw : i == 2 ? dbias : i == 3 ? dgamma : total);
  return grads;
}

// Of query, key and value.
Tensors attention(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& mask, bool causal,
                  std::optional<double> scale) {
  const auto like = [](const Tensor& t) {
    Tensor same = torch::stable::empty_like(t);
    return same.dim() && same.stride(-1) != 1 ? empty(t, size_of(t)) : same;
  };
  const Tensor dq = like(q), dk = like(k), dv = like(v);
  std::vector<int64_t> scores = size_of(q);
  scores.back() = k.size(-2);
  const Optional wide = mask ? Optional{broadcast(view_of(*mask), scores.data(), static_cast<int>(q.dim()))} : kAbsent;
  const double work = 5. * static_cast<double>(q.numel() + grad.numel()) * static_cast<double>(k.size(-2));
  together(q, work, [&] {
    run<attention_grad_args>(
        find("attention_grad", q), q,
        {.q = view_of(q), .k = view_of(k), .v = view_of(v), .mask = wide, .dy = view_of(grad)},
        {.dq = view_of(dq), .dk = view_of(dk), .dv = view_of(dv)},
        {.scale = scale ? *scale : 1 / std::sqrt(static_cast<double>(q.size(-1))), .causal = causal, .strict = 0});
  });
  return {dq, dk, dv};
}

}  // namespace

#define NEEDLE_CONV "int[2] stride, int[2] padding, int[2] dilation, int groups"

STABLE_TORCH_LIBRARY(needle_gradients, m) {
  m.set_python_module("torch2needle.torch_ops");
  m.def(
      "linear_bias_act(Tensor grad, Tensor input, Tensor weight, Tensor output, str activation, int needs) -> "
      "Tensor[]");
  m.def("conv2d_bias_act(Tensor grad, Tensor input, Tensor weight, Tensor output, " NEEDLE_CONV
        ", str activation, int needs) -> Tensor[]");
  m.def("conv_transpose2d_bias_act(Tensor grad, Tensor input, Tensor weight, Tensor output, " NEEDLE_CONV
        ", str activation, int needs) -> Tensor[]");
  m.def(
      "conv2d_bn_act(Tensor grad, Tensor input, Tensor weight, Tensor? bias, Tensor running_mean, Tensor running_var,"
      " Tensor? bn_weight, Tensor output, " NEEDLE_CONV ", float eps, str activation, int needs) -> Tensor[]");
  m.def(
      "attention(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, float? scale)"
      " -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(needle_gradients, CPU, m) {
  m.impl("linear_bias_act", TORCH_BOX(&linear_bias_act));
  m.impl("conv2d_bias_act", TORCH_BOX(&conv2d_bias_act));
  m.impl("conv_transpose2d_bias_act", TORCH_BOX(&conv_transpose2d_bias_act));
  m.impl("conv2d_bn_act", TORCH_BOX(&conv2d_bn_act));
  m.impl("attention", TORCH_BOX(&attention));
}

}  // namespace needle::torch_ops
