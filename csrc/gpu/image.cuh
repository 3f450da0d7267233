// Images (N, C, H, W) of any strides, and a walk over their pixels in the order of memory.
#pragma once
#include "gpu/quad.cuh"
#include "gpu/team.cuh"
#include "math/image.h"

namespace needle::gpu {

struct Spot {
  int image, channel, y, x;
};

// Of Quads it has a quarter of the channels, and strides of four floats.
template <class T>
struct Image {
  T* data = nullptr;
  int64_t n, c, h, w;  // strides
  int height, width, channels;
  bool channels_last;
  Divisor by_channels, by_height, by_width;

  Image() = default;
  Image(const View& v)
      : data(reinterpret_cast<T*>(v.as<Scalar<T>>())),
        n(v.stride[0] / kLanes<T>),
        c(v.stride[1]),
        h(v.stride[2] / kLanes<T>),
        w(v.stride[3] / kLanes<T>),
        height(static_cast<int>(v.shape[2])),
        width(static_cast<int>(v.shape[3])),
        channels(static_cast<int>(v.shape[1] / kLanes<T>)),
        channels_last(v.shape[1] > 1 && v.stride[1] == 1 && (v.shape[3] == 1 || v.stride[3] != 1)),
        by_channels(v.shape[1] / kLanes<T>),
        by_height(v.shape[2]),
        by_width(v.shape[3]) {}
  __device__ __forceinline__ T& at(const Spot& s) const { return at(s, s.y, s.x); }
  __device__ __forceinline__ T& at(const Spot& s, int y, int x) const {
    return data[s.image * n + s.channel * c + y * h + x * w];
  }
  __device__ __forceinline__ T get(const Spot& s, int y, int x) const { return read(&at(s, y, x)); }
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

// A thread per pixel of `out`, which becomes op(out, spot).
template <class Op, class T>
struct EachPixel {
  Op op;
  Image<T> out;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team&, int64_t n, bool) const {
    const Spot s = out.spot(n);
    write(&out.at(s), op(out, s));
  }
};

// Whether four channels of an image are a Quad; other arguments of an op don't mind.
inline bool quads(const View& v) { return v.shape[1] > 1 && quads(v, 1); }
template <class Part>
bool quads(const Part&) {
  return true;
}

// Runs Op<T>{parts...} for every pixel of `out`, T being its dtype, one of `letters`, or Quad where all images allow
// it.
template <const char* letters, template <class> class Op, class Args, class... Parts>
void for_pixels(const char* op, const Args& c, const View& out, const Parts&... parts) {
  if (out.size() > INT32_MAX) fail(op, "an array has at most 2^31 elements", std::to_string(out.size()));
  auto run = [&](auto t) {
    using T = decltype(t);
    launch_teams<ThreadTeam>(EachPixel<Op<T>, T>{{parts...}, out}, out.size() / kLanes<T>, stream_of(c));
  };
  if (quads(out) && (quads(parts) && ...)) return run(Quad{});
  with_type<letters>(out.dtype, run);
}

}  // namespace needle::gpu
