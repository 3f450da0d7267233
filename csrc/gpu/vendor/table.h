// The libraries of this build.
#pragma once
#include "gpu/vendor/problem.h"

namespace needle::gpu::vendor {

#if defined(NEEDLE_EMULATION)
extern const Library kTestProducts, kTestConvolutions;
inline const Library* const kLibraries[] = {&kTestProducts, &kTestConvolutions};
#elif defined(__HIP__)
extern const Library kHipblasLt, kMiopen;
inline const Library* const kLibraries[] = {&kHipblasLt, &kMiopen};
#else  // CMake says which headers are there
extern const Library kCublasLt, kCudnn;
inline const Library* const kLibraries[] = {
#ifdef NEEDLE_CUBLASLT
    &kCublasLt,
#else
    nullptr,
#endif
#ifdef NEEDLE_CUDNN
    &kCudnn,
#else
    nullptr,
#endif
};
#endif

}  // namespace needle::gpu::vendor
