// Instances of the register tile for every number of rows.
#include "cpu/tile.h"

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

template <int ROWS, int BLOCKS>
void tile(const Tile& t) {
  constexpr int P = kPerBlock;
  V acc[ROWS][BLOCKS * P];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
    for (int j = 0; j < BLOCKS * P; j++) acc[m][j] = V(0.f);

  // Rows in fives off one pointer: base + {0, 1, 2, 4} * step are x86 addressing modes, and so is base + step3.
  const int64_t step = t.a_m * 4, step3 = t.a_m * 12, a_k = t.a_k, b_n = t.b_n, b_k = t.b_k, length = t.length,
                ahead = t.ahead;
  const float* b = t.b;
  for (int64_t r = 0; r < t.n_runs; r++) {
    const char* p0 = reinterpret_cast<const char*>(t.a + t.runs[r]);
    const char* p5 = p0 + 5 * step;
    const char* p10 = p5 + 5 * step;
    for (int64_t k = r + 1 < t.n_runs ? length : length - t.cut; k > 0; k--) {
      V w[BLOCKS * P];
#pragma GCC unroll 8
      for (int j = 0; j < BLOCKS * P; j++) w[j] = V::load(b + j / P * b_n + j % P * V::N);
      if (V::N == 16 && 2 * ROWS * BLOCKS > kTileRows * kTileBlocks) {  // AVX2's tile has no slots left for them
#pragma GCC unroll 8
        for (int j = 0; j < BLOCKS; j++) __builtin_prefetch(b + ahead + j * b_n, 0, 2);
      }
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
  }

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

using TileFn = void (*)(const Tile&);
#define UP_TO_3(B) nullptr, tile<1, B>, tile<2, B>, tile<3, B>
#define UP_TO_6(B) UP_TO_3(B), tile<4, B>, tile<5, B>, tile<6, B>
#define UP_TO_7(B) UP_TO_6(B), tile<7, B>
#define UP_TO_14(B) UP_TO_7(B), tile<8, B>, tile<9, B>, tile<10, B>, tile<11, B>, tile<12, B>, tile<13, B>, tile<14, B>
#if defined(NEEDLE_ISA_AVX512)
constexpr TileFn one_block[] = {UP_TO_14(1)}, two_blocks[] = {UP_TO_14(2)}, four_blocks[] = {UP_TO_7(4)};
constexpr const TileFn* table[] = {nullptr, one_block, two_blocks, nullptr, four_blocks};
#elif defined(NEEDLE_ISA_AVX2)
constexpr TileFn one_block[] = {UP_TO_6(1)}, four_blocks[] = {nullptr, tile<1, 4>};
constexpr const TileFn* table[] = {nullptr, one_block, nullptr, nullptr, four_blocks};
#else
constexpr TileFn one_block[] = {UP_TO_3(1)};
constexpr const TileFn* table[] = {nullptr, one_block, nullptr, nullptr, nullptr};
#endif

}  // namespace

void tiles(Tile t, int blocks, int64_t rows) {
  const int most = blocks == kWideBlocks ? kWideRows : kTileRows;
  const int64_t ahead = t.ahead;
  const TileFn* fn = table[blocks];
  for (int64_t left = ceil_div(rows, most); left > 0; left--) {
    const int64_t n = ceil_div(rows, left);
    t.ahead = left == 1 ? ahead : 0;
    fn[n](t);
    t.a += n * t.a_m;
    t.c += n * t.c_m;
    if (t.residual) t.residual += n * t.r_m;
    rows -= n;
  }
}

}  // namespace needle::NEEDLE_ISA
