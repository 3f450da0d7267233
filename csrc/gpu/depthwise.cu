// Depthwise convolution, its transposition and weight gradient, for images of any strides: bound by memory, so a thread
// per result, neighbours in memory being neighbours among the threads. Taps and weights come from the caches.
#include "gpu/conv.h"
#include "gpu/gemm.cuh"

namespace needle::gpu {
namespace {

constexpr int kThreads = 256;

struct Image {
  float* data;
  int64_t n, c, h, w;
  __device__ __forceinline__ float& at(int image, int channel, int y, int x) const {
    return data[image * n + channel * c + y * h + x * w];
  }
};

struct Problem {
  Image x, w, out, residual;  // w: (channel, any, i, j); residual.data may be null
  const float *scale, *bias;
  int64_t scale_stride, bias_stride;
  int images, channels, height, width, in_height, in_width, kernel_h, kernel_w;
  int stride_h, stride_w, pad_top, pad_left, dilation_h, dilation_w, multiplier, activation;
  float alpha;
  bool channels_last;
  Divisor by_channels, by_height, by_width, by_multiplier, by_stride_h, by_stride_w;
};

struct Position {
  int image, channel, y, x;
};

__device__ __forceinline__ int take_digit(int& index, const Divisor& by) {
  int rest = by.quotient(index), digit = index - rest * static_cast<int>(by.d);
  index = rest;
  return digit;
}

__device__ __forceinline__ Position position(const Problem& p, int index) {
  Position at;
  at.channel = p.channels_last ? take_digit(index, p.by_channels) : 0;
  at.x = take_digit(index, p.by_width);
  at.y = take_digit(index, p.by_height);
  if (!p.channels_last) at.channel = take_digit(index, p.by_channels);
  at.image = index;
  return at;
}

__device__ __forceinline__ void finish(const Problem& p, const Position& o, float v) {
  if (p.scale) v *= p.scale[o.channel * p.scale_stride];
  if (p.bias) v += p.bias[o.channel * p.bias_stride];
  if (p.residual.data) v += p.residual.at(o.image, o.channel, o.y, o.x);
  p.out.at(o.image, o.channel, o.y, o.x) = device::activate(p.activation, p.alpha, v);
}

// K: the kernel's height and width where both are known, so that the taps' loads start together; 0 for any.
template <int K>
__global__ void GPU_BOUNDS(kThreads, 4) depthwise_forward(Problem p, int size) {
  int index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= size) return;
  Position o = position(p, index);
  const int height = K ? K : p.kernel_h, width = K ? K : p.kernel_w;
  int y = o.y * p.stride_h - p.pad_top, x = o.x * p.stride_w - p.pad_left, c = p.by_multiplier.quotient(o.channel);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < height; i++) {
#pragma unroll
    for (int j = 0; j < width; j++) {
      int at_y = y + i * p.dilation_h, at_x = x + j * p.dilation_w;
      if (static_cast<unsigned>(at_y) < static_cast<unsigned>(p.in_height) &&
          static_cast<unsigned>(at_x) < static_cast<unsigned>(p.in_width))
        sum += p.x.at(o.image, c, at_y, at_x) * p.w.at(o.channel, 0, i, j);
    }
  }
  finish(p, o, sum);
}

__global__ void GPU_BOUNDS(kThreads, 4) depthwise_backward(Problem p, int size) {
  int index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= size) return;
  Position o = position(p, index);
  float sum = 0;
  for (int i = 0; i < p.kernel_h; i++) {
    int y = o.y + p.pad_top - i * p.dilation_h, at_y = p.by_stride_h.quotient(y < 0 ? 0 : y);
    if (y < 0 || at_y * p.stride_h != y || at_y >= p.in_height) continue;
    for (int j = 0; j < p.kernel_w; j++) {
      int x = o.x + p.pad_left - j * p.dilation_w, at_x = p.by_stride_w.quotient(x < 0 ? 0 : x);
      if (x < 0 || at_x * p.stride_w != x || at_x >= p.in_width) continue;
      sum += p.x.at(o.image, o.channel, at_y, at_x) * p.w.at(o.channel, 0, i, j);
    }
  }
  finish(p, o, sum);
}

struct Partial {
  float v[kThreads / WAVE];
};

// A block per weight; `out` is dy here, of `height` x `width` pixels, and `w` the result.
__global__ void GPU_BOUNDS(kThreads, 4) depthwise_sum(Problem p, int pixels) {
  GPU_SHARED(Partial, partial);
  int tap = blockIdx.x, j = tap % p.kernel_w, i = tap / p.kernel_w % p.kernel_h, c = tap / p.kernel_w / p.kernel_h;
  float sum = 0;
  for (int index = threadIdx.x; index < pixels; index += kThreads) {
    int rest = index, x = take_digit(rest, p.by_width), y = take_digit(rest, p.by_height);
    int at_y = y * p.stride_h - p.pad_top + i * p.dilation_h, at_x = x * p.stride_w - p.pad_left + j * p.dilation_w;
    if (static_cast<unsigned>(at_y) < static_cast<unsigned>(p.in_height) &&
        static_cast<unsigned>(at_x) < static_cast<unsigned>(p.in_width))
      sum += p.x.at(rest, c, at_y, at_x) * p.out.at(rest, c, y, x);
  }
  sum = wave_sum(sum);
  if (lane_id() == 0) partial.v[threadIdx.x / WAVE] = sum;
  block_sync();
  if (threadIdx.x == 0) {
    for (int k = 1; k < kThreads / WAVE; k++) sum += partial.v[k];
    p.w.at(c, 0, i, j) = sum;
  }
}

Image image(const View& v) { return {v.as<float>(), v.stride[0], v.stride[1], v.stride[2], v.stride[3]}; }

Problem problem(const View& x, const View& w, const View& out, const Geometry& g) {
  Problem p = {};
  p.x = image(x);
  p.w = image(w);
  p.out = image(out);
  int64_t sizes[] = {out.shape[0], out.shape[1], out.shape[2], out.shape[3],
                     x.shape[2],   x.shape[3],   w.shape[2],   w.shape[3]};
  int* to[] = {&p.images, &p.channels, &p.height, &p.width, &p.in_height, &p.in_width, &p.kernel_h, &p.kernel_w};
  for (int i = 0; i < 8; i++) *to[i] = static_cast<int>(sizes[i]);
  p.stride_h = static_cast<int>(g.stride_h), p.stride_w = static_cast<int>(g.stride_w);
  p.pad_top = static_cast<int>(g.pad_top), p.pad_left = static_cast<int>(g.pad_left);
  p.dilation_h = static_cast<int>(g.dilation_h), p.dilation_w = static_cast<int>(g.dilation_w);
  p.by_channels = out.shape[1], p.by_height = out.shape[2], p.by_width = out.shape[3];
  p.by_stride_h = g.stride_h, p.by_stride_w = g.stride_w;
  p.channels_last = out.stride[1] == 1 && out.stride[3] != 1;
  return p;
}

unsigned blocks(const View& v) {
  if (v.size() > INT32_MAX - kThreads)
    fail("depthwise", "an image has at most 2^31 elements", std::to_string(v.size()));
  return static_cast<unsigned>((v.size() + kThreads - 1) / kThreads);
}

}  // namespace

void depthwise(const View& x, const View& w, const View& out, const Geometry& g, const View* scale, const View* bias,
               const View* residual, int activation, float alpha, gpuStream_t stream) {
  if (out.size() == 0) return;
  Problem p = problem(x, w, out, g);
  p.by_multiplier = out.shape[1] / g.groups;
  if (scale) p.scale = scale->as<float>(), p.scale_stride = scale->stride[0];
  if (bias) p.bias = bias->as<float>(), p.bias_stride = bias->stride[0];
  if (residual) p.residual = image(*residual);
  p.activation = activation;
  p.alpha = alpha;
  auto kernel = p.kernel_h != p.kernel_w ? depthwise_forward<0>
                : p.kernel_h == 3        ? depthwise_forward<3>
                : p.kernel_h == 5        ? depthwise_forward<5>
                                         : depthwise_forward<0>;
  launch(kernel, dim3(blocks(out)), kThreads, 0, stream, p, out.size());
}

void depthwise_transpose(const View& x, const View& w, const View& out, const Geometry& g, const View* bias,
                         int activation, float alpha, gpuStream_t stream) {
  if (out.size() == 0) return;
  Problem p = problem(x, w, out, g);
  if (bias) p.bias = bias->as<float>(), p.bias_stride = bias->stride[0];
  p.activation = activation;
  p.alpha = alpha;
  launch(depthwise_backward, dim3(blocks(out)), kThreads, 0, stream, p, out.size());
}

void depthwise_weight_grad(const View& x, const View& dy, const View& dw, const Geometry& g, gpuStream_t stream) {
  blocks(dy);
  int64_t pixels = dy.shape[0] * dy.shape[2] * dy.shape[3];
  launch(depthwise_sum, dim3(static_cast<unsigned>(dw.size())), kThreads, 0, stream, problem(x, dw, dy, g), pixels);
}

}  // namespace needle::gpu
