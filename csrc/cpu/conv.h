// What the convolution kernels share: passes of register tiles over rows of pixels, and the blocked layout.
#pragma once
#include <cstring>

#include "cpu/tile.h"

namespace needle::NEEDLE_ISA {

// Rows of output pixels that all read the input through the same runs: a whole convolution, or one phase of a
// transposed one. A row is `pixels` long, the last row of each image `last_pixels`. Input pointers already include the
// padding.
struct ConvPass {
  int64_t images, rows, pixels, last_pixels, groups, blocks;  // blocks: of 16 output channels, per group
  const float* x;
  int64_t x_image, x_group, x_row, x_pixel;
  const float* w;
  int64_t w_group, w_block;
  float* y;
  int64_t y_image, y_block, y_row, y_pixel;
  const float* bias;
  const float* residual;
  int64_t r_image, r_block, r_row, r_pixel;
  const int64_t* runs;
  int64_t n_runs, length;
  int64_t cut;  // terms that the last run lacks
  int activation;
  float alpha;
};

ConvPass conv2d_pass(const conv2d_blocked_args& c);  // its runs lie in scratch 2

// Tasks of a convolution: stretches of rows (over all images) times stretches of output blocks (over all groups).
struct ConvSplit {
  int64_t row_tasks, block_tasks, rows, units;  // rows and units of a task
  int64_t step, per_group;                      // a unit is `step` blocks, a group has `per_group` of them
};

// Late layers have more weights than input: there each task streams its own part of the weights.
NEEDLE_INLINE ConvSplit conv_split(const Exec* exec, const ConvPass& p, double flops, int64_t x_floats,
                                   int64_t w_floats) {
  ConvSplit s;
  s.step = p.pixels <= kWideRows && p.blocks >= kWideBlocks ? kWideBlocks : kTileBlocks;
  s.per_group = ceil_div(p.blocks, s.step);
  const int64_t rows = p.images * p.rows, units = p.groups * s.per_group;
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

// One stretch of rows [row0, row1) of images x rows for output blocks [block0, block1) of one group.
static inline void conv_part(const ConvPass& p, int64_t row0, int64_t row1, int64_t group, int64_t block0,
                             int64_t block1) {
  Tile t = {};
  t.a_m = p.x_pixel;
  t.a_k = 1;
  t.length = p.length;
  t.b_n = p.w_block;
  t.b_k = kBlock;
  t.c_m = p.y_pixel;
  t.c_n = p.y_block;
  t.r_m = p.r_pixel;
  t.r_n = p.r_block;
  t.alpha = p.alpha;
  for (int64_t block = block0, n; block < block1; block += n) {
    n = tile_blocks(p.pixels, block1 - block);
    const int64_t channel_block = group * p.blocks + block, run_floats = p.length * kBlock;
    const int64_t panels = row1 - row0 == 1 ? 1 : ceil_div(p.n_runs * run_floats * n * 4, kPanelBytes);
    const int64_t chunks = larger(1, smaller(p.n_runs, larger(panels, p.n_runs * p.length / kChain)));
    const int64_t per_chunk = ceil_div(p.n_runs, chunks);
    int64_t run = 0;
    do {
      t.runs = p.runs + run;
      t.n_runs = smaller(per_chunk, p.n_runs - run);
      t.b = p.w + group * p.w_group + block * p.w_block + run * run_floats;
      t.cut = run + t.n_runs == p.n_runs ? p.cut : 0;
      t.accumulate = run > 0;
      t.bias = p.bias && run == 0 ? p.bias + channel_block * kBlock : nullptr;
      t.activation = run + per_chunk >= p.n_runs ? p.activation : 0;
      for (int64_t row = row0; row < row1; row++) {
        const int64_t image = row / p.rows, y = row - image * p.rows;
        t.a = p.x + image * p.x_image + group * p.x_group + y * p.x_row;
        t.c = p.y + image * p.y_image + channel_block * p.y_block + y * p.y_row;
        t.residual =
            p.residual && run == 0 ? p.residual + image * p.r_image + channel_block * p.r_block + y * p.r_row : nullptr;
        tiles(t, static_cast<int>(n), y == p.rows - 1 ? p.last_pixels : p.pixels);
      }
      run += per_chunk;
    } while (run < p.n_runs);
  }
}

// The part of a split's task that lies in each group: f(group, block0, block1).
template <class F>
NEEDLE_INLINE void each_group(const ConvPass& p, const ConvSplit& s, int64_t block_task, const F& f) {
  const int64_t end = smaller((block_task + 1) * s.units, p.groups * s.per_group);
  for (int64_t u = block_task * s.units; u < end;) {
    const int64_t group = u / s.per_group, u0 = u - group * s.per_group, u1 = smaller(s.per_group, u0 + end - u);
    f(group, u0 * s.step, smaller(u1 * s.step, p.blocks));
    u += u1 - u0;
  }
}

// Groups are merged until their channels fill blocks of 16 (weights between merged groups are zero), or into one.
NEEDLE_INLINE int64_t merged_groups(int64_t groups, int64_t in_per_group, int64_t out_per_group, int64_t block) {
  if (block == kBlock)
    for (int64_t m = 1; m < groups; m++)
      if (groups % m == 0 && in_per_group * m % kBlock == 0 && out_per_group * m % kBlock == 0) return groups / m;
  return 1;
}

// Images [first, first + images) of planes x (N, C, H, W) into dense blocked images of H x W pixels, `room` floats
// apart: the first pixel of x lies at (top, left), zeros are around it, and what falls outside is cut off.
void block_images(const Exec* exec, const View& x, int64_t first, int64_t images, int64_t block, int64_t top,
                  int64_t left, int64_t H, int64_t W, float* dst, int64_t room);
// The reverse for dense blocks of 16, into images [first, first + images) of y (N, C, H, W) whose pixels are evenly
// spaced. Merged groups have whole blocks, so channel c is always lane c % 16 of block c / 16.
void unblock_images(const Exec* exec, const float* src, int64_t images, const View& y, int64_t first);

// Cuts the kernel rows and columns of `w` that meet nothing but padding, and the padding that they need. The
// convolution goes from images of in_h x in_w to out_h x out_w.
void cut_taps(View& w, int64_t in_h, int64_t in_w, int64_t out_h, int64_t out_w, int64_t stride_h, int64_t stride_w,
              int64_t dilation_h, int64_t dilation_w, int64_t* pad_top, int64_t* pad_left);

constexpr int64_t kBatchFloats = 128 << 10;  // images that a thread works on at a time stay in its L2

// Calls f(exec, first, images, room) for batches of images with `floats` of room for each. Where they are `many`, every
// task has its own: what a thread writes it also reads, without a way through the caches of other cores.
template <class F>
void each_batch(const Exec* exec, int64_t images, int64_t floats, double flops, bool many, const F& f) {
  if (!many || images < 2 * exec->threads) {
    const int64_t batch = larger(1, smaller(images, (int64_t{4} << 20) / floats));
    float* room = static_cast<float*>(exec->scratch(3, batch * floats * 4));
    for (int64_t n = 0; n < images; n += batch) f(exec, n, smaller(batch, images - n), room);
    return;
  }
  const Exec alone = {1, exec->parallel, exec->scratch, nullptr};
  const int64_t tasks = smaller(images, task_count(exec, flops));
  const int64_t batch = larger(1, smaller(ceil_div(images, tasks), kBatchFloats / floats));
  parallel_for(exec, tasks, [&](int64_t t) {
    float* room = static_cast<float*>(exec->scratch(1, batch * floats * 4));
    const int64_t end = images * (t + 1) / tasks;
    for (int64_t n = images * t / tasks; n < end; n += batch) f(&alone, n, smaller(batch, end - n), room);
  });
}

// One tap of one input block of packed weights: dst[b][lane] = src[lane * s_lane + b * s_in], zeros beyond.
void pack_tap(const float* src, int64_t s_lane, int64_t s_in, int64_t lanes, int64_t inputs, int64_t block, float* dst);

struct DepthwisePass {
  int64_t images, blocks, rows, pixels, kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w;
  const float* x;  // includes the padding
  int64_t x_image, x_block, x_row;
  const float* w;
  float* y;
  int64_t y_image, y_block, y_row;
  const float* bias;
  const float* residual;
  int64_t r_image, r_block, r_row;
  int activation;
  float alpha;
};
DepthwisePass depthwise_pass_of(const depthwise_blocked_args& c);
void depthwise_pass(const Exec* exec, const DepthwisePass& p);
// Rows [first, last) of all: those of the first block of the first image, of its second block, and so on.
void depthwise_rows(const DepthwisePass& p, int64_t first, int64_t last);
void depthwise_pack_weights(const View& w, float* dst);
void depthwise_weight_grad(const conv2d_weight_grad_args& c, int64_t H, int64_t W);  // of the padded input

}  // namespace needle::NEEDLE_ISA
