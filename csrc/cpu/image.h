// Walks the images of plain (N, C, H, W) and blocked (N, C/16, H, W, 16) arrays alike: an image is one channel, or one
// block of 16 channels in kPerBlock vectors.
#pragma once
#include "cpu/strided.h"

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
template <class F>
NEEDLE_INLINE void with_pixel(const View& v, const F& f) {
  if (has_vector_blocks(v)) return f(Pixel<V, kPerBlock, float>{});
  if (v.dtype == DType::f32) return f(Pixel<float, 1, float>{});
  f(Pixel<double, 1, double>{});
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

}  // namespace needle::NEEDLE_ISA
