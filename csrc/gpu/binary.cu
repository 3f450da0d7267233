// Element-wise kernels of two and three arrays, also gradients: those __global__ ones of elementwise.cuh.
#include "gpu/elementwise.cuh"

namespace needle::gpu {

#define UNARY(...)
#define BINARY NEEDLE_RUN_MAP
#define TERNARY NEEDLE_RUN_MAP
#include "kernels/maps.def"

}  // namespace needle::gpu
