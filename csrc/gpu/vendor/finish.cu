// Bound by memory: four neighbours of the result a thread where they are also neighbours in a residual.
#include "gpu/strided.cuh"
#include "gpu/vendor/finish.h"

namespace needle::gpu::vendor {
namespace {

enum Place { kOut, kResidual, kScale, kBias, kPlaces };

struct Finish {
  Loop<kPlaces> loop;  // strides of 0 where an operand is absent or has one value for all
  float* out;
  const float *residual, *scale, *bias;  // each may be null
  int activation;
  float alpha;
};

template <int V>
__global__ void GPU_BOUNDS(kThreads, 4) finish_elements(Finish f) {
  const int last = f.loop.rank - 1;
  const int64_t scale_step = f.loop.stride[kScale][last], bias_step = f.loop.stride[kBias][last];
  device::with_activation(f.activation, f.alpha, [&](auto activation) {
    for_elements(f.loop.total / V, [&](uint32_t i) {
      int64_t at[kPlaces];
      f.loop.locate(V * i, at);
      auto finished = [&](float v, float residual, int j) {
        if (f.scale) v *= f.scale[at[kScale] + j * scale_step];
        if (f.bias) v += f.bias[at[kBias] + j * bias_step];
        return activation(v + residual);
      };
      float* out = f.out + at[kOut];
      if constexpr (V == 1) {
        *out = finished(*out, f.residual ? f.residual[at[kResidual]] : 0, 0);
      } else {
        const float4 v = read4(out), r = f.residual ? read4(f.residual + at[kResidual]) : make_float4(0, 0, 0, 0);
        write4(out,
               make_float4(finished(v.x, r.x, 0), finished(v.y, r.y, 1), finished(v.z, r.z, 2), finished(v.w, r.w, 3)));
      }
    });
  });
}

// Four elements from a multiple of four on are one aligned float4.
bool quads(const Finish& f, Place place, const float* data) {
  const int last = f.loop.rank - 1;
  bool all = f.loop.stride[place][last] == 1 && aligned(data);
  for (int d = 0; d < last; d++) all = all && f.loop.stride[place][d] % 4 == 0;
  return all;
}

}  // namespace

void finish(const Problem& p, gpuStream_t stream) {
  const int channels = p.kind == kMatmul ? 2 : 1;  // the axis of scale and bias
  View views[kPlaces] = {p.out, p.residual, p.scale, p.bias};
  for (View& v : views) {
    if (v.data && v.rank == p.out.rank) continue;
    const int64_t step = v.data ? v.stride[0] : 0;
    for (int d = 0; d < p.out.rank; d++) v.stride[d] = d == channels ? step : 0;
  }
  const View* all[kPlaces] = {&views[kOut], &views[kResidual], &views[kScale], &views[kBias]};
  Finish f = {loop_over("vendor", all),
              p.out.as<float>(),
              p.residual.as<float>(),
              p.scale.as<float>(),
              p.bias.as<float>(),
              static_cast<int>(p.activation),
              p.alpha};
  if (f.loop.total == 0) return;
  const int last = f.loop.rank - 1;
  const bool wide =
      f.loop.shape[last] % 4 == 0 && quads(f, kOut, f.out) && (!f.residual || quads(f, kResidual, f.residual));
  if (wide) return launch(finish_elements<4>, grid_for(f.loop.total / 4), kThreads, 0, stream, f);
  launch(finish_elements<1>, grid_for(f.loop.total), kThreads, 0, stream, f);
}

}  // namespace needle::gpu::vendor
