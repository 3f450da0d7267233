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

template <class T>
NEEDLE_INLINE void clear(const Image<T>& image) {
  for (int64_t y = 0; y < image.h; y++)
    for (int64_t x = 0; x < image.w; x++) *image.at(y, x) = 0;
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

// f(dy, dx, number) for every image of a plain gradient, dx cleared.
template <const char* letters, class Args, class F>
NEEDLE_INLINE void for_gradients(const Args& c, int64_t work, const F& f) {
  const View &dy = c.in.dy, &dx = c.out.dx;
  with_type<letters>(dx.dtype, [&](auto t) {
    parallel_each(c.exec, dx.shape[0] * dx.shape[1], work, [&](int64_t i) {
      const auto to = image_of<decltype(t)>(dx, i);
      clear(to);
      f(image_of<decltype(t)>(dy, i), to, i);
    });
  });
}

}  // namespace needle::NEEDLE_ISA
