// Softmax and its relatives over the rows of (M, D) views, whose rows are contiguous. What a thread reads again it has
// read a moment ago: from the second pass on rows come from the first-level cache.
#include "gpu/strided.cuh"
#include "gpu/team.cuh"

namespace needle::gpu {
namespace {

template <class T, class Team>
__device__ __forceinline__ T row_max(const Team& team, const T* x, int64_t d) {
  T top = -infinity<T>();
  for (int64_t i = team.first; i < d; i += Team::step) top = device::maximum_map::apply(top, x[i], top, top);
  return team.max(top);
}

// The sum of e ** (x - top) over a row.
template <class T, class Team>
__device__ __forceinline__ T exp_sum(const Team& team, const T* x, int64_t d, T top) {
  T sum = 0;
  for (int64_t i = team.first; i < d; i += Team::step) sum += device::exp(x[i] - top);
  return team.sum(sum);
}

// NaN where the largest number of the row, `top`, is infinite.
template <class T, class Team>
__device__ __forceinline__ T log_sum_exp(const Team& team, const T* x, int64_t d, T top) {
  return top + device::log(exp_sum(team, x, d, top));
}

template <class T>
struct Softmax {
  Rows<T> x, y;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    T top = row_max(team, x[row], d), sum = 0;
    for (int64_t i = team.first; i < d; i += Team::step) {
      T e = device::exp(x[row][i] - top);
      y[row][i] = e;
      sum += e;
    }
    T scale = 1 / team.sum(sum);
    for (int64_t i = team.first; i < d; i += Team::step) y[row][i] *= scale;
  }
};

template <class T>
struct LogSoftmax {
  Rows<T> x, y;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    T top = row_max(team, x[row], d), shift = device::log(exp_sum(team, x[row], d, top));
    for (int64_t i = team.first; i < d; i += Team::step) y[row][i] = x[row][i] - top - shift;
  }
};

template <class T>
struct LogSumExp {
  Rows<T> x, y;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    T top = row_max(team, x[row], d);
    T v = log_sum_exp(team, x[row], d, top - top == 0 ? top : T(0));  // infinite: the sum itself is 0 or infinite
    if (team.first == 0) *y[row] = v;
  }
};

template <class T>
struct SoftmaxGrad {
  Rows<T> y, dy, dx;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    T dot = 0;
    for (int64_t i = team.first; i < d; i += Team::step) dot += y[row][i] * dy[row][i];
    dot = team.sum(dot);
    for (int64_t i = team.first; i < d; i += Team::step) dx[row][i] = y[row][i] * (dy[row][i] - dot);
  }
};

template <class T>
struct LogSoftmaxGrad {
  Rows<T> y, dy, dx;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    T sum = 0;
    for (int64_t i = team.first; i < d; i += Team::step) sum += dy[row][i];
    sum = team.sum(sum);
    for (int64_t i = team.first; i < d; i += Team::step) dx[row][i] = dy[row][i] - device::exp(y[row][i]) * sum;
  }
};

struct Labels {
  const void* data;
  DType dtype;
  int64_t stride;
  Labels(const View& v) : data(v.data), dtype(v.dtype), stride(v.stride[0]) {}
  __device__ __forceinline__ int64_t operator[](int64_t i) const { return load_as<int64_t>(data, dtype, i * stride); }
};

template <class T>
struct CrossEntropy {
  Rows<T> x, loss;
  Labels labels;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    T total = log_sum_exp(team, x[row], d, row_max(team, x[row], d));
    int64_t label = labels[row];
    if (team.first == 0)
      *loss[row] = label >= 0 && label < d ? total - x[row][label] : static_cast<T>(__builtin_nan(""));
  }
};

template <class T>
struct CrossEntropyGrad {
  Rows<T> x, g, dx;
  Labels labels;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool) const {
    T shift = log_sum_exp(team, x[row], d, row_max(team, x[row], d)), scale = *g[row];
    int64_t label = labels[row];
    for (int64_t i = team.first; i < d; i += Team::step)
      dx[row][i] = device::exp(x[row][i] - shift) * scale - (i == label ? scale : 0);
  }
};

// Runs Op<T>{parts..., length of a row} on the rows of x, T being its dtype, one of `letters`.
template <const char* letters, template <class> class Op, class... Parts>
void run(const Exec* exec, const View& x, const Parts&... parts) {
  const int64_t rows = x.shape[0], d = x.shape[1];
  if (d == 0) return;
  with_type<letters>(x.dtype, [&](auto t) {
    launch_rows(Op<decltype(t)>{parts..., d}, rows, d, static_cast<gpuStream_t>(exec->stream));
  });
}

template <template <class> class Op, class Args>
void unary(const Args& c) {
  run<Args::In::x_dtypes, Op>(c.exec, c.in.x, c.in.x, c.out.y);
}
template <template <class> class Op, class Args>
void binary(const Args& c) {
  run<Args::In::y_dtypes, Op>(c.exec, c.in.y, c.in.y, c.in.dy, c.out.dx);
}

}  // namespace

void softmax(const softmax_args& c) { unary<Softmax>(c); }
void log_softmax(const log_softmax_args& c) { unary<LogSoftmax>(c); }
void logsumexp(const logsumexp_args& c) { unary<LogSumExp>(c); }
void softmax_grad(const softmax_grad_args& c) { binary<SoftmaxGrad>(c); }
void log_softmax_grad(const log_softmax_grad_args& c) { binary<LogSoftmaxGrad>(c); }

// Logits (M, D) and class numbers (M) to losses (M); a number that is no class gives NaN, since a kernel cannot raise.
void cross_entropy(const cross_entropy_args& c) {
  run<cross_entropy_args::In::logits_dtypes, CrossEntropy>(c.exec, c.in.logits, c.in.logits, c.out.loss, c.in.labels);
}

// From logits, class numbers and the gradient of the losses (M): (softmax(x) - one hot) * gradient.
void cross_entropy_grad(const cross_entropy_grad_args& c) {
  run<cross_entropy_grad_args::In::logits_dtypes, CrossEntropyGrad>(c.exec, c.in.logits, c.in.logits, c.in.dloss,
                                                                    c.out.dlogits, c.in.labels);
}

}  // namespace needle::gpu
