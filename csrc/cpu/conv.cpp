// Copies between planes and the blocked layout.
#include "cpu/conv.h"

#include "cpu/transpose.h"

namespace needle::NEEDLE_ISA {
namespace {

struct BlockCopy {
  const float* src;
  int64_t channels, s_channel, s_row, s_pixel, h, w, top, left;
  float* dst;
  int64_t block, dst_h, dst_w, step_h, step_w;
};

void copy_to_block(const BlockCopy& b) {
  const int64_t pitch = b.dst_w * b.block, step = b.step_w;
  // Pixels [x0, x1) of a row lie inside.
  const int64_t x0 = smaller(larger(0, ceil_div(-b.left, step)), b.w);
  const int64_t x1 = larger(x0, smaller(b.w, ceil_div(b.dst_w - b.left, step)));
  for (int64_t y = 0; y < b.dst_h; y++) {
    float* d = b.dst + y * pitch;
    const int64_t sy = (y - b.top) / b.step_h;
    if (y < b.top || (y - b.top) % b.step_h != 0 || sy >= b.h || x1 == x0) {
      std::memset(d, 0, pitch * 4);
      continue;
    }
    const float* s = b.src + sy * b.s_row + x0 * b.s_pixel;
    float* to = d + (b.left + x0 * step) * b.block;
    std::memset(d, 0, (to - d) * 4);
    // With the zeros up to the next one a pixel is one of more channels.
    const int64_t apart = step == 1 ? 0 : x1 - x0 - 1;
    block_pixels(s, b.s_channel, b.s_pixel, b.channels, to, step * b.block, apart);
    to += apart * step * b.block;
    block_pixels(s + apart * b.s_pixel, b.s_channel, b.s_pixel, b.channels, to, b.block, x1 - x0 - apart);
    to += (x1 - x0 - apart) * b.block;
    std::memset(to, 0, (d + pitch - to) * 4);
  }
}

// Taps [first, first + count) of an axis that meet the image, at least one.
void used_taps(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t dilation, int64_t pad, int64_t* first,
               int64_t* count) {
  int64_t k0 = 0, k1 = kernel;
  while (k0 + 1 < k1 && (out - 1) * stride + k0 * dilation - pad < 0) k0++;
  while (k1 - 1 > k0 && (k1 - 1) * dilation - pad >= in) k1--;
  *first = k0;
  *count = k1 - k0;
}

}  // namespace

void cut_taps(View& w, const View& in, const View& out, Window& g) {
  int64_t y, x;
  used_taps(in.shape[2], out.shape[2], w.shape[2], g.stride_h, g.dilation_h, g.pad_top, &y, &g.kernel_h);
  used_taps(in.shape[3], out.shape[3], w.shape[3], g.stride_w, g.dilation_w, g.pad_left, &x, &g.kernel_w);
  w.shape[2] = g.kernel_h, w.shape[3] = g.kernel_w;
  w.data = w.as<float>() + y * w.stride[2] + x * w.stride[3];
  g.pad_top -= y * g.dilation_h;
  g.pad_left -= x * g.dilation_w;
}

void block_images(const Exec* exec, const View& x, int64_t first, int64_t images, int64_t block, int64_t top,
                  int64_t left, int64_t H, int64_t W, float* dst, int64_t room, int64_t step_h, int64_t step_w) {
  const int64_t C = x.shape[1], blocks = ceil_div(C, block), copies = images * blocks;
  parallel_parts(exec, copies, 20. * copies * H * W * block, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t n = i / blocks, c = i % blocks * block;
      copy_to_block({x.as<const float>() + (first + n) * x.stride[0] + c * x.stride[1], smaller(block, C - c),
                     x.stride[1], x.stride[2], x.stride[3], x.shape[2], x.shape[3], top, left,
                     dst + n * room + c * H * W, block, H, W, step_h, step_w});
    }
  });
}

void unblock_images(const Exec* exec, const float* src, int64_t images, const View& y, int64_t first) {
  const int64_t channels = y.shape[1], pixels = y.shape[2] * y.shape[3], blocks = ceil_div(channels, kBlock);
  const int64_t copies = images * blocks;
  parallel_parts(exec, copies, 20. * copies * pixels * kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t c = i % blocks * kBlock;
      unblock_pixels(src + i * pixels * kBlock, kBlock,
                     y.as<float>() + (first + i / blocks) * y.stride[0] + c * y.stride[1], y.stride[1],
                     y.shape[3] > 1 ? y.stride[3] : y.stride[2], smaller(kBlock, channels - c), pixels);
    }
  });
}

}  // namespace needle::NEEDLE_ISA
