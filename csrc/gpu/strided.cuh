// Loops over strided arrays of any dtype: the host sorts and merges dimensions, a thread finds its elements by
// multiplying instead of dividing.
#pragma once
#include <cmath>
#include <cstring>

#include "gpu/portable.cuh"
#include "kernels/rows.h"
#include "math/strided.h"

namespace needle::gpu {

using device::from_double;

// N arrays of one shape, of at most 2^31 - 1 elements.
template <int N>
struct Loop : device::MergedLoop<N> {
  int64_t total = 1;
  Divisor size[kMaxRank];

  void add(int64_t n, const int64_t* strides) {
    total *= n;
    device::MergedLoop<N>::add(n, strides);
  }
  void finish(const char* op) {
    this->merge();
    if (total > INT32_MAX) fail(op, "arrays on a GPU have at most 2^31 - 1 elements", std::to_string(total));
    for (int d = 0; d < this->rank; d++) size[d] = this->shape[d];
  }

  // Whether groups of `lanes` neighbours along the last dimension can be moved as one in array k.
  bool groups(int k, int lanes) const {
    const int last = this->rank - 1;
    if (this->stride[k][last] != 1 || (last > 0 && this->shape[last] % lanes != 0)) return false;
    for (int d = 0; d < last; d++)
      if (this->stride[k][d] % lanes != 0) return false;
    return true;
  }
  // From here on they count as one element, and so do strides of arrays which have neighbours there. Of one dimension
  // fewer than `lanes` elements may be left over.
  void group(int lanes) {
    const int last = this->rank - 1;
    total = total / this->shape[last] * (this->shape[last] / lanes);
    size[last] = this->shape[last] /= lanes;
    for (int k = 0; k < N; k++)
      for (int d = 0; d < last; d++)
        if (this->stride[k][last] == 1) this->stride[k][d] /= lanes;
  }

  // Where element i lies in each array.
  __device__ __forceinline__ void locate(uint32_t i, int64_t (&at)[N]) const {
#pragma unroll
    for (int k = 0; k < N; k++) at[k] = 0;
#pragma unroll 1
    for (int d = this->rank - 1; d > 0; d--) {
      uint32_t q = size[d].quotient(i);
      int64_t r = i - q * size[d].d;
#pragma unroll
      for (int k = 0; k < N; k++) at[k] += r * this->stride[k][d];
      i = q;
    }
#pragma unroll
    for (int k = 0; k < N; k++) at[k] += static_cast<int64_t>(i) * this->stride[k][0];
  }
};

template <int N>
Loop<N> loop_over(const char* op, const View* const (&views)[N]) {
  Loop<N> l = {};
  device::add_dimensions(l, views);
  l.finish(op);
  return l;
}

// Element i of an array of any dtype, as a T.
template <class T>
__device__ __forceinline__ T load_as(const void* p, DType dtype, int64_t i) {
  switch (dtype) {
#define DTYPE(name, type, letter, text, code, bits) \
  case DType::name:                                 \
    return static_cast<T>(static_cast<const type*>(p)[i]);
#include "kernels/dtypes.def"
#undef DTYPE
  }
  return T(0);
}
template <class T>
__device__ __forceinline__ void store_as(void* p, DType dtype, int64_t i, T v) {
  switch (dtype) {
#define DTYPE(name, type, letter, text, code, bits)  \
  case DType::name:                                  \
    static_cast<type*>(p)[i] = static_cast<type>(v); \
    return;
#include "kernels/dtypes.def"
#undef DTYPE
  }
}

constexpr unsigned kThreads = 256;

// Blocks of kThreads threads for `work` turns of a thread, of which each makes several when there are many.
inline dim3 grid_for(int64_t work, int per_unit = 32) {
  int64_t blocks = (work + kThreads - 1) / kThreads, most = static_cast<int64_t>(per_unit) * device_units();
  return dim3(static_cast<unsigned>(blocks < most ? blocks : most));
}

// f(i) for every i < n, by all threads of the grid.
template <class F>
__device__ __forceinline__ void for_elements(int64_t n, const F& f) {
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < static_cast<uint32_t>(n); i += gridDim.x * kThreads) f(i);
}

}  // namespace needle::gpu
