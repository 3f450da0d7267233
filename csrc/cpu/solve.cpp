// Systems of equations: LU with row exchanges, Cholesky's factor, substitution, determinants. A matrix is a task; sums
// are in double.
#include "cpu/matrices.h"

namespace needle::NEEDLE_ISA {
namespace {

// A in place as L below the diagonal and U; order: which row of A is each row of L U. The sign of that order, 0 where a
// pivot is 0 (such columns are left as they are).
double factor(const Matrix& a, int64_t* order, int64_t* exchanged) {
  double sign = 1;
  bool singular = false;
  for (int64_t i = 0; i < a.rows; i++) order[i] = i;
  for (int64_t k = 0; k < smaller(a.rows, a.cols); k++) {
    int64_t best = k;
    for (int64_t i = k + 1; i < a.rows; i++)
      if (std::fabs(a(i, k)) > std::fabs(a(best, k))) best = i;
    exchanged[k] = best;
    if (best != k) {
      for (int64_t j = 0; j < a.cols; j++) exchange(a(k, j), a(best, j));
      exchange(order[k], order[best]);
      sign = -sign;
    }
    if (a(k, k) == 0) {
      singular = true;
      continue;
    }
    for (int64_t i = k + 1; i < a.rows; i++) {
      a(i, k) /= a(k, k);
      add_row(a.row(i) + k + 1, a.row(k) + k + 1, -a(i, k), a.cols - k - 1);
    }
  }
  return singular ? 0 : sign;
}

// b = T^-1 b of the upper or lower triangle T of a. False where the diagonal has a 0.
bool substitute(const Matrix& a, const Matrix& b, bool upper, bool unit) {
  bool regular = true;
  for (int64_t t = 0; t < a.rows; t++) {
    const int64_t i = upper ? a.rows - 1 - t : t;
    for (int64_t j = upper ? i + 1 : 0; j < (upper ? a.rows : i); j++) add_row(b.row(i), b.row(j), -a(i, j), b.cols);
    if (unit) continue;
    regular = regular && a(i, i) != 0;
    for (int64_t j = 0; j < b.cols; j++) b(i, j) /= a(i, i);
  }
  return regular;
}

// f(item, U of its factors, the sign of its exchanges or 0) for every square matrix of a.
template <class T, class F>
void for_upper(const Exec* exec, const View& a, const F& f) {
  const int64_t n = rows_of(a);
  for_matrices(exec, batch_size(a, 2), n * n + 2 * n, n * n * n, nullptr, [&](int64_t i, double* p) {
    const Matrix m = load<T>(p, a, i);
    int64_t* order = reinterpret_cast<int64_t*>(p + n * n);
    const double sign = factor(m, order, order + n);
    f(i, m, sign);
    return true;
  });
}

}  // namespace

void solve(const solve_args& c) {
  const View &a = c.in.a, &b = c.in.b;
  const int64_t n = rows_of(a), m = columns_of(b);
  with_type<solve_args::In::a_dtypes>(a.dtype, [&]<class T>(T) {
    const char* error = c.attr.check ? "[solve] expects matrices that have an inverse, got a singular one." : nullptr;
    for_matrices(c.exec, batch_size(b, 2), n * n + 2 * n * m + 2 * n, n * n * (n + m), error,
                 [&](int64_t i, double* p) {
                   const Matrix lu = load<T>(p, a, i), given = load<T>(p + n * n, b, i), x{given.p + n * m, n, m};
                   int64_t* order = reinterpret_cast<int64_t*>(x.p + n * m);
                   const bool regular = factor(lu, order, order + n) != 0;
                   for (int64_t r = 0; r < n; r++) std::memcpy(x.row(r), given.row(order[r]), m * sizeof(double));
                   substitute(lu, x, false, true);
                   substitute(lu, x, true, false);
                   store<T>(x, c.out.x, i);
                   return regular || m == 0;
                 });
  });
}

void solve_triangular(const solve_triangular_args& c) {
  const View &a = c.in.a, &b = c.in.b;
  const int64_t n = rows_of(a), m = columns_of(b);
  with_type<solve_triangular_args::In::a_dtypes>(a.dtype, [&]<class T>(T) {
    for_matrices(c.exec, batch_size(b, 2), n * (n + m), n * n * (m + 1), nullptr, [&](int64_t i, double* p) {
      const Matrix triangle = load<T>(p, a, i), x = load<T>(p + n * n, b, i);
      substitute(triangle, x, c.attr.upper != 0, c.attr.unit != 0);
      store<T>(x, c.out.x, i);
      return true;
    });
  });
}

void lu(const lu_args& c) {
  const View& a = c.in.a;
  const int64_t m = rows_of(a), n = columns_of(a);
  with_type<lu_args::In::a_dtypes>(a.dtype, [&]<class T>(T) {
    for_matrices(c.exec, batch_size(a, 2), m * n + 2 * m, m * n * smaller(m, n), nullptr, [&](int64_t i, double* p) {
      const Matrix factors = load<T>(p, a, i);
      int64_t* order = reinterpret_cast<int64_t*>(p + m * n);
      int64_t info = 0;
      if (factor(factors, order, order + m) == 0)
        while (info < smaller(m, n) && factors(info, info) != 0) info++;
      else
        info = -1;
      store<T>(factors, c.out.factors, i);
      const View &rows = c.out.order, &pivots = c.out.pivots;
      int64_t* to = rows.as<int64_t>() + place(rows, 1, i);
      for (int64_t r = 0; r < m; r++) to[r * rows.stride[rows.rank - 1]] = order[r];
      int32_t* swaps = pivots.as<int32_t>() + place(pivots, 1, i);
      for (int64_t r = 0; r < smaller(m, n); r++)
        swaps[r * pivots.stride[pivots.rank - 1]] = static_cast<int32_t>(order[m + r] + 1);
      store_number<int32_t>(static_cast<double>(info + 1), c.out.info, i);
      return true;
    });
  });
}

void cholesky(const cholesky_args& c) {
  const View& a = c.in.a;
  const int64_t n = rows_of(a);
  with_type<cholesky_args::In::a_dtypes>(a.dtype, [&]<class T>(T) {
    const char* error = c.attr.check ? "[cholesky] expects positive-definite matrices, got another one." : nullptr;
    for_matrices(c.exec, batch_size(a, 2), n * n, n * n * n / 3, error, [&](int64_t i, double* p) {
      const Matrix l = load<T>(p, a, i);
      int64_t info = 0;
      for (int64_t r = 0; r < n && !info; r++) {
        for (int64_t k = 0; k < r; k++) l(r, k) = (l(r, k) - dot(l.row(r), l.row(k), k)) / l(k, k);
        const double rest = l(r, r) - dot(l.row(r), l.row(r), r);
        if (!(rest > 0)) info = r + 1;
        l(r, r) = std::sqrt(rest);
        for (int64_t k = r + 1; k < n; k++) l(r, k) = 0;
      }
      for (int64_t k = 0; k < l.size() && info; k++) l.p[k] = NAN;
      store<T>(l, c.out.factor, i);
      store_number<int32_t>(static_cast<double>(info), c.out.info, i);
      return info == 0;
    });
  });
}

void det(const det_args& c) {
  with_type<det_args::In::a_dtypes>(c.in.a.dtype, [&]<class T>(T) {
    for_upper<T>(c.exec, c.in.a, [&](int64_t i, const Matrix& u, double sign) {
      for (int64_t k = 0; k < u.rows; k++) sign *= u(k, k);
      store_number<T>(sign, c.out.y, i);
    });
  });
}

void slogdet(const slogdet_args& c) {
  with_type<slogdet_args::In::a_dtypes>(c.in.a.dtype, [&]<class T>(T) {
    for_upper<T>(c.exec, c.in.a, [&](int64_t i, const Matrix& u, double sign) {
      double log = 0;
      for (int64_t k = 0; k < u.rows; k++) sign *= u(k, k) < 0 ? -1 : 1, log += std::log(std::fabs(u(k, k)));
      store_number<T>(sign, c.out.sign, i);
      store_number<T>(log, c.out.log_abs, i);
    });
  });
}

}  // namespace needle::NEEDLE_ISA
