// Recurrent layers and their gradients, a launch per step: the recurrent product of a tile of rows and hidden units
// with all its gates, then the cell on what the thread has summed.
#include "gpu/strided.cuh"

namespace needle::gpu {

void clear(const View& v, const Exec* exec);

namespace {

constexpr int kUnits = 32, kRows = kThreads / kUnits, kDepth = 32;  // of a tile; a thread has a row and a unit

// previous (B, K) times a matrix whose element for depth k and unit j of gate g lies at g gate + k depth + j unit.
struct Product {
  const float* previous;  // null: zeros
  const float* weight;
  int64_t depth, unit, gate;
  int B, H, K;
};

// A step of a layer, with pointers to its time. What a layer does not have is null.
struct Forward {
  Product product;
  const float *projected, *bias, *before, *c_before;  // before: the state that enters the step
  float *h, *c, *kept;
  int64_t projected_row;
  bool relu;
};
struct Backward {
  Product product;
  const float *dy, *dc, *h, *c, *c_before, *kept, *before;
  float *dgates, *dx, *carried_h, *carried_c;
  bool relu, last;  // last: before the first step, where only the carried gradient is left
};

template <int GATES>
__device__ __forceinline__ void multiply(const Product& p, float (&sum)[GATES], int m, int j) {
  struct Tiles {
    float w[GATES][kDepth][kUnits + 1], x[kRows][kDepth + 1];
  };
  GPU_SHARED(Tiles, tiles);
  const int tx = threadIdx.x % kUnits, ty = threadIdx.x / kUnits, first = j - tx;
#pragma unroll
  for (int g = 0; g < GATES; g++) sum[g] = 0;
  if (!p.previous) return;
  const bool along_depth = p.depth == 1;  // lanes read what is contiguous
#pragma unroll 1
  for (int k0 = 0; k0 < p.K; k0 += kDepth) {
    tiles.x[ty][tx] = m < p.B && k0 + tx < p.K ? p.previous[static_cast<int64_t>(m) * p.K + k0 + tx] : 0.f;
#pragma unroll
    for (int i = 0; i < kDepth; i += kRows) {
      const int k = along_depth ? tx : ty + i, unit = along_depth ? ty + i : tx;
      const bool inside = k0 + k < p.K && first + unit < p.H;
#pragma unroll
      for (int g = 0; g < GATES; g++)
        tiles.w[g][k][unit] = inside ? p.weight[g * p.gate + (k0 + k) * p.depth + (first + unit) * p.unit] : 0.f;
    }
    block_sync();
#pragma unroll 8
    for (int k = 0; k < kDepth; k++) {
      const float x = tiles.x[ty][k];
#pragma unroll
      for (int g = 0; g < GATES; g++) sum[g] += x * tiles.w[g][k][tx];
    }
    block_sync();
  }
}
static_assert(kDepth == kUnits && kDepth % kRows == 0, "a tile is loaded along either side");

__device__ __forceinline__ float sigmoid_slope(float y) { return y * (1 - y); }
__device__ __forceinline__ float tanh_slope(float y) { return 1 - y * y; }

struct Rnn {
  static constexpr int kGates = 1;
  static __device__ __forceinline__ void forward(const Forward& f, const float (&gate)[1], int64_t m, int j) {
    const float x = f.projected[m * f.projected_row + j] + gate[0];
    f.h[m * f.product.H + j] = f.relu ? device::max(0.f, x) : device::tanh(x);
  }
  static __device__ __forceinline__ void backward(const Backward& b, float dh, int64_t m, int j) {
    const int64_t at = m * b.product.H + j;
    const float h = b.h[at];
    b.dgates[at] = b.relu ? (0 < h ? dh : 0.f) : dh * tanh_slope(h);
  }
};

struct Lstm {
  static constexpr int kGates = 4;
  static __device__ __forceinline__ void forward(const Forward& f, const float (&gate)[4], int64_t m, int j) {
    const int H = f.product.H;
    const float* x = f.projected + m * f.projected_row + j;
    float* kept = f.kept + m * 4 * H + j;
    const float i = device::sigmoid(x[0] + gate[0]), forget = device::sigmoid(x[H] + gate[1]);
    const float g = device::tanh(x[2 * H] + gate[2]), o = device::sigmoid(x[3 * H] + gate[3]);
    const float cell = device::fma(forget, f.c_before[m * H + j], i * g);
    kept[0] = i, kept[H] = forget, kept[2 * H] = g, kept[3 * H] = o;
    f.c[m * H + j] = cell;
    f.h[m * H + j] = o * device::tanh(cell);
  }
  static __device__ __forceinline__ void backward(const Backward& b, float dh, int64_t m, int j) {
    const int H = b.product.H;
    const int64_t at = m * H + j;
    const float* kept = b.kept + m * 4 * H + j;
    float* to = b.dgates + m * 4 * H + j;
    const float i = kept[0], forget = kept[H], g = kept[2 * H], o = kept[3 * H], bent = device::tanh(b.c[at]);
    float dcell = device::fma(dh * o, tanh_slope(bent), b.carried_c[at]);
    if (b.dc) dcell = dcell + b.dc[at];
    to[0] = dcell * g * sigmoid_slope(i);
    to[H] = dcell * b.c_before[at] * sigmoid_slope(forget);
    to[2 * H] = dcell * i * tanh_slope(g);
    to[3 * H] = dh * bent * sigmoid_slope(o);
    b.carried_c[at] = dcell * forget;
  }
};

struct Gru {
  static constexpr int kGates = 3;
  static __device__ __forceinline__ void forward(const Forward& f, const float (&gate)[3], int64_t m, int j) {
    const int H = f.product.H;
    const float *x = f.projected + m * f.projected_row + j, h = f.before[m * H + j];
    float* kept = f.kept + m * 4 * H + j;
    const float r = device::sigmoid(x[0] + gate[0]), z = device::sigmoid(x[H] + gate[1]);
    const float fresh = device::tanh(device::fma(r, gate[2], x[2 * H]));
    kept[0] = r, kept[H] = z, kept[2 * H] = fresh, kept[3 * H] = gate[2];
    f.h[m * H + j] = device::fma(z, h - fresh, fresh);
  }
  static __device__ __forceinline__ void backward(const Backward& b, float dh, int64_t m, int j) {
    const int H = b.product.H;
    const int64_t at = m * H + j;
    const float* kept = b.kept + m * 4 * H + j;
    float *to = b.dgates + m * 3 * H + j, *dx = b.dx + m * 3 * H + j;
    const float r = kept[0], z = kept[H], fresh = kept[2 * H], recurred = kept[3 * H];
    const float dn = dh * (1 - z) * tanh_slope(fresh), dr = dn * recurred * sigmoid_slope(r);
    const float dz = dh * (b.before[at] - fresh) * sigmoid_slope(z);
    dx[0] = dr, dx[H] = dz, dx[2 * H] = dn;
    to[0] = dr, to[H] = dz, to[2 * H] = dn * r;
    b.carried_h[at] = dh * z;
  }
};

template <class Cell>
__global__ void GPU_BOUNDS(kThreads, 4) step_forward(Forward f) {
  const int j = blockIdx.x * kUnits + threadIdx.x % kUnits, m = blockIdx.y * kRows + threadIdx.x / kUnits;
  float gate[Cell::kGates];
  multiply(f.product, gate, m, j);
  if (m >= f.product.B || j >= f.product.H) return;
  if (f.bias) {
#pragma unroll
    for (int g = 0; g < Cell::kGates; g++) gate[g] += f.bias[g * f.product.H + j];
  }
  Cell::forward(f, gate, m, j);
}

template <class Cell>
__global__ void GPU_BOUNDS(kThreads, 4) step_backward(Backward b) {
  const int j = blockIdx.x * kUnits + threadIdx.x % kUnits, m = blockIdx.y * kRows + threadIdx.x / kUnits;
  float sum[1];
  multiply(b.product, sum, m, j);
  if (m >= b.product.B || j >= b.product.H) return;
  const int64_t at = static_cast<int64_t>(m) * b.product.H + j;
  const float carried = b.carried_h[at] + sum[0];
  if (b.last) {
    b.carried_h[at] = carried;
    return;
  }
  Cell::backward(b, carried + b.dy[at], m, j);
}

struct Sequence {
  int64_t T, B, H;
  bool reverse;

  int64_t time(int64_t step) const { return reverse ? T - 1 - step : step; }
};

Sequence sequence(const char* op, const View& h, bool reverse) {
  if (h.shape[1] > 65535LL * kRows || h.shape[2] > INT32_MAX / 8)
    fail(op, "expects at most 524280 rows", std::to_string(h.shape[1]));
  return {h.shape[0], h.shape[1], h.shape[2], reverse};
}

dim3 grid_of(const Sequence& s) {
  return dim3(static_cast<unsigned>((s.H + kUnits - 1) / kUnits), static_cast<unsigned>((s.B + kRows - 1) / kRows));
}

// Null where a cell has no such view.
float* at(const View* v, int64_t offset) { return v ? v->as<float>() + offset : nullptr; }

// Views beside h that some cells have are null for the others.
struct Cells {
  const View *c0, *c, *kept;
  bool relu;
};

template <class Cell, class Args>
void forward(const char* op, const Args& c, const Cells& k) {
  const View &out = c.out.h, &w = c.in.weight, &projected = c.in.projected;
  const Sequence s = sequence(op, out, c.attr.reverse != 0);
  if (out.size() == 0) return;
  const int64_t rows = s.B * s.H;
  Forward f = {};
  f.product = {nullptr,           w.as<float>(),         w.stride[0],           w.stride[1],
               s.H * w.stride[1], static_cast<int>(s.B), static_cast<int>(s.H), static_cast<int>(s.H)};
  f.bias = c.in.bias.template as<float>();
  f.projected_row = projected.stride[1];
  f.relu = k.relu;
  for (int64_t step = 0; step < s.T; step++) {
    const int64_t now = s.time(step), then = step ? s.time(step - 1) : 0;
    f.projected = at(&projected, now * projected.stride[0]);
    f.before = f.product.previous = step ? at(&out, then * rows) : at(&c.in.h0, 0);
    f.c_before = step ? at(k.c, then * rows) : at(k.c0, 0);
    f.h = at(&out, now * rows), f.c = at(k.c, now * rows), f.kept = at(k.kept, now * 4 * rows);
    launch(step_forward<Cell>, grid_of(s), kThreads, 0, stream_of(c), f);
  }
}

// What the steps of a gradient read beside `dy` (T, B, H); null where a cell does not need it.
struct Known {
  const View *dy, *dc, *h, *c, *c0, *kept, *h0, *dx, *dh0, *dc0;
  bool relu;
};

template <class Cell, class Args>
void backward(const char* op, const Args& c, const Known& k) {
  constexpr int kGates = Cell::kGates;
  const View &w = c.in.weight, &dgates = c.out.dgates;
  const Sequence s = sequence(op, *k.dy, c.attr.reverse != 0);
  if (k.dh0->size() == 0) return;
  const int64_t rows = s.B * s.H;
  for (const View* v : {k.dh0, k.dc0})
    if (v) clear(*v, c.exec);
  Backward b = {};
  b.product = {nullptr, w.as<float>(),         w.stride[1],           w.stride[0],
               0,       static_cast<int>(s.B), static_cast<int>(s.H), static_cast<int>(kGates * s.H)};
  b.carried_h = at(k.dh0, 0), b.carried_c = at(k.dc0, 0);
  b.relu = k.relu;
  for (int64_t step = s.T - 1; step >= -1; step--) {
    b.last = step < 0;
    b.product.previous = step + 1 < s.T ? at(&dgates, s.time(step + 1) * rows * kGates) : nullptr;
    if (!b.last) {
      const int64_t now = s.time(step) * rows, then = step ? s.time(step - 1) * rows : 0;
      b.dy = at(k.dy, now), b.dc = at(k.dc, now), b.h = at(k.h, now), b.c = at(k.c, now);
      b.kept = at(k.kept, now * 4), b.dx = at(k.dx, now * 3), b.dgates = at(&dgates, now * kGates);
      b.c_before = step ? at(k.c, then) : at(k.c0, 0);
      b.before = step ? at(k.h, then) : at(k.h0, 0);
    }
    launch(step_backward<Cell>, grid_of(s), kThreads, 0, stream_of(c), b);
  }
}

}  // namespace

void rnn(const rnn_args& c) { forward<Rnn>("rnn", c, {nullptr, nullptr, nullptr, c.attr.relu != 0}); }
void lstm(const lstm_args& c) { forward<Lstm>("lstm", c, {&c.in.c0, &c.out.c, &c.out.gates, false}); }
void gru(const gru_args& c) { forward<Gru>("gru", c, {nullptr, nullptr, &c.out.kept, false}); }

void rnn_grad(const rnn_grad_args& c) {
  Known k = {};
  k.h = &c.in.h, k.dy = &c.in.dh, k.dh0 = &c.out.dh0, k.relu = c.attr.relu != 0;
  backward<Rnn>("rnn_grad", c, k);
}
void lstm_grad(const lstm_grad_args& c) {
  Known k = {};
  k.c0 = &c.in.c0, k.c = &c.in.c, k.kept = &c.in.gates, k.dy = &c.in.dh, k.dc = c.in.dc ? &c.in.dc : nullptr;
  k.dh0 = &c.out.dh0, k.dc0 = &c.out.dc0;
  backward<Lstm>("lstm_grad", c, k);
}
// dgates: of what h adds to the gates, dprojected of what x adds.
void gru_grad(const gru_grad_args& c) {
  Known k = {};
  k.h0 = &c.in.h0, k.h = &c.in.h, k.kept = &c.in.kept, k.dy = &c.in.dh, k.dx = &c.out.dprojected, k.dh0 = &c.out.dh0;
  backward<Gru>("gru_grad", c, k);
}

}  // namespace needle::gpu
