// Batch normalisation of (N, C, S) arrays, by given statistics also of blocked ones (batch_norm_blocked.cpp).
#include "cpu/batch_norm.h"

#include "cpu/moments.h"

namespace needle::NEEDLE_ISA {
namespace {

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

// Rows shorter than a vector: those of neighbouring channels follow each other in an image, as columns of a matrix with
// a row per image.
constexpr int64_t kColumns = 256;  // that are worked on at a time: so many rows of them stay in L2

template <class T>
bool has_short_rows(const View& x) {
  const int64_t size = x.shape[2];
  return size > 0 && size < LanesOf<T>::width && x.stride[1] == size && x.shape[0] > 1;
}

// Channels [first, first + channels) of (N, C, S), in columns.
struct Columns {
  int64_t rows, size, first, channels;
  int64_t count() const { return channels * size; }
  double values() const { return static_cast<double>(rows * size); }  // of a channel
};

// f(columns, first, last) for all channels of x and stretches [first, last) of its rows, in tasks.
template <class F>
void each_columns(const Exec* exec, const View& x, int64_t stretch, const F& f) {
  const int64_t rows = x.shape[0], channels = x.shape[1], size = x.shape[2], step = kColumns / size;
  const int64_t blocks = ceil_div(channels, step), stretches = ceil_div(rows, stretch);
  parallel_each(exec, blocks * stretches, 4 * stretch * size * step, [&](int64_t t) {
    const int64_t channel = t / stretches * step, first = t % stretches * stretch;
    f(Columns{rows, size, channel, smaller(step, channels - channel)}, first, smaller(rows, first + stretch));
  });
}

// A value per channel, of(channel), for each of its columns.
template <class T>
struct Spread {
  T values[kColumns];

  template <class F>
  Spread(const Columns& c, const F& of) {
    for (int64_t k = 0; k < c.channels; k++)
      for (int64_t i = 0; i < c.size; i++) values[k * c.size + i] = of(k);
  }
  typename LanesOf<T>::type at(int64_t column, int n) const { return load_lanes(values + column, n); }
};

template <int SUMS>
struct ColumnSums {
  double of[SUMS][kColumns] = {};  // by channel
};

// Sums per channel of f(row, column, n, sums), which adds n lanes from a column on to sums.
template <class T, int SUMS, class F>
NEEDLE_INLINE ColumnSums<SUMS> add_columns(const Columns& c, const F& f) {
  using L = typename LanesOf<T>::type;
  constexpr int N = LanesOf<T>::width;
  constexpr int64_t kRows = 32;  // that are summed in the array's own type
  ColumnSums<SUMS> total;
  for (int64_t row = 0; row < c.rows; row += kRows) {
    T part[SUMS][kColumns];
    for (int64_t column = 0; column < c.count(); column += kChains * N) {
      const int64_t rest = c.count() - column;
      const int chains = static_cast<int>(smaller(kChains, ceil_div(rest, N)));
      L sums[kChains][SUMS];
      for (auto& chain : sums)
        for (L& s : chain) s = L(T(0));
      for (int64_t r = row; r < smaller(c.rows, row + kRows); r++)
        if (rest >= kChains * N)
          for (int j = 0; j < kChains; j++) f(r, column + j * N, N, sums[j]);
        else
          for (int j = 0; j < chains; j++) f(r, column + j * N, static_cast<int>(smaller(N, rest - j * N)), sums[j]);
      for (int j = 0; j < chains; j++)
        for (int s = 0; s < SUMS; s++)
          store_lanes(part[s] + column + j * N, sums[j][s], static_cast<int>(smaller(N, rest - j * N)));
    }
    for (int s = 0; s < SUMS; s++)
      for (int64_t k = 0; k < c.channels; k++) {
        T sum = part[s][k * c.size];
        for (int64_t i = 1; i < c.size; i++) sum += part[s][k * c.size + i];
        total.of[s][k] += static_cast<double>(sum);
      }
  }
  return total;
}

// Rows [first, last) of columns, from the mean and the scale of each of their channels.
template <class T, class Args>
NEEDLE_INLINE void normalise_columns(const Args& c, const Columns& columns, int64_t first, int64_t last, const T* means,
                                     const T* scales) {
  using L = typename LanesOf<T>::type;
  const Spread<T> mean(columns, [&](int64_t k) { return means[k]; });
  const Spread<T> scale(columns, [&](int64_t k) { return scales[k]; });
  const Spread<T> bias(columns, [&](int64_t k) { return c.in.bias.template as<T>()[columns.first + k]; });
  for (int64_t r = first; r < last; r++) {
    const T* from = row_of<T>(c.in.x, r, columns.first);
    T* to = row_of<T>(c.out.y, r, columns.first);
    for_lanes<T>(columns.count(), [&](int64_t i, int n) {
      const L v = (load_lanes(from + i, n) - mean.at(i, n)) * scale.at(i, n) + bias.at(i, n);
      store_lanes(to + i, activate(static_cast<int>(c.attr.activation), static_cast<T>(c.attr.alpha), v), n);
    });
  }
}

template <class T>
void train_short_rows(const batch_norm_train_args& c) {
  using L = typename LanesOf<T>::type;
  const View &x = c.in.x, &y = c.out.y;
  each_columns(c.exec, x, x.shape[0], [&](const Columns& columns, int64_t, int64_t) {
    const auto from = [&](int64_t n) { return row_of<T>(x, n, columns.first); };
    const auto total =
        add_columns<T, 1>(columns, [&](int64_t r, int64_t i, int n, L* s)
                                       __attribute__((always_inline)) { s[0] = s[0] + load_lanes(from(r) + i, n); });
    const Spread<T> centre(columns, [&](int64_t k) { return static_cast<T>(total.of[0][k] / columns.values()); });
    const auto around =
        add_columns<T, 2>(columns, [&](int64_t r, int64_t i, int n, L* s) __attribute__((always_inline)) {
          const L d = load_lanes(from(r) + i, n) - centre.at(i, n);
          s[0] = s[0] + d;
          s[1] = fma(d, d, s[1]);
        });
    T scales[kColumns];
    for (int64_t k = 0; k < columns.channels; k++) {
      const int64_t channel = columns.first + k;
      double mean, var;
      finish(columns.values(), total.of[0][k], static_cast<double>(centre.values[k * columns.size]), around.of[0][k],
             around.of[1][k], &mean, &var);
      const double inverse = 1 / ::sqrt(var + c.attr.eps);
      c.out.mean.as<T>()[channel] = static_cast<T>(mean);
      c.out.var.as<T>()[channel] = static_cast<T>(var);
      c.out.inverse.as<T>()[channel] = static_cast<T>(inverse);
      scales[k] = static_cast<T>(inverse * c.in.weight.as<T>()[channel]);
    }
    normalise_columns<T>(c, columns, 0, columns.rows, c.out.mean.as<T>() + columns.first, scales);
  });
}

constexpr int64_t kRowsOfTask = 64;

template <class T>
void infer_short_rows(const batch_norm_args& c) {
  const int64_t channels = c.in.x.shape[1], rows = c.in.x.shape[0];
  T* scales = scratch<T>(c.exec, 2, channels);
  for (int64_t k = 0; k < channels; k++)
    scales[k] = static_cast<T>(c.in.weight.as<T>()[k] / ::sqrt(static_cast<double>(c.in.var.as<T>()[k]) + c.attr.eps));
  each_columns(c.exec, c.in.x, kRowsOfTask, [&](const Columns& columns, int64_t first, int64_t last) {
    normalise_columns<T>(c, columns, first, last, c.in.mean.as<T>() + columns.first, scales + columns.first);
  });
}

// What the gradient of a channel with `count` values is made of, from the sums of dy and of dy (x - mean): with
// z = (x - mean) inverse, dx = weight inverse (dy - sum(dy) / count - z sum(dy z) / count).
template <class T>
struct Slope {
  T average, tilt, scale;

  Slope(const batch_norm_train_grad_args& c, int64_t channel, double count, double sum, double slant) {
    const double inverse = c.in.inverse.as<T>()[channel], weight = c.in.weight.as<T>()[channel];
    c.out.dweight.as<T>()[channel] = static_cast<T>(slant * inverse);
    c.out.dbias.as<T>()[channel] = static_cast<T>(sum);
    average = static_cast<T>(sum / count);
    tilt = static_cast<T>(slant * inverse * inverse / count);
    scale = static_cast<T>(weight * inverse);
  }
};

template <class T>
void grad_short_rows(const batch_norm_train_grad_args& c) {
  using L = typename LanesOf<T>::type;
  const View &x = c.in.x, &dy = c.in.dy, &dx = c.out.dx;
  each_columns(c.exec, x, x.shape[0], [&](const Columns& columns, int64_t, int64_t) {
    const Spread<T> mean(columns, [&](int64_t k) { return c.in.mean.as<T>()[columns.first + k]; });
    const auto sums = add_columns<T, 2>(columns, [&](int64_t r, int64_t i, int n, L* s) __attribute__((always_inline)) {
      const L g = load_lanes(row_of<T>(dy, r, columns.first) + i, n);
      s[0] = s[0] + g;
      s[1] = fma(g, load_lanes(row_of<T>(x, r, columns.first) + i, n) - mean.at(i, n), s[1]);
    });
    T averages[kColumns], tilts[kColumns], scales[kColumns];
    for (int64_t k = 0; k < columns.channels; k++) {
      const Slope<T> slope(c, columns.first + k, columns.values(), sums.of[0][k], sums.of[1][k]);
      averages[k] = slope.average, tilts[k] = slope.tilt, scales[k] = slope.scale;
    }
    const Spread<T> average(columns, [&](int64_t k) { return averages[k]; });
    const Spread<T> tilt(columns, [&](int64_t k) { return tilts[k]; });
    const Spread<T> scale(columns, [&](int64_t k) { return scales[k]; });
    for (int64_t r = 0; r < columns.rows; r++) {
      const T *from = row_of<T>(x, r, columns.first), *g = row_of<T>(dy, r, columns.first);
      T* to = row_of<T>(dx, r, columns.first);
      for_lanes<T>(columns.count(), [&](int64_t i, int n) {
        const L off = load_lanes(from + i, n) - mean.at(i, n);
        store_lanes(to + i, (load_lanes(g + i, n) - average.at(i, n) - off * tilt.at(i, n)) * scale.at(i, n), n);
      });
    }
  });
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
    if (has_short_rows<T>(c.in.x) && has_short_rows<T>(c.out.y)) return infer_short_rows<T>(c);
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
    if (has_short_rows<T>(x) && has_short_rows<T>(c.out.y)) return train_short_rows<T>(c);
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

void batch_norm_train_grad(const batch_norm_train_grad_args& c) {
  const View &x = c.in.x, &dy = c.in.dy, &dx = c.out.dx;
  int64_t rows = x.shape[0], channels = x.shape[1], size = x.shape[2];
  with_type<batch_norm_train_grad_args::In::x_dtypes>(x.dtype, [&]<class T>(T) {
    using L = typename LanesOf<T>::type;
    if (has_short_rows<T>(x) && has_short_rows<T>(dy) && has_short_rows<T>(dx)) return grad_short_rows<T>(c);
    parallel_each(c.exec, channels, 4 * rows * size, [&](int64_t k) {
      double sums[2] = {0, 0};  // of dy, of dy (x - mean)
      L mean(c.in.mean.as<T>()[k]);
      add_rows<T, 2>(sums, rows, size, [&](int64_t r, int64_t i, int n, L* s) {
        L g = load_lanes(row_of<T>(dy, r, k) + i, n);
        s[0] = s[0] + g;
        s[1] = fma(g, load_lanes(row_of<T>(x, r, k) + i, n) - mean, s[1]);
      });
      const Slope<T> slope(c, k, static_cast<double>(rows * size), sums[0], sums[1]);
      L scale(slope.scale), average(slope.average), tilt(slope.tilt);
      for (int64_t n = 0; n < rows; n++) {
        const T *xr = row_of<T>(x, n, k), *g = row_of<T>(dy, n, k);
        T* to = row_of<T>(dx, n, k);
        for_lanes<T>(size, [&](int64_t i, int m) {
          L d = load_lanes(g + i, m) - average - (load_lanes(xr + i, m) - mean) * tilt;
          store_lanes(to + i, d * scale, m);
        });
      }
    });
  });
}

}  // namespace needle::NEEDLE_ISA
