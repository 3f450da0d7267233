// Dense matrices of a batch, one a task, brought into double precision and back, whatever arrays hold.
#pragma once
#include <stdexcept>

#include "cpu/rows.h"
#include "cpu/strided.h"

namespace needle::NEEDLE_ISA {

constexpr double kEps = 2.220446049250313e-16;

// Rows one after another.
struct Matrix {
  double* p;
  int64_t rows, cols;

  double* row(int64_t i) const { return p + i * cols; }
  double& operator()(int64_t i, int64_t j) const { return p[i * cols + j]; }
  int64_t size() const { return rows * cols; }
};

// The place of item i of a batch in a view whose last `core` axes are the item, in elements.
NEEDLE_INLINE int64_t place(const View& v, int core, int64_t i) {
  int64_t at = 0;
  for (int d = v.rank - core - 1; d >= 0; d--) at += i % v.shape[d] * v.stride[d], i /= v.shape[d];
  return at;
}

NEEDLE_INLINE int64_t batch_size(const View& v, int core) {
  int64_t n = 1;
  for (int d = 0; d < v.rank - core; d++) n *= v.shape[d];
  return n;
}

NEEDLE_INLINE int64_t rows_of(const View& v) { return v.shape[v.rank - 2]; }
NEEDLE_INLINE int64_t columns_of(const View& v) { return v.shape[v.rank - 1]; }

template <class T>
NEEDLE_INLINE Matrix load(double* room, const View& v, int64_t item) {
  const Matrix m{room, rows_of(v), columns_of(v)};
  const T* p = v.as<T>() + place(v, 2, item);
  const int64_t down = v.stride[v.rank - 2], along = v.stride[v.rank - 1];
  for (int64_t i = 0; i < m.rows; i++)
    for (int64_t j = 0; j < m.cols; j++) m(i, j) = static_cast<double>(p[i * down + j * along]);
  return m;
}

// The rows and columns that v has, of a matrix with as many or more.
template <class T>
NEEDLE_INLINE void store(const Matrix& m, const View& v, int64_t item) {
  T* p = v.as<T>() + place(v, 2, item);
  const int64_t down = v.stride[v.rank - 2], along = v.stride[v.rank - 1];
  for (int64_t i = 0; i < rows_of(v); i++)
    for (int64_t j = 0; j < columns_of(v); j++) p[i * down + j * along] = static_cast<T>(m(i, j));
}

template <class T>
NEEDLE_INLINE void store_vector(const double* values, const View& v, int64_t item) {
  T* p = v.as<T>() + place(v, 1, item);
  for (int64_t i = 0; i < columns_of(v); i++) p[i * v.stride[v.rank - 1]] = static_cast<T>(values[i]);
}

template <class T>
NEEDLE_INLINE void store_number(double value, const View& v, int64_t item) {
  v.as<T>()[place(v, 0, item)] = static_cast<T>(value);
}

NEEDLE_INLINE void identity(const Matrix& m) {
  for (int64_t i = 0; i < m.size(); i++) m.p[i] = 0;
  for (int64_t i = 0; i < smaller(m.rows, m.cols); i++) m(i, i) = 1;
}

NEEDLE_INLINE void transpose(const Matrix& from, const Matrix& to) {
  for (int64_t i = 0; i < from.rows; i++)
    for (int64_t j = 0; j < from.cols; j++) to(j, i) = from(i, j);
}

NEEDLE_INLINE bool finite(const Matrix& m) {
  for (int64_t i = 0; i < m.size(); i++)
    if (!std::isfinite(m.p[i])) return false;
  return true;
}

NEEDLE_INLINE double dot(const double* a, const double* b, int64_t n) {
  double sum[4] = {};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (int k = 0; k < 4; k++) sum[k] += a[i + k] * b[i + k];
  for (; i < n; i++) sum[0] += a[i] * b[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

template <class N>
NEEDLE_INLINE void exchange(N& a, N& b) {
  const N kept = a;
  a = b, b = kept;
}

// a += factor * b
NEEDLE_INLINE void add_row(double* a, const double* b, double factor, int64_t n) {
  for (int64_t i = 0; i < n; i++) a[i] += factor * b[i];
}

// f(item, room) for every item, with `size` doubles of memory, in tasks; where one says false, `error` ends the call.
template <class F>
NEEDLE_INLINE void for_matrices(const Exec* exec, int64_t count, int64_t size, int64_t work, const char* error,
                                const F& f) {
  int failed = 0;
  parallel_ranges(exec, count, work, [&](int64_t begin, int64_t end) {
    double* room = scratch<double>(exec, 0, larger(size, 1));
    for (int64_t i = begin; i < end; i++)
      if (!f(i, room)) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
  });
  if (failed && error) throw std::domain_error(error);
}

}  // namespace needle::NEEDLE_ISA
