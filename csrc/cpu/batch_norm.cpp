// Batch normalisation of (N, C, S) arrays, by given statistics also of blocked ones (batch_norm_blocked.cpp); layer
// normalisation of rows.
#include "cpu/batch_norm.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kSection = 512;  // terms that are summed in the array's own type; sections are added in double

// Adds to totals[0..SUMS) the sums of f(i, n, sums) over a row; f adds its lanes to sums, lanes beyond n being zero.
template <class T, int SUMS, class F>
NEEDLE_INLINE void add_row(double* totals, int64_t size, const F& f) {
  using L = typename LanesOf<T>::type;
  for (int64_t first = 0; first < size; first += kSection) {
    L sums[SUMS];
    for (L& s : sums) s = L(T(0));
    for_lanes<T>(smaller(kSection, size - first), [&](int64_t i, int n) { f(first + i, n, sums); });
    for (int k = 0; k < SUMS; k++) totals[k] += static_cast<double>(reduce_add(sums[k]));
  }
}

// Lanes of x - mean, those beyond n zero.
template <class T, class L>
NEEDLE_INLINE L centred(const T* p, int n, L mean) {
  L v = load_lanes(p, n) - mean;
  if (n == LanesOf<T>::width) return v;
  T lanes[LanesOf<T>::width];
  store_lanes(lanes, v, LanesOf<T>::width);
  return load_lanes(lanes, n);
}

template <class T>
NEEDLE_INLINE T* row_of(const View& v, int64_t n, int64_t channel) {
  return v.as<T>() + n * v.stride[0] + channel * v.stride[1];
}

// y = activation((x - mean) * scale + bias) over a contiguous row.
template <class T>
NEEDLE_INLINE void normalise(T* y, const T* x, int64_t size, T mean, T scale, T bias, int code, T alpha) {
  using L = typename LanesOf<T>::type;
  for_lanes<T>(size, [&](int64_t i, int n) {
    L v = (load_lanes(x + i, n) - L(mean)) * L(scale) + L(bias);
    store_lanes(y + i, activate(code, alpha, v), n);
  });
}

// Mean and biased variance of `rows` rows, in two passes: E(x^2) - E(x)^2 would cancel. The second one corrects the
// mean, so that equal numbers have theirs exactly: a norm divides what is left of them by the root of eps alone.
template <class T, class F>
NEEDLE_INLINE void statistics(int64_t rows, int64_t size, const F& row, double* mean, double* var) {
  using L = typename LanesOf<T>::type;
  double count = static_cast<double>(rows * size), total = 0, sums[2] = {0, 0};  // of x - centre and its squares
  for (int64_t r = 0; r < rows; r++)
    add_row<T, 1>(&total, size, [&](int64_t i, int n, L* s) { s[0] = s[0] + load_lanes(row(r) + i, n); });
  const T centre = static_cast<T>(total / count);
  for (int64_t r = 0; r < rows; r++)
    add_row<T, 2>(sums, size, [&](int64_t i, int n, L* s) {
      L d = centred(row(r) + i, n, L(centre));
      s[0] = s[0] + d;
      s[1] = fma(d, d, s[1]);
    });
  const double off = sums[0] / count;
  *mean = off == off ? static_cast<double>(centre) + off : total / count;
  *var = max(0.0, sums[1] / count - off * off);  // in this order not a number stays none
}

}  // namespace

void batch_norm(const batch_norm_args& c) {
  if (c.in.x.rank == 5) {
    if (c.in.x.dtype != DType::f32) refuse_dtype(c.in.x.dtype);
    const int64_t channels = c.in.mean.shape[0];
    float* scale = scratch<float>(c.exec, 2, channels);
    for (int64_t k = 0; k < channels; k++)
      scale[k] = static_cast<float>(c.in.weight.as<float>()[k] /
                                    ::sqrt(static_cast<double>(c.in.var.as<float>()[k]) + c.attr.eps));
    return normalise_blocked(c.exec, c.in.x, kAbsent, c.out.y, c.in.mean.as<float>(), scale, c.in.bias.as<float>(),
                             channels, static_cast<int>(c.attr.activation), static_cast<float>(c.attr.alpha));
  }
  int64_t channels = c.in.x.shape[1], size = c.in.x.shape[2];
  with_type<batch_norm_args::In::x_dtypes>(c.in.x.dtype, [&]<class T>(T) {
    const T *mean = c.in.mean.as<T>(), *var = c.in.var.as<T>(), *weight = c.in.weight.as<T>(),
            *bias = c.in.bias.as<T>();
    parallel_each(c.exec, c.in.x.shape[0] * channels, size, [&](int64_t r) __attribute__((always_inline)) {
      int64_t n = r / channels, k = r % channels;
      T scale = static_cast<T>(weight[k] / ::sqrt(static_cast<double>(var[k]) + c.attr.eps));
      normalise(row_of<T>(c.out.y, n, k), row_of<T>(c.in.x, n, k), size, mean[k], scale, bias[k],
                static_cast<int>(c.attr.activation), static_cast<T>(c.attr.alpha));
    });
  });
}

void batch_norm_train(const batch_norm_train_args& c) {
  const View& x = c.in.x;
  int64_t rows = x.shape[0], channels = x.shape[1], size = x.shape[2];
  with_type<batch_norm_train_args::In::x_dtypes>(x.dtype, [&]<class T>(T) {
    parallel_each(c.exec, channels, 4 * rows * size, [&](int64_t k) {
      double mean, var;
      statistics<T>(rows, size, [&](int64_t n) { return row_of<T>(x, n, k); }, &mean, &var);
      double inverse = 1 / ::sqrt(var + c.attr.eps);
      c.out.mean.as<T>()[k] = static_cast<T>(mean);
      c.out.var.as<T>()[k] = static_cast<T>(var);
      c.out.inverse.as<T>()[k] = static_cast<T>(inverse);
      T scale = static_cast<T>(inverse * c.in.weight.as<T>()[k]);
      for (int64_t n = 0; n < rows; n++)
        normalise(row_of<T>(c.out.y, n, k), row_of<T>(x, n, k), size, static_cast<T>(mean), scale, c.in.bias.as<T>()[k],
                  static_cast<int>(c.attr.activation), static_cast<T>(c.attr.alpha));
    });
  });
}

// With m = N S and z = (x - mean) inv_std: dx = weight inv_std (dy - sum(dy) / m - z sum(dy z) / m).
void batch_norm_train_grad(const batch_norm_train_grad_args& c) {
  const View &x = c.in.x, &dy = c.in.dy, &dx = c.out.dx;
  int64_t rows = x.shape[0], channels = x.shape[1], size = x.shape[2];
  with_type<batch_norm_train_grad_args::In::x_dtypes>(x.dtype, [&]<class T>(T) {
    using L = typename LanesOf<T>::type;
    parallel_each(c.exec, channels, 4 * rows * size, [&](int64_t k) {
      double inverse = c.in.inverse.as<T>()[k], weight = c.in.weight.as<T>()[k],
             sums[2] = {0, 0};  // of dy, of dy (x - mean)
      L mean(c.in.mean.as<T>()[k]);
      for (int64_t n = 0; n < rows; n++)
        add_row<T, 2>(sums, size, [&](int64_t i, int m, L* s) {
          L g = load_lanes(row_of<T>(dy, n, k) + i, m);
          s[0] = s[0] + g;
          s[1] = fma(g, load_lanes(row_of<T>(x, n, k) + i, m) - mean, s[1]);
        });
      c.out.dweight.as<T>()[k] = static_cast<T>(sums[1] * inverse);
      c.out.dbias.as<T>()[k] = static_cast<T>(sums[0]);
      double count = static_cast<double>(rows * size);
      L scale(static_cast<T>(weight * inverse)), average(static_cast<T>(sums[0] / count));
      L slope(static_cast<T>(sums[1] * inverse * inverse / count));
      for (int64_t n = 0; n < rows; n++) {
        const T *xr = row_of<T>(x, n, k), *g = row_of<T>(dy, n, k);
        T* to = row_of<T>(dx, n, k);
        for_lanes<T>(size, [&](int64_t i, int m) {
          L d = load_lanes(g + i, m) - average - (load_lanes(xr + i, m) - mean) * slope;
          store_lanes(to + i, d * scale, m);
        });
      }
    });
  });
}

// Rows of x (M, D); outputs y, mean (M), 1 / sqrt(var + eps) (M). Weight and bias may be left out.
void layer_norm(const layer_norm_args& c) {
  int64_t size = c.in.x.shape[1];
  with_type<layer_norm_args::In::x_dtypes>(c.in.x.dtype, [&]<class T>(T) {
    using L = typename LanesOf<T>::type;
    const T* weight = c.in.weight.as<T>();
    const T* bias = c.in.bias.as<T>();
    parallel_each(c.exec, c.in.x.shape[0], 3 * size, [&](int64_t r) {
      const T* x = c.in.x.as<T>() + r * c.in.x.stride[0];
      T* y = c.out.y.as<T>() + r * c.out.y.stride[0];
      double mean, var;
      statistics<T>(1, size, [&](int64_t) { return x; }, &mean, &var);
      double inverse = 1 / ::sqrt(var + c.attr.eps);
      c.out.mean.as<T>()[r] = static_cast<T>(mean);
      c.out.inverse.as<T>()[r] = static_cast<T>(inverse);
      L centre(static_cast<T>(mean)), scale(static_cast<T>(inverse));
      for_lanes<T>(size, [&](int64_t i, int n) {
        L v = (load_lanes(x + i, n) - centre) * scale;
        if (weight) v = v * load_lanes(weight + i, n);
        if (bias) v = v + load_lanes(bias + i, n);
        store_lanes(y + i, v, n);
      });
    });
  });
}

}  // namespace needle::NEEDLE_ISA
