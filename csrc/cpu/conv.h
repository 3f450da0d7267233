// What the convolution kernels share: passes of register tiles over rows of pixels, and the blocked layout.
#pragma once
#include <cstring>

#include "cpu/bands.h"
#include "math/image.h"

namespace needle::NEEDLE_ISA {

using Window = WindowOf<int64_t>;

// Where images lie: the first pixel, and how far it is to the next image, stretch of channels, row and pixel.
template <class T>
struct Images {
  T* data = nullptr;
  int64_t image = 0, channels = 0, row = 0, pixel = 0;

  NEEDLE_INLINE Images of(const View& v) { return {v.as<T>(), v.stride[0], v.stride[1], v.stride[2], v.stride[3]}; }
  T* at(int64_t n, int64_t c, int64_t y) const { return data + n * image + c * channels + y * row; }
  explicit operator bool() const { return data != nullptr; }
};

// Where in x the terms of bands lie.
struct Runs {
  ChannelBands bands;
  const int64_t* offsets;    // of every chunk that they read, band by band
  int64_t of_chunk, length;  // runs of a chunk, terms of a run
  bool cut;                  // leave out what the last chunk of a band has beyond it
};

// Output pixels whose windows meet the same taps inside the image, and the runs of these; padding is left out.
struct Region {
  int64_t row0, row1, pixel0, pixel1;
  const int64_t *runs, *panels;
  int64_t n_runs;
};

// Rows of output pixels that all read the input through the same runs: a whole convolution, or one phase of a
// transposed one. A row is `pixels` long, the last row of each image `last_pixels`. Stretches of channels are blocks;
// x includes the padding.
struct ConvPass {
  int64_t images, rows, pixels, last_pixels;
  Images<const float> x;
  const float* w;
  Images<float> y;
  const float* bias;
  Images<const float> residual;
  Runs runs;
  int64_t chunk_floats;             // of packed weights for all phases
  int64_t phase_floats;             // of those, for what comes before this phase
  int64_t lanes;                    // floats of a term
  const Region* regions = nullptr;  // of every image, where much of the windows is padding; they take one band
  int64_t n_regions = 0;
  int activation;
  float alpha;
};

// A pass over pixels of images like `y` with weights packed in `form`.
template <class Attr>
ConvPass pass_over(const View& y, const Form& form, int64_t taps, const float* w, const float* bias, const Attr& a) {
  ConvPass p = {};
  p.images = y.shape[0];
  p.rows = y.shape[2];
  p.pixels = p.last_pixels = y.shape[3];
  p.w = w;
  p.lanes = form.lanes;
  p.chunk_floats = form.chunk_floats(taps);
  p.bias = bias;
  p.activation = static_cast<int>(a.activation);
  p.alpha = static_cast<float>(a.alpha);
  return p;
}

// Of a kernel of blocked images.
template <class Args>
Channels channels_of(const Args& c) {
  return {c.attr.groups, c.attr.inputs, c.attr.outputs, c.in.x.shape[4]};
}

// Room for the bands of a convolution, followed by what runs need at most.
NEEDLE_INLINE size_t bands_bytes(const Channels& c, const Form& form, int64_t panels, int64_t taps) {
  const int64_t chunks = c.groups == 1 ? ceil_div(c.inputs, form.step) : panels;
  return c.blocks() * sizeof(ChannelBand) + chunks * taps * sizeof(int64_t);
}

// The operands of a kernel of blocked images and packed weights, as if its window had one pixel.
template <class Args>
ConvPass blocked_pass(const Args& c) {
  const View &x = c.in.x, &w = c.in.packed, &y = c.out.y;
  const Form form = Form::of(w, x.shape[4]);
  ConvPass p =
      pass_over(y, form, w.shape[1] * form.joined(), w.as<const float>(), c.in.bias.template as<const float>(), c.attr);
  p.x = {x.as<const float>(), x.stride[0], x.stride[1], x.stride[2], x.shape[4]};
  p.y = Images<float>::of(y);
  return p;
}

ConvPass conv2d_pass(const conv2d_blocked_args& c);  // its runs lie in scratch 2

// Tasks of a convolution: stretches of rows (over all images) times stretches of output blocks.
struct ConvSplit {
  int64_t row_tasks, block_tasks, rows, units;  // rows and units of a task
  int64_t step;                                 // blocks of a unit, except at the end of a band
};

// Late layers have more weights than input: there each task streams its own part of the weights.
NEEDLE_INLINE ConvSplit conv_split(const Exec* exec, const ConvPass& p, double flops, int64_t x_floats,
                                   int64_t w_floats) {
  ConvSplit s;
  int64_t widest = 0, units = 0;
  const ChannelBands& bands = p.runs.bands;
  for (const ChannelBand* b = bands.data; b < bands.data + bands.count; b++) widest = larger(widest, b->blocks);
  s.step = p.pixels <= kWideRows && widest >= kWideBlocks ? kWideBlocks : kTileBlocks;
  for (const ChannelBand* b = bands.data; b < bands.data + bands.count; b++) units += ceil_div(b->blocks, s.step);
  const int64_t rows = p.images * p.rows;
  int64_t tasks = task_count(exec, flops);
  if (w_floats < x_floats) tasks = larger(tasks, x_floats / (128 << 10));  // input of a task stays in L2
  s.block_tasks = w_floats > x_floats ? smaller(tasks, units) : 1;
  s.row_tasks = s.block_tasks >= 4 * exec->threads ? 1 : smaller(ceil_div(tasks, s.block_tasks), rows);
  if (s.block_tasks == 1) s.block_tasks = smaller(larger(1, tasks / s.row_tasks), units);
  s.rows = s.block_tasks == 1 ? fair_share(exec, rows, s.row_tasks) : ceil_div(rows, s.row_tasks);
  s.units = s.row_tasks == 1 ? fair_share(exec, units, s.block_tasks) : ceil_div(units, s.block_tasks);
  s.row_tasks = ceil_div(rows, s.rows);
  s.block_tasks = ceil_div(units, s.units);
  return s;
}

// One stretch of rows [row0, row1) of images x rows for output blocks [block0, block1) of a band.
static inline void conv_part(const ConvPass& p, int64_t row0, int64_t row1, const ChannelBand& band, int64_t block0,
                             int64_t block1) {
  if (row0 == row1) return;
  const int64_t panel = band.chunks * p.chunk_floats, n_runs = band.chunks * p.runs.of_chunk;
  const int64_t* runs = p.runs.offsets + band.runs * p.runs.of_chunk;
  const float* w = p.w + band.panels * p.chunk_floats + band.chunks * p.phase_floats;
  Tile t = {};
  t.a_m = p.x.pixel;
  t.a_k = 1;
  t.length = p.runs.length;
  t.b_n = panel;
  t.b_k = p.lanes;
  t.picks = p.lanes > kBlock ? p.lanes / kBlock - 1 : 0;
  t.dots = p.lanes < kBlock ? p.lanes : 0;
  t.c_m = p.y.pixel;
  t.c_n = p.y.channels;
  t.r_m = p.residual.pixel;
  t.r_n = p.residual.channels;
  t.alpha = p.alpha;
  // Whether weights come from further away than L2: they are many, or used once.
  const bool fetches = panel * band.blocks > kStays || row1 - row0 == p.images * p.rows;
  const Region whole = {0, p.rows, 0, p.pixels, runs, nullptr, n_runs};
  const Region *first = p.regions ? p.regions : &whole, *end = first + (p.regions ? p.n_regions : 1);
  for (const Region* region = first; region < end; region++) {
    const int64_t pixels = region->pixel1 - region->pixel0, of_region = region->n_runs;
    for (int64_t block = block0, n; block < block1; block += n) {
      n = t.picks ? 1 : tile_blocks(pixels, block1 - block);
      const int64_t channel_block = band.block + block, run_floats = p.runs.length * p.lanes;
      const int64_t parts = row1 - row0 == 1 ? 1 : ceil_div(of_region * run_floats * n * 4, kPanelBytes);
      const int64_t chain = t.dots ? kChain * V::N : kChain;
      const int64_t per_part =
          ceil_div(of_region, larger(1, smaller(of_region, larger(parts, of_region * p.runs.length / chain))));
      int64_t run = 0;
      do {
        t.runs = region->runs + run;
        t.panels = region->panels ? region->panels + run : nullptr;
        t.n_runs = smaller(per_part, of_region - run);
        t.b = w + block * panel + (region->panels ? 0 : run * run_floats);
        t.cut = p.runs.cut && run + t.n_runs == of_region ? band.beyond : 0;
        t.accumulate = run > 0;
        t.bias = p.bias && run == 0 ? p.bias + channel_block * kBlock : nullptr;
        t.activation = run + per_part >= of_region ? p.activation : 0;
        const float* next = run + per_part < of_region ? t.b + per_part * run_floats
                            : block + n < band.blocks  ? w + (block + n) * panel
                                                       : nullptr;
        t.fetch = ceil_div(t.n_runs * t.length, row1 - row0);
        t.ahead = next && fetches && !region->panels ? next - t.b : 0;
        for (int64_t row = row0; row < row1; row++) {
          const int64_t image = row / p.rows, y = row - image * p.rows, x = region->pixel0;
          if (y < region->row0 || y >= region->row1) continue;
          t.a = p.x.at(image, 0, y) + x * t.a_m;
          t.c = p.y.at(image, channel_block, y) + x * t.c_m;
          t.residual = p.residual && run == 0 ? p.residual.at(image, channel_block, y) + x * t.r_m : nullptr;
          tiles(t, static_cast<int>(n), !p.regions && y == p.rows - 1 ? p.last_pixels : pixels);
          if (t.ahead) t.ahead += t.fetch * t.b_k;
        }
        run += per_part;
      } while (run < of_region);
    }
  }
}

// The part of a split's task that lies in each band: f(band, block0, block1).
template <class F>
NEEDLE_INLINE void each_band(const ConvPass& p, const ConvSplit& s, int64_t block_task, const F& f) {
  int64_t unit = block_task * s.units, end = unit + s.units;
  const ChannelBands& bands = p.runs.bands;
  for (const ChannelBand* band = bands.data; end > 0 && band < bands.data + bands.count; band++) {
    const int64_t units = ceil_div(band->blocks, s.step);
    if (unit < units) f(*band, unit * s.step, smaller(smaller(units, end) * s.step, band->blocks));
    unit = larger(0, unit - units);
    end -= units;
  }
}

// f(offset) for every chunk that bands read, band by band: how far its first channel lies from channel 0 in x.
template <class F>
NEEDLE_INLINE void each_chunk(const ChannelBands& bands, int64_t step, int64_t block, int64_t x_block, const F& f) {
  for (const ChannelBand* band = bands.data; band < bands.data + bands.count; band++)
    for (int64_t i = 0; i < band->chunks; i++) {
      const int64_t channel = (band->chunk + i) * step;
      f(channel / block * x_block + channel % block);
    }
}

// Images [first, first + images) of planes x (N, C, H, W) into dense blocked images of H x W pixels, `room` floats
// apart: the first pixel of x lies at (top, left), the next ones step_h and step_w further, zeros are around them, and
// what falls outside is cut off.
void block_images(const Exec* exec, const View& x, int64_t first, int64_t images, int64_t block, int64_t top,
                  int64_t left, int64_t H, int64_t W, float* dst, int64_t room, int64_t step_h = 1, int64_t step_w = 1);
// The reverse for dense blocks of 16, into images [first, first + images) of y (N, C, H, W) whose pixels are evenly
// spaced.
void unblock_images(const Exec* exec, const float* src, int64_t images, const View& y, int64_t first);

// Input positions between the first and the last that `outputs` in a row read, both included.
NEEDLE_INLINE int64_t reach(int64_t outputs, int64_t stride, int64_t kernel, int64_t dilation) {
  return (outputs - 1) * stride + (kernel - 1) * dilation + 1;
}

// Cuts the kernel rows and columns of `w`, and of the window, that meet nothing but padding, and the padding that they
// need. The convolution goes from images like `in` to images like `out`.
void cut_taps(View& w, const View& in, const View& out, Window& window);

constexpr int64_t kBatchFloats = 128 << 10;  // images that a thread works on at a time stay in its L2

// Calls f(exec, first, images, room) for batches of images with `floats` of room for each. Where they are `many`, every
// task has its own: what a thread writes it also reads, without a way through the caches of other cores.
template <class F>
void each_batch(const Exec* exec, int64_t images, int64_t floats, double flops, bool many, const F& f) {
  if (!many || images < 2 * exec->threads) {
    const int64_t batch = larger(1, smaller(images, (int64_t{4} << 20) / floats));
    float* room = scratch<float>(exec, 3, batch * floats);
    for (int64_t n = 0; n < images; n += batch) f(exec, n, smaller(batch, images - n), room);
    return;
  }
  const Exec alone = {1, exec->parallel, exec->scratch, nullptr};
  const int64_t tasks = smaller(images, task_count(exec, flops));
  const int64_t batch = larger(1, smaller(ceil_div(images, tasks), kBatchFloats / floats));
  parallel_for(exec, tasks, [&](int64_t t) {
    float* room = scratch<float>(exec, 1, batch * floats);
    const int64_t end = images * (t + 1) / tasks;
    for (int64_t n = images * t / tasks; n < end; n += batch) f(&alone, n, smaller(batch, end - n), room);
  });
}

// How plain images are blocked and weights packed for a convolution.
struct Blocking {
  int64_t block;
  int64_t top, left, height, width;  // of the blocked input: where x begins in it, and its size
  Form form;
  int64_t taps, w_floats;
  int64_t step_h = 1, step_w = 1;  // from one pixel of x to the next
};

// A convolution of plain images in batches: pack(weights, more) fills what all of them share, weights and `more` bytes;
// then run(exec, pass, x_floats, w_floats) for every batch. Every weight meets `meets` pixels of an image.
template <class Args, class Pack, class Run>
void in_batches(const Args& c, const Blocking& b, int64_t meets, int64_t more, const Pack& pack, const Run& run) {
  const View &x = c.in.x, &y = c.out.y;
  const Optional& given = c.in.bias;
  const int64_t N = x.shape[0], O = y.shape[1], pixels = y.shape[2] * y.shape[3], out_blocks = ceil_div(O, kBlock);
  const int64_t w_floats = b.w_floats, plane = b.height * b.width * b.block;
  float* packed = scratch<float>(c.exec, 2, w_floats + out_blocks * kBlock + ceil_div(more, sizeof(float)));
  float *bias = packed + w_floats, *rest = bias + out_blocks * kBlock;
  pack(packed, static_cast<void*>(rest));
  std::memset(bias, 0, out_blocks * kBlock * 4);
  if (given)
    for (int64_t o = 0; o < O; o++) bias[o] = given.as<const float>()[o * given.stride[0]];

  const int64_t x_floats = ceil_div(x.shape[1], b.block) * plane, y_floats = out_blocks * pixels * kBlock;
  const int64_t x_room = ceil_div(x_floats, 16) * 16;
  const bool many = w_floats < N * x_floats;  // else tasks stream parts of the weights
  each_batch(c.exec, N, x_room + y_floats, 2. * N * meets * w_floats, many,
             [&](const Exec* exec, int64_t first, int64_t images, float* xb) {
               float* yb = xb + images * x_room;
               block_images(exec, x, first, images, b.block, b.top, b.left, b.height, b.width, xb, x_room, b.step_h,
                            b.step_w);
               ConvPass p = pass_over(y, b.form, b.taps, packed, bias, c.attr);
               p.images = images;
               p.x = {xb, x_room, plane, b.width * b.block, b.block};
               p.y = {yb, y_floats, pixels * kBlock, y.shape[3] * kBlock, kBlock};
               run(exec, p, images * x_floats, w_floats);
               unblock_images(exec, yb, images, y, first);
             });
}

// Images of one pixel as the pixels of one image.
NEEDLE_INLINE void join_images(ConvPass& p) {
  p.pixels = p.last_pixels = p.images;
  p.images = 1;
  p.x.pixel = p.x.image;
  p.y.pixel = p.y.image;
}

struct DepthwisePass {
  int64_t images, blocks, rows, pixels;
  Window window;
  Images<const float> x;  // includes the padding
  const float* w;
  Images<float> y;
  const float* bias;
  Images<const float> residual;
  int activation;
  float alpha;
  int64_t frames = 1;  // that a window reads, their blocks of channels one after the other
};
DepthwisePass depthwise_pass_of(const depthwise_blocked_args& c);
void depthwise_pass(const Exec* exec, const DepthwisePass& p);
// Rows [first, last) of all: those of the first block of the first image, of its second block, and so on.
void depthwise_rows(const DepthwisePass& p, int64_t first, int64_t last);
void depthwise_pack_weights(const Exec* exec, const View& w, float* dst);

// Whether a convolution of plain images has a filter of its own for every channel.
NEEDLE_INLINE bool is_depthwise(const View& x, const View& y, int64_t groups) {
  return groups == x.shape[1] && groups == y.shape[1] && groups > 1;
}

// Such a convolution with filters w: its window lies on x as it is blocked, `step_h` and `step_w` from pixel to pixel.
template <class Args>
void depthwise_plain(const Args& c, const View& w, const Window& window, int64_t top, int64_t left, int64_t step_h = 1,
                     int64_t step_w = 1) {
  const View& y = c.out.y;
  const int64_t blocks = ceil_div(y.shape[1], kBlock), OH = y.shape[2], OW = y.shape[3];
  const int64_t H = reach(OH, window.stride_h, window.kernel_h, window.dilation_h),
                W = reach(OW, window.stride_w, window.kernel_w, window.dilation_w);
  const int64_t taps = window.kernel_h * window.kernel_w;
  in_batches(
      c, {kBlock, top, left, H, W, {1, 1, kBlock}, taps, blocks * taps * kBlock, step_h, step_w}, OH * OW, 0,
      [&](float* packed, void*) { depthwise_pack_weights(c.exec, w, packed); },
      [&](const Exec* exec, const ConvPass& p, int64_t, int64_t) {
        depthwise_pass(exec, {p.images, blocks, OH, OW, window, p.x, p.w, p.y, p.bias, {}, p.activation, p.alpha});
      });
}

}  // namespace needle::NEEDLE_ISA
