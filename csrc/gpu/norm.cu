// Batch normalisation of (N, C, S) views, by given statistics or by its own, with gradient; layer and RMS
// normalisation of rows.
#include "gpu/rows.cuh"

namespace needle::gpu {
namespace {

template <class T>
struct Channels {  // (N, C, S) of any strides; element i of a channel is pixel i % S of image i / S
  T* data;
  int64_t n, c, s;
  Divisor pixels;
  Channels(const View& v) : data(v.as<T>()), n(v.stride[0]), c(v.stride[1]), s(v.stride[2]), pixels(v.shape[2]) {}
  __device__ __forceinline__ T& at(int64_t channel, int64_t i) const {
    int image = pixels.quotient(static_cast<int>(i));
    return data[image * n + channel * c + (i - image * static_cast<int64_t>(pixels.d)) * s];
  }
};

template <class T>
__device__ __forceinline__ T inverse_root(T v) {
  return 1 / device::sqrt(v);
}

// Four elements a thread, where both views have them as neighbours; the statistics are read through the caches.
template <class T, int V>
struct Normalise {
  Channels<T> x, y;
  const T *mean, *var, *weight, *bias;
  T eps;
  int activation;
  float alpha;
  Divisor channels, fast;  // fast: what one row of memory holds, in units of V
  bool channels_last;

  __device__ __forceinline__ T value(T v, int64_t c) const {
    v = (v - mean[c]) * (weight[c] * inverse_root(var[c] + eps)) + bias[c];
    return device::activate(activation, alpha, v);
  }
};

template <class T, int V>
__global__ void GPU_BOUNDS(256, 4) normalise(Normalise<T, V> p, int threads) {
  const int index = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  if (index >= threads) return;
  const int rest = p.fast.quotient(index), unit = (index - rest * static_cast<int>(p.fast.d)) * V;
  int64_t c = unit, i = rest;
  if (!p.channels_last) {
    const int image = p.channels.quotient(rest);
    c = rest - image * static_cast<int>(p.channels.d);
    i = image * static_cast<int64_t>(p.x.pixels.d) + unit;
  }
  const T* from = &p.x.at(c, i);
  T* to = &p.y.at(c, i);
  if constexpr (V == 1) {
    *to = p.value(*from, c);
  } else {
    int64_t step = p.channels_last;
    float4 v = read4(from);
    write4(to, make_float4(p.value(v.x, c), p.value(v.y, c + step), p.value(v.z, c + 2 * step),
                           p.value(v.w, c + 3 * step)));
  }
}

template <class T>
struct Train {
  Channels<T> x, y;
  const T *weight, *bias;
  T *mean, *var, *inverse;
  T eps;
  int activation;
  float alpha;
  int64_t size;

  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t c, bool exists) const {
    T sum = 0, square = 0;
    int64_t count = exists ? size : 0;
    for (int64_t i = team.first; i < count; i += Team::step) sum += x.at(c, i);
    T centre = team.sum(sum) / size;
    sum = 0;  // of what rounding the mean left
    for (int64_t i = team.first; i < count; i += Team::step) {
      T d = x.at(c, i) - centre;
      sum += d;
      square += d * d;
    }
    T off = team.sum(sum) / size, variance = device::max(T(0), team.sum(square) / size - off * off);
    if (!exists) return;
    T scale = inverse_root(variance + eps);
    if (team.first == 0) mean[c] = centre + off, var[c] = variance, inverse[c] = scale;
    T shift = centre + off;
    for (int64_t i = team.first; i < count; i += Team::step)
      y.at(c, i) = device::activate(activation, alpha, (x.at(c, i) - shift) * (scale * weight[c]) + bias[c]);
  }
};

// With m = N S and z = (x - mean) inverse: dx = weight inverse (dy - sum(dy) / m - z sum(dy z) / m).
template <class T>
struct TrainGrad {
  Channels<T> x, dy, dx;
  const T *mean, *inverse, *weight;
  T *dweight, *dbias;
  int64_t size;

  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t c, bool exists) const {
    T sum = 0, product = 0, centre = exists ? mean[c] : 0;
    int64_t count = exists ? size : 0;
    for (int64_t i = team.first; i < count; i += Team::step) {
      T g = dy.at(c, i);
      sum += g;
      product += g * (x.at(c, i) - centre);
    }
    sum = team.sum(sum);
    product = team.sum(product);
    if (!exists) return;
    T scale = inverse[c];
    if (team.first == 0) dweight[c] = product * scale, dbias[c] = sum;
    T average = sum / size, slope = product * scale * scale / size;
    for (int64_t i = team.first; i < count; i += Team::step)
      dx.at(c, i) = (dy.at(c, i) - average - (x.at(c, i) - centre) * slope) * (scale * weight[c]);
  }
};

template <class T, int N>
struct LayerNorm {
  using S = Scalar<T>;
  Rows<T> x, y;
  Rows<T> weight, bias;  // one row of each, or null
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

template <class T, int N>
struct RmsNorm {
  using S = Scalar<T>;
  Rows<T> x, y, weight;  // one row of weights, or null
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

bool channels_last(const View& v) {
  return v.shape[1] > 1 && v.stride[1] == 1 && (v.shape[2] == 1 || v.stride[2] != 1);
}

int64_t channel_size(const View& v) {
  int64_t size = v.shape[0] * v.shape[2];
  if (size > INT32_MAX) fail("batch_norm", "a channel has at most 2^31 elements", std::to_string(size));
  return size;
}

// Teams of a block per channel; where channels are neighbours, of one lane of every wave.
template <class Op>
void launch_channels(const Op& op, const View& x, gpuStream_t stream) {
  if (channels_last(x) && x.shape[1] >= WAVE / 2) return launch_teams<ColumnTeam>(op, x.shape[1], stream);
  launch_teams<BlockTeam>(op, x.shape[1], stream);
}

}  // namespace

void batch_norm(const batch_norm_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  if (y.size() == 0) return;
  bool last = channels_last(x), wide = quads(x, last ? 1 : 2) && quads(y, last ? 1 : 2);
  channel_size(x);
  auto start = [&](auto t, auto width) {
    using T = decltype(t);
    constexpr int V = decltype(width)::value;
    Normalise<T, V> p = {x,
                         y,
                         c.in.mean.as<T>(),
                         c.in.var.as<T>(),
                         c.in.weight.as<T>(),
                         c.in.bias.as<T>(),
                         static_cast<T>(c.attr.eps),
                         static_cast<int>(c.attr.activation),
                         static_cast<float>(c.attr.alpha),
                         x.shape[1],
                         (last ? x.shape[1] : x.shape[2]) / V,
                         last};
    const int64_t threads = y.size() / V;
    if (threads > INT32_MAX - 256) fail("batch_norm", "images have at most 2^31 elements", std::to_string(y.size()));
    launch(normalise<T, V>, dim3(static_cast<unsigned>((threads + 255) / 256)), 256, 0, stream_of(c), p, threads);
  };
  if (wide) return start(float{}, std::integral_constant<int, 4>());
  with_type<batch_norm_args::In::x_dtypes>(x.dtype, [&](auto t) { start(t, std::integral_constant<int, 1>()); });
}

// var: the biased variance; inverse: 1 / sqrt(var + eps).
void batch_norm_train(const batch_norm_train_args& c) {
  with_type<batch_norm_train_args::In::x_dtypes>(c.in.x.dtype, [&](auto t) {
    using T = decltype(t);
    Train<T> op = {c.in.x,
                   c.out.y,
                   c.in.weight.as<T>(),
                   c.in.bias.as<T>(),
                   c.out.mean.as<T>(),
                   c.out.var.as<T>(),
                   c.out.inverse.as<T>(),
                   static_cast<T>(c.attr.eps),
                   static_cast<int>(c.attr.activation),
                   static_cast<float>(c.attr.alpha),
                   channel_size(c.in.x)};
    launch_channels(op, c.in.x, stream_of(c));
  });
}

void batch_norm_train_grad(const batch_norm_train_grad_args& c) {
  with_type<batch_norm_train_grad_args::In::x_dtypes>(c.in.x.dtype, [&](auto t) {
    using T = decltype(t);
    TrainGrad<T> op = {c.in.x,
                       c.in.dy,
                       c.out.dx,
                       c.in.mean.as<T>(),
                       c.in.inverse.as<T>(),
                       c.in.weight.as<T>(),
                       c.out.dweight.as<T>(),
                       c.out.dbias.as<T>(),
                       channel_size(c.in.x)};
    launch_channels(op, c.in.x, stream_of(c));
  });
}

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
