// A thread per pixel: neighbouring threads read neighbours of every channel and write a float4 each.
#include "gpu/image.cuh"
#include "gpu/vendor/pad.h"

namespace needle::gpu::vendor {
namespace {

struct Pad {
  Image<float> x;
  float* out;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team&, int64_t n, bool) const {
    const int rest = x.by_width.quotient(static_cast<int>(n)), image = x.by_height.quotient(rest);
    Spot s = {image, 0, rest - image * x.height, static_cast<int>(n) - rest * x.width};
    float v[kPadded] = {};
#pragma unroll
    for (int c = 0; c < kPadded; c++) {
      s.channel = c;
      if (c < x.channels) v[c] = x.at(s);
    }
    write4(out + kPadded * n, make_float4(v[0], v[1], v[2], v[3]));
  }
};

}  // namespace

void pad_channels(const View& x, const View& out, gpuStream_t stream) {
  launch_teams<ThreadTeam>(Pad{x, out.as<float>()}, x.shape[0] * x.shape[2] * x.shape[3], stream);
}

}  // namespace needle::gpu::vendor
