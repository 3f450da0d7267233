// A convolution and the depthwise one that alone reads it, as one kernel: a task makes some rows of the image between
// the two, for one tile's channels, and reads them while they lie in its core's cache.
#include "cpu/conv.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kBandBytes = 64 << 10;     // rows between the two
constexpr int64_t kImageFloats = 128 << 10;  // of the input that a task reads for all channels: stays in L2

struct Pair {
  ConvPass conv;
  DepthwisePass depthwise;
  int64_t span;             // rows between that one row of the result reads
  int64_t pitch, capacity;  // floats of a row, rows of a band
  int64_t step;             // blocks of a band
};

// Rows [first, last) of an image of the result, output blocks [block0, block1).
void part(const Pair& p, float* band, int64_t image, int64_t first, int64_t last, int64_t block0, int64_t block1) {
  const int64_t height = p.conv.rows, stride = p.depthwise.window.stride_h, blocks = block1 - block0;
  const int64_t room = p.capacity * p.pitch, most = (p.capacity - p.span) / stride + 1;
  const int64_t inside = p.conv.pixels * kBlock, left = p.depthwise.window.pad_left * kBlock;
  for (float* row = band; row < band + blocks * room; row += p.pitch) {  // columns beside the image stay zero
    std::memset(row, 0, left * 4);
    std::memset(row + left + inside, 0, (p.pitch - left - inside) * 4);
  }
  ConvPass conv = p.conv;
  DepthwisePass depthwise = p.depthwise;
  depthwise.images = 1;
  depthwise.blocks = blocks;
  depthwise.x = {band, 0, room, p.pitch};
  depthwise.w += block0 * depthwise.window.kernel_h * depthwise.window.kernel_w * kBlock;
  if (depthwise.bias) depthwise.bias += block0 * kBlock;
  int64_t low = 0, high = 0;  // rows that the band holds
  for (int64_t y = first, n; y < last; y += n) {
    n = smaller(most, last - y);
    const int64_t from = y * stride - p.depthwise.window.pad_top, to = from + (n - 1) * stride + p.span;
    const int64_t made = y == first ? from : larger(from, high);
    const int64_t begin = smaller(larger(made, 0), to), end = larger(begin, smaller(to, height));
    for (int64_t b = 0; b < blocks; b++) {
      float* rows = band + b * room;
      if (made > from) std::memmove(rows, rows + (from - low) * p.pitch, (made - from) * p.pitch * 4);
      std::memset(rows + (made - from) * p.pitch, 0, (begin - made) * p.pitch * 4);
      std::memset(rows + (end - from) * p.pitch, 0, (to - end) * p.pitch * 4);
    }
    conv.y = {band + left - block0 * room - from * p.pitch, 0, room, p.pitch, conv.y.pixel};
    conv_part(conv, image * height + begin, image * height + end, conv.runs.bands.data[0], block0, block1);
    depthwise.rows = n;
    depthwise.y.data = p.depthwise.y.at(image, block0, y);
    depthwise_rows(depthwise, 0, blocks * n);
    low = from;
    high = to;
  }
}

// Bands that `rows` of the result are cut into: the more of those by which the thread that gets most makes at most 2 %
// more rows than it has to; neighbours both make the rows that both read.
int64_t band_count(const Exec* exec, const Pair& p, int64_t units, int64_t rows, int64_t at_least) {
  int64_t best = smaller(at_least, rows), least = INT64_MAX;
  const int64_t most = exec->threads == 1 ? best : smaller(rows, larger(best, 6 * exec->threads));
  for (int64_t bands = best; bands <= most; bands++) {
    const int64_t made = (ceil_div(rows, bands) - 1) * p.depthwise.window.stride_h + p.span;
    const int64_t load = ceil_div(units * bands, exec->threads) * made;
    least = smaller(load, least);
    if (load <= least + least / 50) best = bands;
  }
  return best;
}

}  // namespace

void conv2d_depthwise(const conv2d_depthwise_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  const auto& a = c.attr;
  if (y.size() == 0) return;
  View between = y;
  between.shape[2] = a.height;
  between.shape[3] = a.width;
  const conv2d_blocked_args::In in = {x, c.in.packed, c.in.bias, kAbsent};
  const conv2d_blocked_args::Out made = {between};
  const conv2d_blocked_args::Attr of_conv = {a.kernel_h, a.kernel_w,   a.stride_h,   a.stride_w, a.pad_top,
                                             a.pad_left, a.dilation_h, a.dilation_w, a.groups,   a.inputs,
                                             a.outputs,  a.activation, a.alpha};
  const depthwise_blocked_args::In reads = {between, c.in.depthwise_packed, c.in.depthwise_bias, kAbsent};
  const depthwise_blocked_args::Out out = {y};
  const depthwise_blocked_args::Attr of_depthwise = {
      a.depthwise_kernel_h, a.depthwise_kernel_w,   a.depthwise_stride_h,   a.depthwise_stride_w,   a.depthwise_pad_top,
      a.depthwise_pad_left, a.depthwise_dilation_h, a.depthwise_dilation_w, a.depthwise_activation, a.depthwise_alpha};
  Pair p;
  p.conv = conv2d_pass({in, made, of_conv, c.exec});
  p.depthwise = depthwise_pass_of({reads, out, of_depthwise, c.exec});
  const DepthwisePass& d = p.depthwise;
  const Window& g = d.window;
  p.span = reach(1, g.stride_h, g.kernel_h, g.dilation_h);
  const int64_t blocks = p.conv.runs.bands.data[0].blocks;  // of the only band: there are no groups
  p.step = p.conv.pixels <= kWideRows && blocks >= kWideBlocks ? kWideBlocks : kTileBlocks;
  p.pitch = larger(g.pad_left + p.conv.pixels, reach(d.pixels, g.stride_w, g.kernel_w, g.dilation_w)) * kBlock;
  p.capacity = larger(kBandBytes / (p.step * p.pitch * 4), p.span);
  p.capacity = smaller(p.capacity, (d.rows - 1) * g.stride_h + p.span);

  const int64_t units = ceil_div(blocks, p.step);
  const int64_t at_least = ceil_div(x.size() / x.shape[0], kImageFloats);
  const int64_t bands = band_count(c.exec, p, d.images * units, d.rows, at_least), rows = ceil_div(d.rows, bands);
  parallel_for(c.exec, d.images * bands * units, [&](int64_t t) {
    const int64_t unit = t % units, first = t / units % bands * rows, block = unit * p.step;
    if (first >= d.rows) return;
    float* band = scratch<float>(c.exec, 0, p.step * p.capacity * p.pitch);
    part(p, band, t / units / bands, first, smaller(first + rows, d.rows), block, smaller(block + p.step, blocks));
  });
}

}  // namespace needle::NEEDLE_ISA
