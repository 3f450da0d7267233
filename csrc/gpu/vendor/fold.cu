#include "gpu/gemm.cuh"
#include "gpu/image.cuh"
#include "gpu/vendor/fold.h"

namespace needle::gpu::vendor {
namespace {

constexpr int64_t kMostChannels = 16;  // beyond, the convolution does not wait for its loads

// to(n, (dy sw + dx) C + c, y, x) = from(n, c, sh y + dy - top, sw x + dx - left), zero outside and in further
// channels.
struct Fold {
  Image<float> from, to;
  int step_h, step_w, top, left;
  Divisor quads, by_width, by_height, by_channels, by_step;

  template <class Team>
  __device__ __forceinline__ void operator()(const Team&, int64_t n, bool) const {
    const int at = static_cast<int>(n), pixel = quads.quotient(at), line = by_width.quotient(pixel);
    const int first = 4 * (at - pixel * static_cast<int>(quads.d));
    const int x = pixel - line * to.width, image = by_height.quotient(line), y = line - image * to.height;
    float v[4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int tap = by_channels.quotient(first + j), down = by_step.quotient(tap);
      const int source_y = y * step_h + down - top, source_x = x * step_w + tap - down * step_w - left;
      if (down < step_h && static_cast<unsigned>(source_y) < static_cast<unsigned>(from.height) &&
          static_cast<unsigned>(source_x) < static_cast<unsigned>(from.width))
        v[j] = from.at({image, first + j - tap * from.channels, source_y, source_x});
    }
    write4(to.data + 4 * n, make_float4(v[0], v[1], v[2], v[3]));
  }
};

int64_t channels(const Problem& p) { return (p.a.shape[1] * p.stride_h * p.stride_w + 3) / 4 * 4; }

// (N, channels, height, width), dense in the order N, H, W, C.
View dense(const View& v, void* memory, int64_t channels, int64_t height, int64_t width) {
  View to = v;
  to.data = memory;
  to.shape[1] = channels, to.shape[2] = height, to.shape[3] = width;
  to.stride[1] = 1, to.stride[3] = channels, to.stride[2] = width * channels, to.stride[0] = height * to.stride[2];
  return to;
}

// To a multiple of what a library's memory may begin at.
size_t bytes(const View& v) {
  return (static_cast<size_t>(v.shape[0] * v.stride[0]) * sizeof(float) + 255) / 256 * 256;
}

void run(const View& from, const View& to, const Problem& p, int64_t top, int64_t left, gpuStream_t stream) {
  Fold op = {from,
             to,
             static_cast<int>(p.stride_h),
             static_cast<int>(p.stride_w),
             static_cast<int>(top),
             static_cast<int>(left),
             to.shape[1] / 4,
             to.shape[3],
             to.shape[2],
             from.shape[1],
             p.stride_w};
  launch_teams<ThreadTeam>(op, to.shape[0] * to.stride[0] / 4, stream);
}

}  // namespace

bool can_fold(const Problem& p) {
  if (p.kind != kConv2d || p.precision == kExact || p.groups != 1 || p.a.shape[1] % 4 == 0) return false;
  if (p.dilation_h != 1 || p.dilation_w != 1 || p.pad_top < 0 || p.pad_left < 0) return false;
  if (p.a.shape[1] * p.stride_h * p.stride_w > kMostChannels) return false;
  const Problem f = folded(p, nullptr);
  return f.a.shape[0] * f.a.stride[0] <= INT32_MAX && f.b.shape[0] * f.b.stride[0] <= INT32_MAX;
}

size_t fold_bytes(const Problem& p) {
  const Problem f = folded(p, nullptr);
  return bytes(f.a) + bytes(f.b);
}

Problem folded(const Problem& p, void* memory) {
  Problem f = p;
  const int64_t height = (p.b.shape[2] + p.stride_h - 1) / p.stride_h,
                width = (p.b.shape[3] + p.stride_w - 1) / p.stride_w;
  f.a = dense(p.a, memory, channels(p), p.out.shape[2] - 1 + height, p.out.shape[3] - 1 + width);
  f.b = dense(p.b, static_cast<char*>(memory) + bytes(f.a), channels(p), height, width);
  f.stride_h = f.stride_w = 1;
  f.pad_top = f.pad_left = 0;
  return f;
}

void fold(const Problem& p, void* memory, gpuStream_t stream) {
  const Problem f = folded(p, memory);
  run(p.a, f.a, p, p.pad_top, p.pad_left, stream);
  run(p.b, f.b, p, 0, 0, stream);
}

}  // namespace needle::gpu::vendor
