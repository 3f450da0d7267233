// Rows of a table by their numbers, and the reverse: rows added into a table, elements scattered to their places.
#include "cpu/move.h"
#include "math/reductions.h"

namespace needle::NEEDLE_ISA {
namespace {

// Ends the call, before anything is written, where one of the numbers is outside of [0, count).
template <class Number>
void check_numbers(const Exec* exec, const char* name, View numbers, int64_t count) {
  if (!numbers.size()) return;
  for (int d = 0; d < numbers.rank; d++)
    if (numbers.stride[d] == 0) numbers.shape[d] = 1;
  const View* views[] = {&numbers};
  const Loop<1> loop = loop_over(views);
  const int64_t stride = loop.stride[0][loop.rank - 1];
  const Number* wrong = nullptr;
  for_pieces(exec, loop, 1, [&](const int64_t* at, int64_t first, int64_t n) {
    const Number* from = numbers.as<const Number>() + at[0] + first * stride;
    using Bits = std::make_unsigned_t<Number>;
    const Bits last = static_cast<Bits>(smaller(count - 1, std::numeric_limits<Number>::max()));
    // The sign is set where a number is negative or beyond the last.
    auto sign = [&](Number number) { return static_cast<Bits>(number) | (last - static_cast<Bits>(number)); };
    Bits signs = 0;
    if (stride == 1)
      for (int64_t i = 0; i < n; i++) signs |= sign(from[i]);
    else
      for (int64_t i = 0; i < n; i++) signs |= sign(from[i * stride]);
    if (static_cast<Number>(signs) >= 0) return;
    for (int64_t i = 0; i < n; i++)
      if (static_cast<Number>(sign(from[i * stride])) < 0)
        __atomic_store_n(&wrong, from + i * stride, __ATOMIC_RELAXED);
  });
  if (wrong) refuse_number(name, *wrong, count);
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
  const int64_t size = table.shape[1];
  using In = gather_rows_args::In;
  with_type<In::numbers_dtypes>(numbers.dtype, [&]<class Number>(Number) {
    check_numbers<Number>(c.exec, "gather", numbers, table.shape[0]);
    with_type<In::table_dtypes>(table.dtype, [&]<class T>(T) {
      parallel_ranges(c.exec, out.shape[0], larger(size, 4), [&](int64_t begin, int64_t end) {
        const Number* number = numbers.as<const Number>() + begin * numbers.stride[0];
        T* to = out.as<T>() + begin * out.stride[0];
        if (size == 1) {
          const T* column = table.as<const T>();
          const int64_t step = table.stride[0], to_step = out.stride[0], n_step = numbers.stride[0];
          for (int64_t i = 0; i < end - begin; i++) to[i * to_step] = column[number[i * n_step] * step];
          return;
        }
        for (int64_t i = begin; i < end; i++, to += out.stride[0], number += numbers.stride[0])
          move_row(to, out.stride[1], table.as<const T>() + *number * table.stride[0], table.stride[1], size);
      });
    });
  });
}

// Rows (M, D) and numbers (M) to a table (N, D) that holds their sums, in the order of the rows; those of number `skip`
// are left out.
void scatter_add_rows(const scatter_add_rows_args& c) {
  const View &out = c.out.table, &rows = c.in.rows, &numbers = c.in.numbers;
  int64_t count = out.shape[0], skip = c.attr.skip;
  using In = scatter_add_rows_args::In;
  with_type<In::rows_dtypes>(rows.dtype, [&]<class T>(T) {
    with_type<In::numbers_dtypes>(numbers.dtype, [&]<class Number>(Number) {
      check_numbers<Number>(c.exec, "scatter", numbers, count);
      // Tasks are ranges of columns, so that no two add to one element.
      parallel_ranges(c.exec, out.shape[1], count + rows.shape[0], [&](int64_t begin, int64_t end) {
        fill_zeros(out.as<T>() + begin * out.stride[1], out.stride, count, end - begin);
        for (int64_t i = 0; i < rows.shape[0]; i++) {
          const int64_t row = numbers.as<const Number>()[i * numbers.stride[0]];
          if (row == skip) continue;
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

// (B, M, 1) as (1, M, B): rows are often short, and B of them as many columns. Others as they are.
View batch_as_columns(View v) {
  if (v.shape[2] == 1) v.shape[2] = v.shape[0], v.stride[2] = v.stride[0], v.shape[0] = 1, v.stride[0] = 0;
  return v;
}

// Elements of tables (B, N, D) by numbers (B, M, D) to (B, M, D).
void gather(const gather_args& c) {
  const View out = batch_as_columns(c.out.y), x = batch_as_columns(c.in.x), by = batch_as_columns(c.in.numbers);
  const int64_t many = out.shape[1], width = out.shape[2];
  using In = gather_args::In;
  with_type<In::numbers_dtypes>(by.dtype, [&]<class Number>(Number) {
    check_numbers<Number>(c.exec, "gather", by, x.shape[1]);
    with_type<In::x_dtypes>(x.dtype, [&]<class T>(T) {
      const auto at = [](const View& v, int64_t b, int64_t i) { return b * v.stride[0] + i * v.stride[1]; };
      if (by.stride[2] == 0 && out.stride[2] == 1 && width > 1)  // whole rows
        return parallel_each(c.exec, out.shape[0] * many, 4 * width, [&](int64_t t) {
          const int64_t b = t / many, i = t % many, number = by.as<const Number>()[at(by, b, i)];
          move_row(out.as<T>() + at(out, b, i), 1, x.as<const T>() + at(x, b, number), x.stride[2], width);
        });
      const int inner = out.stride[1] < out.stride[2] ? 1 : 2, outer = 3 - inner;  // of M and D
      const int64_t x_stride[] = {0, 0, x.stride[2]}, step = x.stride[1];
      for_tiles(c.exec, out.shape[0], out.shape[outer], out.shape[inner], 4,
                [&](int64_t b, int64_t row, int64_t column, int64_t rows, int64_t columns) {
                  const auto first = [&](const View& v, const int64_t* stride) {
                    return b * v.stride[0] + row * stride[outer] + column * stride[inner];
                  };
                  const T* from = x.as<const T>() + first(x, x_stride);
                  const Number* number = by.as<const Number>() + first(by, by.stride);
                  T* to = out.as<T>() + first(out, out.stride);
                  const int64_t to_down = out.stride[outer], to_across = out.stride[inner], down = by.stride[outer],
                                across = by.stride[inner], x_down = x_stride[outer], x_across = x_stride[inner];
                  for_each_of(rows, columns, [=](int64_t r, int64_t i) {
                    to[r * to_down + i * to_across] =
                        from[number[r * down + i * across] * step + r * x_down + i * x_across];
                  });
                });
    });
  });
}

// Columns [first, first + n) of table b take what is scattered to them, in the order of the rows.
template <class R, class T, class Number>
void scatter_columns(const View& out, const View& from, const View& by, int64_t b, int64_t first, int64_t n) {
  const int64_t many = from.shape[1];
  T* table = out.as<T>() + b * out.stride[0] + first * out.stride[2];
  const T* rows = from.as<T>() + b * from.stride[0] + first * from.stride[2];
  const Number* numbers = by.as<Number>() + b * by.stride[0] + first * by.stride[2];
  if (by.stride[2] == 0 && out.stride[2] == 1 && from.stride[2] == 1) {  // whole rows
    for (int64_t i = 0; i < many; i++) {
      T* to = table + numbers[i * by.stride[1]] * out.stride[1];
      const T* value = rows + i * from.stride[1];
      for (int64_t j = 0; j < n; j++) to[j] = combined<R>(to[j], value[j]);
    }
    return;
  }
  const int64_t to_down = out.stride[1], to_across = out.stride[2], down = by.stride[1], across = by.stride[2],
                from_down = from.stride[1], from_across = from.stride[2];
  const auto write = [=](int64_t i, int64_t j) {
    T& to = table[numbers[i * down + j * across] * to_down + j * to_across];
    to = combined<R>(to, rows[i * from_down + j * from_across]);
  };
  if (n == 1) return for_each_of(many, 1, write);
  for (int64_t i = 0; i < many; i++)
    for (int64_t j = 0; j < n; j++) write(i, j);
}

// Elements (B, M, D) and numbers (B, M, D) into tables (B, N, D).
void scatter(const scatter_args& c) {
  constexpr int64_t kTogether = 16;  // columns that one task has at least
  const View out = batch_as_columns(c.out.table), from = batch_as_columns(c.in.rows),
             by = batch_as_columns(c.in.numbers);
  const int64_t width = out.shape[2], parts = ceil_div(width, kTogether);
  const int64_t work = from.shape[1] * smaller(width, kTogether);
  const bool apart = out.stride[1] < out.stride[2];  // a few columns are in cache until all rows have passed
  auto run = [&]<class R, class T, class Number>(R, T, Number) {
    // Of one table a stretch of columns for each thread: narrow ones would go through memory once for each of them.
    const int64_t total = out.shape[0] * parts, threads = c.exec->threads;
    if (total == 0) return;
    const int64_t most = total * work < 32768 ? 1 : out.shape[0] > 1 ? 4 * threads : threads;
    const int64_t tasks = smaller(total, most);
    parallel_for(c.exec, tasks, [&](int64_t task) {
      int64_t begin = total * task / tasks;
      const int64_t end = total * (task + 1) / tasks;
      while (begin < end) {
        const int64_t b = begin / parts, part = begin % parts;
        const int64_t stop = smaller(parts, part + (apart ? 1 : end - begin));
        const int64_t first = part * kTogether, n = smaller(width, stop * kTogether) - first;
        scatter_columns<R, T, Number>(out, from, by, b, first, n);
        begin += stop - part;
      }
    });
  };
  using In = scatter_args::In;
  with_type<In::numbers_dtypes>(c.in.numbers.dtype, [&](auto number) {
    check_numbers<decltype(number)>(c.exec, "scatter", c.in.numbers, c.out.table.shape[1]);
    with_reduction(c.attr.reduce,
                   [&](auto r) { with_type<In::rows_dtypes>(c.in.rows.dtype, [&](auto t) { run(r, t, number); }); });
  });
}

}  // namespace needle::NEEDLE_ISA
