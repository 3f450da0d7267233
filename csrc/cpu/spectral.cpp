// Orthogonal factors: Householder's QR, Jacobi's rotations for eigenvectors of symmetric matrices (Golub and Van Loan,
// Matrix Computations, 8.5) and, of one side, for singular values (8.6.3); exponentials. A matrix is a task; in double.
#include "cpu/matrices.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int kSweeps = 60;

// Rows a and b turned by an angle of cosine c and sine s.
void turn(double* a, double* b, double c, double s, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const double x = a[i], y = b[i];
    a[i] = c * x - s * y, b[i] = s * x + c * y;
  }
}

// Cosine and sine that make 0 of what rows p and q have in common, where app, aqq are their own squares.
void angle(double app, double apq, double aqq, double* c, double* s) {
  const double zeta = (aqq - app) / (2 * apq);
  const double t = (zeta < 0 ? -1 : 1) / (std::fabs(zeta) + std::sqrt(1 + zeta * zeta));
  *c = 1 / std::sqrt(1 + t * t), *s = *c * t;
}

// order: the numbers of n values, ascending or descending, equal ones in their order.
void sort(const double* values, int64_t n, bool descending, int64_t* order) {
  for (int64_t i = 0; i < n; i++) {
    int64_t at = i;
    for (; at > 0 && (descending ? values[order[at - 1]] < values[i] : values[order[at - 1]] > values[i]); at--)
      order[at] = order[at - 1];
    order[at] = i;
  }
}

// Columns of m from `first` on, reflected by 1 - tau v v^T: v is 1 in row k and column k of f below. room: a row.
void mirror(const Matrix& f, int64_t k, double tau, const Matrix& m, int64_t first, double* room) {
  const int64_t n = m.cols - first;
  if (tau == 0 || n <= 0) return;
  std::memcpy(room, m.row(k) + first, n * sizeof(double));
  for (int64_t i = k + 1; i < m.rows; i++) add_row(room, m.row(i) + first, f(i, k), n);
  add_row(m.row(k) + first, room, -tau, n);
  for (int64_t i = k + 1; i < m.rows; i++) add_row(m.row(i) + first, room, -tau * f(i, k), n);
}

// a becomes R, below which the reflections' vectors lie; tau: their factors. Signs as LAPACK has them (dlarfg).
void reflect(const Matrix& a, double* tau, double* room) {
  for (int64_t k = 0; k < smaller(a.rows, a.cols); k++) {
    double scale = 0, sum = 0;
    for (int64_t i = k + 1; i < a.rows; i++) scale = std::fmax(scale, std::fabs(a(i, k)));
    tau[k] = 0;
    if (scale == 0) continue;
    scale = std::fmax(scale, std::fabs(a(k, k)));
    for (int64_t i = k; i < a.rows; i++) sum += (a(i, k) / scale) * (a(i, k) / scale);
    const double alpha = a(k, k), beta = (alpha < 0 ? 1 : -1) * scale * std::sqrt(sum);
    tau[k] = (beta - alpha) / beta;
    for (int64_t i = k + 1; i < a.rows; i++) a(i, k) /= alpha - beta;
    a(k, k) = beta;
    mirror(a, k, tau[k], a, k + 1, room);
  }
}

// Symmetric a, of which the lower triangle counts, becomes diagonal; rows of v its eigenvectors.
void diagonalise(const Matrix& a, const Matrix& v) {
  const int64_t n = a.rows;
  double norm = 0;
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j <= i; j++) a(j, i) = a(i, j), norm = std::fmax(norm, std::fabs(a(i, j)));
  identity(v);
  for (int sweep = 0; sweep < kSweeps; sweep++) {
    bool turned = false;
    for (int64_t p = 0; p < n; p++)
      for (int64_t q = p + 1; q < n; q++) {
        if (std::fabs(a(p, q)) <= kEps * 1e-3 * norm) continue;
        double c, s;
        angle(a(p, p), a(p, q), a(q, q), &c, &s);
        turn(a.row(p), a.row(q), c, s, n);
        for (int64_t i = 0; i < n; i++) {
          const double x = a(i, p), y = a(i, q);
          a(i, p) = c * x - s * y, a(i, q) = s * x + c * y;
        }
        a(p, q) = a(q, p) = 0;
        turn(v.row(p), v.row(q), c, s, n);
        turned = true;
      }
    if (!turned) return;
  }
}

// Row k of w orthogonal to those before it and of length 1: what is left of it, else of some axis.
void complete(const Matrix& w, int64_t k) {
  for (int64_t axis = -1; axis < w.cols; axis++) {
    double* row = w.row(k);
    for (int64_t j = 0; j < w.cols && axis >= 0; j++) row[j] = j == axis;
    double length = std::sqrt(dot(row, row, w.cols));
    if (length == 0) continue;
    for (int64_t j = 0; j < w.cols; j++) row[j] /= length;
    for (int round = 0; round < 2; round++)
      for (int64_t i = 0; i < k; i++) add_row(row, w.row(i), -dot(row, w.row(i), w.cols), w.cols);
    length = std::sqrt(dot(row, row, w.cols));
    if (length * length * w.cols < 0.5) continue;  // some axis has more left
    for (int64_t j = 0; j < w.cols; j++) row[j] /= length;
    return;
  }
}

// Rows of w (n, m), m >= n, become orthogonal by turning pairs of them, and so do rows of v (n, n). In the order of
// their lengths, which s tells, they go to u (n, m) with length 1, and those of v to z.
void separate(const Matrix& w, const Matrix& v, double* s, const Matrix& u, const Matrix& z, int64_t* order) {
  const int64_t n = w.rows, m = w.cols;
  double largest = 0;
  for (int64_t i = 0; i < w.size(); i++) largest = std::fmax(largest, std::fabs(w.p[i]));
  for (int64_t i = 0; i < w.size() && largest; i++) w.p[i] /= largest;  // squares neither overflow nor vanish
  identity(v);
  bool turned = largest > 0;
  for (int sweep = 0; sweep < kSweeps && turned; sweep++) {
    turned = false;
    for (int64_t p = 0; p < n; p++)
      for (int64_t q = p + 1; q < n; q++) {
        const double a = dot(w.row(p), w.row(p), m), b = dot(w.row(q), w.row(q), m), g = dot(w.row(p), w.row(q), m);
        if (std::fabs(g) <= kEps * std::sqrt(a * b) || std::fmin(a, b) <= kEps * kEps * 1e-4) continue;
        double c, t;
        angle(a, g, b, &c, &t);
        turn(w.row(p), w.row(q), c, t, m);
        turn(v.row(p), v.row(q), c, t, n);
        turned = true;
      }
  }
  double* lengths = s + n;
  for (int64_t i = 0; i < n; i++) lengths[i] = std::sqrt(dot(w.row(i), w.row(i), m));
  sort(lengths, n, true, order);
  for (int64_t i = 0; i < n; i++) {
    s[i] = lengths[order[i]] * largest;
    std::memcpy(u.row(i), w.row(order[i]), m * sizeof(double));
    std::memcpy(z.row(i), v.row(order[i]), n * sizeof(double));
    if (lengths[order[i]] > kEps * m * lengths[order[0]])
      for (int64_t j = 0; j < m; j++) u(i, j) /= lengths[order[i]];
    else
      complete(u, i);
  }
}

void multiply(const Matrix& a, const Matrix& b, const Matrix& out) {
  for (int64_t i = 0; i < out.size(); i++) out.p[i] = 0;
  for (int64_t i = 0; i < a.rows; i++)
    for (int64_t k = 0; k < a.cols; k++) add_row(out.row(i), b.row(k), a(i, k), b.cols);
}

// The singular values s and vectors of a matrix of m rows and n columns, m >= n, or of its transpose where that is not
// tall: u (n, m) and z (n, n) have them in rows. given, square_room (n, n) and long_room (n, m) are free memory.
struct Factors {
  bool tall;
  const double* s;
  Matrix u, z, square_room, long_room;
  double* given;
};

// f(item, factors) for every matrix of a; numbers that are not finite end the call by `error`.
template <class T, class F>
void for_factors(const Exec* exec, const View& a, const char* error, const F& f) {
  const int64_t rows = rows_of(a), cols = columns_of(a), m = larger(rows, cols), n = smaller(rows, cols);
  const bool tall = rows >= cols;
  for_matrices(exec, batch_size(a, 2), 4 * m * n + 2 * n * n + 3 * n, 60 * m * n * n, error,
               [&](int64_t item, double* room) {
                 const Matrix given = load<T>(room, a, item), w{given.p + m * n, n, m}, u{w.p + m * n, n, m};
                 const Matrix v{u.p + m * n, n, n}, z{v.p + n * n, n, n}, free{z.p + n * n, n, m};
                 double* s = free.p + m * n;
                 if (!finite(given)) return false;
                 if (tall)
                   transpose(given, w);
                 else
                   std::memcpy(w.p, given.p, m * n * sizeof(double));
                 separate(w, v, s, u, z, reinterpret_cast<int64_t*>(s + 2 * n));
                 f(item, Factors{tall, s, u, z, v, free, given.p});
                 return true;
               });
}

}  // namespace

void qr(const qr_args& c) {
  const View& a = c.in.a;
  const int64_t m = rows_of(a), n = columns_of(a), k = smaller(m, n), wide = columns_of(c.out.q);
  with_type<qr_args::In::a_dtypes>(a.dtype, [&]<class T>(T) {
    for_matrices(c.exec, batch_size(a, 2), 2 * m * n + m * wide + k + larger(n, wide), m * n * k + m * wide * k,
                 nullptr, [&](int64_t item, double* room) {
                   const Matrix f = load<T>(room, a, item), q{f.p + m * n, m, wide}, r{q.p + m * wide, m, n};
                   double* tau = r.p + m * n;
                   reflect(f, tau, tau + k);
                   identity(q);
                   for (int64_t t = k - 1; t >= 0; t--) mirror(f, t, tau[t], q, 0, tau + k);
                   for (int64_t i = 0; i < m; i++)
                     for (int64_t j = 0; j < n; j++) r(i, j) = j < i ? 0 : f(i, j);
                   store<T>(q, c.out.q, item);
                   store<T>(r, c.out.r, item);
                   return true;
                 });
  });
}

void eigh(const eigh_args& c) {
  const View& a = c.in.a;
  const int64_t n = rows_of(a);
  with_type<eigh_args::In::a_dtypes>(a.dtype, [&]<class T>(T) {
    for_matrices(c.exec, batch_size(a, 2), 3 * n * n + 3 * n, 60 * n * n * n, nullptr, [&](int64_t item, double* room) {
      const Matrix m = load<T>(room, a, item), v{m.p + n * n, n, n}, out{v.p + n * n, n, n};
      double *values = out.p + n * n, *sorted = values + n;
      int64_t* order = reinterpret_cast<int64_t*>(sorted + n);
      const bool ok = finite(m);  // else no result is a number
      if (ok) diagonalise(m, v);
      for (int64_t i = 0; i < n; i++) values[i] = ok ? m(i, i) : NAN;
      sort(values, n, false, order);
      for (int64_t i = 0; i < n; i++) {
        sorted[i] = values[order[i]];
        for (int64_t j = 0; j < n; j++) out(j, i) = ok ? v(order[i], j) : NAN;
      }
      store_vector<T>(sorted, c.out.values, item);
      store<T>(out, c.out.vectors, item);
      return true;
    });
  });
}

void svd(const svd_args& c) {
  const View& a = c.in.a;
  with_type<svd_args::In::a_dtypes>(a.dtype, [&]<class T>(T) {
    for_factors<T>(c.exec, a, "[svd] expects finite numbers, got others.", [&](int64_t item, const Factors& f) {
      const Matrix turned{f.long_room.p, f.u.cols, f.u.rows};
      if (f.tall) {
        transpose(f.u, turned);
        store<T>(turned, c.out.u, item);
        store<T>(f.z, c.out.vt, item);
      } else {
        transpose(f.z, f.square_room);
        store<T>(f.square_room, c.out.u, item);
        store<T>(f.u, c.out.vt, item);
      }
      store_vector<T>(f.s, c.out.s, item);
    });
  });
}

void pinv(const pinv_args& c) {
  const View& a = c.in.a;
  with_type<pinv_args::In::a_dtypes>(a.dtype, [&]<class T>(T) {
    for_factors<T>(c.exec, a, "[pinv] expects finite numbers, got others.", [&](int64_t item, const Factors& f) {
      const Matrix &v = f.square_room, &product = f.long_room, turned{f.given, product.cols, product.rows};
      const int64_t n = f.u.rows;
      const double least = n ? std::fmax(c.attr.atol, c.attr.rtol * f.s[0]) : 0;
      for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++) v(j, i) = f.s[i] > least ? f.z(i, j) / f.s[i] : 0;
      multiply(v, f.u, product);
      if (!f.tall) transpose(product, turned);
      store<T>(f.tall ? product : turned, c.out.y, item);
    });
  });
}

void matrix_exp(const matrix_exp_args& c) {
  const View& a = c.in.a;
  const int64_t n = rows_of(a);
  constexpr int terms = 14;  // of a matrix of norm 1/2: what is left is below 2e-17
  with_type<matrix_exp_args::In::a_dtypes>(a.dtype, [&]<class T>(T) {
    for_matrices(c.exec, batch_size(a, 2), 3 * n * n, 20 * n * n * n, nullptr, [&](int64_t item, double* room) {
      Matrix m = load<T>(room, a, item), sum{m.p + n * n, n, n}, other{sum.p + n * n, n, n};
      double norm = 0;
      for (int64_t i = 0; i < n; i++) {
        double row = 0;
        for (int64_t j = 0; j < n; j++) row += std::fabs(m(i, j));
        norm = row > norm || std::isnan(row) ? row : norm;
      }
      const int halvings = std::isfinite(norm) && norm > 0.5 ? static_cast<int>(std::ceil(std::log2(norm))) + 1 : 0;
      for (int64_t i = 0; i < m.size(); i++) m.p[i] = std::ldexp(m.p[i], -halvings);
      identity(sum);
      for (int k = terms; k > 0; k--) {
        multiply(m, sum, other);
        identity(sum);
        add_row(sum.p, other.p, 1.0 / k, sum.size());
      }
      for (int k = 0; k < halvings; k++) {
        multiply(sum, sum, other);
        exchange(sum.p, other.p);
      }
      store<T>(sum, c.out.y, item);
      return true;
    });
  });
}

}  // namespace needle::NEEDLE_ISA
