// Images of few channels with zeros beside them.
#pragma once
#include "core/call.h"
#include "gpu/portable.cuh"

namespace needle::gpu::vendor {

constexpr int kPadded = 4;

// x (N, C <= kPadded, H, W) of any strides, of less than 2^31 pixels, to `out` (N, kPadded, H, W), dense in the order
// N, H, W, C.
void pad_channels(const View& x, const View& out, gpuStream_t stream);

}  // namespace needle::gpu::vendor
