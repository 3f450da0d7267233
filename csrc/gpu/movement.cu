// Kernels that only move elements: copies between any strides and dtypes, fills.
#include "gpu/quad.cuh"
#include "gpu/strided.cuh"

namespace needle::gpu {
namespace {

struct Copy {
  Loop<2> loop;  // output, input
  void *out, *in;
  DType to, from;
};

// Loads of a thread under way while it copies, and blocks on a unit.
constexpr int kAtOnce = 4, kCopies = 8;

// Bits as they are.
template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) copy_bits(Copy c) {
  const uint32_t total = static_cast<uint32_t>(c.loop.total), threads = gridDim.x * kThreads;
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < total; i += kAtOnce * threads) {
    T element[kAtOnce];
    int64_t at[kAtOnce][2];
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; k++) {
      if (i + k * threads >= total) break;
      c.loop.locate(i + k * threads, at[k]);
      element[k] = read(static_cast<const T*>(c.in) + at[k][1]);
    }
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; k++)
      if (i + k * threads < total) write(static_cast<T*>(c.out) + at[k][0], element[k]);
  }
}

// Through T, which holds every value of the input's dtype.
template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) copy_values(Copy c) {
  for_elements(c.loop.total, [&](uint32_t i) {
    int64_t at[2];
    c.loop.locate(i, at);
    store_as<T>(c.out, c.to, at[0], load_as<T>(c.in, c.from, at[1]));
  });
}

// What copies from one place to another have in common: `rows` x `columns` matrices, contiguous along rows in the
// input and along columns in the output, at the places of a loop.
struct Transpose {
  Loop<2> batch;  // output, input
  const uint32_t* in;
  uint32_t* out;
  int64_t in_column, out_row;
  int rows, columns, row_tiles, tiles;  // the output is rows x columns
};

constexpr int kTile = 32;

__global__ void GPU_BOUNDS(kThreads, 4) copy_transposed(Transpose t) {
  struct Tile {
    uint32_t value[kTile][kTile + 1];
  };
  GPU_SHARED(Tile, tile);
  int64_t at[2];
  t.batch.locate(blockIdx.x / t.tiles, at);
  const int place = blockIdx.x % t.tiles, x = threadIdx.x % kTile, y = threadIdx.x / kTile;
  const int row = place % t.row_tiles * kTile, column = place / t.row_tiles * kTile;
  for (int j = y; j < kTile && column + j < t.columns; j += kThreads / kTile)
    if (row + x < t.rows) tile.value[j][x] = t.in[at[1] + row + x + (column + j) * t.in_column];
  block_sync();
  for (int j = y; j < kTile && row + j < t.rows; j += kThreads / kTile)
    if (column + x < t.columns) t.out[at[0] + (row + j) * t.out_row + column + x] = tile.value[x][j];
}

// Whether the output's rows are columns of the input; if so, that copy.
bool transposed(const copy_args& call, const Loop<2>& loop) {
  const int last = loop.rank - 1;
  if (loop.rank < 2 || loop.stride[0][last] != 1 || loop.shape[last] < kTile / 2) return false;
  int other = -1;
  for (int d = 0; d < last; d++)
    if (loop.stride[1][d] == 1 && loop.shape[d] >= kTile / 2) other = d;
  if (other < 0) return false;
  Transpose t = {};
  for (int d = 0; d < last; d++) {
    int64_t strides[2] = {loop.stride[0][d], loop.stride[1][d]};
    if (d != other) t.batch.add(loop.shape[d], strides);
  }
  t.batch.finish("copy");
  t.in = call.in.x.as<uint32_t>(), t.out = call.out.y.as<uint32_t>();
  t.rows = static_cast<int>(loop.shape[other]), t.columns = static_cast<int>(loop.shape[last]);
  t.in_column = loop.stride[1][last], t.out_row = loop.stride[0][other];
  t.row_tiles = (t.rows + kTile - 1) / kTile;
  t.tiles = t.row_tiles * ((t.columns + kTile - 1) / kTile);
  if (t.batch.total * t.tiles > INT32_MAX) return false;
  launch(copy_transposed, dim3(static_cast<unsigned>(t.batch.total * t.tiles)), kThreads, 0, stream_of(call), t);
  return true;
}

template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) fill_bits(Loop<1> loop, T* out, T value) {
  for_elements(loop.total, [&](uint32_t i) {
    int64_t at[1];
    loop.locate(i, at);
    write(out + at[0], value);
  });
}

void fill_view(const View& v, double value, gpuStream_t stream) {
  const View* views[] = {&v};
  Loop<1> loop = loop_over("fill", views);
  if (loop.total == 0) return;
  with_type<fill_args::Out::y_dtypes>(v.dtype, [&](auto t) {
    const auto element = from_double<decltype(t)>(value);
    using Bits = BitsOf<sizeof(t)>;
    Bits bits;
    std::memcpy(&bits, &element, sizeof bits);
    constexpr int lanes = 16 / sizeof(t);
    if (loop.groups(0, lanes) && loop.shape[loop.rank - 1] % lanes == 0 && aligned(v.data)) {
      loop.group(lanes);
      Bits same[lanes];
      for (Bits& b : same) b = bits;
      Quad value;
      std::memcpy(&value, same, sizeof value);
      return launch(fill_bits<Quad>, grid_for(loop.total, kCopies), kThreads, 0, stream, loop,
                    reinterpret_cast<Quad*>(v.data), value);
    }
    launch(fill_bits<Bits>, grid_for(loop.total), kThreads, 0, stream, loop, v.as<Bits>(), bits);
  });
}

}  // namespace

void copy(const copy_args& call) {
  const View &y = call.out.y, &x = call.in.x, *views[] = {&y, &x};
  Copy c = {loop_over("copy", views), y.data, x.data, y.dtype, x.dtype};
  if (c.loop.total == 0) return;
  const gpuStream_t stream = stream_of(call);
  with_type<copy_args::In::x_dtypes>(c.from, [&](auto t) {
    using T = decltype(t);
    if (c.to != c.from) {
      auto kernel = copy_values<std::conditional_t<std::is_integral_v<T>, int64_t, T>>;
      return launch(kernel, grid_for(c.loop.total), kThreads, 0, stream, c);
    }
    // Neighbours on both sides move together, 16 bytes at a time.
    constexpr int lanes = 16 / sizeof(T);
    auto whole = [&](int k) { return c.loop.groups(k, lanes) && c.loop.shape[c.loop.rank - 1] % lanes == 0; };
    if (whole(0) && whole(1) && aligned(c.out) && aligned(c.in)) {
      c.loop.group(lanes);
      return launch(copy_bits<Quad>, grid_for(c.loop.total, kCopies), kThreads, 0, stream, c);
    }
    if (sizeof(T) == 4 && transposed(call, c.loop)) return;
    launch(copy_bits<BitsOf<sizeof(T)>>, grid_for(c.loop.total, kCopies), kThreads, 0, stream, c);
  });
}

void fill(const fill_args& c) { fill_view(c.out.y, c.attr.value, stream_of(c)); }

void clear(const View& v, const Exec* exec) { fill_view(v, 0, static_cast<gpuStream_t>(exec->stream)); }

}  // namespace needle::gpu
