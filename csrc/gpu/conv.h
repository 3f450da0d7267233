// What the convolutions share.
#pragma once
#include "gpu/gemm.cuh"
#include "math/image.h"

namespace needle::gpu {

struct Geometry : device::WindowOf<int64_t> {  // the kernel's size comes from its weights
  int64_t groups;
  template <class Attr>
  explicit Geometry(const Attr& a) : WindowOf(a, 0, 0), groups(a.groups) {}
};

// What becomes of the sums; views may be null.
struct Epilogue {
  const View *scale = nullptr, *bias = nullptr, *residual = nullptr;
  int activation = kNone;
  float alpha = 0;
  int precision = kExact;
};

// One input channel per group: x (N, C, H, W), w (O, 1, KH, KW), out (N, O, OH, OW) of any strides.
void depthwise(const View& x, const View& w, const View& out, const Geometry& g, const Epilogue& e, gpuStream_t stream);
// Its transposition, for as many output channels as input channels.
void depthwise_transpose(const View& x, const View& w, const View& out, const Geometry& g, const Epilogue& e,
                         gpuStream_t stream);
void depthwise_weight_grad(const View& x, const View& dy, const View& dw, const Geometry& g, gpuStream_t stream);

}  // namespace needle::gpu
