// Pooling of plain and blocked images, without a halo: windows are clipped at the edges. Gradients of plain images.
#include "cpu/image.h"

namespace needle::NEEDLE_ISA {
namespace {

using Window = WindowOf<int64_t>;
using Span = SpanOf<int64_t>;

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

// Pools that average: `w` says which windows (math/image.h).
template <class Args, class Windows>
void average(const Args& c, const Windows& w, int64_t work_per_pixel) {
  for_output_rows(c, work_per_pixel, [&](auto pixel, const auto& in, const auto& out, int64_t y) {
    using P = decltype(pixel);
    const Span sy = rows_of(w, y, out.h, in.h);
    for (int64_t x = 0; x < out.w; x++) {
      const Span sx = columns_of(w, x, out.w, in.w);
      typename P::L total[P::K];
      sum_window<P>(in, sy, sx, total);
      store_quotient<P>(out.at(y, x), total, divisor_of(w, y, x, sy, sx, in.h, in.w));
    }
  });
}

template <class Args, class Windows>
void average_grad(const Args& c, const Windows& w, int64_t work) {
  for_gradients<Args::In::dy_dtypes>(c, work, [&](const auto& dy, const auto& dx, int64_t) {
    for (int64_t y = 0; y < dy.h; y++) {
      const Span sy = rows_of(w, y, dy.h, dx.h);
      for (int64_t x = 0; x < dy.w; x++) {
        const Span sx = columns_of(w, x, dy.w, dx.w);
        auto part = *dy.at(y, x);
        part /= static_cast<decltype(part)>(divisor_of(w, y, x, sy, sx, dx.h, dx.w));
        for (int64_t i = sy.begin; i < sy.end; i++)
          for (int64_t j = sx.begin; j < sx.end; j++) *dx.at(i, j) += part;
      }
    }
  });
}

int64_t pixels_of(const View& v) { return v.shape[2] * v.shape[3]; }

}  // namespace

void max_pool2d(const max_pool2d_args& c) {
  const Window w(c.attr);
  for_output_rows(c, w.kernel_h * w.kernel_w, [&](auto pixel, const auto& in, const auto& out, int64_t y) {
    using P = decltype(pixel);
    using L = typename P::L;
    const Span sy = rows_of(w, y, out.h, in.h);
    for (int64_t x = 0; x < out.w; x++) {
      const Span sx = columns_of(w, x, out.w, in.w);
      L top[P::K];
      for (int k = 0; k < P::K; k++) top[k] = L(static_cast<typename P::T>(-HUGE_VAL));
      for (int64_t i = sy.begin; i < sy.end; i += w.dilation_h)
        for (int64_t j = sx.begin; j < sx.end; j += w.dilation_w)
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
  const Window w(c.attr);
  const int64_t work = pixels_of(c.in.dy) * w.kernel_h * w.kernel_w;
  for_gradients<max_pool2d_grad_args::In::x_dtypes>(c, work, [&](const auto& dy, const auto& dx, int64_t index) {
    using T = std::remove_reference_t<decltype(*dy.data)>;
    const auto in = image_of<T>(c.in.x, index);
    for (int64_t y = 0; y < dy.h; y++) {
      const Span sy = rows_of(w, y, dy.h, in.h);
      for (int64_t x = 0; x < dy.w; x++) {
        const Span sx = columns_of(w, x, dy.w, in.w);
        if (sy.begin >= sy.end || sx.begin >= sx.end) continue;
        T top = *in.at(sy.begin, sx.begin);
        T* best = dx.at(sy.begin, sx.begin);
        for (int64_t i = sy.begin; i < sy.end; i += w.dilation_h)
          for (int64_t j = sx.begin; j < sx.end; j += w.dilation_w) {
            T v = *in.at(i, j);
            if (v > top || v != v) top = v, best = dx.at(i, j);
          }
        *best += *dy.at(y, x);
      }
    }
  });
}

void avg_pool2d(const avg_pool2d_args& c) {
  const AverageOf<int64_t> w(c.attr);
  average(c, w, w.kernel_h * w.kernel_w);
}
void avg_pool2d_grad(const avg_pool2d_grad_args& c) {
  const AverageOf<int64_t> w(c.attr);
  average_grad(c, w, pixels_of(c.in.dy) * w.kernel_h * w.kernel_w);
}
void adaptive_avg_pool2d(const adaptive_avg_pool2d_args& c) {
  average(c, Adaptive{}, pixels_of(c.in.x) / larger(1, pixels_of(c.out.y)) + 1);
}
void adaptive_avg_pool2d_grad(const adaptive_avg_pool2d_grad_args& c) {
  average_grad(c, Adaptive{}, pixels_of(c.out.dx));
}

}  // namespace needle::NEEDLE_ISA
