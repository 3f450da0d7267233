// The maps of maps.def over contiguous float32, for kernels that run several of them on one piece of an array.
#pragma once
#include "cpu/simd.h"

namespace needle::NEEDLE_ISA {

// n results of inputs of n elements; p and q are the attributes. `out` may be one of the inputs.
using FloatMap = void (*)(int64_t n, float* out, const float* const* in, float p, float q);

// By the row's place in maps.def; null where it has no float32.
FloatMap float_map(int number);
int map_arity(int number);

}  // namespace needle::NEEDLE_ISA
