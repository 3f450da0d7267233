// Weight gradient of conv2d on the register tile: rows are input channels (or taps of one kernel row when these are
// more), lanes output channels, K all output pixels. Few images for large weights, and those of depthwise kernels, go
// into blocks of channels, for the kernel of those.
#include "cpu/conv2d_weight_grad.h"

namespace needle::NEEDLE_ISA {
void conv2d_weight_grad_blocked(const conv2d_weight_grad_blocked_args& c);

namespace {

struct Sizes : Window {
  int64_t C, O, groups, I, OH, OW;
  int64_t H, W, plane;  // padded input planes
  int64_t taps() const { return kernel_h * kernel_w; }
};

// Padded planes (n, c), `plane` floats apart: an odd number of lines, so that planes do not share L1 sets.
void pad_planes(const Exec* exec, const View& x, int64_t first, int64_t images, const Sizes& s, float* dst) {
  const int64_t top = s.pad_top, left = s.pad_left;
  const int64_t copies = images * s.C;
  const int64_t x0 = smaller(larger(0, left), s.W), x1 = larger(x0, smaller(left + x.shape[3], s.W));
  parallel_parts(exec, copies, 10. * copies * s.plane, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
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
  parallel_parts(exec, copies, 20. * copies * pixels * kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
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

// The sum of all parts into dw.
void unpack(const Exec* exec, const Sizes& s, const float* sums, int64_t parts, int64_t part_floats, const View& dw) {
  const int64_t per_group = s.O / s.groups, blocks = ceil_div(per_group, kBlock), T = s.taps();
  parallel_parts(exec, s.groups * blocks * s.I, 20. * s.O * s.I * T, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at++) {
      const int64_t i = at % s.I, block = at / s.I, first = block % blocks * kBlock;
      const float* from = sums + (block * T * s.I + i) * kBlock;
      float* to = dw.as<float>() + (block / blocks * per_group + first) * dw.stride[0] + i * dw.stride[1];
      for (int64_t tap = 0; tap < T; tap++) {
        const float* block_sum = from + tap * s.I * kBlock;
        float lanes[kBlock] = {};
        for (int64_t p = 0; p < parts; p++)
          for (int lane = 0; lane < kBlock; lane++) lanes[lane] += block_sum[p * part_floats + lane];
        float* at_tap = to + tap / s.kernel_w * dw.stride[2] + tap % s.kernel_w * dw.stride[3];
        for (int64_t lane = 0; lane < smaller(kBlock, per_group - first); lane++)
          at_tap[lane * dw.stride[0]] = lanes[lane];
      }
    }
  });
}

View dense(float* data, const int64_t (&shape)[5], int rank) {
  View v;
  v.data = data;
  v.rank = rank;
  int64_t stride = 1;
  for (int i = rank - 1; i >= 0; stride *= shape[i--]) v.shape[i] = shape[i], v.stride[i] = stride;
  return v;
}

// In batches of images that together have `most` floats, padded to H x W.
void through_blocks(const conv2d_weight_grad_args& c, const View& dw, const Window& g, int64_t H, int64_t W,
                    int64_t block, int64_t most) {
  const View &x = c.in.x, &dy = c.in.dy;
  const int64_t N = x.shape[0], x_blocks = ceil_div(x.shape[1], block), dy_blocks = ceil_div(dy.shape[1], kBlock);
  const int64_t OH = dy.shape[2], OW = dy.shape[3];
  const int64_t x_floats = ceil_div(x_blocks * H * W * block, kBlock) * kBlock,
                dy_floats = dy_blocks * OH * OW * kBlock;
  const int64_t batch = larger(1, smaller(N, most / (x_floats + dy_floats)));
  float* xb = scratch<float>(c.exec, 3, batch * (x_floats + dy_floats) + (batch < N ? dw.size() : 0));
  float *dyb = xb + batch * x_floats, *more = dyb + batch * dy_floats;
  for (int64_t n = 0; n < N; n += batch) {
    const int64_t images = smaller(batch, N - n);
    block_images(c.exec, x, n, images, block, g.pad_top, g.pad_left, H, W, xb, x_floats);
    block_images(c.exec, dy, n, images, kBlock, 0, 0, OH, OW, dyb, dy_floats);
    conv2d_weight_grad_blocked_row::In in = {dense(xb, {images, x_blocks, H, W, block}, 5),
                                             dense(dyb, {images, dy_blocks, OH, OW, kBlock}, 5)};
    in.x.stride[0] = x_floats;
    const View sum = dense(more, {dw.shape[0], dw.shape[1], dw.shape[2], dw.shape[3], 1}, 4);
    const conv2d_weight_grad_blocked_row::Out out = {n == 0 ? dw : sum};
    const conv2d_weight_grad_blocked_row::Attr attr = {g.stride_h,   g.stride_w,   0, 0, g.dilation_h,
                                                       g.dilation_w, c.attr.groups};
    conv2d_weight_grad_blocked({in, out, attr, c.exec});
    if (n == 0) continue;
    const float* from = more;
    for (int64_t o = 0; o < dw.shape[0]; o++)
      for (int64_t i = 0; i < dw.shape[1]; i++)
        for (int64_t kh = 0; kh < dw.shape[2]; kh++) {
          float* to = dw.as<float>() + o * dw.stride[0] + i * dw.stride[1] + kh * dw.stride[2];
          for (int64_t kw = 0; kw < dw.shape[3]; kw++) to[kw * dw.stride[3]] += *from++;
        }
  }
}

}  // namespace

void conv2d_weight_grad(const conv2d_weight_grad_args& c) {
  const View &x = c.in.x, &dy = c.in.dy;
  View dw = c.out.dweight;
  if (dw.size() == 0) return;
  Window g(c.attr, dw.shape[2], dw.shape[3]);
  const bool depthwise = dw.shape[1] == 1 && dw.shape[0] == x.shape[1] && x.shape[1] > 1;
  cut_taps(dw, x, dy, g);
  if (dy.size() == 0 || dw.size() < c.out.dweight.size()) std::memset(c.out.dweight.data, 0, c.out.dweight.size() * 4);
  if (dy.size() == 0) return;
  Sizes s = {g, x.shape[1], dw.shape[0], c.attr.groups, dw.shape[1], dy.shape[2], dy.shape[3], 0, 0, 0};
  s.H = reach(s.OH, s.stride_h, s.kernel_h, s.dilation_h);
  s.W = reach(s.OW, s.stride_w, s.kernel_w, s.dilation_w);
  const bool narrow = is_narrow({s.groups, s.I, s.O / s.groups, smaller(s.C, kBlock)});
  if (depthwise || narrow) return through_blocks(c, dw, g, s.H, s.W, kBlock, int64_t{1} << 20);
  s.plane = s.H * s.W;
  if (s.plane >= kBlock) {
    s.plane = ceil_div(s.plane, kBlock) * kBlock;
    if (s.plane / kBlock % 2 == 0) s.plane += kBlock;
  } else {
    s.plane += s.plane % 2;  // what follows the planes are numbers of 8 bytes
  }

  const int64_t dy_channels = s.groups * ceil_div(s.O / s.groups, kBlock) * kBlock, pixels = s.OH * s.OW;
  const int64_t N = x.shape[0], sum_floats = dy_channels * s.taps() * s.I;
  const int64_t per_image = s.C * s.plane + dy_channels * pixels + ceil_div(2 * s.OH, kBlock) * kBlock;
  // Small sums: every task has images and sums of its own.
  const int64_t parts = 2 * c.exec->threads;
  const bool many = N >= parts && 4 * parts * sum_floats <= N * per_image;
  if (!many) return through_blocks(c, dw, g, s.H, s.W, smaller(s.C, kBlock), int64_t{16} << 20);
  float* sums = scratch<float>(c.exec, 2, parts * sum_floats);
  auto add_images = [&](const Exec* exec, int64_t first, int64_t images, float* room, float* to, bool accumulate) {
    float* gradient = room + images * s.C * s.plane;
    int64_t* runs = reinterpret_cast<int64_t*>(gradient + images * dy_channels * pixels);
    pad_planes(exec, x, first, images, s, room);
    block_gradient(exec, dy, first, images, s, gradient);
    Sizes sizes = s;
    int64_t n_runs = images * s.OH;
    if (pixels == 1) {  // images of one pixel are the pixels of one image
      sizes.OW = images;
      sizes.stride_w = s.C * s.plane;
      n_runs = 1;
    }
    for (int64_t i = 0; i < n_runs; i++) runs[i] = i / s.OH * s.C * s.plane + i % s.OH * s.stride_h * s.W;
    run(exec, sizes, {room, gradient, to, runs, n_runs, accumulate});
  };
  const Exec alone = {1, c.exec->parallel, c.exec->scratch, nullptr};
  const int64_t batch = larger(1, smaller(ceil_div(N, parts), kBatchFloats / per_image));
  parallel_for(c.exec, parts, [&](int64_t t) {
    float* room = scratch<float>(c.exec, 1, batch * per_image);
    const int64_t begin = N * t / parts, end = N * (t + 1) / parts;
    for (int64_t n = begin; n < end; n += batch)
      add_images(&alone, n, smaller(batch, end - n), room, sums + t * sum_floats, n > begin);
  });
  unpack(c.exec, s, sums, parts, sum_floats, dw);
}

}  // namespace needle::NEEDLE_ISA
