// Linear layers by one step of Strassen's algorithm: seven products of half size where there were eight. Sums of
// weights are packed before; sums of rows and of results stay in cache.
#include <cstring>

#include "cpu/matmul.h"
#include "math/maps.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int kProducts = 7;
constexpr int64_t kWidth = 2 * kBlock;  // columns of a half that are computed together
constexpr int64_t kRows = 56;           // rows of a half together: their seven sums stay in L2

// Product i multiplies the sum of two quarters of A with the sum of two quarters of B, quarters as 2 * row + column.
struct Sum {
  int first, second;  // quarters, -1: none
  float sign;         // of the second
};
constexpr Sum kA[kProducts] = {{0, 3, 1}, {2, 3, 1}, {0, -1, 0}, {3, -1, 0}, {0, 1, 1}, {2, 0, -1}, {1, 3, -1}};
constexpr Sum kB[kProducts] = {{0, 3, 1}, {0, -1, 0}, {1, 3, -1}, {2, 0, -1}, {3, -1, 0}, {0, 1, 1}, {2, 3, 1}};

// The last row of an odd number has no partner: zeros stand for it.
void sum_of_rows(const Sum& s, const float* a, int64_t a_m, int64_t M, int64_t row, int64_t K, float* dst) {
  const int64_t half = ceil_div(M, 2);
  auto quarter = [&](int q) -> const float* {
    const int64_t m = row + q / 2 * half;
    return q < 0 || m >= M ? nullptr : a + m * a_m + q % 2 * K;
  };
  const float *x = quarter(s.first), *y = quarter(s.second);
  if (!x && !y) {
    std::memset(dst, 0, K * 4);
  } else if (!y) {
    std::memcpy(dst, x, K * 4);
  } else {
    for (int64_t k = 0; k < K; k++) dst[k] = (x ? x[k] : 0.f) + s.sign * y[k];
  }
}

// c = activation(quarter's sum of products + bias) for one block of columns in each half, of one row in each half.
template <class F>
NEEDLE_INLINE void combine(const float* p, int64_t step, const float* bias0, const float* bias1, float* top0,
                           float* top1, float* low0, float* low1, const F& f) {
  for (int v = 0; v < kBlock; v += V::N) {
    V m[kProducts];
    for (int i = 0; i < kProducts; i++) m[i] = V::load(p + i * step + v);
    const V left = bias0 ? V::load(bias0 + v) : V(0.f), right = bias1 ? V::load(bias1 + v) : V(0.f);
    f((m[0] + m[3]) + (m[6] - m[4]) + left).store(top0 + v);
    f(m[2] + m[4] + right).store(top1 + v);
    if (!low0) continue;
    f(m[1] + m[3] + left).store(low0 + v);
    f((m[0] + m[2]) + (m[5] - m[1]) + right).store(low1 + v);
  }
}

}  // namespace

// Sums of the quarters of B (K, N), K even and N of whole blocks in each half: [7][N / 32][K / 2][16].
void strassen_pack(const Call& c) {
  const View& b = c.in[0];
  const int64_t K = b.shape[0] / 2, blocks = b.shape[1] / kWidth;
  float* out = c.out[0].as<float>();
  parallel_for(c.exec, blocks, [&](int64_t j) {
    auto quarter = [&](int q) {
      return b.as<const float>() + q / 2 * K * b.stride[0] + (q % 2 * blocks + j) * kBlock * b.stride[1];
    };
    float* other = static_cast<float*>(c.exec->scratch(0, K * kBlock * 4));
    for (int i = 0; i < kProducts; i++) {
      float* dst = out + (i * blocks + j) * K * kBlock;
      pack_columns(quarter(kB[i].first), b.stride[0], b.stride[1], K, kBlock, 0, 1, dst);
      if (kB[i].second < 0) continue;
      pack_columns(quarter(kB[i].second), b.stride[0], b.stride[1], K, kBlock, 0, 1, other);
      for (int64_t k = 0; k < K * kBlock; k++) dst[k] += kB[i].sign * other[k];
    }
  });
}

// attrs: activation alpha has_bias
void matmul_strassen(const Call& c) {
  const View &a = c.in[0], &out = c.out[0];
  const int64_t M = out.shape[0], N = out.shape[1], K = a.shape[1] / 2, half = ceil_div(M, 2), blocks = N / kWidth;
  const int64_t ld = ceil_div(K, kBlock) * kBlock + kBlock;  // rows never lie 4 KB apart
  const float *src = a.as<const float>(), *packed = c.in[1].as<const float>();
  const float* bias = c.i(2) ? c.in[2].as<const float>() : nullptr;
  float* dst = out.as<float>();

  float* sums = static_cast<float*>(c.exec->scratch(3, kProducts * half * ld * 4));
  const int64_t row_tasks = smaller(half, task_count(c.exec, 40. * M * K));
  parallel_for(c.exec, row_tasks, [&](int64_t t) {
    for (int64_t m = half * t / row_tasks; m < half * (t + 1) / row_tasks; m++)
      for (int i = 0; i < kProducts; i++) sum_of_rows(kA[i], src, a.stride[0], M, m, K, sums + (i * half + m) * ld);
  });

  const int64_t chunks = ceil_div(half, kRows), rows = ceil_div(half, chunks);
  const int64_t pairs = ceil_div(blocks, 2), wanted = task_count(c.exec, 7. / 4 * M * N * K);
  const int64_t per_task = larger(1, pairs * chunks / larger(1, wanted)), tasks = ceil_div(pairs, per_task);
  parallel_for(c.exec, chunks * tasks, [&](int64_t t) {
    const int64_t m0 = t / tasks * rows, n_rows = smaller(rows, half - m0), step = n_rows * kWidth;
    float* products = static_cast<float*>(c.exec->scratch(0, kProducts * step * 4));
    const int64_t end = smaller(blocks, (t % tasks + 1) * per_task * 2);
    for (int64_t j = t % tasks * per_task * 2; j < end; j += 2) {
      const int64_t n = smaller(2, end - j);
      for (int i = 0; i < kProducts; i++) {
        Matmul g = {n_rows, n * kBlock, K,     sums + (i * half + m0) * ld, ld, 1, nullptr, K * kBlock,
                    kBlock, nullptr,    kWidth};
        g.b = packed + (i * blocks + j) * K * kBlock;
        g.c = products + i * step;
        product(g, 0, n_rows, 0, n);
      }
      with_activation(static_cast<int>(c.i(0)), c.f(1), [&](const auto& f) {
        for (int64_t m = 0; m < n_rows; m++) {
          float* top = dst + (m0 + m) * out.stride[0] + j * kBlock;
          float* low = m0 + m + half < M ? top + half * out.stride[0] : nullptr;
          for (int64_t b = 0; b < n; b++, top += kBlock, low = low ? low + kBlock : nullptr)
            combine(products + m * kWidth + b * kBlock, step, bias ? bias + (j + b) * kBlock : nullptr,
                    bias ? bias + (blocks + j + b) * kBlock : nullptr, top, top + blocks * kBlock, low,
                    low ? low + blocks * kBlock : nullptr, f);
        }
      });
    }
  });
}

}  // namespace needle::NEEDLE_ISA
