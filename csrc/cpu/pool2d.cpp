// Pooling of plain and blocked images, without a halo: windows are clipped at the edges. Gradients of plain images.
#include "cpu/image.h"

namespace needle::NEEDLE_ISA {
namespace {

// Attributes that all pools with a kernel have.
struct Window {
  int64_t kernel_h, kernel_w, stride_h, stride_w, pad_top, pad_left, dilation_h = 1, dilation_w = 1;

  template <class Attr>
  explicit Window(const Attr& a)
      : kernel_h(a.kernel_h),
        kernel_w(a.kernel_w),
        stride_h(a.stride_h),
        stride_w(a.stride_w),
        pad_top(a.pad_top),
        pad_left(a.pad_left) {}
};

// Input positions [begin, end) in steps of `step`: the part of a window that lies inside the image.
struct Span {
  int64_t begin, end, step;
};

NEEDLE_INLINE Span clip(int64_t out, int64_t stride, int64_t pad, int64_t kernel, int64_t dilation, int64_t size) {
  int64_t begin = out * stride - pad, end = begin + (kernel - 1) * dilation + 1;
  if (begin < 0) begin += ceil_div(-begin, dilation) * dilation;
  return {begin, smaller(end, size), dilation};
}

// Positions that one output of an adaptive pool averages.
NEEDLE_INLINE Span bin(int64_t out, int64_t outputs, int64_t size) {
  return {out * size / outputs, ceil_div((out + 1) * size, outputs), 1};
}

// f(pixel, input image, output image, y) for every row of the output.
template <class Args, class F>
NEEDLE_INLINE void for_output_rows(const Args& c, int64_t work_per_pixel, const F& f) {
  const View &in = c.in.x, &out = c.out.y;
  int64_t h = out.shape[2], w = out.shape[3], lanes = has_vector_blocks(out) ? kBlock : 1;
  if (w == 0) return;
  with_pixel(out, [&](auto pixel) {
    using T = typename decltype(pixel)::T;
    parallel_ranges(c.exec, images_of(out) * h, w * work_per_pixel * lanes, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) f(pixel, image_of<T>(in, i / h), image_of<T>(out, i / h), i % h);
    });
  });
}

// f(T{}, image) for every image of a plain gradient.
template <class Args, class F>
NEEDLE_INLINE void for_images(const Args& c, int64_t work, const F& f) {
  const View& dx = c.out.dx;
  auto run = [&](auto t) {
    parallel_ranges(c.exec, dx.shape[0] * dx.shape[1], work, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) f(t, i);
    });
  };
  dx.dtype == DType::f32 ? run(float{}) : run(double{});
}

// Sums of a window, by rows: adding a whole image pixel by pixel would lose digits.
template <class P>
NEEDLE_INLINE void sum_window(const Image<typename P::T>& in, Span sy, Span sx, typename P::L* total) {
  using L = typename P::L;
  for (int k = 0; k < P::K; k++) total[k] = L(0);
  for (int64_t y = sy.begin; y < sy.end; y++) {
    L sum[P::K];
    for (int k = 0; k < P::K; k++) sum[k] = L(0);
    int64_t x = sx.begin;
    if constexpr (P::width == 1 && sizeof(L) == 4) {
      if (in.column == 1 && sx.end - x >= V::N) {
        V v = 0.f;
        for (; x + V::N <= sx.end; x += V::N) v = v + V::load(in.at(y, x));
        sum[0] = reduce_add(v);
      }
    }
    for (; x < sx.end; x++)
      for (int k = 0; k < P::K; k++) sum[k] = sum[k] + P::load(in.at(y, x) + k * P::width);
    for (int k = 0; k < P::K; k++) total[k] = total[k] + sum[k];
  }
}

template <class P>
NEEDLE_INLINE void store_quotient(typename P::T* to, const typename P::L* total, int64_t divisor) {
  typename P::L d(static_cast<typename P::T>(divisor));
  for (int k = 0; k < P::K; k++) P::store(to + k * P::width, total[k] / d);
}

}  // namespace

void max_pool2d(const max_pool2d_args& c) {
  Window w(c.attr);
  w.dilation_h = c.attr.dilation_h, w.dilation_w = c.attr.dilation_w;
  for_output_rows(c, w.kernel_h * w.kernel_w, [&](auto pixel, const auto& in, const auto& out, int64_t y) {
    using P = decltype(pixel);
    using L = typename P::L;
    Span sy = clip(y, w.stride_h, w.pad_top, w.kernel_h, w.dilation_h, in.h);
    for (int64_t x = 0; x < out.w; x++) {
      Span sx = clip(x, w.stride_w, w.pad_left, w.kernel_w, w.dilation_w, in.w);
      L top[P::K];
      for (int k = 0; k < P::K; k++) top[k] = L(static_cast<typename P::T>(-HUGE_VAL));
      for (int64_t i = sy.begin; i < sy.end; i += sy.step)
        for (int64_t j = sx.begin; j < sx.end; j += sx.step)
          for (int k = 0; k < P::K; k++) {
            L v = P::load(in.at(i, j) + k * P::width);
            top[k] = maximum_map::apply(top[k], v, v, v);
          }
      for (int k = 0; k < P::K; k++) P::store(out.at(y, x) + k * P::width, top[k]);
    }
  });
}

// The first maximum of a window gets its gradient, found again rather than stored.
void max_pool2d_grad(const max_pool2d_grad_args& c) {
  Window w(c.attr);
  w.dilation_h = c.attr.dilation_h, w.dilation_w = c.attr.dilation_w;
  const View& dy = c.in.dy;
  for_images(c, dy.shape[2] * dy.shape[3] * w.kernel_h * w.kernel_w, [&](auto t, int64_t index) {
    using T = decltype(t);
    auto in = image_of<T>(c.in.x, index), out = image_of<T>(dy, index), dx = image_of<T>(c.out.dx, index);
    clear(dx);
    for (int64_t y = 0; y < out.h; y++) {
      Span sy = clip(y, w.stride_h, w.pad_top, w.kernel_h, w.dilation_h, in.h);
      for (int64_t x = 0; x < out.w; x++) {
        Span sx = clip(x, w.stride_w, w.pad_left, w.kernel_w, w.dilation_w, in.w);
        if (sy.begin >= sy.end || sx.begin >= sx.end) continue;
        T top = *in.at(sy.begin, sx.begin);
        T* best = dx.at(sy.begin, sx.begin);
        for (int64_t i = sy.begin; i < sy.end; i += sy.step)
          for (int64_t j = sx.begin; j < sx.end; j += sx.step) {
            T v = *in.at(i, j);
            if (v > top || v != v) top = v, best = dx.at(i, j);
          }
        *best += *out.at(y, x);
      }
    }
  });
}

namespace {

// torch's rule: a window counts at most up to the end of the padding, or only what is inside the image.
template <class Attr>
NEEDLE_INLINE int64_t avg_divisor(const Attr& a, const Window& w, int64_t y, int64_t x, Span sy, Span sx, int64_t h,
                                  int64_t wd) {
  if (a.divisor != 0) return a.divisor;
  if (!a.count_include_pad) return (sy.end - sy.begin) * (sx.end - sx.begin);
  int64_t top = y * w.stride_h - w.pad_top, left = x * w.stride_w - w.pad_left;
  return (smaller(top + w.kernel_h, h + w.pad_top) - top) * (smaller(left + w.kernel_w, wd + w.pad_left) - left);
}

}  // namespace

void avg_pool2d(const avg_pool2d_args& c) {
  Window w(c.attr);
  for_output_rows(c, w.kernel_h * w.kernel_w, [&](auto pixel, const auto& in, const auto& out, int64_t y) {
    using P = decltype(pixel);
    Span sy = clip(y, w.stride_h, w.pad_top, w.kernel_h, 1, in.h);
    for (int64_t x = 0; x < out.w; x++) {
      Span sx = clip(x, w.stride_w, w.pad_left, w.kernel_w, 1, in.w);
      typename P::L total[P::K];
      sum_window<P>(in, sy, sx, total);
      store_quotient<P>(out.at(y, x), total, avg_divisor(c.attr, w, y, x, sy, sx, in.h, in.w));
    }
  });
}

void avg_pool2d_grad(const avg_pool2d_grad_args& c) {
  Window w(c.attr);
  const View& dy = c.in.dy;
  for_images(c, dy.shape[2] * dy.shape[3] * w.kernel_h * w.kernel_w, [&](auto t, int64_t index) {
    using T = decltype(t);
    auto out = image_of<T>(dy, index), dx = image_of<T>(c.out.dx, index);
    clear(dx);
    for (int64_t y = 0; y < out.h; y++) {
      Span sy = clip(y, w.stride_h, w.pad_top, w.kernel_h, 1, dx.h);
      for (int64_t x = 0; x < out.w; x++) {
        Span sx = clip(x, w.stride_w, w.pad_left, w.kernel_w, 1, dx.w);
        T part = *out.at(y, x) / static_cast<T>(avg_divisor(c.attr, w, y, x, sy, sx, dx.h, dx.w));
        for (int64_t i = sy.begin; i < sy.end; i++)
          for (int64_t j = sx.begin; j < sx.end; j++) *dx.at(i, j) += part;
      }
    }
  });
}

void adaptive_avg_pool2d(const adaptive_avg_pool2d_args& c) {
  const View &in = c.in.x, &out = c.out.y;
  int64_t pixels = larger(1, out.shape[2] * out.shape[3]);
  for_output_rows(c, in.shape[2] * in.shape[3] / pixels + 1,
                  [&](auto pixel, const auto& x, const auto& y, int64_t row) {
                    using P = decltype(pixel);
                    Span sy = bin(row, y.h, x.h);
                    for (int64_t column = 0; column < y.w; column++) {
                      Span sx = bin(column, y.w, x.w);
                      typename P::L total[P::K];
                      sum_window<P>(x, sy, sx, total);
                      store_quotient<P>(y.at(row, column), total, (sy.end - sy.begin) * (sx.end - sx.begin));
                    }
                  });
}

void adaptive_avg_pool2d_grad(const adaptive_avg_pool2d_grad_args& c) {
  const View &dy = c.in.dy, &dx_view = c.out.dx;
  for_images(c, dx_view.shape[2] * dx_view.shape[3], [&](auto t, int64_t index) {
    using T = decltype(t);
    auto out = image_of<T>(dy, index), dx = image_of<T>(dx_view, index);
    clear(dx);
    for (int64_t y = 0; y < out.h; y++) {
      Span sy = bin(y, out.h, dx.h);
      for (int64_t x = 0; x < out.w; x++) {
        Span sx = bin(x, out.w, dx.w);
        T part = *out.at(y, x) / static_cast<T>((sy.end - sy.begin) * (sx.end - sx.begin));
        for (int64_t i = sy.begin; i < sy.end; i++)
          for (int64_t j = sx.begin; j < sx.end; j++) *dx.at(i, j) += part;
      }
    }
  });
}

}  // namespace needle::NEEDLE_ISA
