// Weight gradient of conv2d on the register tile: rows are input channels (or taps of one kernel row when these are
// more), lanes output channels, K all output pixels. Depthwise kernels keep channels in the lanes instead.
#include "cpu/conv.h"

namespace needle::NEEDLE_ISA {
namespace {

struct Sizes {
  int64_t C, O, groups, I, OH, OW, kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w;
  int64_t H, W, plane;  // padded input planes
  int64_t taps() const { return kernel_h * kernel_w; }
};

// Padded planes (n, c), `plane` floats apart: an odd number of lines, so that planes do not share L1 sets.
void pad_planes(const Exec* exec, const View& x, int64_t first, int64_t images, const Sizes& s, int64_t top,
                int64_t left, float* dst) {
  const int64_t copies = images * s.C, tasks = smaller(copies, task_count(exec, 10. * copies * s.plane));
  const int64_t x0 = smaller(left, s.W), x1 = larger(x0, smaller(left + x.shape[3], s.W));
  parallel_for(exec, tasks, [&](int64_t t) {
    for (int64_t i = copies * t / tasks; i < copies * (t + 1) / tasks; i++) {
      const float* plane = x.as<const float>() + (first + i / s.C) * x.stride[0] + i % s.C * x.stride[1];
      float* d = dst + i * s.plane;
      for (int64_t y = 0; y < s.H; y++, d += s.W) {
        const float* row = plane + (y - top) * x.stride[2];
        std::memset(d, 0, s.W * 4);
        if (y < top || y - top >= x.shape[2]) continue;
        for (int64_t i = x0; i < x1; i++) d[i] = row[(i - left) * x.stride[3]];
      }
    }
  });
}

// dy into [group][block][n][pixel][16].
void block_gradient(const Exec* exec, const View& dy, int64_t first, int64_t images, const Sizes& s, float* dst) {
  const int64_t per_group = s.O / s.groups, blocks = ceil_div(per_group, kBlock), pixels = s.OH * s.OW;
  const int64_t copies = s.groups * blocks * images;
  const int64_t tasks = smaller(copies, task_count(exec, 20. * copies * pixels * kBlock));
  parallel_for(exec, tasks, [&](int64_t t) {
    for (int64_t i = copies * t / tasks; i < copies * (t + 1) / tasks; i++) {
      const int64_t n = i % images, block = i / images % blocks, group = i / images / blocks;
      View part = dy;
      part.data = dy.as<float>() + (group * per_group + block * kBlock) * dy.stride[1];
      part.shape[1] = smaller(kBlock, per_group - block * kBlock);
      const Exec alone = {1, exec->parallel, exec->scratch, nullptr};
      block_images(&alone, part, first + n, 1, kBlock, 0, 0, s.OH, s.OW, dst + i * pixels * kBlock, 0);
    }
  });
}

struct Pass {
  const float* x;
  const float* dy;
  float* sums;  // [group][block][tap][i][16]
  const int64_t* runs;
  int64_t n_runs;
  bool accumulate;
};

// Blocks [block, block + n) of one group, rows [r0, r1) of channels (or of kernel columns), outer taps [t0, t1).
void part(const Sizes& s, const Pass& p, bool rows_are_taps, int64_t group, int64_t block, int n, int64_t r0,
          int64_t r1, int64_t t0, int64_t t1) {
  const int64_t blocks = ceil_div(s.O / s.groups, kBlock), pixels = p.n_runs * s.OW;
  Tile t = {};
  t.a_m = rows_are_taps ? s.dilation_w : s.plane;
  t.a_k = s.stride_w;
  t.length = s.OW;
  t.b_n = pixels * kBlock;
  t.b_k = kBlock;
  t.c_m = (rows_are_taps ? s.I : 1) * kBlock;
  t.c_n = s.taps() * s.I * kBlock;
  const int64_t chunks = smaller(p.n_runs, larger(1, ceil_div(pixels * n * kBlock * 4, kPanelBytes)));
  const int64_t per_chunk = ceil_div(p.n_runs, chunks);
  for (int64_t run = 0; run < p.n_runs; run += per_chunk) {
    t.runs = p.runs + run;
    t.n_runs = smaller(per_chunk, p.n_runs - run);
    t.b = p.dy + (group * blocks + block) * t.b_n + run * s.OW * kBlock;
    t.accumulate = p.accumulate || run > 0;
    for (int64_t r = r0; r < r1; r += kTileRows) {
      const int64_t rows = smaller(kTileRows, r1 - r);
      for (int64_t outer = t0; outer < t1; outer++) {
        // outer: a tap, or kernel row and channel when rows are the taps of a kernel row.
        const int64_t i = rows_are_taps ? outer % s.I : r;
        const int64_t kh = rows_are_taps ? outer / s.I : outer / s.kernel_w;
        const int64_t kw = rows_are_taps ? r : outer % s.kernel_w;
        t.a = p.x + (group * s.I + i) * s.plane + kh * s.dilation_h * s.W + kw * s.dilation_w;
        t.c = p.sums + (((group * blocks + block) * s.taps() + kh * s.kernel_w + kw) * s.I + i) * kBlock;
        tiles(t, n, rows);
      }
    }
  }
}

void run(const Exec* exec, const Sizes& s, const Pass& p) {
  const bool rows_are_taps = s.I < s.kernel_w && s.I < kTileRows;
  const int64_t blocks = ceil_div(s.O / s.groups, kBlock), units = ceil_div(blocks, kTileBlocks);
  const int64_t rows = rows_are_taps ? s.kernel_w : s.I, outer = rows_are_taps ? s.kernel_h * s.I : s.taps();
  const double flops = 2. * s.O * s.I * s.taps() * p.n_runs * s.OW;
  const int64_t wanted = ceil_div(task_count(exec, flops), s.groups * units);
  const int64_t r_tasks = smaller(wanted, ceil_div(rows, kTileRows)),
                o_tasks = smaller(outer, ceil_div(wanted, r_tasks));
  const int64_t r_step = ceil_div(rows, r_tasks), o_step = ceil_div(outer, o_tasks);
  parallel_for(exec, s.groups * units * r_tasks * o_tasks, [&](int64_t t) {
    const int64_t o0 = t % o_tasks * o_step, r0 = t / o_tasks % r_tasks * r_step, unit = t / o_tasks / r_tasks;
    const int64_t block = unit % units * kTileBlocks;
    part(s, p, rows_are_taps, unit / units, block, static_cast<int>(smaller(kTileBlocks, blocks - block)), r0,
         smaller(rows, r0 + r_step), o0, smaller(outer, o0 + o_step));
  });
}

void unpack(const Exec* exec, const Sizes& s, const float* sums, float* dw) {
  const int64_t per_group = s.O / s.groups, blocks = ceil_div(per_group, kBlock), T = s.taps();
  const int64_t all = s.groups * blocks * s.I, tasks = smaller(all, task_count(exec, 20. * s.O * s.I * T));
  parallel_for(exec, tasks, [&](int64_t t) {
    for (int64_t at = all * t / tasks; at < all * (t + 1) / tasks; at++) {
      const int64_t i = at % s.I, block = at / s.I, first = block % blocks * kBlock;
      const float* from = sums + (block * T * s.I + i) * kBlock;
      float* to = dw + ((block / blocks * per_group + first) * s.I + i) * T;
      for (int64_t lane = 0; lane < smaller(kBlock, per_group - first); lane++)
        for (int64_t tap = 0; tap < T; tap++) to[lane * s.I * T + tap] = from[tap * s.I * kBlock + lane];
    }
  });
}

}  // namespace

// attrs: stride_h stride_w pad_top pad_left dilation_h dilation_w groups
void conv2d_weight_grad(const Call& c) {
  const View &x = c.in[0], &dy = c.in[1], &dw = c.out[0];
  if (dw.size() == 0) return;
  if (dy.size() == 0) {
    std::memset(dw.data, 0, dw.size() * 4);
    return;
  }
  Sizes s = {x.shape[1],  dw.shape[0], c.i(6),      dw.shape[1], dy.shape[2],
             dy.shape[3], dw.shape[2], dw.shape[3], c.i(0),      c.i(1),
             c.i(4),      c.i(5),      0,           0,           0};
  s.H = (s.OH - 1) * s.stride_h + (s.kernel_h - 1) * s.dilation_h + 1;
  s.W = (s.OW - 1) * s.stride_w + (s.kernel_w - 1) * s.dilation_w + 1;
  if (s.I == 1 && s.O == s.C && s.C > 1) return depthwise_weight_grad(c, s.H, s.W);
  s.plane = ceil_div(s.H * s.W, kBlock) * kBlock;
  if (s.plane / kBlock % 2 == 0) s.plane += kBlock;

  const int64_t dy_channels = s.groups * ceil_div(s.O / s.groups, kBlock) * kBlock, pixels = s.OH * s.OW;
  const int64_t per_image = s.C * s.plane + dy_channels * pixels;
  const int64_t batch = larger(1, smaller(x.shape[0], (int64_t{16} << 20) / per_image));
  float* planes = static_cast<float*>(c.exec->scratch(2, batch * (s.C * s.plane * 4 + s.OH * sizeof(int64_t))));
  int64_t* runs = reinterpret_cast<int64_t*>(planes + batch * s.C * s.plane);
  float* sums = static_cast<float*>(c.exec->scratch(3, dy_channels * (s.taps() * s.I + batch * pixels) * 4));
  float* gradient = sums + dy_channels * s.taps() * s.I;
  for (int64_t i = 0; i < batch * s.OH; i++) runs[i] = i / s.OH * s.C * s.plane + i % s.OH * s.stride_h * s.W;
  for (int64_t n = 0; n < x.shape[0]; n += batch) {
    const int64_t images = smaller(batch, x.shape[0] - n);
    pad_planes(c.exec, x, n, images, s, c.i(2), c.i(3), planes);
    block_gradient(c.exec, dy, n, images, s, gradient);
    run(c.exec, s, {planes, gradient, sums, runs, images * s.OH, n > 0});
  }
  unpack(c.exec, s, sums, dw.as<float>());
}

}  // namespace needle::NEEDLE_ISA
