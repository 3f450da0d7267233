// Softmax and its relatives over the rows of (M, D) views, whose rows are contiguous.
#include "gpu/rows.cuh"
#include "gpu/strided.cuh"

namespace needle::gpu {
namespace {

template <class T>
__device__ __forceinline__ T exp(const T& x) {
  return lanewise([](auto v) { return device::exp(v); }, x);
}

// NaN if one is in the row.
template <class T, int N, class Team>
__device__ __forceinline__ Scalar<T> row_max(const Team& team, Row<T, N, Team>& r) {
  auto larger = [](auto a, auto b) { return device::maximum_map::apply(a, b, a, a); };
  T top = -infinity<Scalar<T>>();
  r.each([&](const T& v, int64_t) { top = lanewise(larger, top, v); });
  return team.max(across(top, larger));
}

// The sum of e ** (x - top) over a row.
template <class T, int N, class Team>
__device__ __forceinline__ Scalar<T> exp_sum(const Team& team, Row<T, N, Team>& r, Scalar<T> top) {
  T sum = 0;
  r.each([&](const T& v, int64_t) { sum += exp(v - top); });
  return team.sum(total(sum));
}

// NaN where the largest number of the row, `top`, is infinite.
template <class T, int N, class Team>
__device__ __forceinline__ Scalar<T> log_sum_exp(const Team& team, Row<T, N, Team>& r, Scalar<T> top) {
  return top + device::log(exp_sum(team, r, top));
}

template <class T, int N>
struct Softmax {
  Rows<T> x, y;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    Row<T, N, Team> r(team, x[row], d);
    const Scalar<T> top = row_max(team, r);
    T sum = 0;
    r.each([&](T& v, int64_t) {
      v = exp(v - top);
      sum += v;
    });
    const Scalar<T> scale = 1 / team.sum(total(sum));
    r.put(y[row], [&](const T& v, int64_t) { return (N > 0 ? v : exp(v - top)) * scale; });
  }
};

template <class T, int N>
struct LogSoftmax {
  Rows<T> x, y;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    Row<T, N, Team> r(team, x[row], d);
    const Scalar<T> top = row_max(team, r), shift = device::log(exp_sum(team, r, top));
    r.put(y[row], [&](const T& v, int64_t) { return v - top - shift; });
  }
};

template <class T, int N>
struct LogSumExp {
  Rows<T> x;
  Rows<Scalar<T>> y;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    Row<T, N, Team> r(team, x[row], d);
    const Scalar<T> top = row_max(team, r);
    Scalar<T> v = log_sum_exp(team, r, top - top == 0 ? top : 0);  // infinite: the sum itself is 0 or infinite
    if (team.first == 0) *y[row] = v;
  }
};

template <class T, int N>
struct SoftmaxGrad {
  Rows<T> y, dy, dx;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    Row<T, N, Team> r(team, y[row], d), slopes(team, dy[row], d);
    T products = 0;
    r.each([&](const T& v, int64_t, const T& slope) { products += v * slope; }, slopes);
    const Scalar<T> dot = team.sum(total(products));
    r.put(dx[row], [&](const T& v, int64_t, const T& slope) { return v * (slope - dot); }, slopes);
  }
};

template <class T, int N>
struct LogSoftmaxGrad {
  Rows<T> y, dy, dx;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    Row<T, N, Team> r(team, y[row], d), slopes(team, dy[row], d);
    T sums = 0;
    slopes.each([&](const T& slope, int64_t) { sums += slope; });
    const Scalar<T> sum = team.sum(total(sums));
    r.put(dx[row], [&](const T& v, int64_t, const T& slope) { return slope - exp(v) * sum; }, slopes);
  }
};

struct Labels {
  const void* data;
  DType dtype;
  int64_t stride;
  Labels(const View& v) : data(v.data), dtype(v.dtype), stride(v.stride[0]) {}
  __device__ __forceinline__ int64_t operator[](int64_t i) const { return load_as<int64_t>(data, dtype, i * stride); }
};

template <class T, int N>
struct CrossEntropy {
  using S = Scalar<T>;
  Rows<T> x;
  Rows<S> loss;
  Labels labels;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    Row<T, N, Team> r(team, x[row], d);
    const S sum = log_sum_exp(team, r, row_max(team, r));
    const int64_t label = labels[row];
    if (team.first != 0) return;
    *loss[row] = label >= 0 && label < d * kLanes<T> ? sum - reinterpret_cast<const S*>(x[row])[label]
                                                     : static_cast<S>(__builtin_nan(""));
  }
};

template <class T, int N>
struct CrossEntropyGrad {
  using S = Scalar<T>;
  Rows<T> x;
  Rows<S> g;
  Rows<T> dx;
  Labels labels;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    Row<T, N, Team> r(team, x[row], d);
    const S shift = log_sum_exp(team, r, row_max(team, r)), scale = *g[row];
    const int64_t label = labels[row];
    r.put(dx[row], [&](const T& v, int64_t i) {
      T slope = exp(v - shift) * scale;
#pragma unroll
      for (int k = 0; k < kLanes<T>; k++)
        if (i * kLanes<T> + k == label) lane(slope, k) -= scale;
      return slope;
    });
  }
};

// Runs Op on the rows of x, whose dtype is one of `letters`, with `parts`; `rows` are all views of its shape.
template <const char* letters, template <class, int> class Op, int arrays = 1, class... Parts>
void run(const Exec* exec, std::initializer_list<const View*> rows, const Parts&... parts) {
  const View& x = **rows.begin();
  if (x.shape[1] == 0) return;
  with_rows<letters>(rows, [&](auto t) {
    launch_rows<decltype(t), Op, arrays>(static_cast<gpuStream_t>(exec->stream), x.shape[0], x.shape[1], parts...);
  });
}

template <template <class, int> class Op, class Args>
void unary(const Args& c) {
  run<Args::In::x_dtypes, Op>(c.exec, {&c.in.x, &c.out.y}, c.in.x, c.out.y);
}
template <template <class, int> class Op, class Args>
void binary(const Args& c) {
  run<Args::In::y_dtypes, Op, 2>(c.exec, {&c.in.y, &c.in.dy, &c.out.dx}, c.in.y, c.in.dy, c.out.dx);
}

}  // namespace

void softmax(const softmax_args& c) { unary<Softmax>(c); }
void log_softmax(const log_softmax_args& c) { unary<LogSoftmax>(c); }
void logsumexp(const logsumexp_args& c) {
  run<logsumexp_args::In::x_dtypes, LogSumExp>(c.exec, {&c.in.x}, c.in.x, c.out.y);
}
void softmax_grad(const softmax_grad_args& c) { binary<SoftmaxGrad>(c); }
void log_softmax_grad(const log_softmax_grad_args& c) { binary<LogSoftmaxGrad>(c); }

// Logits (M, D) and class numbers (M) to losses (M); a number that is no class gives NaN, since a kernel cannot raise.
void cross_entropy(const cross_entropy_args& c) {
  run<cross_entropy_args::In::logits_dtypes, CrossEntropy>(c.exec, {&c.in.logits}, c.in.logits, c.out.loss,
                                                           c.in.labels);
}

// From logits, class numbers and the gradient of the losses (M): (softmax(x) - one hot) * gradient.
void cross_entropy_grad(const cross_entropy_grad_args& c) {
  const View &x = c.in.logits, &dx = c.out.dlogits;
  run<cross_entropy_grad_args::In::logits_dtypes, CrossEntropyGrad>(c.exec, {&x, &dx}, x, c.in.dloss, dx, c.in.labels);
}

}  // namespace needle::gpu
