// What recurrent layers share: the recurrent product of a step split by columns of the hidden state.
#pragma once
#include "cpu/matmul.h"
#include "cpu/steps.h"
#include "cpu/strided.h"

namespace needle::NEEDLE_ISA {

// A sequence of T steps over B rows of a state of H values. Step s happens at time(s).
struct Sequence {
  int64_t T, B, H;
  bool reverse;

  int64_t time(int64_t step) const { return reverse ? T - 1 - step : step; }
  int64_t at(int64_t step, int64_t row, int64_t width) const { return (time(step) * B + row) * width; }
};

constexpr int64_t kUnit = 4;                  // blocks of 16 columns of a product at least, for whole tiles
constexpr int64_t kStepRows = 4 * kTileRows;  // rows whose products stay in the L1 cache until they are used

// Two copies of a (B, K) matrix, read in one step and written for the next; rows stay off powers of two.
struct Alternating {
  float* data;
  int64_t B, ld;

  static int64_t stride(int64_t K) { return ceil_div(K, kBlock) * kBlock + kBlock; }
  float* row(int64_t step, int64_t m) const { return data + (step % 2 * B + m) * ld; }
};

// Per step, p (rows, gates of a few blocks of hidden units) = previous (B, K) times a matrix with `gates` blocks of 16
// columns for each block of hidden units, then point(step, row, column, lanes, p at gate 0): gate g is 16 g further.
// pack(block, dst) gives the columns of one block of hidden units: [gate][K][16]. has_first: whether there is a
// previous matrix before the first step; else it is zero.
template <int kGates, class Pack, class Point>
void recur(const Exec* exec, const Sequence& s, int64_t steps, int64_t K, const Alternating& previous, bool has_first,
           const Pack& pack, const Point& point) {
  constexpr int64_t kHidden = kUnit % kGates ? kUnit / 2 : kUnit / kGates;  // blocks of hidden units at a time
  const int64_t blocks = ceil_div(s.H, kBlock), units = ceil_div(blocks, kHidden), block_size = kGates * K * kBlock;
  float* packed = scratch<float>(exec, 2, blocks * block_size);
  parallel_ranges(exec, blocks, 4 * block_size, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; j++) pack(j, packed + j * block_size);
  });
  const double flops = 2. * s.B * s.H * kGates * K;
  const int64_t most = smaller(smaller(units, kMaxParts), exec->threads);
  const int64_t parts = larger(1, smaller(most, static_cast<int64_t>(flops / 2e5)));
  for_steps(exec, steps, parts, [&](int64_t step, int64_t part) {
    float* p = scratch<float>(exec, 0, kStepRows * kHidden * kGates * kBlock);
    for (int64_t unit = units * part / parts; unit < units * (part + 1) / parts; unit++) {
      const int64_t first = unit * kHidden, count = smaller(kHidden, blocks - first), ld = count * kGates * kBlock;
      for (int64_t m0 = 0; m0 < s.B; m0 += kStepRows) {
        const int64_t rows = smaller(kStepRows, s.B - m0);
        if (step > 0 || has_first)
          product({rows, ld, K, previous.row(step, m0), previous.ld, 1, packed + first * block_size, K * kBlock, kBlock,
                   p, ld},
                  0, rows, 0, count * kGates);
        else
          std::memset(p, 0, rows * ld * 4);
        for (int64_t m = 0; m < rows; m++)
          for (int64_t j = 0; j < count; j++) {
            const int64_t column = (first + j) * kBlock;
            const float* at = p + m * ld + j * kGates * kBlock;
            for_lanes<float>(smaller(kBlock, s.H - column), [&](int64_t i, int n) __attribute__((always_inline)) {
              point(step, m0 + m, column + i, n, at + i);
            });
          }
      }
    }
  });
}

}  // namespace needle::NEEDLE_ISA
