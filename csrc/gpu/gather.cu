// Rows of a table by their numbers, and the reverse: rows added into a table.
#include "gpu/strided.cuh"

namespace needle::gpu {
namespace {

// Rows (m x d) and the table (count x d), any strides.
template <class T>
struct Rows {
  T* rows;
  T* table;
  const void* numbers;
  DType number_dtype;
  Divider width;
  uint32_t total;
  int64_t row_stride, column_stride, table_row, table_column, number_stride, count, skip;
};

template <class T>
__device__ __forceinline__ T missing() {
  if constexpr (std::is_integral<T>::value) {
    return T(0);
  } else {
    return static_cast<T>(NAN);
  }
}

// What a row outside of the table is made of is NaN or 0: a kernel cannot raise.
template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) read_rows(Rows<T> r) {
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < r.total; i += gridDim.x * kThreads) {
    const uint32_t row = r.width.divide(i);
    const int64_t column = i - row * r.width.size;
    const int64_t number = load_as<int64_t>(r.numbers, r.number_dtype, row * r.number_stride);
    T value = missing<T>();
    if (number >= 0 && number < r.count) value = r.table[number * r.table_row + column * r.table_column];
    r.rows[row * r.row_stride + column * r.column_stride] = value;
  }
}

// Sums in the order in which threads come: on hardware the last bits of a float may differ from run to run.
template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) add_rows(Rows<T> r) {
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < r.total; i += gridDim.x * kThreads) {
    const uint32_t row = r.width.divide(i);
    const int64_t column = i - row * r.width.size;
    const int64_t number = load_as<int64_t>(r.numbers, r.number_dtype, row * r.number_stride);
    if (number < 0 || number >= r.count || number == r.skip) continue;
    atomic_add(r.table + number * r.table_row + column * r.table_column,
               r.rows[row * r.row_stride + column * r.column_stride]);
  }
}

template <class T>
Rows<T> rows_of(const char* op, const View& rows, const View& table, const View& numbers) {
  const int64_t total = rows.shape[0] * rows.shape[1];
  if (total > INT32_MAX) fail(op, "arrays on a GPU have at most 2^31 - 1 elements", std::to_string(total));
  return {rows.as<T>(),
          table.as<T>(),
          numbers.data,
          numbers.dtype,
          divider(rows.shape[1] ? rows.shape[1] : 1),
          static_cast<uint32_t>(total),
          rows.stride[0],
          rows.stride[1],
          table.stride[0],
          table.stride[1],
          numbers.stride[0],
          table.shape[0],
          0};
}

template <class T>
void gather_as(const Call& c) {
  Rows<T> r = rows_of<T>("gather_rows", c.out[0], c.in[0], c.in[1]);
  if (r.total) launch(read_rows<T>, grid_for(r.total), kThreads, 0, stream_of(c), r);
}

template <class T>
void scatter_as(const Call& c) {
  Rows<T> r = rows_of<T>("scatter_add_rows", c.in[0], c.out[0], c.in[1]);
  r.skip = c.i(0);
  if (r.total) launch(add_rows<T>, grid_for(r.total), kThreads, 0, stream_of(c), r);
}

}  // namespace

void fill(const Call&);

// Table (N, D) and numbers (M) to (M, D).
void gather_rows(const Call& c) {
  switch (c.in[0].dtype) {
    case DType::f32:
      return gather_as<float>(c);
    case DType::f64:
      return gather_as<double>(c);
    case DType::i32:
      return gather_as<int32_t>(c);
    case DType::i64:
      return gather_as<int64_t>(c);
    case DType::b8:
      return;
  }
}

// Rows (M, D) and numbers (M) to a table (N, D) that holds their sums; those of number `skip` and those outside of the
// table are left out.
void scatter_add_rows(const Call& c) {
  const double zero = 0;
  fill({c.out, nullptr, &zero, 1, 0, c.exec});
  c.in[0].dtype == DType::f32 ? scatter_as<float>(c) : scatter_as<double>(c);
}

}  // namespace needle::gpu
