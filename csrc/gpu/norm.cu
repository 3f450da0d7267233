// Layer and RMS normalisation of rows, and gradients.
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

// The gradient of a row; its mean and scale go to `moments`, if that is there.
template <class A, int N>
struct NormGrad {
  using T = typename A::Element;
  using S = Scalar<T>;
  A x, dy, dx, weight;  // one row of weights, or null
  S* moments;
  S eps;
  bool rms;
  int64_t d;

  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    Row<T, N, Team> r(team, x[row], d), slopes(team, dy[row], d);
    const S size = static_cast<S>(d * kLanes<T>);
    T sum = 0, square = 0, shifts = 0, products = 0;
    if (!rms) r.each([&](const T& v, int64_t) { sum += v; });
    const S centre = rms ? S(0) : team.sum(total(sum)) / size;
    r.each([&](const T& v, int64_t) { square += (v - centre) * (v - centre); });
    const S scale = inverse_root(team.sum(total(square)) / size + eps);
    // As it went into the sum: of rows of one element the difference is 0.
    auto slope = [&](const T& g, int64_t i) {
      return weight.data ? lanewise([](S v) { return rounded(v); }, g * read(weight.data + i)) : g;
    };
    r.each(
        [&](const T& v, int64_t i, const T& g) {
          shifts += slope(g, i);
          products += slope(g, i) * ((v - centre) * scale);
        },
        slopes);
    const S shift = rms ? S(0) : team.sum(total(shifts)) / size, along = team.sum(total(products)) / size;
    if (moments && team.first == 0) moments[2 * row] = centre, moments[2 * row + 1] = scale;
    r.put(
        dx[row],
        [&](const T& v, int64_t i, const T& g) {
          return (slope(g, i) - shift - ((v - centre) * scale) * along) * scale;
        },
        slopes);
  }
};

// Sums of dy times normalised x and, if there is room, of dy, over parts of the rows: a thread per column and part.
template <class T>
struct ColumnSums {
  Rows<T> x, dy;
  const Scalar<T>* moments;
  T* to;
  int64_t rows, columns;
  int parts, sums;
};

template <class T>
__global__ void GPU_BOUNDS(kTeamThreads, 4) sum_columns_of_parts(ColumnSums<T> s) {
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kTeamThreads + threadIdx.x, part = blockIdx.x;
  if (column >= s.columns) return;
  const int64_t begin = s.rows * part / s.parts, end = s.rows * (part + 1) / s.parts;
  T weight = 0, bias = 0;
#pragma unroll 4
  for (int64_t row = begin; row < end; row++) {
    const T v = read(s.x[row] + column), g = read(s.dy[row] + column);
    weight += g * ((v - s.moments[2 * row]) * s.moments[2 * row + 1]);
    bias += g;
  }
  T* to = s.to + part * s.sums * s.columns + column;
  write(to, weight);
  if (s.sums == 2) write(to + s.columns, bias);
}

// `sums`: where those of columns go, or null.
template <class Args>
void norm_grad(const Args& c, const View* sums) {
  const View &x = c.in.x, &dy = c.in.dy, &dx = c.out.dx, &weight = c.in.weight;
  const int64_t rows = x.shape[0];
  auto run = [&](auto t) {
    using T = decltype(t);
    using S = Scalar<T>;
    S* moments = sums ? static_cast<S*>(c.exec->scratch(0, 2 * sizeof(S) * rows)) : nullptr;
    launch_rows<T, NormGrad, 2>(stream_of(c), rows, x.shape[1], x, dy, dx, weight, moments, static_cast<S>(c.attr.eps),
                                c.attr.rms != 0);
    if (!sums) return;
    const ColumnSums<T> s = {x,
                             dy,
                             moments,
                             reinterpret_cast<T*>(sums->as<S>()),
                             rows,
                             x.shape[1] / kLanes<T>,
                             static_cast<int>(sums->shape[0]),
                             static_cast<int>(sums->shape[1])};
    const dim3 grid(s.parts, static_cast<unsigned>((s.columns + kTeamThreads - 1) / kTeamThreads));
    if (s.columns) launch(sum_columns_of_parts<T>, grid, kTeamThreads, 0, stream_of(c), s);
  };
  std::initializer_list<const View*> views = {&x, &dy, &dx, &weight};
  if (!sums || quads(*sums, 2)) return with_rows<Args::In::x_dtypes>(views, run);
  with_type<Args::In::x_dtypes>(x.dtype, run);
}

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

// Gradients of both, x, dy and dx (M, D); weight (D) may be absent.
void row_norm_grad(const row_norm_grad_args& c) { norm_grad(c, nullptr); }
void row_norm_grad_sums(const row_norm_grad_sums_args& c) { norm_grad(c, &c.out.sums); }

}  // namespace needle::gpu
