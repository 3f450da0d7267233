// Pooling of images of any strides. Gradients are gathered: every input pixel looks up the windows it lies in, so that
// nothing is added atomically and results do not depend on the order of threads.
#include "gpu/image.cuh"

namespace needle::gpu {
namespace {

// Attributes that all pools with a kernel have.
struct Window {
  int kernel_h, kernel_w, stride_h, stride_w, pad_top, pad_left, dilation_h = 1, dilation_w = 1;
  bool count_padding = false;
  int divisor = 0;
  template <class Attr>
  explicit Window(const Attr& a)
      : kernel_h(static_cast<int>(a.kernel_h)),
        kernel_w(static_cast<int>(a.kernel_w)),
        stride_h(static_cast<int>(a.stride_h)),
        stride_w(static_cast<int>(a.stride_w)),
        pad_top(static_cast<int>(a.pad_top)),
        pad_left(static_cast<int>(a.pad_left)) {}
};

template <class Attr>
Window max_window(const Attr& a) {
  Window w(a);
  w.dilation_h = static_cast<int>(a.dilation_h), w.dilation_w = static_cast<int>(a.dilation_w);
  return w;
}

template <class Attr>
Window avg_window(const Attr& a) {
  Window w(a);
  w.count_padding = a.count_include_pad != 0, w.divisor = static_cast<int>(a.divisor);
  return w;
}

// Input positions [begin, end) in steps of the dilation: the part of a window that lies inside the image.
struct Span {
  int begin, end;
};

__device__ __forceinline__ Span clip(int out, int stride, int pad, int kernel, int dilation, int size) {
  int begin = out * stride - pad, end = begin + (kernel - 1) * dilation + 1;
  if (begin < 0) begin += (-begin + dilation - 1) / dilation * dilation;
  return {begin, end < size ? end : size};
}

// Positions that one output of an adaptive pool averages; with the sizes swapped, the outputs that a position is in.
__device__ __forceinline__ Span bin(int64_t out, int outputs, int size) {
  return {static_cast<int>(out * size / outputs), static_cast<int>(((out + 1) * size + outputs - 1) / outputs)};
}

template <class T>
struct MaxPool {
  Image<T> in, out;
  Window w;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team&, int64_t n, bool) const {
    Spot s = out.spot(n);
    Span ys = clip(s.y, w.stride_h, w.pad_top, w.kernel_h, w.dilation_h, in.height);
    Span xs = clip(s.x, w.stride_w, w.pad_left, w.kernel_w, w.dilation_w, in.width);
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
    Span ys = clip(out_y, w.stride_h, w.pad_top, w.kernel_h, w.dilation_h, in.height);
    Span xs = clip(out_x, w.stride_w, w.pad_left, w.kernel_w, w.dilation_w, in.width);
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

// torch's rule: a window counts at most up to the end of the padding, or only what is inside the image.
__device__ __forceinline__ int divisor(const Window& w, int y, int x, Span ys, Span xs, int height, int width) {
  if (w.divisor) return w.divisor;
  if (!w.count_padding) return (ys.end - ys.begin) * (xs.end - xs.begin);
  int top = y * w.stride_h - w.pad_top, left = x * w.stride_w - w.pad_left;
  int bottom = height + w.pad_top - top, right = width + w.pad_left - left;
  return (w.kernel_h < bottom ? w.kernel_h : bottom) * (w.kernel_w < right ? w.kernel_w : right);
}

template <class T>
struct AvgPool {
  Image<T> in, out;
  Window w;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team&, int64_t n, bool) const {
    Spot s = out.spot(n);
    Span ys = clip(s.y, w.stride_h, w.pad_top, w.kernel_h, 1, in.height);
    Span xs = clip(s.x, w.stride_w, w.pad_left, w.kernel_w, 1, in.width);
    T sum = 0;
    for (int y = ys.begin; y < ys.end; y++) {
      for (int x = xs.begin; x < xs.end; x++) sum += in.at(s, y, x);
    }
    out.at(s) = sum / divisor(w, s.y, s.x, ys, xs, in.height, in.width);
  }
};

template <class T>
struct AvgPoolGrad {
  Image<T> dy, dx;
  Window w;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team&, int64_t n, bool) const {
    Spot s = dx.spot(n);
    Span rows = windows(s.y + w.pad_top, w.kernel_h, w.stride_h, dy.height);
    Span columns = windows(s.x + w.pad_left, w.kernel_w, w.stride_w, dy.width);
    T sum = 0;
    for (int y = rows.begin; y < rows.end; y++) {
      Span ys = clip(y, w.stride_h, w.pad_top, w.kernel_h, 1, dx.height);
      for (int x = columns.begin; x < columns.end; x++) {
        Span xs = clip(x, w.stride_w, w.pad_left, w.kernel_w, 1, dx.width);
        sum += dy.at(s, y, x) / divisor(w, y, x, ys, xs, dx.height, dx.width);
      }
    }
    dx.at(s) = sum;
  }
  __device__ static __forceinline__ Span windows(int at, int kernel, int stride, int outputs) {
    int end = at / stride + 1;
    return {at < kernel ? 0 : (at - kernel) / stride + 1, end < outputs ? end : outputs};
  }
};

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

template <class T>
struct AdaptivePoolGrad {
  Image<T> dy, dx;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team&, int64_t n, bool) const {
    Spot s = dx.spot(n);
    Span rows = bin(s.y, dx.height, dy.height), columns = bin(s.x, dx.width, dy.width);
    T sum = 0;
    for (int y = rows.begin; y < rows.end; y++) {
      Span ys = bin(y, dy.height, dx.height);
      for (int x = columns.begin; x < columns.end; x++) {
        Span xs = bin(x, dy.width, dx.width);
        sum += dy.at(s, y, x) / ((ys.end - ys.begin) * (xs.end - xs.begin));
      }
    }
    dx.at(s) = sum;
  }
};

}  // namespace

void max_pool2d(const max_pool2d_args& c) {
  for_pixels("max_pool2d", c, c.out.y, [&](auto t) {
    using T = decltype(t);
    return MaxPool<T>{Image<T>(c.in.x), Image<T>(c.out.y), max_window(c.attr)};
  });
}

void max_pool2d_grad(const max_pool2d_grad_args& c) {
  for_pixels("max_pool2d_grad", c, c.out.dx, [&](auto t) {
    using T = decltype(t);
    return MaxPoolGrad<T>{Image<T>(c.in.x), Image<T>(c.in.dy), Image<T>(c.out.dx), max_window(c.attr)};
  });
}

void avg_pool2d(const avg_pool2d_args& c) {
  for_pixels("avg_pool2d", c, c.out.y, [&](auto t) {
    using T = decltype(t);
    return AvgPool<T>{Image<T>(c.in.x), Image<T>(c.out.y), avg_window(c.attr)};
  });
}

void avg_pool2d_grad(const avg_pool2d_grad_args& c) {
  for_pixels("avg_pool2d_grad", c, c.out.dx, [&](auto t) {
    using T = decltype(t);
    return AvgPoolGrad<T>{Image<T>(c.in.dy), Image<T>(c.out.dx), avg_window(c.attr)};
  });
}

// Large bins, as in a global average, are summed by a wave along the pixels, or by a team for each of a wave's
// channels.
void adaptive_avg_pool2d(const adaptive_avg_pool2d_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  if (y.size() == 0) return;
  auto make = [&](auto t) {
    using T = decltype(t);
    return AdaptivePool<T>{Image<T>(x), Image<T>(y)};
  };
  gpuStream_t stream = static_cast<gpuStream_t>(c.exec->stream);
  int64_t area = x.shape[2] * x.shape[3] / (y.shape[2] * y.shape[3]);
  if (y.dtype != DType::f32 || area < 16) return for_pixels("adaptive_avg_pool2d", c, y, make);
  auto op = make(float{});
  if (op.in.channels_last && op.out.channels_last) return launch_teams<ColumnTeam>(op, y.size(), stream);
  launch_teams<WaveTeam>(op, y.size(), stream);
}

void adaptive_avg_pool2d_grad(const adaptive_avg_pool2d_grad_args& c) {
  for_pixels("adaptive_avg_pool2d_grad", c, c.out.dx, [&](auto t) {
    using T = decltype(t);
    return AdaptivePoolGrad<T>{Image<T>(c.in.dy), Image<T>(c.out.dx)};
  });
}

}  // namespace needle::gpu
