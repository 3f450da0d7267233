// Norms of rows, alone and behind a matrix product.
#include "cpu/matmul.h"
#include "cpu/moments.h"
#include "cpu/rows.h"

namespace needle::NEEDLE_ISA {
namespace {

// (x - mean) / sqrt(var + eps) of a row; weight and bias may be null.
template <class T>
void layer_norm_row(const T* x, T* y, int64_t size, const T* weight, const T* bias, double eps, double* mean,
                    double* inverse) {
  using L = typename LanesOf<T>::type;
  double var;
  statistics<T>(1, size, [&](int64_t) { return x; }, mean, &var);
  *inverse = 1 / ::sqrt(var + eps);
  const L centre(static_cast<T>(*mean)), scale(static_cast<T>(*inverse));
  for_lanes<T>(size, [&](int64_t i, int n) {
    L v = (load_lanes(x + i, n) - centre) * scale;
    if (weight) v = v * load_lanes(weight + i, n);
    if (bias) v = v + load_lanes(bias + i, n);
    store_lanes(y + i, v, n);
  });
}

template <class T>
void rms_norm_row(const T* x, T* y, int64_t size, const T* weight, double eps) {
  using L = typename LanesOf<T>::type;
  const double squares = row_sum<T>(size, [&](int64_t i, int n) {
    const L v = load_lanes(x + i, n);
    return v * v;
  });
  const L scale(static_cast<T>(1 / ::sqrt(squares / static_cast<double>(size) + eps)));
  for_lanes<T>(size, [&](int64_t i, int n) {
    const L v = load_lanes(x + i, n) * scale;
    store_lanes(y + i, weight ? v * load_lanes(weight + i, n) : v, n);
  });
}

}  // namespace

// Rows of x (M, D); outputs y, mean (M), 1 / sqrt(var + eps) (M). Weight and bias may be left out.
void layer_norm(const layer_norm_args& c) {
  const int64_t size = c.in.x.shape[1];
  with_type<layer_norm_args::In::x_dtypes>(c.in.x.dtype, [&]<class T>(T) {
    const T *weight = c.in.weight.as<T>(), *bias = c.in.bias.as<T>();
    parallel_each(c.exec, c.in.x.shape[0], 3 * size, [&](int64_t r) {
      double mean, inverse;
      layer_norm_row(c.in.x.as<const T>() + r * c.in.x.stride[0], c.out.y.as<T>() + r * c.out.y.stride[0], size, weight,
                     bias, c.attr.eps, &mean, &inverse);
      c.out.mean.as<T>()[r] = static_cast<T>(mean);
      c.out.inverse.as<T>()[r] = static_cast<T>(inverse);
    });
  });
}

// Rows of x (M, D); weight (D) may be left out.
void rms_norm(const rms_norm_args& c) {
  const int64_t size = c.in.x.shape[1];
  with_type<rms_norm_args::In::x_dtypes>(c.in.x.dtype, [&]<class T>(T) {
    const T* weight = c.in.weight.as<T>();
    parallel_each(c.exec, c.in.x.shape[0], 2 * size, [&](int64_t r) {
      rms_norm_row(c.in.x.as<const T>() + r * c.in.x.stride[0], c.out.y.as<T>() + r * c.out.y.stride[0], size, weight,
                   c.attr.eps);
    });
  });
}

// Rows are normalised, while they lie in a cache, by the task that writes their last columns.
void matmul_norm(const matmul_norm_args& c) {
  constexpr int64_t kRows = 64;  // about, of a block
  const View &a = c.in.a, &sum = c.out.sum, &y = c.out.y;
  const int64_t M = sum.shape[0], N = sum.shape[1], K = a.shape[1];
  if (M == 0 || N == 0) return;
  Matmul g = {M,
              N,
              K,
              a.as<const float>(),
              a.stride[0],
              1,
              c.in.packed.as<const float>(),
              K * kBlock,
              kBlock,
              sum.as<float>(),
              sum.stride[0],
              c.in.bias.as<const float>(),
              c.in.residual.as<const float>(),
              c.in.residual.stride[0]};
  const float *weight = c.in.weight.as<const float>(), *shift = c.in.shift.as<const float>();
  const int64_t rows = ceil_div(ceil_div(M, ceil_div(M, kRows)), kTileRows) * kTileRows, blocks = ceil_div(M, rows);
  const int64_t units = ceil_div(N, kBlock * kTileBlocks);
  const int64_t share = ceil_div(units, smaller(units, ceil_div(task_count(c.exec, 2. * M * N * K), blocks)));
  const int64_t parts = ceil_div(units, share);
  auto* left = scratch<int64_t>(c.exec, 2, blocks);  // parts of each block that are not done
  for (int64_t i = 0; i < blocks; i++) left[i] = parts;
  // Rows that are a multiple of 4 KB apart share one set of the L1 cache.
  if (M > 8 && a.stride[0] % 1024 == 0) {
    const int64_t ld = K + kBlock;
    float* room = scratch<float>(c.exec, 3, M * ld);
    parallel_each(c.exec, M, K, [&](int64_t m) { std::memcpy(room + m * ld, g.a + m * g.a_m, K * 4); });
    g.a = room;
    g.a_m = ld;
  }
  parallel_for(c.exec, blocks * parts, [&](int64_t t) {
    const int64_t block = t / parts, m0 = block * rows, m1 = smaller(M, m0 + rows);
    const int64_t n0 = t % parts * share * kTileBlocks, n1 = smaller(ceil_div(N, kBlock), n0 + share * kTileBlocks);
    product(g, m0, m1, n0, n1);
    if (__atomic_sub_fetch(&left[block], 1, __ATOMIC_ACQ_REL) > 0) return;
    double mean, inverse;
    for (int64_t m = m0; m < m1; m++) {
      const float* from = g.c + m * g.c_m;
      float* to = y.as<float>() + m * y.stride[0];
      c.attr.rms ? rms_norm_row(from, to, N, weight, c.attr.eps)
                 : layer_norm_row(from, to, N, weight, shift, c.attr.eps, &mean, &inverse);
    }
  });
}

}  // namespace needle::NEEDLE_ISA
