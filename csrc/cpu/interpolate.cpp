// Resizing of plain and blocked images, with torch's source coordinates; gradients of plain images.
#include "cpu/image.h"

namespace needle::NEEDLE_ISA {
namespace {

// An output position lies between two input positions; `part` is the weight of the second. They are one where the size
// stays, so that 0 times what lies beside a pixel lets no NaN in.
struct Source {
  int64_t low, high;
  double part;
};

NEEDLE_INLINE Source bilinear_source(int64_t out, bool align_corners, double scale, int64_t size) {
  if (scale == 1) return {smaller(out, size - 1), smaller(out, size - 1), 0};
  double at = align_corners ? out * scale : (out + 0.5) * scale - 0.5;
  if (at < 0) at = 0;
  int64_t low = smaller(static_cast<int64_t>(at), size - 1);
  return {low, smaller(low + 1, size - 1), at - static_cast<double>(low)};
}

// torch computes the index in float, which decides where a product falls on an integer.
NEEDLE_INLINE int64_t nearest_source(int64_t out, float scale, int64_t size) {
  return smaller(static_cast<int64_t>(static_cast<float>(out) * scale), size - 1);
}

template <class Args>
const Source* bilinear_columns(const Args& c, int64_t outputs, int64_t size) {
  Source* table = static_cast<Source*>(c.exec->scratch(2, outputs * sizeof(Source)));
  for (int64_t x = 0; x < outputs; x++) table[x] = bilinear_source(x, c.attr.align_corners, c.attr.scale_w, size);
  return table;
}

template <class Args>
const int64_t* nearest_columns(const Args& c, int64_t outputs, int64_t size) {
  int64_t* table = static_cast<int64_t*>(c.exec->scratch(2, outputs * sizeof(int64_t)));
  for (int64_t x = 0; x < outputs; x++) table[x] = nearest_source(x, static_cast<float>(c.attr.scale_w), size);
  return table;
}

// f(pixel, input image, output image, y) for every row of the output.
template <class Args, class F>
NEEDLE_INLINE void for_output_rows(const Args& c, const F& f) {
  const View &in = c.in.x, &out = c.out.y;
  int64_t h = out.shape[2];
  with_pixel(out, [&](auto pixel) {
    using P = decltype(pixel);
    using T = typename P::T;
    parallel_ranges(c.exec, images_of(out) * h, 4 * out.shape[3] * P::K * P::width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) f(pixel, image_of<T>(in, i / h), image_of<T>(out, i / h), i % h);
    });
  });
}

// f(dy, dx) for every image of a plain gradient, dx cleared.
template <class Args, class F>
NEEDLE_INLINE void for_gradients(const Args& c, const F& f) {
  const View &dy = c.in.dy, &dx = c.out.dx;
  auto run = [&](auto t) {
    using T = decltype(t);
    parallel_ranges(c.exec, dx.shape[0] * dx.shape[1], 4 * dy.shape[2] * dy.shape[3], [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        auto to = image_of<T>(dx, i);
        clear(to);
        f(image_of<T>(dy, i), to);
      }
    });
  };
  dx.dtype == DType::f32 ? run(float{}) : run(double{});
}

}  // namespace

void interpolate_bilinear(const interpolate_bilinear_args& c) {
  if (c.out.y.size() == 0) return;
  const Source* columns = bilinear_columns(c, c.out.y.shape[3], c.in.x.shape[3]);
  for_output_rows(c, [&](auto pixel, const auto& in, const auto& out, int64_t y) {
    using P = decltype(pixel);
    using L = typename P::L;
    using T = typename P::T;
    Source sy = bilinear_source(y, c.attr.align_corners, c.attr.scale_h, in.h);
    L v1(static_cast<T>(sy.part)), v0(static_cast<T>(1 - sy.part));
    const bool one_row = sy.low == sy.high;  // of a sequence, in which infinity stays
    for (int64_t x = 0; x < out.w; x++) {
      const Source& sx = columns[x];
      L h1(static_cast<T>(sx.part)), h0(static_cast<T>(1 - sx.part));
      const T *a = in.at(sy.low, sx.low), *b = in.at(sy.low, sx.high);
      const T *d = in.at(sy.high, sx.low), *e = in.at(sy.high, sx.high);
      for (int k = 0; k < P::K; k++) {
        int64_t o = k * P::width;
        L top = h0 * P::load(a + o) + h1 * P::load(b + o), bottom = h0 * P::load(d + o) + h1 * P::load(e + o);
        P::store(out.at(y, x) + o, one_row ? top : v0 * top + v1 * bottom);
      }
    }
  });
}

void interpolate_bilinear_grad(const interpolate_bilinear_grad_args& c) {
  if (c.out.dx.size() == 0) return;
  const Source* columns = bilinear_columns(c, c.in.dy.shape[3], c.out.dx.shape[3]);
  for_gradients(c, [&](const auto& dy, const auto& dx) {
    for (int64_t y = 0; y < dy.h; y++) {
      Source sy = bilinear_source(y, c.attr.align_corners, c.attr.scale_h, dx.h);
      for (int64_t x = 0; x < dy.w; x++) {
        const Source& sx = columns[x];
        auto g = *dy.at(y, x);
        using T = decltype(g);
        T v1 = static_cast<T>(sy.part), h1 = static_cast<T>(sx.part), v0 = 1 - v1, h0 = 1 - h1;
        *dx.at(sy.low, sx.low) += v0 * h0 * g;
        *dx.at(sy.low, sx.high) += v0 * h1 * g;
        *dx.at(sy.high, sx.low) += v1 * h0 * g;
        *dx.at(sy.high, sx.high) += v1 * h1 * g;
      }
    }
  });
}

void interpolate_nearest(const interpolate_nearest_args& c) {
  if (c.out.y.size() == 0) return;
  const int64_t* columns = nearest_columns(c, c.out.y.shape[3], c.in.x.shape[3]);
  for_output_rows(c, [&](auto pixel, const auto& in, const auto& out, int64_t y) {
    using P = decltype(pixel);
    int64_t from = nearest_source(y, static_cast<float>(c.attr.scale_h), in.h);
    for (int64_t x = 0; x < out.w; x++)
      for (int k = 0; k < P::K; k++)
        P::store(out.at(y, x) + k * P::width, P::load(in.at(from, columns[x]) + k * P::width));
  });
}

void interpolate_nearest_grad(const interpolate_nearest_grad_args& c) {
  if (c.out.dx.size() == 0) return;
  const int64_t* columns = nearest_columns(c, c.in.dy.shape[3], c.out.dx.shape[3]);
  for_gradients(c, [&](const auto& dy, const auto& dx) {
    for (int64_t y = 0; y < dy.h; y++) {
      int64_t to = nearest_source(y, static_cast<float>(c.attr.scale_h), dx.h);
      for (int64_t x = 0; x < dy.w; x++) *dx.at(to, columns[x]) += *dy.at(y, x);
    }
  });
}

}  // namespace needle::NEEDLE_ISA
