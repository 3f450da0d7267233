// y = act(x W^T + b): x (M, K), W (N, K) as torch stores it or any strides, b (N) or none; float32, plain FMA.
// A square-tile kernel for most sizes, and for few rows one that reads W once with a wave per four columns.
#include "core/call.h"
#include "gpu/portable.cuh"

namespace needle::gpu {
namespace {

// Element (i, k) lies at data[i * row + k * depth].
struct Operand {
  const float* data;
  int64_t row, depth;
  bool by_row;  // neighbours in memory are rows, not k
  bool wide;    // four neighbours from a multiple of four on may be read as one float4
};

struct Problem {
  Operand x, w;
  const float* bias;
  int64_t bias_stride;
  float* out;
  int64_t out_row, out_column;
  bool out_wide;
  int m, n, k, activation;
  float alpha;
};

__device__ __forceinline__ float add_bias(const Problem& p, float v, int column) {
  return p.bias ? v + p.bias[column * p.bias_stride] : v;
}

__device__ __forceinline__ float finish(const Problem& p, float v, int column) {
  v = add_bias(p, v, column);
  return p.activation == kRelu ? device::relu_map::apply(v, v, v) : v;
}

__device__ __forceinline__ float4 load4(const Operand& a, int i, int k, int rows, int depth) {
  float4 v = make_float4(0, 0, 0, 0);
  int left = a.by_row ? rows - i : depth - k;
  if (i >= rows || k >= depth) return v;
  const float* p = a.data + i * a.row + k * a.depth;
  if (a.wide && left >= 4) return read4(p);
  int64_t step = a.by_row ? a.row : a.depth;
  v.x = p[0];
  if (left > 1) v.y = p[step];
  if (left > 2) v.z = p[2 * step];
  if (left > 3) v.w = p[3 * step];
  return v;
}

// One thread's share of a ROWS x DEPTH tile, held in registers between its load and its store to shared memory.
template <int ROWS, int DEPTH, int THREADS>
struct Share {
  static constexpr int N = ROWS * DEPTH / 4 / THREADS;
  static_assert(N * THREADS * 4 == ROWS * DEPTH, "every thread moves the same number of float4");
  float4 v[N];

  __device__ __forceinline__ void load(const Operand& a, int i0, int k0, int rows, int depth) {
#pragma unroll
    for (int s = 0; s < N; s++) {
      int q = threadIdx.x + s * THREADS;
      int i = a.by_row ? q % (ROWS / 4) * 4 : q / (DEPTH / 4);
      int k = a.by_row ? q / (ROWS / 4) : q % (DEPTH / 4) * 4;
      v[s] = load4(a, i0 + i, k0 + k, rows, depth);
    }
  }
  __device__ __forceinline__ void store(const Operand& a, float (&tile)[DEPTH][ROWS + 4]) const {
#pragma unroll
    for (int s = 0; s < N; s++) {
      int q = threadIdx.x + s * THREADS;
      if (a.by_row) {
        write4(&tile[q / (ROWS / 4)][q % (ROWS / 4) * 4], v[s]);
      } else {
        int i = q / (DEPTH / 4), k = q % (DEPTH / 4) * 4;
        tile[k][i] = v[s].x;
        tile[k + 1][i] = v[s].y;
        tile[k + 2][i] = v[s].z;
        tile[k + 3][i] = v[s].w;
      }
    }
  }
};

template <int C, int TILE>
__device__ __forceinline__ void read_chunks(float (&to)[4 * C], const float* line, int first) {
#pragma unroll
  for (int c = 0; c < C; c++) {
    float4 v = read4(line + first + c * (TILE / C));
    to[4 * c] = v.x;
    to[4 * c + 1] = v.y;
    to[4 * c + 2] = v.z;
    to[4 * c + 3] = v.w;
  }
}

// A block makes BM x BN outputs, a thread RM x CN chunks of 4 x 4 that lie BM/RM and BN/CN apart, so that neighbouring
// threads read neighbouring float4 of shared memory. Two tiles in turn: one barrier a step.
template <int BM, int BN, int BK, int RM, int CN>
__global__ void GPU_BOUNDS(BM / RM / 4 * (BN / CN / 4), BM == 128 ? 2 : 3) linear_tile(Problem p) {
  constexpr int kColumns = BN / CN / 4, kThreads = BM / RM / 4 * kColumns;
  struct alignas(16) Tiles {
    float x[2][BK][BM + 4],
        w[2][BK][BN + 4];  // +4 keeps float4 alignment and spreads the transposing stores over banks
  };
  GPU_SHARED(Tiles, tiles);
  int blocks_n = (p.n + BN - 1) / BN;
  int m0 = blockIdx.x / blocks_n * BM, n0 = blockIdx.x % blocks_n * BN;
  int tm = threadIdx.x / kColumns * 4, tn = threadIdx.x % kColumns * 4;

  float acc[4 * RM][4 * CN] = {};
  Share<BM, BK, kThreads> x;
  Share<BN, BK, kThreads> w;
  x.load(p.x, m0, 0, p.m, p.k);
  w.load(p.w, n0, 0, p.n, p.k);
  int turn = 0;
  for (int64_t k0 = 0; k0 < p.k; k0 += BK, turn ^= 1) {
    x.store(p.x, tiles.x[turn]);
    w.store(p.w, tiles.w[turn]);
    block_sync();
    if (k0 + BK < p.k) {
      x.load(p.x, m0, static_cast<int>(k0) + BK, p.m, p.k);
      w.load(p.w, n0, static_cast<int>(k0) + BK, p.n, p.k);
    }
#pragma unroll 4
    for (int k = 0; k < BK; k++) {
      float a[4 * RM], b[4 * CN];
      read_chunks<RM, BM>(a, tiles.x[turn][k], tm);
      read_chunks<CN, BN>(b, tiles.w[turn][k], tn);
#pragma unroll
      for (int i = 0; i < 4 * RM; i++) {
#pragma unroll
        for (int j = 0; j < 4 * CN; j++) acc[i][j] += a[i] * b[j];
      }
    }
  }

#pragma unroll
  for (int i = 0; i < 4 * RM; i++) {
    int row = m0 + tm + i / 4 * (BM / RM) + i % 4;
    if (row >= p.m) continue;
#pragma unroll
    for (int c = 0; c < CN; c++) {
      int column = n0 + tn + c * (BN / CN);
      float* out = p.out + row * p.out_row + column * p.out_column;
      if (p.out_wide && column + 4 <= p.n) {
        write4(out, make_float4(finish(p, acc[i][4 * c], column), finish(p, acc[i][4 * c + 1], column + 1),
                                finish(p, acc[i][4 * c + 2], column + 2), finish(p, acc[i][4 * c + 3], column + 3)));
        continue;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (column + j < p.n) out[j * p.out_column] = finish(p, acc[i][4 * c + j], column + j);
      }
    }
  }
  if (p.activation <= kRelu) return;
  // The others visit the thread's outputs again: called among 64 live sums they would spill registers.
#pragma unroll 1
  for (int i = 0; i < 16 * RM * CN; i++) {
    int row = m0 + tm + i / (16 * CN) * (BM / RM) + i / (4 * CN) % 4, column = n0 + tn + i / 4 % CN * (BN / CN) + i % 4;
    if (row >= p.m || column >= p.n) continue;
    float* out = p.out + row * p.out_row + column * p.out_column;
    *out = device::activate(p.activation, p.alpha, *out);
  }
}

constexpr int kWaves = 4, kWaveColumns = 4;

template <bool WIDE>
__device__ __forceinline__ void load_lane(float (&to)[WIDE ? 4 : 1], const Operand& a, int i, int k) {
  const float* p = a.data + i * a.row + k * a.depth;
  if constexpr (WIDE) {
    float4 v = read4(p);
    to[0] = v.x;
    to[1] = v.y;
    to[2] = v.z;
    to[3] = v.w;
  } else {
    to[0] = *p;
  }
}

// A wave makes kWaveColumns columns of up to ROWS rows: its lanes split k, then add up. Rows and columns past the end
// read the last one again instead of branching.
template <int ROWS, bool WIDE>
__global__ void GPU_BOUNDS(kWaves* WAVE, 2) linear_rows(Problem p) {
  constexpr int V = WIDE ? 4 : 1;
  int64_t first = (static_cast<int64_t>(blockIdx.x) * kWaves + threadIdx.x / WAVE) * kWaveColumns;
  if (first >= p.n) return;  // the whole wave leaves
  int n0 = static_cast<int>(first);
  float acc[ROWS][kWaveColumns] = {};
#pragma unroll 1
  for (int64_t k = lane_id() * V; k < p.k; k += WAVE * V) {
    float x[ROWS][V], w[V];
#pragma unroll
    for (int i = 0; i < ROWS; i++) load_lane<WIDE>(x[i], p.x, i < p.m ? i : p.m - 1, static_cast<int>(k));
#pragma unroll
    for (int c = 0; c < kWaveColumns; c++) {
      load_lane<WIDE>(w, p.w, n0 + c < p.n ? n0 + c : p.n - 1, static_cast<int>(k));
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int v = 0; v < V; v++) acc[i][c] += x[i][v] * w[v];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
#pragma unroll
    for (int c = 0; c < kWaveColumns; c++) {
      float sum = wave_sum(acc[i][c]);
      if (lane_id() == i * kWaveColumns + c && i < p.m && n0 + c < p.n) {
        p.out[i * p.out_row + (n0 + c) * p.out_column] =
            device::activate(p.activation, p.alpha, add_bias(p, sum, n0 + c));
      }
    }
  }
}
static_assert(8 * kWaveColumns <= WAVE, "each lane writes at most one output");

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

Operand operand(const View& v) {
  bool by_row = v.stride[0] == 1 && v.stride[1] != 1;
  int64_t near = v.stride[by_row ? 0 : 1], far = v.stride[by_row ? 1 : 0];
  return {v.as<float>(), v.stride[0], v.stride[1], by_row, near == 1 && far % 4 == 0 && aligned(v.data)};
}

template <int BM, int BN, int BK, int RM, int CN>
void launch_tile(const Problem& p, gpuStream_t stream) {
  int64_t blocks = (static_cast<int64_t>(p.m) + BM - 1) / BM * ((static_cast<int64_t>(p.n) + BN - 1) / BN);
  if (blocks > INT32_MAX) fail("linear", "the output is at most 2^31 tiles", std::to_string(blocks));
  launch(linear_tile<BM, BN, BK, RM, CN>, dim3(static_cast<unsigned>(blocks)), BM / RM / 4 * (BN / CN / 4), 0, stream,
         p);
}

template <int ROWS>
void launch_rows(const Problem& p, gpuStream_t stream) {
  unsigned grid =
      static_cast<unsigned>((static_cast<int64_t>(p.n) + kWaves * kWaveColumns - 1) / (kWaves * kWaveColumns));
  bool wide = p.x.wide && p.w.wide && !p.x.by_row && !p.w.by_row && p.k % 4 == 0;
  launch(wide ? linear_rows<ROWS, true> : linear_rows<ROWS, false>, dim3(grid), kWaves * WAVE, 0, stream, p);
}

std::string shape(const View& v) {
  std::string s = "(";
  for (int i = 0; i < v.rank; i++) s += (i ? ", " : "") + std::to_string(v.shape[i]);
  return s + ")";
}

void validate(const Call& call) {
  const View &x = call.in[0], &w = call.in[1], &out = call.out[0];
  bool has_bias = call.i(2) != 0;
  if (call.n_in != 2 + has_bias)
    fail("linear", "inputs are x, w" + std::string(has_bias ? " and a bias" : ""),
         std::to_string(call.n_in) + " inputs");
  for (int i = 0; i < call.n_in; i++) {
    if (call.in[i].dtype != DType::f32)
      fail("linear", "inputs are float32", "another dtype for input " + std::to_string(i));
  }
  if (x.rank != 2) fail("linear", "x expects rank 2", shape(x));
  if (w.rank != 2 || w.shape[1] != x.shape[1])
    fail("linear", "w expects shape (N, " + std::to_string(x.shape[1]) + ")", shape(w));
  if (out.dtype != DType::f32 || out.rank != 2 || out.shape[0] != x.shape[0] || out.shape[1] != w.shape[0]) {
    fail("linear",
         "the output expects float32 of (" + std::to_string(x.shape[0]) + ", " + std::to_string(w.shape[0]) + ")",
         shape(out));
  }
  if (has_bias && (call.in[2].rank != 1 || call.in[2].shape[0] != w.shape[0])) {
    fail("linear", "the bias expects shape (" + std::to_string(w.shape[0]) + ")", shape(call.in[2]));
  }
  if (call.i(0) < kNone || call.i(0) > kGeluTanh)
    fail("linear", "activation is one of math/maps.h", std::to_string(call.i(0)));
  for (int64_t extent : {x.shape[0], x.shape[1], w.shape[0]}) {
    if (extent > INT32_MAX - 256) fail("linear", "extents are below 2^31 - 256", std::to_string(extent));
  }
}

}  // namespace

void linear(const Call& call) {
  validate(call);
  const View &x = call.in[0], &w = call.in[1], &out = call.out[0];
  Problem p = {};
  p.x = operand(x);
  p.w = operand(w);
  if (call.i(2)) {
    p.bias = call.in[2].as<float>();
    p.bias_stride = call.in[2].stride[0];
  }
  p.out = out.as<float>();
  p.out_row = out.stride[0];
  p.out_column = out.stride[1];
  p.out_wide = p.out_column == 1 && p.out_row % 4 == 0 && aligned(p.out);
  p.m = static_cast<int>(x.shape[0]);
  p.k = static_cast<int>(x.shape[1]);
  p.n = static_cast<int>(w.shape[0]);
  p.activation = static_cast<int>(call.i(0));
  p.alpha = call.f(1);
  if (p.m == 0 || p.n == 0) return;

  gpuStream_t stream = static_cast<gpuStream_t>(call.exec->stream);
  // Lanes along k would read a W that is contiguous along n in single floats; the tile kernel reads it whole.
  if (p.m <= 8 && !p.w.by_row) {
    if (p.m == 1) return launch_rows<1>(p, stream);
    if (p.m <= 4) return launch_rows<4>(p, stream);
    return launch_rows<8>(p, stream);
  }
  int64_t large_tiles = ((p.m + 127LL) / 128) * ((p.n + 127LL) / 128);
  if (large_tiles >= device_units()) return launch_tile<128, 128, 8, 2, 2>(p, stream);
  launch_tile<64, 64, 16, 2, 1>(p, stream);
}

}  // namespace needle::gpu
