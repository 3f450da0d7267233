// Loops over strided arrays of any dtype: the host sorts and merges dimensions, a thread finds its elements by
// multiplying instead of dividing.
#pragma once
#include <cmath>
#include <cstring>

#include "gpu/portable.cuh"
#include "kernels/rows.h"

namespace needle::gpu {

// i / size for i < 2^31: with shift = ceil(log2 size) and magic = 2^32 (2^shift - size) / size + 1 it is
// (high half of i * magic + i) >> shift (Granlund and Montgomery, 1994).
struct Divider {
  uint32_t size, magic, shift;

  __device__ __forceinline__ uint32_t divide(uint32_t i) const {
    return (static_cast<uint32_t>((static_cast<uint64_t>(i) * magic) >> 32) + i) >> shift;
  }
};

inline Divider divider(int64_t size) {
  Divider d = {static_cast<uint32_t>(size), 0, 0};
  while ((uint64_t{1} << d.shift) < d.size) d.shift++;
  d.magic = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << d.shift) - d.size)) / d.size + 1);
  return d;
}

// N arrays of one shape. Dimensions of size 1 are gone, the others sorted by the first array's stride, large to small,
// and neighbours that all arrays step through as one are merged. Rank is at least 1.
template <int N>
struct Loop {
  int rank = 0;
  int64_t total = 1;
  int64_t shape[kMaxRank] = {};
  int64_t stride[N][kMaxRank] = {};
  Divider size[kMaxRank] = {};

  void add(int64_t n, const int64_t* strides) {
    total *= n;
    if (n == 1) return;
    auto magnitude = [](int64_t s) { return s < 0 ? -s : s; };
    int d = rank++;
    for (; d > 0 && magnitude(stride[0][d - 1]) < magnitude(strides[0]); d--) {
      shape[d] = shape[d - 1];
      for (int k = 0; k < N; k++) stride[k][d] = stride[k][d - 1];
    }
    shape[d] = n;
    for (int k = 0; k < N; k++) stride[k][d] = strides[k];
  }

  void finish(const char* op) {
    int last = 0;
    for (int d = 1; d < rank; d++) {
      bool one = true;
      for (int k = 0; k < N; k++) one = one && stride[k][last] == stride[k][d] * shape[d];
      if (one) {
        shape[last] *= shape[d];
      } else {
        shape[++last] = shape[d];
      }
      for (int k = 0; k < N; k++) stride[k][last] = stride[k][d];
    }
    if (rank == 0) {
      shape[0] = 1;
      for (int k = 0; k < N; k++) stride[k][0] = 1;
    }
    rank = rank == 0 ? 1 : last + 1;
    if (total > INT32_MAX) fail(op, "arrays on a GPU have at most 2^31 - 1 elements", std::to_string(total));
    for (int d = 0; d < rank && total; d++) size[d] = divider(shape[d]);
  }

  // Where element i lies in each array.
  __device__ __forceinline__ void locate(uint32_t i, int64_t (&at)[N]) const {
#pragma unroll
    for (int k = 0; k < N; k++) at[k] = 0;
#pragma unroll 1
    for (int d = rank - 1; d > 0; d--) {
      uint32_t q = size[d].divide(i);
      int64_t r = i - q * size[d].size;
#pragma unroll
      for (int k = 0; k < N; k++) at[k] += r * stride[k][d];
      i = q;
    }
#pragma unroll
    for (int k = 0; k < N; k++) at[k] += static_cast<int64_t>(i) * stride[k][0];
  }
};

template <int N>
Loop<N> loop_over(const char* op, const View* const (&views)[N]) {
  Loop<N> l;
  for (int d = 0; d < views[0]->rank; d++) {
    int64_t strides[N];
    for (int k = 0; k < N; k++) strides[k] = views[k]->stride[d];
    l.add(views[0]->shape[d], strides);
  }
  l.finish(op);
  return l;
}

// Element i of an array of any dtype, as a T.
template <class T>
__device__ __forceinline__ T load_as(const void* p, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::f32:
      return static_cast<T>(static_cast<const float*>(p)[i]);
    case DType::f64:
      return static_cast<T>(static_cast<const double*>(p)[i]);
    case DType::i32:
      return static_cast<T>(static_cast<const int32_t*>(p)[i]);
    case DType::i64:
      return static_cast<T>(static_cast<const int64_t*>(p)[i]);
    case DType::b8:
      return static_cast<T>(static_cast<const bool*>(p)[i]);
  }
  return T(0);
}
template <class T>
__device__ __forceinline__ void store_as(void* p, DType dtype, int64_t i, T v) {
  switch (dtype) {
    case DType::f32:
      static_cast<float*>(p)[i] = static_cast<float>(v);
      return;
    case DType::f64:
      static_cast<double*>(p)[i] = static_cast<double>(v);
      return;
    case DType::i32:
      static_cast<int32_t*>(p)[i] = static_cast<int32_t>(v);
      return;
    case DType::i64:
      static_cast<int64_t*>(p)[i] = static_cast<int64_t>(v);
      return;
    case DType::b8:
      static_cast<bool*>(p)[i] = static_cast<bool>(v);
      return;
  }
}

// `value` as a T; infinities and large values become the limits of an integer type.
template <class T>
T from_double(double value) {
  if constexpr (std::is_integral<T>::value && !std::is_same<T, bool>::value) {
    constexpr T high = static_cast<T>(~(uint64_t{1} << (8 * sizeof(T) - 1)));
    if (value >= static_cast<double>(high)) return high;
    if (value <= -static_cast<double>(high)) return -high - 1;
  }
  return static_cast<T>(value);
}

constexpr unsigned kThreads = 256;

// Blocks of kThreads threads for `work` turns of a thread, of which each makes several when there are many.
inline dim3 grid_for(int64_t work) {
  int64_t blocks = (work + kThreads - 1) / kThreads, most = 32LL * device_units();
  return dim3(static_cast<unsigned>(blocks < most ? blocks : most));
}

template <class Args>
gpuStream_t stream_of(const Args& c) {
  return static_cast<gpuStream_t>(c.exec->stream);
}

inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace needle::gpu
