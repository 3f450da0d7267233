// Walks the images of plain (N, C, H, W) and blocked (N, C/16, H, W, 16) arrays alike: an image is one channel, or one
// block of 16 channels in kPerBlock vectors.
#pragma once
#include "cpu/strided.h"
#include "math/image.h"

namespace needle::NEEDLE_ISA {

template <class T>
struct Image {
  T* data;
  int64_t h, w, row, column;

  T* at(int64_t y, int64_t x) const { return data + y * row + x * column; }
};

// L: lane type, K: vectors of it per pixel, T: element.
template <class Lane, int VECTORS, class Element>
struct Pixel {
  using L = Lane;
  using T = Element;
  static constexpr int K = VECTORS;
  static constexpr int64_t width = sizeof(L) / sizeof(T);

  NEEDLE_INLINE L load(const T* p) {
    if constexpr (width > 1)
      return L::load(p);
    else
      return *p;
  }
  NEEDLE_INLINE void store(T* p, L v) {
    if constexpr (width > 1)
      v.store(p);
    else
      *p = v;
  }
};

NEEDLE_INLINE bool has_vector_blocks(const View& v) {
  return v.rank == 5 && v.shape[4] == kBlock && v.dtype == DType::f32;
}

// Calls f(Pixel) with the pixel type of a view.
template <const char* letters, class F>
NEEDLE_INLINE void with_pixel(const View& v, const F& f) {
  if (has_vector_blocks(v)) return f(Pixel<V, kPerBlock, float>{});
  with_type<letters>(v.dtype, [&](auto t) { f(Pixel<decltype(t), 1, decltype(t)>{}); });
}

NEEDLE_INLINE int64_t images_of(const View& v) {
  int64_t lanes = v.rank == 5 && !has_vector_blocks(v) ? v.shape[4] : 1;
  return v.shape[0] * v.shape[1] * lanes;
}

template <class T>
NEEDLE_INLINE Image<T> image_of(const View& v, int64_t index) {
  int64_t lane = 0;
  if (v.rank == 5 && !has_vector_blocks(v)) lane = index % v.shape[4], index /= v.shape[4];
  T* p = v.as<T>() + index / v.shape[1] * v.stride[0] + index % v.shape[1] * v.stride[1] + lane;
  return {p, v.shape[2], v.shape[3], v.stride[2], v.stride[3]};
}

// f(pixel, input image, output image, y) for every row of the output.
template <class Args, class F>
NEEDLE_INLINE void for_output_rows(const Args& c, int64_t work_per_pixel, const F& f) {
  const View &in = c.in.x, &out = c.out.y;
  if (out.size() == 0) return;
  const int64_t h = out.shape[2], lanes = has_vector_blocks(out) ? kBlock : 1;
  with_pixel<Args::In::x_dtypes>(out, [&](auto pixel) {
    using T = typename decltype(pixel)::T;
    parallel_each(c.exec, images_of(out) * h, out.shape[3] * work_per_pixel * lanes,
                  [&](int64_t i) __attribute__((always_inline)) {
                    f(pixel, image_of<T>(in, i / h), image_of<T>(out, i / h), i % h);
                  });
  });
}

// Rows of a gradient's image, cleared shortly before something is added to them.
template <class P>
struct Band {
  Image<typename P::T> image;
  int64_t begin, end, clear = begin;  // rows before `clear` are ready

  bool has(int64_t y) const { return y >= begin && y < end; }
  // Rows up to `last` will be added to.
  void prepare(int64_t last) {
    for (; clear < smaller(last, end); clear++)
      for (int64_t x = 0; x < image.w; x++)
        for (int k = 0; k < P::K; k++) P::store(image.at(clear, x) + k * P::width, typename P::L(typename P::T(0)));
  }
};

// f(pixel, dy, band, number) for bands of rows of every image of dx. A band gets all that is due to its rows, whatever
// other bands there are: windows across their borders are looked at by both.
template <const char* letters, class Args, class F>
NEEDLE_INLINE void for_gradients(const Args& c, int64_t work_per_image, const F& f) {
  const View &dy = c.in.dy, &dx = c.out.dx;
  if (dx.size() == 0) return;
  const int64_t h = dx.shape[2], images = images_of(dx);
  with_pixel<letters>(dx, [&](auto pixel) {
    using P = decltype(pixel);
    using T = typename P::T;
    const int64_t work = (work_per_image + h * dx.shape[3]) * P::K * P::width, threads = c.exec->threads;
    int64_t bands = threads > 1 && images * work > 65536 ? smaller(4 * threads / images, h / 8) : 1;
    bands = larger(1, bands);
    parallel_each(c.exec, images * bands, work / bands, [&](int64_t t) __attribute__((always_inline)) {
      const int64_t i = t / bands, part = t % bands;
      Band<P> band = {image_of<T>(dx, i), h * part / bands, h * (part + 1) / bands};
      f(pixel, image_of<T>(dy, i), band, i);
      band.prepare(h);
    });
  });
}

// Adds to a pixel.
template <class P>
NEEDLE_INLINE void add_to(typename P::T* to, const typename P::L* terms) {
  for (int k = 0; k < P::K; k++) P::store(to + k * P::width, P::load(to + k * P::width) + terms[k]);
}

}  // namespace needle::NEEDLE_ISA
