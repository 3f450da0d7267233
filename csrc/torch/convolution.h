// Convolutions of plain images by the kernel that is fastest for their sizes, and their gradients.
#pragma once
#include "torch/memory.h"

namespace needle::torch_ops {

struct Geometry {
  const Pair &stride, &padding, &dilation;
  int64_t groups;
};

struct Activation {
  int64_t code = 0;
  double alpha = 0;
};

void check_geometry(const char* op, const Tensor& x, const Tensor& w, const Geometry& g, int64_t in_channels);
// The shape of conv2d's result.
std::vector<int64_t> conv_size(const char* op, const Tensor& x, const Tensor& w, const Geometry& g);

// y = activation(conv2d(x, w) + bias) on the device of `t`.
void convolve(const Tensor& t, const View& x, const View& w, const Optional& bias, const View& y, const Geometry& g,
              const Activation& activation);
// y = activation(conv_transpose2d(x, w) + bias); also the gradient of conv2d's input, for a result x with weights w.
void convolve_transposed(const Tensor& t, const View& x, const View& w, const Optional& bias, const View& y,
                         const Geometry& g, const Activation& activation);
// The gradient of conv2d's weights (contiguous dw) for a result with gradient dy.
void convolve_weight_grad(const Tensor& t, const View& x, const View& dy, const View& dw, const Geometry& g);

// Floating-point operations of conv2d with a result y, or of conv_transpose2d with an input y.
inline double work_of(const View& y, const View& w) {
  return 2. * static_cast<double>(y.size()) * static_cast<double>(w.size() / std::max<int64_t>(1, w.shape[0]));
}

}  // namespace needle::torch_ops
