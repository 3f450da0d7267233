// Element-wise kernels of one array: those __global__ ones of elementwise.cuh.
#include "gpu/elementwise.cuh"

namespace needle::gpu {

#define UNARY NEEDLE_RUN_MAP
#define BINARY(...)
#define TERNARY(...)
#include "kernels/maps.def"

}  // namespace needle::gpu
