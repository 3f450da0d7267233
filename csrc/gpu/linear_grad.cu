// What a linear layer's gradient needs beside two products, in one pass: the gradient before the activation, and its
// sum over the rows, the gradient of the bias.
#include "gpu/team.cuh"

namespace needle::gpu {
namespace {

// Out of line, as the activations are in math/maps.h.
NEEDLE_MAP_NOINLINE float activation_grad(int code, float alpha, float v, float dy) {
  switch (code) {
    case kRelu:
      return device::relu_grad_map::apply(v, dy, alpha, alpha);
    case kRelu6:
      return device::relu6_grad_map::apply(v, dy, alpha, alpha);
    case kLeakyRelu:
      return device::leaky_relu_grad_map::apply(v, dy, alpha, alpha);
    case kSigmoid:
      return device::sigmoid_grad_map::apply(v, dy, alpha, alpha);
    case kSilu:
      return device::silu_grad_map::apply(v, dy, alpha, alpha);
    case kTanh:
      return device::tanh_grad_map::apply(v, dy, alpha, alpha);
    case kGelu:
      return device::gelu_grad_map::apply(v, dy, alpha, alpha);
    case kHardswish:
      return device::hardswish_grad_map::apply(v, dy, alpha, alpha);
    case kHardsigmoid:
      return device::hardsigmoid_grad_map::apply(v, dy, alpha, alpha);
    case kElu:
      return device::elu_grad_map::apply(v, dy, alpha, alpha);
    case kGeluTanh:
      return device::gelu_tanh_grad_map::apply(v, dy, alpha, alpha);
  }
  return dy;
}

struct Matrix {
  float* data;
  int64_t row, column;
  explicit Matrix(const View& v) : data(v.as<float>()), row(v.stride[0]), column(v.stride[1]) {}
  __device__ __forceinline__ float& at(int64_t i, int64_t j) const { return data[i * row + j * column]; }
};

struct BiasGrad {
  Matrix value, dy, dz;
  float* sum;
  int64_t sum_stride, rows;
  int activation;
  float alpha;

  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t column, bool exists) const {
    float total = 0;
    for (int64_t i = team.first; i < (exists ? rows : 0); i += Team::step) {
      float g = dy.at(i, column);
      if (activation == kRelu) {
        g = device::relu_grad_map::apply(value.at(i, column), g, g, g);
      } else if (activation != kNone) {
        g = activation_grad(activation, alpha, value.at(i, column), g);
      }
      dz.at(i, column) = g;
      total += g;
    }
    total = team.sum(total);
    if (exists && team.first == 0) sum[column * sum_stride] = total;
  }
};

}  // namespace

// value (M, N): the output for sigmoid and tanh, either side for relu, relu6 and leaky relu, else what went into the
// activation; dy (M, N). Outputs dz (M, N) = dy * activation'(value), which may be dy, and its sum over M (N).
// attrs: activation alpha
void activation_bias_grad(const Call& c) {
  if (c.i(0) < kNone || c.i(0) > kGeluTanh)
    fail("activation_bias_grad", "activation is one of math/maps.h", std::to_string(c.i(0)));
  BiasGrad op = {Matrix(c.in[0]),    Matrix(c.in[1]),  Matrix(c.out[0]),         c.out[1].as<float>(),
                 c.out[1].stride[0], c.in[0].shape[0], static_cast<int>(c.i(0)), c.f(1)};
  launch_teams<ColumnTeam>(op, c.in[0].shape[1], static_cast<gpuStream_t>(c.exec->stream));
}

}  // namespace needle::gpu
