// What both attention kernels read: softmax(q k^T * scale + mask) v of strided matrices in batches.
#pragma once
#include "gpu/gemm.cuh"

namespace needle::gpu {

constexpr int kAttentionThreads = 256, kAttentionFeatures = 32, kFewQueries = 8;

struct Matrix {
  const void* data;
  int64_t row, column, batch[kMaxRank - 2];
};

struct Attention {
  Matrix q, k, v, mask, out;  // mask.data may be null
  int rank, batch[kMaxRank - 2];
  int queries, keys, features, values, query_blocks, value_blocks;
  float scale, nothing;  // `nothing`: what a query gives that sees no key, 0 or NaN
  bool causal, bool_mask, wide;
};

// At most kFewQueries queries: the keys are shared out among blocks (attention_few.cu).
void attention_few(const Attention& p, int64_t heads, const Exec* exec);

__device__ __forceinline__ int64_t batch_offset(const Attention& p, const Matrix& m, unsigned index) {
  int64_t at = 0;
  for (int d = p.rank - 1; d >= 0; d--) {
    at += index % static_cast<unsigned>(p.batch[d]) * m.batch[d];
    index /= static_cast<unsigned>(p.batch[d]);
  }
  return at;
}

// to[column][row] = from[first_row + row][first_column + column], zero beyond; neighbouring threads read neighbours.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void load_turned(float (&to)[COLUMNS][ROWS + 4], const float* from, int64_t row,
                                            int64_t column, int rows, int columns) {
  bool along = column == 1;
#pragma unroll 4
  for (int e = threadIdx.x; e < ROWS * COLUMNS; e += kAttentionThreads) {
    int i = along ? e / COLUMNS : e % ROWS, j = along ? e % COLUMNS : e / ROWS;
    to[j][i] = i < rows && j < columns ? from[i * row + j * column] : 0;
  }
}

// The score of a query and a key, -inf where it is hidden; `mask` is where the head's mask begins.
__device__ __forceinline__ float masked_score(const Attention& p, int64_t mask, float sum, int query, int key) {
  if (key >= p.keys || query >= p.queries || (p.causal && key > query)) return -HUGE_VALF;
  const float s = sum * p.scale;
  if (!p.mask.data) return s;
  const int64_t at = mask + query * p.mask.row + key * p.mask.column;
  if (p.bool_mask) return static_cast<const bool*>(p.mask.data)[at] ? s : -HUGE_VALF;
  return s + static_cast<const float*>(p.mask.data)[at];
}

}  // namespace needle::gpu
