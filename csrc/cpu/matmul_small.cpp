// Many products of small matrices: packing columns would take longer than their sums.
#include "cpu/matmul.h"
#include "cpu/transpose.h"

namespace needle::NEEDLE_ISA {
namespace {

// Up to here packing costs more: results of dots; rows whatever b is, and rows with a b that stays in the L1 cache.
constexpr int64_t kDots = 16, kRows = 2, kSmallRows = 64, kSmall = 4096;

struct Small {
  int64_t M, N, K, a_m, a_k, b_k, b_n;
  const float* bias;
  int64_t bias_n;
  int activation;
  float alpha;
};

NEEDLE_INLINE float dot(const float* a, const float* b, int64_t K) {
  V sums[4] = {V(0.f), V(0.f), V(0.f), V(0.f)};
  int64_t k = 0;
  for (; k + 4 * V::N <= K; k += 4 * V::N)
    for (int j = 0; j < 4; j++) sums[j] = fma(V::load(a + k + j * V::N), V::load(b + k + j * V::N), sums[j]);
  for (; k + V::N <= K; k += V::N) sums[0] = fma(V::load(a + k), V::load(b + k), sums[0]);
  float total = 0;
  if (k > 0) total = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; k < K; k++) total += a[k] * b[k];
  return total;
}

// c (M, N) of sums along contiguous rows of a and columns of b.
void by_dots(const Small& g, const float* a, const float* b, float* c) {
  for (int64_t m = 0; m < g.M; m++)
    for (int64_t n = 0; n < g.N; n++) {
      *c++ = dot(a + m * g.a_m, b + n * g.b_n, g.K) + (g.bias ? g.bias[n * g.bias_n] : 0);
    }
}

// R rows of c, of rows of b times numbers of a.
template <int R>
NEEDLE_INLINE void add_rows(const Small& g, const float* a, const float* b, float* c) {
  for_lanes<float>(g.N, [&](int64_t n, int lanes) __attribute__((always_inline)) {
    V sums[2][R];
    for (int r = 0; r < R; r++) sums[0][r] = g.bias ? load_lanes(g.bias + n, lanes) : V(0.f), sums[1][r] = V(0.f);
    auto add = [&](int64_t k, V* to) __attribute__((always_inline)) {
      const V row = load_lanes(b + k * g.b_k + n, lanes);
      for (int r = 0; r < R; r++) to[r] = fma(V(a[r * g.a_m + k * g.a_k]), row, to[r]);
    };
    int64_t k = 0;
    for (; k + 2 <= g.K; k += 2) add(k, sums[0]), add(k + 1, sums[1]);
    if (k < g.K) add(k, sums[0]);
    for (int r = 0; r < R; r++) store_lanes(c + r * g.N + n, sums[0][r] + sums[1][r], lanes);
  });
}

void by_rows(const Small& g, const float* a, const float* b, float* c) {
  int64_t m = 0;
  for (; m + 4 <= g.M; m += 4) add_rows<4>(g, a + m * g.a_m, b, c + m * g.N);
  for (; m < g.M; m++) add_rows<1>(g, a + m * g.a_m, b, c + m * g.N);
}

void finish(const Small& g, float* c) {
  for_lanes<float>(g.M * g.N, [&](int64_t i, int lanes) __attribute__((always_inline)) {
    store_lanes(c + i, activate(g.activation, g.alpha, load_lanes(c + i, lanes)), lanes);
  });
}

// Of contiguous columns of b.
void by_turned_rows(const Small& g, const float* a, const float* b, float* c) {
  float turned[kSmall];
  transpose(turned, g.N, b, g.b_n, g.N, g.K);
  Small in_rows = g;
  in_rows.b_k = g.N, in_rows.b_n = 1;
  by_rows(in_rows, a, turned, c);
}

}  // namespace

bool matmul_small(const matmul_args& c) {
  const View &a = c.in.a, &b = c.in.b, &out = c.out.y;
  const int r = a.rank;
  Small g = {out.shape[r - 2],
             out.shape[r - 1],
             a.shape[r - 1],
             a.stride[r - 2],
             a.stride[r - 1],
             b.stride[r - 2],
             b.stride[r - 1],
             c.in.bias.as<const float>(),
             c.in.bias.stride[0],
             static_cast<int>(c.attr.activation),
             static_cast<float>(c.attr.alpha)};
  const bool dots = g.M * g.N <= kDots && (g.a_k == 1 || g.K == 1) && (g.b_k == 1 || g.K == 1);
  const bool in_rows = g.b_n == 1 || g.N == 1, stays = g.M <= kSmallRows && g.N * g.K <= kSmall;
  const bool rows = (in_rows ? g.M <= kRows || stays : g.b_k == 1 && stays) && (!g.bias || g.bias_n == 1);
  if (!dots && !rows) return false;
  Loop<3> batches;
  for (int d = 0; d < r - 2; d++) {
    const int64_t strides[] = {out.stride[d], a.stride[d], b.stride[d]};
    batches.add(out.shape[d], strides);
  }
  batches.merge();
  const int64_t count = batches.inner() * batches.outer();
  parallel_ranges(c.exec, count, 2 * g.M * g.N * g.K, [&](int64_t begin, int64_t end) {
    auto o = Odometer<3>::start(batches, batches.rank, begin);
    const auto sum = dots ? by_dots : in_rows ? by_rows : by_turned_rows;
    for (int64_t i = begin; i < end; i++, o.next()) {
      float* to = out.as<float>() + o.at[0];
      sum(g, a.as<const float>() + o.at[1], b.as<const float>() + o.at[2], to);
      if (g.activation) finish(g, to);
    }
  });
  return true;
}

}  // namespace needle::NEEDLE_ISA
