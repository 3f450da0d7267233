// Images and volumes read at places that a grid gives.
#include "gpu/strided.cuh"
#include "math/sampling.h"

namespace needle::gpu {
namespace {

template <class T>
struct Sampled {
  device::SamplingRule rule;
  Loop<3> places;  // of all images: result, grid, image
  const T *x, *grid;
  T* y;
  int64_t number, y_channel, x_channel, size[3],
      step[3];                // of the grid's numbers; of an image's axes, the slowest first
  uint32_t channels, across;  // threads that share a place's channels
  Divisor inner;              // neighbouring threads, which have one place or one of those
  bool beside;                // which
};

// MODE is the rule's: what a place reads along an axis lies in registers.
template <class T, int RANK, int MODE>
__global__ void GPU_BOUNDS(kThreads, sizeof(T) == 4 ? 4 : 2) sample(Sampled<T> s) {
  constexpr int taps = MODE == device::kNearest ? 1 : MODE == device::kBilinear ? 2 : 4, deep = RANK == 3 ? taps : 1;
  device::SamplingRule rule = s.rule;
  rule.mode = MODE;
  for_elements(s.places.total * s.across, [&](uint32_t i) {
    const uint32_t outer = s.inner.quotient(i), rest = i - outer * s.inner.d;
    const uint32_t place = s.beside ? outer : rest, first = s.beside ? rest : outer;
    int64_t at[3], element[RANK][taps];
    s.places.locate(place, at);
    T weight[RANK][taps];
#pragma unroll
    for (int d = 0; d < RANK; d++) {
      const T g = s.grid[at[1] + (RANK - 1 - d) * s.number];  // x comes first
      device::taps_along(rule, g, static_cast<T>(s.size[d]), [&](int k, T where, T share, T) {
        element[d][k] = static_cast<int64_t>(where) * s.step[d];
        weight[d][k] = share;
      });
    }
#pragma unroll 1
    for (uint32_t c = first; c < s.channels; c += s.across) {
      const T* x = s.x + (at[2] + c * s.x_channel);
      T sum = 0;
#pragma unroll
      for (int z = 0; z < deep; z++)
#pragma unroll
        for (int y = 0; y < taps; y++) {
          const T* line = x + element[RANK - 2][y] + (RANK == 3 ? element[0][z] : 0);
          const T share = RANK == 3 ? weight[0][z] * weight[RANK - 2][y] : weight[RANK - 2][y];
#pragma unroll
          for (int k = 0; k < taps; k++) {
            const T part = share * weight[RANK - 1][k];
            sum += part == 0 ? T(0) : part * line[element[RANK - 1][k]];  // beside the image there may be anything
          }
        }
      s.y[at[0] + c * s.y_channel] = sum;
    }
  });
}

template <class T>
void sample_as(const grid_sample_args& c) {
  const View &x = c.in.x, &grid = c.in.grid, &y = c.out.y;
  const int rank = x.rank - 2;
  Sampled<T> s = {};
  s.rule = {static_cast<int>(c.attr.mode), static_cast<int>(c.attr.padding), c.attr.corners != 0};
  s.x = x.as<const T>(), s.grid = grid.as<const T>(), s.y = y.as<T>();
  const int64_t images[] = {y.stride[0], grid.stride[0], x.stride[0]};
  s.places.add(x.shape[0], images);
  for (int d = 0; d < rank; d++) {
    const int64_t strides[] = {y.stride[d + 2], grid.stride[d + 1], 0};
    s.places.add(y.shape[d + 2], strides);
    s.size[d] = x.shape[d + 2], s.step[d] = x.stride[d + 2];
  }
  s.places.finish("grid_sample");
  s.number = grid.stride[rank + 1], s.x_channel = x.stride[1], s.y_channel = y.stride[1];
  s.channels = static_cast<uint32_t>(x.shape[1]);
  // Neighbouring channels are read by neighbouring threads; others one after the other, unless there are few places.
  s.beside = s.x_channel == 1 && s.channels > 1;
  const int64_t enough = 8LL * device_units() * kThreads;
  s.across = 1;
  while (s.across < s.channels && ((s.beside && s.across < WAVE) || s.places.total * s.across < enough)) s.across *= 2;
  const int64_t threads = s.places.total * s.across;
  if (threads > INT32_MAX)
    fail("grid_sample", "at most 2^31 - 1 places and channels side by side", std::to_string(threads));
  s.inner = s.beside ? s.across : s.places.total;
  auto run = [&](void (*kernel)(Sampled<T>)) { launch(kernel, grid_for(threads), kThreads, 0, stream_of(c), s); };
  switch (s.rule.mode) {
    case device::kBilinear:
      return run(rank == 3 ? sample<T, 3, device::kBilinear> : sample<T, 2, device::kBilinear>);
    case device::kNearest:
      return run(rank == 3 ? sample<T, 3, device::kNearest> : sample<T, 2, device::kNearest>);
    case device::kBicubic:
      return run(sample<T, 2, device::kBicubic>);  // of volumes there is none
  }
}

}  // namespace

void grid_sample(const grid_sample_args& c) {
  if (c.out.y.size() == 0) return;
  with_type<grid_sample_args::In::x_dtypes>(c.in.x.dtype, [&](auto t) { sample_as<decltype(t)>(c); });
}

}  // namespace needle::gpu
