// Linear layers by one step of Strassen's algorithm: seven products of half size where there were eight. Sums of
// weights are packed before; sums of rows and of results stay in cache. The sums mix two rows and two columns, whose
// rounding errors would reach each other: powers of two bring all rows and columns to one size before (Ballard et al.,
// SIAM J. Matrix Anal. Appl. 37, 2016), and a row of zeros gives exactly the bias.
#include <cmath>
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

// The power of two that divides values of at most `largest` to below 1; 0 for zeros, 1 for what is not finite.
float power(float largest) {
  if (largest == 0 || !(largest < INFINITY)) return largest == 0 ? 0.f : 1.f;
  int e;
  std::frexp(largest, &e);
  return std::ldexp(1.f, e < -126 ? -126 : e > 126 ? 126 : e);
}

float inverse(float power) { return power == 0 ? 0.f : 1 / power; }

// The largest absolute value; NaN does not count.
float largest(const float* x, int64_t n) {
  V most(0.f);
  int64_t i = 0;
  for (; i + V::N <= n; i += V::N) most = max(abs(V::load(x + i)), most);
  if (i < n) most = max(abs(V::load_n(x + i, static_cast<int>(n - i))), most);
  return reduce_max(most);
}

// The last row of an odd number has no partner: zeros stand for it.
void sum_of_rows(const Sum& s, const float* a, int64_t a_m, int64_t M, int64_t row, int64_t K, const float* powers,
                 float* dst) {
  const int64_t half = ceil_div(M, 2);
  float factor[2];
  const float* term[2];
  for (int i = 0; i < 2; i++) {
    const int q = i ? s.second : s.first;
    const int64_t m = row + q / 2 * half;
    term[i] = q < 0 || m >= M ? nullptr : a + m * a_m + q % 2 * K;
    factor[i] = term[i] ? (i ? s.sign : 1.f) * inverse(powers[m]) : 0.f;
  }
  const float *x = term[0] ? term[0] : term[1], *y = term[1] ? term[1] : term[0];
  if (!x) std::memset(dst, 0, K * 4);
  for (int64_t k = 0; x && k < K; k++) dst[k] = factor[0] * x[k] + factor[1] * y[k];
}

// What products become results with: of two blocks of columns, one in each half.
struct Columns {
  const float *power0, *power1, *bias0, *bias1;  // bias: or null
};

// One row in each half: where a block of columns of the left half and the one of the right half lie, null beyond the
// end.
template <class T>
struct Halves {
  T *top, *low;
  int64_t right;  // from the left half to the right one
};

// out = activation(quarter's sum of products + bias + residual) for one block of columns in each half.
template <class F>
NEEDLE_INLINE void combine(const float* p, int64_t step, const Columns& c, float top_power, float low_power,
                           const Halves<const float>& residual, const Halves<float>& out, const F& f) {
  const auto finish = [&](V sum, const float* added, float* to)
                          __attribute__((always_inline)) { f(added ? sum + V::load(added) : sum).store(to); };
  const float *top = residual.top, *low = residual.low;
  for (int v = 0; v < kBlock; v += V::N) {
    V m[kProducts];
    for (int i = 0; i < kProducts; i++) m[i] = V::load(p + i * step + v);
    const V bias0 = c.bias0 ? V::load(c.bias0 + v) : V(0.f), bias1 = c.bias1 ? V::load(c.bias1 + v) : V(0.f);
    const V left = V::load(c.power0 + v), right = V::load(c.power1 + v), upper(top_power), lower(low_power);
    finish(fma(((m[0] + m[3]) + (m[6] - m[4])) * upper, left, bias0), top ? top + v : top, out.top + v);
    finish(fma((m[2] + m[4]) * upper, right, bias1), top ? top + residual.right + v : top, out.top + out.right + v);
    if (!out.low) continue;
    finish(fma((m[1] + m[3]) * lower, left, bias0), low ? low + v : low, out.low + v);
    finish(fma(((m[0] + m[2]) + (m[5] - m[1])) * lower, right, bias1), low ? low + residual.right + v : low,
           out.low + out.right + v);
  }
}

}  // namespace

// Sums of the quarters of B (K, N), K even and N of whole blocks in each half: [7][N / 32][K / 2][16], then the powers
// of two of the columns.
void strassen_pack(const strassen_pack_args& c) {
  const View& b = c.in.b;
  const int64_t K = b.shape[0] / 2, blocks = b.shape[1] / kWidth;
  float* out = c.out.packed.as<float>();
  const int64_t panel = 2 * K * kBlock, together = b.stride[1] < b.stride[0] ? 2 : 1;  // two lines of a row at once
  parallel_for(c.exec, ceil_div(blocks, together), [&](int64_t task) {
    const int64_t first = task * together, n = smaller(together, blocks - first);
    float* packed = scratch<float>(c.exec, 0, 2 * together * panel);  // [half][block][2 K][16]
    float factors[2 * 2 * kBlock];
    for (int64_t i = 0; i < 2 * n; i++) {
      const int64_t column = (i / n * blocks + first) * kBlock;
      float *s = packed + i * panel, *powers = out + kProducts * blocks * K * kBlock + column + i % n * kBlock;
      if (i % n == 0)
        pack_lanes({b.as<const float>() + column * b.stride[1], b.stride[1], b.stride[0], 0, n * kBlock}, 2 * K,
                   {s, n, panel});
      for (int lane = 0; lane < kBlock; lane += V::N) {
        V most(0.f);
        for (int64_t k = 0; k < 2 * K; k++) most = max(abs(V::load(s + k * kBlock + lane)), most);
        most.store(powers + lane);
      }
      for (int lane = 0; lane < kBlock; lane++)
        factors[i * kBlock + lane] = inverse(powers[lane] = power(powers[lane]));
    }
    for (int64_t j = 0; j < n; j++)
      for (int64_t at = 0; at < K * kBlock; at += V::N) {
        V quarters[4];
        for (int q = 0; q < 4; q++) {
          const int64_t i = q % 2 * n + j;
          quarters[q] =
              V::load(packed + i * panel + q / 2 * K * kBlock + at) * V::load(factors + i * kBlock + at % kBlock);
        }
#pragma GCC unroll 7
        for (int i = 0; i < kProducts; i++) {
          const V x = quarters[kB[i].first], y = quarters[larger(0, kB[i].second)];
          const V sum = kB[i].second < 0 ? x : kB[i].sign > 0 ? x + y : x - y;
          sum.store(out + (i * blocks + first + j) * K * kBlock + at);
        }
      }
  });
}

void matmul_strassen(const matmul_strassen_args& c) {
  const View &a = c.in.a, &out = c.out.y;
  const int64_t M = out.shape[0], N = out.shape[1], K = a.shape[1] / 2, half = ceil_div(M, 2), blocks = N / kWidth;
  const int64_t ld = ceil_div(K, kBlock) * kBlock + kBlock;  // rows never lie 4 KB apart
  const float *src = a.as<const float>(), *packed = c.in.packed.as<const float>();
  const float *bias = c.in.bias.as<const float>(), *residual = c.in.residual.as<const float>();
  float* dst = out.as<float>();

  const float* column_powers = packed + kProducts * blocks * K * kBlock;
  float* sums = scratch<float>(c.exec, 3, kProducts * half * ld + M);
  float* powers = sums + kProducts * half * ld;
  parallel_parts(c.exec, half, 40. * M * K, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) {
      for (int64_t r = m; r < M; r += half) powers[r] = power(largest(src + r * a.stride[0], 2 * K));
      for (int i = 0; i < kProducts; i++)
        sum_of_rows(kA[i], src, a.stride[0], M, m, K, powers, sums + (i * half + m) * ld);
    }
  });

  const int64_t chunks = ceil_div(half, kRows), rows = ceil_div(half, chunks);
  const int64_t pairs = ceil_div(blocks, 2), wanted = task_count(c.exec, 7. / 4 * M * N * K);
  const int64_t per_task = larger(1, pairs * chunks / larger(1, wanted)), tasks = ceil_div(pairs, per_task);
  parallel_for(c.exec, chunks * tasks, [&](int64_t t) {
    const int64_t m0 = t / tasks * rows, n_rows = smaller(rows, half - m0), step = n_rows * kWidth;
    float* products = scratch<float>(c.exec, 0, kProducts * step);
    const int64_t end = smaller(blocks, (t % tasks + 1) * per_task * 2);
    for (int64_t j = t % tasks * per_task * 2; j < end; j += 2) {
      const int64_t n = smaller(2, end - j);
      for (int i = 0; i < kProducts; i++) {
        Matmul g = {n_rows, n * kBlock, K,     sums + (i * half + m0) * ld, ld, 1, nullptr, K * kBlock,
                    kBlock, nullptr,    kWidth};
        g.b = packed + (i * blocks + j) * K * kBlock;
        g.c = products + i * step;
        g.next = i + 1 < kProducts ? g.b + blocks * K * kBlock : j + 2 < end ? packed + (j + 2) * K * kBlock : nullptr;
        product(g, 0, n_rows, 0, n);
      }
      with_activation(static_cast<int>(c.attr.activation), c.attr.alpha, [&](const auto& f) {
        for (int64_t m = 0; m < n_rows; m++) {
          const int64_t row = m0 + m, low_row = row + half;
          const bool has_low = low_row < M;
          for (int64_t b = 0; b < n; b++) {
            const int64_t left = (j + b) * kBlock, right = left + blocks * kBlock;
            const int64_t r_m = c.in.residual.stride[0], y_m = out.stride[0];
            combine(products + m * kWidth + b * kBlock, step,
                    {column_powers + left, column_powers + right, bias ? bias + left : nullptr,
                     bias ? bias + right : nullptr},
                    powers[row], has_low ? powers[low_row] : 0.f,
                    {residual ? residual + row * r_m + left : nullptr,
                     residual && has_low ? residual + low_row * r_m + left : nullptr, blocks * kBlock},
                    {dst + row * y_m + left, has_low ? dst + low_row * y_m + left : nullptr, blocks * kBlock}, f);
          }
        }
      });
    }
  });
}

}  // namespace needle::NEEDLE_ISA
