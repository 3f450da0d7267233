// Direct convolution on nChw16c with physical halos, and the eager form that blocks its operands first.
#include "cpu/conv.h"

namespace needle::NEEDLE_ISA {
namespace {

// Over images whose blocks of channels and rows lie x_block and x_row apart. In whole blocks without dilation the taps
// of a kernel row are one run of pixels.
Runs runs_of(const Channels& c, const Form& form, const Window& g, int64_t x_block, int64_t x_row, void* room) {
  const bool rows = g.dilation_w == 1 && form.terms == c.block && !form.picks();
  const int64_t joined = rows ? g.kernel_w : form.joined();
  ChannelBand* bands = static_cast<ChannelBand*>(room);
  int64_t *offsets = reinterpret_cast<int64_t*>(bands + c.blocks()), *at = offsets;
  const ChannelBands all = bands_of(c, form.step, bands);
  each_chunk(all, form.step, c.block, x_block, [&](int64_t from) {
    for (int64_t kh = 0; kh < g.kernel_h; kh++)
      for (int64_t kw = 0; kw < g.kernel_w; kw += joined)
        *at++ = from + kh * g.dilation_h * x_row + kw * g.dilation_w * c.block;
  });
  const int64_t taps = g.kernel_h * g.kernel_w;
  return {all, offsets, taps / joined, form.picks() ? form.terms : form.terms * joined, taps == 1 && !form.picks()};
}

void run(const Exec* exec, const ConvPass& p, int64_t x_floats, int64_t w_floats) {
  const double flops = 2. * p.images * p.rows * p.pixels * w_floats;
  const ConvSplit s = conv_split(exec, p, flops, x_floats, w_floats);
  const int64_t rows = p.images * p.rows;
  parallel_for(exec, s.row_tasks * s.block_tasks, [&](int64_t t) {
    const int64_t row0 = t / s.block_tasks * s.rows;
    each_band(p, s, t % s.block_tasks, [&](const ChannelBand& band, int64_t block0, int64_t block1) {
      conv_part(p, row0, smaller(row0 + s.rows, rows), band, block0, block1);
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
  const View& packed = c.out.packed;
  const Weights from = Weights::of(w, c.attr.groups);
  pack_weights(c.exec, from, {from.groups, from.inputs, from.outputs, c.attr.block}, Form::of(packed, c.attr.block),
               packed.as<float>());
}

ConvPass conv2d_pass(const conv2d_blocked_args& c) {
  const View &x = c.in.x, &w = c.in.packed;
  const Window g(c.attr);
  const Channels channels = channels_of(c);
  const Form form = Form::of(w, x.shape[4]);
  ConvPass p = blocked_pass(c);
  void* room = c.exec->scratch(2, bands_bytes(channels, form, w.shape[0], g.kernel_h * g.kernel_w));
  p.runs = runs_of(channels, form, g, x.stride[1], x.stride[2], room);
  p.x.data -= g.pad_top * x.stride[2] + g.pad_left * x.shape[4];
  p.x.row *= g.stride_h;
  p.x.pixel *= g.stride_w;
  p.residual = Images<const float>::of(c.in.residual);
  return p;
}

void conv2d_blocked(const conv2d_blocked_args& c) {
  if (c.out.y.size() == 0) return;
  ConvPass p = conv2d_pass(c);
  const bool dense = p.x.row == p.pixels * p.x.pixel && p.y.row == p.pixels * p.y.pixel &&
                     (!p.residual || p.residual.row == p.pixels * p.residual.pixel);
  if (dense && c.attr.kernel_h == 1 && c.attr.kernel_w == 1) flatten(p);
  run(c.exec, p, c.in.x.size(), c.in.packed.size());
}

void conv2d(const conv2d_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  View w = c.in.weight;
  if (y.size() == 0) return;
  const int64_t C = x.shape[1], OH = y.shape[2], OW = y.shape[3];
  Window g(c.attr, 0, 0);
  cut_taps(w, x, y, g);
  if (is_depthwise(x, y, c.attr.groups)) return depthwise_plain(c, w, g, g.pad_top, g.pad_left);
  const Weights from = Weights::of(w, c.attr.groups);
  const Channels channels = {from.groups, from.inputs, from.outputs, C < kBlock ? C : kBlock};
  const Form form = form_of(channels, OH * OW == 1 ? 1 : joined_taps(g.kernel_w, g.stride_w, g.dilation_w));
  const int64_t block = channels.block, panels = panels_of(channels, form.step);
  const int64_t H = reach(OH, g.stride_h, g.kernel_h, g.dilation_h),
                W = reach(OW, g.stride_w, g.kernel_w, g.dilation_w);
  const Blocking b = {block, g.pad_top, g.pad_left, H, W, form, from.taps, panels * form.chunk_floats(from.taps)};
  Runs runs;
  in_batches(
      c, b, OH * OW, bands_bytes(channels, form, panels, from.taps),
      [&](float* packed, void* room) {
        pack_weights(c.exec, from, channels, form, packed);
        runs = runs_of(channels, form, g, H * W * block, W * block, room);
      },
      [&](const Exec* exec, ConvPass p, int64_t x_floats, int64_t w_floats) {
        p.runs = runs;
        p.x.row *= g.stride_h;
        p.x.pixel *= g.stride_w;
        if (OH * OW == 1)
          join_images(p);
        else if (from.taps == 1 && p.x.row == OW * p.x.pixel)
          flatten(p);
        run(exec, p, x_floats, w_floats);
      });
}

}  // namespace needle::NEEDLE_ISA
