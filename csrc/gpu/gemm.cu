// The tile kernels under every product and convolution: plain FMA for exact float32, matrix units for less.
#include "gpu/gemm.cuh"
#include "gpu/mma.cuh"

namespace needle::gpu {
namespace {

struct Offsets {
  int64_t a = 0, b = 0, out = 0, residual = 0, channel = 0;
};

__device__ __forceinline__ Offsets batch_offsets(const Batch& batch, unsigned index) {
  Offsets o;
  o.channel = index * batch.channels;
  for (int d = batch.rank - 1; d >= 0; d--) {
    int64_t digit = index % static_cast<unsigned>(batch.shape[d]);
    index /= static_cast<unsigned>(batch.shape[d]);
    o.a += digit * batch.a[d];
    o.b += digit * batch.b[d];
    o.out += digit * batch.out[d];
    o.residual += digit * batch.residual[d];
  }
  return o;
}

template <bool IMAGE>
__device__ __forceinline__ void split(const Digits& d, int i, int (&digit)[3]) {
  if constexpr (IMAGE) {
    int rest = d.inner.quotient(i);
    digit[2] = i - rest * static_cast<int>(d.inner.d);
    digit[0] = d.middle.quotient(rest);
    digit[1] = rest - digit[0] * static_cast<int>(d.middle.d);
  } else {
    digit[0] = i;
  }
}

template <bool IMAGE>
__device__ __forceinline__ int64_t offset(const Digits& digits, const int (&stride)[3], int i) {
  int d[3];
  split<IMAGE>(digits, i, d);
  if constexpr (!IMAGE) return static_cast<int64_t>(d[0]) * stride[0];
  return d[0] * stride[0] + d[1] * stride[1] + d[2] * stride[2];
}

constexpr int kNowhere = INT32_MIN;   // `at` of what lies past a matrix's end: no offset of an operand
constexpr int kOutside = -(1 << 29);  // the place of what lies past an image's end: sums of such places fit an int

template <bool IMAGE>
__device__ __forceinline__ Line line(const Axis& axis, int i, int size) {
  if (i >= size) return {IMAGE ? 0 : kNowhere, kOutside, kOutside};
  int d[3];
  split<IMAGE>(axis.digits, i, d);
  if constexpr (!IMAGE) return {d[0] * axis.stride[0], 0, 0};
  return {d[0] * axis.stride[0] + d[1] * axis.stride[1] + d[2] * axis.stride[2],
          d[0] * axis.y_step[0] + d[1] * axis.y_step[1], d[1] * axis.x_step[0] + d[2] * axis.x_step[1]};
}

template <bool IMAGE>
__device__ __forceinline__ bool inside(const Operand& a, const Line& row, const Line& k) {
  if constexpr (!IMAGE) return row.at != kNowhere && k.at != kNowhere;
  return static_cast<unsigned>(row.y + k.y) < static_cast<unsigned>(a.height) &&
         static_cast<unsigned>(row.x + k.x) < static_cast<unsigned>(a.width);
}

// One thread's share of a ROWS x DEPTH tile, held in registers between its load and its store to shared memory: N times
// four elements. Those of a `wide` operand are neighbours; else neighbouring threads have neighbouring elements. The
// rows' places are found once, those of k with every step.
template <int ROWS, int DEPTH, int THREADS, bool IMAGE>
struct Share {
  static constexpr int N = ROWS * DEPTH / 4 / THREADS;
  static_assert(N * THREADS * 4 == ROWS * DEPTH && THREADS % ROWS == 0, "quads shared out evenly");
  int row0, k0;  // of the first element in the tile
  Line rows[N];
  float v[N][4];

  // From the first element to element j of quad s.
  __device__ static __forceinline__ int rows_on(const Operand& a, int s, int j) {
    return a.by_row ? (a.wide ? j : 0) : s * (THREADS / (DEPTH / 4));
  }
  __device__ static __forceinline__ int depth_on(const Operand& a, int s, int j) {
    if (a.by_row) return a.wide ? s * (THREADS / (ROWS / 4)) : (4 * s + j) * (THREADS / ROWS);
    return j * (a.wide ? 1 : DEPTH / 4);
  }
  __device__ __forceinline__ void start(const Operand& a, int i0, int m) {
    int along = a.by_row ? ROWS : DEPTH, units = a.wide || !a.by_row ? along / 4 : along;
    int near = threadIdx.x % units * (a.wide ? 4 : 1), far = threadIdx.x / units;
    row0 = a.by_row ? near : far;
    k0 = a.by_row ? far : near;
#pragma unroll
    for (int s = 0; s < N; s++) {
      rows[s] = line<IMAGE>(a.row, i0 + row0 + rows_on(a, s, 0), m);
      if constexpr (IMAGE) rows[s].y += a.y, rows[s].x += a.x;
    }
  }
  __device__ __forceinline__ void load(const Operand& a, const float* data, int first, int depth) {
#pragma unroll
    for (int s = 0; s < N; s++) {
      if (a.wide) {
        take4(v[s], a, data, rows[s], line<IMAGE>(a.depth, first + k0 + depth_on(a, s, 0), depth));
      } else {
#pragma unroll
        for (int j = 0; j < 4; j++)
          v[s][j] = take(a, data, rows[s], line<IMAGE>(a.depth, first + k0 + depth_on(a, s, j), depth));
      }
    }
  }
  __device__ static __forceinline__ float take(const Operand& a, const float* data, const Line& row, const Line& k) {
    return inside<IMAGE>(a, row, k) ? data[row.at + k.at] : 0;
  }
  __device__ static __forceinline__ void take4(float (&to)[4], const Operand& a, const float* data, const Line& row,
                                               const Line& k) {
    float4 four = make_float4(0, 0, 0, 0);
    if (inside<IMAGE>(a, row, k)) four = read4(data + (row.at + k.at));
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
  }
  template <class Put>
  __device__ __forceinline__ void store(const Operand& a, const Put& put) const {
#pragma unroll
    for (int s = 0; s < N; s++) {
#pragma unroll
      for (int j = 0; j < 4; j++) put(row0 + rows_on(a, s, j), k0 + depth_on(a, s, j), v[s][j]);
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

// Puts ROWS x COLUMNS sums that the block's threads laid into shared memory in their places. A loop that is not
// unrolled: its code would otherwise be there once per sum, and its addresses would take registers from them.
template <bool IMAGE, int ROWS, int COLUMNS, int LINE>
__device__ __forceinline__ void put_sums(const Gemm& p, const Offsets& o, const float* sums, int m0, int n0) {
  auto finish = [&](float v, int i, int j, int64_t residual_at) {
    if (p.scale.data) v *= p.scale.data[(o.channel + i) * p.scale.row + (o.channel + j) * p.scale.column];
    if (p.bias.data) v += p.bias.data[(o.channel + i) * p.bias.row + (o.channel + j) * p.bias.column];
    if (p.residual.data) v += p.residual.data[residual_at];
    return p.activation == kRelu ? device::relu_map::apply(v, v, v) : v;
  };
  block_sync();
#pragma unroll 1
  for (int e = threadIdx.x * (p.wide ? 4 : 1); e < ROWS * COLUMNS; e += blockDim.x * (p.wide ? 4 : 1)) {
    int row = e / COLUMNS, column = e % COLUMNS, i = m0 + row, j = n0 + column;
    if (i >= p.m || j >= p.n) continue;
    const float* v = sums + row * LINE + column;
    float* out = p.out.data + o.out + offset<IMAGE>(p.row, p.out.row, i) + offset<IMAGE>(p.column, p.out.column, j);
    int64_t r = o.residual + offset<IMAGE>(p.row, p.residual.row, i) + offset<IMAGE>(p.column, p.residual.column, j);
    if (p.wide) {
      float4 f = read4(v);
      write4(out, make_float4(finish(f.x, i, j, r), finish(f.y, i, j + 1, r + 1), finish(f.z, i, j + 2, r + 2),
                              finish(f.w, i, j + 3, r + 3)));
    } else {
      *out = finish(*v, i, j, r);
    }
  }
  block_sync();
}

// The activations beyond relu visit the tile again: called among live sums they would spill registers.
template <bool IMAGE, int ROWS, int COLUMNS>
__device__ __forceinline__ void activate_tile(const Gemm& p, const Offsets& o, int m0, int n0) {
  if (p.activation <= kRelu) return;
#pragma unroll 1
  for (int e = threadIdx.x; e < ROWS * COLUMNS; e += blockDim.x) {
    int i = m0 + e / COLUMNS, j = n0 + e % COLUMNS;
    if (i >= p.m || j >= p.n) continue;
    float* out = p.out.data + o.out + offset<IMAGE>(p.row, p.out.row, i) + offset<IMAGE>(p.column, p.out.column, j);
    *out = device::activate(p.activation, p.alpha, *out);
  }
}

// Which tile a block makes, of which product and over which k.
template <int BM, int BN>
struct Block {
  Offsets offsets;
  int m0, n0, k0, k1;
  __device__ __forceinline__ explicit Block(const Gemm& p) {
    unsigned columns = (p.n + BN - 1) / BN, tiles = columns * ((p.m + BM - 1) / BM), tile = blockIdx.x % tiles;
    offsets = batch_offsets(p.batch, blockIdx.x / tiles);
    offsets.out += blockIdx.y * p.part;
    m0 = static_cast<int>(tile / columns * BM);
    n0 = static_cast<int>(tile % columns * BN);
    k0 = static_cast<int>(blockIdx.y) * p.per_split;
    k1 = p.k - k0 < p.per_split ? p.k : k0 + p.per_split;
  }
};

// Blocks of 256 threads per unit: two would leave CUDA's threads 128 registers each, which spills.
constexpr int kLargeBlocks = WAVE / 32;

// float32 in plain FMA. A block makes BM x BN sums, a thread RM x CN chunks of 4 x 4 that lie BM/RM and BN/CN apart, so
// that neighbouring threads read neighbouring float4 of shared memory. Two tiles in turn: one barrier a step.
template <bool IMAGE, int BM, int BN, int BK, int RM, int CN>
__global__ void GPU_BOUNDS(BM / RM / 4 * (BN / CN / 4), BM == 128 ? kLargeBlocks : 3) gemm_tile(Gemm p) {
  constexpr int kColumns = BN / CN / 4, kThreads = BM / RM / 4 * kColumns;
  struct alignas(16) Tiles {
    float a[2][BK][BM + 4],
        b[2][BK][BN + 4];  // +4 keeps float4 alignment and spreads the transposing stores over banks
  };
  union Shared {
    Tiles tiles;
    float sums[BM / RM][BN];
  };
  GPU_SHARED(Shared, shared);
  Tiles& tiles = shared.tiles;
  Block<BM, BN> block(p);
  int tm = threadIdx.x / kColumns * 4, tn = threadIdx.x % kColumns * 4;

  float sum[4 * RM][4 * CN] = {};
  Share<BM, BK, kThreads, IMAGE> a;
  Share<BN, BK, kThreads, IMAGE> b;
  const float *a_data = p.a.data + block.offsets.a, *b_data = p.b.data + block.offsets.b;
  a.start(p.a, block.m0, p.m);
  b.start(p.b, block.n0, p.n);
  a.load(p.a, a_data, block.k0, block.k1);
  b.load(p.b, b_data, block.k0, block.k1);
  int turn = 0;
  for (int k0 = block.k0; k0 < block.k1; k0 += BK, turn ^= 1) {
    auto store = [](const auto& share, const Operand& from, auto& tile) {
      if (!from.by_row || !from.wide) return share.store(from, [&](int i, int k, float v) { tile[k][i] = v; });
      for (int s = 0; s < share.N; s++)
        write4(&tile[share.k0 + share.depth_on(from, s, 0)][share.row0],
               make_float4(share.v[s][0], share.v[s][1], share.v[s][2], share.v[s][3]));
    };
    store(a, p.a, tiles.a[turn]);
    store(b, p.b, tiles.b[turn]);
    block_sync();
    if (block.k1 - k0 > BK) {
      a.load(p.a, a_data, k0 + BK, block.k1);
      b.load(p.b, b_data, k0 + BK, block.k1);
    }
#pragma unroll 4
    for (int k = 0; k < BK; k++) {
      float x[4 * RM], y[4 * CN];
      read_chunks<RM, BM>(x, tiles.a[turn][k], tm);
      read_chunks<CN, BN>(y, tiles.b[turn][k], tn);
#pragma unroll
      for (int i = 0; i < 4 * RM; i++) {
#pragma unroll
        for (int j = 0; j < 4 * CN; j++) sum[i][j] += x[i] * y[j];
      }
    }
  }

  block_sync();
#pragma unroll
  for (int r = 0; r < RM; r++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int c = 0; c < CN; c++) {
        const float* v = &sum[4 * r + i][4 * c];
        write4(&shared.sums[tm + i][tn + c * (BN / CN)], make_float4(v[0], v[1], v[2], v[3]));
      }
    }
    put_sums<IMAGE, BM / RM, BN, BN>(p, block.offsets, shared.sums[0], block.m0 + r * (BM / RM), block.n0);
  }
  activate_tile<IMAGE, BM, BN>(p, block.offsets, block.m0, block.n0);
}

// Lower precision on the matrix units, sums in float32. Two rows of waves; each makes BM/2 x (what is left) sums.
template <bool IMAGE, int P, int BM, int BN, int THREADS>
__global__ void GPU_BOUNDS(THREADS, BM == 128 ? kLargeBlocks : 3) gemm_mma(Gemm p) {
  constexpr int BK = 16, kLine = BK + 16 / sizeof(Element<P>);  // 16 bytes more: other banks
  constexpr int kWaveColumns = THREADS / WAVE / 2, WM = BM / 2 / 16, WN = BN / kWaveColumns / 16;
  struct alignas(16) Tiles {
    Element<P> a[2][BM][kLine], b[2][BN][kLine];
  };
  union Shared {
    Tiles tiles;
    float sums[BM / 2][BN + 8];
  };
  GPU_SHARED(Shared, shared);
  Tiles& tiles = shared.tiles;
  Block<BM, BN> block(p);
  int wave = threadIdx.x / WAVE, wm = wave / kWaveColumns * WM * 16, wn = wave % kWaveColumns * WN * 16;

  Sums sum[WM][WN];
  Share<BM, BK, THREADS, IMAGE> a;
  Share<BN, BK, THREADS, IMAGE> b;
  const float *a_data = p.a.data + block.offsets.a, *b_data = p.b.data + block.offsets.b;
  a.start(p.a, block.m0, p.m);
  b.start(p.b, block.n0, p.n);
  a.load(p.a, a_data, block.k0, block.k1);
  b.load(p.b, b_data, block.k0, block.k1);
  int turn = 0;
  for (int k0 = block.k0; k0 < block.k1; k0 += BK, turn ^= 1) {
    a.store(p.a, [&](int i, int k, float v) { tiles.a[turn][i][k] = convert<P>(v); });
    b.store(p.b, [&](int i, int k, float v) { tiles.b[turn][i][k] = convert<P>(v); });
    block_sync();
    if (block.k1 - k0 > BK) {
      a.load(p.a, a_data, k0 + BK, block.k1);
      b.load(p.b, b_data, k0 + BK, block.k1);
    }
    Fragment<P> y[WN];
#pragma unroll
    for (int j = 0; j < WN; j++) y[j].load(tiles.b[turn][wn + 16 * j], kLine);
#pragma unroll
    for (int i = 0; i < WM; i++) {
      Fragment<P> x;
      x.load(tiles.a[turn][wm + 16 * i], kLine);
#pragma unroll
      for (int j = 0; j < WN; j++) sum[i][j].add(x, y[j]);
    }
  }

  block_sync();
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (wave / kWaveColumns == r) {
#pragma unroll
      for (int i = 0; i < WM; i++) {
#pragma unroll
        for (int j = 0; j < WN; j++) {
#pragma unroll
          for (int e = 0; e < Sums::kSums; e++) {
            shared.sums[16 * i + Sums::row(e)][wn + 16 * j + Sums::column(e)] = sum[i][j].v[e];
          }
        }
      }
    }
    put_sums<IMAGE, BM / 2, BN, BN + 8>(p, block.offsets, shared.sums[0], block.m0 + r * (BM / 2), block.n0);
  }
  activate_tile<IMAGE, BM, BN>(p, block.offsets, block.m0, block.n0);
}

template <bool IMAGE, int BM, int BN, class Kernel>
void launch_gemm(const char* op, const Gemm& p, Kernel kernel, unsigned threads, gpuStream_t stream) {
  int64_t blocks = (static_cast<int64_t>(p.m) + BM - 1) / BM * ((static_cast<int64_t>(p.n) + BN - 1) / BN);
  for (int d = 0; d < p.batch.rank; d++) blocks *= p.batch.shape[d];
  if (blocks > INT32_MAX) fail(op, "the output is at most 2^31 tiles", std::to_string(blocks));
  int splits = p.k == 0 ? 1 : (p.k + p.per_split - 1) / p.per_split;
  launch(kernel, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(splits)), threads, 0, stream, p);
}

// Tiles of 128 when they fill the device, else of 64.
template <bool IMAGE>
void run(const char* op, const Gemm& p, int precision, gpuStream_t stream) {
  int64_t large = ((p.m + 127LL) / 128) * ((p.n + 127LL) / 128) * ((p.k + p.per_split - 1LL) / p.per_split);
  for (int d = 0; d < p.batch.rank; d++) large *= p.batch.shape[d];
  auto sized = [&](auto large_kernel, unsigned large_threads, auto small_kernel, unsigned small_threads) {
    if (large >= device_units()) return launch_gemm<IMAGE, 128, 128>(op, p, large_kernel, large_threads, stream);
    launch_gemm<IMAGE, 64, 64>(op, p, small_kernel, small_threads, stream);
  };
  switch (precision) {
    case kExact:
      return sized(gemm_tile<IMAGE, 128, 128, 8, 2, 2>, 256, gemm_tile<IMAGE, 64, 64, 16, 2, 1>, 128);
    case kTf32:
      return sized(gemm_mma<IMAGE, kTf32, 128, 128, 256>, 256, gemm_mma<IMAGE, kTf32, 64, 64, 128>, 128);
    case kFloat16:
      return sized(gemm_mma<IMAGE, kFloat16, 128, 128, 256>, 256, gemm_mma<IMAGE, kFloat16, 64, 64, 128>, 128);
    case kBfloat16:
      return sized(gemm_mma<IMAGE, kBfloat16, 128, 128, 256>, 256, gemm_mma<IMAGE, kBfloat16, 64, 64, 128>, 128);
  }
  fail(op, "precision is 0 (float32), 1 (TF32), 2 (float16) or 3 (bfloat16)", std::to_string(precision));
}

}  // namespace

void run_gemm(const char* op, const Gemm& p, bool image, int precision, gpuStream_t stream) {
  image ? run<true>(op, p, precision, stream) : run<false>(op, p, precision, stream);
}

}  // namespace needle::gpu
