// Norms of rows, alone and behind a matrix product, and of the channels of images in blocks.
#include "cpu/matmul.h"
#include "cpu/moments.h"
#include "cpu/rows.h"

namespace needle::NEEDLE_ISA {
namespace {

// The norm of a row of at most one vector: sums are of lanes, of which those beyond the row are zero.
inline V norm_of_short_row(const float* x, int n, double eps, bool rms, double* mean, double* inverse) {
  const float count = static_cast<float>(n);
  V v = V::load_n(x, n);
  *mean = 0;
  if (!rms) {
    const float centre = reduce_add(v) / count;
    v = centred(x, n, V(centre));
    const float off = reduce_add(v) / count;  // what rounding left: equal numbers have to become zeros
    *mean = static_cast<double>(centre) + static_cast<double>(off);
    v = first_lanes(v - V(off), n);
  }
  *inverse = 1 / ::sqrt(static_cast<double>(reduce_add(v * v) / count) + eps);
  return v * V(static_cast<float>(*inverse));
}

// (x - mean) / sqrt(var + eps) of a row; weight and bias may be null.
template <class T>
void layer_norm_row(const T* x, T* y, int64_t size, const T* weight, const T* bias, double eps, double* mean,
                    double* inverse) {
  using L = typename LanesOf<T>::type;
  if constexpr (LanesOf<T>::width > 1)
    if (size <= V::N) {
      const int n = static_cast<int>(size);
      V v = norm_of_short_row(x, n, eps, false, mean, inverse);
      if (weight) v = v * V::load_n(weight, n);
      if (bias) v = v + V::load_n(bias, n);
      return v.store_n(y, n);
    }
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
  if constexpr (LanesOf<T>::width > 1)
    if (size <= V::N) {
      const int n = static_cast<int>(size);
      double mean, inverse;
      const V v = norm_of_short_row(x, n, eps, true, &mean, &inverse);
      return (weight ? v * V::load_n(weight, n) : v).store_n(y, n);
    }
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

inline void norm_grad_short_row(const float* x, const float* dy, float* dx, int n, const float* weight, double eps,
                                bool rms, float* dweight, float* dbias) {
  const float count = static_cast<float>(n);
  double mean, inverse;
  const V normal = norm_of_short_row(x, n, eps, rms, &mean, &inverse), scale(static_cast<float>(inverse));
  const V given = V::load_n(dy, n), g = weight ? given * V::load_n(weight, n) : given;
  const V shift(rms ? 0.f : reduce_add(g) / count), along(reduce_add(g * normal) / count);
  ((g - shift - normal * along) * scale).store_n(dx, n);
  if (dweight) fma(given, normal, V::load_n(dweight, n)).store_n(dweight, n);
  if (dbias) (given + V::load_n(dbias, n)).store_n(dbias, n);
}

// From a row of x and the gradient of its norm that of x; what it adds to those of weight and bias, unless these are
// null.
template <class T>
void norm_grad_row(const T* x, const T* dy, T* dx, int64_t size, const T* weight, double eps, bool rms, T* dweight,
                   T* dbias) {
  using L = typename LanesOf<T>::type;
  if constexpr (LanesOf<T>::width > 1)
    if (size <= V::N) return norm_grad_short_row(x, dy, dx, static_cast<int>(size), weight, eps, rms, dweight, dbias);
  double mean = 0, var, sums[2] = {0, 0};
  if (rms)
    var = row_sum<T>(size,
                     [&](int64_t i, int n) {
                       const L v = load_lanes(x + i, n);
                       return v * v;
                     }) /
          static_cast<double>(size);
  else
    statistics<T>(1, size, [&](int64_t) { return x; }, &mean, &var);
  const L centre(static_cast<T>(mean)), scale(static_cast<T>(1 / ::sqrt(var + eps)));
  const auto normal = [&](int64_t i, int n) { return (load_lanes(x + i, n) - centre) * scale; };
  const auto slope = [&](int64_t i, int n) {
    const L g = load_lanes(dy + i, n);
    return weight ? g * load_lanes(weight + i, n) : g;
  };
  add_rows<T, 2>(sums, 1, size, [&](int64_t, int64_t i, int n, L* s) {
    const L g = slope(i, n);
    s[0] = s[0] + g;
    s[1] = fma(g, normal(i, n), s[1]);
  });
  const double count = static_cast<double>(size);
  const L shift(static_cast<T>(rms ? 0 : sums[0] / count)), along(static_cast<T>(sums[1] / count));
  for_lanes<T>(size, [&](int64_t i, int n) {
    const L v = normal(i, n);
    store_lanes(dx + i, (slope(i, n) - shift - v * along) * scale, n);
    if (dweight) store_lanes(dweight + i, fma(load_lanes(dy + i, n), v, load_lanes(dweight + i, n)), n);
    if (dbias) store_lanes(dbias + i, load_lanes(dy + i, n) + load_lanes(dbias + i, n), n);
  });
}

constexpr int kPixels = V::N == 16 ? 8 : 4;  // normalised at once, as the registers allow

// Images in blocks of channels, to be normalised pixel by pixel.
struct ChannelNorm {
  int64_t channels, from_block, to_block;  // strides between blocks
  const float *weight, *bias;              // with as many lanes as the blocks; or null
  double eps;
};

// f(c, lanes, from, to): the vector of channels from c on, which has so many lanes, and where it lies in a pixel.
template <class F>
NEEDLE_INLINE void for_channels(const ChannelNorm& g, const F& f) {
  for_lanes<float>(g.channels, [&](int64_t c, int lanes) __attribute__((always_inline)) {
    f(c, lanes, c / kBlock * g.from_block + c % kBlock, c / kBlock * g.to_block + c % kBlock);
  });
}

template <int PIXELS>
void norm_pixels(const ChannelNorm& g, const float* x, float* y) {
  const double count = static_cast<double>(g.channels);
  V totals[PIXELS], off[PIXELS], squares[PIXELS], centre[PIXELS], scale[PIXELS];
  float means[PIXELS];
  for (int p = 0; p < PIXELS; p++) totals[p] = off[p] = squares[p] = V(0.f);
  for_channels(g, [&](int64_t, int lanes, int64_t from, int64_t) __attribute__((always_inline)) {
    for (int p = 0; p < PIXELS; p++) totals[p] = totals[p] + load_lanes(x + from + p * kBlock, lanes);
  });
  for (int p = 0; p < PIXELS; p++) centre[p] = V(means[p] = static_cast<float>(reduce_add(totals[p]) / count));
  for_channels(g, [&](int64_t, int lanes, int64_t from, int64_t) __attribute__((always_inline)) {
    for (int p = 0; p < PIXELS; p++) {
      const V d = centred(x + from + p * kBlock, lanes, centre[p]);
      off[p] = off[p] + d, squares[p] = fma(d, d, squares[p]);
    }
  });
  for (int p = 0; p < PIXELS; p++) {
    double mean, var;
    finish(count, reduce_add(totals[p]), means[p], reduce_add(off[p]), reduce_add(squares[p]), &mean, &var);
    centre[p] = V(static_cast<float>(mean)), scale[p] = V(static_cast<float>(1 / ::sqrt(var + g.eps)));
  }
  for_channels(g, [&](int64_t c, int lanes, int64_t from, int64_t to) __attribute__((always_inline)) {
    for (int p = 0; p < PIXELS; p++) {
      V v = (load_lanes(x + from + p * kBlock, lanes) - centre[p]) * scale[p];
      if (g.weight) v = v * V::load(g.weight + c);
      if (g.bias) v = v + V::load(g.bias + c);
      v.store(y + to + p * kBlock);
    }
  });
}

}  // namespace

// Pixels of x (N, C / 16, H, W, 16); the result's channels beyond the last are finite.
void layer_norm_blocked(const layer_norm_blocked_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  const ChannelNorm g = {static_cast<int64_t>(c.attr.channels), x.stride[1], y.stride[1], c.in.weight.as<const float>(),
                         c.in.bias.as<const float>(),           c.attr.eps};
  const int64_t rows = x.shape[2], width = x.shape[3], pieces = ceil_div(width, kPixels);
  parallel_each(c.exec, x.shape[0] * rows * pieces, 3 * kPixels * g.channels, [&](int64_t t) {
    const int64_t first = t % pieces * kPixels, row = t / pieces % rows, n = t / pieces / rows;
    const float* from = x.as<float>() + n * x.stride[0] + row * x.stride[2] + first * kBlock;
    float* to = y.as<float>() + n * y.stride[0] + row * y.stride[2] + first * kBlock;
    if (width - first >= kPixels) return norm_pixels<kPixels>(g, from, to);
    for (int64_t p = 0; p < width - first; p++) norm_pixels<1>(g, from + p * kBlock, to + p * kBlock);
  });
}

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

// x, dy and dx (M, D).
void row_norm_grad(const row_norm_grad_args& c) {
  const View &x = c.in.x, &dy = c.in.dy, &dx = c.out.dx;
  const int64_t size = x.shape[1];
  with_type<row_norm_grad_args::In::x_dtypes>(x.dtype, [&]<class T>(T) {
    parallel_each(c.exec, x.shape[0], 6 * size, [&](int64_t r) {
      norm_grad_row<T>(x.as<const T>() + r * x.stride[0], dy.as<const T>() + r * dy.stride[0],
                       dx.as<T>() + r * dx.stride[0], size, c.in.weight.as<const T>(), c.attr.eps, c.attr.rms != 0,
                       nullptr, nullptr);
    });
  });
}

// A task is a part of the rows with sums of its own, so that they do not depend on the number of threads.
void row_norm_grad_sums(const row_norm_grad_sums_args& c) {
  const View &x = c.in.x, &dy = c.in.dy, &dx = c.out.dx, &sums = c.out.sums;
  const int64_t rows = x.shape[0], size = x.shape[1], parts = sums.shape[0];
  with_type<row_norm_grad_sums_args::In::x_dtypes>(x.dtype, [&]<class T>(T) {
    parallel_for(c.exec, parts, [&](int64_t part) {
      T* dweight = sums.as<T>() + part * sums.stride[0];
      std::memset(dweight, 0, sums.shape[1] * size * sizeof(T));
      for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; r++)
        norm_grad_row<T>(x.as<const T>() + r * x.stride[0], dy.as<const T>() + r * dy.stride[0],
                         dx.as<T>() + r * dx.stride[0], size, c.in.weight.as<const T>(), c.attr.eps, c.attr.rms != 0,
                         dweight, sums.shape[1] == 2 ? dweight + size : nullptr);
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
