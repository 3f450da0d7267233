// Four neighbouring floats as one element: kernels over an element type T run with Quad where arrays allow it, and move
// 16 bytes a thread at a time.
#pragma once
#include "gpu/portable.cuh"
#include "kernels/rows.h"

namespace needle::gpu {

struct alignas(16) Quad {
  float v[4];
  Quad() = default;
  __device__ __forceinline__ Quad(float s) : v{s, s, s, s} {}
  __device__ __forceinline__ Quad(float a, float b, float c, float d) : v{a, b, c, d} {}
};

template <class T>
constexpr int kLanes = std::is_same_v<T, Quad> ? 4 : 1;
template <class T>
using Scalar = std::conditional_t<std::is_same_v<T, Quad>, float, T>;

template <class T>
__device__ __forceinline__ T read(const T* p) {
  if constexpr (kLanes<T> == 4) {
    const float4 q = read4(reinterpret_cast<const float*>(p));
    return {q.x, q.y, q.z, q.w};
  } else {
    return *p;
  }
}
template <class T>
__device__ __forceinline__ void write(T* p, const T& v) {
  if constexpr (kLanes<T> == 4) {
    write4(reinterpret_cast<float*>(p), make_float4(v.v[0], v.v[1], v.v[2], v.v[3]));
  } else {
    *p = v;
  }
}

// Lane k of an element.
template <class T>
__device__ __forceinline__ auto& lane(T& element, [[maybe_unused]] int k) {
  if constexpr (kLanes<std::remove_const_t<T>> == 4) {
    return element.v[k];
  } else {
    return element;
  }
}

// f of the lanes of elements.
template <class T, class F, class... Others>
__device__ __forceinline__ T lanewise(const F& f, const T& first, const Others&... others) {
  T result;
#pragma unroll
  for (int k = 0; k < kLanes<T>; k++) lane(result, k) = f(lane(first, k), lane(others, k)...);
  return result;
}

// The lanes of an element combined.
template <class T, class F>
__device__ __forceinline__ Scalar<T> across(const T& element, const F& combine) {
  Scalar<T> result = lane(element, 0);
#pragma unroll
  for (int k = 1; k < kLanes<T>; k++) result = combine(result, lane(element, k));
  return result;
}
template <class T>
__device__ __forceinline__ Scalar<T> total(const T& element) {
  return across(element, [](auto a, auto b) { return a + b; });
}

#define NEEDLE_QUAD(op)                                                              \
  __device__ __forceinline__ Quad operator op(const Quad& a, const Quad& b) {        \
    return {a.v[0] op b.v[0], a.v[1] op b.v[1], a.v[2] op b.v[2], a.v[3] op b.v[3]}; \
  }                                                                                  \
  __device__ __forceinline__ Quad& operator op## = (Quad & a, const Quad& b) { return a = a op b; }
NEEDLE_QUAD(+)
NEEDLE_QUAD(-)
NEEDLE_QUAD(*)
NEEDLE_QUAD(/)
#undef NEEDLE_QUAD

// Whether a view's elements along `axis` are Quads; a view that is not there has any element.
inline bool quads(const View& v, int axis) {
  if (v.absent()) return true;
  if (v.dtype != DType::f32 || v.stride[axis] != 1 || v.shape[axis] % 4 != 0 || !aligned(v.data)) return false;
  for (int d = 0; d < v.rank; d++)
    if (d != axis && v.shape[d] != 1 && v.stride[d] % 4 != 0) return false;
  return true;
}

}  // namespace needle::gpu
