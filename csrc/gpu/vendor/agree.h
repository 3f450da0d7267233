// Do two results of the same problem agree?
#pragma once
#include "gpu/portable.cuh"

namespace needle::gpu::vendor {

struct Largest {
  float value, difference;  // of the finite values and of all differences; NaN where one side alone is not a number
};

constexpr unsigned kBlocks = 128;
constexpr size_t kParts = kBlocks * (256 / WAVE);

// The largest difference between a and b, in `size` floats, of the largest value of a; `parts` is device memory for
// kParts of them.
float relative_difference(const float* a, const float* b, int64_t size, Largest* parts, gpuStream_t stream);

}  // namespace needle::gpu::vendor
