// Direct convolution on nChw16c with physical halos, and the eager form that blocks its operands first.
#include <utility>

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

// Outputs [begin, end) along an axis whose windows have the taps [first, last) inside the image.
struct Stretch {
  int64_t begin, end, first, last;
};

struct Stretches {
  static constexpr int64_t kMostTaps = 15;
  Stretch all[2 * kMostTaps + 1];  // from output to output first and last never grow
  int64_t count = 0, taps = 0;     // taps: of all outputs

  // size: of x along the axis.
  Stretches(int64_t outputs, int64_t size, int64_t stride, int64_t kernel, int64_t dilation, int64_t pad) {
    for (int64_t i = 0; i < outputs; i++) {
      const int64_t outside = pad - i * stride;  // of the window, before the image
      const int64_t first = smaller(kernel, ceil_div(larger(0, outside), dilation));
      const int64_t last = larger(first, smaller(kernel, ceil_div(larger(0, size + outside), dilation)));
      if (count == 0 || all[count - 1].first != first || all[count - 1].last != last)
        all[count++] = {i, i, first, last};
      all[count - 1].end = i + 1;
      taps += last - first;
    }
  }
};

// Windows with dilation may lie in the padding for the most part: what they would find there is not summed up then.
// height, width: of the images of x. Uses scratch 0 for as long as the pass is used.
void leave_out_padding(const Exec* exec, ConvPass& p, const Window& g, int64_t height, int64_t width) {
  constexpr double kRepays = 0.8;  // of all taps
  const ChannelBands& bands = p.runs.bands;
  if ((g.dilation_h == 1 && g.dilation_w == 1) || larger(g.kernel_h, g.kernel_w) > Stretches::kMostTaps) return;
  if (bands.count > 1 || p.lanes > kBlock) return;
  const bool joined = p.runs.of_chunk < g.kernel_h * g.kernel_w;  // the taps of a row are one run
  const Stretches rows(p.rows, height, g.stride_h, g.kernel_h, g.dilation_h, g.pad_top);
  const Stretches columns = joined ? Stretches(p.pixels, p.pixels, 1, 1, 1, 0)
                                   : Stretches(p.pixels, width, g.stride_w, g.kernel_w, g.dilation_w, g.pad_left);
  const int64_t taps_w = joined ? 1 : g.kernel_w, chunks = bands.data->chunks;
  const double inside = static_cast<double>(rows.taps) * static_cast<double>(columns.taps);
  if (inside > kRepays * static_cast<double>(p.rows * p.pixels * g.kernel_h * taps_w)) return;

  int64_t taps = 0;  // of all regions
  for (int64_t i = 0; i < rows.count; i++)
    for (int64_t j = 0; j < columns.count; j++)
      taps += (rows.all[i].last - rows.all[i].first) * (columns.all[j].last - columns.all[j].first);
  p.n_regions = rows.count * columns.count;
  Region* region =
      static_cast<Region*>(exec->scratch(0, p.n_regions * sizeof(Region) + 2 * chunks * taps * sizeof(int64_t)));
  int64_t* at = reinterpret_cast<int64_t*>(region + p.n_regions);
  p.regions = region;
  for (int64_t i = 0; i < rows.count; i++)
    for (int64_t j = 0; j < columns.count; j++) {
      const Stretch &row = rows.all[i], &column = columns.all[j];
      const int64_t n = chunks * (row.last - row.first) * (column.last - column.first);
      *region++ = {row.begin, row.end, column.begin, column.end, at, at + n, n};
      for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t h = row.first; h < row.last; h++)
          for (int64_t w = column.first; w < column.last; w++, at++) {
            const int64_t run = (chunk * g.kernel_h + h) * taps_w + w;
            at[0] = p.runs.offsets[run];
            at[n] = run * p.runs.length * p.lanes;
          }
      at += n;
    }
}

// Pixels [first, last) of every row.
ConvPass stretch_of(ConvPass p, int64_t first, int64_t last) {
  p.x.data += first * p.x.pixel;
  p.y.data += first * p.y.pixel;
  if (p.residual) p.residual.data += first * p.residual.pixel;
  p.pixels = p.last_pixels = last - first;
  return p;
}

// Long rows are cut where what their windows read, in all channels, would not stay in L2 while blocks of outputs pass
// by.
void run(const Exec* exec, const ConvPass& p, const Window& g, int64_t x_floats, int64_t w_floats) {
  constexpr int64_t kMost = 128 << 10, kLeast = 4 * kTileRows;  // floats of windows, pixels of a stretch
  const int64_t rows = p.images * p.rows, windows = x_floats / rows * g.kernel_h / g.stride_h;
  const bool whole = p.regions || windows <= 2 * kMost || p.pixels <= 2 * kLeast;
  const int64_t stretches = whole ? 1 : smaller(ceil_div(windows, kMost), p.pixels / kLeast);
  const double flops = 2. * rows * p.pixels * w_floats;
  const ConvSplit s = conv_split(exec, p, flops / stretches, x_floats / stretches, w_floats);
  parallel_for(exec, stretches * s.row_tasks * s.block_tasks, [&](int64_t t) {
    const int64_t of_stretch = s.row_tasks * s.block_tasks, stretch = t / of_stretch;
    const ConvPass part =
        stretches == 1 ? p : stretch_of(p, p.pixels * stretch / stretches, p.pixels * (stretch + 1) / stretches);
    const int64_t row0 = t % of_stretch / s.block_tasks * s.rows;
    each_band(part, s, t % s.block_tasks, [&](const ChannelBand& band, int64_t block0, int64_t block1) {
      conv_part(part, row0, smaller(row0 + s.rows, rows), band, block0, block1);
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

// Images that share most of their channels (frames that a window over the depth reads) pass by one after the other for
// each row, so that those stay in L2.
void rows_first(ConvPass& p) {
  std::swap(p.images, p.rows);
  std::swap(p.x.image, p.x.row);
  std::swap(p.y.image, p.y.row);
  std::swap(p.residual.image, p.residual.row);
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
  if (dense && c.attr.kernel_h == 1 && c.attr.kernel_w == 1)
    flatten(p);
  else
    leave_out_padding(c.exec, p, Window(c.attr), c.in.x.shape[2], c.in.x.shape[3]);
  const bool overlap = c.in.x.shape[0] > 1 && c.in.x.stride[0] < c.in.x.shape[1] * c.in.x.stride[1];
  if (overlap && !p.regions && p.last_pixels == p.pixels) rows_first(p);
  run(c.exec, p, Window(c.attr), c.in.x.size(), c.in.packed.size());
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
  const int64_t joined = OH * OW == 1 ? 1 : joined_taps(g.kernel_w, g.stride_w, g.dilation_w);
  const Form form = form_of(channels, from.taps, joined);
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
        else
          leave_out_padding(exec, p, g, x.shape[2], x.shape[3]);
        run(exec, p, g, x_floats, w_floats);
      });
}

}  // namespace needle::NEEDLE_ISA
