// Batch normalisation of (N, C, S) views, by given statistics or by their own, with gradient.
#include "gpu/columns.cuh"

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
__device__ __forceinline__ T of_channels(const Scalar<T>* p, int64_t column, bool last) {
  T v;
#pragma unroll
  for (int k = 0; k < kLanes<T>; k++) lane(v, k) = p[last ? column * kLanes<T> + k : column];
  return v;
}

template <class T>
struct Train {
  using S = Scalar<T>;
  Columns<T> x, y;
  const S *weight, *bias;
  S *mean, *var, *inverse;
  S eps;
  int activation;
  float alpha;

  // Chan, Golub and LeVeque (1979).
  template <class U>
  __device__ static __forceinline__ void merge(Total<U>& t, const Total<U>& other) {
    if (other.count == 0) return;
    const Scalar<U> count = t.count + other.count, share = other.count / count;
    const U off = other.first - t.first;
    t.first += off * share;
    t.second += other.second + off * off * (t.count * share);
    t.count = count;
  }
  // Of a channel's distances from its first element, so that no digits are spent on a mean far from zero.
  __device__ __forceinline__ S origin(int64_t channel, bool last) const {
    const S* from = reinterpret_cast<const S*>(x.at(last ? channel / kLanes<T> : channel, 0));
    return from[last ? channel % kLanes<T> : 0];
  }
  __device__ __forceinline__ Total<T> sum(const Share& s, bool last) const {
    Total<T> total = {T(0), T(0), 0};
    T from = s.begin < s.end ? read(x.at(s.column, 0)) : T(0);
    if (!last) from = T(lane(from, 0));
#pragma unroll 1
    for (uint32_t i = s.begin; i < s.end; i += kAtOnce<T> * s.step) {
      T v[kAtOnce<T>];
      load(v, x, s, i);
      Total<T> some = {T(0), T(0), 0};
#pragma unroll
      for (int k = 0; k < kAtOnce<T>; k++) {
        if (i + k * s.step >= s.end) continue;
        v[k] = v[k] - from;
        some.first += v[k];
        some.count += 1;
      }
      some.first = some.first * (1 / some.count);
#pragma unroll
      for (int k = 0; k < kAtOnce<T>; k++) {
        const T off = v[k] - some.first;
        if (i + k * s.step < s.end) some.second += off * off;
      }
      merge(total, some);
    }
    return total;
  }
  __device__ __forceinline__ void finish(int64_t channel, const Total<S>& total, bool last) const {
    const S variance = total.second / total.count;
    mean[channel] = total.count > 0 ? origin(channel, last) + total.first : variance;  // of nothing it is NaN, too
    var[channel] = variance;
    inverse[channel] = inverse_root(variance + eps);
  }
  __device__ __forceinline__ void apply(const Share& s, bool last) const {
    const T centre = of_channels<T>(mean, s.column, last), shift = of_channels<T>(bias, s.column, last);
    const T scale = of_channels<T>(inverse, s.column, last) * of_channels<T>(weight, s.column, last);
#pragma unroll 1
    for (uint32_t i = s.begin; i < s.end; i += kAtOnce<T> * s.step) {
      T v[kAtOnce<T>];
      load(v, x, s, i);
#pragma unroll
      for (int k = 0; k < kAtOnce<T>; k++) {
        if (i + k * s.step >= s.end) continue;
        auto activated = [&](S z) { return device::activate(activation, alpha, z); };
        write(y.at(s.column, i + k * s.step), lanewise(activated, (v[k] - centre) * scale + shift));
      }
    }
  }
};

// With m = N S and z = (x - mean) inverse: dx = weight inverse (dy - sum(dy) / m - z sum(dy z) / m).
template <class T>
struct TrainGrad : Sums {
  using S = Scalar<T>;
  Columns<T> x, dy, dx;
  const S *mean, *inverse, *weight;
  S *dweight, *dbias;
  S size;

  __device__ __forceinline__ Total<T> sum(const Share& s, bool last) const {
    Total<T> total = {T(0), T(0), 0};
    const T centre = of_channels<T>(mean, s.column, last);
#pragma unroll 1
    for (uint32_t i = s.begin; i < s.end; i += kAtOnce<T> * s.step) {
      T v[kAtOnce<T>], g[kAtOnce<T>];
      load(v, x, s, i);
      load(g, dy, s, i);
#pragma unroll
      for (int k = 0; k < kAtOnce<T>; k++) {
        if (i + k * s.step >= s.end) continue;
        total.first += g[k];
        total.second += g[k] * (v[k] - centre);
      }
    }
    return total;
  }
  __device__ __forceinline__ void finish(int64_t channel, const Total<S>& total, bool) const {
    dbias[channel] = total.first;
    dweight[channel] = total.second * inverse[channel];
  }
  __device__ __forceinline__ void apply(const Share& s, bool last) const {
    const T centre = of_channels<T>(mean, s.column, last), root = of_channels<T>(inverse, s.column, last);
    const T average = of_channels<T>(dbias, s.column, last) / size,
            scale = root * of_channels<T>(weight, s.column, last);
    const T slope = of_channels<T>(dweight, s.column, last) * root / size;
#pragma unroll 1
    for (uint32_t i = s.begin; i < s.end; i += kAtOnce<T> * s.step) {
      T v[kAtOnce<T>], g[kAtOnce<T>];
      load(v, x, s, i);
      load(g, dy, s, i);
#pragma unroll
      for (int k = 0; k < kAtOnce<T>; k++) {
        if (i + k * s.step >= s.end) continue;
        write(dx.at(s.column, i + k * s.step), (g[k] - average - (v[k] - centre) * slope) * scale);
      }
    }
  }
};

template <class Op>
__global__ void GPU_BOUNDS(kTeamThreads, 3) apply_columns(Op op, Walk w) {
  const Share s = w.share();
  if (s.column < w.columns) op.apply(s, w.last);
}

int64_t channel_size(const View& v) {
  int64_t size = v.shape[0] * v.shape[2];
  if (size > INT32_MAX) fail("batch_norm", "a channel has at most 2^31 elements", std::to_string(size));
  return size;
}

// Every element is looked at twice: for its channel's totals, then with them.
template <class T, class Op, class Args>
void train(const Op& op, const Args& c, bool last) {
  const Walk w = walk_over<T>(c.in.x, last);
  if (w.columns == 0) return;
  launch_sums<T>(op, w, c.exec);
  launch(apply_columns<Op>, grid_of(w), kTeamThreads, 0, stream_of(c), op, w);
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
  with_elements<batch_norm_train_args::In::x_dtypes>({&c.in.x, &c.out.y}, [&](auto t, bool last) {
    using T = decltype(t);
    using S = Scalar<T>;
    const Train<T> op = {{c.in.x, last},
                         {c.out.y, last},
                         c.in.weight.as<S>(),
                         c.in.bias.as<S>(),
                         c.out.mean.as<S>(),
                         c.out.var.as<S>(),
                         c.out.inverse.as<S>(),
                         static_cast<S>(c.attr.eps),
                         static_cast<int>(c.attr.activation),
                         static_cast<float>(c.attr.alpha)};
    train<T>(op, c, last);
  });
}

void batch_norm_train_grad(const batch_norm_train_grad_args& c) {
  with_elements<batch_norm_train_grad_args::In::x_dtypes>({&c.in.x, &c.in.dy, &c.out.dx}, [&](auto t, bool last) {
    using T = decltype(t);
    using S = Scalar<T>;
    const TrainGrad<T> op = {{},
                             {c.in.x, last},
                             {c.in.dy, last},
                             {c.out.dx, last},
                             c.in.mean.as<S>(),
                             c.in.inverse.as<S>(),
                             c.in.weight.as<S>(),
                             c.out.dweight.as<S>(),
                             c.out.dbias.as<S>(),
                             static_cast<S>(channel_size(c.in.x))};
    train<T>(op, c, last);
  });
}

}  // namespace needle::gpu
