// The rows of maps.inc over arrays of any strides and dtypes; unary.cu and binary.cu have the kernels.
#pragma once
#include "gpu/strided.cuh"

namespace needle::gpu {

template <int ARITY>
struct Maps {
  Loop<ARITY + 1> loop;
  void* data[ARITY + 1];  // the output, then inputs
  DType dtype[ARITY + 1];
  double p, q;
};

template <class Map, int ARITY, class T>
__device__ __forceinline__ T apply_map(const T (&x)[ARITY], T p, T q) {
  if constexpr (ARITY == 1) return Map::apply(x[0], p, q);
  if constexpr (ARITY == 2) return Map::apply(x[0], x[1], p, q);
  if constexpr (ARITY == 3) return Map::apply(x[0], x[1], x[2], p, q);
}

// Any strides and dtypes.
template <class Map, int ARITY, class T>
__device__ __forceinline__ void map_strided(const Maps<ARITY>& m, T p, T q) {
  const uint32_t n = static_cast<uint32_t>(m.loop.total);
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < n; i += gridDim.x * kThreads) {
    int64_t at[ARITY + 1];
    m.loop.locate(i, at);
    T x[ARITY];
#pragma unroll
    for (int k = 0; k < ARITY; k++) x[k] = load_as<T>(m.data[k + 1], m.dtype[k + 1], at[k + 1]);
    store_as<T>(m.data[0], m.dtype[0], at[0], apply_map<Map, ARITY, T>(x, p, q));
  }
}

// float32, all contiguous and aligned: four at a time.
template <class Map, int ARITY>
__device__ __forceinline__ void map_dense(const Maps<ARITY>& m, float p, float q) {
  const uint32_t n = static_cast<uint32_t>(m.loop.total), quads = n / 4;
  float* out = static_cast<float*>(m.data[0]);
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < quads; i += gridDim.x * kThreads) {
    float4 v[ARITY];
#pragma unroll
    for (int k = 0; k < ARITY; k++)
      v[k] = read4(static_cast<const float*>(m.data[k + 1]) + 4 * static_cast<int64_t>(i));
    float r[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float x[ARITY];
#pragma unroll
      for (int k = 0; k < ARITY; k++) x[k] = j == 0 ? v[k].x : j == 1 ? v[k].y : j == 2 ? v[k].z : v[k].w;
      r[j] = apply_map<Map, ARITY, float>(x, p, q);
    }
    write4(out + 4 * static_cast<int64_t>(i), make_float4(r[0], r[1], r[2], r[3]));
  }
  const uint32_t last = 4 * quads + threadIdx.x;
  if (blockIdx.x != 0 || last >= n) return;
  float x[ARITY];
#pragma unroll
  for (int k = 0; k < ARITY; k++) x[k] = static_cast<const float*>(m.data[k + 1])[last];
  out[last] = apply_map<Map, ARITY, float>(x, p, q);
}

constexpr bool has_letter(const char* dtypes, char letter) {
  for (; *dtypes; dtypes++)
    if (*dtypes == letter) return true;
  return false;
}
constexpr int count_attributes(const char* attrs) {
  int n = *attrs ? 1 : 0;
  for (; *attrs; attrs++) n += *attrs == ' ';
  return n;
}

template <int ARITY>
bool dense(const Maps<ARITY>& m) {
  for (int k = 0; k <= ARITY; k++)
    if (m.dtype[k] != DType::f32 || m.loop.stride[k][0] != 1 || !aligned16(m.data[k])) return false;
  return m.loop.rank == 1;
}

template <int ARITY>
Maps<ARITY> maps_of(const char* name, const Call& c, int attributes) {
  const View* views[ARITY + 1] = {c.out};
  for (int k = 0; k < ARITY; k++) views[k + 1] = c.in + k;
  Maps<ARITY> m = {};
  m.loop = loop_over<ARITY + 1>(name, views);
  for (int k = 0; k <= ARITY; k++) m.data[k] = views[k]->data, m.dtype[k] = views[k]->dtype;
  m.p = attributes > 0 ? c.attr[0] : 0, m.q = attributes > 1 ? c.attr[1] : 0;
  return m;
}

// Computes in the dtype of the last input: `where` has a condition of another dtype in front. Bools count as int32.
// `Kernels` gives the kernels of a map, so that they stand in the .cu files.
template <class Kernels, int ARITY, bool INTEGERS>
void run_map(const char* name, const Call& c, int attributes) {
  Maps<ARITY> m = maps_of<ARITY>(name, c, attributes);
  if (m.loop.total == 0) return;
  auto go = [&](auto kernel, auto t, int64_t turns) {
    using T = decltype(t);
    launch(kernel, grid_for(turns), kThreads, 0, stream_of(c), m, from_double<T>(m.p), from_double<T>(m.q));
  };
  switch (c.in[ARITY - 1].dtype) {
    case DType::f32:
      if (dense(m)) return go(Kernels::dense(), float{}, (m.loop.total + 3) / 4);
      return go(Kernels::template strided<float>(), float{}, m.loop.total);
    case DType::f64:
      return go(Kernels::template strided<double>(), double{}, m.loop.total);
    case DType::i64:
      if constexpr (INTEGERS) go(Kernels::template strided<int64_t>(), int64_t{}, m.loop.total);
      return;
    case DType::i32:
    case DType::b8:
      if constexpr (INTEGERS) go(Kernels::template strided<int32_t>(), int32_t{}, m.loop.total);
      return;
  }
}

}  // namespace needle::gpu
