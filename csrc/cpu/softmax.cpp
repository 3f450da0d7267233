// Softmax and its relatives over the rows of (M, D) views, whose rows are contiguous.

#include "cpu/rows.h"

namespace needle::NEEDLE_ISA {
namespace {

// f(T{}, row) for every row of x.
template <const char* letters, class F>
NEEDLE_INLINE void for_each_row(const Exec* exec, const View& x, int64_t work_per_element, const F& f) {
  if (x.shape[1] == 0) return;
  with_type<letters>(x.dtype, [&](auto t) {
    parallel_each(exec, x.shape[0], work_per_element * x.shape[1], [&](int64_t r) { f(t, r); });
  });
}

template <class T>
NEEDLE_INLINE T* row_of(const View& v, int64_t r) {
  return v.as<T>() + r * v.stride[0];
}

// log of the sum of e ** x over a row.
template <class T>
NEEDLE_INLINE T log_sum_exp(const T* x, int64_t d) {
  using L = typename LanesOf<T>::type;
  T top = row_max(x, d);
  if (top - top != 0) top = 0;  // infinite: the sum itself is 0 or infinite
  return static_cast<T>(top +
                        ::log(row_sum<T>(d, [&](int64_t i, int n) { return exp(load_lanes(x + i, n) - L(top)); })));
}

}  // namespace

void softmax(const softmax_args& c) {
  int64_t d = c.in.x.shape[1];
  for_each_row<softmax_args::In::x_dtypes>(c.exec, c.in.x, 4, [&]<class T>(T, int64_t r) {
    using L = typename LanesOf<T>::type;
    const T* x = row_of<T>(c.in.x, r);
    T* y = row_of<T>(c.out.y, r);
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
  int64_t d = c.in.x.shape[1];
  for_each_row<log_softmax_args::In::x_dtypes>(c.exec, c.in.x, 4, [&]<class T>(T, int64_t r) {
    using L = typename LanesOf<T>::type;
    const T* x = row_of<T>(c.in.x, r);
    T* y = row_of<T>(c.out.y, r);
    L top = row_max(x, d);
    L shift(static_cast<T>(::log(row_sum<T>(d, [&](int64_t i, int n) { return exp(load_lanes(x + i, n) - top); }))));
    for_lanes<T>(d, [&](int64_t i, int n) { store_lanes(y + i, load_lanes(x + i, n) - top - shift, n); });
  });
}

void logsumexp(const logsumexp_args& c) {
  int64_t d = c.in.x.shape[1];
  for_each_row<logsumexp_args::In::x_dtypes>(
      c.exec, c.in.x, 4, [&]<class T>(T, int64_t r) { *row_of<T>(c.out.y, r) = log_sum_exp(row_of<T>(c.in.x, r), d); });
}

// Logits (M, D) and class numbers (M) to losses (M); a number that is no class gives NaN, since a kernel cannot raise.
void cross_entropy(const cross_entropy_args& c) {
  int64_t d = c.in.logits.shape[1];
  for_each_row<cross_entropy_args::In::logits_dtypes>(c.exec, c.in.logits, 4, [&]<class T>(T, int64_t r) {
    const T* x = row_of<T>(c.in.logits, r);
    const int64_t label = number_at<cross_entropy_args::In::labels_dtypes>(c.in.labels, r);
    const bool known = label >= 0 && label < d;
    *row_of<T>(c.out.loss, r) = known ? log_sum_exp(x, d) - x[label] : static_cast<T>(__builtin_nan(""));
  });
}

// From logits, class numbers and the gradient of the losses (M): (softmax(x) - one hot) * gradient. The softmax is
// computed again: reading one that was kept would cost more memory traffic than its exponentials cost time.
void cross_entropy_grad(const cross_entropy_grad_args& c) {
  int64_t d = c.in.logits.shape[1];
  for_each_row<cross_entropy_grad_args::In::logits_dtypes>(c.exec, c.in.logits, 8, [&]<class T>(T, int64_t r) {
    using L = typename LanesOf<T>::type;
    const T *x = row_of<T>(c.in.logits, r), g = *row_of<T>(c.in.dloss, r);
    T* dx = row_of<T>(c.out.dlogits, r);
    const L shift(log_sum_exp(x, d)), scale(g);
    for_lanes<T>(d, [&](int64_t i, int n) { store_lanes(dx + i, exp(load_lanes(x + i, n) - shift) * scale, n); });
    const int64_t label = number_at<cross_entropy_grad_args::In::labels_dtypes>(c.in.labels, r);
    if (label >= 0 && label < d) dx[label] -= g;
  });
}

void softmax_grad(const softmax_grad_args& c) {
  int64_t d = c.in.y.shape[1];
  for_each_row<softmax_grad_args::In::y_dtypes>(c.exec, c.in.y, 2, [&]<class T>(T, int64_t r) {
    using L = typename LanesOf<T>::type;
    const T *y = row_of<T>(c.in.y, r), *dy = row_of<T>(c.in.dy, r);
    T* dx = row_of<T>(c.out.dx, r);
    L dot(
        static_cast<T>(row_sum<T>(d, [&](int64_t i, int n) { return load_lanes(y + i, n) * load_lanes(dy + i, n); })));
    for_lanes<T>(
        d, [&](int64_t i, int n) { store_lanes(dx + i, load_lanes(y + i, n) * (load_lanes(dy + i, n) - dot), n); });
  });
}

void log_softmax_grad(const log_softmax_grad_args& c) {
  int64_t d = c.in.y.shape[1];
  for_each_row<log_softmax_grad_args::In::y_dtypes>(c.exec, c.in.y, 4, [&]<class T>(T, int64_t r) {
    using L = typename LanesOf<T>::type;
    const T *y = row_of<T>(c.in.y, r), *dy = row_of<T>(c.in.dy, r);
    T* dx = row_of<T>(c.out.dx, r);
    L sum(static_cast<T>(row_sum<T>(d, [&](int64_t i, int n) { return load_lanes(dy + i, n); })));
    for_lanes<T>(
        d, [&](int64_t i, int n) { store_lanes(dx + i, load_lanes(dy + i, n) - exp(load_lanes(y + i, n)) * sum, n); });
  });
}

}  // namespace needle::NEEDLE_ISA
