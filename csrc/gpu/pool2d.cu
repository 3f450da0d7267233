// Pooling of images of any strides. Gradients are gathered: every input pixel looks up the windows it lies in, so that
// nothing is added atomically and results do not depend on the order of threads.
#include "gpu/image.cuh"

namespace needle::gpu {
namespace {

using device::Adaptive;
using device::bin;
using Window = device::WindowOf<int>;
using Average = device::AverageOf<int>;
using Span = device::SpanOf<int>;

template <class T>
struct MaxPool {
  Image<T> in, out;
  Window w;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team&, int64_t n, bool) const {
    Spot s = out.spot(n);
    Span ys = rows_of(w, s.y, out.height, in.height), xs = columns_of(w, s.x, out.width, in.width);
    T top = -infinity<T>();
    for (int y = ys.begin; y < ys.end; y += w.dilation_h) {
      for (int x = xs.begin; x < xs.end; x += w.dilation_w) {
        T v = in.at(s, y, x);
        top = device::maximum_map::apply(top, v, v, v);
      }
    }
    out.at(s) = top;
  }
};

// The first maximum of a window gets its gradient.
template <class T>
struct MaxPoolGrad {
  Image<T> in, dy, dx;
  Window w;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team&, int64_t n, bool) const {
    Spot s = dx.spot(n);
    T sum = 0;
    for (int i = 0; i < w.kernel_h; i++) {
      int top = s.y + w.pad_top - i * w.dilation_h, y = top / w.stride_h;
      if (top < 0 || y * w.stride_h != top || y >= dy.height) continue;
      for (int j = 0; j < w.kernel_w; j++) {
        int left = s.x + w.pad_left - j * w.dilation_w, x = left / w.stride_w;
        if (left < 0 || x * w.stride_w != left || x >= dy.width) continue;
        if (is_best(s, y, x)) sum += dy.at(s, y, x);
      }
    }
    dx.at(s) = sum;
  }
  __device__ __forceinline__ bool is_best(const Spot& s, int out_y, int out_x) const {
    Span ys = rows_of(w, out_y, dy.height, in.height), xs = columns_of(w, out_x, dy.width, in.width);
    T top = in.at(s, ys.begin, xs.begin);
    bool best = s.y == ys.begin && s.x == xs.begin;
    for (int y = ys.begin; y < ys.end; y += w.dilation_h) {
      for (int x = xs.begin; x < xs.end; x += w.dilation_w) {
        T v = in.at(s, y, x);
        if (v > top || v != v) top = v, best = s.y == y && s.x == x;
      }
    }
    return best;
  }
};

template <class T>
struct AvgPool {
  Image<T> in, out;
  Average w;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team&, int64_t n, bool) const {
    Spot s = out.spot(n);
    Span ys = rows_of(w, s.y, out.height, in.height), xs = columns_of(w, s.x, out.width, in.width);
    T sum = 0;
    for (int y = ys.begin; y < ys.end; y++) {
      for (int x = xs.begin; x < xs.end; x++) sum += in.at(s, y, x);
    }
    out.at(s) = sum / divisor_of(w, s.y, s.x, ys, xs, in.height, in.width);
  }
};

// The outputs whose windows a position is in are gathered; `w` says which windows (math/image.h).
template <class T, class Windows>
struct AverageGrad {
  Image<T> dy, dx;
  Windows w;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team&, int64_t n, bool) const {
    Spot s = dx.spot(n);
    Span rows = reached_rows(s.y), columns = reached_columns(s.x);
    T sum = 0;
    for (int y = rows.begin; y < rows.end; y++) {
      Span ys = rows_of(w, y, dy.height, dx.height);
      for (int x = columns.begin; x < columns.end; x++) {
        Span xs = columns_of(w, x, dy.width, dx.width);
        sum += dy.at(s, y, x) / divisor_of(w, y, x, ys, xs, dx.height, dx.width);
      }
    }
    dx.at(s) = sum;
  }
  __device__ __forceinline__ Span reached_rows(int y) const {
    if constexpr (std::is_same_v<Windows, Adaptive>)
      return bin(y, dx.height, dy.height);
    else
      return windows(y + w.pad_top, w.kernel_h, w.stride_h, dy.height);
  }
  __device__ __forceinline__ Span reached_columns(int x) const {
    if constexpr (std::is_same_v<Windows, Adaptive>)
      return bin(x, dx.width, dy.width);
    else
      return windows(x + w.pad_left, w.kernel_w, w.stride_w, dy.width);
  }
  __device__ static __forceinline__ Span windows(int at, int kernel, int stride, int outputs) {
    int end = at / stride + 1;
    return {at < kernel ? 0 : (at - kernel) / stride + 1, end < outputs ? end : outputs};
  }
};
template <class T>
using AvgPoolGrad = AverageGrad<T, Average>;
template <class T>
using AdaptivePoolGrad = AverageGrad<T, Adaptive>;

template <class T>
struct AdaptivePool {
  Image<T> in, out;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t n, bool exists) const {
    T sum = 0;
    int area = 1;
    Spot s = {};
    if (exists) {
      s = out.spot(n);
      Span ys = bin(s.y, out.height, in.height), xs = bin(s.x, out.width, in.width);
      int width = xs.end - xs.begin;
      area = (ys.end - ys.begin) * width;
      for (int i = team.first; i < area; i += Team::step) {
        int y = i / width;
        sum += in.at(s, ys.begin + y, xs.begin + i - y * width);
      }
    }
    sum = team.sum(sum);
    if (exists && team.first == 0) out.at(s) = sum / area;
  }
};

}  // namespace

void max_pool2d(const max_pool2d_args& c) {
  for_pixels<max_pool2d_args::In::x_dtypes, MaxPool>("max_pool2d", c, c.out.y, c.in.x, c.out.y, Window(c.attr));
}
void max_pool2d_grad(const max_pool2d_grad_args& c) {
  for_pixels<max_pool2d_grad_args::In::x_dtypes, MaxPoolGrad>("max_pool2d_grad", c, c.out.dx, c.in.x, c.in.dy, c.out.dx,
                                                              Window(c.attr));
}
void avg_pool2d(const avg_pool2d_args& c) {
  for_pixels<avg_pool2d_args::In::x_dtypes, AvgPool>("avg_pool2d", c, c.out.y, c.in.x, c.out.y, Average(c.attr));
}
void avg_pool2d_grad(const avg_pool2d_grad_args& c) {
  for_pixels<avg_pool2d_grad_args::In::dy_dtypes, AvgPoolGrad>("avg_pool2d_grad", c, c.out.dx, c.in.dy, c.out.dx,
                                                               Average(c.attr));
}

// Large bins, as in a global average, are summed by a wave along the pixels, or by a team for each of a wave's
// channels.
void adaptive_avg_pool2d(const adaptive_avg_pool2d_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  if (y.size() == 0) return;
  int64_t area = x.shape[2] * x.shape[3] / (y.shape[2] * y.shape[3]);
  if (y.dtype != DType::f32 || area < 16)
    return for_pixels<adaptive_avg_pool2d_args::In::x_dtypes, AdaptivePool>("adaptive_avg_pool2d", c, y, x, y);
  AdaptivePool<float> op = {x, y};
  if (op.in.channels_last && op.out.channels_last) return launch_teams<ColumnTeam>(op, y.size(), stream_of(c));
  launch_teams<WaveTeam>(op, y.size(), stream_of(c));
}
void adaptive_avg_pool2d_grad(const adaptive_avg_pool2d_grad_args& c) {
  for_pixels<adaptive_avg_pool2d_grad_args::In::dy_dtypes, AdaptivePoolGrad>("adaptive_avg_pool2d_grad", c, c.out.dx,
                                                                             c.in.dy, c.out.dx, Adaptive{});
}

}  // namespace needle::gpu
