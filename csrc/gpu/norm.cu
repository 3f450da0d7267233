// Layer and RMS normalisation of rows.
#include "gpu/rows.cuh"

namespace needle::gpu {
namespace {

template <class A, int N>
struct LayerNorm {
  using T = typename A::Element;
  using S = Scalar<T>;
  A x, y;
  A weight, bias;  // one row of each, or null
  S *mean, *inverse;
  S eps;
  int64_t d;

  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    Row<T, N, Team> r(team, x[row], d);
    const S size = static_cast<S>(d * kLanes<T>);
    T sum = 0, square = 0;
    r.each([&](const T& v, int64_t) { sum += v; });
    const S centre = team.sum(total(sum)) / size;
    r.each([&](const T& v, int64_t) { square += (v - centre) * (v - centre); });
    const S scale = inverse_root(team.sum(total(square)) / size + eps);
    if (team.first == 0) mean[row] = centre, inverse[row] = scale;
    r.put(y[row], [&](const T& x, int64_t i) {
      T v = (x - centre) * scale;
      if (weight.data) v *= read(weight.data + i);
      if (bias.data) v += read(bias.data + i);
      return v;
    });
  }
};

template <class A, int N>
struct RmsNorm {
  using T = typename A::Element;
  using S = Scalar<T>;
  A x, y, weight;  // one row of weights, or null
  S eps;
  int64_t d;

  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    Row<T, N, Team> r(team, x[row], d);
    T squares = 0;
    r.each([&](const T& v, int64_t) { squares += v * v; });
    const S scale = inverse_root(team.sum(total(squares)) / static_cast<S>(d * kLanes<T>) + eps);
    r.put(y[row], [&](const T& v, int64_t i) {
      const T z = v * scale;
      return weight.data ? z * read(weight.data + i) : z;
    });
  }
};

}  // namespace

// Rows of x (M, D); outputs y, mean (M), 1 / sqrt(variance + eps) (M). Weight and bias may be absent.
void layer_norm(const layer_norm_args& c) {
  const View &x = c.in.x, &y = c.out.y, &weight = c.in.weight, &bias = c.in.bias;
  with_rows<layer_norm_args::In::x_dtypes>({&x, &y, &weight, &bias}, [&](auto t) {
    using T = decltype(t);
    using S = Scalar<T>;
    launch_rows<T, LayerNorm>(stream_of(c), x.shape[0], x.shape[1], x, y, weight, bias, c.out.mean.as<S>(),
                              c.out.inverse.as<S>(), static_cast<S>(c.attr.eps));
  });
}

// Rows of x (M, D); weight (D) may be absent.
void rms_norm(const rms_norm_args& c) {
  const View &x = c.in.x, &y = c.out.y, &weight = c.in.weight;
  with_rows<rms_norm_args::In::x_dtypes>({&x, &y, &weight}, [&](auto t) {
    using T = decltype(t);
    launch_rows<T, RmsNorm>(stream_of(c), x.shape[0], x.shape[1], x, y, weight, static_cast<Scalar<T>>(c.attr.eps));
  });
}

}  // namespace needle::gpu
