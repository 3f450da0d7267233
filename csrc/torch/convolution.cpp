#include "torch/convolution.h"

#include <algorithm>
#include <atomic>

namespace needle::torch_ops {
namespace {

constexpr int64_t kBlock = 16;             // channels
constexpr int64_t kBatchFloats = 1 << 19;  // blocked images that stay in the cache, for each thread
constexpr int64_t kBandFloats = 1 << 17;   // of input and result that a core works on at a time
std::atomic<int64_t> winograd_tile{4};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of a matrix (pixels, channels) in which images lie: dense with channels last.
bool is_matrix(const View& v) {
  int64_t expected = 1;
  for (int axis : {1, 3, 2, 0}) {
    if (v.shape[axis] != 1 && v.stride[axis] != expected) return false;
    expected *= v.shape[axis];
  }
  return true;
}
View matrix(const View& v) {
  View m = v;
  m.rank = 2;
  m.shape[0] = v.shape[0] * v.shape[2] * v.shape[3], m.shape[1] = v.shape[1];
  m.stride[0] = v.shape[1], m.stride[1] = 1;
  return m;
}

View transposed(View m) {
  std::swap(m.shape[0], m.shape[1]);
  std::swap(m.stride[0], m.stride[1]);
  return m;
}

// Weights of one pixel as a matrix (outputs, inputs).
View pixel(View w) {
  w.rank = 2;
  return w;
}

// Whether a kernel of one pixel meets every pixel of x and y once, and both lie as matrices.
bool is_product(const View& x, const View& w, const View& y, const Geometry& g) {
  return w.shape[2] == 1 && w.shape[3] == 1 && g.groups == 1 && g.stride == Pair{1, 1} && g.padding == Pair{0, 0} &&
         x.shape[2] == y.shape[2] && x.shape[3] == y.shape[3] && is_matrix(x) && is_matrix(y);
}

// ---- Winograd ------------------------------------------------------------------------------------------------------

// F(tile x tile, 3 x 3) and what it takes, in vector operations: for a tile of 16 input channels and of 16 output
// channels.
struct Scheme {
  int64_t tile;
  double input, output;
};
constexpr Scheme kDirect = {1, 0, 0}, kF2 = {2, 64, 44}, kF4 = {4, 216, 172};

// The cost model of needle/targets/cpu/winograd.py for weights that are packed in the call.
double cost(const Scheme& s, const View& x, const View& y) {
  const int64_t side = s.tile == 1 ? 3 : s.tile + 2, in = ceil_div(x.shape[1], kBlock),
                out = ceil_div(y.shape[1], kBlock);
  const double tiles = static_cast<double>(y.shape[0] * ceil_div(y.shape[2], s.tile) * ceil_div(y.shape[3], s.tile));
  const double points = static_cast<double>(side * side), pairs = static_cast<double>(in * out);
  const double fetch =
      pairs * kBlock * kBlock * points;  // a byte of weights takes 1/4 of an operation, and twice that to pack
  const double work =
      tiles * (in * s.input + out * s.output + points * pairs * kBlock) + pairs * kBlock * points + 2 * fetch;
  return std::max(work, fetch) + 0.4 * std::min(work, fetch);
}

// The scheme for a convolution, or null.
const Scheme* scheme(const View& x, const View& w, const View& y, const Geometry& g) {
  const Pair unit = {1, 1};
  if (w.shape[2] != 3 || w.shape[3] != 3 || g.groups != 1 || g.stride != unit || g.dilation != unit ||
      x.shape[1] < kBlock || y.size() == 0)
    return nullptr;
  const Scheme* best = &kDirect;
  for (const Scheme* s : {&kF4, &kF2})
    if (s->tile <= winograd_tile.load(std::memory_order_relaxed) && cost(*s, x, y) < cost(*best, x, y)) best = s;
  return best == &kDirect ? nullptr : best;
}

// Images of (N, C, H, W) in blocks of 16 channels between zeros.
struct Blocked {
  int64_t channels, height, width, around_h, around_w;

  int64_t pitch() const { return (width + 2 * around_w) * kBlock; }
  int64_t plane() const { return (height + 2 * around_h) * pitch(); }
  int64_t floats() const { return ceil_div(channels, kBlock) * plane(); }
  View view(float* memory, int64_t images) const {
    View v = view_of(memory + around_h * pitch() + around_w * kBlock,
                     {images, ceil_div(channels, kBlock), height, width, kBlock});
    v.stride[0] = floats(), v.stride[1] = plane(), v.stride[2] = pitch();
    return v;
  }
};

View images(View v, int64_t first, int64_t count) {
  v.data = static_cast<float*>(v.data) + first * v.stride[0];
  v.shape[0] = count;
  return v;
}

void through_winograd(const Scheme& s, const Tensor& t, const View& x, const View& w, const Optional& bias,
                      const View& y, const Geometry& g, const Activation& activation) {
  const int64_t N = x.shape[0], O = y.shape[1], out_blocks = ceil_div(O, kBlock), points = (s.tile + 2) * (s.tile + 2);
  const Blocked in = {x.shape[1], x.shape[2], x.shape[3], g.padding[0], g.padding[1]};
  const Blocked out = {O, y.shape[2], y.shape[3], 0, 0};
  const int64_t inputs = ceil_div(in.channels, kBlock) * kBlock, weights = out_blocks * points * inputs * kBlock;
  const int64_t batch = std::clamp<int64_t>(threads() * kBatchFloats / (in.floats() + out.floats()), 1, N);
  Room room(Room::padded(batch * in.floats()) + batch * out.floats() + weights + out_blocks * kBlock);
  float *from = room.take(batch * in.floats()), *to = room.take(batch * out.floats());
  const View packed = view_of(room.take(weights), {out_blocks, points, inputs, kBlock});
  const View shift = view_of(room.take(out_blocks * kBlock), {out_blocks * kBlock});
  run<winograd_pack_args>(find("winograd_pack", t), t, {.weight = w}, {.packed = packed}, {.tile = s.tile});
  if (bias)
    for (int64_t i = 0; i < out_blocks * kBlock; i++)
      static_cast<float*>(shift.data)[i] = i < O ? static_cast<float*>(bias.data)[i * bias.stride[0]] : 0;
  if (in.around_h || in.around_w)
    run<zero_halo_args>(find("zero_halo", t), t, {}, {.y = in.view(from, batch)},
                        {.top = in.around_h, .bottom = in.around_h, .left = in.around_w, .right = in.around_w});
  for (int64_t n = 0; n < N; n += batch) {
    const int64_t count = std::min(batch, N - n);
    const View a = in.view(from, count), b = out.view(to, count);
    run<to_blocked_args>(find("to_blocked", t), t, {.x = images(x, n, count)}, {.y = a}, {});
    const auto convolve = [&]<class Args>(const char* kernel, const Args*) {
      run<Args>(find(kernel, t), t,
                {.x = a, .packed = packed, .bias = bias ? Optional{shift} : kAbsent, .residual = kAbsent}, {.y = b},
                {.pad_top = g.padding[0],
                 .pad_left = g.padding[1],
                 .activation = activation.code,
                 .alpha = activation.alpha,
                 .pool = 0});
    };
    if (s.tile == 4)
      convolve("conv2d_winograd_f4", static_cast<conv2d_winograd_f4_args*>(nullptr));
    else
      convolve("conv2d_winograd_f2", static_cast<conv2d_winograd_f2_args*>(nullptr));
    run<from_blocked_args>(find("from_blocked", t), t, {.x = b}, {.y = images(y, n, count)}, {});
  }
}

// A kernel of kernels.def that convolves.
template <class Args>
void run_window(const char* kernel, const Tensor& t, const View& x, const View& w, const Optional& bias, const View& y,
                const Geometry& g, const Activation& activation) {
  typename Args::Attr a = {};
  a.stride_h = g.stride[0], a.stride_w = g.stride[1];
  a.pad_top = g.padding[0], a.pad_left = g.padding[1];
  if constexpr (requires { a.pad_bottom; }) a.pad_bottom = g.padding[0], a.pad_right = g.padding[1];
  a.dilation_h = g.dilation[0], a.dilation_w = g.dilation[1];
  a.groups = g.groups;
  a.activation = activation.code, a.alpha = activation.alpha;
  run<Args>(find(kernel, t), t, {.x = x, .weight = w, .bias = bias}, {.y = y}, a);
}

// Rows of the result, of one image, and what they read.
struct Band {
  View x, y;
  Pair padding;
};

Band band_of(const View& x, const View& w, const View& y, const Geometry& g, int64_t image, int64_t first,
             int64_t rows) {
  const int64_t top = first * g.stride[0] - g.padding[0];
  const int64_t begin = std::clamp<int64_t>(top, 0, x.shape[2] - 1);
  const int64_t end = top + (rows - 1) * g.stride[0] + (w.shape[2] - 1) * g.dilation[0] + 1;
  Band b = {images(x, image, 1), images(y, image, 1), {begin - top, g.padding[1]}};
  b.x.data = static_cast<float*>(b.x.data) + begin * x.stride[2];
  b.x.shape[2] = std::clamp<int64_t>(end - begin, 1, x.shape[2] - begin);
  b.y.data = static_cast<float*>(b.y.data) + first * y.stride[2];
  b.y.shape[2] = rows;
  return b;
}

// Large images for small weights in bands of rows that stay in a core's cache while they are blocked and unblocked.
void through_bands(const Tensor& t, const View& x, const View& w, const Optional& bias, const View& y,
                   const Geometry& g, const Activation& activation) {
  const int64_t row = y.shape[1] * y.shape[3] + g.stride[0] * x.shape[1] * x.shape[3];
  const int64_t bands = ceil_div(y.shape[2], std::max<int64_t>(1, kBandFloats / row));
  each(y.shape[0] * bands, [&](int64_t task) {
    const int64_t band = task % bands, first = y.shape[2] * band / bands, last = y.shape[2] * (band + 1) / bands;
    const Band b = band_of(x, w, y, g, task / bands, first, last - first);
    run_window<conv2d_args>("conv2d", t, b.x, w, bias, b.y, {g.stride, b.padding, g.dilation, g.groups}, activation);
  });
}

void multiply(const Tensor& t, const View& a, const View& b, const Optional& bias, const View& y,
              const Activation& activation) {
  run<matmul_args>(find("matmul", t), t, {.a = a, .b = b, .bias = bias}, {.y = y},
                   {.activation = activation.code, .alpha = activation.alpha});
}

}  // namespace

void check_geometry(const char* op, const Tensor& x, const Tensor& w, const Geometry& g, int64_t in_channels) {
  check_rank(op, "input", x, 4);
  check_rank(op, "weight", w, 4);
  for (int i = 0; i < 2; i++)
    if (g.stride[i] < 1 || g.dilation[i] < 1 || g.padding[i] < 0)
      fail(op, "stride and dilation expect at least 1 and padding at least 0.");
  if (g.groups < 1 || x.size(1) % g.groups || w.size(0) % g.groups)
    fail(op, "groups expects a divisor of the channels, got " + std::to_string(g.groups) + " for weight of shape " +
                 shape_of(w) + ".");
  if (x.size(1) != in_channels)
    fail(op,
         "weight expects " + std::to_string(in_channels) + " input channels, got input of shape " + shape_of(x) + ".");
}

std::vector<int64_t> conv_size(const char* op, const Tensor& x, const Tensor& w, const Geometry& g) {
  std::vector<int64_t> size = {x.size(0), w.size(0)};
  for (int i = 0; i < 2; i++) {
    const int64_t room = x.size(2 + i) + 2 * g.padding[i] - g.dilation[i] * (w.size(2 + i) - 1) - 1;
    if (room < 0) fail(op, "the kernel is larger than the padded input of shape " + shape_of(x) + ".");
    size.push_back(room / g.stride[i] + 1);
  }
  return size;
}

void convolve(const Tensor& t, const View& x, const View& w, const Optional& bias, const View& y, const Geometry& g,
              const Activation& activation) {
  if (is_product(x, w, y, g)) return multiply(t, matrix(x), transposed(pixel(w)), bias, matrix(y), activation);
  const Scheme* s = find("winograd_pack", t) ? scheme(x, w, y, g) : nullptr;
  if (s) return through_winograd(*s, t, x, w, bias, y, g, activation);
  const bool large = t.is_cpu() && y.size() + x.size() >= 2 * kBandFloats && 8 * w.size() <= kBandFloats;
  if (large) return through_bands(t, x, w, bias, y, g, activation);
  run_window<conv2d_args>("conv2d", t, x, w, bias, y, g, activation);
}

void convolve_transposed(const Tensor& t, const View& x, const View& w, const Optional& bias, const View& y,
                         const Geometry& g, const Activation& activation) {
  if (is_product(x, w, y, g)) return multiply(t, matrix(x), pixel(w), bias, matrix(y), activation);
  if (g.groups == 1 && g.stride == Pair{1, 1} && find("winograd_pack", t)) {  // the convolution with turned weights
    View turned = transposed(w);
    Pair padding = g.padding;
    for (int i = 0; i < 2; i++) {
      turned.data = static_cast<float*>(turned.data) + (w.shape[2 + i] - 1) * w.stride[2 + i];
      turned.stride[2 + i] = -w.stride[2 + i];
      padding[i] = g.dilation[i] * (w.shape[2 + i] - 1) - g.padding[i];
    }
    const Geometry same = {g.stride, padding, g.dilation, 1};
    const Scheme* s = padding[0] >= 0 && padding[1] >= 0 ? scheme(x, turned, y, same) : nullptr;
    if (s) return through_winograd(*s, t, x, turned, bias, y, same, activation);
  }
  run_window<conv_transpose2d_args>("conv_transpose2d", t, x, w, bias, y, g, activation);
}

void convolve_weight_grad(const Tensor& t, const View& x, const View& dy, const View& dw, const Geometry& g) {
  if (is_product(x, dw, dy, g)) return multiply(t, transposed(matrix(dy)), matrix(x), kAbsent, pixel(dw), {});
  run<conv2d_weight_grad_args>(find("conv2d_weight_grad", t), t, {.x = x, .dy = dy}, {.dweight = dw},
                               {.stride_h = g.stride[0],
                                .stride_w = g.stride[1],
                                .pad_top = g.padding[0],
                                .pad_left = g.padding[1],
                                .dilation_h = g.dilation[0],
                                .dilation_w = g.dilation[1],
                                .groups = g.groups});
}

}  // namespace needle::torch_ops

// The largest tile of Winograd's that convolutions may take: 4, 2, or 0 for none.
extern "C" __attribute__((visibility("default"))) void needle_torch_winograd(int largest_tile) {
  needle::torch_ops::winograd_tile = largest_tile;
}
