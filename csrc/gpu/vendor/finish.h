// The epilogue of a problem that a library did without it.
#pragma once
#include "gpu/portable.cuh"
#include "gpu/vendor/problem.h"

namespace needle::gpu::vendor {

// out = activation(out scale + residual + bias), in place.
void finish(const Problem& p, gpuStream_t stream);

}  // namespace needle::gpu::vendor
