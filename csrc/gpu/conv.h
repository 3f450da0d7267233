// What the convolutions share.
#pragma once
#include "gpu/portable.cuh"
#include "kernels/rows.h"

namespace needle::gpu {

struct Geometry {
  int64_t stride_h, stride_w, pad_top, pad_left, dilation_h, dilation_w, groups;
};

// One input channel per group: x (N, C, H, W), w (O, 1, KH, KW), out (N, O, OH, OW) of any strides; the last three
// views may be null.
void depthwise(const View& x, const View& w, const View& out, const Geometry& g, const View* scale, const View* bias,
               const View* residual, int activation, float alpha, gpuStream_t stream);
// Its transposition, for as many output channels as input channels.
void depthwise_transpose(const View& x, const View& w, const View& out, const Geometry& g, const View* bias,
                         int activation, float alpha, gpuStream_t stream);
void depthwise_weight_grad(const View& x, const View& dy, const View& dw, const Geometry& g, gpuStream_t stream);

}  // namespace needle::gpu
