// The libraries of this build. Functions, for clang would take constants to the device as well.
#pragma once
#include "gpu/vendor/problem.h"

namespace needle::gpu::vendor {

#if defined(NEEDLE_EMULATION)
const Library* test_products();
const Library* test_convolutions();
inline const Library* library_for(int kind) { return kind == kMatmul ? test_products() : test_convolutions(); }
#elif defined(__HIP__)
const Library* hipblaslt();
const Library* miopen();
inline const Library* library_for(int kind) { return kind == kMatmul ? hipblaslt() : miopen(); }
#else
const Library* cublaslt();
const Library* cudnn();
inline const Library* library_for(int kind) {  // CMake says whose headers are there
#ifdef NEEDLE_CUBLASLT
  if (kind == kMatmul) return cublaslt();
#endif
#ifdef NEEDLE_CUDNN
  if (kind != kMatmul) return cudnn();
#endif
  (void)kind;
  return nullptr;
}
#endif

}  // namespace needle::gpu::vendor
