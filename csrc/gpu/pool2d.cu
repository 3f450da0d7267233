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

// f of every element of a window. The taps of a window of K x K are loaded at once; K is 0 where it may be larger.
template <int K, class T, class F>
__device__ __forceinline__ void for_taps(const Image<T>& in, const Spot& s, const Span& ys, const Span& xs,
                                         int dilation_h, int dilation_w, const F& f) {
  if constexpr (K == 0) {
    for (int y = ys.begin; y < ys.end; y += dilation_h)
      for (int x = xs.begin; x < xs.end; x += dilation_w) f(in.get(s, y, x));
  } else {
    if (ys.begin >= ys.end || xs.begin >= xs.end) return;
    T taps[K][K];
#pragma unroll
    for (int i = 0; i < K; i++) {
#pragma unroll
      for (int j = 0; j < K; j++) {  // those outside of the window load its first
        int y = ys.begin + i * dilation_h, x = xs.begin + j * dilation_w;
        taps[i][j] = in.get(s, y < ys.end ? y : ys.begin, x < xs.end ? x : xs.begin);
      }
    }
#pragma unroll
    for (int i = 0; i < K; i++) {
#pragma unroll
      for (int j = 0; j < K; j++)
        if (ys.begin + i * dilation_h < ys.end && xs.begin + j * dilation_w < xs.end) f(taps[i][j]);
    }
  }
}

// Pools whose windows are at most K high and wide, or of any size.
template <int K>
struct Windowed {
  template <class T>
  struct Max {
    Image<T> in;
    Window w;
    __device__ __forceinline__ T operator()(const Image<T>& out, const Spot& s) const {
      using S = Scalar<T>;
      Span ys = rows_of(w, s.y, out.height, in.height), xs = columns_of(w, s.x, out.width, in.width);
      T top = -infinity<S>();
      for_taps<K>(in, s, ys, xs, w.dilation_h, w.dilation_w, [&](const T& v) {
        top = lanewise([](S a, S b) { return device::maximum_map::apply(a, b, b, b); }, top, v);
      });
      return top;
    }
  };

  // `w` says which windows (math/image.h).
  template <class T, class Windows>
  struct Mean {
    Image<T> in;
    Windows w;
    __device__ __forceinline__ T operator()(const Image<T>& out, const Spot& s) const {
      Span ys = rows_of(w, s.y, out.height, in.height), xs = columns_of(w, s.x, out.width, in.width);
      T sum = 0;
      for_taps<K>(in, s, ys, xs, 1, 1, [&](const T& v) { sum += v; });
      return sum / static_cast<Scalar<T>>(divisor_of(w, s.y, s.x, ys, xs, in.height, in.width));
    }
  };
  template <class T>
  using Avg = Mean<T, Average>;
};
template <class T>
using AdaptivePool = Windowed<0>::Mean<T, Adaptive>;

// f(Windowed<K>()) for windows of a height and a width.
template <class F>
void with_window(int height, int width, const F& f) {
  if (height <= 2 && width <= 2) return f(Windowed<2>());
  if (height <= 3 && width <= 3) return f(Windowed<3>());
  f(Windowed<0>());
}

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
        add_best(s, y, x, sum);
      }
    }
    return sum;
  }
  // Adds the gradient of an output to those lanes of a pixel that are its maximum.
  __device__ __forceinline__ void add_best(const Spot& s, int out_y, int out_x, T& sum) const {
    using S = Scalar<T>;
    Span ys = rows_of(w, out_y, dy.height, in.height), xs = columns_of(w, out_x, dy.width, in.width);
    T top = in.get(s, ys.begin, xs.begin);
    bool best[kLanes<T>];
#pragma unroll
    for (int k = 0; k < kLanes<T>; k++) best[k] = s.y == ys.begin && s.x == xs.begin;
    for (int y = ys.begin; y < ys.end; y += w.dilation_h) {
      for (int x = xs.begin; x < xs.end; x += w.dilation_w) {
        const T values = in.get(s, y, x);
#pragma unroll
        for (int k = 0; k < kLanes<T>; k++) {
          const S v = lane(values, k);
          if (v > lane(top, k) || v != v) lane(top, k) = v, best[k] = s.y == y && s.x == x;
        }
      }
    }
    const T slope = dy.get(s, out_y, out_x);
#pragma unroll
    for (int k = 0; k < kLanes<T>; k++)
      if (best[k]) lane(sum, k) += lane(slope, k);
  }
};

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
        sum += dy.get(s, y, x) / static_cast<Scalar<T>>(divisor_of(w, y, x, ys, xs, dx.height, dx.width));
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
template <class T>
struct TeamPool {
  Image<T> in, out;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t n, bool exists) const {
    T sum = 0;
    int area = 1;
    Spot s = {};
    if (exists) {
      s = out.spot(n);
      const Span ys = out.height == 1 ? Span{0, in.height} : bin(s.y, out.height, in.height);
      const Span xs = out.width == 1 ? Span{0, in.width} : bin(s.x, out.width, in.width);
      const int width = xs.end - xs.begin, down = Team::step / width, right = Team::step - down * width;
      area = (ys.end - ys.begin) * width;
      int y = team.first / width, x = team.first - y * width;
#pragma unroll 4
      for (int i = team.first; i < area; i += Team::step) {
        sum += in.get(s, ys.begin + y, xs.begin + x);
        y += down, x += right;
        if (x >= width) y++, x -= width;
      }
    }
    sum = team.sum(sum);
    if (exists && team.first == 0) write(&out.at(s), sum / static_cast<Scalar<T>>(area));
  }
};

}  // namespace

void max_pool2d(const max_pool2d_args& c) {
  const Window w(c.attr);
  with_window(w.kernel_h, w.kernel_w, [&](auto k) {
    for_pixels<max_pool2d_args::In::x_dtypes, decltype(k)::template Max>("max_pool2d", c, c.out.y, c.in.x, w);
  });
}
void max_pool2d_grad(const max_pool2d_grad_args& c) {
  for_pixels<max_pool2d_grad_args::In::x_dtypes, MaxPoolGrad>("max_pool2d_grad", c, c.out.dx, c.in.x, c.in.dy,
                                                              Window(c.attr));
}
void avg_pool2d(const avg_pool2d_args& c) {
  const Average w(c.attr);
  with_window(w.kernel_h, w.kernel_w, [&](auto k) {
    for_pixels<avg_pool2d_args::In::x_dtypes, decltype(k)::template Avg>("avg_pool2d", c, c.out.y, c.in.x, w);
  });
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
  if (quads(x) && quads(y)) return launch_teams<ColumnTeam>(TeamPool<Quad>{x, y}, y.size() / 4, stream_of(c));
  TeamPool<float> op = {x, y};
  if (op.in.channels_last && op.out.channels_last) return launch_teams<ColumnTeam>(op, y.size(), stream_of(c));
  launch_teams<WaveTeam>(op, y.size(), stream_of(c));
}
void adaptive_avg_pool2d_grad(const adaptive_avg_pool2d_grad_args& c) {
  for_pixels<adaptive_avg_pool2d_grad_args::In::dy_dtypes, AdaptivePoolGrad>("adaptive_avg_pool2d_grad", c, c.out.dx,
                                                                             c.in.dy, Adaptive{});
}

}  // namespace needle::gpu
