// Groups of channels normalised by their own statistics, a block each, of images of any strides.
#include "gpu/team.cuh"

namespace needle::gpu {
namespace {

struct Image3 {  // (N, C, S)
  float* data;
  int64_t n, c, s;
  Image3(const View& v) : data(v.as<float>()), n(v.stride[0]), c(v.stride[1]), s(v.stride[2]) {}
};

struct GroupNorm {
  Image3 x, y;
  const float *weight, *bias;  // either may be null
  float eps;
  int activation;
  float alpha;
  int groups, channels, size;  // channels and elements of a group
  Divisor fast;                // of the axis whose elements are nearer to each other
  bool channels_first;         // that axis is not the channels'

  // Calls f(channel of the group, place in x, place in y) for the elements of a team's member, nearest neighbours by
  // neighbours.
  template <class Team, class F>
  __device__ __forceinline__ void walk(const Team& team, const F& f) const {
#pragma unroll 4
    for (int i = team.first; i < size; i += Team::step) {
      const int far = fast.quotient(i), near = i - far * static_cast<int>(fast.d);
      const int channel = channels_first ? far : near;
      const int64_t pixel = channels_first ? near : far;
      f(channel, channel * x.c + pixel * x.s, channel * y.c + pixel * y.s);
    }
  }

  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    const int64_t image = row / groups, first = row % groups * channels;
    const float* from = x.data + image * x.n + first * x.c;
    float* to = y.data + image * y.n + first * y.c;
    float sum = 0, square = 0;
    walk(team, [&](int, int64_t at, int64_t) { sum += from[at]; });
    const float centre = team.sum(sum) / size;
    walk(team, [&](int, int64_t at, int64_t) { square += (from[at] - centre) * (from[at] - centre); });
    const float scale = inverse_root(team.sum(square) / size + eps);
    walk(team, [&](int channel, int64_t at, int64_t out) {
      float v = (from[at] - centre) * scale;
      if (weight) v *= weight[first + channel];
      if (bias) v += bias[first + channel];
      to[out] = device::activate(activation, alpha, v);
    });
  }
};

}  // namespace

// x (N, C, S), weight and bias (C,).
void group_norm(const group_norm_args& c) {
  const View& x = c.in.x;
  if (x.size() == 0) return;
  const int64_t groups = c.attr.groups, channels = x.shape[1] / groups, size = channels * x.shape[2];
  if (size > INT32_MAX) fail("group_norm", "a group has at most 2^31 elements", std::to_string(size));
  const bool pixels_near = x.shape[2] > 1 && (channels == 1 || x.stride[2] < x.stride[1]);
  GroupNorm op = {x,
                  c.out.y,
                  c.in.weight ? c.in.weight.as<float>() : nullptr,
                  c.in.bias ? c.in.bias.as<float>() : nullptr,
                  static_cast<float>(c.attr.eps),
                  static_cast<int>(c.attr.activation),
                  static_cast<float>(c.attr.alpha),
                  static_cast<int>(groups),
                  static_cast<int>(channels),
                  static_cast<int>(size),
                  pixels_near ? x.shape[2] : channels,
                  pixels_near};
  launch_teams<BlockTeam>(op, x.shape[0] * groups, stream_of(c));
}

}  // namespace needle::gpu
