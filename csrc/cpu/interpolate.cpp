// Resizing of plain and blocked images, with torch's source coordinates.
#include "cpu/image.h"
#include "cpu/rows.h"
#include "cpu/tile.h"

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

// Plain images: rows of the input, spread to the output's width, serve all rows of the output between them.
template <class T>
void bilinear_plain(const interpolate_bilinear_args& c, const Bilinear& rows, bool same_width) {
  using L = typename LanesOf<T>::type;
  const auto* columns = column_table(c.exec, Bilinear(c.attr, c.attr.scale_w), c.out.y.shape[3], c.in.x.shape[3]);
  const int64_t h = c.out.y.shape[2], w = c.out.y.shape[3];
  parallel_parts(c.exec, images_of(c.out.y) * h, 50. * c.out.y.size(), [&](int64_t begin, int64_t end) {
    T* room = scratch<T>(c.exec, 0, 2 * w);
    const T* held[2] = {};  // the row that each half of `room` is made from
    for (int64_t i = begin; i < end; i++) {
      const Image<const T> in = image_of<const T>(c.in.x, i / h);
      T* to = image_of<T>(c.out.y, i / h).at(i % h, 0);
      const auto spread = [&](int64_t row) -> const T* {  // neighbours in different halves
        const T* from = in.at(row, 0);
        T* at = room + row % 2 * w;
        if (held[row % 2] == from) return at;
        held[row % 2] = from;
        if (same_width && in.column == 1) {
          for_lanes<T>(w, [&](int64_t x, int n) {
            const L v = load_lanes(from + x, n);
            store_lanes(at + x, L(T(1)) * v + L(T(0)) * v, n);  // what is not finite ends as below
          });
          return at;
        }
        for (int64_t x = 0; x < w; x++) {
          const auto sx = columns[x];
          const T h1 = static_cast<T>(sx.part), h0 = static_cast<T>(1 - sx.part);
          at[x] = h0 * from[sx.low * in.column] + h1 * from[sx.high * in.column];
        }
        return at;
      };
      const auto sy = source_of(rows, i % h, in.h);
      const L v1(static_cast<T>(sy.part)), v0(static_cast<T>(1 - sy.part));
      const T *top = spread(sy.low), *bottom = spread(sy.high);
      if (top == bottom) {  // so infinity stays
        std::memcpy(to, top, w * sizeof(T));
        continue;
      }
      for_lanes<T>(w, [&](int64_t x, int n) {
        store_lanes(to + x, v0 * load_lanes(top + x, n) + v1 * load_lanes(bottom + x, n), n);
      });
    }
  });
}

}  // namespace

void interpolate_bilinear(const interpolate_bilinear_args& c) {
  if (c.out.y.size() == 0) return;
  const Bilinear rows(c.attr, c.attr.scale_h), by_column(c.attr, c.attr.scale_w);
  if (c.out.y.rank == 4 && c.out.y.stride[3] == 1 && rows.scale < 1.5)  // else few rows serve twice
    return with_type<interpolate_bilinear_args::In::x_dtypes>(
        c.out.y.dtype, [&]<class T>(T) { bilinear_plain<T>(c, rows, by_column.scale == 1); });
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
  if (c.out.dx.size() == 0) return;
  const Bilinear rows(c.attr, c.attr.scale_h), by_column(c.attr, c.attr.scale_w);
  const auto* columns = column_table(c.exec, by_column, c.in.dy.shape[3], c.out.dx.shape[3]);
  for_gradients<interpolate_bilinear_grad_args::In::dy_dtypes>(
      c, kWork * c.in.dy.shape[2] * c.in.dy.shape[3], [&](auto pixel, const auto& dy, auto& band, int64_t) {
        const auto& dx = band.image;
        using P = decltype(pixel);
        using L = typename P::L;
        using T = typename P::T;
        for (int64_t y = 0; y < dy.h; y++) {
          const auto sy = source_of(rows, y, dx.h);
          const bool above = band.has(sy.low), below = band.has(sy.high);
          if (!above && !below) continue;
          band.prepare((below ? sy.high : sy.low) + 1);
          const T v1 = static_cast<T>(sy.part), v0 = 1 - v1;
          for (int64_t x = 0; x < dy.w; x++) {
            const auto sx = columns[x];
            const T h1 = static_cast<T>(sx.part), h0 = 1 - h1;
            const auto add = [&](int64_t row, int64_t column, T weight) __attribute__((always_inline)) {
              L terms[P::K];
              for (int k = 0; k < P::K; k++) terms[k] = L(weight) * P::load(dy.at(y, x) + k * P::width);
              add_to<P>(dx.at(row, column), terms);
            };
            if (above) add(sy.low, sx.low, v0 * h0), add(sy.low, sx.high, v0 * h1);
            if (below) add(sy.high, sx.low, v1 * h0), add(sy.high, sx.high, v1 * h1);
          }
        }
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
  if (c.out.dx.size() == 0) return;
  const Nearest rows(c.attr, c.attr.scale_h), by_column(c.attr, c.attr.scale_w);
  const auto* columns = column_table(c.exec, by_column, c.in.dy.shape[3], c.out.dx.shape[3]);
  for_gradients<interpolate_nearest_grad_args::In::dy_dtypes>(c, kWork * c.in.dy.shape[2] * c.in.dy.shape[3],
                                                              [&](auto pixel, const auto& dy, auto& band, int64_t) {
                                                                const auto& dx = band.image;
                                                                using P = decltype(pixel);
                                                                for (int64_t y = 0; y < dy.h; y++) {
                                                                  const int64_t to = source_of(rows, y, dx.h);
                                                                  if (!band.has(to)) continue;
                                                                  band.prepare(to + 1);
                                                                  for (int64_t x = 0; x < dy.w; x++) {
                                                                    typename P::L g[P::K];
                                                                    for (int k = 0; k < P::K; k++)
                                                                      g[k] = P::load(dy.at(y, x) + k * P::width);
                                                                    add_to<P>(dx.at(to, columns[x]), g);
                                                                  }
                                                                }
                                                              });
}

}  // namespace needle::NEEDLE_ISA
