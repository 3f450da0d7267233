// Direct convolution on nChw16c with physical halos, and the eager form that blocks its operands first.
#include "cpu/conv.h"

namespace needle::NEEDLE_ISA {
namespace {

struct Geometry {
  int64_t kernel_h, kernel_w, stride_h, stride_w, pad_top, pad_left, dilation_h, dilation_w;
};

NEEDLE_INLINE int64_t run_count(const Geometry& g, int64_t in_blocks) {
  return in_blocks * g.kernel_h * (g.dilation_w == 1 ? 1 : g.kernel_w);
}

// Without dilation the taps of one kernel row are one contiguous run of pixels.
void fill_runs(const Geometry& g, int64_t in_blocks, int64_t block, int64_t x_block, int64_t x_row, int64_t* runs) {
  for (int64_t ib = 0; ib < in_blocks; ib++)
    for (int64_t kh = 0; kh < g.kernel_h; kh++)
      for (int64_t kw = 0; kw < (g.dilation_w == 1 ? 1 : g.kernel_w); kw++)
        *runs++ = ib * x_block + kh * g.dilation_h * x_row + kw * g.dilation_w * block;
}

// Packs output blocks [first, last) of all groups: [g][ob][ib][kh][kw][b][16], zeros between merged groups and in
// tails.
void pack(const View& w, int64_t groups, int64_t merged, int64_t block, float* dst, int64_t first, int64_t last) {
  const int64_t O = w.shape[0], I = w.shape[1], taps_h = w.shape[2], taps_w = w.shape[3], out_per_group = O / groups;
  const int64_t merged_in = I * groups / merged, merged_out = O / merged;
  const int64_t OB = ceil_div(merged_out, kBlock), IB = ceil_div(merged_in, block);
  const int64_t panel = IB * taps_h * taps_w * block * kBlock;
  for (int64_t at = first; at < last; at++) {
    float* d = dst + at * panel;
    const int64_t g = at / OB, ob = at % OB;
    if (merged == groups) {
      const float* s = w.as<const float>() + (g * merged_out + ob * kBlock) * w.stride[0];
      for (int64_t ib = 0; ib < IB; ib++)
        for (int64_t kh = 0; kh < taps_h; kh++)
          for (int64_t kw = 0; kw < taps_w; kw++, d += block * kBlock)
            pack_tap(s + ib * block * w.stride[1] + kh * w.stride[2] + kw * w.stride[3], w.stride[0], w.stride[1],
                     smaller(kBlock, merged_out - ob * kBlock), smaller(block, I - ib * block), block, d);
      continue;
    }
    std::memset(d, 0, panel * 4);
    for (int64_t lane = 0; lane < kBlock; lane++) {
      const int64_t o_in_group = ob * kBlock + lane, o = g * merged_out + o_in_group;
      if (o_in_group >= merged_out) break;
      const int64_t i0 = o / out_per_group * I - g * merged_in;  // first input of this output within the merged group
      const float* s = w.as<const float>() + o * w.stride[0];
      for (int64_t i = 0; i < I; i++) {
        const int64_t ib = (i0 + i) / block, b = (i0 + i) % block;
        float* to = d + (ib * taps_h * taps_w * block + b) * kBlock + lane;
        for (int64_t kh = 0; kh < taps_h; kh++)
          for (int64_t kw = 0; kw < taps_w; kw++)
            to[(kh * taps_w + kw) * block * kBlock] = s[i * w.stride[1] + kh * w.stride[2] + kw * w.stride[3]];
      }
    }
  }
}

void pack_parallel(const Exec* exec, const View& w, int64_t groups, int64_t merged, int64_t block, float* dst) {
  const int64_t blocks = merged * ceil_div(w.shape[0] / merged, kBlock);
  const int64_t tasks = smaller(blocks, task_count(exec, 20. * w.size()));
  parallel_for(exec, tasks,
               [&](int64_t t) { pack(w, groups, merged, block, dst, blocks * t / tasks, blocks * (t + 1) / tasks); });
}

void run(const Exec* exec, const ConvPass& p, int64_t x_floats, int64_t w_floats) {
  const double flops = 2. * p.images * p.rows * p.pixels * w_floats;
  const ConvSplit s = conv_split(exec, p, flops, x_floats, w_floats);
  const int64_t rows = p.images * p.rows;
  parallel_for(exec, s.row_tasks * s.block_tasks, [&](int64_t t) {
    const int64_t row0 = t / s.block_tasks * s.rows;
    each_group(p, s, t % s.block_tasks, [&](int64_t group, int64_t block0, int64_t block1) {
      conv_part(p, row0, smaller(row0 + s.rows, rows), group, block0, block1);
    });
  });
}

// A 1x1 convolution over dense images has no rows: cut the pixels into stretches that full tiles divide.
void flatten(ConvPass& p) {
  const int64_t total = p.rows * p.pixels, stretch = kTileRows * (V::N == 16 ? 4 : 10);
  p.pixels = smaller(total, stretch);
  p.rows = ceil_div(total, p.pixels);
  p.last_pixels = total - (p.rows - 1) * p.pixels;
  p.x_row = p.pixels * p.x_pixel;
  p.y_row = p.pixels * p.y_pixel;
  p.r_row = p.pixels * p.r_pixel;
}

}  // namespace

void conv2d_pack(const conv2d_pack_args& c) {
  const View& w = c.in.weight;
  if (w.size() == 0) return;
  const int64_t groups = c.attr.groups, block = c.attr.block;
  pack_parallel(c.exec, w, groups, merged_groups(groups, w.shape[1], w.shape[0] / groups, block), block,
                c.out.packed.as<float>());
}

ConvPass conv2d_pass(const conv2d_blocked_args& c) {
  const View &x = c.in.x, &w = c.in.packed, &y = c.out.y;
  const Geometry g = {c.attr.kernel_h, c.attr.kernel_w, c.attr.stride_h,   c.attr.stride_w,
                      c.attr.pad_top,  c.attr.pad_left, c.attr.dilation_h, c.attr.dilation_w};
  const int64_t in_blocks = w.shape[2], block = x.shape[4];
  int64_t* runs = static_cast<int64_t*>(c.exec->scratch(2, run_count(g, in_blocks) * sizeof(int64_t)));
  fill_runs(g, in_blocks, block, x.stride[1], x.stride[2], runs);

  ConvPass p = {};
  p.images = y.shape[0];
  p.rows = y.shape[2];
  p.pixels = p.last_pixels = y.shape[3];
  p.groups = c.attr.groups;
  p.blocks = w.shape[1];
  p.x = x.as<const float>() - g.pad_top * x.stride[2] - g.pad_left * block;
  p.x_image = x.stride[0];
  p.x_group = in_blocks * x.stride[1];
  p.x_row = g.stride_h * x.stride[2];
  p.x_pixel = g.stride_w * block;
  p.w = w.as<const float>();
  p.w_block = w.shape[2] * w.shape[3];
  p.w_group = p.blocks * p.w_block;
  p.y = y.as<float>();
  p.y_image = y.stride[0];
  p.y_block = y.stride[1];
  p.y_row = y.stride[2];
  p.y_pixel = y.stride[3];
  p.bias = c.in.bias.as<const float>();
  if (const Optional& r = c.in.residual) {
    p.residual = r.as<const float>();
    p.r_image = r.stride[0];
    p.r_block = r.stride[1];
    p.r_row = r.stride[2];
    p.r_pixel = r.stride[3];
  }
  p.runs = runs;
  p.n_runs = run_count(g, in_blocks);
  p.length = (g.dilation_w == 1 ? g.kernel_w : 1) * block;
  if (g.kernel_h == 1 && g.kernel_w == 1) p.cut = p.n_runs * block - c.attr.channels;
  p.activation = static_cast<int>(c.attr.activation);
  p.alpha = static_cast<float>(c.attr.alpha);
  return p;
}

// channels: of a group's input.
void conv2d_blocked(const conv2d_blocked_args& c) {
  if (c.out.y.size() == 0) return;
  ConvPass p = conv2d_pass(c);
  const bool dense = p.x_row == p.pixels * p.x_pixel && p.y_row == p.pixels * p.y_pixel &&
                     (!p.residual || p.r_row == p.pixels * p.r_pixel);
  if (dense && c.attr.kernel_h == 1 && c.attr.kernel_w == 1) flatten(p);
  run(c.exec, p, c.in.x.size(), p.groups * p.w_group);
}

void conv2d(const conv2d_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  View w = c.in.weight;
  if (y.size() == 0) return;
  const int64_t groups = c.attr.groups, C = x.shape[1], O = w.shape[0], OH = y.shape[2], OW = y.shape[3];
  const bool depthwise = groups == C && C == O && C > 1;
  Geometry g = {
      0, 0, c.attr.stride_h, c.attr.stride_w, c.attr.pad_top, c.attr.pad_left, c.attr.dilation_h, c.attr.dilation_w};
  cut_taps(w, x.shape[2], x.shape[3], OH, OW, g.stride_h, g.stride_w, g.dilation_h, g.dilation_w, &g.pad_top,
           &g.pad_left);
  g.kernel_h = w.shape[2];
  g.kernel_w = w.shape[3];
  const int64_t block = C < kBlock && !depthwise ? C : kBlock;
  const int64_t merged = depthwise ? 1 : merged_groups(groups, w.shape[1], O / groups, block);
  const int64_t XB = ceil_div(C, block), in_blocks = ceil_div(C / merged, block);
  const int64_t OB = ceil_div(O / merged, kBlock), YB = merged * OB;  // of one group, of all
  const int64_t H = (OH - 1) * g.stride_h + (g.kernel_h - 1) * g.dilation_h + 1;
  const int64_t W = (OW - 1) * g.stride_w + (g.kernel_w - 1) * g.dilation_w + 1;
  const int64_t panel =
      depthwise ? g.kernel_h * g.kernel_w * kBlock : in_blocks * g.kernel_h * g.kernel_w * block * kBlock;

  // Shared by all images: weights, bias, runs. Per image: blocked x and y.
  const int64_t w_floats = YB * panel, n_runs = run_count(g, in_blocks);
  float* packed = static_cast<float*>(c.exec->scratch(2, (w_floats + YB * kBlock) * 4 + n_runs * 8));
  float* bias = packed + w_floats;
  int64_t* runs = reinterpret_cast<int64_t*>(bias + YB * kBlock);
  const int64_t x_floats = XB * H * W * block, y_floats = YB * OH * OW * kBlock, x_room = ceil_div(x_floats, 16) * 16;

  if (depthwise)
    depthwise_pack_weights(w, packed);
  else
    pack_parallel(c.exec, w, groups, merged, block, packed);
  std::memset(bias, 0, YB * kBlock * 4);
  if (c.in.bias)
    for (int64_t o = 0; o < O; o++) bias[o] = c.in.bias.as<const float>()[o * c.in.bias.stride[0]];
  fill_runs(g, in_blocks, block, H * W * block, W * block, runs);

  const bool many = w_floats < x.shape[0] * x_floats;  // else tasks stream parts of the weights
  const double flops = 2. * x.shape[0] * OH * OW * w_floats;
  each_batch(c.exec, x.shape[0], x_room + y_floats, flops, many,
             [&](const Exec* exec, int64_t first, int64_t images, float* xb) {
               float* yb = xb + images * x_room;
               block_images(exec, x, first, images, block, g.pad_top, g.pad_left, H, W, xb, x_room);
               if (depthwise) {
                 depthwise_pass(exec, {images,
                                       XB,
                                       OH,
                                       OW,
                                       g.kernel_h,
                                       g.kernel_w,
                                       g.stride_h,
                                       g.stride_w,
                                       g.dilation_h,
                                       g.dilation_w,
                                       xb,
                                       x_room,
                                       H * W * kBlock,
                                       W * kBlock,
                                       packed,
                                       yb,
                                       y_floats,
                                       OH * OW * kBlock,
                                       OW * kBlock,
                                       bias,
                                       nullptr,
                                       0,
                                       0,
                                       0,
                                       static_cast<int>(c.attr.activation),
                                       static_cast<float>(c.attr.alpha)});
               } else {
                 ConvPass p = {};
                 p.images = images;
                 p.rows = OH;
                 p.pixels = p.last_pixels = OW;
                 p.groups = merged;
                 p.blocks = OB;
                 p.x = xb;
                 p.x_image = x_room;
                 p.x_group = in_blocks * H * W * block;
                 p.x_row = g.stride_h * W * block;
                 p.x_pixel = g.stride_w * block;
                 p.w = packed;
                 p.w_block = panel;
                 p.w_group = OB * panel;
                 p.y = yb;
                 p.y_image = y_floats;
                 p.y_block = OH * OW * kBlock;
                 p.y_row = OW * kBlock;
                 p.y_pixel = kBlock;
                 p.bias = bias;
                 p.runs = runs;
                 p.n_runs = n_runs;
                 p.length = (g.dilation_w == 1 ? g.kernel_w : 1) * block;
                 p.activation = static_cast<int>(c.attr.activation);
                 p.alpha = c.attr.alpha;
                 if (OH * OW == 1) {  // images of one pixel are the pixels of one image
                   p.images = 1;
                   p.pixels = p.last_pixels = images;
                   p.x_pixel = p.x_image;
                   p.y_pixel = p.y_image;
                 } else if (g.kernel_h == 1 && g.kernel_w == 1 && p.x_row == OW * p.x_pixel) {
                   flatten(p);
                 }
                 run(exec, p, images * x_floats, w_floats);
               }
               unblock_images(exec, yb, images, y, first);
             });
}

}  // namespace needle::NEEDLE_ISA
