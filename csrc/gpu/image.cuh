// Images (N, C, H, W) of any strides, and a walk over their pixels in the order of memory.
#pragma once
#include "gpu/gemm.cuh"
#include "gpu/team.cuh"

namespace needle::gpu {

struct Spot {
  int image, channel, y, x;
};

template <class T>
struct Image {
  T* data;
  int64_t n, c, h, w;  // strides
  int height, width, channels;
  bool channels_last;
  Divisor by_channels, by_height, by_width;

  explicit Image(const View& v)
      : data(v.as<T>()),
        n(v.stride[0]),
        c(v.stride[1]),
        h(v.stride[2]),
        w(v.stride[3]),
        height(static_cast<int>(v.shape[2])),
        width(static_cast<int>(v.shape[3])),
        channels(static_cast<int>(v.shape[1])),
        channels_last(v.shape[1] > 1 && v.stride[1] == 1 && (v.shape[3] == 1 || v.stride[3] != 1)),
        by_channels(v.shape[1]),
        by_height(v.shape[2]),
        by_width(v.shape[3]) {}
  __device__ __forceinline__ T& at(const Spot& s) const { return at(s, s.y, s.x); }
  __device__ __forceinline__ T& at(const Spot& s, int y, int x) const {
    return data[s.image * n + s.channel * c + y * h + x * w];
  }
  // Pixel `index` of all images.
  __device__ __forceinline__ Spot spot(int64_t index) const {
    int rest = static_cast<int>(index), channel = 0;
    auto digit = [&](const Divisor& by) {
      int quotient = by.quotient(rest), d = rest - quotient * static_cast<int>(by.d);
      rest = quotient;
      return d;
    };
    if (channels_last) channel = digit(by_channels);
    int x = digit(by_width), y = digit(by_height);
    if (!channels_last) channel = digit(by_channels);
    return {rest, channel, y, x};
  }
};

// make(T{}) gives an operation on float or double, which runs for every pixel of `v`.
template <class Args, class Make>
void for_pixels(const char* op, const Args& c, const View& v, const Make& make) {
  if (v.size() > INT32_MAX) fail(op, "an array has at most 2^31 elements", std::to_string(v.size()));
  gpuStream_t stream = static_cast<gpuStream_t>(c.exec->stream);
  if (v.dtype == DType::f32) return launch_teams<ThreadTeam>(make(float{}), v.size(), stream);
  launch_teams<ThreadTeam>(make(double{}), v.size(), stream);
}

}  // namespace needle::gpu
