// Transposed convolution (also the input gradient of conv2d): output pixels with the same remainder modulo the stride
// meet the same taps, so each such phase is a direct convolution of stride one whose output pixels lie `stride` apart.
#include "cpu/conv.h"

namespace needle::NEEDLE_ISA {
namespace {

struct Geometry {
  int64_t kernel_h, kernel_w, stride_h, stride_w, pad_top, pad_left, dilation_h, dilation_w;
};

struct Phase {
  int64_t runs, n_runs, length, weights;  // starts of its runs and weights
};

// Taps along one axis with tap * dilation % stride == remainder.
NEEDLE_INLINE int64_t taps_of(int64_t kernel, int64_t dilation, int64_t stride, int64_t remainder) {
  int64_t n = 0;
  for (int64_t k = 0; k < kernel; k++) n += k * dilation % stride == remainder;
  return n;
}

// Panel of one output block: [remainder_h][remainder_w][ib][kh falling][kw falling][b][16]; falling taps read forward.
template <class F>
NEEDLE_INLINE void each_tap(const Geometry& g, int64_t rh, int64_t rw, const F& f) {
  for (int64_t kh = g.kernel_h - 1; kh >= 0; kh--)
    for (int64_t kw = g.kernel_w - 1; kw >= 0; kw--)
      if (kh * g.dilation_h % g.stride_h == rh && kw * g.dilation_w % g.stride_w == rw) f(kh, kw);
}

void pack(const View& w, const Geometry& g, int64_t groups, int64_t merged, int64_t block, float* dst, int64_t first,
          int64_t last) {
  const int64_t in_per_group = w.shape[0] / groups, out_per_group = w.shape[1], merge = groups / merged;
  const int64_t merged_in = in_per_group * merge, merged_out = out_per_group * merge;
  const int64_t OB = ceil_div(merged_out, kBlock), IB = ceil_div(merged_in, block);
  const int64_t panel = IB * g.kernel_h * g.kernel_w * block * kBlock;
  for (int64_t at = first; at < last; at++) {
    float* d = dst + at * panel;
    const int64_t group = at / OB, o0 = at % OB * kBlock, lanes = smaller(kBlock, merged_out - o0);
    if (merge > 1) std::memset(d, 0, panel * 4);
    for (int64_t rh = 0; rh < g.stride_h; rh++) {
      const int64_t taps_h = taps_of(g.kernel_h, g.dilation_h, g.stride_h, rh);
      for (int64_t rw = 0; rw < g.stride_w; rw++) {
        const int64_t taps = taps_h * taps_of(g.kernel_w, g.dilation_w, g.stride_w, rw);
        for (int64_t ib = 0; ib < IB; ib++) {
          float* to = d + ib * taps * block * kBlock;
          each_tap(g, rh, rw, [&](int64_t kh, int64_t kw) {
            const float* s =
                w.as<const float>() + group * merged_in * w.stride[0] + kh * w.stride[2] + kw * w.stride[3];
            const int64_t i0 = ib * block, i1 = smaller(i0 + block, merged_in);
            if (merge == 1)
              pack_tap(s + i0 * w.stride[0] + o0 * w.stride[1], w.stride[1], w.stride[0], lanes, i1 - i0, block, to);
            else
              for (int64_t i = i0; i < i1; i++)
                for (int64_t lane = 0; lane < lanes; lane++)
                  if ((o0 + lane) / out_per_group == i / in_per_group)
                    to[(i - i0) * kBlock + lane] = s[i * w.stride[0] + (o0 + lane) % out_per_group * w.stride[1]];
            to += block * kBlock;
          });
        }
        d += IB * taps * block * kBlock;
      }
    }
  }
}

void pack_parallel(const Exec* exec, const View& w, const Geometry& g, int64_t groups, int64_t merged, int64_t block,
                   float* dst) {
  const int64_t blocks = merged * ceil_div(groups / merged * w.shape[1], kBlock);
  const int64_t tasks = smaller(blocks, task_count(exec, 20. * w.size()));
  parallel_for(exec, tasks, [&](int64_t t) {
    pack(w, g, groups, merged, block, dst, blocks * t / tasks, blocks * (t + 1) / tasks);
  });
}

NEEDLE_INLINE size_t plan_bytes(const Geometry& g, int64_t in_blocks) {
  return g.stride_h * g.stride_w * sizeof(Phase) + in_blocks * g.kernel_h * g.kernel_w * sizeof(int64_t);
}

// Phases in the order (output row remainder, output column remainder), followed by the runs of all of them.
const int64_t* fill_phases(const Geometry& g, int64_t in_blocks, int64_t block, int64_t x_block, int64_t x_row,
                           Phase* phases) {
  int64_t* runs = reinterpret_cast<int64_t*>(phases + g.stride_h * g.stride_w);
  const int64_t step = g.dilation_w % g.stride_w == 0   ? g.dilation_w / g.stride_w
                       : g.stride_w % g.dilation_w == 0 ? 1
                                                        : 2;
  int64_t used = 0, weights = 0;
  for (int64_t rh = 0; rh < g.stride_h; rh++)
    for (int64_t rw = 0; rw < g.stride_w; rw++) {
      // The output remainder p with (p + pad) % stride == r.
      const int64_t ph = ((rh - g.pad_top) % g.stride_h + g.stride_h) % g.stride_h;
      const int64_t pw = ((rw - g.pad_left) % g.stride_w + g.stride_w) % g.stride_w;
      const int64_t taps_w = taps_of(g.kernel_w, g.dilation_w, g.stride_w, rw);
      const int64_t taps = taps_of(g.kernel_h, g.dilation_h, g.stride_h, rh) * taps_w;
      const int64_t joined = step == 1 && taps > 0 ? taps_w : 1;  // neighbouring taps that read neighbouring pixels
      Phase& phase = phases[ph * g.stride_w + pw];
      phase = {used, in_blocks * taps / joined, joined * block, weights};
      for (int64_t ib = 0; ib < in_blocks; ib++) {
        int64_t tap = 0;
        each_tap(g, rh, rw, [&](int64_t kh, int64_t kw) {
          if (tap++ % joined == 0)
            runs[used++] = ib * x_block + floor_div(ph + g.pad_top - kh * g.dilation_h, g.stride_h) * x_row +
                           floor_div(pw + g.pad_left - kw * g.dilation_w, g.stride_w) * block;
        });
      }
      weights += in_blocks * taps * block * kBlock;
    }
  return runs;
}

// `p` describes x, w and y as a whole; rows and pixels are those of the output.
void run(const Exec* exec, const Geometry& g, const ConvPass& p, const Phase* phases, const int64_t* runs,
         int64_t x_floats, int64_t w_floats) {
  ConvPass all = p;
  all.rows = ceil_div(p.rows, g.stride_h);
  all.pixels = ceil_div(p.pixels, g.stride_w);
  const double flops = 2. * p.images * all.rows * all.pixels * w_floats;
  const ConvSplit s = conv_split(exec, all, flops, x_floats, w_floats);
  parallel_for(exec, s.row_tasks * s.block_tasks, [&](int64_t t) {
    const int64_t row0 = t / s.block_tasks * s.rows, row1 = smaller(row0 + s.rows, p.images * all.rows);
    each_group(all, s, t % s.block_tasks, [&](int64_t group, int64_t block0, int64_t block1) {
      for (int64_t row = row0, end; row < row1; row = end) {
        const int64_t image = row / all.rows, y0 = row - image * all.rows;
        end = smaller(row1, (image + 1) * all.rows);
        for (int64_t ph = 0; ph < smaller(g.stride_h, p.rows); ph++)
          for (int64_t pw = 0; pw < smaller(g.stride_w, p.pixels); pw++) {
            const Phase& phase = phases[ph * g.stride_w + pw];
            ConvPass one = p;
            one.rows = ceil_div(p.rows - ph, g.stride_h);
            one.pixels = one.last_pixels = ceil_div(p.pixels - pw, g.stride_w);
            one.x += image * p.x_image;
            one.w += phase.weights;
            one.y += image * p.y_image + ph * p.y_row + pw * p.y_pixel;
            one.y_row = p.y_row * g.stride_h;
            one.y_pixel = p.y_pixel * g.stride_w;
            one.runs = runs + phase.runs;
            one.n_runs = phase.n_runs;
            one.length = phase.length;
            const int64_t y1 = smaller(end - image * all.rows, one.rows);
            if (y0 < y1) conv_part(one, y0, y1, group, block0, block1);
          }
      }
    });
  });
}

}  // namespace

void conv_transpose2d_pack(const conv_transpose2d_pack_args& c) {
  const View& w = c.in.weight;
  if (w.size() == 0) return;
  const int64_t groups = c.attr.groups, block = c.attr.block;
  const Geometry g = {w.shape[2], w.shape[3], c.attr.stride_h,   c.attr.stride_w,
                      0,          0,          c.attr.dilation_h, c.attr.dilation_w};
  pack_parallel(c.exec, w, g, groups, merged_groups(groups, w.shape[0] / groups, w.shape[1], block), block,
                c.out.packed.as<float>());
}

// Reads at most max(0, floor(((kernel_h - 1) * dilation_h - pad_top) / stride_h)) zero rows above the input and
// max(0, floor((OH - 1 + pad_top) / stride_h) - (H - 1)) below; columns alike.
void conv_transpose2d_blocked(const conv_transpose2d_blocked_args& c) {
  const View &x = c.in.x, &w = c.in.packed, &y = c.out.y;
  if (y.size() == 0) return;
  const Geometry g = {c.attr.kernel_h, c.attr.kernel_w, c.attr.stride_h,   c.attr.stride_w,
                      c.attr.pad_top,  c.attr.pad_left, c.attr.dilation_h, c.attr.dilation_w};
  const int64_t in_blocks = w.shape[2], block = x.shape[4];
  Phase* phases = static_cast<Phase*>(c.exec->scratch(2, plan_bytes(g, in_blocks)));
  const int64_t* runs = fill_phases(g, in_blocks, block, x.stride[1], x.stride[2], phases);
  ConvPass p = {};
  p.images = y.shape[0];
  p.rows = y.shape[2];
  p.pixels = y.shape[3];
  p.groups = c.attr.groups;
  p.blocks = w.shape[1];
  p.x = x.as<const float>();
  p.x_image = x.stride[0];
  p.x_group = in_blocks * x.stride[1];
  p.x_row = x.stride[2];
  p.x_pixel = block;
  p.w = w.as<const float>();
  p.w_block = w.shape[2] * w.shape[3];
  p.w_group = p.blocks * p.w_block;
  p.y = y.as<float>();
  p.y_image = y.stride[0];
  p.y_block = y.stride[1];
  p.y_row = y.stride[2];
  p.y_pixel = y.stride[3];
  p.bias = c.in.bias.as<const float>();
  p.activation = static_cast<int>(c.attr.activation);
  p.alpha = c.attr.alpha;
  run(c.exec, g, p, phases, runs, x.size(), p.groups * p.w_group);
}

void conv_transpose2d(const conv_transpose2d_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  View w = c.in.weight;
  if (y.size() == 0) return;
  Geometry g = {
      0, 0, c.attr.stride_h, c.attr.stride_w, c.attr.pad_top, c.attr.pad_left, c.attr.dilation_h, c.attr.dilation_w};
  cut_taps(w, y.shape[2], y.shape[3], x.shape[2], x.shape[3], g.stride_h, g.stride_w, g.dilation_h, g.dilation_w,
           &g.pad_top, &g.pad_left);
  g.kernel_h = w.shape[2];
  g.kernel_w = w.shape[3];
  const int64_t groups = c.attr.groups, C = x.shape[1], O = y.shape[1], OH = y.shape[2], OW = y.shape[3];
  const int64_t block = C < kBlock ? C : kBlock, merged = merged_groups(groups, C / groups, O / groups, block);
  const int64_t XB = ceil_div(C, block), in_blocks = ceil_div(C / merged, block);
  const int64_t OB = ceil_div(O / merged, kBlock), YB = merged * OB;
  const int64_t top = larger(0, floor_div((g.kernel_h - 1) * g.dilation_h - g.pad_top, g.stride_h));
  const int64_t left = larger(0, floor_div((g.kernel_w - 1) * g.dilation_w - g.pad_left, g.stride_w));
  const int64_t H = top + larger(x.shape[2], (OH - 1 + g.pad_top) / g.stride_h + 1);
  const int64_t W = left + larger(x.shape[3], (OW - 1 + g.pad_left) / g.stride_w + 1);
  const int64_t panel = in_blocks * g.kernel_h * g.kernel_w * block * kBlock, w_floats = YB * panel;

  float* packed = static_cast<float*>(c.exec->scratch(2, (w_floats + YB * kBlock) * 4 + plan_bytes(g, in_blocks)));
  float* bias = packed + w_floats;
  Phase* phases = reinterpret_cast<Phase*>(bias + YB * kBlock);
  const int64_t x_floats = XB * H * W * block, y_floats = YB * OH * OW * kBlock, x_room = ceil_div(x_floats, 16) * 16;
  pack_parallel(c.exec, w, g, groups, merged, block, packed);
  std::memset(bias, 0, YB * kBlock * 4);
  if (c.in.bias)
    for (int64_t o = 0; o < O; o++) bias[o] = c.in.bias.as<const float>()[o * c.in.bias.stride[0]];
  const int64_t* runs = fill_phases(g, in_blocks, block, H * W * block, W * block, phases);

  const bool many = w_floats < x.shape[0] * x_floats;  // else tasks stream parts of the weights
  const double flops = 2. * x.shape[0] * x.shape[2] * x.shape[3] * w_floats;
  each_batch(c.exec, x.shape[0], x_room + y_floats, flops, many,
             [&](const Exec* exec, int64_t first, int64_t images, float* xb) {
               float* yb = xb + images * x_room;
               block_images(exec, x, first, images, block, top, left, H, W, xb, x_room);
               ConvPass p = {};
               p.images = images;
               p.rows = OH;
               p.pixels = OW;
               p.groups = merged;
               p.blocks = OB;
               p.x = xb + (top * W + left) * block;
               p.x_image = x_room;
               p.x_group = in_blocks * H * W * block;
               p.x_row = W * block;
               p.x_pixel = block;
               p.w = packed;
               p.w_block = panel;
               p.w_group = OB * panel;
               p.y = yb;
               p.y_image = y_floats;
               p.y_block = OH * OW * kBlock;
               p.y_row = OW * kBlock;
               p.y_pixel = kBlock;
               p.bias = bias;
               p.activation = static_cast<int>(c.attr.activation);
               p.alpha = c.attr.alpha;
               if (OH * OW * g.stride_h * g.stride_w == 1) {  // images of one pixel are the pixels of one image
                 p.images = 1;
                 p.pixels = images;
                 p.x_pixel = p.x_image;
                 p.y_pixel = p.y_image;
               }
               run(exec, g, p, phases, runs, images * x_floats, w_floats);
               unblock_images(exec, yb, images, y, first);
             });
}

}  // namespace needle::NEEDLE_ISA
