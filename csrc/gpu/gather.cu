// Rows and elements of a table by their numbers, and the reverse: rows added into a table, elements scattered to their
// places.
#include "gpu/quad.cuh"
#include "gpu/strided.cuh"
#include "math/reductions.h"

namespace needle::gpu {
namespace {

// Rows (m x d) and the table (count x d), any strides. Of Quads a row has a quarter of the elements.
template <class T>
struct Rows {
  T* rows;
  T* table;
  const void* numbers;
  DType number_dtype;
  Divisor width;
  uint32_t total;
  int64_t row_stride, column_stride, table_row, table_column, number_stride, count;
};

// What a row outside of the table is made of is NaN or 0: a kernel cannot raise.
template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) read_rows(Rows<T> r) {
  for_elements(r.total, [&](uint32_t i) {
    const uint32_t row = r.width.quotient(i);
    const int64_t column = i - row * r.width.d;
    const int64_t number = load_as<int64_t>(r.numbers, r.number_dtype, row * r.number_stride);
    T value = std::is_integral_v<T> ? T(0) : T(static_cast<Scalar<T>>(NAN));
    if (number >= 0 && number < r.count) value = read(r.table + (number * r.table_row + column * r.table_column));
    write(r.rows + (row * r.row_stride + column * r.column_stride), value);
  });
}

// Elements of tables by numbers of their own.
template <class T>
struct Picked {
  Loop<3> loop;  // result, numbers, column of a table
  const T* table;
  T* to;
  const void* numbers;
  DType number_dtype;
  int64_t step, count;  // of elements of a column
};

template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) read_elements(Picked<T> p) {
  for_elements(p.loop.total, [&](uint32_t i) {
    int64_t at[3];
    p.loop.locate(i, at);
    const int64_t number = load_as<int64_t>(p.numbers, p.number_dtype, at[1]);
    T value = std::is_integral_v<T> ? T(0) : static_cast<T>(NAN);
    if (number >= 0 && number < p.count) value = p.table[at[2] + number * p.step];
    p.to[at[0]] = value;
  });
}

// Rows are added into a table in an order that does not change: sorted by their numbers, equal ones by their places.
// Every thread sums a piece of that order in one column; sums that reach beyond a piece are kept apart and added up
// afterwards.
using Key = uint64_t;  // the number above, the row below
constexpr uint32_t kLeftOut = 0xffffffffu, kPiece = 64, kTogether = 8;

__device__ __forceinline__ uint32_t number_of(Key key) { return static_cast<uint32_t>(key >> 32); }

// The first i in [low, high) for which `before(i)` is false.
template <class F>
__device__ __forceinline__ uint32_t first_after(uint32_t low, uint32_t high, const F& before) {
#pragma unroll 1
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (before(middle)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

struct Chunk {
  Key keys[kThreads];
};

// Keys of the rows, each kThreads of them sorted. `skip`: a number to leave out.
__global__ void GPU_BOUNDS(kThreads, 4)
    sort_chunks(const void* numbers, DType dtype, int64_t stride, int64_t count, int64_t skip, Key* to, uint32_t rows) {
  GPU_SHARED(Chunk, chunk);
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  Key mine = ~Key{0};
  if (i < rows) {
    const int64_t number = load_as<int64_t>(numbers, dtype, i * stride);
    const bool kept = number >= 0 && number < count && number != skip;
    mine = (kept ? static_cast<Key>(number) : kLeftOut) << 32 | i;
  }
  chunk.keys[threadIdx.x] = mine;
  block_sync();
  uint32_t place = 0;
#pragma unroll 8
  for (unsigned k = 0; k < kThreads; k++) place += chunk.keys[k] < mine;
  if (i < rows) to[blockIdx.x * kThreads + place] = mine;
}

// Two neighbouring sorted runs to one: a key's place is its own and that which it would have in the other run.
__global__ void GPU_BOUNDS(kThreads, 4) merge_runs(const Key* from, Key* to, uint32_t rows, uint32_t run) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= rows) return;
  const Key mine = from[i];
  const uint32_t first = i & ~(2 * run - 1), other = (i & run) ? first : first + run;
  const uint32_t begin = other < rows ? other : rows;
  const uint32_t end = rows - begin < run ? rows : begin + run;
  const uint32_t place = first_after(begin, end, [&](uint32_t k) { return from[k] < mine; });
  to[first + (i & (run - 1)) + (place - begin)] = mine;
}

template <class T>
struct Scatter {
  Rows<T> r;
  const Key* keys;  // sorted
  T* parts;         // two per piece and column: of the run of a number that comes from before, of one that goes on
  uint32_t count, work;
};

template <class T>
__device__ __forceinline__ void put(const Scatter<T>& s, uint32_t number, uint32_t piece, int64_t column, T sum,
                                    bool from_before, bool goes_on) {
  if (number == kLeftOut) return;
  if (from_before || goes_on) {
    s.parts[(2 * static_cast<int64_t>(piece) + !from_before) * s.r.width.d + column] = sum;
  } else {
    s.r.table[number * s.r.table_row + column * s.r.table_column] = sum;
  }
}

template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) sum_pieces(Scatter<T> s) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= s.work) return;
  const uint32_t piece = s.r.width.quotient(i), begin = piece * kPiece;
  const uint32_t end = s.count - begin < kPiece ? s.count : begin + kPiece;
  const int64_t column = i - piece * s.r.width.d;
  uint32_t number = number_of(s.keys[begin]);
  bool from_before = begin > 0 && number_of(s.keys[begin - 1]) == number;
  T sum = 0;
#pragma unroll 1
  for (uint32_t at = begin; at < end; at += kTogether) {
    uint32_t numbers[kTogether];
    T values[kTogether];
#pragma unroll
    for (uint32_t k = 0; k < kTogether; k++) {  // all loads before the first store
      const Key key = s.keys[at + k < end ? at + k : end - 1];
      numbers[k] = number_of(key);
      values[k] = s.r.rows[static_cast<uint32_t>(key) * s.r.row_stride + column * s.r.column_stride];
    }
#pragma unroll
    for (uint32_t k = 0; k < kTogether; k++) {
      if (at + k >= end) continue;
      if (numbers[k] != number) {
        put(s, number, piece, column, sum, from_before, false);
        number = numbers[k], from_before = false, sum = 0;
      }
      sum += values[k];
    }
  }
  put(s, number, piece, column, sum, from_before, end < s.count && number_of(s.keys[end]) == number);
}

// The thread of the piece in which a run begins that goes on beyond it adds up the run's parts.
template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) add_parts(Scatter<T> s) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= s.work) return;
  const uint32_t piece = s.r.width.quotient(i), begin = piece * kPiece;
  if (s.count - begin <= kPiece) return;
  const uint32_t number = number_of(s.keys[begin + kPiece - 1]);
  if (number == kLeftOut || number_of(s.keys[begin + kPiece]) != number) return;
  if (begin > 0 && number_of(s.keys[begin - 1]) == number) return;
  const uint32_t end = first_after(begin + kPiece, s.count, [&](uint32_t k) { return number_of(s.keys[k]) <= number; });
  const int64_t column = i - piece * s.r.width.d, width = s.r.width.d;
  const uint32_t last = (end - 1) / kPiece;  // where the run ends
  T sum = s.parts[(2 * static_cast<int64_t>(piece) + 1) * width + column];
#pragma unroll 8
  for (uint32_t p = piece + 1; p <= last; p++) sum += s.parts[2 * static_cast<int64_t>(p) * width + column];
  s.r.table[number * s.r.table_row + column * s.r.table_column] = sum;
}

template <class T>
Rows<T> rows_of(const char* op, const View& rows, const View& table, const View& numbers) {
  const int64_t total = rows.shape[0] * rows.shape[1];
  if (total > INT32_MAX) fail(op, "arrays on a GPU have at most 2^31 - 1 elements", std::to_string(total));
  constexpr int lanes = kLanes<T>;
  return {reinterpret_cast<T*>(rows.as<Scalar<T>>()),
          reinterpret_cast<T*>(table.as<Scalar<T>>()),
          numbers.data,
          numbers.dtype,
          rows.shape[1] / lanes,
          static_cast<uint32_t>(total / lanes),
          rows.stride[0] / lanes,
          rows.stride[1],
          table.stride[0] / lanes,
          table.stride[1],
          numbers.stride[0],
          table.shape[0]};
}

// Tables (b x count x d), elements and their numbers (b x m x d), any strides. A thread scatters a whole column, so
// that the order is always that of the rows.
template <class T>
struct Elements {
  const T* rows;
  T* table;
  const void* numbers;
  DType number_dtype;
  Divisor width;
  uint32_t columns;  // of all tables
  int64_t row_stride[3], table_stride[3], number_stride[3], rows_each, count;
};

template <class R, class T>
__global__ void GPU_BOUNDS(kThreads, 4) scatter_columns(Elements<T> e) {
  for_elements(e.columns, [&](uint32_t i) {
    const uint32_t b = e.width.quotient(i);
    const int64_t column = i - b * e.width.d;
    T* to = e.table + b * e.table_stride[0] + column * e.table_stride[2];
    const T* from = e.rows + b * e.row_stride[0] + column * e.row_stride[2];
    const int64_t first = b * e.number_stride[0] + column * e.number_stride[2];
    bool fits = true;
    for (int64_t m = 0; m < e.rows_each; m++) {
      const int64_t number = load_as<int64_t>(e.numbers, e.number_dtype, first + m * e.number_stride[1]);
      if (number >= 0 && number < e.count) {
        T& element = to[number * e.table_stride[1]];
        element = device::combined<R>(element, from[m * e.row_stride[1]]);
      } else {
        fits = false;
      }
    }
    const T missing = std::is_integral_v<T> ? T(0) : static_cast<T>(NAN);
    for (int64_t k = 0; !fits && k < e.count; k++) to[k * e.table_stride[1]] = missing;
  });
}

template <class T>
void scatter_elements(const scatter_args& c) {
  const View &out = c.out.table, &rows = c.in.rows, &numbers = c.in.numbers;
  const int64_t columns = out.shape[0] * out.shape[2];
  if (columns > INT32_MAX) fail("scatter", "tables on a GPU have at most 2^31 - 1 columns", std::to_string(columns));
  if (columns == 0) return;
  Elements<T> e = {rows.as<T>(),  out.as<T>(),  numbers.data,
                   numbers.dtype, out.shape[2], static_cast<uint32_t>(columns)};
  for (int i = 0; i < 3; i++)
    e.row_stride[i] = rows.stride[i], e.table_stride[i] = out.stride[i], e.number_stride[i] = numbers.stride[i];
  e.rows_each = rows.shape[1], e.count = out.shape[1];
  device::with_reduction(c.attr.reduce, [&](auto r) {
    launch(scatter_columns<decltype(r), T>, grid_for(e.columns), kThreads, 0, stream_of(c), e);
  });
}

template <class T>
void gather_as(const gather_rows_args& c) {
  Rows<T> r = rows_of<T>("gather_rows", c.out.rows, c.in.table, c.in.numbers);
  if (r.total) launch(read_rows<T>, grid_for(r.total), kThreads, 0, stream_of(c), r);
}

template <class T>
void scatter_as(const scatter_add_rows_args& c) {
  const char* op = "scatter_add_rows";
  Scatter<T> s = {};
  s.r = rows_of<T>(op, c.in.rows, c.out.table, c.in.numbers);
  if (s.r.total == 0) return;
  if (s.r.count > INT32_MAX) fail(op, "a table has at most 2^31 - 1 rows", std::to_string(s.r.count));
  s.count = static_cast<uint32_t>(c.in.rows.shape[0]);
  const uint32_t pieces = (s.count + kPiece - 1) / kPiece;
  s.work = pieces * s.r.width.d;
  Key* keys = static_cast<Key*>(c.exec->scratch(0, 2 * sizeof(Key) * s.count));
  Key* sorted = keys + s.count;
  s.parts = static_cast<T*>(c.exec->scratch(1, 2 * sizeof(T) * s.work));
  const gpuStream_t stream = stream_of(c);
  auto blocks = [](uint32_t n) { return dim3((n + kThreads - 1) / kThreads); };
  launch(sort_chunks, blocks(s.count), kThreads, 0, stream, s.r.numbers, s.r.number_dtype, s.r.number_stride, s.r.count,
         c.attr.skip, sorted, s.count);
  for (uint32_t run = kThreads; run < s.count; run *= 2) {
    std::swap(keys, sorted);
    launch(merge_runs, blocks(s.count), kThreads, 0, stream, keys, sorted, s.count, run);
  }
  s.keys = sorted;
  launch(sum_pieces<T>, blocks(s.work), kThreads, 0, stream, s);
  if (pieces > 1) launch(add_parts<T>, blocks(s.work), kThreads, 0, stream, s);
}

}  // namespace

void clear(const View& v, const Exec* exec);

// Table (N, D) and numbers (M) to (M, D).
void gather_rows(const gather_rows_args& c) {
  if (quads(c.in.table, 1) && quads(c.out.rows, 1)) return gather_as<Quad>(c);
  with_type<gather_rows_args::In::table_dtypes>(c.in.table.dtype, [&](auto t) { gather_as<decltype(t)>(c); });
}

// Elements of tables (B, N, D) by numbers (B, M, D) to (B, M, D); of one outside NaN or 0.
void gather(const gather_args& c) {
  View column = c.in.x;  // for every number
  column.shape[1] = c.out.y.shape[1], column.stride[1] = 0;
  with_type<gather_args::In::x_dtypes>(c.in.x.dtype, [&](auto t) {
    using T = decltype(t);
    const View &x = c.in.x, &numbers = c.in.numbers;
    const Picked<T> p = {loop_over("gather", {&c.out.y, &numbers, &column}),
                         x.as<const T>(),
                         c.out.y.as<T>(),
                         numbers.data,
                         numbers.dtype,
                         x.stride[1],
                         x.shape[1]};
    if (p.loop.total) launch(read_elements<T>, grid_for(p.loop.total), kThreads, 0, stream_of(c), p);
  });
}

// Rows (M, D) and numbers (M) to a table (N, D) that holds their sums; those of number `skip` and those outside of the
// table are left out.
void scatter_add_rows(const scatter_add_rows_args& c) {
  clear(c.out.table, c.exec);
  with_type<scatter_add_rows_args::In::rows_dtypes>(c.in.rows.dtype, [&](auto t) { scatter_as<decltype(t)>(c); });
}

// Elements (B, M, D) and numbers (B, M, D) into tables (B, N, D).
void scatter(const scatter_args& c) {
  with_type<scatter_args::In::rows_dtypes>(c.in.rows.dtype, [&](auto t) { scatter_elements<decltype(t)>(c); });
}

}  // namespace needle::gpu
