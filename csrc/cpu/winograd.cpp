// Fused Winograd convolution on nChw16c: 3 x 3, stride 1. A block of tiles goes through input transform, products and
// output transform while it lies in the cache (Gelashvili, Shavit and Zlateski, arXiv 1912.02165).
#include "cpu/winograd.h"

#include "cpu/conv.h"

namespace needle::NEEDLE_ISA {
namespace {

struct Job {
  int64_t tiles_y, tiles_x, height, width;  // of an output image
  int64_t in_blocks, out_blocks;
  Images<const float> x;  // includes the padding
  const float* w;         // [ob][xi][ic][16]
  Images<float> y;
  const float* bias;
  Images<const float> residual;
  int activation;
  float alpha;
  bool pool;  // y has the largest of every 2 x 2 pixels
  // Transformed input lies as [xi][ib][tile][16], `pitch` tiles to an input block, `v_xi` floats to a plane.
  int64_t pitch, v_xi;
  const int64_t* runs;  // of the input blocks of one tile
};

struct Tiles {
  int64_t first, n;
};

struct Place {
  int64_t image, y, x;  // of the tile's first pixel
  int rows, cols;       // that lie in the image
};

template <class F>
NEEDLE_INLINE Place place(const Job& j, int64_t tile) {
  const int64_t row = tile / j.tiles_x, image = row / j.tiles_y;
  const int64_t y = (row - image * j.tiles_y) * F::kOut, x = (tile - row * j.tiles_x) * F::kOut;
  return {image, y, x, static_cast<int>(smaller(F::kOut, j.height - y)),
          static_cast<int>(smaller(F::kOut, j.width - x))};
}

// Pairs [from, to) of (input block, tile) are transformed.
template <class F>
void transform_inputs(const Job& j, Tiles t, int64_t from, int64_t to, float* v) {
  constexpr int A = F::kIn;
  alignas(64) float edge[A * A * kBlock];
  for (int64_t i = from; i < to; i++) {
    const int64_t ib = i / t.n, tile = i - ib * t.n;
    const Place p = place<F>(j, t.first + tile);
    const float* d = j.x.at(p.image, ib, p.y) + p.x * kBlock;
    int64_t d_row = j.x.row;
    for (int y = 0; y < A; y++)  // the tile after the next: hardware follows too few rows at once
      for (int x = 2 * F::kOut + 2; x < 3 * F::kOut + 2; x++) __builtin_prefetch(d + y * d_row + x * kBlock);
    if (p.rows < F::kOut || p.cols < F::kOut) {  // beyond the halo lies other data
      std::memset(edge, 0, sizeof edge);
      for (int y = 0; y < p.rows + 2; y++)
        std::memcpy(edge + y * A * kBlock, d + y * d_row, (p.cols + 2) * kBlock * sizeof(float));
      d = edge;
      d_row = A * kBlock;
    }
    winograd_input<F>(d, d_row, v + (ib * j.pitch + tile) * kBlock, j.v_xi);
  }
}

__attribute__((noinline)) void activate_stored(const Job& j, float* y, int rows, int cols) {
  for (int r = 0; r < rows; r++)
    for (int at = 0; at < cols * kBlock; at += V::N) {
      float* p = y + r * j.y.row + at;
      activate(j.activation, j.alpha, V::load(p)).store(p);
    }
}

// kPool: y has the largest of every 2 x 2 pixels, which are in one tile; then there is no residual, and no activation
// but ReLU.
template <class F, bool kPool>
void transform_outputs(const Job& j, int64_t first, int64_t n, int64_t ob, const float* m, int64_t m_xi) {
  constexpr int kStep = kPool ? 2 : 1;
  for (int64_t i = 0; i < n; i++) {
    const Place p = place<F>(j, first + i);
    float* to = j.y.at(p.image, ob, p.y / kStep) + p.x / kStep * kBlock;
    const float* r = j.residual ? j.residual.at(p.image, ob, p.y) + p.x * j.residual.pixel : nullptr;
    const float* bias = j.bias ? j.bias + ob * kBlock : nullptr;
    const bool relu = j.activation == kRelu;
    V top[F::kOut / 2] = {};  // of every window in a row of them, as far as its pixels came
    winograd_output<F>(m + i * kBlock, m_xi, p.rows, p.cols, [&](int y, int x, int lane, V value) {
      if (kPool) {
        V& v = top[x / 2];
        v = y % 2 == 0 && x % 2 == 0 ? value : maximum_map::apply(v, value, v, v);
        if (y % 2 == 0 || x % 2 == 0) return;
        value = v;
      }
      if (bias) value = value + V::load(bias + lane);
      if (r) value = value + V::load(r + y * j.residual.row + x * j.residual.pixel + lane);
      if (relu) value = max(V(0.f), value);
      value.store(to + y / kStep * j.y.row + x / kStep * kBlock + lane);
    });
    if (j.activation > kRelu) activate_stored(j, to, p.rows, p.cols);
  }
}

// Products that are formed at a time and stay in L2: of so many tiles, for one or two blocks.
constexpr int64_t kProductTiles = kTileRows * (56 / kTileRows), kProducts = kProductTiles * kTileBlocks;
static_assert(kProducts >= kWideRows * kWideBlocks);

// Output blocks [ob, end) of tiles from their transformed input; `m` holds the products of one group of blocks.
template <class F>
void products(const Job& j, Tiles t, const float* v, int64_t ob, int64_t end, float* m) {
  constexpr int kXi = F::kIn * F::kIn;
  const int64_t step = ceil_div(t.n, ceil_div(t.n, kProductTiles));
  Tile g = {};
  g.a_m = g.c_m = g.b_k = kBlock;
  g.a_k = 1;
  g.runs = j.runs;
  g.length = kBlock;
  g.b_n = kXi * j.in_blocks * kBlock * kBlock;
  for (int64_t blocks; ob < end; ob += blocks) {
    blocks = tile_blocks(step, end - ob);
    for (int64_t first = 0; first < t.n; first += step) {
      const int64_t n = smaller(step, t.n - first), m_xi = (blocks * n + 1) * kBlock;
      g.c_n = n * kBlock;
      for (int xi = 0; xi < kXi; xi++)
        for (int64_t ib = 0; ib < j.in_blocks; ib += kChain / kBlock) {
          g.a = v + xi * j.v_xi + (ib * j.pitch + first) * kBlock;
          g.n_runs = smaller(kChain / kBlock, j.in_blocks - ib);
          g.b = j.w + ob * g.b_n + (xi * j.in_blocks + ib) * kBlock * kBlock;
          g.c = m + xi * m_xi;
          g.accumulate = ib > 0;
          tiles(g, static_cast<int>(blocks), n);
        }
      for (int64_t b = 0; b < blocks; b++)
        (j.pool ? transform_outputs<F, true> : transform_outputs<F, false>)(j, t.first + first, n, ob + b,
                                                                            m + b * g.c_n, m_xi);
    }
  }
}

// With fewer tiles for each thread than this the threads share the output channels, and every weight is read once.
constexpr int64_t kTilesPerThread = V::N == 16 ? 8 : 12;
constexpr int64_t kFewTiles = 28;          // so few are not divided further: every part reads all weights
constexpr int64_t kOwnBytes = 512 << 10;   // transformed input of a task: half of a common L2
constexpr int64_t kSharedBytes = 8 << 20;  // transformed input that all threads read: a part of L3

template <class F>
void run(const Exec* exec, Job& j, int64_t images) {
  constexpr int kXi = F::kIn * F::kIn;
  j.tiles_y = ceil_div(j.height, F::kOut);
  j.tiles_x = ceil_div(j.width, F::kOut);
  const int64_t all = images * j.tiles_y * j.tiles_x, tile_floats = kXi * j.in_blocks * kBlock;
  const double flops = 2. * kXi * all * j.in_blocks * j.out_blocks * kBlock * kBlock;
  const int64_t threads = smaller(exec->threads, task_count(exec, flops));
  const bool shared = threads > 1 && all < kTilesPerThread * threads;
  const int64_t room = (shared ? kSharedBytes : kOwnBytes) / 4 / (tile_floats * kTileRows) * kTileRows;
  int64_t parts = all < kFewTiles ? 1 : ceil_div(all, larger(room, kTileRows));
  if (!shared) parts = ceil_div(parts, threads) * threads;
  j.pitch = ceil_div(all, parts);
  parts = ceil_div(all, j.pitch);
  j.v_xi = (j.in_blocks * j.pitch + 1) * kBlock;  // + 1: a stride of 4 KB would use a few sets of the cache only
  int64_t* runs = scratch<int64_t>(exec, 3, j.in_blocks);
  for (int64_t ib = 0; ib < j.in_blocks; ib++) runs[ib] = ib * j.pitch * kBlock;
  j.runs = runs;

  const int64_t v_floats = kXi * j.v_xi, m_floats = kXi * (kProducts + 1) * kBlock;
  float* v = shared ? scratch<float>(exec, 2, v_floats) : nullptr;
  auto part = [&](int64_t i) { return Tiles{i * j.pitch, smaller(j.pitch, all - i * j.pitch)}; };
  if (!shared) {
    parallel_for(exec, parts, [&](int64_t i) {
      float *own = scratch<float>(exec, 0, v_floats), *m = scratch<float>(exec, 1, m_floats);
      transform_inputs<F>(j, part(i), 0, j.in_blocks * part(i).n, own);
      products<F>(j, part(i), own, 0, j.out_blocks, m);
    });
    return;
  }
  for (int64_t i = 0; i < parts; i++) {
    const Tiles t = part(i);
    const int64_t pairs = j.in_blocks * t.n;
    parallel_parts(exec, pairs, 400. * pairs * kBlock,
                   [&](int64_t begin, int64_t end) { transform_inputs<F>(j, t, begin, end, v); });
    const int64_t blocks = tile_blocks(t.n, j.out_blocks), units = ceil_div(j.out_blocks, blocks);
    const int64_t stretches = smaller(ceil_div(t.n, kTileRows), ceil_div(2 * threads, units));
    parallel_for(exec, units * stretches, [&](int64_t task) {
      float* m = scratch<float>(exec, 1, m_floats);
      const int64_t ob = task / stretches * blocks, stretch = task % stretches;
      const int64_t first = t.n * stretch / stretches, n = t.n * (stretch + 1) / stretches - first;
      products<F>(j, {t.first + first, n}, v + first * kBlock, ob, smaller(j.out_blocks, ob + blocks), m);
    });
  }
}

// A few inputs are transformed in L1 and then copied: planes of the result lie so far apart that they share cache sets.
template <class F>
void pack(const Exec* exec, const View& view, float* dst) {
  constexpr int kTaps = 9, kXi = F::kIn * F::kIn, kInputs = 8;
  const Weights w = Weights::of(view, 1);
  const int64_t channels = ceil_div(w.inputs, kBlock) * kBlock, blocks = ceil_div(w.outputs, kBlock);
  int32_t rows[kBlock * kTaps];
  for (int i = 0; i < kBlock; i++)
    for (int t = 0; t < kTaps; t++) rows[i * kTaps + w.position(t / 3, t % 3)] = i * kTaps + t;
  const double work = 20. * kXi * blocks * channels * kBlock;
  pack_parallel(exec, w.s_output, w.s_input, blocks, channels, kBlock, kBlock, work,
                [&](int64_t block, int64_t last, int64_t i0, int64_t i1) {
                  alignas(64) float filters[kBlock * kTaps * kBlock], planes[kXi * kInputs * kBlock];
                  for (; block < last; block++) {
                    pack_inputs(w, block * kBlock, i0, i1, {filters, 1, 0, rows});
                    for (int first = 0; first < kBlock; first += kInputs) {
                      for (int i = 0; i < kInputs; i++)
                        winograd_filter<F>(filters + (first + i) * kTaps * kBlock, planes + i * kBlock,
                                           kInputs * kBlock);
                      for (int xi = 0; xi < kXi; xi++)
                        std::memcpy(dst + ((block * kXi + xi) * channels + i0 + first) * kBlock,
                                    planes + xi * kInputs * kBlock, kInputs * kBlock * 4);
                    }
                  }
                });
}

template <class F, class Args>
void convolve(const Args& c) {
  const View &x = c.in.x, &y = c.out.y;
  if (y.size() == 0) return;
  Job j = {};
  j.pool = c.attr.pool;
  j.height = y.shape[2] * (j.pool ? 2 : 1);
  j.width = y.shape[3] * (j.pool ? 2 : 1);
  j.in_blocks = x.shape[1];
  j.out_blocks = y.shape[1];
  j.x = Images<const float>::of(x);
  j.x.data -= c.attr.pad_top * j.x.row + c.attr.pad_left * kBlock;
  j.w = c.in.packed.template as<const float>();
  j.y = Images<float>::of(y);
  j.bias = c.in.bias.template as<const float>();
  j.residual = Images<const float>::of(c.in.residual);
  j.activation = static_cast<int>(c.attr.activation);
  j.alpha = static_cast<float>(c.attr.alpha);
  run<F>(c.exec, j, y.shape[0]);
}

}  // namespace

void winograd_pack(const winograd_pack_args& c) {
  if (c.out.packed.size() == 0) return;
  if (c.attr.tile == Winograd4::kOut)
    pack<Winograd4>(c.exec, c.in.weight, c.out.packed.as<float>());
  else
    pack<Winograd2>(c.exec, c.in.weight, c.out.packed.as<float>());
}

void conv2d_winograd_f2(const conv2d_winograd_f2_args& c) { convolve<Winograd2>(c); }
void conv2d_winograd_f4(const conv2d_winograd_f4_args& c) { convolve<Winograd4>(c); }

}  // namespace needle::NEEDLE_ISA
