// Convolutions of few channels with more of them: the pixels that a stride steps over become channels, filled up with
// zeros to a multiple of four, which is what tensor cores' engines load at once. The image gets its padding with it.
#pragma once
#include "gpu/portable.cuh"
#include "gpu/vendor/problem.h"

namespace needle::gpu::vendor {

// Whether a library may gain by it, at reduced precision.
bool can_fold(const Problem& p);

size_t fold_bytes(const Problem& p);

// The same convolution with image and weights in `memory`, of stride 1 and without padding.
Problem folded(const Problem& p, void* memory);

// Fills them in.
void fold(const Problem& p, void* memory, gpuStream_t stream);

}  // namespace needle::gpu::vendor
