// Places of maxima of windows of images of any strides.
#include "gpu/image.cuh"

namespace needle::gpu {
namespace {

// The flat number, in its image, of a window's first maximum or last NaN. `w` says which windows (math/image.h).
template <class T, class Windows>
struct Places {
  Image<T> in;
  Windows w;
  int dilation_h, dilation_w;
  __device__ __forceinline__ int64_t operator()(const Image<int64_t>& out, const Spot& s) const {
    const auto ys = rows_of(w, s.y, out.height, in.height), xs = columns_of(w, s.x, out.width, in.width);
    T top = in.get(s, ys.begin, xs.begin);
    int best_y = ys.begin, best_x = xs.begin;
    for (int y = ys.begin; y < ys.end; y += dilation_h) {
#pragma unroll 4
      for (int x = xs.begin; x < xs.end; x += dilation_w) {
        const T v = in.get(s, y, x);
        if (v > top || v != v) top = v, best_y = y, best_x = x;
      }
    }
    return static_cast<int64_t>(best_y) * in.width + best_x;
  }
};

template <class Args, class Windows>
void find_places(const char* name, const Args& c, const Windows& w, int dilation_h, int dilation_w) {
  const View &x = c.in.x, &y = c.out.y;
  if (y.size() > INT32_MAX) fail(name, "an array has at most 2^31 elements", std::to_string(y.size()));
  with_type<Args::In::x_dtypes>(x.dtype, [&](auto t) {
    using Op = Places<decltype(t), Windows>;
    launch_teams<ThreadTeam>(EachPixel<Op, int64_t>{{x, w, dilation_h, dilation_w}, y}, y.size(), stream_of(c));
  });
}

}  // namespace

void max_pool2d_places(const max_pool2d_places_args& c) {
  const device::WindowOf<int> w(c.attr);
  find_places("max_pool2d_places", c, w, w.dilation_h, w.dilation_w);
}
void adaptive_max_pool2d_places(const adaptive_max_pool2d_places_args& c) {
  find_places("adaptive_max_pool2d_places", c, device::Adaptive{}, 1, 1);
}

}  // namespace needle::gpu
