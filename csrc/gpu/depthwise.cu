// Depthwise convolution, its transposition and weight gradient, for images of any strides: bound by memory, so a thread
// per result or, of channels-last images, per four; neighbours in memory are neighbours among the threads.
#include <algorithm>

#include "gpu/conv.h"
#include "gpu/image.cuh"

namespace needle::gpu {
namespace {

constexpr int kThreads = 256;

using Window = device::WindowOf<int>;

template <class T>
struct ProblemOf {
  Image<T> x, out, residual;  // residual.data may be null
  Image<float> w;             // (channel, any, i, j)
  const float *scale = nullptr, *bias = nullptr;
  int64_t scale_stride = 0, bias_stride = 0;
  Window window;
  int activation = kNone;
  float alpha = 0;
  Divisor by_multiplier, by_stride_h, by_stride_w;
};
using Problem = ProblemOf<float>;

template <class T>
__device__ __forceinline__ bool inside(const Image<T>& image, int y, int x) {
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

// How blocks of depthwise_quads share the work: each has `columns` Quads of channels, one of so many `chunks`, and goes
// through pixels, `rows` at a time.
struct Share {
  int columns, chunks, rows, pixels;
};

// Four channels a thread. A block's weights, and a scale and bias of every channel behind them, lie in shared memory.
// K: a row of the kernel, whose taps are loaded together, or 0 for any.
template <int K>
__global__ void GPU_BOUNDS(kThreads, 3) depthwise_quads(ProblemOf<Quad> p, Share share) {
  const Window& g = p.window;
  const int taps = g.kernel_h * g.kernel_w, first = blockIdx.x % share.chunks * share.columns;
  const int columns = device::lesser(share.columns, p.x.channels - first);
  float* weights = dynamic_shared<float>();  // (tap, channel)
  for (int n = threadIdx.x; n < 4 * columns * (taps + 2); n += kThreads) {
    const int channel = n / (taps + 2), tap = n - channel * (taps + 2), c = 4 * first + channel;
    const int i = tap / g.kernel_w, j = tap - i * g.kernel_w;
    float v = tap == taps ? 1.0f : 0.0f;
    if (tap < taps) v = p.w.at({c, 0, i, j});
    if (tap == taps && p.scale) v = p.scale[c * p.scale_stride];
    if (tap > taps && p.bias) v = p.bias[c * p.bias_stride];
    weights[tap * 4 * columns + channel] = v;
  }
  block_sync();
  const int row = threadIdx.x / share.columns, column = threadIdx.x - row * share.columns;
  if (column >= columns || row >= share.rows) return;
  const Quad* weight = dynamic_shared<const Quad>() + column;
#pragma unroll 1
  for (int pixel = blockIdx.x / share.chunks * share.rows + row; pixel < share.pixels;
       pixel += gridDim.x / share.chunks * share.rows) {
    const int line = p.out.by_width.quotient(pixel), image = p.out.by_height.quotient(line);
    const Spot o = {image, first + column, line - image * p.out.height, pixel - line * p.out.width};
    const int y = o.y * g.stride_h - g.pad_top, x = o.x * g.stride_w - g.pad_left;
    Quad sum = 0;
#pragma unroll 1
    for (int i = 0; i < g.kernel_h; i++) {
      const int at_y = y + i * g.dilation_h;
      auto tap = [&](int j) { return read(weight + (i * g.kernel_w + j) * columns); };
      if constexpr (K > 0) {
        Quad values[K];
#pragma unroll
        for (int j = 0; j < K; j++)
          if (inside(p.x, at_y, x + j * g.dilation_w)) values[j] = p.x.get(o, at_y, x + j * g.dilation_w);
#pragma unroll
        for (int j = 0; j < K; j++)
          if (inside(p.x, at_y, x + j * g.dilation_w)) sum += values[j] * tap(j);
      } else {
        for (int j = 0; j < g.kernel_w; j++)
          if (inside(p.x, at_y, x + j * g.dilation_w)) sum += p.x.get(o, at_y, x + j * g.dilation_w) * tap(j);
      }
    }
    sum = sum * read(weight + taps * columns) + read(weight + (taps + 1) * columns);
    if (p.residual.data) sum += p.residual.get(o, o.y, o.x);
    write(&p.out.at(o), lanewise([&](float v) { return device::activate(p.activation, p.alpha, v); }, sum));
  }
}

template <class T = float>
ProblemOf<T> problem(const View& x, const View& w, const View& out, const Geometry& g, const Epilogue& e = {}) {
  ProblemOf<T> p;
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

// Whether four channels a thread could do it and did.
bool by_quads(const View& x, const View& w, const View& out, const Geometry& g, const Epilogue& e, gpuStream_t stream) {
  if (!quads(x) || !quads(out) || (e.residual && !quads(*e.residual)) || out.shape[1] != x.shape[1]) return false;
  const int64_t taps = w.shape[2] * w.shape[3], channels = out.shape[1] / 4;
  const int64_t most = 1024 / (taps + 2);  // so that three blocks have 16 KiB of shared memory each
  if (most < 8 || out.size() > INT32_MAX) return false;
  Share s;
  const int64_t columns = std::min<int64_t>(most, 64);
  s.chunks = static_cast<int>((channels + columns - 1) / columns);
  s.columns = static_cast<int>((channels + s.chunks - 1) / s.chunks);
  s.rows = static_cast<int>(kThreads) / s.columns;
  s.pixels = static_cast<int>(out.size() / out.shape[1]);
  const int needed = (s.pixels + s.rows - 1) / s.rows, fitting = 8 * device_units() / s.chunks + 1;
  const int64_t width = w.shape[3];
  auto kernel = width == 3   ? depthwise_quads<3>
                : width == 5 ? depthwise_quads<5>
                : width == 7 ? depthwise_quads<7>
                             : depthwise_quads<0>;
  launch(kernel, dim3(static_cast<unsigned>(std::min(needed, fitting) * s.chunks)), kThreads,
         (taps + 2) * s.columns * sizeof(Quad), stream, problem<Quad>(x, w, out, g, e), s);
  return true;
}

}  // namespace

void depthwise(const View& x, const View& w, const View& out, const Geometry& g, const Epilogue& e,
               gpuStream_t stream) {
  if (out.size() == 0 || by_quads(x, w, out, g, e, stream)) return;
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
