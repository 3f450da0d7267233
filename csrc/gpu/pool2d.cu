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
  Image<T> in;
  Window w;
  __device__ __forceinline__ T operator()(const Image<T>& out, const Spot& s) const {
    Span ys = rows_of(w, s.y, out.height, in.height), xs = columns_of(w, s.x, out.width, in.width);
    T top = -infinity<T>();
    for (int y = ys.begin; y < ys.end; y += w.dilation_h) {
      for (int x = xs.begin; x < xs.end; x += w.dilation_w) {
        T v = in.at(s, y, x);
        top = device::maximum_map::apply(top, v, v, v);
      }
    }
    return top;
  }
};

// The first maximum of a window gets its gradient.
template <class T>
struct MaxPoolGrad {
  Image<T> in, dy;
  Window w;
  __device__ __forceinline__ T operator()(const Image<T>&, const Spot& s) const {
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
    return sum;
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

// `w` says which windows (math/image.h).
template <class T, class Windows>
struct AveragePool {
  Image<T> in;
  Windows w;
  __device__ __forceinline__ T operator()(const Image<T>& out, const Spot& s) const {
    Span ys = rows_of(w, s.y, out.height, in.height), xs = columns_of(w, s.x, out.width, in.width);
    T sum = 0;
    for (int y = ys.begin; y < ys.end; y++) {
      for (int x = xs.begin; x < xs.end; x++) sum += in.at(s, y, x);
    }
    return sum / divisor_of(w, s.y, s.x, ys, xs, in.height, in.width);
  }
};
template <class T>
using AvgPool = AveragePool<T, Average>;
template <class T>
using AdaptivePool = AveragePool<T, Adaptive>;

// The outputs whose windows an input position of an axis is in, of rows or of columns; a gradient gathers them.
__device__ __forceinline__ Span reached(const Adaptive&, bool, int at, int size, int outputs) {
  return bin(at, size, outputs);
}
__device__ __forceinline__ Span reached(const Average& w, bool rows, int at, int, int outputs) {
  const int stride = rows ? w.stride_h : w.stride_w, kernel = rows ? w.kernel_h : w.kernel_w;
  const int last = at + (rows ? w.pad_top : w.pad_left), end = last / stride + 1;
  return {last < kernel ? 0 : (last - kernel) / stride + 1, end < outputs ? end : outputs};
}

template <class T, class Windows>
struct AverageGrad {
  Image<T> dy;
  Windows w;
  __device__ __forceinline__ T operator()(const Image<T>& dx, const Spot& s) const {
    Span rows = reached(w, true, s.y, dx.height, dy.height), columns = reached(w, false, s.x, dx.width, dy.width);
    T sum = 0;
    for (int y = rows.begin; y < rows.end; y++) {
      Span ys = rows_of(w, y, dy.height, dx.height);
      for (int x = columns.begin; x < columns.end; x++) {
        Span xs = columns_of(w, x, dy.width, dx.width);
        sum += dy.at(s, y, x) / divisor_of(w, y, x, ys, xs, dx.height, dx.width);
      }
    }
    return sum;
  }
};
template <class T>
using AvgPoolGrad = AverageGrad<T, Average>;
template <class T>
using AdaptivePoolGrad = AverageGrad<T, Adaptive>;

// An adaptive pool by teams.
struct TeamPool {
  Image<float> in, out;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t n, bool exists) const {
    float sum = 0;
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
  for_pixels<max_pool2d_args::In::x_dtypes, MaxPool>("max_pool2d", c, c.out.y, c.in.x, Window(c.attr));
}
void max_pool2d_grad(const max_pool2d_grad_args& c) {
  for_pixels<max_pool2d_grad_args::In::x_dtypes, MaxPoolGrad>("max_pool2d_grad", c, c.out.dx, c.in.x, c.in.dy,
                                                              Window(c.attr));
}
void avg_pool2d(const avg_pool2d_args& c) {
  for_pixels<avg_pool2d_args::In::x_dtypes, AvgPool>("avg_pool2d", c, c.out.y, c.in.x, Average(c.attr));
}
void avg_pool2d_grad(const avg_pool2d_grad_args& c) {
  for_pixels<avg_pool2d_grad_args::In::dy_dtypes, AvgPoolGrad>("avg_pool2d_grad", c, c.out.dx, c.in.dy,
                                                               Average(c.attr));
}

// Large bins, as in a global average, are summed by a wave along the pixels, or by a team for each of a wave's
// channels.
void adaptive_avg_pool2d(const adaptive_avg_pool2d_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  if (y.size() == 0) return;
  int64_t area = x.shape[2] * x.shape[3] / (y.shape[2] * y.shape[3]);
  if (y.dtype != DType::f32 || area < 16)
    return for_pixels<adaptive_avg_pool2d_args::In::x_dtypes, AdaptivePool>("adaptive_avg_pool2d", c, y, x, Adaptive{});
  TeamPool op = {x, y};
  if (op.in.channels_last && op.out.channels_last) return launch_teams<ColumnTeam>(op, y.size(), stream_of(c));
  launch_teams<WaveTeam>(op, y.size(), stream_of(c));
}
void adaptive_avg_pool2d_grad(const adaptive_avg_pool2d_grad_args& c) {
  for_pixels<adaptive_avg_pool2d_grad_args::In::dy_dtypes, AdaptivePoolGrad>("adaptive_avg_pool2d_grad", c, c.out.dx,
                                                                             c.in.dy, Adaptive{});
}

}  // namespace needle::gpu
