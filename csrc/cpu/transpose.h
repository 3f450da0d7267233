// Transposes by shuffles of four lanes, which are enough: they are memory bound.
#pragma once
#include "cpu/strided.h"

namespace needle::NEEDLE_ISA {

typedef float F4 __attribute__((vector_size(16)));

NEEDLE_INLINE F4 load4(const float* p) {
  F4 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
NEEDLE_INLINE void store4(float* p, F4 v) { std::memcpy(p, &v, sizeof v); }

// out[j * out_stride + i] = in[i * in_stride + j] for i, j in 0..3.
NEEDLE_INLINE void transpose4(float* out, int64_t out_stride, const float* in, int64_t in_stride) {
  F4 a = load4(in), b = load4(in + in_stride), c = load4(in + 2 * in_stride), d = load4(in + 3 * in_stride);
  F4 ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  F4 cd0 = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd1 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  store4(out, __builtin_shufflevector(ab0, cd0, 0, 1, 4, 5));
  store4(out + out_stride, __builtin_shufflevector(ab0, cd0, 2, 3, 6, 7));
  store4(out + 2 * out_stride, __builtin_shufflevector(ab1, cd1, 0, 1, 4, 5));
  store4(out + 3 * out_stride, __builtin_shufflevector(ab1, cd1, 2, 3, 6, 7));
}

// out[3 * j + i] = in[i * in_stride + j] for i in 0..2, j in 0..3.
NEEDLE_INLINE void interleave3(float* out, const float* in, int64_t in_stride) {
  F4 a = load4(in), b = load4(in + in_stride), c = load4(in + 2 * in_stride);
  F4 ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  store4(out, __builtin_shufflevector(ab0, c, 0, 1, 4, 2));
  store4(out + 4, __builtin_shufflevector(__builtin_shufflevector(ab0, c, 3, 5, 3, 5), ab1, 0, 1, 4, 5));
  store4(out + 8, __builtin_shufflevector(c, ab1, 2, 6, 7, 3));
}

// out[j * out_stride + i] = in[i * in_stride + j], i < m, j < n; along the longer side, so that lines of the other one
// stay in the L1 cache, and some lines of it at a time: rows that a power of two lies between share places in caches.
template <class T>
NEEDLE_INLINE void transpose(T* out, int64_t out_stride, const T* in, int64_t in_stride, int64_t m, int64_t n) {
  int64_t m4 = 0, n4 = 0;
  if constexpr (sizeof(T) == 4) {
    constexpr int64_t kLines = 256 / sizeof(T);
    const bool colours = m == 3 && out_stride == 3;
    m4 = colours ? 3 : m / 4 * 4, n4 = n / 4 * 4;
    auto tile = [&](int64_t i, int64_t j) {
      transpose4(reinterpret_cast<float*>(out + j * out_stride + i), out_stride,
                 reinterpret_cast<const float*>(in + i * in_stride + j), in_stride);
    };
    if (colours)
      for (int64_t j = 0; j < n4; j += 4)
        interleave3(reinterpret_cast<float*>(out + j * 3), reinterpret_cast<const float*>(in + j), in_stride);
    else if (m > n)
      for (int64_t start = 0; start < m4; start += kLines)
        for (int64_t j = 0; j < n4; j += 4)
          for (int64_t i = start; i < smaller(start + kLines, m4); i += 4) tile(i, j);
    else
      for (int64_t start = 0; start < n4; start += kLines)
        for (int64_t i = 0; i < m4; i += 4)
          for (int64_t j = start; j < smaller(start + kLines, n4); j += 4) tile(i, j);
  }
  for (int64_t j = m4 < m ? 0 : n4; j < n; j++)
    for (int64_t i = j < n4 ? m4 : 0; i < m; i++) out[j * out_stride + i] = in[i * in_stride + j];
}

// Pixels of `channels` planes as ones of `block` channels, zeros beyond, and back.
NEEDLE_INLINE void block_pixels(const float* from, int64_t s_channel, int64_t s_pixel, int64_t channels, float* to,
                                int64_t block, int64_t pixels) {
  if (s_pixel == 1)
    transpose(to, block, from, s_channel, channels, pixels);
  else if (s_channel == 1 && s_pixel == block && channels == block)
    std::memcpy(to, from, pixels * block * sizeof(float));
  else if (channels == kBlock && s_channel == 1)
    for (int64_t i = 0; i < pixels; i++) std::memcpy(to + i * block, from + i * s_pixel, kBlock * sizeof(float));
  else
    for (int64_t i = 0; i < pixels; i++) convert(to + i * block, 1, from + i * s_pixel, s_channel, channels);
  for (int64_t i = 0; i < pixels && channels < block; i++)
    for (int64_t k = channels; k < block; k++) to[i * block + k] = 0;
}
NEEDLE_INLINE void unblock_pixels(const float* from, int64_t block, float* to, int64_t s_channel, int64_t s_pixel,
                                  int64_t channels, int64_t pixels) {
  if (s_pixel == 1)
    transpose(to, s_channel, from, block, pixels, channels);
  else if (channels == kBlock && s_channel == 1)
    for (int64_t i = 0; i < pixels; i++) std::memcpy(to + i * s_pixel, from + i * block, kBlock * sizeof(float));
  else
    for (int64_t i = 0; i < pixels; i++) convert(to + i * s_pixel, s_channel, from + i * block, 1, channels);
}

}  // namespace needle::NEEDLE_ISA
