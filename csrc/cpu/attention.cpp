// softmax(q k^T * scale + mask) v, one head at a time: a block of rows of scores stays in L2 between the two products.
#include "cpu/matmul.h"
#include "cpu/rows.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kScoreBytes = 96 << 10;  // scores of one block of rows

// One row of scores masked: bool keeps where true, f32 is added.
void mask_row(const View& mask, int64_t at, int64_t n, float* x) {
  const int64_t step = mask.stride[mask.rank - 1];
  with_type<attention_args::In::mask_dtypes>(mask.dtype, [&](auto t) {
    const auto* m = mask.as<const decltype(t)>() + at;
    if constexpr (std::is_same_v<decltype(t), bool>)
      for (int64_t j = 0; j < n; j++) x[j] = m[j * step] ? x[j] : -HUGE_VALF;
    else
      for (int64_t j = 0; j < n; j++) x[j] += m[j * step];
  });
}

void scale_row(const float* src, int64_t step, int64_t n, float scale, float* dst) {
  if (step == 1)
    return for_lanes<float>(n, [&](int64_t i, int m) { store_lanes(dst + i, load_lanes(src + i, m) * V(scale), m); });
  for (int64_t i = 0; i < n; i++) dst[i] = src[i * step] * scale;
}

// Row x[0, n) becomes e ** (x - max); returns 1 / sum, or `nothing` where everything is masked.
float exponentials(float* x, int64_t n, float nothing) {
  const float top = row_max(x, n);
  if (top == -HUGE_VALF) {
    std::memset(x, 0, n * 4);
    return nothing;
  }
  const double sum = row_sum<float>(n, [&](int64_t i, int lanes) {
    V e = exp(load_lanes(x + i, lanes) - V(top));
    store_lanes(x + i, e, lanes);
    return e;
  });
  return static_cast<float>(1 / sum);
}

}  // namespace

// q (..., L, E), k (..., S, E), v (..., S, D), mask (..., L, S) of bool or f32; the last axis of out (..., L, D) is
// dense. A query that sees no key gives zeros, with strict NaN.
void attention(const attention_args& c) {
  const View &q = c.in.q, &k = c.in.k, &v = c.in.v, &out = c.out.y;
  if (out.size() == 0) return;
  const View* mask = c.in.mask ? &c.in.mask : nullptr;
  const bool causal = c.attr.causal;
  const float nothing = mask && c.attr.strict ? NAN : 0;  // what a row without a key is multiplied by
  const int r = q.rank;
  const int64_t L = q.shape[r - 2], E = q.shape[r - 1], S = k.shape[r - 2], D = v.shape[r - 1];
  int64_t heads = 1;
  for (int d = 0; d < r - 2; d++) heads *= q.shape[d];

  const int64_t key_blocks = ceil_div(S, kBlock), value_blocks = ceil_div(D, kBlock);
  const bool packs_values = v.stride[r - 1] != 1 || D % kBlock != 0;
  const int64_t ld = (key_blocks + 1) * kBlock, q_ld = (ceil_div(E, kBlock) + 1) * kBlock;  // one line off a power of 2
  const int64_t fit = kScoreBytes / 4 / ld / kTileRows * kTileRows;
  const int64_t block = smaller(L, larger(kTileRows, smaller(4 * kTileRows, fit)));
  const int64_t wanted = ceil_div(task_count(c.exec, 2. * heads * L * S * (E + D)), heads);
  const int64_t per_task = ceil_div(L, smaller(ceil_div(L, block), wanted)), tasks = ceil_div(L, per_task);

  parallel_for(c.exec, heads * tasks, [&](int64_t t) {
    const int64_t head = t / tasks, first = t % tasks * per_task, end = smaller(L, first + per_task);
    const float *qs = q.as<const float>() + batch_offset(q, head),
                *values = v.as<const float>() + batch_offset(v, head);
    float* keys = scratch<float>(c.exec, 1, (key_blocks * E + value_blocks * S) * kBlock);
    float* packed_values = keys + key_blocks * E * kBlock;
    pack_columns(k.as<const float>() + batch_offset(k, head), k.stride[r - 1], k.stride[r - 2], E, S, 0, key_blocks,
                 keys);
    if (packs_values) pack_columns(values, v.stride[r - 2], v.stride[r - 1], S, D, 0, value_blocks, packed_values);
    float* scores = scratch<float>(c.exec, 0, block * (ld + q_ld + 1));
    float *queries = scores + block * ld, *inverse = queries + block * q_ld;
    float* y = out.as<float>() + batch_offset(out, head);
    const int64_t y_ld = out.stride[r - 2];

    for (int64_t m = first; m < end; m += block) {
      const int64_t rows = smaller(block, end - m), limit = causal ? smaller(S, m + rows) : S;
      for (int64_t i = 0; i < rows; i++)
        scale_row(qs + (m + i) * q.stride[r - 2], q.stride[r - 1], E, c.attr.scale, queries + i * q_ld);
      const int64_t blocks = ceil_div(limit, kBlock);
      product({rows, blocks * kBlock, E, queries, q_ld, 1, keys, E * kBlock, kBlock, scores, ld}, 0, rows, 0, blocks);
      for (int64_t i = 0; i < rows; i++) {
        float* x = scores + i * ld;
        const int64_t n = causal ? smaller(limit, m + i + 1) : limit;
        if (mask) mask_row(*mask, batch_offset(*mask, head) + (m + i) * mask->stride[r - 2], n, x);
        inverse[i] = exponentials(x, n, nothing);
        std::memset(x + n, 0, (limit - n) * 4);
      }
      float* target = y + m * y_ld;
      Matmul g = {rows, D, limit, scores, ld, 1, values, kBlock, v.stride[r - 2], target, y_ld};
      if (packs_values) g.b = packed_values, g.b_n = S * kBlock, g.b_k = kBlock;
      product(g, 0, rows, 0, value_blocks);
      for (int64_t i = 0; i < rows; i++)
        for_lanes<float>(D, [&](int64_t d, int n) {
          float* p = target + i * y_ld + d;
          store_lanes(p, load_lanes(p, n) * V(inverse[i]), n);
        });
    }
  });
}

}  // namespace needle::NEEDLE_ISA
