// Batch normalisation of (N, C, S) views, by given statistics or by their own, with gradient.
#include <algorithm>

#include "gpu/quad.cuh"
#include "gpu/team.cuh"

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

// The same as columns of elements T: of Quads a column is four channels where these are neighbours in memory (`last`),
// else an element is four pixels.
template <class T>
struct Columns {
  T* data;
  int64_t n, c, s;
  Divisor pixels;
  Columns(const View& v, bool last)
      : data(reinterpret_cast<T*>(v.as<Scalar<T>>())),
        n(v.stride[0] / kLanes<T>),
        c(last ? v.stride[1] : v.stride[1] / kLanes<T>),
        s(last ? v.stride[2] / kLanes<T> : v.stride[2]),
        pixels(last ? v.shape[2] : v.shape[2] / kLanes<T>) {}
  __device__ __forceinline__ T* at(int64_t column, uint32_t i) const {
    const uint32_t image = pixels.quotient(i);
    return data + (image * n + column * c + (i - image * pixels.d) * s);
  }
};

// What is known of some elements of a column: their sum and that of their products with another, or their mean and the
// sum of squared deviations from it.
template <class T>
struct Total {
  T first, second;
  Scalar<T> count;
};

// Elements begin, begin + step, ... of a column, of which a thread loads kAtOnce together.
struct Share {
  uint32_t column, begin, end, step;
};

template <class T>
constexpr int kAtOnce = kLanes<T> == 4 ? 4 : 8;

// Those from i on; 0 where there are no more.
template <class T>
__device__ __forceinline__ void load(T (&v)[kAtOnce<T>], const Columns<T>& x, const Share& s, uint32_t i) {
#pragma unroll
  for (int k = 0; k < kAtOnce<T>; k++) v[k] = i + k * s.step < s.end ? read(x.at(s.column, i + k * s.step)) : T(0);
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
struct TrainGrad {
  using S = Scalar<T>;
  Columns<T> x, dy, dx;
  const S *mean, *inverse, *weight;
  S *dweight, *dbias;
  S size;

  template <class U>
  __device__ static __forceinline__ void merge(Total<U>& t, const Total<U>& other) {
    t.first += other.first;
    t.second += other.second;
  }
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

// How blocks share columns out: `width` neighbouring ones, a power of two, and `piece` elements of each.
struct Walk {
  uint32_t columns, size, piece;
  int width;
  bool last;

  __device__ __forceinline__ Share share() const {
    const uint32_t row = threadIdx.x / width, begin = blockIdx.y * piece;
    return {blockIdx.x * width + threadIdx.x % width, begin + row, size - begin < piece ? size : begin + piece,
            static_cast<uint32_t>(kTeamThreads / width)};
  }
};

// The totals of all threads whose numbers are the same modulo `width`, in the first of them.
template <class Op, class T>
__device__ __forceinline__ void merge_block(Total<T>& mine, int width) {
  struct Block {
    Total<T> of[kTeamThreads];
  };
  GPU_SHARED(Block, block);
  const int thread = static_cast<int>(threadIdx.x);
  block.of[thread] = mine;
#pragma unroll 1
  for (int half = kTeamThreads / 2; half >= width; half /= 2) {
    block_sync();
    if (thread >= half) continue;
    Op::merge(mine, block.of[thread + half]);
    block.of[thread] = mine;
  }
}

// Of a Quad's lanes, which are channels or belong to one.
template <class Op, class T>
__device__ __forceinline__ void finish(const Op& op, int64_t column, const Total<T>& total, bool last) {
  Total<Scalar<T>> one = {0, 0, 0};
#pragma unroll
  for (int k = 0; k < kLanes<T>; k++) {
    if (last) one = {0, 0, 0};
    Op::merge(one, {lane(total.first, k), lane(total.second, k), total.count});
    if (last || k == kLanes<T> - 1) op.finish(last ? column * kLanes<T> + k : column, one, last);
  }
}

// A block's totals go to `parts`, or are all there is.
template <class Op, class T>
__global__ void GPU_BOUNDS(kTeamThreads, 4) sum_columns(Op op, Walk w, Total<T>* parts) {
  const Share s = w.share();
  Total<T> total = {T(0), T(0), 0};
  if (s.column < w.columns) total = op.sum(s, w.last);
  merge_block<Op>(total, w.width);
  if (threadIdx.x >= static_cast<unsigned>(w.width) || s.column >= w.columns) return;
  if (parts) {
    parts[static_cast<int64_t>(blockIdx.y) * w.columns + s.column] = total;
  } else {
    finish(op, s.column, total, w.last);
  }
}

// A block per column.
template <class Op, class T>
__global__ void GPU_BOUNDS(kTeamThreads, 4) merge_parts(Op op, Walk w, const Total<T>* parts, int count) {
  Total<T> total = {T(0), T(0), 0};
  for (int part = static_cast<int>(threadIdx.x); part < count; part += kTeamThreads)
    Op::merge(total, parts[static_cast<int64_t>(part) * w.columns + blockIdx.x]);
  merge_block<Op>(total, 1);
  if (threadIdx.x == 0) finish(op, blockIdx.x, total, w.last);
}

template <class Op>
__global__ void GPU_BOUNDS(kTeamThreads, 4) apply_columns(Op op, Walk w) {
  const Share s = w.share();
  if (s.column < w.columns) op.apply(s, w.last);
}

bool channels_last(const View& v) {
  return v.shape[1] > 1 && v.stride[1] == 1 && (v.shape[2] == 1 || v.stride[2] != 1);
}

int64_t channel_size(const View& v) {
  int64_t size = v.shape[0] * v.shape[2];
  if (size > INT32_MAX) fail("batch_norm", "a channel has at most 2^31 elements", std::to_string(size));
  return size;
}

// f(element type, whether channels are walked as neighbours), of views of one shape.
template <const char* letters, class F>
void with_elements(std::initializer_list<const View*> views, const F& f) {
  const View& x = **views.begin();
  const bool last = channels_last(x);
  bool wide = true;
  for (const View* v : views) wide = wide && quads(*v, last ? 1 : 2);
  if (wide) return f(Quad{}, last);
  with_type<letters>(x.dtype, [&](auto t) { f(t, last); });
}

// Columns are shared out among enough blocks to fill the device, whose totals are merged in one order; then every
// element is looked at once more.
template <class T, class Op, class Args>
void train(const Op& op, const Args& c, bool last) {
  const View& x = c.in.x;
  auto pieces = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  const int64_t columns = last ? x.shape[1] / kLanes<T> : x.shape[1];
  const int64_t size = last ? channel_size(x) : channel_size(x) / kLanes<T>;
  if (columns == 0) return;
  int width = 1;
  while (last && width < columns && width < 32) width *= 2;
  const int64_t across = pieces(columns, width), least = 2 * kAtOnce<T> * (kTeamThreads / width);
  int64_t parts = std::max<int64_t>(1, std::min(pieces(8 * device_units(), across), pieces(size, least)));
  const int64_t piece = std::max<int64_t>(1, pieces(size, parts));
  parts = std::max<int64_t>(1, pieces(size, piece));
  const Walk w = {static_cast<uint32_t>(columns), static_cast<uint32_t>(size), static_cast<uint32_t>(piece), width,
                  last};
  const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(parts));
  Total<T>* totals = nullptr;
  if (parts > 1) totals = static_cast<Total<T>*>(c.exec->scratch(0, sizeof(Total<T>) * parts * columns));
  launch(sum_columns<Op, T>, grid, kTeamThreads, 0, stream_of(c), op, w, totals);
  if (parts > 1)
    launch(merge_parts<Op, T>, dim3(static_cast<unsigned>(columns)), kTeamThreads, 0, stream_of(c), op, w, totals,
           parts);
  launch(apply_columns<Op>, grid, kTeamThreads, 0, stream_of(c), op, w);
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
    const TrainGrad<T> op = {{c.in.x, last},        {c.in.dy, last},      {c.out.dx, last},
                             c.in.mean.as<S>(),     c.in.inverse.as<S>(), c.in.weight.as<S>(),
                             c.out.dweight.as<S>(), c.out.dbias.as<S>(),  static_cast<S>(channel_size(c.in.x))};
    train<T>(op, c, last);
  });
}

}  // namespace needle::gpu
