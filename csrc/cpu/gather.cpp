// Rows of a table by their numbers, and the reverse: rows added into a table, elements scattered to their places.
#include "cpu/strided.h"
#include "math/reductions.h"

namespace needle::NEEDLE_ISA {
namespace {

// What an element outside of the table is: a kernel cannot raise.
template <class T>
T missing_value() {
  return std::is_floating_point_v<T> ? static_cast<T>(NAN) : T(0);
}

// `many` elements of a column of `count` by their numbers.
template <class T, class Number>
NEEDLE_INLINE void pick(const T* column, int64_t step, int64_t count, const Number* numbers, int64_t n_step, T* to,
                        int64_t to_step, int64_t many, T missing) {
  for (int64_t i = 0; i < many; i++) {
    const int64_t row = numbers[i * n_step];
    to[i * to_step] = row < 0 || row >= count ? missing : column[row * step];
  }
}

// Rows of zeros: as few calls as the strides allow.
template <class T>
void fill_zeros(T* to, const int64_t* stride, int64_t rows, int64_t size) {
  if (stride[1] != 1 && size > 1) {
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < size; j++) to[i * stride[0] + j * stride[1]] = T(0);
    return;
  }
  if (stride[0] == size) size *= rows, rows = rows > 0;
  for (int64_t i = 0; i < rows; i++) std::memset(to + i * stride[0], 0, size * sizeof(T));
}

}  // namespace

// Table (N, D) and numbers (M) to (M, D).
void gather_rows(const gather_rows_args& c) {
  const View &out = c.out.rows, &table = c.in.table, &numbers = c.in.numbers;
  int64_t count = table.shape[0], size = table.shape[1];
  using In = gather_rows_args::In;
  with_type<In::table_dtypes>(table.dtype, [&]<class T>(T) {
    const T missing = missing_value<T>();
    with_type<In::numbers_dtypes>(numbers.dtype, [&](auto n) {
      if (size == 1) {
        parallel_ranges(c.exec, out.shape[0], 4, [&](int64_t begin, int64_t end) {
          pick(table.as<const T>(), table.stride[0], count, numbers.as<decltype(n)>() + begin * numbers.stride[0],
               numbers.stride[0], out.as<T>() + begin * out.stride[0], out.stride[0], end - begin, missing);
        });
        return;
      }
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
    with_type<In::numbers_dtypes>(numbers.dtype, [&]<class Number>(Number) {
      // Tasks are ranges of columns, so that no two add to one element.
      parallel_ranges(c.exec, out.shape[1], count + rows.shape[0], [&](int64_t begin, int64_t end) {
        fill_zeros(out.as<T>() + begin * out.stride[1], out.stride, count, end - begin);
        for (int64_t i = 0; i < rows.shape[0]; i++) {
          const int64_t row = numbers.as<const Number>()[i * numbers.stride[0]];
          if (row < 0 || row >= count || row == skip) continue;
          T* to = out.as<T>() + row * out.stride[0];
          const T* from = rows.as<T>() + i * rows.stride[0];
          if (out.stride[1] == 1 && rows.stride[1] == 1)
            for (int64_t j = begin; j < end; j++) to[j] += from[j];
          else
            for (int64_t j = begin; j < end; j++) to[j * out.stride[1]] += from[j * rows.stride[1]];
        }
      });
    });
  });
}

// Elements of tables (B, N, D) by numbers (B, M, D) to (B, M, D).
void gather(const gather_args& c) {
  const View &out = c.out.y, &x = c.in.x, &by = c.in.numbers;
  const int64_t many = out.shape[1], width = out.shape[2], count = x.shape[1];
  using In = gather_args::In;
  with_type<In::x_dtypes>(x.dtype, [&]<class T>(T) {
    with_type<In::numbers_dtypes>(by.dtype, [&]<class Number>(Number) {
      const auto at = [](const View& v, int64_t b) { return b * v.stride[0]; };
      if (width == 1) {  // numbers are along a row of memory
        const int64_t piece = 4096, pieces = ceil_div(many, piece);
        const int64_t x_step = x.stride[1], by_step = by.stride[1], step = out.stride[1];
        parallel_each(c.exec, out.shape[0] * pieces, 4 * smaller(many, piece), [&](int64_t t) {
          const int64_t b = pieces == 1 ? t : t / pieces, first = (t - b * pieces) * piece;
          pick(x.as<const T>() + at(x, b), x_step, count, by.as<const Number>() + at(by, b) + first * by_step, by_step,
               out.as<T>() + at(out, b) + first * step, step, smaller(piece, many - first), missing_value<T>());
        });
        return;
      }
      parallel_each(c.exec, out.shape[0] * many, 4 * width, [&](int64_t t) {
        const int64_t b = t / many, i = t % many;
        const T* table = x.as<const T>() + at(x, b);
        const Number* numbers = by.as<const Number>() + at(by, b) + i * by.stride[1];
        T* to = out.as<T>() + at(out, b) + i * out.stride[1];
        for (int64_t j = 0; j < width; j++) {
          const int64_t row = numbers[j * by.stride[2]];
          const bool there = row >= 0 && row < count;
          to[j * out.stride[2]] = there ? table[row * x.stride[1] + j * x.stride[2]] : missing_value<T>();
        }
      });
    });
  });
}

// Columns [first, first + n) of table b take what is scattered to them, in the order of the rows.
template <class R, class T, class Number>
void scatter_columns(const scatter_args& c, int64_t b, int64_t first, int64_t n) {
  const View &out = c.out.table, &from = c.in.rows, &by = c.in.numbers;
  const int64_t many = from.shape[1], count = out.shape[1];
  T* table = out.as<T>() + b * out.stride[0] + first * out.stride[2];
  const T* rows = from.as<T>() + b * from.stride[0] + first * from.stride[2];
  const Number* numbers = by.as<Number>() + b * by.stride[0] + first * by.stride[2];
  auto outside = [&](int64_t row) { return row < 0 || row >= count; };
  bool fits = true;
  if (by.stride[2] == 0 && out.stride[2] == 1 && from.stride[2] == 1) {  // whole rows
    for (int64_t i = 0; i < many; i++) {
      const int64_t row = numbers[i * by.stride[1]];
      if (outside(row)) {
        fits = false;
        continue;
      }
      T* to = table + row * out.stride[1];
      const T* value = rows + i * from.stride[1];
      for (int64_t j = 0; j < n; j++) to[j] = combined<R>(to[j], value[j]);
    }
  } else {
    for (int64_t i = 0; i < many; i++)
      for (int64_t j = 0; j < n; j++) {
        const int64_t row = numbers[i * by.stride[1] + j * by.stride[2]];
        if (outside(row)) {
          fits = false;
          continue;
        }
        T& to = table[row * out.stride[1] + j * out.stride[2]];
        to = combined<R>(to, rows[i * from.stride[1] + j * from.stride[2]]);
      }
  }
  if (fits) return;
  // A kernel cannot raise: who reads the table sees that a column does not hold what it should.
  const T missing = missing_value<T>();
  for (int64_t j = 0; j < n; j++) {
    bool all = true;
    for (int64_t i = 0; i < many; i++) all = all && !outside(numbers[i * by.stride[1] + j * by.stride[2]]);
    for (int64_t k = 0; !all && k < count; k++) table[k * out.stride[1] + j * out.stride[2]] = missing;
  }
}

// Elements (B, M, D) and numbers (B, M, D) into tables (B, N, D).
void scatter(const scatter_args& c) {
  constexpr int64_t kTogether = 16;  // columns that one task has at least
  const int64_t width = c.out.table.shape[2], parts = ceil_div(width, kTogether);
  const int64_t work = c.in.rows.shape[1] * smaller(width, kTogether);
  auto run = [&]<class R, class T, class Number>(R, T, Number) {
    if (width == 1)  // numbers are along a row of memory
      return parallel_each(c.exec, c.out.table.shape[0], 4 * c.in.rows.shape[1],
                           [&](int64_t b) { scatter_columns<R, T, Number>(c, b, 0, 1); });
    // Of one table a stretch of columns for each thread: narrow ones would go through memory once for each of them.
    const int64_t total = c.out.table.shape[0] * parts, threads = c.exec->threads;
    if (total == 0) return;
    const int64_t most = total * work < 32768 ? 1 : c.out.table.shape[0] > 1 ? 4 * threads : threads;
    const int64_t tasks = smaller(total, most);
    parallel_for(c.exec, tasks, [&](int64_t task) {
      int64_t begin = total * task / tasks;
      const int64_t end = total * (task + 1) / tasks;
      while (begin < end) {
        const int64_t b = begin / parts, part = begin % parts, stop = smaller(parts, part + end - begin);
        const int64_t first = part * kTogether, n = smaller(width, stop * kTogether) - first;
        scatter_columns<R, T, Number>(c, b, first, n);
        begin += stop - part;
      }
    });
  };
  using In = scatter_args::In;
  with_reduction(c.attr.reduce, [&](auto r) {
    with_type<In::rows_dtypes>(c.in.rows.dtype, [&](auto t) {
      with_type<In::numbers_dtypes>(c.in.numbers.dtype, [&](auto number) { run(r, t, number); });
    });
  });
}

}  // namespace needle::NEEDLE_ISA
