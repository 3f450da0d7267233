// Pooling of plain and blocked images, without a halo: windows are clipped at the edges. Plain ones of floats go
// through blocks, 16 channels of an image at a time.
#include "cpu/conv.h"
#include "cpu/image.h"

namespace needle::NEEDLE_ISA {
namespace {

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
  for_gradients<Args::In::dy_dtypes>(c, work, [&](auto pixel, const auto& dy, auto& band, int64_t) {
    const auto& dx = band.image;
    using P = decltype(pixel);
    for (int64_t y = 0; y < dy.h; y++) {
      const Span sy = rows_of(w, y, dy.h, dx.h);
      const Span rows = {larger(sy.begin, band.begin), smaller(sy.end, band.end)};
      if (rows.begin >= rows.end) continue;
      band.prepare(rows.end);
      for (int64_t x = 0; x < dy.w; x++) {
        const Span sx = columns_of(w, x, dy.w, dx.w);
        const typename P::L divisor(static_cast<typename P::T>(divisor_of(w, y, x, sy, sx, dx.h, dx.w)));
        typename P::L part[P::K];
        for (int k = 0; k < P::K; k++) part[k] = P::load(dy.at(y, x) + k * P::width) / divisor;
        for (int64_t i = rows.begin; i < rows.end; i++)
          for (int64_t j = sx.begin; j < sx.end; j++) add_to<P>(dx.at(i, j), part);
      }
    }
  });
}

int64_t pixels_of(const View& v) { return v.shape[2] * v.shape[3]; }

constexpr int64_t kMostPixels = 1 << 16;  // of an image in blocks: 4 MB, which still pays

// Whether pooling between plain images is worth the way through blocks; `large` are the images before it.
bool pays_in_blocks(const View& large, const View& out) {
  const int64_t w = out.shape[3];
  return out.rank == 4 && pixels_of(large) <= kMostPixels && out.dtype == DType::f32 && out.shape[1] >= kBlock / 2 &&
         out.size() > 0 && (out.shape[2] == 1 || w == 1 || out.stride[2] == w * out.stride[3]);
}

// 16 channels of plain images.
View channels_of(const View& v, int64_t block) {
  View part = v;
  part.data = v.as<float>() + block * kBlock * v.stride[1];
  part.shape[1] = smaller(kBlock, v.shape[1] - block * kBlock);
  return part;
}

// One image of one block with as many pixels as `like`.
View one_block(float* data, const View& like) {
  const int64_t h = like.shape[2], w = like.shape[3], floats = h * w * kBlock;
  View v = {};
  v.data = data, v.dtype = DType::f32, v.rank = 5;
  const int64_t shape[] = {1, 1, h, w, kBlock}, stride[] = {floats, floats, w * kBlock, kBlock, 1};
  for (int d = 0; d < 5; d++) v.shape[d] = shape[d], v.stride[d] = stride[d];
  return v;
}

// run(exec, blocks) for every 16 channels of every image: blocks of the inputs, then the one that becomes `out`.
template <int INPUTS, class Run>
void in_blocks(const Exec* exec, const View* const (&in)[INPUTS], const View& out, int64_t work, const Run& run) {
  const int64_t blocks = ceil_div(out.shape[1], kBlock);
  int64_t floats = pixels_of(out) * kBlock;
  for (const View* v : in) floats += pixels_of(*v) * kBlock;
  parallel_each(exec, out.shape[0] * blocks, work * kBlock, [&](int64_t t) {
    const Exec alone = {1, exec->parallel, exec->scratch, nullptr};
    const int64_t image = t / blocks, block = t % blocks;
    float* room = scratch<float>(exec, 1, floats);
    View block_of[INPUTS + 1];
    for (int k = 0; k < INPUTS; k++) {
      const int64_t h = in[k]->shape[2], w = in[k]->shape[3];
      block_of[k] = one_block(room, *in[k]);
      block_images(&alone, channels_of(*in[k], block), image, 1, kBlock, 0, 0, h, w, room, 0);
      room += h * w * kBlock;
    }
    block_of[INPUTS] = one_block(room, out);
    run(&alone, block_of);
    unblock_images(&alone, room, 1, channels_of(out, block), image);
  });
}

}  // namespace

void max_pool2d(const max_pool2d_args& c) {
  const Window w(c.attr);
  if (pays_in_blocks(c.in.x, c.out.y))
    return in_blocks<1>(c.exec, {&c.in.x}, c.out.y, pixels_of(c.in.x),
                        [&](const Exec* exec, const View* v) { max_pool2d({{v[0]}, {v[1]}, c.attr, exec}); });
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

namespace {

// Where a window has its first maximum, or last NaN.
template <class T>
NEEDLE_INLINE void find_best(const Image<T>& in, Span sy, Span sx, int64_t step_y, int64_t step_x, int64_t* best_y,
                             int64_t* best_x) {
  T top = static_cast<T>(-HUGE_VAL);
  int64_t at_y = sy.begin, at_x = sx.begin;
  for (int64_t i = sy.begin; i < sy.end; i += step_y) {
    const T* p = in.at(i, 0);
    for (int64_t j = sx.begin; j < sx.end; j += step_x) {
      const T v = p[j * in.column];
      const bool better = static_cast<int>(v > top) | static_cast<int>(v != v);  // no jump: it would be a guess
      top = better ? v : top, at_y = better ? i : at_y, at_x = better ? j : at_x;
    }
  }
  *best_y = at_y, *best_x = at_x;
}

// Flat numbers, in their images, of the maxima of windows that are not empty.
template <class Args, class Windows>
void find_places(const Args& c, const Windows& w, int64_t step_y, int64_t step_x, int64_t work_per_pixel) {
  const View &x = c.in.x, &y = c.out.y;
  const int64_t h = y.shape[2];
  with_type<Args::In::x_dtypes>(x.dtype, [&]<class T>(T) {
    parallel_each(c.exec, images_of(y) * h, y.shape[3] * work_per_pixel, [&](int64_t t) {
      const auto in = image_of<T>(x, t / h);
      const auto out = image_of<int64_t>(y, t / h);
      const Span sy = rows_of(w, t % h, h, in.h);
      for (int64_t i = 0, best_y, best_x; i < out.w; i++) {
        find_best(in, sy, columns_of(w, i, out.w, in.w), step_y, step_x, &best_y, &best_x);
        *out.at(t % h, i) = best_y * in.w + best_x;
      }
    });
  });
}

// The gradient of a window's first maximum, or last NaN, which is found again rather than stored.
template <class P, class T>
NEEDLE_INLINE void add_to_best(const Window& w, const Image<T>& in, const T* dy, Span sy, Span sx,
                               const Band<P>& band) {
  using L = typename P::L;
  if constexpr (P::width == 1) {
    int64_t best_y, best_x;
    find_best(in, sy, sx, w.dilation_h, w.dilation_w, &best_y, &best_x);
    if (band.has(best_y)) *band.image.at(best_y, best_x) += *dy;
  } else {
    L top[P::K], best[P::K], number(0.f);  // of a pixel in its window, exact up to 2^24
    for (int k = 0; k < P::K; k++) top[k] = P::load(in.at(sy.begin, sx.begin) + k * P::width), best[k] = L(0.f);
    for (int64_t i = sy.begin; i < sy.end; i += w.dilation_h)
      for (int64_t j = sx.begin; j < sx.end; j += w.dilation_w, number = number + L(1.f))
        for (int k = 0; k < P::K; k++) {
          const L v = P::load(in.at(i, j) + k * P::width);
          const auto more = lt(top[k], v), is_number = eq(v, v);
          top[k] = select(is_number, select(more, v, top[k]), v);
          best[k] = select(is_number, select(more, number, best[k]), number);
        }
    L g[P::K];
    for (int k = 0; k < P::K; k++) g[k] = P::load(dy + k * P::width);
    number = L(0.f);
    for (int64_t i = sy.begin; i < sy.end; i += w.dilation_h)
      for (int64_t j = sx.begin; j < sx.end; j += w.dilation_w, number = number + L(1.f)) {
        if (!band.has(i)) continue;
        L part[P::K];
        for (int k = 0; k < P::K; k++) part[k] = select(eq(best[k], number), g[k], L(0.f));
        add_to<P>(band.image.at(i, j), part);
      }
  }
}

}  // namespace

void max_pool2d_grad(const max_pool2d_grad_args& c) {
  const Window w(c.attr);
  const int64_t work = pixels_of(c.in.dy) * w.kernel_h * w.kernel_w;
  if (pays_in_blocks(c.out.dx, c.out.dx))
    return in_blocks<2>(c.exec, {&c.in.x, &c.in.dy}, c.out.dx, work, [&](const Exec* exec, const View* v) {
      max_pool2d_grad({{v[0], v[1]}, {v[2]}, c.attr, exec});
    });
  for_gradients<max_pool2d_grad_args::In::x_dtypes>(
      c, work, [&](auto pixel, const auto& dy, auto& band, int64_t index) {
        using P = decltype(pixel);
        const auto in = image_of<typename P::T>(c.in.x, index);
        for (int64_t y = 0; y < dy.h; y++) {
          const Span sy = rows_of(w, y, dy.h, in.h);
          if (sy.begin >= smaller(sy.end, band.end) || sy.end <= band.begin) continue;
          band.prepare(sy.end);
          for (int64_t x = 0; x < dy.w; x++) {
            const Span sx = columns_of(w, x, dy.w, in.w);
            if (sx.begin < sx.end) add_to_best<P>(w, in, dy.at(y, x), sy, sx, band);
          }
        }
      });
}

void max_pool2d_places(const max_pool2d_places_args& c) {
  const Window w(c.attr);
  find_places(c, w, w.dilation_h, w.dilation_w, 2 * w.kernel_h * w.kernel_w);
}
void adaptive_max_pool2d_places(const adaptive_max_pool2d_places_args& c) {
  find_places(c, Adaptive{}, 1, 1, 2 * (pixels_of(c.in.x) / larger(1, pixels_of(c.out.y)) + 1));
}

void avg_pool2d(const avg_pool2d_args& c) {
  const AverageOf<int64_t> w(c.attr);
  if (pays_in_blocks(c.in.x, c.out.y))
    return in_blocks<1>(c.exec, {&c.in.x}, c.out.y, pixels_of(c.in.x),
                        [&](const Exec* exec, const View* v) { avg_pool2d({{v[0]}, {v[1]}, c.attr, exec}); });
  average(c, w, w.kernel_h * w.kernel_w);
}
void avg_pool2d_grad(const avg_pool2d_grad_args& c) {
  const AverageOf<int64_t> w(c.attr);
  const int64_t work = pixels_of(c.in.dy) * w.kernel_h * w.kernel_w;
  if (pays_in_blocks(c.out.dx, c.out.dx))
    return in_blocks<1>(c.exec, {&c.in.dy}, c.out.dx, work,
                        [&](const Exec* exec, const View* v) { avg_pool2d_grad({{v[0]}, {v[1]}, c.attr, exec}); });
  average_grad(c, w, work);
}
void mean(const mean_args& c);
void adaptive_avg_pool2d(const adaptive_avg_pool2d_args& c) {
  if (c.out.y.rank == 4 && pixels_of(c.out.y) == 1) return mean({{c.in.x}, {c.out.y}, {}, c.exec});  // in vectors
  average(c, Adaptive{}, pixels_of(c.in.x) / larger(1, pixels_of(c.out.y)) + 1);
}
void adaptive_avg_pool2d_grad(const adaptive_avg_pool2d_grad_args& c) {
  average_grad(c, Adaptive{}, pixels_of(c.out.dx));
}

}  // namespace needle::NEEDLE_ISA
