// Direct convolution on nChw16c with physical halos, and the eager form that blocks its operands first.
#include "cpu/conv.h"

namespace needle::NEEDLE_ISA {
namespace {

NEEDLE_INLINE int64_t run_count(const Window& g, int64_t in_blocks) {
  return in_blocks * g.kernel_h * (g.dilation_w == 1 ? 1 : g.kernel_w);
}

// Without dilation the taps of one kernel row are one contiguous run of pixels.
void fill_runs(const Window& g, int64_t in_blocks, int64_t block, int64_t x_block, int64_t x_row, int64_t* runs) {
  for (int64_t ib = 0; ib < in_blocks; ib++)
    for (int64_t kh = 0; kh < g.kernel_h; kh++)
      for (int64_t kw = 0; kw < (g.dilation_w == 1 ? 1 : g.kernel_w); kw++)
        *runs++ = ib * x_block + kh * g.dilation_h * x_row + kw * g.dilation_w * block;
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
  p.x.row = p.pixels * p.x.pixel;
  p.y.row = p.pixels * p.y.pixel;
  p.residual.row = p.pixels * p.residual.pixel;
}

}  // namespace

void conv2d_pack(const conv2d_pack_args& c) {
  const View& w = c.in.weight;
  if (w.size() == 0) return;
  const int64_t groups = c.attr.groups, block = c.attr.block;
  const int64_t merged = merged_groups(groups, w.shape[1], w.shape[0] / groups, block);
  pack_weights(c.exec, Weights::of(w, groups), merged, block, c.out.packed.as<float>());
}

ConvPass conv2d_pass(const conv2d_blocked_args& c) {
  const View& x = c.in.x;
  const Window g(c.attr);
  const int64_t in_blocks = c.in.packed.shape[2], block = x.shape[4];
  int64_t* runs = scratch<int64_t>(c.exec, 2, run_count(g, in_blocks));
  fill_runs(g, in_blocks, block, x.stride[1], x.stride[2], runs);
  ConvPass p = blocked_pass(c);
  p.x.data -= g.pad_top * x.stride[2] + g.pad_left * block;
  p.x.row *= g.stride_h;
  p.x.pixel *= g.stride_w;
  p.residual = Images<const float>::of(c.in.residual);
  p.runs = runs;
  p.n_runs = run_count(g, in_blocks);
  p.length = (g.dilation_w == 1 ? g.kernel_w : 1) * block;
  if (g.kernel_h == 1 && g.kernel_w == 1) p.cut = p.n_runs * block - c.attr.channels;
  return p;
}

// channels: of a group's input.
void conv2d_blocked(const conv2d_blocked_args& c) {
  if (c.out.y.size() == 0) return;
  ConvPass p = conv2d_pass(c);
  const bool dense = p.x.row == p.pixels * p.x.pixel && p.y.row == p.pixels * p.y.pixel &&
                     (!p.residual || p.residual.row == p.pixels * p.residual.pixel);
  if (dense && c.attr.kernel_h == 1 && c.attr.kernel_w == 1) flatten(p);
  run(c.exec, p, c.in.x.size(), p.groups * p.w_group);
}

void conv2d(const conv2d_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  View w = c.in.weight;
  if (y.size() == 0) return;
  const int64_t groups = c.attr.groups, C = x.shape[1], O = w.shape[0], OH = y.shape[2], OW = y.shape[3];
  Window g(c.attr, 0, 0);
  cut_taps(w, x, y, g);
  if (is_depthwise(x, y, groups)) return depthwise_plain(c, w, g, g.pad_top, g.pad_left);
  const int64_t taps = g.kernel_h * g.kernel_w, block = C < kBlock ? C : kBlock;
  const int64_t merged = merged_groups(groups, w.shape[1], O / groups, block);
  const int64_t in_blocks = ceil_div(C / merged, block), n_runs = run_count(g, in_blocks);
  const int64_t H = reach(OH, g.stride_h, g.kernel_h, g.dilation_h),
                W = reach(OW, g.stride_w, g.kernel_w, g.dilation_w);
  const Blocking b = {block,      merged, in_blocks, ceil_div(O / merged, kBlock),     g.pad_top,
                      g.pad_left, H,      W,         taps * kBlock * in_blocks * block};
  in_batches(
      c, b, OH * OW, n_runs * sizeof(int64_t),
      [&](float* packed, void* runs) {
        pack_weights(c.exec, Weights::of(w, groups), merged, block, packed);
        fill_runs(g, in_blocks, block, H * W * block, W * block, static_cast<int64_t*>(runs));
      },
      [&](const Exec* exec, ConvPass p, void* runs, int64_t x_floats, int64_t w_floats) {
        p.x.row *= g.stride_h;
        p.x.pixel *= g.stride_w;
        p.runs = static_cast<const int64_t*>(runs);
        p.n_runs = n_runs;
        p.length = (g.dilation_w == 1 ? g.kernel_w : 1) * block;
        if (OH * OW == 1)
          join_images(p);
        else if (taps == 1 && p.x.row == OW * p.x.pixel)
          flatten(p);
        run(exec, p, x_floats, w_floats);
      });
}

}  // namespace needle::NEEDLE_ISA
