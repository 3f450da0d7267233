// Weight gradients of convolutions with narrow groups: what lanes of dy meet in x is broadcast or picked in the terms
// of the forward pass (bands.h), for all taps of a kernel row at a time. Depthwise kernels have channels in the lanes
// only.
#include "cpu/conv2d_weight_grad.h"

namespace needle::NEEDLE_ISA {
namespace {

// Taps that a depthwise kernel sums up at a time.
constexpr int kTapRows = 3, kTapColumns = 5;

struct Lanes {
  const float *x, *dy;
  int64_t x_row, x_pixel, x_tap_row, x_tap, dy_row;
  int64_t rows, pixels;
  float* sums;
  int64_t sums_row;
};

template <int ROWS, int COLUMNS>
void taps(const Lanes& t) {
  for (int v = 0; v < kBlock; v += V::N) {
    V acc[ROWS][COLUMNS];
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
      for (int j = 0; j < COLUMNS; j++) acc[i][j] = V(0.f);
    for (int64_t y = 0; y < t.rows; y++) {
      const float *x = t.x + y * t.x_row + v, *dy = t.dy + y * t.dy_row + v;
      for (int64_t i = t.pixels; i > 0; i--, x += t.x_pixel, dy += kBlock) {
        const V d = V::load(dy);
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
          for (int j = 0; j < COLUMNS; j++) acc[i][j] = fma(V::load(x + i * t.x_tap_row + j * t.x_tap), d, acc[i][j]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
      for (int j = 0; j < COLUMNS; j++) {
        float* to = t.sums + i * t.sums_row + j * kBlock + v;
        (acc[i][j] + V::load(to)).store(to);
      }
  }
}

using TapsFn = void (*)(const Lanes&);
#define COLUMNS(R) {taps<R, 1>, taps<R, 2>, taps<R, 3>, taps<R, 4>, taps<R, 5>}
constexpr TapsFn kTaps[kTapRows][kTapColumns] = {COLUMNS(1), COLUMNS(2), COLUMNS(3)};

// Rows [row0, row1) of all images for one block: [tap][16].
void add_rows(const Gradient& g, int64_t block, int64_t row0, int64_t row1, float* sums) {
  const Window& w = g.window;
  std::memset(sums, 0, g.taps() * kBlock * 4);
  Lanes t = {};
  t.x_row = w.stride_h * g.x.row;
  t.x_pixel = w.stride_w * kBlock;
  t.x_tap = w.dilation_w * kBlock;
  t.x_tap_row = w.dilation_h * g.x.row;
  t.dy_row = g.dy.row;
  t.sums_row = w.kernel_w * kBlock;
  for (int64_t row = row0; row < row1; row += t.rows) {
    const int64_t image = row / g.height, y = row % g.height;
    t.rows = smaller(smaller(larger(1, kPixels / g.width), row1 - row), g.height - y);
    evenly(g.width, kPixels, [&](int64_t column, int64_t pixels) {
      t.pixels = pixels;
      t.dy = g.dy.at(image, block, y) + column * kBlock;
      evenly(w.kernel_h, kTapRows, [&](int64_t kh, int64_t rows) {
        evenly(w.kernel_w, kTapColumns, [&](int64_t kw, int64_t columns) {
          t.x = g.x.at(image, block, y * w.stride_h + kh * w.dilation_h) + column * t.x_pixel + kw * t.x_tap;
          t.sums = sums + (kh * w.kernel_w + kw) * kBlock;
          kTaps[rows - 1][columns - 1](t);
        });
      });
    });
  }
}

constexpr int kTerms = V::N == 16 ? 8 : 4;  // sums of so many terms and of kRowTaps taps fit the registers

// sums[term * sums_term + tap * 16 + lane] += sum over pixels of dy[pixel][lane] times the number that the lane meets
// in x[offsets[term] + (pixel + tap) * x_pixel], there at its place among 16 if lanes pick.
struct Terms {
  const float *x, *dy;
  int64_t x_row, x_pixel, dy_row, rows, pixels;
  const int64_t* offsets;
  const int32_t* const* places;
  float* sums;
  int64_t sums_term;
};

// Pixels of x pass by, and each meets the last TAPS pixels of dy.
template <int TERMS, int TAPS, bool PICKS>
void terms(const Terms& t) {
  for (int v = 0; v < kBlock; v += V::N) {
    V acc[TERMS][TAPS];
#pragma GCC unroll 8
    for (int k = 0; k < TERMS; k++)
#pragma GCC unroll 4
      for (int tap = 0; tap < TAPS; tap++) acc[k][tap] = V(0.f);
    for (int64_t y = 0; y < t.rows; y++) {
      const float *x = t.x + y * t.x_row, *dy = t.dy + y * t.dy_row + v;
      V d[TAPS];
#pragma GCC unroll 4
      for (int tap = 0; tap < TAPS; tap++) d[tap] = V(0.f);
      for (int64_t i = 0; i < t.pixels + TAPS - 1; i++, x += t.x_pixel, dy += kBlock) {
#pragma GCC unroll 4
        for (int tap = TAPS - 1; tap > 0; tap--) d[tap] = d[tap - 1];
        d[0] = i < t.pixels ? V::load(dy) : V(0.f);
#pragma GCC unroll 8
        for (int k = 0; k < TERMS; k++) {
          const float* at = x + t.offsets[k];
          const V met = PICKS ? V::pick(at, t.places[k] + v) : V(*at);
#pragma GCC unroll 4
          for (int tap = 0; tap < TAPS; tap++) acc[k][tap] = fma(met, d[tap], acc[k][tap]);
        }
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < TERMS; k++)
#pragma GCC unroll 4
      for (int tap = 0; tap < TAPS; tap++) {
        float* to = t.sums + k * t.sums_term + tap * kBlock + v;
        (acc[k][tap] + V::load(to)).store(to);
      }
  }
}

using TermsFn = void (*)(const Terms&);
#define TAPS_OF(K, P) {terms<K, 1, P>, terms<K, 2, P>, terms<K, 3, P>}
#if defined(NEEDLE_ISA_AVX512)
#define ALL_TERMS(P)                                           \
  {TAPS_OF(1, P), TAPS_OF(2, P), TAPS_OF(3, P), TAPS_OF(4, P), \
   TAPS_OF(5, P), TAPS_OF(6, P), TAPS_OF(7, P), TAPS_OF(8, P)}
#else
#define ALL_TERMS(P) {TAPS_OF(1, P), TAPS_OF(2, P), TAPS_OF(3, P), TAPS_OF(4, P)}
#endif
constexpr TermsFn kTermsFn[2][kTerms][kRowTaps] = {ALL_TERMS(false), ALL_TERMS(true)};

// The terms of one output block: what they meet, where it lies in x, and where their sums belong.
struct BlockTerms {
  const Gradient& g;
  Channels channels;
  Form form;
  int64_t row;   // taps that one pass over pixels of x may serve
  int64_t most;  // terms of any block
  Picks* picks;  // of every chunk
  int64_t* offsets;
  const int32_t** places;

  int64_t floats() const { return most * row * kBlock; }
  static int64_t bytes(int64_t chunks, int64_t most) {
    return chunks * sizeof(Picks) + most * (sizeof(int64_t) + sizeof(int32_t*));
  }

  // [chunk][kernel row][kernel column, if they do not pass together][term]
  template <class F>
  void each(const ChannelBand& band, int64_t block, const F& f) {
    const Window& w = g.window;
    int64_t n = 0;
    for (int64_t i = 0; i < band.chunks; i++) {
      picks_of(channels, form, block, band.chunk + i, picks[i]);
      const int64_t channel = (band.chunk + i) * form.step;
      for (int64_t kh = 0; kh < w.kernel_h; kh++)
        for (int64_t kw = 0; kw < w.kernel_w; kw += row)
          for (int64_t k = 0; k < form.terms; k++, n++)
            f(n, picks[i], k, kh, kw,
              channel / kBlock * g.x.channels + channel % kBlock + kh * w.dilation_h * g.x.row +
                  kw * w.dilation_w * kBlock);
    }
  }
};

// Rows [row0, row1) of all images for one block: [term][tap of a row][16].
void add_terms(BlockTerms& b, const ChannelBand& band, int64_t block, int64_t row0, int64_t row1, float* sums) {
  const Gradient& g = b.g;
  std::memset(sums, 0, b.floats() * 4);
  int64_t count = 0;
  b.each(band, block, [&](int64_t n, const Picks& picks, int64_t k, int64_t, int64_t, int64_t offset) {
    b.offsets[n] = offset + (b.form.picks() ? 0 : k);
    b.places[n] = picks.place + k * kBlock;
    count = n + 1;
  });
  Terms t = {};
  t.x_row = g.window.stride_h * g.x.row;
  t.x_pixel = g.window.stride_w * kBlock;
  t.dy_row = g.dy.row;
  t.sums_term = b.row * kBlock;
  for (int64_t row = row0; row < row1; row += t.rows) {
    const int64_t image = row / g.height, y = row % g.height;
    t.rows = smaller(smaller(larger(1, kPixels / g.width), row1 - row), g.height - y);
    evenly(g.width, kPixels, [&](int64_t column, int64_t pixels) {
      t.pixels = pixels;
      t.dy = g.dy.at(image, block, y) + column * kBlock;
      evenly(count, kTerms, [&](int64_t first, int64_t n) {
        t.offsets = b.offsets + first;
        t.places = b.places + first;
        evenly(b.row, kRowTaps, [&](int64_t tap, int64_t taps) {
          t.x = g.x.at(image, 0, y * g.window.stride_h) + (column + tap) * t.x_pixel;
          t.sums = sums + first * t.sums_term + tap * kBlock;
          kTermsFn[b.form.picks()][n - 1][taps - 1](t);
        });
      });
    });
  }
}

void write_terms(BlockTerms& b, const ChannelBand& band, int64_t block, const float* sums) {
  const View& dw = b.g.dw;
  b.each(band, block, [&](int64_t n, const Picks& picks, int64_t k, int64_t kh, int64_t kw, int64_t) {
    for (int64_t lane = 0; lane < kBlock; lane++) {
      const int64_t input = picks.input[k * kBlock + lane];
      if (input < 0) continue;
      float* to = dw.as<float>() + (block * kBlock + lane) * dw.stride[0] + input * dw.stride[1] + kh * dw.stride[2];
      for (int64_t tap = 0; tap < b.row; tap++) to[(kw + tap) * dw.stride[3]] = sums[(n * b.row + tap) * kBlock + lane];
    }
  });
}

}  // namespace

void depthwise_gradient(const Exec* exec, const Gradient& g) {
  const int64_t channels = g.out_channels(), blocks = ceil_div(channels, kBlock), rows = g.images * g.height;
  const int64_t floats = g.taps() * kBlock, columns = g.window.kernel_w;
  const double work = 8. * static_cast<double>(g.pixels() * blocks * floats);  // at some quarter of the FMA peak
  const int64_t parts = larger(1, smaller(rows, stretches(g.pixels(), blocks, kStretch)));
  float* sums = scratch<float>(exec, 2, blocks * parts * floats);
  parallel_parts(exec, blocks * parts, work, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      add_rows(g, t / parts, rows * (t % parts) / parts, rows * (t % parts + 1) / parts, sums + t * floats);
  });
  for (int64_t block = 0; block < blocks; block++) {
    float* all = sums + block * parts * floats;
    add_parts(all, floats, parts, floats);
    for (int64_t c = block * kBlock; c < smaller(channels, (block + 1) * kBlock); c++)
      for (int64_t tap = 0; tap < g.taps(); tap++)
        g.dw.as<float>()[c * g.dw.stride[0] + tap / columns * g.dw.stride[2] + tap % columns * g.dw.stride[3]] =
            all[tap * kBlock + c % kBlock];
  }
}

void narrow_gradient(const Exec* exec, const Gradient& g) {
  const Window& w = g.window;
  const Channels channels = {g.groups, g.inputs, g.outputs, kBlock};
  const int64_t row = w.stride_w == w.dilation_w ? w.kernel_w : 1;
  const Form form = form_of(channels, g.taps(), row);
  ChannelBand* room = static_cast<ChannelBand*>(exec->scratch(0, channels.blocks() * sizeof(ChannelBand)));
  const ChannelBands bands = bands_of(channels, form.step, room);
  int64_t chunks = 0;
  for (int64_t i = 0; i < bands.count; i++) chunks = larger(chunks, bands.data[i].chunks);
  const int64_t most = chunks * form.terms * g.taps() / row, blocks = channels.blocks(), rows = g.images * g.height;
  const int64_t floats = most * row * kBlock;
  const int64_t parts = larger(1, smaller(rows, stretches(g.pixels(), blocks, kStretch)));
  float* sums = scratch<float>(exec, 2, blocks * parts * floats);
  const auto in_tasks = [&](int64_t tasks, double work, const auto& f) {
    parallel_parts(exec, tasks, work, [&](int64_t begin, int64_t end) {
      char* own = scratch<char>(exec, 1, BlockTerms::bytes(chunks, most));
      Picks* picks = reinterpret_cast<Picks*>(own);
      int64_t* offsets = reinterpret_cast<int64_t*>(picks + chunks);
      BlockTerms b = {g, channels, form, row, most, picks, offsets, reinterpret_cast<const int32_t**>(offsets + most)};
      const ChannelBand* band = bands.data;
      for (int64_t t = begin; t < end; t++) {
        const int64_t block = t * blocks / tasks;
        while (block >= band->block + band->blocks) band++;
        f(b, *band, block, t);
      }
    });
  };
  in_tasks(blocks * parts, 2. * static_cast<double>(g.pixels() * blocks * floats),
           [&](BlockTerms& b, const ChannelBand& band, int64_t block, int64_t t) {
             add_terms(b, band, block, rows * (t % parts) / parts, rows * (t % parts + 1) / parts, sums + t * floats);
           });
  in_tasks(blocks, 4. * static_cast<double>(blocks * parts * floats),
           [&](BlockTerms& b, const ChannelBand& band, int64_t block, int64_t) {
             float* all = sums + block * parts * floats;
             add_parts(all, floats, parts, floats);
             write_terms(b, band, block, all);
           });
}

}  // namespace needle::NEEDLE_ISA
