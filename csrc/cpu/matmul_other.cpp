// Matrix products of float64 and integers: plain loops over rows, for models and checks that leave float32.
#include <cstring>

#include "cpu/matmul.h"
#include "math/maps.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kColumns = 512;  // of a row of the result, which stay in the L1 cache while K goes by

// Rows [begin, end) of all batches. Integers come as unsigned ones, whose overflow wraps.
template <class T>
void product_of_rows(const matmul_args& c, int64_t begin, int64_t end) {
  const View &a = c.in.a, &b = c.in.b, &out = c.out.y;
  const Optional& bias = c.in.bias;
  const int activation = static_cast<int>(c.attr.activation);
  const int r = a.rank;
  const int64_t M = a.shape[r - 2], K = a.shape[r - 1], N = b.shape[r - 1];
  const int64_t a_k = a.stride[r - 1], b_k = b.stride[r - 2], b_n = b.stride[r - 1];
  for (int64_t n0 = 0; n0 < N; n0 += kColumns) {
    const int64_t n = smaller(kColumns, N - n0);
    for (int64_t row = begin; row < end; row++) {
      const T* x = a.as<const T>() + batch_offset(a, row / M) + row % M * a.stride[r - 2];
      const T* y = b.as<const T>() + batch_offset(b, row / M) + n0 * b_n;
      T* to = out.as<T>() + row * N + n0;
      std::memset(to, 0, n * sizeof(T));
      for (int64_t k = 0; k < K; k++, y += b_k) {
        const T factor = x[k * a_k];
        if (b_n == 1)
          for (int64_t j = 0; j < n; j++) to[j] += factor * y[j];
        else
          for (int64_t j = 0; j < n; j++) to[j] += factor * y[j * b_n];
      }
      if (bias)
        for (int64_t j = 0; j < n; j++) to[j] += bias.as<const T>()[(n0 + j) * bias.stride[0]];
      if constexpr (T(0.5) != T(0))
        for (int64_t j = 0; j < n && activation; j++) to[j] = activate(activation, static_cast<T>(c.attr.alpha), to[j]);
    }
  }
}

template <class T>
void all_rows(const matmul_args& c) {
  const View& a = c.in.a;
  int64_t rows = 1;
  for (int d = 0; d < a.rank - 1; d++) rows *= a.shape[d];
  parallel_parts(c.exec, rows, 2. * c.out.y.size() * a.shape[a.rank - 1],
                 [&](int64_t begin, int64_t end) { product_of_rows<T>(c, begin, end); });
}

}  // namespace

void matmul_other(const matmul_args& c) {
  if (c.out.y.size() == 0) return;
  with_type<matmul_args::In::a_dtypes>(c.out.y.dtype, [&]<class T>(T) {
    if constexpr (std::is_integral_v<T>)
      all_rows<std::make_unsigned_t<T>>(c);
    else
      all_rows<T>(c);
  });
}

}  // namespace needle::NEEDLE_ISA
