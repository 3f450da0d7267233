// Softmax and its relatives over the rows of (M, D) views, whose rows are contiguous, and over columns.

#include "cpu/rows.h"

namespace needle::NEEDLE_ISA {
namespace {

// f(row, length of a row, that row of each view...) for every row of the views; the first one's are not empty.
template <const char* letters, int N, class F>
NEEDLE_INLINE void for_each_row(const Exec* exec, int64_t work_per_element, const View* const (&views)[N], const F& f) {
  const int64_t d = views[0]->shape[1];
  if (d == 0) return;
  with_type<letters>(views[0]->dtype, [&]<class T>(T) {
    parallel_each(exec, views[0]->shape[0], work_per_element * d, [&](int64_t r) {
      auto row = [&](int k) { return views[k]->template as<T>() + r * views[k]->stride[0]; };
      if constexpr (N == 2)
        f(r, d, row(0), row(1));
      else
        f(r, d, row(0), row(1), row(2));
    });
  });
}

// log of the sum of e ** x over a row whose largest number is `top`: NaN where that is infinite.
template <class T>
NEEDLE_INLINE T log_sum_exp(const T* x, int64_t d, T top) {
  using L = typename LanesOf<T>::type;
  return static_cast<T>(top +
                        ::log(row_sum<T>(d, [&](int64_t i, int n) { return exp(load_lanes(x + i, n) - L(top)); })));
}

// Adds f(d, v), lanes of row d in vector v, over D rows to `total`.
template <int VECTORS, class F>
NEEDLE_INLINE void sum_columns(int64_t D, V* total, const F& f) {
  constexpr int64_t kTerms = 64;  // that are summed in a row
  for (int64_t first = 0; first < D; first += kTerms) {
    V sums[VECTORS];
    for (V& s : sums) s = V(0.f);
    for (int64_t d = first; d < smaller(D, first + kTerms); d++)
      for (int v = 0; v < VECTORS; v++) sums[v] = sums[v] + f(d, v);
    for (int v = 0; v < VECTORS; v++) total[v] = total[v] + sums[v];
  }
}

// Columns of VECTORS vectors, of which `lanes` lanes each, over D rows.
template <int VECTORS>
void of_columns(const float* x, int64_t x_row, float* y, int64_t y_row, int64_t D, int lanes, bool logarithm) {
  V top[VECTORS], total[VECTORS];
  for (int v = 0; v < VECTORS; v++) top[v] = V(-HUGE_VALF), total[v] = V(0.f);
  for (int64_t d = 0; d < D; d++)
    for (int v = 0; v < VECTORS; v++) top[v] = max(top[v], load_lanes(x + d * x_row + v * V::N, lanes));
  sum_columns<VECTORS>(D, total, [&](int64_t d, int v) __attribute__((always_inline)) {
    const V e = exp(load_lanes(x + d * x_row + v * V::N, lanes) - top[v]);
    if (!logarithm) store_lanes(y + d * y_row + v * V::N, e, lanes);
    return e;
  });
  for (V& t : total) t = logarithm ? log(t) : V(1.f) / t;
  for (int64_t d = 0; d < D; d++)
    for (int v = 0; v < VECTORS; v++) {
      float* to = y + d * y_row + v * V::N;
      store_lanes(to,
                  logarithm ? load_lanes(x + d * x_row + v * V::N, lanes) - top[v] - total[v]
                            : load_lanes(to, lanes) * total[v],
                  lanes);
    }
}

// The logarithm of the sum of e ** x of columns; where their largest number is infinite that sum, or without `infinite`
// NaN.
template <int VECTORS>
void lse_of_columns(const float* x, int64_t x_row, int64_t D, int lanes, bool infinite, V* result) {
  V top[VECTORS], total[VECTORS];
  for (int v = 0; v < VECTORS; v++) top[v] = V(-HUGE_VALF), total[v] = V(0.f);
  for (int64_t d = 0; d < D; d++)
    for (int v = 0; v < VECTORS; v++) top[v] = max(top[v], load_lanes(x + d * x_row + v * V::N, lanes));
  if (infinite)
    for (V& t : top) t = select(eq(t - t, V(0.f)), t, V(0.f));
  sum_columns<VECTORS>(D, total, [&](int64_t d, int v) __attribute__((always_inline)) {
    return exp(load_lanes(x + d * x_row + v * V::N, lanes) - top[v]);
  });
  for (int v = 0; v < VECTORS; v++) result[v] = top[v] + log(total[v]);
}

// From y, softmax or its logarithm, and dy: dx of columns.
template <int VECTORS>
void grad_of_columns(const float* y, int64_t y_row, const float* dy, int64_t dy_row, float* dx, int64_t dx_row,
                     int64_t D, int lanes, bool logarithm) {
  V total[VECTORS];
  for (V& t : total) t = V(0.f);
  sum_columns<VECTORS>(D, total, [&](int64_t d, int v) __attribute__((always_inline)) {
    const V g = load_lanes(dy + d * dy_row + v * V::N, lanes);
    return logarithm ? g : g * load_lanes(y + d * y_row + v * V::N, lanes);
  });
  for (int64_t d = 0; d < D; d++)
    for (int v = 0; v < VECTORS; v++) {
      const V g = load_lanes(dy + d * dy_row + v * V::N, lanes), s = load_lanes(y + d * y_row + v * V::N, lanes);
      store_lanes(dx + d * dx_row + v * V::N, logarithm ? g - exp(s) * total[v] : s * (g - total[v]), lanes);
    }
}

// f(batch, first, vectors, lanes) for all columns of the (B, D, N) view: of kVectors vectors, then of one.
template <class F>
void for_columns(const Exec* exec, const View& x, const F& f) {
  constexpr int kVectors = 4;
  const int64_t D = x.shape[1], N = x.shape[2], chunks = ceil_div(N, kVectors * V::N);
  parallel_each(exec, x.shape[0] * chunks, 4 * D * kVectors * V::N, [&](int64_t t) {
    const int64_t batch = t / chunks, first = t % chunks * kVectors * V::N;
    if (N - first >= kVectors * V::N) return f(batch, first, std::integral_constant<int, kVectors>(), V::N);
    for_lanes<float>(N - first,
                     [&](int64_t i, int lanes) { f(batch, first + i, std::integral_constant<int, 1>(), lanes); });
  });
}

// The place of a column in a view (B, D, N) whose N are contiguous.
NEEDLE_INLINE float* column(const View& v, int64_t batch, int64_t first) {
  return v.as<float>() + batch * v.stride[0] + first;
}

}  // namespace

void softmax_columns(const softmax_columns_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  for_columns(c.exec, x, [&]<class N>(int64_t b, int64_t first, N, int lanes) {
    of_columns<N::value>(column(x, b, first), x.stride[1], column(y, b, first), y.stride[1], x.shape[1], lanes,
                         c.attr.logarithm != 0);
  });
}

void softmax_columns_grad(const softmax_columns_grad_args& c) {
  const View &y = c.in.y, &dy = c.in.dy, &dx = c.out.dx;
  for_columns(c.exec, y, [&]<class N>(int64_t b, int64_t first, N, int lanes) {
    grad_of_columns<N::value>(column(y, b, first), y.stride[1], column(dy, b, first), dy.stride[1],
                              column(dx, b, first), dx.stride[1], y.shape[1], lanes, c.attr.logarithm != 0);
  });
}

// Of (B, D, N) to (B, 1, N).
void logsumexp_columns(const logsumexp_columns_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  for_columns(c.exec, x, [&]<class N>(int64_t b, int64_t first, N, int lanes) {
    V sums[N::value];
    lse_of_columns<N::value>(column(x, b, first), x.stride[1], x.shape[1], lanes, true, sums);
    for (int v = 0; v < N::value; v++) store_lanes(column(y, b, first) + v * V::N, sums[v], lanes);
  });
}

// As cross_entropy: logits (B, D, N), class numbers (B, N) and losses (B, N).
void cross_entropy_columns(const cross_entropy_columns_args& c) {
  const View &x = c.in.logits, &labels = c.in.labels, &loss = c.out.loss;
  with_type<cross_entropy_columns_args::In::labels_dtypes>(labels.dtype, [&]<class L>(L) {
    for_columns(c.exec, x, [&]<class N>(int64_t b, int64_t first, N, int lanes) {
      V sums[N::value];
      const float* from = column(x, b, first);
      float* to = column(loss, b, first);
      const L* at = labels.as<const L>() + b * labels.stride[0] + first;
      lse_of_columns<N::value>(from, x.stride[1], x.shape[1], lanes, false, sums);
      for (int v = 0; v < N::value; v++) store_lanes(to + v * V::N, sums[v], lanes);
      for (int64_t i = 0, n = N::value == 1 ? lanes : N::value * V::N; i < n; i++) {
        const int64_t label = at[i];
        to[i] = label >= 0 && label < x.shape[1] ? to[i] - from[label * x.stride[1] + i] : __builtin_nanf("");
      }
    });
  });
}

void cross_entropy_columns_grad(const cross_entropy_columns_grad_args& c) {
  const View &x = c.in.logits, &labels = c.in.labels, &dloss = c.in.dloss, &dx = c.out.dlogits;
  with_type<cross_entropy_columns_grad_args::In::labels_dtypes>(labels.dtype, [&]<class L>(L) {
    for_columns(c.exec, x, [&]<class N>(int64_t b, int64_t first, N, int lanes) {
      V sums[N::value], scale[N::value];
      const float *from = column(x, b, first), *g = column(dloss, b, first);
      float* to = column(dx, b, first);
      const L* at = labels.as<const L>() + b * labels.stride[0] + first;
      lse_of_columns<N::value>(from, x.stride[1], x.shape[1], lanes, false, sums);
      for (int v = 0; v < N::value; v++) scale[v] = load_lanes(g + v * V::N, lanes);
      for (int64_t d = 0; d < x.shape[1]; d++)
        for (int v = 0; v < N::value; v++)
          store_lanes(to + d * dx.stride[1] + v * V::N,
                      exp(load_lanes(from + d * x.stride[1] + v * V::N, lanes) - sums[v]) * scale[v], lanes);
      for (int64_t i = 0, n = N::value == 1 ? lanes : N::value * V::N; i < n; i++) {
        const int64_t label = at[i];
        if (label >= 0 && label < x.shape[1]) to[label * dx.stride[1] + i] -= g[i];
      }
    });
  });
}

void softmax(const softmax_args& c) {
  for_each_row<softmax_args::In::x_dtypes>(
      c.exec, 4, {&c.in.x, &c.out.y}, []<class T>(int64_t, int64_t d, const T* x, T* y) {
        using L = typename LanesOf<T>::type;
        L top = row_max(x, d);
        double sum = row_sum<T>(d, [&](int64_t i, int n) {
          L e = exp(load_lanes(x + i, n) - top);
          store_lanes(y + i, e, n);
          return e;
        });
        L scale(static_cast<T>(1 / sum));
        for_lanes<T>(d, [&](int64_t i, int n) { store_lanes(y + i, load_lanes(y + i, n) * scale, n); });
      });
}

void log_softmax(const log_softmax_args& c) {
  for_each_row<log_softmax_args::In::x_dtypes>(
      c.exec, 4, {&c.in.x, &c.out.y}, []<class T>(int64_t, int64_t d, const T* x, T* y) {
        using L = typename LanesOf<T>::type;
        L top = row_max(x, d);
        L shift(
            static_cast<T>(::log(row_sum<T>(d, [&](int64_t i, int n) { return exp(load_lanes(x + i, n) - top); }))));
        for_lanes<T>(d, [&](int64_t i, int n) { store_lanes(y + i, load_lanes(x + i, n) - top - shift, n); });
      });
}

void logsumexp(const logsumexp_args& c) {
  for_each_row<logsumexp_args::In::x_dtypes>(
      c.exec, 4, {&c.in.x, &c.out.y}, []<class T>(int64_t, int64_t d, const T* x, T* y) {
        const T top = row_max(x, d);
        *y = log_sum_exp(x, d, top - top == 0 ? top : T(0));  // infinite: the sum itself is 0 or infinite
      });
}

// Logits (M, D) and class numbers (M) to losses (M); a number that is no class gives NaN, since a kernel cannot raise.
void cross_entropy(const cross_entropy_args& c) {
  for_each_row<cross_entropy_args::In::logits_dtypes>(
      c.exec, 4, {&c.in.logits, &c.out.loss}, [&]<class T>(int64_t r, int64_t d, const T* x, T* loss) {
        const int64_t label = number_at<cross_entropy_args::In::labels_dtypes>(c.in.labels, r);
        *loss =
            label >= 0 && label < d ? log_sum_exp(x, d, row_max(x, d)) - x[label] : static_cast<T>(__builtin_nan(""));
      });
}

// From logits, class numbers and the gradient of the losses (M): (softmax(x) - one hot) * gradient. The softmax is
// computed again: reading one that was kept would cost more memory traffic than its exponentials cost time.
void cross_entropy_grad(const cross_entropy_grad_args& c) {
  for_each_row<cross_entropy_grad_args::In::logits_dtypes>(
      c.exec, 8, {&c.in.logits, &c.in.dloss, &c.out.dlogits},
      [&]<class T>(int64_t r, int64_t d, const T* x, const T* dloss, T* dx) {
        const T g = *dloss;
        const typename LanesOf<T>::type shift(log_sum_exp(x, d, row_max(x, d))), scale(g);
        for_lanes<T>(d, [&](int64_t i, int n) { store_lanes(dx + i, exp(load_lanes(x + i, n) - shift) * scale, n); });
        const int64_t label = number_at<cross_entropy_grad_args::In::labels_dtypes>(c.in.labels, r);
        if (label >= 0 && label < d) dx[label] -= g;
      });
}

void softmax_grad(const softmax_grad_args& c) {
  for_each_row<softmax_grad_args::In::y_dtypes>(
      c.exec, 2, {&c.in.y, &c.in.dy, &c.out.dx}, []<class T>(int64_t, int64_t d, const T* y, const T* dy, T* dx) {
        auto product = [&](int64_t i, int n) { return load_lanes(y + i, n) * load_lanes(dy + i, n); };
        const typename LanesOf<T>::type dot(static_cast<T>(row_sum<T>(d, product)));
        for_lanes<T>(
            d, [&](int64_t i, int n) { store_lanes(dx + i, load_lanes(y + i, n) * (load_lanes(dy + i, n) - dot), n); });
      });
}

void log_softmax_grad(const log_softmax_grad_args& c) {
  for_each_row<log_softmax_grad_args::In::y_dtypes>(
      c.exec, 4, {&c.in.y, &c.in.dy, &c.out.dx}, []<class T>(int64_t, int64_t d, const T* y, const T* dy, T* dx) {
        const typename LanesOf<T>::type sum(
            static_cast<T>(row_sum<T>(d, [&](int64_t i, int n) { return load_lanes(dy + i, n); })));
        for_lanes<T>(d, [&](int64_t i, int n) {
          store_lanes(dx + i, load_lanes(dy + i, n) - exp(load_lanes(y + i, n)) * sum, n);
        });
      });
}

}  // namespace needle::NEEDLE_ISA
