// Resizing of plain and blocked images, with torch's source coordinates; gradients of plain images.
#include "cpu/image.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kWork = 4;  // per output pixel

// The source of every column of the output.
template <class Kind>
auto column_table(const Exec* exec, const Kind& kind, int64_t outputs, int64_t size) {
  auto* table = scratch<decltype(source_of(kind, size, size))>(exec, 2, outputs);
  for (int64_t x = 0; x < outputs; x++) table[x] = source_of(kind, x, size);
  return table;
}

// f(dx, source row, source column, gradient) for every output pixel.
template <class Kind, class Args, class F>
void each_gradient(const Args& c, const F& f) {
  const View &dy = c.in.dy, &dx = c.out.dx;
  if (dx.size() == 0) return;
  const Kind rows(c.attr, c.attr.scale_h), by_column(c.attr, c.attr.scale_w);
  const auto* columns = column_table(c.exec, by_column, dy.shape[3], dx.shape[3]);
  for_gradients<Args::In::dy_dtypes>(c, kWork * dy.shape[2] * dy.shape[3],
                                     [&](const auto& from, const auto& to, int64_t) {
                                       for (int64_t y = 0; y < from.h; y++) {
                                         const auto row = source_of(rows, y, to.h);
                                         for (int64_t x = 0; x < from.w; x++) f(to, row, columns[x], *from.at(y, x));
                                       }
                                     });
}

}  // namespace

void interpolate_bilinear(const interpolate_bilinear_args& c) {
  const Bilinear rows(c.attr, c.attr.scale_h), by_column(c.attr, c.attr.scale_w);
  const auto* columns = column_table(c.exec, by_column, c.out.y.shape[3], c.in.x.shape[3]);
  for_output_rows(c, kWork, [&](auto pixel, const auto& in, const auto& out, int64_t y) {
    using P = decltype(pixel);
    using L = typename P::L;
    using T = typename P::T;
    const auto sy = source_of(rows, y, in.h);
    L v1(static_cast<T>(sy.part)), v0(static_cast<T>(1 - sy.part));
    const T *above = in.at(sy.low, 0), *below = in.at(sy.high, 0);
    T* to = out.at(y, 0);
    const bool one_row = sy.low == sy.high;  // of a sequence, in which infinity stays
    for (int64_t x = 0; x < out.w; x++) {
      const auto sx = columns[x];  // a copy: a reference is read again after every store
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
  each_gradient<Bilinear>(c, [](const auto& dx, const auto& sy, const auto sx, auto g) {
    using T = decltype(g);
    T v1 = static_cast<T>(sy.part), h1 = static_cast<T>(sx.part), v0 = 1 - v1, h0 = 1 - h1;
    *dx.at(sy.low, sx.low) += v0 * h0 * g;
    *dx.at(sy.low, sx.high) += v0 * h1 * g;
    *dx.at(sy.high, sx.low) += v1 * h0 * g;
    *dx.at(sy.high, sx.high) += v1 * h1 * g;
  });
}

void interpolate_nearest(const interpolate_nearest_args& c) {
  const Nearest rows(c.attr, c.attr.scale_h), by_column(c.attr, c.attr.scale_w);
  const auto* columns = column_table(c.exec, by_column, c.out.y.shape[3], c.in.x.shape[3]);
  for_output_rows(c, kWork, [&](auto pixel, const auto& in, const auto& out, int64_t y) {
    using P = decltype(pixel);
    const auto* from = in.at(source_of(rows, y, in.h), 0);
    auto* to = out.at(y, 0);
    for (int64_t x = 0; x < out.w; x++)
      for (int k = 0; k < P::K * P::width; k += P::width)
        P::store(to + x * out.column + k, P::load(from + columns[x] * in.column + k));
  });
}

void interpolate_nearest_grad(const interpolate_nearest_grad_args& c) {
  each_gradient<Nearest>(c, [](const auto& dx, int64_t y, int64_t x, auto g) { *dx.at(y, x) += g; });
}

}  // namespace needle::NEEDLE_ISA
