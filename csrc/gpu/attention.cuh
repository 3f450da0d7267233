// What all attention kernels read: softmax(q k^T * scale + mask) v of strided matrices in batches.
#pragma once
#include "gpu/gemm.cuh"

namespace needle::gpu {

constexpr int kAttentionThreads = 256, kAttentionFeatures = 32, kAttentionQueries = 64, kFewQueries = 8;

struct Matrix {
  const void* data;
  int64_t row, column, batch[kMaxRank - 2];
  bool wide;  // four neighbours of a row from a multiple of four on are one aligned float4, all of them inside or none
};

struct Attention {
  Matrix q, k, v, mask, out;  // mask.data may be null
  int rank, batch[kMaxRank - 2];
  int queries, keys, features, values, query_blocks, value_blocks;
  float scale, nothing;  // `nothing`: what a query gives that sees no key, 0 or NaN
  bool causal, bool_mask;
};

// At most kFewQueries queries: the keys are shared out among blocks (attention_few.cu).
void attention_few(const Attention& p, int64_t heads, const Exec* exec);
void attention_exact(const Attention& p, int64_t heads, const Exec* exec);

inline Matrix matrix(const View& v) {
  const int r = v.rank;
  Matrix m = {v.data, v.stride[r - 2], v.stride[r - 1], {}, false};
  m.wide = m.column == 1 && v.shape[r - 1] % 4 == 0 && aligned(v.data);
  for (int d = 0; d < r - 1; d++) m.wide = m.wide && (v.shape[d] == 1 || v.stride[d] % 4 == 0);
  for (int d = 0; d < r - 2; d++) m.batch[d] = v.stride[d];
  return m;
}

// The problem of either row's call, and how many heads it has.
template <class Args>
Attention attention_of(const Args& c, int64_t* heads) {
  const View &q = c.in.q, &k = c.in.k, &v = c.in.v, &out = c.out.y;
  const int r = q.rank;
  for (int64_t extent : {q.shape[r - 2], q.shape[r - 1], k.shape[r - 2], v.shape[r - 1]}) {
    if (extent > INT32_MAX - 256) fail("attention", "extents are below 2^31 - 256", std::to_string(extent));
  }
  Attention p = {};
  p.q = matrix(q), p.k = matrix(k), p.v = matrix(v), p.out = matrix(out);
  if (c.in.mask) {
    p.mask = matrix(c.in.mask);
    with_type<Args::In::mask_dtypes>(c.in.mask.dtype, [&](auto t) { p.bool_mask = std::is_same_v<decltype(t), bool>; });
  }
  p.rank = r - 2;
  *heads = 1;
  for (int d = 0; d < r - 2; d++) *heads *= p.batch[d] = static_cast<int>(out.shape[d]);
  p.queries = static_cast<int>(q.shape[r - 2]);
  p.features = static_cast<int>(q.shape[r - 1]);
  p.keys = static_cast<int>(k.shape[r - 2]);
  p.values = static_cast<int>(v.shape[r - 1]);
  p.query_blocks = (p.queries + kAttentionQueries - 1) / kAttentionQueries;
  p.scale = static_cast<float>(c.attr.scale);
  p.causal = c.attr.causal != 0;
  p.nothing = c.in.mask && c.attr.strict ? NAN : 0;
  return p;
}

__device__ __forceinline__ int64_t batch_offset(const Attention& p, const Matrix& m, unsigned index) {
  int64_t at = 0;
  for (int d = p.rank - 1; d >= 0; d--) {
    at += index % static_cast<unsigned>(p.batch[d]) * m.batch[d];
    index /= static_cast<unsigned>(p.batch[d]);
  }
  return at;
}

struct Four {  // neighbours of a row, zero beyond the `left` ones that it still has
  const float* at;
  int left;
};

// N times four, all on their way before the first is there: of a wide matrix no branch lies between them.
template <int N, class F>
__device__ __forceinline__ void take(float4 (&to)[N], const Matrix& m, const F& four) {
  if (m.wide) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      const Four f = four(n);
      to[n] = make_float4(0, 0, 0, 0);
      if (f.left > 0) to[n] = read4(f.at);
    }
  } else {
#pragma unroll
    for (int n = 0; n < N; n++) {
      const Four f = four(n);
      to[n] = make_float4(f.left > 0 ? f.at[0] : 0, f.left > 1 ? f.at[m.column] : 0,
                          f.left > 2 ? f.at[2 * m.column] : 0, f.left > 3 ? f.at[3 * m.column] : 0);
    }
  }
}

// to[column][row] = from[row][column], zero beyond. Sixteen neighbouring threads have sixteen rows, so that their
// stores fall into as many banks, and the next ones the four columns beside.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void load_turned(float (&to)[COLUMNS][ROWS + 4], const Matrix& m, const float* from,
                                            int rows, int columns) {
  constexpr int kRows = ROWS < 16 ? ROWS : 16, kGroups = ROWS / kRows, kFours = ROWS * COLUMNS / 4;
  constexpr int kOnce = kFours < 2 * kAttentionThreads ? 1 : 2;
  auto row = [](int e) { return e % kRows + e / (2 * kRows) % kGroups * kRows; };
  auto column = [](int e) { return (e / kRows % 2 + e / (2 * kRows) / kGroups * 2) * 4; };
#pragma unroll 1
  for (int first = threadIdx.x; first < kFours; first += kOnce * kAttentionThreads) {
    float4 v[kOnce];
    take(v, m, [&](int n) {
      const int e = first + n * kAttentionThreads, i = row(e), j = column(e);
      return Four{from + i * m.row + j * m.column, i < rows ? columns - j : 0};
    });
#pragma unroll
    for (int n = 0; n < kOnce; n++) {
      const int e = first + n * kAttentionThreads, i = row(e), j = column(e);
      to[j][i] = v[n].x, to[j + 1][i] = v[n].y, to[j + 2][i] = v[n].z, to[j + 3][i] = v[n].w;
    }
  }
}

// How many keys a query sees, but for the mask.
__device__ __forceinline__ int seen_keys(const Attention& p, int query) {
  if (query >= p.queries) return 0;
  return p.causal && query < p.keys ? query + 1 : p.keys;
}

// The score of a query and a key of which the mask has element `at`, -inf where it is hidden.
__device__ __forceinline__ float masked_score(const Attention& p, float sum, int64_t at) {
  const float s = sum * p.scale;
  if (!p.mask.data) return s;
  if (p.bool_mask) return static_cast<const bool*>(p.mask.data)[at] ? s : -HUGE_VALF;
  return s + static_cast<const float*>(p.mask.data)[at];
}

}  // namespace needle::gpu
