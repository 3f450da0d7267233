// Element-wise kernels of two and three arrays, among them gradients and comparisons.
#include "gpu/elementwise.cuh"

namespace needle::gpu {
namespace {

template <class Map, int ARITY, class T>
__global__ void GPU_BOUNDS(kThreads, 4) elements(Maps<ARITY> m, T p, T q) {
  map_strided<Map, ARITY, T>(m, p, q);
}
template <class Map, int ARITY>
__global__ void GPU_BOUNDS(kThreads, 4) dense_elements(Maps<ARITY> m, float p, float q) {
  map_dense<Map, ARITY>(m, p, q);
}

template <class Map, int ARITY>
struct Kernels {
  template <class T>
  static auto strided() {
    return elements<Map, ARITY, T>;
  }
  static auto dense() { return dense_elements<Map, ARITY>; }
};

}  // namespace

#define MAP(arity, name, dtypes, attrs)                                                                             \
  void name(const Call& c) {                                                                                        \
    run_map<Kernels<device::name##_map, arity>, arity, has_letter(dtypes, 'i')>(#name, c, count_attributes(attrs)); \
  }
#define UNARY(name, dtypes, attrs, expr)
#define BINARY(name, dtypes, attrs, expr) MAP(2, name, dtypes, attrs)
#define TERNARY(name, dtypes, attrs, expr) MAP(3, name, dtypes, attrs)
#include "kernels/maps.def"
#undef UNARY
#undef BINARY
#undef TERNARY
#undef MAP

}  // namespace needle::gpu
