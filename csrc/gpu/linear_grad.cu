// What a linear layer's gradient needs beside two products, in one pass: the gradient before the activation, and its
// sum over the rows, the gradient of the bias.
#include "gpu/columns.cuh"

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

template <class T>
struct BiasGrad : Sums {
  Columns<T> value, dy, dz;
  float* bias;
  int64_t bias_stride;
  int activation;
  float alpha;

  __device__ __forceinline__ Total<T> sum(const Share& s, bool) const {
    Total<T> total = {T(0), T(0), 0};
#pragma unroll 1
    for (uint32_t i = s.begin; i < s.end; i += kAtOnce<T> * s.step) {
      T v[kAtOnce<T>], g[kAtOnce<T>];
      load(g, dy, s, i);
      if (activation != kNone) load(v, value, s, i);
#pragma unroll
      for (int k = 0; k < kAtOnce<T>; k++) {
        if (i + k * s.step >= s.end) continue;
        if (activation == kRelu) {
          g[k] = lanewise([](float v, float g) { return device::relu_grad_map::apply(v, g, g, g); }, v[k], g[k]);
        } else if (activation != kNone) {
          g[k] = lanewise([&](float v, float g) { return activation_grad(activation, alpha, v, g); }, v[k], g[k]);
        }
        write(dz.at(s.column, i + k * s.step), g[k]);
        total.first += g[k];
      }
    }
    return total;
  }
  __device__ __forceinline__ void finish(int64_t column, const Total<float>& total, bool) const {
    bias[column * bias_stride] = total.first;
  }
};

// (M, N) as (1, N, M): what is summed comes last.
View turned(const View& v) {
  View t = v;
  t.rank = 3;
  t.shape[0] = 1, t.shape[1] = v.shape[1], t.shape[2] = v.shape[0];
  t.stride[0] = 0, t.stride[1] = v.stride[1], t.stride[2] = v.stride[0];
  return t;
}

}  // namespace

// value (M, N): the output for sigmoid and tanh, either side for relu, relu6 and leaky relu, else what went into the
// activation; dy (M, N). Outputs dz (M, N) = dy * activation'(value), which may be dy, and its sum over M (N).
void activation_bias_grad(const activation_bias_grad_args& c) {
  if (c.attr.activation < kNone || c.attr.activation >= kActivations)
    fail("activation_bias_grad", "activation is one of math/maps.h", std::to_string(c.attr.activation));
  const View value = turned(c.in.y), dy = turned(c.in.dy), dz = turned(c.out.dx), &bias = c.out.dbias;
  if (dy.shape[2] > INT32_MAX)
    fail("activation_bias_grad", "a matrix has at most 2^31 rows", std::to_string(dy.shape[2]));
  with_elements<activation_bias_grad_args::In::y_dtypes>({&dy, &value, &dz}, [&](auto t, bool last) {
    using T = decltype(t);
    const BiasGrad<T> op = {{},
                            {value, last},
                            {dy, last},
                            {dz, last},
                            bias.as<float>(),
                            bias.stride[0],
                            static_cast<int>(c.attr.activation),
                            static_cast<float>(c.attr.alpha)};
    const Walk w = walk_over<T>(dy, last);
    if (w.columns > 0) launch_sums<T>(op, w, c.exec);
  });
}

}  // namespace needle::gpu
