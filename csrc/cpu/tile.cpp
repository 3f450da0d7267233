// Instances of the register tile for every number of rows.
#include "cpu/tile.h"

#include "cpu/transpose.h"
#include "math/maps.h"

namespace needle::NEEDLE_ISA {
namespace {

__attribute__((noinline)) void activate_stored(const Tile& t, int rows, int blocks) {
  with_activation(t.activation, t.alpha, [&](const auto& f) {
    for (int m = 0; m < rows; m++)
      for (int j = 0; j < blocks; j++)
        for (int v = 0; v < kBlock; v += V::N) {
          float* c = t.c + m * t.c_m + j * t.c_n + v;
          f(V::load(c)).store(c);
        }
  });
}

// What follows the sums.
template <int ROWS, int BLOCKS>
NEEDLE_INLINE void finish(const Tile& t, V (&acc)[ROWS][BLOCKS * kPerBlock]) {
  constexpr int P = kPerBlock;
  if (t.accumulate) {
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
      for (int j = 0; j < BLOCKS * P; j++)
        acc[m][j] = acc[m][j] + V::load(t.c + m * t.c_m + j / P * t.c_n + j % P * V::N);
  }
  if (t.bias) {
#pragma GCC unroll 8
    for (int j = 0; j < BLOCKS * P; j++) {
      const V bias = V::load(t.bias + j * V::N);
#pragma GCC unroll 16
      for (int m = 0; m < ROWS; m++) acc[m][j] = acc[m][j] + bias;
    }
  }
  if (t.residual) {
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
      for (int j = 0; j < BLOCKS * P; j++)
        acc[m][j] = acc[m][j] + V::load(t.residual + m * t.r_m + j / P * t.r_n + j % P * V::N);
  }
  if (t.activation == kRelu || t.activation == kRelu6) {
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
      for (int j = 0; j < BLOCKS * P; j++) acc[m][j] = max(V(0.f), acc[m][j]);  // in this order NaN stays NaN
  }
  if (t.activation == kRelu6) {
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
      for (int j = 0; j < BLOCKS * P; j++) acc[m][j] = min(V(6.f), acc[m][j]);
  }
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
    for (int j = 0; j < BLOCKS * P; j++) acc[m][j].store(t.c + m * t.c_m + j / P * t.c_n + j % P * V::N);
  if (t.activation > kRelu6) activate_stored(t, ROWS, BLOCKS);
}

template <int ROWS, int BLOCKS>
void tile(const Tile& t) {
  constexpr int P = kPerBlock;
  V acc[ROWS][BLOCKS * P];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
    for (int j = 0; j < BLOCKS * P; j++) acc[m][j] = V(0.f);

  // Rows in fives off one pointer: base + {0, 1, 2, 4} * step are x86 addressing modes, and so is base + step3.
  const int64_t step = t.a_m * 4, step3 = t.a_m * 12, a_k = t.a_k, b_n = t.b_n, b_k = t.b_k, length = t.length;
  const int64_t* panels = t.panels;
  // What c holds comes into L1 a few rows at a time: the stores at the end would all miss at once and keep the next
  // tile's loads waiting (products of cold arrays are 1.02 to 1.18 times as fast). So do the next weights into L2, a
  // part with each tile: all of them with the last one wait for each other (1.05 to 1.3 times). AVX2's tile has no
  // slots left.
  constexpr bool kFetches = V::N == 16;
  constexpr int kStored = (ROWS + 3) / 4;
  const int64_t stretch = ceil_div(t.n_runs * length * kStored, ROWS);
  // Of weights, in a stretch; few rows wait for memory all the time.
  const int64_t lines = t.ahead && 2 * ROWS * BLOCKS > kTileRows * kTileBlocks ? ceil_div(t.fetch * kStored, ROWS) : 0;
  const float *b = t.b, *ahead = t.b + t.ahead;
  int stored = 0;    // rows of c that were fetched
  int64_t wait = 0;  // terms until more is fetched
  for (int64_t r = 0; r < t.n_runs; r++) {
    const char* p0 = reinterpret_cast<const char*>(t.a + t.runs[r]);
    const char* p5 = p0 + 5 * step;
    const char* p10 = p5 + 5 * step;
    if (panels) b = t.b + panels[r];
    const auto terms = [&](int64_t n) __attribute__((always_inline)) {
      for (int64_t k = n; k > 0; k--) {
        V w[BLOCKS * P];
#pragma GCC unroll 8
        for (int j = 0; j < BLOCKS * P; j++) w[j] = V::load(b + j / P * b_n + j % P * V::N);
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++) {
          const char* base = m < 5 ? p0 : m < 10 ? p5 : p10;
          const V x(*reinterpret_cast<const float*>(m % 5 == 3 ? base + step3 : base + m % 5 * step));
#pragma GCC unroll 8
          for (int j = 0; j < BLOCKS * P; j++) acc[m][j] = fma(x, w[j], acc[m][j]);
        }
        p0 += a_k * 4;
        p5 += a_k * 4;
        p10 += a_k * 4;
        b += b_k;
      }
    };
    int64_t left = r + 1 < t.n_runs ? length : length - t.cut;
    if (!kFetches) {
      terms(left);
      continue;
    }
    while (left > 0) {
      if (wait <= 0) {
        for (int end = stored + kStored; stored < ROWS && stored < end; stored++)
#pragma GCC unroll 8
          for (int j = 0; j < BLOCKS; j++) __builtin_prefetch(t.c + stored * t.c_m + j * t.c_n, 1, 3);
        for (int64_t i = 0; i < lines; i++, ahead += b_k)
#pragma GCC unroll 8
          for (int j = 0; j < BLOCKS; j++) __builtin_prefetch(ahead + j * b_n, 0, 2);
        wait += stretch;
      }
      const int64_t n = smaller(left, stretch);
      terms(n);
      left -= n;
      wait -= n;
    }
  }
  finish<ROWS, BLOCKS>(t, acc);
}

// Rows are pixels whose distance is that of the taps, so that a permuted vector serves several of both.
template <int ROWS, int TAPS>
void pick_tile(const Tile& t) {
  constexpr int P = kPerBlock;
  V acc[ROWS][P];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
    for (int j = 0; j < P; j++) acc[m][j] = V(0.f);
  const int64_t step = t.a_m, b_k = t.b_k;
  const float* b = t.b;
  for (int64_t r = 0; r < t.n_runs; r++)
    for (int64_t k = t.length; k > 0; k--, b += b_k) {
      const float* x = t.a + t.runs[r];
      V w[TAPS][P];
#pragma GCC unroll 8
      for (int tap = 0; tap < TAPS; tap++)
#pragma GCC unroll 4
        for (int j = 0; j < P; j++) w[tap][j] = V::load(b + (1 + tap) * kBlock + j * V::N);
#pragma GCC unroll 32
      for (int i = 0; i < ROWS + TAPS - 1; i++, x += step)
#pragma GCC unroll 4
        for (int j = 0; j < P; j++) {
          const V picked = V::pick(x, reinterpret_cast<const int32_t*>(b) + j * V::N);
#pragma GCC unroll 8
          for (int tap = 0; tap < TAPS; tap++)
            if (i >= tap && i - tap < ROWS) acc[i - tap][j] = fma(picked, w[tap][j], acc[i - tap][j]);
        }
    }
  finish<ROWS, 1>(t, acc);
}

constexpr int kMostDotRows = 12;

// Sums of neighbouring lanes until four are left.
template <class X>
NEEDLE_INLINE F4 fold(X a) {
  if constexpr (X::N == 16) {
    const auto half = __builtin_shufflevector(a.v, a.v, 0, 1, 2, 3, 4, 5, 6, 7) +
                      __builtin_shufflevector(a.v, a.v, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
  } else if constexpr (X::N == 8) {
    return __builtin_shufflevector(a.v, a.v, 0, 1, 2, 3) + __builtin_shufflevector(a.v, a.v, 4, 5, 6, 7);
  } else {
    return (F4)a.v;
  }
}

// The sum of each over its lanes.
NEEDLE_INLINE F4 sums(F4 a, F4 b, F4 c, F4 d) {
  const F4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const F4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// As many as the registers hold the sums of, beside the numbers of all rows or the weights of a place, whichever are
// fewer, and one of the others.
constexpr int dot_rows(int outputs) {
  int rows = 1;
  for (int r = 2; r <= kMostDotRows; r++)
    if (r * outputs + (r < outputs ? r : outputs) < kRegisters) rows = r;
  return rows;
}

template <int ROWS, int OUTPUTS>
void dot_tile(const Tile& t) {
  constexpr int P = kPerBlock;
  constexpr bool kHoldRows = ROWS < OUTPUTS;
  constexpr int kHeld = kHoldRows ? ROWS : OUTPUTS, kPassing = kHoldRows ? OUTPUTS : ROWS;
  if constexpr (ROWS <= dot_rows(OUTPUTS)) {
    V acc[ROWS][OUTPUTS];
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
      for (int o = 0; o < OUTPUTS; o++) acc[m][o] = V(0.f);
    const int64_t step = t.a_m, length = t.length;
    const float* b = t.b;
    for (int64_t r = 0; r < t.n_runs; r++) {
      const float* a = t.a + t.runs[r];
      if (t.panels) b = t.b + t.panels[r];
      for (int64_t k = 0; k < length; k += kBlock, a += kBlock, b += OUTPUTS * kBlock)
#pragma GCC unroll 4
        for (int v = 0; v < kBlock; v += V::N) {
          const auto number = [&](int m) { return V::load(a + m * step + v); };
          const auto weight = [&](int o) { return V::load(b + o * kBlock + v); };
          V held[kHeld];
#pragma GCC unroll 8
          for (int i = 0; i < kHeld; i++) held[i] = kHoldRows ? number(i) : weight(i);
#pragma GCC unroll 16
          for (int j = 0; j < kPassing; j++) {
            const V one = kHoldRows ? weight(j) : number(j);
#pragma GCC unroll 8
            for (int i = 0; i < kHeld; i++) {
              V& sum = kHoldRows ? acc[i][j % OUTPUTS] : acc[j % ROWS][i];
              sum = fma(held[i], one, sum);
            }
          }
        }
    }
    V all[ROWS][P];
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
      float lanes[kBlock] = {};
#pragma GCC unroll 2
      for (int o = 0; o < OUTPUTS; o += 4) {
        const auto part = [&](int i) { return i < OUTPUTS ? fold(acc[m][i < OUTPUTS ? i : 0]) : F4{}; };
        store4(lanes + o, sums(part(o), part(o + 1), part(o + 2), part(o + 3)));
      }
#pragma GCC unroll 4
      for (int j = 0; j < P; j++) all[m][j] = V::load(lanes + j * V::N);
    }
    finish<ROWS, 1>(t, all);
  }
}

using TileFn = void (*)(const Tile&);
#define UP_TO_3(tile, N) nullptr, tile<1, N>, tile<2, N>, tile<3, N>
#define UP_TO_6(tile, N) UP_TO_3(tile, N), tile<4, N>, tile<5, N>, tile<6, N>
#define UP_TO_7(tile, N) UP_TO_6(tile, N), tile<7, N>
#define UP_TO_12(tile, N) UP_TO_7(tile, N), tile<8, N>, tile<9, N>, tile<10, N>, tile<11, N>, tile<12, N>
#define UP_TO_14(tile, N) UP_TO_12(tile, N), tile<13, N>, tile<14, N>
#if NEEDLE_REGISTER_BLOCKS == 32
#define UP_TO_MOST UP_TO_14
constexpr TileFn two_blocks[] = {UP_TO_14(tile, 2)}, four_blocks[] = {UP_TO_7(tile, 4)};
constexpr const TileFn *two = two_blocks, *four = four_blocks;
#elif NEEDLE_REGISTER_BLOCKS == 8
#define UP_TO_MOST UP_TO_6
constexpr TileFn four_blocks[] = {nullptr, tile<1, 4>};
constexpr const TileFn *two = nullptr, *four = four_blocks;
#else
#define UP_TO_MOST UP_TO_3
constexpr const TileFn *two = nullptr, *four = nullptr;
#endif
constexpr TileFn one_block[] = {UP_TO_MOST(tile, 1)};
constexpr const TileFn* table[] = {nullptr, one_block, two, nullptr, four};
constexpr TileFn pick_table[][kTileRows + 1] = {
    {UP_TO_MOST(pick_tile, 1)}, {UP_TO_MOST(pick_tile, 3)}, {UP_TO_MOST(pick_tile, 5)}, {UP_TO_MOST(pick_tile, 7)}};
constexpr TileFn dot_table[][kMostDotRows + 1] = {
    {UP_TO_12(dot_tile, 1)}, {UP_TO_12(dot_tile, 2)}, {UP_TO_12(dot_tile, 3)}, {UP_TO_12(dot_tile, 4)},
    {UP_TO_12(dot_tile, 5)}, {UP_TO_12(dot_tile, 6)}, {UP_TO_12(dot_tile, 7)}, {UP_TO_12(dot_tile, 8)}};
static_assert(sizeof dot_table / sizeof *dot_table == kMostDots);
static_assert(sizeof pick_table / sizeof *pick_table == kPickTaps / 2 + 1);

}  // namespace

void tiles(Tile t, int blocks, int64_t rows) {
  const int most = t.dots ? dot_rows(t.dots) : blocks == kWideBlocks ? kWideRows : kTileRows;
  const int64_t n_tiles = ceil_div(rows, most);
  const TileFn* fn = t.dots ? dot_table[t.dots - 1] : t.picks > 0 ? pick_table[t.picks / 2] : table[blocks];
  t.fetch = ceil_div(t.fetch, n_tiles);
  for (int64_t left = n_tiles; left > 0; left--) {
    const int64_t n = ceil_div(rows, left);
    fn[n](t);
    t.a += n * t.a_m;
    t.c += n * t.c_m;
    if (t.residual) t.residual += n * t.r_m;
    if (t.ahead) t.ahead += t.fetch * t.b_k;
    rows -= n;
  }
}

}  // namespace needle::NEEDLE_ISA
