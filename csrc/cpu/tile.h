// The register tile under every matrix product and convolution: some rows ("pixels") times a few blocks of 16 channels,
// all of K accumulated in registers.
#pragma once
#include "cpu/simd.h"

namespace needle::NEEDLE_ISA {

// c[m][j] = sum over runs r and k < length of  a[runs[r] + m*a_m + k*a_k] * b[(r*length + k)*b_k + j*b_n .. +16] (with
// panels, b[panels[r] + k*b_k + j*b_n .. +16])
// or, if lanes pick, sum over taps of a[runs[r] + (m + tap)*a_m + lanes[..]] * b[(r*length + k)*b_k + 16 + 16*tap ..
// +16] for j = 0, where `lanes` are int32 in the 16 places before the weights
// or, with `dots`, c[m][o] = sum over runs and k of a[..] * b[(r*length + k) / 16 * b_k * 16 + o * 16 + k % 16]; then
// += bias + residual (or += c if `accumulate`), then the activation.
struct Tile {
  const float* a;
  int64_t a_m, a_k;
  const int64_t* runs;
  int64_t n_runs, length;
  int64_t cut;  // terms that the last run lacks
  const float* b;
  const int64_t* panels;  // where in b the terms of each run lie, or null: one run after the other
  int64_t b_n, b_k;
  float* c;
  int64_t c_m, c_n;
  const float* bias;      // 16 per block, or null
  const float* residual;  // or null
  int64_t r_m, r_n;
  bool accumulate;
  int activation;
  float alpha;
  int picks;      // taps of lanes that pick their numbers, or 0
  int dots;       // outputs whose weights lie along the terms, which are as many as 16 divides; or 0
  int64_t ahead;  // from b to what is read after it, which tiles fetch into L2; 0: nothing
  int64_t fetch;  // lines of each block that all tiles fetch together
};

// Shapes that reach the FMA peak with the registers of the ISA: 14 x 2 (few rows: 7 x 4) of 32 zmm, 6 x 1 of 16 ymm,
// and of 32 NEON registers, which hold as many blocks.
constexpr int kTileRows = NEEDLE_REGISTER_BLOCKS == 32 ? 14 : NEEDLE_REGISTER_BLOCKS == 8 ? 6 : 3;
constexpr int kTileBlocks = NEEDLE_REGISTER_BLOCKS == 32 ? 2 : 1;
constexpr int kWideRows = NEEDLE_REGISTER_BLOCKS == 32 ? 7 : NEEDLE_REGISTER_BLOCKS == 8 ? 1 : 0;
constexpr int kWideBlocks = 4;
constexpr int kPickTaps = 7;                // most taps, an odd number
constexpr int kMostDots = 8;                // outputs
constexpr int64_t kPanelBytes = 256 << 10;  // weights of one block group that stay in L2 while rows pass by
constexpr int64_t kStays = 160 << 10;       // weights of so many numbers stay in L2

// Terms that one register sums up before they join what memory holds: the rounding error grows with the length of a
// chain (4608 terms at once: 2.5 times torch's error, in chains of 256: 1.2 times), and a visit to memory every 256
// costs 1 %.
constexpr int64_t kChain = 256;

// Blocks of the next tile, when `left` blocks are left and rows come in stretches of `rows`.
NEEDLE_INLINE int tile_blocks(int64_t rows, int64_t left) {
  if (rows <= kWideRows && left >= kWideBlocks) return kWideBlocks;
  return static_cast<int>(left < kTileBlocks ? left : kTileBlocks);
}

// Runs the tile over `rows` rows, split evenly (16 rows are 8 + 8, never 14 + 2). blocks: 1, kTileBlocks or
// kWideBlocks.
void tiles(Tile t, int blocks, int64_t rows);

NEEDLE_INLINE int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -ceil_div(-a, b); }  // b > 0

// Number of tasks for `flops` of work, each above some 5 us: 6 per thread so that dynamic scheduling can balance, more
// of them where they stay above some 40 us, so that threads end together.
NEEDLE_INLINE int64_t task_count(const Exec* exec, double flops) {
  const int64_t short_tasks = static_cast<int64_t>(flops / 5e5), long_tasks = static_cast<int64_t>(flops / 4e6);
  return exec->threads == 1 ? 1 : larger(1, smaller(short_tasks, larger(6 * exec->threads, long_tasks)));
}

// f(begin, end) over [0, items), in tasks of `flops` altogether.
template <class F>
NEEDLE_INLINE void parallel_parts(const Exec* exec, int64_t items, double flops, const F& f) {
  const int64_t tasks = smaller(items, task_count(exec, flops));
  parallel_for(exec, tasks, [&](int64_t t) { f(items * t / tasks, items * (t + 1) / tasks); });
}

// Units of a task, when `units` of equal work are to make about `tasks` of them: such that no thread gets more than
// others.
NEEDLE_INLINE int64_t fair_share(const Exec* exec, int64_t units, int64_t tasks) {
  const int64_t most = ceil_div(units, tasks);
  int64_t best = most, least = INT64_MAX;
  for (int64_t share = most; 2 * share >= most; share--) {
    const int64_t load = ceil_div(ceil_div(units, share), exec->threads) * share;
    if (load < least) least = load, best = share;
  }
  return best;
}

}  // namespace needle::NEEDLE_ISA
