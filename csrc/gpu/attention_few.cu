// Attention of a few queries over many keys, as in decoding: blocks take parts of the keys, each of which keeps its
// largest score, the sum of its weights and its weighted values; then these are combined (Dao et al., Flash-Decoding,
// 2023).
#include "gpu/attention.cuh"

namespace needle::gpu {
namespace {

constexpr int kThreads = kAttentionThreads, kFeatures = kAttentionFeatures;
constexpr int kKeys = 64, kGroups = kThreads / kKeys, kMostKeys = 256;

struct Parts {
  int count, keys;                // of each, a multiple of kKeys
  float *top, *total, *weighted;  // (heads, count, queries) and (heads, count, queries, values)
};

// Thread (g, c) of kGroups x 64 has key c of a tile and a kGroups-th of the features, then column c of every 64 values
// and a kGroups-th of the keys.
template <int QUERIES, int VALUES>
__global__ void GPU_BOUNDS(kThreads, 2) attention_part(Attention p, Parts parts) {
  struct alignas(16) Shared {
    union {
      struct {
        float q[kFeatures][QUERIES + 4], k[kFeatures][kKeys + 4];
      };
      float products[kGroups][QUERIES][kKeys];
      float sums[kGroups][QUERIES][VALUES];
    };
    float weight[kMostKeys][QUERIES];
    float top[QUERIES], total[QUERIES];
  };
  GPU_SHARED(Shared, shared);
  constexpr int kChunks = VALUES / 64;
  const int value0 = static_cast<int>(blockIdx.x) % p.value_blocks * VALUES;
  const unsigned slot = blockIdx.x / p.value_blocks, head = slot / parts.count;
  const int first = static_cast<int>(slot % parts.count) * parts.keys;
  const int seen = p.causal && p.queries < p.keys ? p.queries : p.keys;
  const int last = seen - first < parts.keys ? seen : first + parts.keys;
  const float* q = static_cast<const float*>(p.q.data) + batch_offset(p, p.q, head);
  const float* k = static_cast<const float*>(p.k.data) + batch_offset(p, p.k, head);
  const float* v = static_cast<const float*>(p.v.data) + batch_offset(p, p.v, head) + value0 * p.v.column;
  const int64_t mask = batch_offset(p, p.mask, head);
  const int c = static_cast<int>(threadIdx.x) % 64, group = static_cast<int>(threadIdx.x) / 64;

#pragma unroll 1
  for (int key0 = first; key0 < last; key0 += kKeys) {
    float product[QUERIES] = {};
#pragma unroll 1
    for (int e = 0; e < p.features; e += kFeatures) {
      block_sync();
      load_turned<QUERIES, kFeatures>(shared.q, p.q, q + e * p.q.column, p.queries, p.features - e);
      load_turned<kKeys, kFeatures>(shared.k, p.k, k + key0 * p.k.row + e * p.k.column, last - key0, p.features - e);
      block_sync();
#pragma unroll
      for (int n = 0; n < kFeatures / kGroups; n++) {
        const int f = group * (kFeatures / kGroups) + n;
        const float y = shared.k[f][c];
#pragma unroll
        for (int i = 0; i < QUERIES; i++) product[i] += shared.q[f][i] * y;
      }
    }
    block_sync();
#pragma unroll
    for (int i = 0; i < QUERIES; i++) shared.products[group][i][c] = product[i];
    block_sync();
    for (int e = threadIdx.x; e < QUERIES * kKeys; e += kThreads) {
      const int i = e / kKeys, key = e % kKeys;
      float sum = 0;
#pragma unroll
      for (int g = 0; g < kGroups; g++) sum += shared.products[g][i][key];
      const int64_t at = mask + i * p.mask.row + (key0 + key) * p.mask.column;
      shared.weight[key0 - first + key][i] = key0 + key < seen_keys(p, i) ? masked_score(p, sum, at) : -HUGE_VALF;
    }
  }
  block_sync();  // needed where a wave has fewer lanes than kKeys: else each thread reads what it wrote
  for (int i = static_cast<int>(threadIdx.x) / WAVE; i < QUERIES; i += kThreads / WAVE) {
    float most = -HUGE_VALF, part = 0;
    for (int key = lane_id(); key < last - first; key += WAVE)
      most = device::maximum_map::apply(most, shared.weight[key][i], 0.0f, 0.0f);
    most = wave_max(most);
    for (int key = lane_id(); key < last - first; key += WAVE) {
      const float s = shared.weight[key][i], w = s == -HUGE_VALF ? 0 : device::exp(s - most);
      shared.weight[key][i] = w;
      part += w;
    }
    part = wave_sum(part);
    if (lane_id() == 0) shared.top[i] = most, shared.total[i] = part;
  }
  block_sync();

  float sum[QUERIES][kChunks] = {};
#pragma unroll 4
  for (int key = first + group; key < last; key += kGroups) {
#pragma unroll
    for (int n = 0; n < kChunks; n++) {
      const int column = 64 * n + c;
      const float x = value0 + column < p.values ? v[key * p.v.row + column * p.v.column] : 0;
#pragma unroll
      for (int i = 0; i < QUERIES; i++) sum[i][n] += shared.weight[key - first][i] * x;
    }
  }
#pragma unroll
  for (int i = 0; i < QUERIES; i++) {
#pragma unroll
    for (int n = 0; n < kChunks; n++) shared.sums[group][i][64 * n + c] = sum[i][n];
  }
  block_sync();
  float* out = static_cast<float*>(const_cast<void*>(p.out.data)) + batch_offset(p, p.out, head);
  for (int e = threadIdx.x; e < p.queries * VALUES; e += kThreads) {
    const int i = e / VALUES, column = value0 + e % VALUES;
    if (column >= p.values) continue;
    float weighted = 0;
#pragma unroll
    for (int g = 0; g < kGroups; g++) weighted += shared.sums[g][i][e % VALUES];
    const float total = shared.total[i];
    if (parts.count == 1) {
      out[i * p.out.row + column * p.out.column] = total == 0 ? p.nothing : weighted / total;
    } else {
      parts.weighted[(static_cast<int64_t>(slot) * p.queries + i) * p.values + column] = weighted;
    }
  }
  if (parts.count == 1 || value0 > 0) return;
  for (int i = threadIdx.x; i < p.queries; i += kThreads) {
    parts.top[static_cast<int64_t>(slot) * p.queries + i] = shared.top[i];
    parts.total[static_cast<int64_t>(slot) * p.queries + i] = shared.total[i];
  }
}

// A thread per result.
__global__ void GPU_BOUNDS(kThreads, 4) attention_combine(Attention p, Parts parts, int64_t size) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= size) return;
  const int column = static_cast<int>(index % p.values), i = static_cast<int>(index / p.values % p.queries);
  const unsigned head = static_cast<unsigned>(index / p.values / p.queries);
  const int64_t first = static_cast<int64_t>(head) * parts.count * p.queries + i;
  float most = -HUGE_VALF, total = 0, sum = 0;
#pragma unroll 8
  for (int part = 0; part < parts.count; part++)
    most = device::maximum_map::apply(most, parts.top[first + part * p.queries], 0.0f, 0.0f);
#pragma unroll 4
  for (int part = 0; part < parts.count; part++) {
    const int64_t at = first + part * p.queries;
    const float top = parts.top[at], kept = top == -HUGE_VALF ? 0 : device::exp(top - most);
    total += kept * parts.total[at];
    sum += kept * parts.weighted[at * p.values + column];
  }
  float* out = static_cast<float*>(const_cast<void*>(p.out.data)) + batch_offset(p, p.out, head);
  out[i * p.out.row + column * p.out.column] = total == 0 ? p.nothing : sum / total;
}

template <int QUERIES, int VALUES>
void start(Attention p, int64_t heads, const Exec* exec) {
  const int seen = p.causal && p.queries < p.keys ? p.queries : p.keys;
  p.value_blocks = (p.values + VALUES - 1) / VALUES;
  // Enough blocks to fill the device, but each of some tiles of keys.
  const int64_t wanted = (4LL * device_units() + heads * p.value_blocks - 1) / (heads * p.value_blocks);
  const int64_t keys = ((seen + wanted - 1) / wanted + kKeys - 1) / kKeys * kKeys;
  Parts parts = {};
  parts.keys = keys > kMostKeys ? kMostKeys : keys < kKeys ? kKeys : static_cast<int>(keys);
  parts.count = seen > parts.keys ? (seen + parts.keys - 1) / parts.keys : 1;
  const int64_t blocks = heads * parts.count * p.value_blocks, size = heads * p.queries * p.values;
  if (blocks > INT32_MAX || size / kThreads >= INT32_MAX)
    fail("attention", "at most 2^31 blocks", std::to_string(blocks));
  if (parts.count > 1) {
    const size_t rows = static_cast<size_t>(heads) * parts.count * p.queries;
    parts.top = static_cast<float*>(exec->scratch(0, rows * (2 + p.values) * sizeof(float)));
    parts.total = parts.top + rows;
    parts.weighted = parts.total + rows;
  }
  gpuStream_t stream = static_cast<gpuStream_t>(exec->stream);
  launch(attention_part<QUERIES, VALUES>, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, p, parts);
  if (parts.count > 1)
    launch(attention_combine, dim3(static_cast<unsigned>((size + kThreads - 1) / kThreads)), kThreads, 0, stream, p,
           parts, size);
}

}  // namespace

void attention_few(const Attention& p, int64_t heads, const Exec* exec) {
  auto sized = [&](auto narrow, auto wide) { (p.values <= 64 ? narrow : wide)(p, heads, exec); };
  if (p.queries == 1) return sized(start<1, 64>, start<1, 128>);
  sized(start<kFewQueries, 64>, start<kFewQueries, 128>);
}

}  // namespace needle::gpu
