// What a linear layer's gradient needs beside two products, in one pass: the gradient before the activation, and its
// sum over the rows, the gradient of the bias.
#include "gpu/team.cuh"

namespace needle::gpu {
namespace {

// Out of line, as the activations are in math/maps.h.
NEEDLE_MAP_NOINLINE float activation_grad(int code, float alpha, float v, float dy) {
  switch (code) {
#define ACTIVATION(code, name, cost, choice) \
  case code:                                 \
    return device::name##_grad_map::apply(v, dy, alpha, alpha);
#include "kernels/activations.def"
#undef ACTIVATION
  }
  return dy;
}

struct Matrix {
  float* data;
  int64_t row, column;
  Matrix(const View& v) : data(v.as<float>()), row(v.stride[0]), column(v.stride[1]) {}
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
void activation_bias_grad(const activation_bias_grad_args& c) {
  if (c.attr.activation < kNone || c.attr.activation >= kActivations)
    fail("activation_bias_grad", "activation is one of math/maps.h", std::to_string(c.attr.activation));
  BiasGrad op = {c.in.y,
                 c.in.dy,
                 c.out.dx,
                 c.out.dbias.as<float>(),
                 c.out.dbias.stride[0],
                 c.in.y.shape[0],
                 static_cast<int>(c.attr.activation),
                 static_cast<float>(c.attr.alpha)};
  launch_teams<ColumnTeam>(op, c.in.y.shape[1], stream_of(c));
}

}  // namespace needle::gpu
