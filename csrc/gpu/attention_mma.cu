// softmax(q k^T * scale + mask) v in lower precision on the matrix units: each wave keeps 16 queries and their results
// in registers, and all waves of a block walk over the keys in the same tiles of shared memory (Dao, FlashAttention-2,
// 2023). Scores, their sums and the results' stay float32.
#include "gpu/attention.cuh"
#include "gpu/mma.cuh"

namespace needle::gpu {
namespace {

constexpr int kQueries = kAttentionQueries, kThreads = kQueries / 16 * WAVE;
constexpr float kLog2e = 1.44269504f;

// to[row] = from[row], zero beyond. A thread has the same four columns of every kStep-th row.
template <int P, int ROWS, int SIZE>
__device__ __forceinline__ void load_lines(uint32_t (&to)[ROWS][SIZE / kPack<P> + 4], const Matrix& m,
                                           const float* from, int rows, int columns) {
  constexpr int kStep = kThreads / (SIZE / 4), kOnce = ROWS / kStep < 8 ? ROWS / kStep : 8;  // on their way at once
  const int column = threadIdx.x % (SIZE / 4) * 4;
  int row = threadIdx.x / (SIZE / 4);
  from += row * m.row + column * m.column;
#pragma unroll 1
  for (int turn = 0; turn < ROWS / kStep / kOnce; turn++) {
    float4 v[kOnce];
    take(v, m, [&](int n) { return Four{from + n * kStep * m.row, row + n * kStep < rows ? columns - column : 0}; });
    from += kOnce * kStep * m.row;
#pragma unroll
    for (int n = 0; n < kOnce; n++, row += kStep) {
      Vector<uint32_t, 4 / kPack<P>> words;
      if constexpr (kPack<P> == 1)
        words = {word<P>(v[n].x, 0), word<P>(v[n].y, 0), word<P>(v[n].z, 0), word<P>(v[n].w, 0)};
      else
        words = {word<P>(v[n].x, v[n].y), word<P>(v[n].z, v[n].w)};
      write_vector(&to[row][column / kPack<P>], words);
    }
  }
}

// to[column][key] = from[key][column], zero beyond, the keys where the operand of a product with Fragment::take has
// them. Sixteen neighbouring threads have sixteen words of a line, so that their stores fall into as many banks; a
// thread has the same word of every kStep-th four columns.
template <int P, int KEYS, int SIZE>
__device__ __forceinline__ void load_turned_lines(uint32_t (&to)[SIZE][KEYS / kPack<P> + 4], const Matrix& m,
                                                  const float* from, int rows, int columns) {
  constexpr int kWords = KEYS / kPack<P>, kStep = kThreads / kWords * 4, kMost = 8 / kPack<P>;
  constexpr int kOnce = SIZE / kStep < kMost ? SIZE / kStep : kMost;
  static_assert(kThreads % (2 * kWords) == 0 && SIZE % (kStep * kOnce) == 0, "words shared out evenly");
  const int group = threadIdx.x / 32, at = threadIdx.x % 16 + group % (kWords / 16) * 16, row = at * kPack<P>;
  const int place = Fragment<P>::place(at);
  int column = (threadIdx.x / 16 % 2 + group / (kWords / 16) * 2) * 4;
  from += row * m.row + column * m.column;
#pragma unroll 1
  for (int turn = 0; turn < SIZE / kStep / kOnce; turn++) {
    float4 v[kOnce * kPack<P>];
    take(v, m, [&](int e) {
      const int n = e / kPack<P>, i = e % kPack<P>;
      return Four{from + i * m.row + n * kStep * m.column, row + i < rows ? columns - column - n * kStep : 0};
    });
    from += kOnce * kStep * m.column;
#pragma unroll
    for (int n = 0; n < kOnce; n++, column += kStep) {
      const float4 &a = v[n * kPack<P>], &b = v[n * kPack<P> + kPack<P> - 1];
      to[column][place] = word<P>(a.x, b.x);
      to[column + 1][place] = word<P>(a.y, b.y);
      to[column + 2][place] = word<P>(a.z, b.z);
      to[column + 3][place] = word<P>(a.w, b.w);
    }
  }
}

template <int P>
__device__ __forceinline__ Fragment<P> fragment(const uint32_t* words, int stride) {
  Fragment<P> f;
  f.load(reinterpret_cast<const Element<P>*>(words), stride * kPack<P>);
  return f;
}

// At most SIZE features and as many values.
template <int P, int SIZE, int KEYS>
__global__ void GPU_BOUNDS(kThreads, WAVE == 32 && SIZE < 128 ? 3 : 2) attention_mma(Attention p) {
  constexpr int kFeatureLine = SIZE / kPack<P> + 4, kKeyLine = KEYS / kPack<P> + 4;  // 16 bytes more: other banks
  constexpr int kRows = RowSums::kRows, kStep = 16 / kPack<P>;                       // words of 16 elements
  struct alignas(16) Shared {
    union {
      uint32_t q[kQueries][kFeatureLine];
      struct {
        uint32_t k[KEYS][kFeatureLine], v[SIZE][kKeyLine];
      };
    };
  };
  GPU_SHARED(Shared, shared);
  const int query0 = static_cast<int>(blockIdx.x) % p.query_blocks * kQueries;
  const unsigned head = blockIdx.x / p.query_blocks;
  const float* q = static_cast<const float*>(p.q.data) + batch_offset(p, p.q, head) + query0 * p.q.row;
  const float* k = static_cast<const float*>(p.k.data) + batch_offset(p, p.k, head);
  const float* v = static_cast<const float*>(p.v.data) + batch_offset(p, p.v, head);
  const int64_t mask = batch_offset(p, p.mask, head);
  const int line0 = static_cast<int>(threadIdx.x) / WAVE * 16;
  const int seen = p.causal && query0 + kQueries < p.keys ? query0 + kQueries : p.keys;
  const float scale = p.scale * kLog2e;  // scores are powers of two

  load_lines<P, kQueries, SIZE>(shared.q, p.q, q, p.queries - query0, p.features);
  block_sync();
  Fragment<P> query[SIZE / 16];
#pragma unroll
  for (int f = 0; f < SIZE / 16; f++) query[f] = fragment<P>(&shared.q[line0][f * kStep], kFeatureLine);

  RowSums sum[SIZE / 16];
  float total[kRows] = {}, top[kRows];
#pragma unroll
  for (int i = 0; i < kRows; i++) top[i] = -HUGE_VALF;
#pragma unroll 1
  for (int key0 = 0; key0 < seen; key0 += KEYS) {
    block_sync();
    load_lines<P, KEYS, SIZE>(shared.k, p.k, k + key0 * p.k.row, p.keys - key0, p.features);
    load_turned_lines<P, KEYS, SIZE>(shared.v, p.v, v + key0 * p.v.row, p.keys - key0, p.values);
    block_sync();
    RowSums score[KEYS / 16];
#pragma unroll
    for (int f = 0; f < SIZE / 16; f++) {
      if (16 * f >= p.features) continue;
#pragma unroll
      for (int j = 0; j < KEYS / 16; j++)
        score[j].add(query[f], fragment<P>(&shared.k[16 * j][f * kStep], kFeatureLine));
    }

    const bool all = !p.mask.data && key0 + KEYS <= p.keys && !(p.causal && key0 + KEYS > query0 + 1);
    const int column = RowSums::column(0);
    int visible[kRows];
    int64_t at[kRows], beside = opaque(p.mask.column);
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const int row = query0 + line0 + RowSums::row(i);
      visible[i] = seen_keys(p, row) - key0 - column;
      at[i] = opaque(mask + row * p.mask.row + (key0 + column) * p.mask.column);
    }
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++) {
#pragma unroll
      for (int e = 0; e < Sums::kSums; e++) {
        const int i = RowSums::which(e), key = 16 * j + RowSums::column(e) - column;
        const float s = score[j].v[e];
        score[j].v[e] = all                ? s * scale
                        : key < visible[i] ? kLog2e * masked_score(p, s, at[i] + key * beside)
                                           : -HUGE_VALF;
      }
    }
    float kept[kRows], part[kRows] = {}, base[kRows];
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      float most = top[i];
#pragma unroll
      for (int j = 0; j < KEYS / 16; j++) {
#pragma unroll
        for (int e = 0; e < Sums::kSums; e++) {
          if (RowSums::which(e) == i) most = fmaxf(most, score[j].v[e]);  // a NaN comes through its power instead
        }
      }
      most = RowSums::across(most, [](float a, float b) { return fmaxf(a, b); });
      base[i] = most == -HUGE_VALF ? 0 : most;  // no key so far: all powers are zero
      kept[i] = exp2f(top[i] - base[i]);
      top[i] = most;
    }
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++) {
#pragma unroll
      for (int e = 0; e < Sums::kSums; e++) {
        const int i = RowSums::which(e);
        score[j].v[e] = exp2f(score[j].v[e] - base[i]);
        part[i] += score[j].v[e];
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; i++)
      total[i] = total[i] * kept[i] + RowSums::across(part[i], [](float a, float b) { return a + b; });
#pragma unroll
    for (int n = 0; n < SIZE / 16; n++) {
#pragma unroll
      for (int e = 0; e < Sums::kSums; e++) sum[n].v[e] *= kept[RowSums::which(e)];
    }
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++) {
      Fragment<P> weight;
      weight.take(score[j]);
#pragma unroll
      for (int n = 0; n < SIZE / 16; n++) {
        if (16 * n < p.values) sum[n].add(weight, fragment<P>(&shared.v[16 * n][j * kStep], kKeyLine));
      }
    }
  }

  float* out = static_cast<float*>(const_cast<void*>(p.out.data)) + batch_offset(p, p.out, head);
#pragma unroll
  for (int n = 0; n < SIZE / 16; n++) {
#pragma unroll
    for (int e = 0; e < Sums::kSums; e += RowSums::kBeside) {
      const int i = RowSums::which(e), row = query0 + line0 + RowSums::row(i), column = 16 * n + RowSums::column(e);
      if (row >= p.queries || column >= p.values) continue;
      const float by = total[i] == 0 ? p.nothing : 1 / total[i];
      float* to = out + row * p.out.row + column * p.out.column;
      Vector<float, RowSums::kBeside> results;
#pragma unroll
      for (int b = 0; b < RowSums::kBeside; b++) results.v[b] = sum[n].v[e + b] * by;
      if (p.out.wide) {
        write_vector(to, results);
      } else {
#pragma unroll
        for (int b = 0; b < RowSums::kBeside; b++) {
          if (column + b < p.values) to[b * p.out.column] = results.v[b];
        }
      }
    }
  }
}

template <int P>
void start(const Attention& p, int64_t heads, const Exec* exec) {
  const int64_t blocks = heads * p.query_blocks;
  const int size = p.features > p.values ? p.features : p.values;
  if (blocks > INT32_MAX) fail("attention", "at most 2^31 blocks", std::to_string(blocks));
  auto sized = [&](auto kernel) {
    launch(kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, static_cast<gpuStream_t>(exec->stream), p);
  };
  if (size <= 32) return sized(attention_mma<P, 32, 64>);
  if (size <= 64) return sized(attention_mma<P, 64, 64>);
  // 64 keys of TF32 would not fit shared memory, those of halves not the registers of 64 lanes.
  constexpr int kKeys = P == kTf32 || WAVE == 64 ? 32 : 64;
  sized(attention_mma<P, 128, kKeys>);
}

}  // namespace

// As attention, products in the row's precision; exact ones where queries are few or heads have more than 128 features
// or values.
void attention_fused(const attention_fused_args& c) {
  const int64_t precision = c.attr.precision;
  if (precision < kExact || precision > kBfloat16)
    fail("attention", "precision is 0 (float32), 1 (TF32), 2 (float16) or 3 (bfloat16)", std::to_string(precision));
  if (c.out.y.size() == 0) return;
  int64_t heads;
  const Attention p = attention_of(c, &heads);
  if (precision == kExact || p.queries <= kFewQueries || p.features > 128 || p.values > 128)
    return attention_exact(p, heads, c.exec);
  if (precision == kTf32) return start<kTf32>(p, heads, c.exec);
  precision == kFloat16 ? start<kFloat16>(p, heads, c.exec) : start<kBfloat16>(p, heads, c.exec);
}

}  // namespace needle::gpu
