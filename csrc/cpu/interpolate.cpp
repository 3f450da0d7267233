// Resizing of plain and blocked images, with torch's source coordinates; gradients of plain images.
#include "cpu/image.h"

namespace needle::NEEDLE_ISA {
namespace {

using Source = SourceOf<int64_t>;
constexpr int64_t kWork = 4;  // per output pixel

// source(x) for every column of the output.
template <class F>
auto column_table(const Exec* exec, int64_t outputs, const F& source) {
  auto* table = scratch<decltype(source(outputs))>(exec, 2, outputs);
  for (int64_t x = 0; x < outputs; x++) table[x] = source(x);
  return table;
}
template <class Args>
const Source* bilinear_columns(const Args& c, int64_t outputs, int64_t size) {
  return column_table(c.exec, outputs,
                      [&](int64_t x) { return bilinear_source(x, c.attr.align_corners, c.attr.scale_w, size); });
}
template <class Args>
const int64_t* nearest_columns(const Args& c, int64_t outputs, int64_t size) {
  return column_table(c.exec, outputs,
                      [&](int64_t x) { return nearest_source(x, static_cast<float>(c.attr.scale_w), size); });
}

}  // namespace

void interpolate_bilinear(const interpolate_bilinear_args& c) {
  const Source* columns = bilinear_columns(c, c.out.y.shape[3], c.in.x.shape[3]);
  for_output_rows(c, kWork, [&](auto pixel, const auto& in, const auto& out, int64_t y) {
    using P = decltype(pixel);
    using L = typename P::L;
    using T = typename P::T;
    Source sy = bilinear_source(y, c.attr.align_corners, c.attr.scale_h, in.h);
    L v1(static_cast<T>(sy.part)), v0(static_cast<T>(1 - sy.part));
    const T *above = in.at(sy.low, 0), *below = in.at(sy.high, 0);
    T* to = out.at(y, 0);
    const bool one_row = sy.low == sy.high;  // of a sequence, in which infinity stays
    for (int64_t x = 0; x < out.w; x++) {
      const Source sx = columns[x];  // a copy: a reference is read again after every store
      L h1(static_cast<T>(sx.part)), h0(static_cast<T>(1 - sx.part));
      const int64_t left = sx.low * in.column, right = sx.high * in.column;
      const T *a = above + left, *b = above + right, *d = below + left, *e = below + right;
      for (int k = 0; k < P::K; k++) {
        int64_t o = k * P::width;
        L top = h0 * P::load(a + o) + h1 * P::load(b + o), bottom = h0 * P::load(d + o) + h1 * P::load(e + o);
        P::store(to + x * out.column + o, one_row ? top : v0 * top + v1 * bottom);
      }
    }
  });
}

void interpolate_bilinear_grad(const interpolate_bilinear_grad_args& c) {
  if (c.out.dx.size() == 0) return;
  const Source* columns = bilinear_columns(c, c.in.dy.shape[3], c.out.dx.shape[3]);
  for_gradients<interpolate_bilinear_grad_args::In::dy_dtypes>(
      c, kWork * c.in.dy.shape[2] * c.in.dy.shape[3], [&](const auto& dy, const auto& dx, int64_t) {
        for (int64_t y = 0; y < dy.h; y++) {
          Source sy = bilinear_source(y, c.attr.align_corners, c.attr.scale_h, dx.h);
          for (int64_t x = 0; x < dy.w; x++) {
            const Source sx = columns[x];
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
  const int64_t* columns = nearest_columns(c, c.out.y.shape[3], c.in.x.shape[3]);
  for_output_rows(c, kWork, [&](auto pixel, const auto& in, const auto& out, int64_t y) {
    using P = decltype(pixel);
    const auto* from = in.at(nearest_source(y, static_cast<float>(c.attr.scale_h), in.h), 0);
    auto* to = out.at(y, 0);
    for (int64_t x = 0; x < out.w; x++)
      for (int k = 0; k < P::K * P::width; k += P::width)
        P::store(to + x * out.column + k, P::load(from + columns[x] * in.column + k));
  });
}

void interpolate_nearest_grad(const interpolate_nearest_grad_args& c) {
  if (c.out.dx.size() == 0) return;
  const int64_t* columns = nearest_columns(c, c.in.dy.shape[3], c.out.dx.shape[3]);
  for_gradients<interpolate_nearest_grad_args::In::dy_dtypes>(
      c, kWork * c.in.dy.shape[2] * c.in.dy.shape[3], [&](const auto& dy, const auto& dx, int64_t) {
        for (int64_t y = 0; y < dy.h; y++) {
          int64_t to = nearest_source(y, static_cast<float>(c.attr.scale_h), dx.h);
          for (int64_t x = 0; x < dy.w; x++) *dx.at(to, columns[x]) += *dy.at(y, x);
        }
      });
}

}  // namespace needle::NEEDLE_ISA
