// Rows of a table by their numbers, and the reverse: rows added into a table, elements scattered to their places.
#include "cpu/strided.h"
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

// `many` elements of a column by their numbers.
template <class T, class Number>
void pick(const T* column, int64_t step, const Number* numbers, int64_t n_step, T* to, int64_t to_step, int64_t many) {
  for (int64_t i = 0; i < many; i++) to[i * to_step] = column[numbers[i * n_step] * step];
}

// A row of `size` elements: short ones in two pieces that may overlap, without a call.
template <class T>
NEEDLE_INLINE void copy_row(T* to, int64_t to_step, const T* from, int64_t step, int64_t size) {
  if (to_step != 1 || step != 1) return convert(to, to_step, from, step, size);
  const size_t bytes = size * sizeof(T);
  char* out = reinterpret_cast<char*>(to);
  const char* in = reinterpret_cast<const char*>(from);
  auto ends = [&](auto width) {
    __builtin_memcpy(out, in, width);
    __builtin_memcpy(out + bytes - width, in + bytes - width, width);
  };
  if (bytes > 64 || bytes < 4) return static_cast<void>(std::memcpy(to, from, bytes));
  if (bytes >= 32) return ends(std::integral_constant<size_t, 32>());
  if (bytes >= 16) return ends(std::integral_constant<size_t, 16>());
  if (bytes >= 8) return ends(std::integral_constant<size_t, 8>());
  ends(std::integral_constant<size_t, 4>());
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
        if (size == 1)
          return pick(table.as<const T>(), table.stride[0], number, numbers.stride[0], to, out.stride[0], end - begin);
        for (int64_t i = begin; i < end; i++, to += out.stride[0], number += numbers.stride[0])
          copy_row(to, out.stride[1], table.as<const T>() + *number * table.stride[0], table.stride[1], size);
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

// Elements of tables (B, N, D) by numbers (B, M, D) to (B, M, D).
void gather(const gather_args& c) {
  const View &out = c.out.y, &x = c.in.x, &by = c.in.numbers;
  const int64_t many = out.shape[1], width = out.shape[2];
  using In = gather_args::In;
  with_type<In::numbers_dtypes>(by.dtype, [&]<class Number>(Number) {
    check_numbers<Number>(c.exec, "gather", by, x.shape[1]);
    with_type<In::x_dtypes>(x.dtype, [&]<class T>(T) {
      const auto at = [](const View& v, int64_t b) { return b * v.stride[0]; };
      if (width == 1) {  // numbers are along a row of memory
        const int64_t piece = 4096, pieces = ceil_div(many, piece);
        parallel_each(c.exec, out.shape[0] * pieces, 4 * smaller(many, piece), [&](int64_t t) {
          const int64_t b = pieces == 1 ? t : t / pieces, first = (t - b * pieces) * piece;
          pick(x.as<const T>() + at(x, b), x.stride[1], by.as<const Number>() + at(by, b) + first * by.stride[1],
               by.stride[1], out.as<T>() + at(out, b) + first * out.stride[1], out.stride[1],
               smaller(piece, many - first));
        });
        return;
      }
      parallel_each(c.exec, out.shape[0] * many, 4 * width, [&](int64_t t) {
        const int64_t b = t / many, i = t % many;
        const T* table = x.as<const T>() + at(x, b);
        const Number* numbers = by.as<const Number>() + at(by, b) + i * by.stride[1];
        T* to = out.as<T>() + at(out, b) + i * out.stride[1];
        if (by.stride[2] == 0)  // a whole row
          return copy_row(to, out.stride[2], table + *numbers * x.stride[1], x.stride[2], width);
        for (int64_t j = 0; j < width; j++)
          to[j * out.stride[2]] = table[numbers[j * by.stride[2]] * x.stride[1] + j * x.stride[2]];
      });
    });
  });
}

// Columns [first, first + n) of table b take what is scattered to them, in the order of the rows.
template <class R, class T, class Number>
void scatter_columns(const scatter_args& c, int64_t b, int64_t first, int64_t n) {
  const View &out = c.out.table, &from = c.in.rows, &by = c.in.numbers;
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
  auto write = [&](T& to, T value) { to = combined<R>(to, value); };
  if (n == 1) {
    for (int64_t i = 0; i < many; i++)
      write(table[numbers[i * by.stride[1]] * out.stride[1]], rows[i * from.stride[1]]);
    return;
  }
  for (int64_t i = 0; i < many; i++)
    for (int64_t j = 0; j < n; j++)
      write(table[numbers[i * by.stride[1] + j * by.stride[2]] * out.stride[1] + j * out.stride[2]],
            rows[i * from.stride[1] + j * from.stride[2]]);
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
  with_type<In::numbers_dtypes>(c.in.numbers.dtype, [&](auto number) {
    check_numbers<decltype(number)>(c.exec, "scatter", c.in.numbers, c.out.table.shape[1]);
    with_reduction(c.attr.reduce,
                   [&](auto r) { with_type<In::rows_dtypes>(c.in.rows.dtype, [&](auto t) { run(r, t, number); }); });
  });
}

}  // namespace needle::NEEDLE_ISA
