// Plain images resized along one axis by a band of weights: cubic interpolation, and filters that average what a pixel
// of a smaller image covers.
#include "cpu/lanes.h"
#include "cpu/strided.h"
#include "cpu/tile.h"

namespace needle::NEEDLE_ISA {
namespace {

// A row of `size` pixels as the weighted sum of `taps` rows that lie `step` apart.
template <class T>
void add_rows(const T* x, int64_t step, int64_t column, const T* weights, int64_t weight_step, int64_t taps, T* y,
              int64_t y_column, int64_t size) {
  using L = typename LanesOf<T>::type;
  constexpr int64_t N = LanesOf<T>::width, kVectors = 4;
  int64_t i = 0;
  const auto sum = [&]<int VECTORS>(std::integral_constant<int, VECTORS>, int n) {
    L sums[VECTORS];
    for (L& s : sums) s = L(0);
    for (int64_t t = 0; t < taps; t++) {
      const T weight = weights[t * weight_step];
      if (weight == 0) continue;
      for (int v = 0; v < VECTORS; v++) sums[v] = sums[v] + L(weight) * load_lanes(x + t * step + i + v * N, n);
    }
    for (int v = 0; v < VECTORS; v++) store_lanes(y + i + v * N, sums[v], n);
  };
  if (column == 1 && y_column == 1) {
    for (; i + kVectors * N <= size; i += kVectors * N) sum(std::integral_constant<int, kVectors>(), N);
    for (; i < size; i += N) sum(std::integral_constant<int, 1>(), static_cast<int>(smaller(N, size - i)));
    return;
  }
  for (; i < size; i++) {
    T total = 0;
    for (int64_t t = 0; t < taps; t++)
      if (const T weight = weights[t * weight_step]; weight != 0) total += weight * x[t * step + i * column];
    y[i * y_column] = total;
  }
}

// A row from a row: pixel i is the weighted sum of `taps` pixels from place[i] on.
template <class T>
void add_pixels(const T* x, int64_t column, const int32_t* place, const T* weights, int64_t taps, T* y,
                int64_t y_column, int64_t size) {
  using L = typename LanesOf<T>::type;
  constexpr int64_t N = LanesOf<T>::width;
  for (int64_t i = 0; i < size; i += N) {
    const int n = static_cast<int>(smaller(N, size - i));
    decltype(whole(L(0))) at;
    std::memcpy(&at, place + i, sizeof(at));
    L sum(0);
    for (int64_t t = 0; t < taps; t++) {
      const L weight = load_lanes(weights + t * size + i, n);
      sum = sum + select(eq(weight, L(0)), L(0), weight * gather(x + t * column, at));
    }
    if (y_column == 1) {
      store_lanes(y + i, sum, n);
      continue;
    }
    T each[N];
    store_lanes(each, sum, N);
    for (int k = 0; k < n; k++) y[(i + k) * y_column] = each[k];
  }
}

}  // namespace

void resample(const resample_args& c) {
  const View &x = c.in.x, &first = c.in.first, &y = c.out.y;
  if (y.size() == 0) return;
  const bool across = c.attr.axis == 3;
  const int64_t pixels = x.shape[across ? 3 : 2], taps = smaller(c.in.weights.shape[0], pixels);
  const int64_t many = c.in.weights.shape[1], channels = y.shape[1], rows = y.shape[2];
  const auto begin_of = [&](int64_t i) {  // within the image also where a file says otherwise
    return larger(0, smaller(first.as<const int64_t>()[i], pixels - taps));
  };
  with_type<resample_args::In::x_dtypes>(x.dtype, [&]<class T>(T) {
    constexpr int64_t N = LanesOf<T>::width;
    const T* weights = c.in.weights.as<const T>();
    int32_t* place = scratch<int32_t>(c.exec, 0, many + N);  // past the end 0
    for (int64_t i = 0; i < many + N; i++) place[i] = i < many ? static_cast<int32_t>(begin_of(i) * x.stride[3]) : 0;
    parallel_parts(c.exec, y.shape[0] * channels * rows, 2. * taps * y.size(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const int64_t row = i % rows, image = i / rows;
        const T* from = x.as<const T>() + image / channels * x.stride[0] + image % channels * x.stride[1];
        T* to = y.as<T>() + image / channels * y.stride[0] + image % channels * y.stride[1] + row * y.stride[2];
        if (across)
          add_pixels(from + row * x.stride[2], x.stride[3], place, weights, taps, to, y.stride[3], many);
        else
          add_rows(from + begin_of(row) * x.stride[2], x.stride[2], x.stride[3], weights + row, many, taps, to,
                   y.stride[3], y.shape[3]);
      }
    });
  });
}

}  // namespace needle::NEEDLE_ISA
