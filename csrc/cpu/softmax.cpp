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

// Columns of VECTORS vectors, of which `lanes` lanes each, over D rows.
template <int VECTORS>
void of_columns(const float* x, int64_t x_row, float* y, int64_t y_row, int64_t D, int lanes, bool logarithm) {
  constexpr int64_t kTerms = 64;  // that are summed in a row
  V top[VECTORS], total[VECTORS];
  for (int v = 0; v < VECTORS; v++) top[v] = V(-HUGE_VALF), total[v] = V(0.f);
  for (int64_t d = 0; d < D; d++)
    for (int v = 0; v < VECTORS; v++) top[v] = max(top[v], load_lanes(x + d * x_row + v * V::N, lanes));
  for (int64_t first = 0; first < D; first += kTerms) {
    V sums[VECTORS];
    for (V& s : sums) s = V(0.f);
    for (int64_t d = first; d < smaller(D, first + kTerms); d++)
      for (int v = 0; v < VECTORS; v++) {
        const V e = exp(load_lanes(x + d * x_row + v * V::N, lanes) - top[v]);
        sums[v] = sums[v] + e;
        if (!logarithm) store_lanes(y + d * y_row + v * V::N, e, lanes);
      }
    for (int v = 0; v < VECTORS; v++) total[v] = total[v] + sums[v];
  }
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

}  // namespace

void softmax_columns(const softmax_columns_args& c) {
  constexpr int kVectors = 4;
  const View &x = c.in.x, &y = c.out.y;
  const int64_t D = x.shape[1], N = x.shape[2], chunks = ceil_div(N, kVectors * V::N);
  parallel_each(c.exec, x.shape[0] * chunks, 4 * D * kVectors * V::N, [&](int64_t t) {
    const int64_t batch = t / chunks, first = t % chunks * kVectors * V::N;
    const float* from = x.as<const float>() + batch * x.stride[0] + first;
    float* to = y.as<float>() + batch * y.stride[0] + first;
    const bool logarithm = c.attr.logarithm != 0;
    if (N - first >= kVectors * V::N)
      return of_columns<kVectors>(from, x.stride[1], to, y.stride[1], D, V::N, logarithm);
    for_lanes<float>(N - first, [&](int64_t i, int lanes) {
      of_columns<1>(from + i, x.stride[1], to + i, y.stride[1], D, lanes, logarithm);
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
