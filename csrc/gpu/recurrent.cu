// Recurrent layers and their gradients, a launch per step: the recurrent product of a tile of rows and hidden units
// with all its gates, then the cell on what the thread has summed.
#include "gpu/strided.cuh"

namespace needle::gpu {

void fill(const Call&);

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

float* at(const View& v, int64_t offset) { return v.as<float>() + offset; }

// in: projected (T, B, gates H), weight (H, gates H), h0, [c0], [bias]; out: h, [c], [kept].
template <class Cell>
void forward(const char* op, const Call& c, bool relu) {
  const bool cells = c.n_out > 2;
  const View &out = c.out[0], &w = c.in[1];
  const Sequence s = sequence(op, out, c.i(0) != 0);
  if (out.size() == 0) return;
  const int64_t rows = s.B * s.H;
  Forward f = {};
  f.product = {nullptr,           w.as<float>(),         w.stride[0],           w.stride[1],
               s.H * w.stride[1], static_cast<int>(s.B), static_cast<int>(s.H), static_cast<int>(s.H)};
  f.bias = c.i(1) ? c.in[c.n_in - 1].as<float>() : nullptr;
  f.projected_row = c.in[0].stride[1];
  f.relu = relu;
  for (int64_t step = 0; step < s.T; step++) {
    const int64_t now = s.time(step), then = step ? s.time(step - 1) : 0;
    f.projected = at(c.in[0], now * c.in[0].stride[0]);
    f.before = f.product.previous = step ? at(out, then * rows) : c.in[2].as<float>();
    f.h = at(out, now * rows);
    if (cells) {
      f.c_before = step ? at(c.out[1], then * rows) : c.in[3].as<float>();
      f.c = at(c.out[1], now * rows);
    }
    if (c.n_out > 1) f.kept = at(c.out[c.n_out - 1], now * 4 * rows);
    launch(step_forward<Cell>, grid_of(s), kThreads, 0, stream_of(c), f);
  }
}

// What the steps of a gradient read beside `dy` (T, B, H); null where a cell does not need it.
struct Known {
  const View *dy, *dc, *h, *c, *c0, *kept, *h0, *dx, *dh0, *dc0;
  bool relu;
};

template <class Cell>
void backward(const char* op, const Call& c, const Known& k) {
  constexpr int kGates = Cell::kGates;
  const View &w = c.in[0], &dgates = c.out[0];
  const Sequence s = sequence(op, *k.dy, c.i(0) != 0);
  if (k.dh0->size() == 0) return;
  const int64_t rows = s.B * s.H;
  const double zero = 0;
  for (const View* v : {k.dh0, k.dc0})
    if (v) fill({v, nullptr, &zero, 1, 0, c.exec});
  Backward b = {};
  b.product = {nullptr, w.as<float>(),         w.stride[1],           w.stride[0],
               0,       static_cast<int>(s.B), static_cast<int>(s.H), static_cast<int>(kGates * s.H)};
  b.carried_h = k.dh0->as<float>(), b.carried_c = k.dc0 ? k.dc0->as<float>() : nullptr;
  b.relu = k.relu;
  auto of = [&](const View* v, int64_t time, int64_t width) { return v ? at(*v, time * rows * width) : nullptr; };
  for (int64_t step = s.T - 1; step >= -1; step--) {
    b.last = step < 0;
    b.product.previous = step + 1 < s.T ? at(dgates, s.time(step + 1) * rows * kGates) : nullptr;
    if (!b.last) {
      const int64_t now = s.time(step);
      b.dy = of(k.dy, now, 1), b.dc = of(k.dc, now, 1), b.h = of(k.h, now, 1), b.c = of(k.c, now, 1);
      b.kept = of(k.kept, now, 4), b.dx = of(k.dx, now, 3), b.dgates = at(dgates, now * rows * kGates);
      b.c_before = step ? of(k.c, s.time(step - 1), 1) : k.c0 ? k.c0->as<float>() : nullptr;
      b.before = step ? of(k.h, s.time(step - 1), 1) : k.h0 ? k.h0->as<float>() : nullptr;
    }
    launch(step_backward<Cell>, grid_of(s), kThreads, 0, stream_of(c), b);
  }
}

}  // namespace

void rnn(const Call& c) { forward<Rnn>("rnn", c, c.i(2) != 0); }
void lstm(const Call& c) { forward<Lstm>("lstm", c, false); }
void gru(const Call& c) { forward<Gru>("gru", c, false); }

// in: weight, h, dh; out: dgates, dh0.
void rnn_grad(const Call& c) {
  Known k = {};
  k.h = c.in + 1, k.dy = c.in + 2, k.dh0 = c.out + 1, k.relu = c.i(1) != 0;
  backward<Rnn>("rnn_grad", c, k);
}
// in: weight, c0, c, gates, dh, [dc]; out: dgates, dh0, dc0.
void lstm_grad(const Call& c) {
  Known k = {};
  k.c0 = c.in + 1, k.c = c.in + 2, k.kept = c.in + 3, k.dy = c.in + 4, k.dc = c.i(1) ? c.in + 5 : nullptr;
  k.dh0 = c.out + 1, k.dc0 = c.out + 2;
  backward<Lstm>("lstm_grad", c, k);
}
// in: weight, h0, h, kept, dh; out: gradients of what h adds to the gates and of what x adds, dh0.
void gru_grad(const Call& c) {
  Known k = {};
  k.h0 = c.in + 1, k.h = c.in + 2, k.kept = c.in + 3, k.dy = c.in + 4, k.dx = c.out + 1, k.dh0 = c.out + 2;
  backward<Gru>("gru_grad", c, k);
}

}  // namespace needle::gpu
