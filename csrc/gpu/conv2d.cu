// Convolution, its weight gradient and transposed convolution as implicit GEMM, for images of any strides (NCHW, NHWC).
// Depthwise ones go to depthwise.cu.
#include "gpu/conv.h"
#include "gpu/team.cuh"
#include "gpu/vendor/choose.h"

namespace needle::gpu {
namespace {

// Pixel (y, x) of the result meets input pixel (y, x) * step + first + (i, j) * tap under weight (i, j). All
// convolutions are this one, on suitable views: w is (O, C / groups, KH, KW), and a group of channels has weights
// `w_group` further.
struct Correlation {
  View x, w, out;
  int64_t groups, w_group, step_h, step_w, first_h = 0, first_w = 0, tap_h = 1, tap_w = 1;
};

int32_t narrow(int64_t v) { return static_cast<int32_t>(v); }

bool quads(std::initializer_list<int64_t> strides, const void* data) {
  for (int64_t s : strides) {
    if (s % 4 != 0) return false;
  }
  return aligned(data);
}

bool channels_last(const View& v) { return v.stride[1] == 1 && v.shape[1] > 1 && v.stride[3] != 1; }

// Pixels (n, y, x) of an image as an axis; one step along y and x is `step` input pixels.
Axis pixel_axis(const View& v, int64_t height, int64_t width, int64_t step_h, int64_t step_w) {
  Axis a;
  a.digits = {height, width};
  a.stride[0] = narrow(v.stride[0]);
  a.stride[1] = narrow(step_h * v.stride[2]);
  a.stride[2] = narrow(step_w * v.stride[3]);
  a.y_step[1] = narrow(step_h);
  a.x_step[1] = narrow(step_w);
  return a;
}

// Channels and weights (c, i, j), in the order (i, j, c) when channels are neighbours in memory.
struct Taps {
  int64_t channels, height, width;
  bool last;
  int64_t size() const { return channels * height * width; }
  Digits digits() const { return last ? Digits{width, channels} : Digits{height, width}; }
  void strides(int64_t c, int64_t i, int64_t j, int (&to)[3]) const {
    to[0] = narrow(last ? i : c), to[1] = narrow(last ? j : i), to[2] = narrow(last ? c : j);
  }
  // As an axis of a view whose axes are (any, c, i, j).
  Axis axis(const View& v, int64_t tap_h, int64_t tap_w) const {
    Axis a;
    a.digits = digits();
    strides(v.stride[1], tap_h * v.stride[2], tap_w * v.stride[3], a.stride);
    return a;
  }
};

// The image (x) as the matrix pixels x taps; its y and x run over the padded image.
Operand image_operand(const Correlation& c, const Taps& taps) {
  const View& x = c.x;
  Operand a = {};
  a.data = x.as<float>() + c.first_h * x.stride[2] + c.first_w * x.stride[3];
  a.height = narrow(x.shape[2]), a.width = narrow(x.shape[3]);
  a.y = narrow(c.first_h), a.x = narrow(c.first_w);
  a.row = pixel_axis(x, c.out.shape[2], c.out.shape[3], c.step_h, c.step_w);
  a.depth = taps.axis(x, c.tap_h, c.tap_w);
  int at = taps.last ? 0 : 1;
  a.depth.y_step[at] = narrow(c.tap_h);
  a.depth.x_step[at] = narrow(c.tap_w);
  a.by_row = !taps.last;
  int64_t pixels = c.out.shape[2] * c.out.shape[3];
  if (taps.last) {
    a.wide = x.stride[1] == 1 && taps.channels % 4 == 0 && quads({x.stride[0], x.stride[2], x.stride[3]}, x.data);
  } else {  // neighbours in an image whose every pixel is read once
    a.wide = taps.height * taps.width == 1 && x.shape[2] * x.shape[3] == pixels && x.shape[3] == c.out.shape[3] &&
             c.step_h == 1 && c.step_w == 1 && c.first_h == 0 && c.first_w == 0 && x.stride[3] == 1 &&
             x.stride[2] == x.shape[3] && pixels % 4 == 0 && quads({x.stride[0], x.stride[1]}, x.data);
  }
  return a;
}

// A matrix without an outside.
Operand whole(const View& v, Axis row, Axis depth) {
  Operand a = {};
  a.data = v.as<float>();
  a.row = row;
  a.depth = depth;
  a.height = a.width = 1;
  for (Axis* axis : {&a.row, &a.depth}) axis->y_step[0] = axis->y_step[1] = axis->x_step[0] = axis->x_step[1] = 0;
  return a;
}

Axis channel_axis(const View& v, int axis) {
  Axis a;
  a.stride[0] = narrow(v.stride[axis]);
  return a;
}

Operand weight_operand(const Correlation& c, const Taps& taps) {
  const View& w = c.w;
  Operand a = whole(w, channel_axis(w, 0), taps.axis(w, 1, 1));
  a.by_row = w.stride[0] == 1 && w.shape[0] > 1;
  if (a.by_row) {
    a.wide = w.shape[0] / c.groups % 4 == 0 && quads({w.stride[1], w.stride[2], w.stride[3], c.w_group}, w.data);
  } else if (taps.last) {
    a.wide =
        w.stride[1] == 1 && taps.channels % 4 == 0 && quads({w.stride[0], w.stride[2], w.stride[3], c.w_group}, w.data);
  } else {
    a.wide = w.stride[3] == 1 && w.stride[2] == taps.width && w.stride[1] == taps.height * taps.width &&
             taps.size() % 4 == 0 && quads({w.stride[0], c.w_group}, w.data);
  }
  return a;
}

// The results' places: rows are pixels when channels are neighbours in memory, else channels.
Place place(const View& v, bool pixels_first) {
  Place p = {};
  p.data = v.as<float>();
  int (&pixel)[3] = pixels_first ? p.row : p.column, (&channel)[3] = pixels_first ? p.column : p.row;
  pixel[0] = narrow(v.stride[0]), pixel[1] = narrow(v.stride[2]), pixel[2] = narrow(v.stride[3]);
  channel[0] = narrow(v.stride[1]);
  return p;
}

bool columns_are_quads(const View& v, bool pixels_first, int64_t per_group) {
  if (pixels_first)
    return v.stride[1] == 1 && per_group % 4 == 0 && quads({v.stride[0], v.stride[2], v.stride[3]}, v.data);
  return v.stride[3] == 1 && v.stride[2] == v.shape[3] && v.shape[2] * v.shape[3] % 4 == 0 &&
         quads({v.stride[0], v.stride[1]}, v.data);
}

void check_size(const char* op, int64_t n) {
  if (n > INT32_MAX - 256) fail(op, "pixels, channels and taps are below 2^31 - 256", std::to_string(n));
}

void correlate(const char* op, const Correlation& c, const Epilogue& e, gpuStream_t stream) {
  const View& out = c.out;
  if (out.size() == 0) return;
  for (const View* v : {&c.x, &c.w, &out, e.residual ? e.residual : &out}) check_span(op, *v, 0);
  Taps taps = {c.w.shape[1], c.w.shape[2], c.w.shape[3], channels_last(c.x)};
  int64_t pixels = out.shape[0] * out.shape[2] * out.shape[3], per_group = out.shape[1] / c.groups;
  check_size(op, pixels);
  check_size(op, taps.size());
  bool pixels_first = channels_last(out);
  Operand image = image_operand(c, taps), weights = weight_operand(c, taps);
  Digits pixel = {out.shape[2], out.shape[3]};
  Gemm p = {};
  p.batch.rank = 1;
  p.batch.shape[0] = narrow(c.groups);
  int64_t image_step = taps.channels * c.x.stride[1], residual_step = 0;
  image.wide = image.wide && image_step % 4 == 0;
  p.wide = columns_are_quads(out, pixels_first, per_group);
  if (e.residual) {
    View contiguous = *e.residual;  // its elements are read one by one, so alignment does not matter
    contiguous.data = nullptr;
    p.wide = p.wide && columns_are_quads(contiguous, pixels_first, per_group);
    p.residual = place(*e.residual, pixels_first);
    residual_step = per_group * e.residual->stride[1];
  }
  p.a = pixels_first ? image : weights;
  p.b = pixels_first ? weights : image;
  p.out = place(out, pixels_first);
  (pixels_first ? p.row : p.column) = pixel;
  p.batch.a[0] = pixels_first ? image_step : c.w_group;
  p.batch.b[0] = pixels_first ? c.w_group : image_step;
  p.batch.out[0] = per_group * out.stride[1];
  p.batch.residual[0] = residual_step;
  p.batch.channels = per_group;
  auto per_channel = [&](const View* v) {
    if (!v) return PerChannel{};
    return PerChannel{v->as<float>(), pixels_first ? 0 : v->stride[0], pixels_first ? v->stride[0] : 0};
  };
  p.scale = per_channel(e.scale);
  p.bias = per_channel(e.bias);
  p.m = narrow(pixels_first ? pixels : per_group);
  p.n = narrow(pixels_first ? per_group : pixels);
  p.k = narrow(c.x.shape[0] ? taps.size() : 0);
  p.per_split = p.k ? p.k : 1;
  p.activation = e.activation;
  p.alpha = e.alpha;
  run_gemm(op, p, true, e.precision, stream);
}

void convolve_here(const char* op, const View& x, const View& w, const View& out, const Geometry& g, const Epilogue& e,
                   gpuStream_t stream) {
  if (g.groups > 1 && w.shape[1] == 1)  // bound by memory: exact in every precision
    return depthwise(x, w, out, g, e, stream);
  correlate(op,
            {x, w, out, g.groups, w.shape[0] / g.groups * w.stride[0], g.stride_h, g.stride_w, -g.pad_top, -g.pad_left,
             g.dilation_h, g.dilation_w},
            e, stream);
}

// Ours or a library's, whichever was faster.
template <class Ours>
void by_library(vendor::Kind kind, const View& x, const View& w, const View& out, const Geometry& g, const Epilogue& e,
                const Exec* exec, const Ours& ours) {
  if (x.size() == 0 || w.size() == 0 || out.size() == 0 || !vendor::wanted(kind)) return ours();
  auto copied = [](const View* v) { return v ? *v : View{}; };
  vendor::choose({kind, x, w, out, copied(e.scale), copied(e.bias), copied(e.residual), g.stride_h, g.stride_w,
                  g.pad_top, g.pad_left, g.dilation_h, g.dilation_w, g.groups, e.activation, e.precision, e.alpha},
                 exec, ours);
}

void convolve(const char* op, const View& x, const View& w, const View& out, const Geometry& g, const Epilogue& e,
              const Exec* exec) {
  by_library(vendor::kConv2d, x, w, out, g, e, exec,
             [&] { convolve_here(op, x, w, out, g, e, static_cast<gpuStream_t>(exec->stream)); });
}

// Element n of the result is the sum over parts, in an order that does not change; zero without any.
struct AddParts {
  const float* parts;
  float* out;
  int64_t size;
  int count;
  template <class Team>
  __device__ void operator()(const Team& team, int64_t n, bool exists) const {
    float sum = 0;
#pragma unroll 4
    for (int i = team.first; i < count && exists; i += Team::step) sum += parts[i * size + n];
    sum = team.sum(sum);
    if (exists && team.first == 0) out[n] = sum;
  }
};

const View* given(const Optional& v) { return v ? &v : nullptr; }

template <class Args>
Epilogue epilogue_of(const Args& c) {
  return {nullptr, given(c.in.bias), nullptr, static_cast<int>(c.attr.activation), static_cast<float>(c.attr.alpha)};
}

// The first tap of those that output pixels with remainder `phase` meet, and their number and distance.
struct Phase {
  int64_t tap, count, apart;
  Phase(int64_t phase, int64_t pad, int64_t kernel, int64_t stride, int64_t dilation) : tap(0), apart(1) {
    while (apart * dilation % stride != 0) apart++;
    while (tap < apart && (phase + pad - tap * dilation) % stride != 0) tap++;
    count = tap < apart && tap < kernel ? (kernel - tap + apart - 1) / apart : 0;
  }
};

// Every phase of output pixels is a convolution of stride 1 with its own taps, which run backwards over the input.
void convolve_transposed_here(const char* op, const View& x, const View& w, const View& out, const Geometry& g,
                              const Epilogue& e, gpuStream_t stream) {
  if (g.groups > 1 && g.groups == x.shape[1] && w.shape[1] == 1) return depthwise_transpose(x, w, out, g, e, stream);
  const int64_t in = w.shape[0] / g.groups;
  for (int64_t y0 = 0; y0 < g.stride_h && y0 < out.shape[2]; y0++) {
    for (int64_t x0 = 0; x0 < g.stride_w && x0 < out.shape[3]; x0++) {
      Phase h(y0, g.pad_top, w.shape[2], g.stride_h, g.dilation_h),
          v(x0, g.pad_left, w.shape[3], g.stride_w, g.dilation_w);
      Correlation part = {x, w, out, g.groups, in * w.stride[0], 1, 1};
      part.first_h = (y0 + g.pad_top - h.tap * g.dilation_h) / g.stride_h;
      part.first_w = (x0 + g.pad_left - v.tap * g.dilation_w) / g.stride_w;
      part.tap_h = -h.apart * g.dilation_h / g.stride_h;
      part.tap_w = -v.apart * g.dilation_w / g.stride_w;
      part.w.data = w.as<float>() + h.tap * w.stride[2] + v.tap * w.stride[3];
      part.w.shape[0] = w.shape[1] * g.groups, part.w.shape[1] = h.count && v.count ? in : 0;
      part.w.stride[0] = w.stride[1], part.w.stride[1] = w.stride[0];
      part.w.shape[2] = h.count, part.w.shape[3] = v.count;
      part.w.stride[2] *= h.apart, part.w.stride[3] *= v.apart;
      part.out.data = out.as<float>() + y0 * out.stride[2] + x0 * out.stride[3];
      part.out.shape[2] = (out.shape[2] - y0 + g.stride_h - 1) / g.stride_h;
      part.out.shape[3] = (out.shape[3] - x0 + g.stride_w - 1) / g.stride_w;
      part.out.stride[2] *= g.stride_h, part.out.stride[3] *= g.stride_w;
      correlate(op, part, e, stream);
    }
  }
}

void convolve_transposed(const char* op, const View& x, const View& w, const View& out, const Geometry& g,
                         const Epilogue& e, const Exec* exec) {
  if (out.size() == 0) return;
  by_library(vendor::kConvTranspose2d, x, w, out, g, e, exec,
             [&] { convolve_transposed_here(op, x, w, out, g, e, static_cast<gpuStream_t>(exec->stream)); });
}

// x (N, C, H, W) and dy (N, O, OH, OW) to a dw (O, C / groups, KH, KW) without gaps: dy as channels x pixels times x as
// taps x pixels. Parts of the pixels are summed by blocks of their own, then added up.
void weight_grad_here(const char* op, const View& x, const View& dy, const View& dw, const Geometry& g, int precision,
                      const Exec* exec) {
  gpuStream_t stream = static_cast<gpuStream_t>(exec->stream);
  if (dw.size() == 0) return;
  if (g.groups > 1 && dw.shape[1] == 1 && dw.shape[0] == x.shape[1]) return depthwise_weight_grad(x, dy, dw, g, stream);
  for (const View* v : {&x, &dy, &dw}) check_span(op, *v, 0);
  Taps taps = {dw.shape[1], dw.shape[2], dw.shape[3], channels_last(x)};
  int64_t pixels = dy.shape[0] * dy.shape[2] * dy.shape[3], per_group = dw.shape[0] / g.groups;
  check_size(op, pixels);
  check_size(op, taps.size());
  Gemm p = {};
  p.a = whole(dy, channel_axis(dy, 1), pixel_axis(dy, dy.shape[2], dy.shape[3], 1, 1));
  p.a.by_row = channels_last(dy);
  p.a.wide = columns_are_quads(dy, p.a.by_row, per_group) && per_group * dy.stride[1] % 4 == 0;
  Correlation forward = {x,          dw,         dy,          g.groups,     0,           g.stride_h,
                         g.stride_w, -g.pad_top, -g.pad_left, g.dilation_h, g.dilation_w};
  p.b = image_operand(forward, taps);
  std::swap(p.b.row, p.b.depth);
  p.b.by_row = !p.b.by_row;
  p.b.wide = p.b.wide && taps.channels * x.stride[1] % 4 == 0;
  p.out.data = dw.as<float>();
  p.out.row[0] = narrow(dw.stride[0]);
  p.column = taps.digits();
  taps.strides(dw.stride[1], dw.stride[2], dw.stride[3], p.out.column);
  p.batch.rank = 1;
  p.batch.shape[0] = narrow(g.groups);
  p.batch.a[0] = per_group * dy.stride[1];
  p.batch.b[0] = taps.channels * x.stride[1];
  p.batch.out[0] = per_group * dw.stride[0];
  p.m = narrow(per_group);
  p.n = narrow(taps.size());
  p.k = narrow(pixels);
  int64_t tiles = (p.m + 63) / 64 * ((p.n + 63) / 64) * g.groups, parts = (2 * device_units() + tiles - 1) / tiles;
  int64_t per_part = (pixels + parts - 1) / parts, least = 256;  // of k, so that a block's sums repay being added
  p.per_split = narrow((per_part < least ? least : per_part + 15) / 16 * 16);
  AddParts add = {nullptr, dw.as<float>(), dw.size(), (p.k + p.per_split - 1) / p.per_split};
  if (add.count > 1) {
    p.out.data = static_cast<float*>(exec->scratch(0, static_cast<size_t>(add.count) * dw.size() * sizeof(float)));
    p.part = dw.size();
    add.parts = p.out.data;
  }
  if (pixels) run_gemm(op, p, true, precision, stream);
  if (add.count != 1) launch_teams<ColumnTeam>(add, dw.size(), stream);
}

template <class Args>
void weight_grad(const char* op, const Args& c, int precision) {
  const View &x = c.in.x, &dy = c.in.dy, &dw = c.out.dweight;
  int64_t low, high;
  dw.span(&low, &high);
  if (dw.size() && high - low + 1 != dw.size()) fail(op, "the result has no gaps", "strides");
  const Geometry g(c.attr);
  Epilogue e;
  e.precision = precision;
  by_library(vendor::kConv2dWeightGrad, x, dy, dw, g, e, c.exec,
             [&] { weight_grad_here(op, x, dy, dw, g, precision, c.exec); });
}

}  // namespace

void conv2d(const conv2d_args& c) {
  convolve("conv2d", c.in.x, c.in.weight, c.out.y, Geometry(c.attr), epilogue_of(c), c.exec);
}

// y = activation(conv(x, w) * scale + bias + residual), scale and bias per channel.
void conv2d_fused(const conv2d_fused_args& c) {
  Epilogue e = epilogue_of(c);
  e.scale = given(c.in.scale);
  e.residual = given(c.in.residual);
  e.precision = static_cast<int>(c.attr.precision);
  convolve("conv2d_fused", c.in.x, c.in.weight, c.out.y, Geometry(c.attr), e, c.exec);
}

void conv_transpose2d(const conv_transpose2d_args& c) {
  convolve_transposed("conv_transpose2d", c.in.x, c.in.weight, c.out.y, Geometry(c.attr), epilogue_of(c), c.exec);
}

void conv_transpose2d_fused(const conv_transpose2d_fused_args& c) {
  Epilogue e = epilogue_of(c);
  e.precision = static_cast<int>(c.attr.precision);
  convolve_transposed("conv_transpose2d_fused", c.in.x, c.in.weight, c.out.y, Geometry(c.attr), e, c.exec);
}

void conv2d_weight_grad(const conv2d_weight_grad_args& c) { weight_grad("conv2d_weight_grad", c, kExact); }

void conv2d_weight_grad_fused(const conv2d_weight_grad_fused_args& c) {
  weight_grad("conv2d_weight_grad", c, static_cast<int>(c.attr.precision));
}

}  // namespace needle::gpu
