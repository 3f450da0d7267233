// Copies between planes and the blocked layout.
#include "cpu/conv.h"

namespace needle::NEEDLE_ISA {

void copy_to_block(const BlockCopy& b) {
  const int64_t pitch = b.dst_w * b.block;
  const int64_t x0 = min(max(0, b.left), b.dst_w), x1 = max(x0, min(b.left + b.w, b.dst_w));
  for (int64_t y = 0; y < b.dst_h; y++) {
    float* d = b.dst + y * pitch;
    const int64_t sy = y - b.top;
    if (sy < 0 || sy >= b.h || x1 == x0) {
      std::memset(d, 0, pitch * 4);
      continue;
    }
    std::memset(d, 0, x0 * b.block * 4);
    std::memset(d + x1 * b.block, 0, (b.dst_w - x1) * b.block * 4);
    const float* s = b.src + sy * b.s_row + (x0 - b.left) * b.s_pixel;
    d += x0 * b.block;
    if (b.channels == kBlock && b.s_pixel == 1) {
      transpose_to_block(s, b.s_channel, d, kBlock, x1 - x0);
      continue;
    }
    if (b.channels < b.block) std::memset(d, 0, (x1 - x0) * b.block * 4);
    for (int64_t c = 0; c < b.channels; c++)
      for (int64_t i = 0; i < x1 - x0; i++) d[i * b.block + c] = s[c * b.s_channel + i * b.s_pixel];
  }
}

void copy_from_block(const float* src, float* dst, int64_t channels, int64_t pixels) {
  if (channels == kBlock) {
    transpose_from_block(src, kBlock, dst, pixels, pixels);
    return;
  }
  for (int64_t c = 0; c < channels; c++)
    for (int64_t i = 0; i < pixels; i++) dst[c * pixels + i] = src[i * kBlock + c];
}

}  // namespace needle::NEEDLE_ISA
