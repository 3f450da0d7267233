// Rows of a table by their numbers, and the reverse: rows added into a table, or put into their places.
#include "cpu/strided.h"

namespace needle::NEEDLE_ISA {
// Table (N, D) and numbers (M) to (M, D).
void gather_rows(const gather_rows_args& c) {
  const View &out = c.out.rows, &table = c.in.table, &numbers = c.in.numbers;
  int64_t count = table.shape[0], size = table.shape[1];
  using In = gather_rows_args::In;
  with_type<In::table_dtypes>(table.dtype, [&]<class T>(T) {
    // What a row outside of the table is made of: a kernel cannot raise.
    const T missing = T(0.5) == T(0) ? T(0) : static_cast<T>(NAN);
    with_type<In::numbers_dtypes>(numbers.dtype, [&](auto n) {
      parallel_each(c.exec, out.shape[0], size, [&](int64_t i) __attribute__((always_inline)) {
        const int64_t row = numbers.as<decltype(n)>()[i * numbers.stride[0]];
        T* to = out.as<T>() + i * out.stride[0];
        if (row < 0 || row >= count) {
          for (int64_t j = 0; j < size; j++) to[j * out.stride[1]] = missing;
          return;
        }
        const T* from = table.as<T>() + row * table.stride[0];
        if (out.stride[1] == 1 && table.stride[1] == 1)
          std::memcpy(to, from, size * sizeof(T));
        else
          convert(to, out.stride[1], from, table.stride[1], size);
      });
    });
  });
}

// Rows (M, D) and numbers (M) to a table (N, D) that holds their sums, in the order of the rows; those of number `skip`
// and those outside of the table are left out.
void scatter_add_rows(const scatter_add_rows_args& c) {
  const View &out = c.out.table, &rows = c.in.rows, &numbers = c.in.numbers;
  int64_t count = out.shape[0], skip = c.attr.skip;
  using In = scatter_add_rows_args::In;
  with_type<In::rows_dtypes>(rows.dtype, [&]<class T>(T) {
    // Tasks are ranges of columns, so that no two add to one element.
    parallel_ranges(c.exec, out.shape[1], count + rows.shape[0], [&](int64_t begin, int64_t end) {
      for (int64_t k = 0; k < count; k++)
        for (int64_t j = begin; j < end; j++) out.as<T>()[k * out.stride[0] + j * out.stride[1]] = T(0);
      for (int64_t i = 0; i < rows.shape[0]; i++) {
        const int64_t row = number_at<In::numbers_dtypes>(numbers, i);
        if (row < 0 || row >= count || row == skip) continue;
        T* to = out.as<T>() + row * out.stride[0];
        const T* from = rows.as<T>() + i * rows.stride[0];
        for (int64_t j = begin; j < end; j++) to[j * out.stride[1]] += from[j * rows.stride[1]];
      }
    });
  });
}

// Rows (B, M, D) and numbers (M) into tables (B, N, D).
void put_rows(const put_rows_args& c) {
  const View &out = c.out.table, &rows = c.in.rows, &numbers = c.in.numbers;
  const int64_t tables = out.shape[0], count = out.shape[1], size = out.shape[2], many = numbers.shape[0];
  using In = put_rows_args::In;
  bool fits = true;
  for (int64_t i = 0; i < many; i++) {
    const int64_t row = number_at<In::numbers_dtypes>(numbers, i);
    fits = fits && row >= 0 && row < count;
  }
  with_type<In::rows_dtypes>(rows.dtype, [&]<class T>(T) {
    // A kernel cannot raise: who reads the tables sees that they do not hold what they should.
    const T missing = std::is_floating_point_v<T> ? static_cast<T>(NAN) : T(0);
    parallel_each(c.exec, tables, (fits ? many : count) * size, [&](int64_t b) __attribute__((always_inline)) {
      T* table = out.as<T>() + b * out.stride[0];
      for (int64_t k = 0; !fits && k < count; k++)
        for (int64_t j = 0; j < size; j++) table[k * out.stride[1] + j * out.stride[2]] = missing;
      for (int64_t i = 0; fits && i < many; i++) {
        T* to = table + number_at<In::numbers_dtypes>(numbers, i) * out.stride[1];
        const T* from = rows.as<T>() + b * rows.stride[0] + i * rows.stride[1];
        if (out.stride[2] == 1 && rows.stride[2] == 1)
          std::memcpy(to, from, size * sizeof(T));
        else
          convert(to, out.stride[2], from, rows.stride[2], size);
      }
    });
  });
}

}  // namespace needle::NEEDLE_ISA
