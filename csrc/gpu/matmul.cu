// Products of matrices, single and batched, of any strides: on tiles (gemm.cu), or when there are at most 8 rows with a
// wave per four columns or a lane of every wave per column, which read the right side once. float64 and integers: one
// thread per result.
#include "gpu/gemm.cuh"
#include "gpu/team.cuh"
#include "gpu/vendor/choose.h"
#include "math/strided.h"

namespace needle::gpu {
namespace {

constexpr int kWaves = 4, kWaveColumns = 4;

template <bool WIDE>
__device__ __forceinline__ void load_lane(float (&to)[WIDE ? 4 : 1], const Operand& a, int i, int k) {
  const float* p = a.data + (i * a.row.stride[0] + k * a.depth.stride[0]);
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

__device__ __forceinline__ float finish(const Gemm& p, float v, int i, int j) {
  if (p.bias.data) v += p.bias.data[j * p.bias.column];
  if (p.residual.data) v += p.residual.data[i * p.residual.row[0] + j * p.residual.column[0]];
  return device::activate(p.activation, p.alpha, v);
}

// A wave makes kWaveColumns columns of up to ROWS rows: its lanes split k, then add up. Rows and columns past the end
// read the last one again instead of branching.
template <int ROWS, bool WIDE>
__global__ void GPU_BOUNDS(kWaves* WAVE, 2) matmul_rows(Gemm p) {
  constexpr int V = WIDE ? 4 : 1;
  int64_t first = (static_cast<int64_t>(blockIdx.x) * kWaves + threadIdx.x / WAVE) * kWaveColumns;
  if (first >= p.n) return;  // the whole wave leaves
  int n0 = static_cast<int>(first);
  float sum[ROWS][kWaveColumns] = {};
#pragma unroll 1
  for (int64_t k = lane_id() * V; k < p.k; k += WAVE * V) {
    float x[ROWS][V], w[V];
#pragma unroll
    for (int i = 0; i < ROWS; i++) load_lane<WIDE>(x[i], p.a, i < p.m ? i : p.m - 1, static_cast<int>(k));
#pragma unroll
    for (int c = 0; c < kWaveColumns; c++) {
      load_lane<WIDE>(w, p.b, n0 + c < p.n ? n0 + c : p.n - 1, static_cast<int>(k));
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int v = 0; v < V; v++) sum[i][c] += x[i][v] * w[v];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
#pragma unroll
    for (int c = 0; c < kWaveColumns; c++) {
      float total = wave_sum(sum[i][c]);
      if (lane_id() == i * kWaveColumns + c && i < p.m && n0 + c < p.n) {
        p.out.data[i * p.out.row[0] + (n0 + c) * p.out.column[0]] = finish(p, total, i, n0 + c);
      }
    }
  }
}
static_assert(8 * kWaveColumns <= WAVE, "each lane writes at most one output");

// The same for a right side whose neighbours are columns: a lane per column, the waves of a block split k.
template <int ROWS>
struct Columns {
  Gemm p;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team& team, int64_t n, bool exists) const {
    int column = static_cast<int>(exists ? n : p.n - 1);
    float sum[ROWS] = {};
#pragma unroll 4
    for (int k = team.first; k < p.k; k += Team::step) {
      float w[1], x[1];
      load_lane<false>(w, p.b, column, k);
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        load_lane<false>(x, p.a, i < p.m ? i : p.m - 1, k);
        sum[i] += x[0] * w[0];
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      float total = team.sum(sum[i]);
      if (team.first == i % Team::step && exists && i < p.m)
        p.out.data[i * p.out.row[0] + column * p.out.column[0]] = finish(p, total, i, column);
    }
  }
};

template <int ROWS>
void launch_few(const Gemm& p, gpuStream_t stream) {
  if (p.b.by_row) return launch_teams<ColumnTeam>(Columns<ROWS>{p}, p.n, stream);
  int64_t columns = kWaves * kWaveColumns, grid = (p.n + columns - 1) / columns;
  bool wide = p.a.wide && p.b.wide && !p.a.by_row;
  launch(wide ? matmul_rows<ROWS, true> : matmul_rows<ROWS, false>, dim3(static_cast<unsigned>(grid)), kWaves * WAVE, 0,
         stream, p);
}

// Views of one rank: (..., m, k), (..., k, n), (..., m, n), and a bias (n).
struct Views {
  View a, b, out, bias;
  int activation;
  float alpha;
};

template <class T>
__global__ void GPU_BOUNDS(256, 2) matmul_each(Views p, int64_t size) {
  int r = p.out.rank;
  int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= size) return;
  const T *a = static_cast<const T*>(p.a.data), *b = static_cast<const T*>(p.b.data);
  T* out = static_cast<T*>(p.out.data);
  int64_t rest = index, column = index % p.out.shape[r - 1];
  for (int d = r - 1; d >= 0; d--) {
    int64_t digit = rest % p.out.shape[d];
    rest /= p.out.shape[d];
    out += digit * p.out.stride[d];
    if (d != r - 1) a += digit * p.a.stride[d];
    if (d != r - 2) b += digit * p.b.stride[d];
  }
  T sum = 0;
  for (int64_t k = 0; k < p.a.shape[r - 1]; k++) sum += a[k * p.a.stride[r - 1]] * b[k * p.b.stride[r - 2]];
  if (p.bias.data) sum += static_cast<const T*>(p.bias.data)[column * p.bias.stride[0]];
  if constexpr (!std::is_integral_v<T>) sum = device::activate(p.activation, p.alpha, sum);
  *out = sum;
}

template <class T>
void launch_each(const Views& p, gpuStream_t stream) {
  launch(matmul_each<T>, dim3(static_cast<unsigned>((p.out.size() + 255) / 256)), 256, 0, stream, p, p.out.size());
}

bool batches_are_quads(const View& v) {
  for (int d = 0; d < v.rank - 2; d++) {
    if (v.shape[d] > 1 && v.stride[d] % 4 != 0) return false;
  }
  return true;
}

Operand operand(const View& v, int64_t rows, int64_t row, int64_t k, int64_t depth) {
  Operand a = {};
  a.data = v.as<float>();
  a.row.stride[0] = static_cast<int>(row);
  a.depth.stride[0] = static_cast<int>(depth);
  a.by_row = row == 1 && depth != 1;
  int64_t near = a.by_row ? row : depth, far = a.by_row ? depth : row, extent = a.by_row ? rows : k;
  a.wide = near == 1 && far % 4 == 0 && extent % 4 == 0 && aligned(v.data) && batches_are_quads(v);
  return a;
}

Place place(const View& v, int64_t row) {
  Place p = {};
  p.data = v.as<float>();
  p.row[0] = static_cast<int>(row);
  p.column[0] = static_cast<int>(v.stride[v.rank - 1]);
  return p;
}

void run_float(const char* op, const Gemm& p, int precision, gpuStream_t stream) {
  if (p.m > 8 || p.batch.rank > 0) return run_gemm(op, p, false, precision, stream);
  if (p.m == 1) return launch_few<1>(p, stream);
  if (p.m <= 4) return launch_few<4>(p, stream);
  launch_few<8>(p, stream);
}

View matrix(const void* data, int64_t batch, int64_t rows, int64_t columns, int64_t step, int64_t row, int64_t column) {
  return {const_cast<void*>(data), {batch, rows, columns}, {step, row, column}, data ? 3 : 0, DType::f32};
}

// The product for a vendor's library, which knows but one axis of batches; false when there are more.
bool for_vendor(const Gemm& p, int precision, vendor::Problem* to) {
  if (p.batch.rank > 1 || p.k == 0) return false;
  const bool one = p.batch.rank == 0;
  const int64_t n = one ? 1 : p.batch.shape[0];
  auto step = [&](const int64_t* of) { return one ? 0 : of[0]; };
  to->kind = vendor::kMatmul;
  to->a = matrix(p.a.data, n, p.m, p.k, step(p.batch.a), p.a.row.stride[0], p.a.depth.stride[0]);
  to->b = matrix(p.b.data, n, p.k, p.n, step(p.batch.b), p.b.depth.stride[0], p.b.row.stride[0]);
  to->out = matrix(p.out.data, n, p.m, p.n, step(p.batch.out), p.out.row[0], p.out.column[0]);
  to->residual = matrix(p.residual.data, n, p.m, p.n, step(p.batch.residual), p.residual.row[0], p.residual.column[0]);
  if (p.bias.data) to->bias = {const_cast<float*>(p.bias.data), {p.n}, {p.bias.column}, 1, DType::f32};
  to->activation = p.activation;
  to->precision = precision;
  to->alpha = p.alpha;
  return true;
}

// out = act(a b + bias + residual); bias and residual may be absent.
void product(const char* op, const View& a, const View& b, const View& out, const Optional& bias_or_none,
             const Optional& residual_or_none, int precision, int activation, float alpha, const Exec* exec) {
  const View *bias = bias_or_none ? &bias_or_none : nullptr, *residual = residual_or_none ? &residual_or_none : nullptr;
  const int r = a.rank;
  gpuStream_t stream = static_cast<gpuStream_t>(exec->stream);
  if (out.size() == 0) return;
  for (int64_t extent : {out.size() / out.shape[r - 1], a.shape[r - 1], b.shape[r - 1]}) {
    if (extent > INT32_MAX - 256) fail(op, "extents are below 2^31 - 256", std::to_string(extent));
  }
  if (out.dtype != DType::f32) {
    Views v = {a, b, out, bias ? *bias : View{}, activation, alpha};
    return with_type<matmul_args::In::a_dtypes>(out.dtype, [&](auto t) {
      using T = decltype(t);
      if constexpr (std::is_integral_v<T>)
        launch_each<std::make_unsigned_t<T>>(v, stream);  // whose overflow wraps
      else
        launch_each<T>(v, stream);
    });
  }
  Gemm p = {};
  int64_t m = a.shape[r - 2], n = b.shape[r - 1], k = a.shape[r - 1];
  int64_t a_row = a.stride[r - 2], out_row = out.stride[r - 2], residual_row = residual ? residual->stride[r - 2] : 0;
  bool shared = true;
  int64_t batch = 1;
  for (int d = 0; d < r - 2; d++) {
    shared = shared && (b.shape[d] == 1 || b.stride[d] == 0);
    batch *= a.shape[d];
  }
  const bool as_rows = shared && device::rows_collapse(a, &a_row) && device::rows_collapse(out, &out_row) &&
                       (!residual || device::rows_collapse(*residual, &residual_row));
  if (as_rows) {
    m *= batch;
  } else {
    a_row = a.stride[r - 2], out_row = out.stride[r - 2], residual_row = residual ? residual->stride[r - 2] : 0;
    int64_t* const of[] = {p.batch.a, p.batch.b, p.batch.out, p.batch.residual};
    for (int d = 0; d < r - 2; d++) {  // an axis that goes on where all operands' last one ended is part of it
      const int64_t steps[] = {a.stride[d], b.stride[d], out.stride[d], residual ? residual->stride[d] : 0};
      if (a.shape[d] == 1) continue;
      bool goes_on = p.batch.rank > 0;
      for (int k = 0; k < 4; k++) goes_on = goes_on && of[k][p.batch.rank - 1] == steps[k] * a.shape[d];
      const int at = goes_on ? p.batch.rank - 1 : p.batch.rank++;
      p.batch.shape[at] = static_cast<int>(goes_on ? p.batch.shape[at] * a.shape[d] : a.shape[d]);
      for (int k = 0; k < 4; k++) of[k][at] = steps[k];
    }
  }
  for (const View& v : {a, b, out, residual ? *residual : out}) check_span(op, v, as_rows ? 0 : r - 2);
  p.a = operand(a, m, a_row, k, a.stride[r - 1]);
  p.b = operand(b, n, b.stride[r - 1], k, b.stride[r - 2]);
  p.out = place(out, out_row);
  p.wide = out.stride[r - 1] == 1 && out_row % 4 == 0 && n % 4 == 0 && aligned(out.data) && batches_are_quads(out);
  if (residual) {
    p.residual = place(*residual, residual_row);
    p.wide = p.wide && residual->stride[r - 1] == 1;
  }
  if (bias) p.bias = {bias->as<float>(), 0, bias->stride[0]};
  p.m = static_cast<int>(m);
  p.n = static_cast<int>(n);
  p.k = static_cast<int>(k);
  p.per_split = p.k ? p.k : 1;
  p.activation = activation;
  p.alpha = alpha;
  auto ours = [&] { run_float(op, p, precision, stream); };
  vendor::Problem problem = {};
  if (!vendor::wanted(vendor::kMatmul) || !for_vendor(p, precision, &problem)) return ours();
  vendor::choose(problem, exec, ours);
}

std::string shape(const View& v) {
  std::string s = "(";
  for (int i = 0; i < v.rank; i++) s += (i ? ", " : "") + std::to_string(v.shape[i]);
  return s + ")";
}

template <class Args>
void run(const char* op, const Args& c, const View& a, const View& b, const Optional& residual, int precision) {
  if (c.attr.activation < kNone || c.attr.activation >= kActivations)
    fail(op, "activation is one of math/maps.h", std::to_string(c.attr.activation));
  product(op, a, b, c.out.y, c.in.bias, residual, precision, static_cast<int>(c.attr.activation),
          static_cast<float>(c.attr.alpha), c.exec);
}

}  // namespace

// a (..., m, k), b (..., k, n) of one rank, bias (n).
void matmul(const matmul_args& c) { run("matmul", c, c.in.a, c.in.b, kAbsent, kExact); }

void matmul_fused(const matmul_fused_args& c) {
  run("matmul_fused", c, c.in.a, c.in.b, c.in.residual, static_cast<int>(c.attr.precision));
}

// x (m, k), weight (n, k) as torch stores it.
void linear(const linear_args& c) {
  const View &x = c.in.x, &w = c.in.weight;
  if (x.rank != 2) fail("linear", "x expects rank 2", shape(x));
  if (w.rank != 2 || w.shape[1] != x.shape[1])
    fail("linear", "w expects shape (N, " + std::to_string(x.shape[1]) + ")", shape(w));
  View turned = w;
  for (int d = 0; d < 2; d++) turned.shape[d] = w.shape[1 - d], turned.stride[d] = w.stride[1 - d];
  run("linear", c, x, turned, kAbsent, kExact);
}

}  // namespace needle::gpu
