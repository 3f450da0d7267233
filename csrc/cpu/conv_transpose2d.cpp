// Transposed convolution (also the input gradient of conv2d): output pixels with the same remainder modulo the stride
// meet the same taps, so each such phase is a direct convolution of stride one whose output pixels lie `stride` apart.
#include "cpu/conv.h"

namespace needle::NEEDLE_ISA {
namespace {

struct Phase {
  Runs runs;
  int64_t taps_before;  // of other phases
};

// Taps along one axis with tap * dilation % stride == remainder.
NEEDLE_INLINE int64_t taps_of(int64_t kernel, int64_t dilation, int64_t stride, int64_t remainder) {
  int64_t n = 0;
  for (int64_t k = 0; k < kernel; k++) n += k * dilation % stride == remainder;
  return n;
}

// Panel of one output block: [remainder_h][remainder_w][ib][kh falling][kw falling][b][16]; falling taps read forward.
template <class F>
NEEDLE_INLINE void each_tap(const Window& g, int64_t rh, int64_t rw, const F& f) {
  for (int64_t kh = g.kernel_h - 1; kh >= 0; kh--)
    for (int64_t kw = g.kernel_w - 1; kw >= 0; kw--)
      if (kh * g.dilation_h % g.stride_h == rh && kw * g.dilation_w % g.stride_w == rw) f(kh, kw);
}

void pack(const Exec* exec, const Weights& w, const Window& g, const Channels& c, const Form& form, float* dst) {
  pack_weights(exec, w, c, form, dst, [&](const auto& phase) {
    for (int64_t rh = 0; rh < g.stride_h; rh++)
      for (int64_t rw = 0; rw < g.stride_w; rw++) phase([&](const auto& tap) { each_tap(g, rh, rw, tap); });
  });
}

NEEDLE_INLINE size_t phases_bytes(const Channels& c, const Form& form, int64_t panels, const Window& g) {
  return g.stride_h * g.stride_w * sizeof(Phase) + bands_bytes(c, form, panels, g.kernel_h * g.kernel_w);
}

// Phases in the order (output row remainder, output column remainder), followed by what they refer to.
const Phase* fill_phases(const Channels& c, const Form& form, const Window& g, int64_t x_block, int64_t x_row,
                         void* room) {
  Phase* phases = static_cast<Phase*>(room);
  ChannelBand* room_of_bands = reinterpret_cast<ChannelBand*>(phases + g.stride_h * g.stride_w);
  int64_t* at = reinterpret_cast<int64_t*>(room_of_bands + c.blocks());
  const ChannelBands bands = bands_of(c, form.step, room_of_bands);
  const int64_t step = g.dilation_w % g.stride_w == 0   ? g.dilation_w / g.stride_w
                       : g.stride_w % g.dilation_w == 0 ? 1
                                                        : 2;
  int64_t taps_before = 0;
  for (int64_t rh = 0; rh < g.stride_h; rh++)
    for (int64_t rw = 0; rw < g.stride_w; rw++) {
      // The output remainder p with (p + pad) % stride == r.
      const int64_t ph = ((rh - g.pad_top) % g.stride_h + g.stride_h) % g.stride_h;
      const int64_t pw = ((rw - g.pad_left) % g.stride_w + g.stride_w) % g.stride_w;
      const int64_t taps_w = taps_of(g.kernel_w, g.dilation_w, g.stride_w, rw);
      const int64_t taps = taps_of(g.kernel_h, g.dilation_h, g.stride_h, rh) * taps_w;
      // Neighbouring taps that read neighbouring pixels are one run.
      const bool rows = step == 1 && taps > 0 && form.terms == c.block && !form.picks();
      const int64_t joined = rows ? taps_w : form.joined(), length = form.picks() ? form.terms : joined * form.terms;
      phases[ph * g.stride_w + pw] = {{bands, at, taps / joined, length, false}, taps_before};
      each_chunk(bands, form.step, c.block, x_block, [&](int64_t from) {
        int64_t tap = 0;
        each_tap(g, rh, rw, [&](int64_t kh, int64_t kw) {
          if (tap++ % joined == 0)
            *at++ = from + floor_div(ph + g.pad_top - kh * g.dilation_h, g.stride_h) * x_row +
                    floor_div(pw + g.pad_left - kw * g.dilation_w, g.stride_w) * c.block;
        });
      });
      taps_before += taps;
    }
  return phases;
}

// `p` describes x, w and y as a whole; rows and pixels are those of the output.
void run(const Exec* exec, const Window& g, const ConvPass& p, const Phase* phases, int64_t x_floats,
         int64_t w_floats) {
  ConvPass all = p;
  all.runs = phases->runs;
  all.rows = ceil_div(p.rows, g.stride_h);
  all.pixels = ceil_div(p.pixels, g.stride_w);
  const double flops = 2. * p.images * all.rows * all.pixels * w_floats;
  const ConvSplit s = conv_split(exec, all, flops, x_floats, w_floats);
  parallel_for(exec, s.row_tasks * s.block_tasks, [&](int64_t t) {
    const int64_t row0 = t / s.block_tasks * s.rows, row1 = smaller(row0 + s.rows, p.images * all.rows);
    each_band(all, s, t % s.block_tasks, [&](const ChannelBand& band, int64_t block0, int64_t block1) {
      for (int64_t row = row0, end; row < row1; row = end) {
        const int64_t image = row / all.rows, y0 = row - image * all.rows;
        end = smaller(row1, (image + 1) * all.rows);
        for (int64_t ph = 0; ph < smaller(g.stride_h, p.rows); ph++)
          for (int64_t pw = 0; pw < smaller(g.stride_w, p.pixels); pw++) {
            const Phase& phase = phases[ph * g.stride_w + pw];
            ConvPass one = p;
            one.rows = ceil_div(p.rows - ph, g.stride_h);
            one.pixels = one.last_pixels = ceil_div(p.pixels - pw, g.stride_w);
            one.x.data = p.x.at(image, 0, 0);
            one.runs = phase.runs;
            one.phase_floats = phase.taps_before * (p.chunk_floats / (g.kernel_h * g.kernel_w));
            one.y.data = p.y.at(image, 0, ph) + pw * p.y.pixel;
            one.y.row *= g.stride_h;
            one.y.pixel *= g.stride_w;
            const int64_t y1 = smaller(end - image * all.rows, one.rows);
            if (y0 < y1) conv_part(one, y0, y1, band, block0, block1);
          }
      }
    });
  });
}

// Every channel has a filter of its own: the convolution with the mirrored one of pixels that lie a stride apart. Zeros
// between them cost less than phases would.
void depthwise(const conv_transpose2d_args& c, View w, const Window& g) {
  w.data = w.as<float>() + (g.kernel_h - 1) * w.stride[2] + (g.kernel_w - 1) * w.stride[3];
  w.stride[2] = -w.stride[2], w.stride[3] = -w.stride[3];
  Window window = g;
  window.stride_h = window.stride_w = 1;
  depthwise_plain(c, w, window, (g.kernel_h - 1) * g.dilation_h - g.pad_top,
                  (g.kernel_w - 1) * g.dilation_w - g.pad_left, g.stride_h, g.stride_w);
}

}  // namespace

void conv_transpose2d_pack(const conv_transpose2d_pack_args& c) {
  const View& w = c.in.weight;
  if (w.size() == 0) return;
  const View& packed = c.out.packed;
  Window g = {};
  g.kernel_h = w.shape[2], g.kernel_w = w.shape[3];
  g.stride_h = c.attr.stride_h, g.stride_w = c.attr.stride_w;
  g.dilation_h = c.attr.dilation_h, g.dilation_w = c.attr.dilation_w;
  const Weights from = Weights::of_transposed(w, c.attr.groups);
  pack(c.exec, from, g, {from.groups, from.inputs, from.outputs, c.attr.block}, Form::of(packed, c.attr.block),
       packed.as<float>());
}

// Reads at most max(0, floor(((kernel_h - 1) * dilation_h - pad_top) / stride_h)) zero rows above the input and
// max(0, floor((OH - 1 + pad_top) / stride_h) - (H - 1)) below; columns alike.
void conv_transpose2d_blocked(const conv_transpose2d_blocked_args& c) {
  const View &x = c.in.x, &w = c.in.packed;
  if (c.out.y.size() == 0) return;
  const Window g(c.attr);
  const Channels channels = channels_of(c);
  const Form form = Form::of(w, x.shape[4]);
  void* room = c.exec->scratch(2, phases_bytes(channels, form, w.shape[0], g));
  const Phase* phases = fill_phases(channels, form, g, x.stride[1], x.stride[2], room);
  run(c.exec, g, blocked_pass(c), phases, x.size(), w.size());
}

void conv_transpose2d(const conv_transpose2d_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  View w = c.in.weight;
  if (y.size() == 0) return;
  Window g(c.attr, 0, 0);
  cut_taps(w, y, x, g);
  if (is_depthwise(x, y, c.attr.groups)) return depthwise(c, w, g);
  const int64_t C = x.shape[1], OH = y.shape[2], OW = y.shape[3];
  const Weights from = Weights::of_transposed(w, c.attr.groups);
  const Channels channels = {from.groups, from.inputs, from.outputs, C < kBlock ? C : kBlock};
  const int64_t joined = g.stride_h == 1 && OH * OW > 1 ? joined_taps(g.kernel_w, g.stride_w, g.dilation_w) : 1;
  const Form form = form_of(channels, from.taps, g.stride_w == 1 ? joined : 1);
  const int64_t block = channels.block, panels = panels_of(channels, form.step);
  const int64_t top = larger(0, floor_div((g.kernel_h - 1) * g.dilation_h - g.pad_top, g.stride_h));
  const int64_t left = larger(0, floor_div((g.kernel_w - 1) * g.dilation_w - g.pad_left, g.stride_w));
  const int64_t H = top + larger(x.shape[2], (OH - 1 + g.pad_top) / g.stride_h + 1);
  const int64_t W = left + larger(x.shape[3], (OW - 1 + g.pad_left) / g.stride_w + 1);
  const Blocking b = {block, top, left, H, W, form, from.taps, panels * form.chunk_floats(from.taps)};
  const Phase* phases = nullptr;
  in_batches(
      c, b, x.shape[2] * x.shape[3], phases_bytes(channels, form, panels, g),
      [&](float* packed, void* room) {
        pack(c.exec, from, g, channels, form, packed);
        phases = fill_phases(channels, form, g, H * W * block, W * block, room);
      },
      [&](const Exec* exec, ConvPass p, int64_t x_floats, int64_t w_floats) {
        p.x.data += (top * W + left) * block;
        if (OH * OW * g.stride_h * g.stride_w == 1) join_images(p);
        run(exec, g, p, phases, x_floats, w_floats);
      });
}

}  // namespace needle::NEEDLE_ISA
