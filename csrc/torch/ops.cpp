// torch.ops.needle.*: schemas and the implementations for CPU and CUDA. Gradients, shapes without data, autocast and
// the unfused forms are registered by torch2needle/torch_ops.py.
#include <torch/csrc/stable/library.h>

#include <cmath>

#include "torch/convolution.h"
#include "torch/folding.h"

namespace needle::torch_ops {
namespace {

using torch::headeronly::MemoryFormat;
using torch::headeronly::ScalarType;

// The activation of `v` in place, by its own kernel.
void activate(const Tensor& t, const View& v, std::string_view activation, double alpha) {
  if (activation != "none") run_map(activation, t, v, {v}, {alpha});  // which those without the attribute do not read
}

// ---- linear --------------------------------------------------------------------------------------------------------

// activation(x W^T + bias) over the last axis.
Tensor linear_bias_act(const Tensor& x, const Tensor& w, const Maybe& bias, std::string_view activation, double alpha) {
  constexpr const char* op = "linear_bias_act";
  const int64_t code = activation_code(op, activation);
  check_rank(op, "weight", w, 2);
  if (x.dim() == 0 || x.size(-1) != w.size(1))
    fail(op, "weight expects " + (x.dim() ? std::to_string(x.size(-1)) : "no") + " input features, got shape " +
                 shape_of(w) + ".");
  check_vectors(op, x, w.size(0), {{"bias", bias}});
  check_all(op, x, {{"weight", w}});
  const int64_t K = w.size(1), N = w.size(0), rank = x.dim();
  const KernelRow *matmul = find("matmul", x), *linear = find("linear", x);
  const bool rows = rank <= 2 || x.is_contiguous();
  if (rank > kMaxRank || K == 0 || !(matmul || (linear && rows)))
    return call("needle_unfused::linear_bias_act", x, w, bias, std::string(activation), alpha);
  int64_t M = 1;
  for (int64_t i = 0; i + 1 < rank; i++) M *= x.size(i);
  std::vector<int64_t> size = size_of(x);
  size.back() = N;
  Tensor out = empty(x, size);
  View a = view_of(x);
  if (rows) a = view_of(x, {M, K}, {rank > 1 ? x.stride(-2) : K, x.stride(-1)});
  const View y = rows ? view_of(out, {M, N}, {N, 1}) : view_of(out);
  if (linear) {
    run<linear_args>(linear, x, {.x = a, .weight = view_of(w), .bias = optional_view(bias)}, {.y = y},
                     {.activation = code, .alpha = alpha});
    return out;
  }
  View b = view_of(w, {K, N}, {w.stride(1), w.stride(0)});
  int64_t shape[kMaxRank];
  std::copy(a.shape, a.shape + a.rank - 2, shape);
  shape[a.rank - 2] = K, shape[a.rank - 1] = N;
  together(x, 2. * static_cast<double>(M) * static_cast<double>(w.numel()), [&] {
    run<matmul_args>(matmul, x, {.a = a, .b = broadcast(b, shape, a.rank), .bias = optional_view(bias)}, {.y = y},
                     {.activation = code, .alpha = alpha});
  });
  return out;
}

// ---- convolutions --------------------------------------------------------------------------------------------------

// torch writes channels-last results of few input channels where they belong, needle by way of blocks of channels.
bool prefers_torch(const Tensor& x, const Tensor& w, int64_t groups) {
  constexpr int64_t kBlock = 16, kFewResults = 1 << 16;
  return x.is_cpu() && channels_last(x) && (x.size(1) < kBlock || (groups > 1 && groups == x.size(1))) &&
         x.numel() / x.size(1) * w.size(0) >= kFewResults;
}

// conv2d by torch, where that is faster, then the activation in place.
Tensor convolve_in_torch(const Tensor& x, const Tensor& w, const Maybe& bias, const Geometry& g,
                         std::string_view activation, double alpha) {
  Tensor out = call("aten::conv2d", x, w, bias, g.stride, g.padding, g.dilation, g.groups);
  if (!channels_last(out)) out = torch::stable::contiguous(out, MemoryFormat::ChannelsLast);
  const View y = view_of(out);
  together(x, 8. * static_cast<double>(y.size()), [&] { activate(x, y, activation, alpha); });
  return out;
}

// activation(conv2d(x, w) + bias).
Tensor conv2d_bias_act(const Tensor& x, const Tensor& w, const Maybe& bias, const Pair& stride, const Pair& padding,
                       const Pair& dilation, int64_t groups, std::string_view activation, double alpha) {
  constexpr const char* op = "conv2d_bias_act";
  const Geometry g = {stride, padding, dilation, groups};
  const int64_t code = activation_code(op, activation);
  check_geometry(op, x, w, g, w.dim() == 4 ? w.size(1) * groups : 0);
  check_vectors(op, x, w.size(0), {{"bias", bias}});
  check_all(op, x, {{"weight", w}});
  const auto size = conv_size(op, x, w, g);
  if (!find("conv2d", x) || w.numel() == 0)
    return call("needle_unfused::conv2d_bias_act", x, w, bias, stride, padding, dilation, groups,
                std::string(activation), alpha);
  if (prefers_torch(x, w, groups)) return convolve_in_torch(x, w, bias, g, activation, alpha);
  Tensor out = empty(x, size, channels_last(x));
  const View weight = view_of(w), y = view_of(out);
  together(x, work_of(y, weight), [&] { convolve(x, view_of(x), weight, optional_view(bias), y, g, {code, alpha}); });
  return out;
}

// activation(batch_norm(conv2d(x, w) + bias)) by given statistics. The batch norm goes into the weights; where those
// are more than the result, into a pass over the result.
Tensor conv2d_bn_act(const Tensor& x, const Tensor& w, const Maybe& bias, const Tensor& mean, const Tensor& var,
                     const Maybe& gamma, const Maybe& beta, const Pair& stride, const Pair& padding,
                     const Pair& dilation, int64_t groups, double eps, std::string_view activation, double alpha) {
  constexpr const char* op = "conv2d_bn_act";
  const Geometry g = {stride, padding, dilation, groups};
  const int64_t code = activation_code(op, activation);
  check_geometry(op, x, w, g, w.dim() == 4 ? w.size(1) * groups : 0);
  const int64_t O = w.size(0);
  check_vectors(
      op, x, O,
      {{"bias", bias}, {"running_mean", mean}, {"running_var", var}, {"bn_weight", gamma}, {"bn_bias", beta}});
  check_all(op, x, {{"weight", w}});
  const auto size = conv_size(op, x, w, g);
  if (!find("conv2d", x) || w.numel() == 0)
    return call("needle_unfused::conv2d_bn_act", x, w, bias, mean, var, gamma, beta, stride, padding, dilation, groups,
                eps, std::string(activation), alpha);
  Tensor scale = empty(x, {O}), shift = empty(x, {O});
  const bool fold = w.numel() <= O * size[0] * size[2] * size[3];
  Tensor folded = fold ? torch::stable::empty_like(w) : w;
  const View image = view_of(x), weight = view_of(w), w2 = view_of(folded), s = view_of(scale), t = view_of(shift);
  const auto fold_weights = [&] { run_map("mul", x, w2, {weight, per_channel(s, weight, 0)}); };
  if (fold && prefers_torch(x, w, groups)) {
    scale_and_shift(x, bias, mean, var, gamma, beta, eps, s, t);
    fold_weights();
    return convolve_in_torch(x, folded, shift, g, activation, alpha);
  }
  Tensor out = empty(x, size, channels_last(x));
  const View y = view_of(out);
  together(x, work_of(y, weight), [&] {
    scale_and_shift(x, bias, mean, var, gamma, beta, eps, s, t);
    if (fold) {
      fold_weights();
      return convolve(x, image, w2, Optional{t}, y, g, {code, alpha});
    }
    convolve(x, image, weight, kAbsent, y, g, {});
    run_map("mul", x, y, {y, per_channel(s, y, 1)});
    run_map("add", x, y, {y, per_channel(t, y, 1)});
    activate(x, y, activation, alpha);
  });
  return out;
}

// activation(conv_transpose2d(x, w) + bias).
Tensor conv_transpose2d_bias_act(const Tensor& x, const Tensor& w, const Maybe& bias, const Pair& stride,
                                 const Pair& padding, const Pair& output_padding, int64_t groups, const Pair& dilation,
                                 std::string_view activation, double alpha) {
  constexpr const char* op = "conv_transpose2d_bias_act";
  const Geometry g = {stride, padding, dilation, groups};
  const int64_t code = activation_code(op, activation);
  check_geometry(op, x, w, g, w.dim() == 4 ? w.size(0) : 0);
  check_vectors(op, x, w.size(1) * groups, {{"bias", bias}});
  check_all(op, x, {{"weight", w}});
  std::vector<int64_t> size = {x.size(0), w.size(1) * groups};
  for (int i = 0; i < 2; i++) {
    if (output_padding[i] < 0 || output_padding[i] >= std::max(stride[i], dilation[i]))
      fail(op, "output_padding expects less than stride or dilation, got " + std::to_string(output_padding[i]) + ".");
    size.push_back((x.size(2 + i) - 1) * stride[i] - 2 * padding[i] + dilation[i] * (w.size(2 + i) - 1) +
                   output_padding[i] + 1);
    if (size.back() < 1) fail(op, "padding leaves no output for input of shape " + shape_of(x) + ".");
  }
  if (!find("conv_transpose2d", x) || w.numel() == 0)
    return call("needle_unfused::conv_transpose2d_bias_act", x, w, bias, stride, padding, output_padding, groups,
                dilation, std::string(activation), alpha);
  Tensor out = empty(x, size, channels_last(x));
  const View image = view_of(x), weight = view_of(w);
  together(x, work_of(image, weight),
           [&] { convolve_transposed(x, image, weight, optional_view(bias), view_of(out), g, {code, alpha}); });
  return out;
}

// ---- batch norm, attention -----------------------------------------------------------------------------------------

// activation(batch_norm(x)) by given statistics, x (N, C, *).
Tensor batch_norm_act(const Tensor& x, const Tensor& mean, const Tensor& var, const Maybe& gamma, const Maybe& beta,
                      double eps, std::string_view activation, double alpha) {
  constexpr const char* op = "batch_norm_act";
  const int64_t code = activation_code(op, activation);
  if (x.dim() < 2) fail(op, "input expects at least 2 axes, got shape " + shape_of(x) + ".");
  const int64_t C = x.size(1), rows = x.size(0) * C;
  check_vectors(op, x, C, {{"running_mean", mean}, {"running_var", var}, {"weight", gamma}, {"bias", beta}});
  const KernelRow* kernel = find("batch_norm", x);
  const bool dense = mean.is_contiguous() && var.is_contiguous() && (!gamma || gamma->is_contiguous()) &&
                     (!beta || beta->is_contiguous());
  if (!kernel || !x.is_contiguous() || !dense || x.numel() == 0)
    return call("needle_unfused::batch_norm_act", x, mean, var, gamma, beta, eps, std::string(activation), alpha);
  const int64_t size = x.numel() / rows;
  Tensor out = empty(x, size_of(x));
  const auto vector = [&](const Maybe& t, double other) {
    return t ? *t : torch::stable::full({&C, 1}, other, ScalarType::Float, std::nullopt, x.device());
  };
  const Tensor weight = vector(gamma, 1), bias = vector(beta, 0);
  const auto image = [&](const Tensor& t) { return view_of(t, {x.size(0), C, size}, {C * size, size, 1}); };
  together(x, 8. * static_cast<double>(x.numel()), [&] {
    run<batch_norm_args>(
        kernel, x,
        {.x = image(x), .mean = view_of(mean), .var = view_of(var), .weight = view_of(weight), .bias = view_of(bias)},
        {.y = image(out)}, {.eps = eps, .activation = code, .alpha = alpha});
  });
  return out;
}

// softmax(q k^T * scale + mask) v. The result of four axes lies in memory as (N, L, heads, D), free to merge the heads.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& mask, bool causal,
                 std::optional<double> scale) {
  constexpr const char* op = "attention";
  const int r = static_cast<int>(q.dim());
  if (r < 2 || k.dim() != r || v.dim() != r)
    fail(op, "query, key and value expect as many axes, at least 2, got " + shape_of(q) + ", " + shape_of(k) + ", " +
                 shape_of(v) + ".");
  for (int i = 0; i < r - 2; i++)
    if (k.size(i) != q.size(i) || v.size(i) != q.size(i))
      fail(op, "key and value expect query's leading axes, got " + shape_of(q) + ", " + shape_of(k) + ", " +
                   shape_of(v) + ".");
  if (k.size(-1) != q.size(-1) || k.size(-2) != v.size(-2))
    fail(op, "key expects query's features and value's rows, got " + shape_of(q) + ", " + shape_of(k) + ", " +
                 shape_of(v) + ".");
  check_all(op, q, {{"key", k}, {"value", v}});
  std::vector<int64_t> scores(q.sizes().begin(), q.sizes().end());
  scores.back() = k.size(-2);
  if (mask) {
    if (mask->scalar_type() != ScalarType::Bool) check_like(op, q, "attn_mask", mask);
    for (int64_t i = 1; i <= mask->dim(); i++)
      if (mask->dim() > r || (mask->size(-i) != 1 && mask->size(-i) != scores[r - i]))
        fail(op, "attn_mask expects a shape that broadcasts to the scores, got " + shape_of(*mask) + ".");
  }
  const KernelRow* kernel = find("attention", q);
  if (!kernel || r > kMaxRank || k.numel() == 0) return call("needle_unfused::attention", q, k, v, mask, causal, scale);
  std::vector<int64_t> size(q.sizes().begin(), q.sizes().end());
  size.back() = v.size(-1);
  if (r == 4) std::swap(size[1], size[2]);
  Tensor memory = empty(q, size);
  Tensor out = r == 4 ? torch::stable::transpose(memory, 1, 2) : memory;
  const Optional wide = mask ? Optional{broadcast(view_of(*mask), scores.data(), r)} : kAbsent;
  const double factor = scale ? *scale : 1 / std::sqrt(static_cast<double>(std::max<int64_t>(1, q.size(-1))));
  const double work = 2. * static_cast<double>(q.numel() + out.numel()) * static_cast<double>(k.size(-2));
  together(q, work, [&] {
    run<attention_args>(kernel, q, {.q = view_of(q), .k = view_of(k), .v = view_of(v), .mask = wide},
                        {.y = view_of(out)}, {.scale = factor, .causal = causal, .strict = 0});
  });
  return out;
}

}  // namespace

#define NEEDLE_CONV "int[2] stride=1, int[2] padding=0, int[2] dilation=1, int groups=1"
#define NEEDLE_STATISTICS "Tensor running_mean, Tensor running_var"
#define NEEDLE_ACTIVATION "str activation=\"relu\", float alpha=0.0"

#define NEEDLE_GENERAL(m)                                                                                            \
  m.def("linear_bias_act(Tensor input, Tensor weight, Tensor? bias=None, " NEEDLE_ACTIVATION ") -> Tensor");         \
  m.def("conv2d_bias_act(Tensor input, Tensor weight, Tensor? bias=None, " NEEDLE_CONV ", " NEEDLE_ACTIVATION        \
        ") -> Tensor");                                                                                              \
  m.def("conv2d_bn_act(Tensor input, Tensor weight, Tensor? bias, " NEEDLE_STATISTICS                                \
        ", Tensor? bn_weight=None, Tensor? bn_bias=None, " NEEDLE_CONV ", float eps=1e-5, " NEEDLE_ACTIVATION        \
        ") -> Tensor");                                                                                              \
  m.def(                                                                                                             \
      "conv_transpose2d_bias_act(Tensor input, Tensor weight, Tensor? bias=None, int[2] stride=1, int[2] padding=0," \
      " int[2] output_padding=0, int groups=1, int[2] dilation=1, " NEEDLE_ACTIVATION ") -> Tensor");                \
  m.def("batch_norm_act(Tensor input, " NEEDLE_STATISTICS                                                            \
        ", Tensor? weight=None, Tensor? bias=None, float eps=1e-5, " NEEDLE_ACTIVATION ") -> Tensor");               \
  m.def(                                                                                                             \
      "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False,"              \
      " float? scale=None) -> Tensor")

STABLE_TORCH_LIBRARY(needle, m) {
  m.set_python_module("torch2needle.torch_ops");
  NEEDLE_GENERAL(m);
  m.def("linear_relu(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
  m.def("conv2d_bias_relu(Tensor input, Tensor weight, Tensor? bias=None, " NEEDLE_CONV ") -> Tensor");
  m.def("conv2d_bn_relu(Tensor input, Tensor weight, Tensor? bias, " NEEDLE_STATISTICS
        ", Tensor? bn_weight=None, Tensor? bn_bias=None, " NEEDLE_CONV ", float eps=1e-5) -> Tensor");
  m.def("batch_norm_relu(Tensor input, " NEEDLE_STATISTICS
        ", Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> Tensor");
}

// What runs where a device or a dtype has no kernel; defined in Python, as are the forms with ReLU.
STABLE_TORCH_LIBRARY(needle_unfused, m) { NEEDLE_GENERAL(m); }

#define NEEDLE_KERNELS(m)                                                     \
  m.impl("linear_bias_act", TORCH_BOX(&linear_bias_act));                     \
  m.impl("conv2d_bias_act", TORCH_BOX(&conv2d_bias_act));                     \
  m.impl("conv2d_bn_act", TORCH_BOX(&conv2d_bn_act));                         \
  m.impl("conv_transpose2d_bias_act", TORCH_BOX(&conv_transpose2d_bias_act)); \
  m.impl("batch_norm_act", TORCH_BOX(&batch_norm_act));                       \
  m.impl("attention", TORCH_BOX(&attention))

STABLE_TORCH_LIBRARY_IMPL(needle, CPU, m) { NEEDLE_KERNELS(m); }
STABLE_TORCH_LIBRARY_IMPL(needle, CUDA, m) { NEEDLE_KERNELS(m); }  // ROCm's devices, too

}  // namespace needle::torch_ops
