// softmax(q k^T * scale + mask) v without the scores ever lying in memory: a block keeps 64 queries, walks over the
// keys in tiles of 64 and corrects its sums whenever a row's maximum rises (Dao et al., FlashAttention, 2022).
#include "gpu/attention.cuh"

namespace needle::gpu {
namespace {

constexpr int kQueries = kAttentionQueries, kKeys = 64, kFeatures = kAttentionFeatures;
constexpr int kThreads = kAttentionThreads, kKept = 64;  // features of q that stay in shared memory

// Thread (r, c) of 16 x 16 has queries 4 r to 4 r + 3, keys 4 c to 4 c + 3 of a tile, and of every 64 values 4 c to 4 c
// + 3.
template <int VALUES>
__global__ void GPU_BOUNDS(kThreads, 2) attention_tile(Attention p) {
  constexpr int kValueKeys = 2048 / VALUES, kAtOnce = VALUES == 64 ? 2 : 1;  // more loads of 128 values would spill
  struct alignas(16) Shared {
    float q[kKept][kQueries + 4], scores[kKeys][kQueries + 4];
    union {
      float k[kFeatures][kKeys + 4];
      float v[kValueKeys][VALUES];
    };
  };
  GPU_SHARED(Shared, shared);
  constexpr int kChunks = VALUES / 64;
  const int value0 = static_cast<int>(blockIdx.x) % p.value_blocks * VALUES;
  const int query0 = static_cast<int>(blockIdx.x) / p.value_blocks % p.query_blocks * kQueries;
  const unsigned head = blockIdx.x / (p.value_blocks * p.query_blocks);
  const float* q = static_cast<const float*>(p.q.data) + batch_offset(p, p.q, head) + query0 * p.q.row;
  const float* k = static_cast<const float*>(p.k.data) + batch_offset(p, p.k, head);
  const float* v = static_cast<const float*>(p.v.data) + batch_offset(p, p.v, head) + value0 * p.v.column;
  const int64_t mask = batch_offset(p, p.mask, head);
  const int r = static_cast<int>(threadIdx.x) / 16 * 4, c = static_cast<int>(threadIdx.x) % 16 * 4;
  const int seen = p.causal && query0 + kQueries < p.keys ? query0 + kQueries : p.keys;

  float sum[4][4 * kChunks] = {}, total[4] = {}, top[4];
#pragma unroll
  for (int i = 0; i < 4; i++) top[i] = -HUGE_VALF;
#pragma unroll 1
  for (int key0 = 0; key0 < seen; key0 += kKeys) {
    float score[4][4] = {};
#pragma unroll 1
    for (int e = 0; e < p.features; e += kFeatures) {
      block_sync();
      if (e % kKept == 0 && (key0 == 0 || p.features > kKept))
        load_turned<kQueries, kKept>(shared.q, p.q, q + e * p.q.column, p.queries - query0, p.features - e);
      load_turned<kKeys, kFeatures>(shared.k, p.k, k + key0 * p.k.row + e * p.k.column, p.keys - key0, p.features - e);
      block_sync();
#pragma unroll 4
      for (int f = 0; f < kFeatures; f++) {
        float4 a = read4(&shared.q[e % kKept + f][r]), b = read4(&shared.k[f][c]);
        const float x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
          for (int j = 0; j < 4; j++) score[i][j] += x[i] * y[j];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int query = query0 + r + i, visible = seen_keys(p, query) - key0 - c;
      const int64_t at = mask + query * p.mask.row + (key0 + c) * p.mask.column;
      float most = top[i];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float s = j < visible ? masked_score(p, score[i][j], at + j * p.mask.column) : -HUGE_VALF;
        score[i][j] = s;
        most = device::maximum_map::apply(most, s, s, s);
      }
      most = wave_max<16>(most);
      const bool none = most == -HUGE_VALF;  // no key so far: the row stays zero
      const float kept = none ? 1 : device::exp(top[i] - most);
      float part = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        score[i][j] = none ? 0 : device::exp(score[i][j] - most) * (score[i][j] != -HUGE_VALF);
        part += score[i][j];
      }
      top[i] = most;
      total[i] = total[i] * kept + wave_sum<16>(part);
#pragma unroll
      for (int j = 0; j < 4 * kChunks; j++) sum[i][j] *= kept;
    }
    block_sync();
#pragma unroll
    for (int j = 0; j < 4; j++)
      write4(&shared.scores[c + j][r], make_float4(score[0][j], score[1][j], score[2][j], score[3][j]));
#pragma unroll 1
    for (int first = 0; first < kKeys && key0 + first < seen; first += kValueKeys) {
      block_sync();
#pragma unroll 1
      for (int start = threadIdx.x; start < kValueKeys * VALUES / 4; start += kAtOnce * kThreads) {
        float4 four[kAtOnce];
        take(four, p.v, [&](int n) {
          const int e = start + n * kThreads, j = e % (VALUES / 4) * 4, key = key0 + first + e / (VALUES / 4);
          return Four{v + key * p.v.row + j * p.v.column, key < p.keys ? p.values - value0 - j : 0};
        });
#pragma unroll
        for (int n = 0; n < kAtOnce; n++) write4(&shared.v[0][0] + 4 * (start + n * kThreads), four[n]);
      }
      block_sync();
#pragma unroll 4
      for (int key = 0; key < kValueKeys; key++) {
        float4 a = read4(&shared.scores[first + key][r]);
        const float x[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int n = 0; n < kChunks; n++) {
          float4 b = read4(&shared.v[key][64 * n + c]);
          const float y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
          for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) sum[i][4 * n + j] += x[i] * y[j];
          }
        }
      }
    }
  }

  float* out = static_cast<float*>(const_cast<void*>(p.out.data)) + batch_offset(p, p.out, head);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int query = query0 + r + i;
    if (query >= p.queries) continue;
    const float scale = total[i] == 0 ? p.nothing : 1 / total[i];
#pragma unroll
    for (int n = 0; n < kChunks; n++) {
      const int column = value0 + 64 * n + c;
      float* to = out + query * p.out.row + column * p.out.column;
      const float* s = &sum[i][4 * n];
      if (p.out.wide && column < p.values) {
        write4(to, make_float4(s[0] * scale, s[1] * scale, s[2] * scale, s[3] * scale));
      } else {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          if (column + j < p.values) to[j * p.out.column] = s[j] * scale;
        }
      }
    }
  }
}

template <int VALUES>
void start(Attention p, int64_t heads, const Exec* exec) {
  p.value_blocks = (p.values + VALUES - 1) / VALUES;
  int64_t blocks = heads * p.query_blocks * p.value_blocks;
  if (blocks > INT32_MAX) fail("attention", "at most 2^31 blocks", std::to_string(blocks));
  launch(attention_tile<VALUES>, dim3(static_cast<unsigned>(blocks)), kThreads, 0,
         static_cast<gpuStream_t>(exec->stream), p);
}

}  // namespace

void attention_exact(const Attention& p, int64_t heads, const Exec* exec) {
  if (p.queries <= kFewQueries) return attention_few(p, heads, exec);
  p.values <= 64 ? start<64>(p, heads, exec) : start<128>(p, heads, exec);
}

// q (..., L, E), k (..., S, E), v (..., S, D), mask (..., L, S) of bool (keeps where true) or float (added); a query
// that sees no key gives zeros, with strict NaN.
void attention(const attention_args& c) {
  if (c.out.y.size() == 0) return;
  int64_t heads;
  const Attention p = attention_of(c, &heads);
  attention_exact(p, heads, c.exec);
}

}  // namespace needle::gpu
