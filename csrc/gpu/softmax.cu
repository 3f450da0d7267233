// Softmax and its relatives over the rows of (M, D) views, whose rows are contiguous, and over columns.
#include "gpu/rows.cuh"
#include "gpu/strided.cuh"

namespace needle::gpu {
namespace {

template <class T>
__device__ __forceinline__ T exp(const T& x) {
  return lanewise([](auto v) { return device::exp(v); }, x);
}

// The columns of (B, D, N) as rows: column n of matrix b has the number b N + n. Of (B, N) each has one element.
template <class T>
struct Columns {
  using Element = T;
  struct Line {
    T* first;
    int64_t step;
    __device__ __forceinline__ T* operator+(int64_t i) const { return first + i * step; }
    __device__ __forceinline__ T& operator*() const { return *first; }
  };
  template <class U>
  using Of = Columns<U>;
  T* data;
  int64_t matrix, step, neighbour;
  Divisor columns;
  Columns(const View& v) : Columns(v, v.rank > 2 ? 2 : 1) {}
  Columns(const View& v, int last)
      : data(v.as<T>()),
        matrix(v.stride[0]),
        step(last == 2 ? v.stride[1] : 0),
        neighbour(v.stride[last]),
        columns(v.shape[last]) {}
  __device__ __forceinline__ Line operator[](int64_t row) const {
    const uint32_t b = columns.quotient(static_cast<uint32_t>(row));
    return {data + (b * matrix + (row - int64_t{b} * columns.d) * neighbour), step};
  }
};

// Rows A = Rows<T> or Columns<T> of elements T, of which a thread keeps at most N.
template <class A, int N, class Team>
using RowOf = Row<typename A::Element, N, Team, typename A::Line>;
template <class A>
using Single = typename A::template Of<Scalar<typename A::Element>>;  // with a number for each row

// The largest number of a row, NaN if one is in it, and the sum of e ** (x - top). With `replace` these stay in a row
// that is kept.
template <class S>
struct Exponentials {
  S top, sum;
};
template <bool replace = false, class Team, class R>
__device__ __forceinline__ auto exponentials(const Team& team, R& r) {
  using T = typename R::Element;
  using S = Scalar<T>;
  auto larger = [](auto a, auto b) { return device::maximum_map::apply(a, b, a, a); };
  T sum = 0;
  if constexpr (R::kept) {
    T most = -infinity<S>();
    r.each([&](const T& v, int64_t) { most = lanewise(larger, most, v); });
    const S top = team.max(across(most, larger));
    r.each([&](T& v, int64_t) {
      const T e = exp(v - top);
      if (replace) v = e;
      sum += e;
    });
    return Exponentials<S>{top, team.sum(total(sum))};
  } else {  // in one pass: what was summed shrinks when a larger number comes
    S most = -infinity<S>(), shift = 0;
    r.each([&](const T& v, int64_t) {
      const S next = larger(most, across(v, larger));
      if (!(next == most)) {
        sum *= T(device::exp(most - next));
        most = shift = next;
      }
      sum += exp(v - shift);
    });
    const S top = team.max(most);
    return Exponentials<S>{top, team.sum(total(sum) * device::exp(most - top))};
  }
}

// NaN where the largest number of the row is infinite.
template <class S>
__device__ __forceinline__ S log_sum_exp(const Exponentials<S>& e) {
  return e.top + device::log(e.sum);
}

template <class A, int N>
struct Softmax {
  using T = typename A::Element;
  A x, y;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool exists) const {
    RowOf<A, N, Team> r(team, x[row], exists ? d : 0);
    const auto e = exponentials<true>(team, r);
    const Scalar<T> scale = 1 / e.sum;
    r.put(y[row], [&](const T& v, int64_t) { return (N > 0 ? v : exp(v - e.top)) * scale; });
  }
};

template <class A, int N>
struct LogSoftmax {
  using T = typename A::Element;
  A x, y;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool exists) const {
    RowOf<A, N, Team> r(team, x[row], exists ? d : 0);
    const auto e = exponentials(team, r);
    const Scalar<T> shift = device::log(e.sum);
    r.put(y[row], [&](const T& v, int64_t) { return v - e.top - shift; });
  }
};

template <class A, int N>
struct LogSumExp {
  using S = Scalar<typename A::Element>;
  A x;
  Single<A> y;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool exists) const {
    RowOf<A, N, Team> r(team, x[row], exists ? d : 0);
    const auto e = exponentials(team, r);
    if (exists && team.first == 0)
      *y[row] = e.top == infinity<S>() || e.top == -infinity<S>() ? e.top : log_sum_exp(e);  // the sum itself
  }
};

template <class A, int N>
struct SoftmaxGrad {
  using T = typename A::Element;
  A y, dy, dx;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool exists) const {
    RowOf<A, N, Team> r(team, y[row], exists ? d : 0), slopes(team, dy[row], exists ? d : 0);
    T products = 0;
    r.each([&](const T& v, int64_t, const T& slope) { products += v * slope; }, slopes);
    const Scalar<T> dot = team.sum(total(products));
    r.put(dx[row], [&](const T& v, int64_t, const T& slope) { return v * (slope - dot); }, slopes);
  }
};

template <class A, int N>
struct LogSoftmaxGrad {
  using T = typename A::Element;
  A y, dy, dx;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool exists) const {
    RowOf<A, N, Team> r(team, y[row], exists ? d : 0), slopes(team, dy[row], exists ? d : 0);
    T sums = 0;
    slopes.each([&](const T& slope, int64_t) { sums += slope; });
    const Scalar<T> sum = team.sum(total(sums));
    r.put(dx[row], [&](const T& v, int64_t, const T& slope) { return slope - exp(v) * sum; }, slopes);
  }
};

// Class numbers (M) of rows or (B, N) of columns.
struct Labels {
  const void* data;
  DType dtype;
  int64_t matrix, neighbour;
  Divisor columns;
  Labels(const View& v)
      : data(v.data),
        dtype(v.dtype),
        matrix(v.stride[0]),
        neighbour(v.rank > 1 ? v.stride[1] : 0),
        columns(v.rank > 1 ? v.shape[1] : 1) {
    if (v.size() > INT32_MAX) fail("cross_entropy", "at most 2^31 - 1 labels", std::to_string(v.size()));
  }
  __device__ __forceinline__ int64_t operator[](int64_t row) const {
    const uint32_t b = columns.quotient(static_cast<uint32_t>(row));
    return load_as<int64_t>(data, dtype, b * matrix + (row - int64_t{b} * columns.d) * neighbour);
  }
};

// Element `number` of a row whose elements may be Quads.
template <class S, class Line>
__device__ __forceinline__ S element(const Line& row, int64_t number) {
  if constexpr (std::is_pointer_v<Line>) {
    return reinterpret_cast<const S*>(row)[number];
  } else {
    return *(row + number);
  }
}

template <class A, int N>
struct CrossEntropy {
  using T = typename A::Element;
  using S = Scalar<T>;
  A x;
  Single<A> loss;
  Labels labels;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool exists) const {
    RowOf<A, N, Team> r(team, x[row], exists ? d : 0);
    const S sum = log_sum_exp(exponentials(team, r));
    if (!exists || team.first != 0) return;
    const int64_t label = labels[row];
    const bool known = label >= 0 && label < d * kLanes<T>;
    *loss[row] = known ? sum - element<S>(x[row], label) : static_cast<S>(__builtin_nan(""));
  }
};

template <class A, int N>
struct CrossEntropyGrad {
  using T = typename A::Element;
  using S = Scalar<T>;
  A x;
  Single<A> g;
  A dx;
  Labels labels;
  int64_t d;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t row, bool exists) const {
    RowOf<A, N, Team> r(team, x[row], exists ? d : 0);
    const S shift = log_sum_exp(exponentials(team, r)), scale = exists ? *g[row] : S(0);
    const int64_t label = exists ? labels[row] : -1;
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

// Runs Op on the columns of x (B, D, N): a thread each where these are short, else lanes of a block's waves, which
// share the column, or all of a block where there are few of them.
template <template <class, int> class Op, int arrays = 1, class... Parts>
void run_columns(const char* name, const Exec* exec, const View& x, const Parts&... parts) {
  using A = Columns<float>;
  constexpr int N = 16 / arrays;
  const gpuStream_t stream = static_cast<gpuStream_t>(exec->stream);
  const int64_t d = x.shape[1], columns = x.shape[0] * x.shape[2];
  if (columns > INT32_MAX) fail(name, "at most 2^31 - 1 columns", std::to_string(columns));
  const Op<A, N> op = {parts..., d};
  if (d <= N) return launch_teams<ThreadTeam>(op, columns, stream);
  if (d <= N * ColumnTeam::step) return launch_teams<ColumnTeam>(op, columns, stream);
  const Op<A, 0> longer = {parts..., d};
  if (columns < 4LL * device_units()) return launch_teams<BlockTeam>(longer, columns, stream);
  launch_teams<ColumnTeam>(longer, columns, stream);
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

void softmax_columns(const softmax_columns_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  if (c.attr.logarithm) return run_columns<LogSoftmax>("log_softmax", c.exec, x, x, y);
  run_columns<Softmax>("softmax", c.exec, x, x, y);
}
void softmax_columns_grad(const softmax_columns_grad_args& c) {
  const View &y = c.in.y, &dy = c.in.dy, &dx = c.out.dx;
  if (c.attr.logarithm) return run_columns<LogSoftmaxGrad, 2>("log_softmax_grad", c.exec, y, y, dy, dx);
  run_columns<SoftmaxGrad, 2>("softmax_grad", c.exec, y, y, dy, dx);
}
void logsumexp_columns(const logsumexp_columns_args& c) {
  run_columns<LogSumExp>("logsumexp", c.exec, c.in.x, c.in.x, c.out.y);
}
void cross_entropy_columns(const cross_entropy_columns_args& c) {
  run_columns<CrossEntropy>("cross_entropy", c.exec, c.in.logits, c.in.logits, c.out.loss, c.in.labels);
}
void cross_entropy_columns_grad(const cross_entropy_columns_grad_args& c) {
  const View &x = c.in.logits, &dx = c.out.dlogits;
  run_columns<CrossEntropyGrad>("cross_entropy_grad", c.exec, x, x, c.in.dloss, dx, c.in.labels);
}

}  // namespace needle::gpu
