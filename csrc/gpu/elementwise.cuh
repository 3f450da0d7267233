// The rows of maps.def over arrays of any strides and dtypes: UNARY of them in unary.cu, the others in binary.cu.
#pragma once
#include "gpu/quad.cuh"
#include "gpu/strided.cuh"

namespace needle::gpu {

template <class Map>
struct Operands {
  Loop<Map::arity + 1> loop;
  void* data[Map::arity + 1];  // the output, then inputs
  DType dtype[Map::arity + 1];
};

// Any strides and dtypes.
template <class Map, class T>
__global__ void GPU_BOUNDS(kThreads, 4) elements(Operands<Map> m, T p, T q) {
  for_elements(m.loop.total, [&](uint32_t i) {
    int64_t at[Map::arity + 1];
    m.loop.locate(i, at);
    T x[Map::arity];
#pragma unroll
    for (int k = 0; k < Map::arity; k++) x[k] = load_as<T>(m.data[k + 1], m.dtype[k + 1], at[k + 1]);
    store_as<T>(m.data[0], m.dtype[0], at[0], device::apply_map<Map>(x, p, q));
  });
}

// float32, four at a time along the last dimension, where an array has neighbours or, as an input, the same value.
// Of arrays of one dimension and n elements fewer than four may be left over.
template <class Map>
__global__ void GPU_BOUNDS(kThreads, 4) quad_elements(Operands<Map> m, uint32_t n, float p, float q) {
  constexpr int kArity = Map::arity;
  const int last = m.loop.rank - 1;
  for_elements(m.loop.total, [&](uint32_t i) {
    int64_t at[kArity + 1];
    m.loop.locate(i, at);
    Quad v[kArity], r;
#pragma unroll
    for (int k = 0; k < kArity; k++) {
      const void* from = m.data[k + 1];
      v[k] = m.loop.stride[k + 1][last] == 0 ? Quad(static_cast<const float*>(from)[at[k + 1]])
                                             : read(static_cast<const Quad*>(from) + at[k + 1]);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float x[kArity];
#pragma unroll
      for (int k = 0; k < kArity; k++) x[k] = v[k].v[j];
      r.v[j] = device::apply_map<Map>(x, p, q);
    }
    write(static_cast<Quad*>(m.data[0]) + at[0], r);
  });
  const uint32_t rest = 4 * static_cast<uint32_t>(m.loop.total) + threadIdx.x;
  if (blockIdx.x != 0 || rest >= n) return;
  float x[kArity];
#pragma unroll
  for (int k = 0; k < kArity; k++) x[k] = static_cast<const float*>(m.data[k + 1])[rest * m.loop.stride[k + 1][0]];
  static_cast<float*>(m.data[0])[rest] = device::apply_map<Map>(x, p, q);
}

// Functions whose constants, in double and for four elements, are more than the scalar registers of AMD devices hold.
template <class Map>
constexpr bool kOneAtATime = std::is_same_v<Map, device::erfinv_map> || std::is_same_v<Map, device::lgamma_map> ||
                             std::is_same_v<Map, device::digamma_map>;

template <class Map>
bool quads(const Operands<Map>& m) {
  const int last = m.loop.rank - 1;
  for (int k = 0; k <= Map::arity; k++) {
    const bool same = k > 0 && m.loop.stride[k][last] == 0;
    if (m.dtype[k] != DType::f32 || (!same && !(m.loop.groups(k, 4) && aligned(m.data[k])))) return false;
  }
  return true;
}

// Computes in the dtype of the last input: `where` has a condition of another dtype in front. Bools count as int32.
template <class Map>
void run_map(const char* name, const Call& c) {
  const View* views[Map::arity + 1] = {c.out};
  for (int k = 0; k < Map::arity; k++) views[k + 1] = c.in + k;
  Operands<Map> m = {};
  m.loop = loop_over(name, views);
  for (int k = 0; k <= Map::arity; k++) m.data[k] = views[k]->data, m.dtype[k] = views[k]->dtype;
  if (m.loop.total == 0) return;
  with_type<Map::dtypes>(c.in[Map::arity - 1].dtype, [&](auto t) {
    using T = std::conditional_t<std::is_same_v<decltype(t), bool>, int32_t, decltype(t)>;
    const T p = Map::attributes > 0 ? from_double<T>(c.attr[0]) : T(0);
    const T q = Map::attributes > 1 ? from_double<T>(c.attr[1]) : T(0);
    if constexpr (std::is_same_v<T, float> && !kOneAtATime<Map>)
      if (quads(m)) {
        const uint32_t n = static_cast<uint32_t>(m.loop.total);
        m.loop.group(4);
        return launch(quad_elements<Map>, grid_for(m.loop.total + 1), kThreads, 0, stream_of(c), m, n, p, q);
      }
    launch(elements<Map, T>, grid_for(m.loop.total), kThreads, 0, stream_of(c), m, p, q);
  });
}

#define NEEDLE_RUN_MAP(name, ...) \
  void name(const Call& c) { run_map<device::name##_map>(#name, c); }

}  // namespace needle::gpu
