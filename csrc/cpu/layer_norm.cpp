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

// Rows are normalised as soon as they are complete.
void matmul_norm(const matmul_norm_args& c) {
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
  const auto norm = [&](int64_t m0, int64_t m1) {
    double mean, inverse;
    for (int64_t m = m0; m < m1; m++) {
      const float* from = g.c + m * g.c_m;
      float* to = y.as<float>() + m * y.stride[0];
      c.attr.rms ? rms_norm_row(from, to, N, weight, c.attr.eps)
                 : layer_norm_row(from, to, N, weight, shift, c.attr.eps, &mean, &inverse);
    }
  };
  g.done = [](void* f, int64_t m0, int64_t m1) { (*static_cast<decltype(norm)*>(f))(m0, m1); };
  g.context = const_cast<void*>(static_cast<const void*>(&norm));
  product(c.exec, g);
}

}  // namespace needle::NEEDLE_ISA
