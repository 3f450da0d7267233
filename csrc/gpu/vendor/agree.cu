// Parts of the comparison by waves on the device, put together on the host.
#include <cfloat>
#include <cmath>
#include <vector>

#include "gpu/vendor/agree.h"

namespace needle::gpu::vendor {
namespace {

__global__ void GPU_BOUNDS(256, 4) compare_results(const float* a, const float* b, int64_t size, Largest* parts) {
  float value = 0, difference = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < size; i += int64_t{gridDim.x} * 256) {
    float x = a[i], y = b[i], magnitude = x < 0 ? -x : x;
    if (magnitude > value && magnitude <= FLT_MAX) value = magnitude;
    if (x == y || (x != x && y != y)) continue;
    float apart = x > y ? x - y : y - x;
    if (apart > difference || apart != apart) difference = apart;
  }
  value = wave_max(value);
  difference = wave_max(difference);
  if (lane_id() == 0) parts[(blockIdx.x * 256 + threadIdx.x) / WAVE] = {value, difference};
}

}  // namespace

float relative_difference(const float* a, const float* b, int64_t size, Largest* parts, gpuStream_t stream) {
  launch(compare_results, dim3(kBlocks), 256, 0, stream, a, b, size, parts);
  std::vector<Largest> found(kParts);
  check(gpuMemcpyAsync(found.data(), parts, kParts * sizeof(Largest), gpuMemcpyDefault, stream), "vendor");
  check(gpuStreamSynchronize(stream), "vendor");
  Largest all = {};
  for (const Largest& l : found) {
    if (l.value > all.value) all.value = l.value;
    if (!(l.difference <= all.difference)) all.difference = l.difference;
    if (all.difference != all.difference) break;
  }
  return all.difference == 0 ? 0 : all.difference / std::fmax(all.value, FLT_MIN);
}

}  // namespace needle::gpu::vendor
