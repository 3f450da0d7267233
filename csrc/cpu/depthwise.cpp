// Depthwise convolution: 16 channels are the lanes, a few output pixels the registers.
#include "cpu/conv.h"
#include "math/maps.h"

namespace needle::NEEDLE_ISA {
namespace {

// With P vectors per block this keeps 8 to 16 sums in registers.
constexpr int kPixels = NEEDLE_REGISTER_BLOCKS == 32 ? 8 : NEEDLE_REGISTER_BLOCKS == 8 ? 4 : 2;

struct Strides {
  int64_t kernel_d, kernel_h, kernel_w, x_tap_d, x_tap_h, x_tap_w, x_pixel, residual_pixel;
};

template <int PIXELS>
void pixels(const Strides& s, const float* x, const float* w, const float* bias, const float* residual, float* y,
            int activation, float alpha) {
  V acc[PIXELS][kPerBlock];
#pragma GCC unroll 8
  for (int i = 0; i < PIXELS; i++)
#pragma GCC unroll 4
    for (int v = 0; v < kPerBlock; v++) acc[i][v] = bias ? V::load(bias + v * V::N) : V(0.f);
  for (int64_t kd = 0; kd < s.kernel_d; kd++)
    for (int64_t kh = 0; kh < s.kernel_h; kh++) {
      const float* p = x + kd * s.x_tap_d + kh * s.x_tap_h;
      for (int64_t kw = 0; kw < s.kernel_w; kw++, p += s.x_tap_w, w += kBlock) {
#pragma GCC unroll 4
        for (int v = 0; v < kPerBlock; v++) {
          const V weight = V::load(w + v * V::N);
#pragma GCC unroll 8
          for (int i = 0; i < PIXELS; i++) acc[i][v] = fma(V::load(p + i * s.x_pixel + v * V::N), weight, acc[i][v]);
        }
      }
    }
#pragma GCC unroll 8
  for (int i = 0; i < PIXELS; i++)
#pragma GCC unroll 4
    for (int v = 0; v < kPerBlock; v++) {
      const int64_t at = i * kBlock + v * V::N;
      V sum = acc[i][v];
      if (residual) sum = sum + V::load(residual + i * s.residual_pixel + v * V::N);
      if (activation == kRelu || activation == kRelu6) sum = max(V(0.f), sum);  // in this order NaN stays NaN
      if (activation == kRelu6) sum = min(V(6.f), sum);
      sum.store(y + at);
    }
  if (activation > kRelu6)
    with_activation(activation, alpha, [&](const auto& f) {
      for (int64_t at = 0; at < PIXELS * kBlock; at += V::N) f(V::load(y + at)).store(y + at);
    });
}

using PixelsFn = void (*)(const Strides&, const float*, const float*, const float*, const float*, float*, int, float);
constexpr PixelsFn kPixelsFn[] = {
    nullptr,   pixels<1>, pixels<2>,
#if NEEDLE_REGISTER_BLOCKS >= 8
    pixels<3>, pixels<4>,
#endif
#if NEEDLE_REGISTER_BLOCKS == 32
    pixels<5>, pixels<6>, pixels<7>, pixels<8>,
#endif
};
static_assert(sizeof kPixelsFn / sizeof *kPixelsFn == kPixels + 1);

}  // namespace

void depthwise_rows(const DepthwisePass& p, int64_t first, int64_t last) {
  const Window& g = p.window;
  const Strides s = {p.frames,
                     g.kernel_h,
                     g.kernel_w,
                     p.blocks * p.x.channels,
                     g.dilation_h * p.x.row,
                     g.dilation_w * kBlock,
                     g.stride_w * kBlock,
                     p.residual.pixel};
  const int64_t filter = p.frames * g.kernel_h * g.kernel_w * kBlock;
  for (int64_t row = first; row < last; row++) {
    const int64_t y = row % p.rows, block = row / p.rows % p.blocks, image = row / p.rows / p.blocks;
    const float *in = p.x.at(image, block, y * g.stride_h), *w = p.w + block * filter;
    const float* bias = p.bias ? p.bias + block * kBlock : nullptr;
    const float* residual = p.residual ? p.residual.at(image, block, y) : nullptr;
    float* out = p.y.at(image, block, y);
    int64_t i = 0;
    for (int64_t left = ceil_div(p.pixels, kPixels); left > 0; left--) {  // parts of nearly one size
      const int64_t n = ceil_div(p.pixels - i, left);
      kPixelsFn[n](s, in + i * s.x_pixel, w, bias, residual ? residual + i * s.residual_pixel : nullptr,
                   out + i * kBlock, p.activation, p.alpha);
      i += n;
    }
  }
}

void depthwise_pass(const Exec* exec, const DepthwisePass& p) {
  const int64_t all = p.images * p.blocks * p.rows;
  // Runs at some quarter of the FMA peak.
  const double work = 8. * all * p.pixels * kBlock * p.frames * p.window.kernel_h * p.window.kernel_w;
  parallel_parts(exec, all, work, [&](int64_t begin, int64_t end) { depthwise_rows(p, begin, end); });
}

// w: (channels, 1, kernel height, kernel width), packed as [block][tap][16].
void depthwise_pack_weights(const Exec* exec, const View& w, float* dst) {
  pack_weights(exec, Weights::of(w, 1), {1, 1, w.shape[0], 1}, {1, 1, kBlock}, dst);
}

void depthwise_pack(const depthwise_pack_args& c) {
  if (c.in.weight.size() > 0) depthwise_pack_weights(c.exec, c.in.weight, c.out.packed.as<float>());
}

DepthwisePass depthwise_pass_of(const depthwise_blocked_args& c) {
  const View& y = c.out.y;
  const Window g(c.attr);
  auto x = Images<const float>::of(c.in.x);
  x.data -= g.pad_top * x.row + g.pad_left * kBlock;
  return {y.shape[0],
          y.shape[1],
          y.shape[2],
          y.shape[3],
          g,
          x,
          c.in.packed.as<const float>(),
          Images<float>::of(y),
          c.in.bias.as<const float>(),
          Images<const float>::of(c.in.residual),
          static_cast<int>(c.attr.activation),
          static_cast<float>(c.attr.alpha),
          c.in.x.shape[1] / y.shape[1]};
}

void depthwise_blocked(const depthwise_blocked_args& c) {
  if (c.out.y.size() > 0) depthwise_pass(c.exec, depthwise_pass_of(c));
}

}  // namespace needle::NEEDLE_ISA
