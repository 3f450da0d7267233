// Depthwise convolution, its transposition and weight gradient, for images of any strides: bound by memory, so a thread
// per result, neighbours in memory being neighbours among the threads. Taps and weights come from the caches.
#include "gpu/conv.h"
#include "gpu/image.cuh"

namespace needle::gpu {
namespace {

constexpr int kThreads = 256;

using Window = device::WindowOf<int>;

struct Problem {
  Image<float> x, w, out, residual;  // w: (channel, any, i, j); residual.data may be null
  const float *scale = nullptr, *bias = nullptr;
  int64_t scale_stride = 0, bias_stride = 0;
  Window window;
  int activation = kNone;
  float alpha = 0;
  Divisor by_multiplier, by_stride_h, by_stride_w;
};

__device__ __forceinline__ bool inside(const Image<float>& image, int y, int x) {
  return static_cast<unsigned>(y) < static_cast<unsigned>(image.height) &&
         static_cast<unsigned>(x) < static_cast<unsigned>(image.width);
}

__device__ __forceinline__ void finish(const Problem& p, const Spot& o, float v) {
  if (p.scale) v *= p.scale[o.channel * p.scale_stride];
  if (p.bias) v += p.bias[o.channel * p.bias_stride];
  if (p.residual.data) v += p.residual.at(o);
  p.out.at(o) = device::activate(p.activation, p.alpha, v);
}

// K: the kernel's height and width where both are known, so that the taps' loads start together; 0 for any.
template <int K>
__global__ void GPU_BOUNDS(kThreads, 4) depthwise_forward(Problem p, int size) {
  int index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= size) return;
  const Spot o = p.out.spot(index);
  const Window& g = p.window;
  const int height = K ? K : g.kernel_h, width = K ? K : g.kernel_w;
  int y = o.y * g.stride_h - g.pad_top, x = o.x * g.stride_w - g.pad_left;
  const Spot from = {o.image, p.by_multiplier.quotient(o.channel), 0, 0};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < height; i++) {
#pragma unroll
    for (int j = 0; j < width; j++) {
      int at_y = y + i * g.dilation_h, at_x = x + j * g.dilation_w;
      if (inside(p.x, at_y, at_x)) sum += p.x.at(from, at_y, at_x) * p.w.at({o.channel, 0, i, j});
    }
  }
  finish(p, o, sum);
}

__global__ void GPU_BOUNDS(kThreads, 4) depthwise_backward(Problem p, int size) {
  int index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= size) return;
  const Spot o = p.out.spot(index);
  const Window& g = p.window;
  float sum = 0;
  for (int i = 0; i < g.kernel_h; i++) {
    int y = o.y + g.pad_top - i * g.dilation_h, at_y = p.by_stride_h.quotient(y < 0 ? 0 : y);
    if (y < 0 || at_y * g.stride_h != y || at_y >= p.x.height) continue;
    for (int j = 0; j < g.kernel_w; j++) {
      int x = o.x + g.pad_left - j * g.dilation_w, at_x = p.by_stride_w.quotient(x < 0 ? 0 : x);
      if (x < 0 || at_x * g.stride_w != x || at_x >= p.x.width) continue;
      sum += p.x.at(o, at_y, at_x) * p.w.at({o.channel, 0, i, j});
    }
  }
  finish(p, o, sum);
}

// A team per weight; `out` is dy here, and `w` the result.
struct WeightGrad {
  Problem p;
  int pixels;  // of all images in dy
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t n, bool) const {
    const Window& g = p.window;
    int tap = static_cast<int>(n), j = tap % g.kernel_w, i = tap / g.kernel_w % g.kernel_h;
    int c = tap / g.kernel_w / g.kernel_h;
    float sum = 0;
    for (int index = team.first; index < pixels; index += Team::step) {
      int row = p.out.by_width.quotient(index), x = index - row * p.out.width;
      int image = p.out.by_height.quotient(row), y = row - image * p.out.height;
      int at_y = y * g.stride_h - g.pad_top + i * g.dilation_h, at_x = x * g.stride_w - g.pad_left + j * g.dilation_w;
      const Spot at = {image, c, y, x};
      if (inside(p.x, at_y, at_x)) sum += p.x.at(at, at_y, at_x) * p.out.at(at);
    }
    sum = team.sum(sum);
    if (team.first == 0) p.w.at({c, 0, i, j}) = sum;
  }
};

Problem problem(const View& x, const View& w, const View& out, const Geometry& g, const Epilogue& e = {}) {
  Problem p;
  p.x = x, p.w = w, p.out = out;
  if (e.residual) p.residual = *e.residual;
  if (e.scale) p.scale = e.scale->as<float>(), p.scale_stride = e.scale->stride[0];
  if (e.bias) p.bias = e.bias->as<float>(), p.bias_stride = e.bias->stride[0];
  p.window = Window(g, w.shape[2], w.shape[3]);
  p.activation = e.activation;
  p.alpha = e.alpha;
  p.by_multiplier = out.shape[1] / g.groups;
  p.by_stride_h = g.stride_h, p.by_stride_w = g.stride_w;
  return p;
}

unsigned blocks(const View& v) {
  if (v.size() > INT32_MAX - kThreads)
    fail("depthwise", "an image has at most 2^31 elements", std::to_string(v.size()));
  return static_cast<unsigned>((v.size() + kThreads - 1) / kThreads);
}

}  // namespace

void depthwise(const View& x, const View& w, const View& out, const Geometry& g, const Epilogue& e,
               gpuStream_t stream) {
  if (out.size() == 0) return;
  const Problem p = problem(x, w, out, g, e);
  auto kernel = p.window.kernel_h != p.window.kernel_w ? depthwise_forward<0>
                : p.window.kernel_h == 3               ? depthwise_forward<3>
                : p.window.kernel_h == 5               ? depthwise_forward<5>
                                                       : depthwise_forward<0>;
  launch(kernel, dim3(blocks(out)), kThreads, 0, stream, p, out.size());
}

void depthwise_transpose(const View& x, const View& w, const View& out, const Geometry& g, const Epilogue& e,
                         gpuStream_t stream) {
  if (out.size() == 0) return;
  launch(depthwise_backward, dim3(blocks(out)), kThreads, 0, stream, problem(x, w, out, g, e), out.size());
}

void depthwise_weight_grad(const View& x, const View& dy, const View& dw, const Geometry& g, gpuStream_t stream) {
  blocks(dy);
  const int64_t pixels = dy.shape[0] * dy.shape[2] * dy.shape[3];
  launch_teams<BlockTeam>(WeightGrad{problem(x, dw, dy, g), static_cast<int>(pixels)}, dw.size(), stream);
}

}  // namespace needle::gpu
