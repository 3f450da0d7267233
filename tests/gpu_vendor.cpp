// A vendor's library for the emulation (csrc/gpu/vendor/emulated.cu): it computes by loops and does what a test says.
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <thread>

#include "gpu/vendor/problem.h"

namespace needle {
void refuse_dtype(DType) { throw std::invalid_argument("[vendor] expects float32, got another dtype."); }
}  // namespace needle

using needle::View;
using needle::gpu::vendor::kConv2d;
using needle::gpu::vendor::kConv2dWeightGrad;
using needle::gpu::vendor::kConvTranspose2d;
using needle::gpu::vendor::kMatmul;
using needle::gpu::vendor::Problem;

namespace {

float at(const View& v, std::initializer_list<int64_t> index) {
  const float* p = v.as<float>();
  int d = 0;
  for (int64_t i : index) p += i * v.stride[d++];
  return *p;
}

float finished(const Problem& p, double sum, int64_t channel, float residual) {
  if (p.scale.data) sum *= at(p.scale, {channel});
  if (p.bias.data) sum += at(p.bias, {channel});
  sum += residual;
  return static_cast<float>(p.activation == 1 && sum < 0 ? 0 : sum);
}

void put(const View& v, std::initializer_list<int64_t> index, float value) {
  float* p = v.as<float>();
  int d = 0;
  for (int64_t i : index) p += i * v.stride[d++];
  *p = value;
}

void multiply(const Problem& p) {
  for (int64_t b = 0; b < p.out.shape[0]; b++) {
    for (int64_t i = 0; i < p.out.shape[1]; i++) {
      for (int64_t j = 0; j < p.out.shape[2]; j++) {
        double sum = 0;
        for (int64_t k = 0; k < p.a.shape[2]; k++) sum += double{at(p.a, {b, i, k})} * at(p.b, {b, k, j});
        put(p.out, {b, i, j}, finished(p, sum, j, p.residual.data ? at(p.residual, {b, i, j}) : 0));
      }
    }
  }
}

double window(const Problem& p, int64_t n, int64_t o, int64_t y, int64_t x) {
  const int64_t channels = p.b.shape[1], group = o / (p.out.shape[1] / p.groups);
  double sum = 0;
  for (int64_t c = 0; c < channels; c++) {
    for (int64_t i = 0; i < p.b.shape[2]; i++) {
      for (int64_t j = 0; j < p.b.shape[3]; j++) {
        int64_t row = y * p.stride_h - p.pad_top + i * p.dilation_h,
                column = x * p.stride_w - p.pad_left + j * p.dilation_w;
        if (row < 0 || row >= p.a.shape[2] || column < 0 || column >= p.a.shape[3]) continue;
        sum += double{at(p.a, {n, group * channels + c, row, column})} * at(p.b, {o, c, i, j});
      }
    }
  }
  return sum;
}

// Of the pixels that reach this one.
double turned_window(const Problem& p, int64_t n, int64_t o, int64_t y, int64_t x) {
  const int64_t outputs = p.b.shape[1], inputs = p.b.shape[0] / p.groups, group = o / outputs;
  double sum = 0;
  for (int64_t i = 0; i < p.b.shape[2]; i++) {
    for (int64_t j = 0; j < p.b.shape[3]; j++) {
      int64_t down = y + p.pad_top - i * p.dilation_h, along = x + p.pad_left - j * p.dilation_w;
      if (down < 0 || along < 0 || down % p.stride_h || along % p.stride_w) continue;
      if (down / p.stride_h >= p.a.shape[2] || along / p.stride_w >= p.a.shape[3]) continue;
      for (int64_t c = group * inputs; c < (group + 1) * inputs; c++)
        sum += double{at(p.a, {n, c, down / p.stride_h, along / p.stride_w})} * at(p.b, {c, o % outputs, i, j});
    }
  }
  return sum;
}

// Of all pixels whose window has this tap on this pixel's image.
double gradient(const Problem& p, int64_t o, int64_t c, int64_t i, int64_t j) {
  const int64_t from = o / (p.out.shape[0] / p.groups) * p.out.shape[1] + c;
  double sum = 0;
  for (int64_t n = 0; n < p.b.shape[0]; n++) {
    for (int64_t y = 0; y < p.b.shape[2]; y++) {
      for (int64_t x = 0; x < p.b.shape[3]; x++) {
        int64_t row = y * p.stride_h - p.pad_top + i * p.dilation_h,
                column = x * p.stride_w - p.pad_left + j * p.dilation_w;
        if (row < 0 || row >= p.a.shape[2] || column < 0 || column >= p.a.shape[3]) continue;
        sum += double{at(p.a, {n, from, row, column})} * at(p.b, {n, o, y, x});
      }
    }
  }
  return sum;
}

void convolve(const Problem& p) {
  auto value = p.kind == kConv2d ? window : p.kind == kConv2dWeightGrad ? gradient : turned_window;
  for (int64_t n = 0; n < p.out.shape[0]; n++) {
    for (int64_t o = 0; o < p.out.shape[1]; o++) {
      for (int64_t y = 0; y < p.out.shape[2]; y++) {
        for (int64_t x = 0; x < p.out.shape[3]; x++) {
          float residual = p.residual.data ? at(p.residual, {n, o, y, x}) : 0;
          put(p.out, {n, o, y, x}, finished(p, value(p, n, o, y, x), o, residual));
        }
      }
    }
  }
}

struct {
  const char* refuses = nullptr;
  int runs = 0, fails_after = -1, milliseconds = 0;
  double off_by = 0;
  size_t workspace = 0;
  int turns = 0;  // runs that found another's result in place of their own, which is off by a little
  float own = 0;
} state;

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Runs until one fails (-1: never), how long each takes, what all results are off by, and the workspace it wants.
EXPORT void behave(bool refuses, int fails_after, int milliseconds, double off_by, size_t workspace) {
  state = {refuses ? "not today" : nullptr, 0, fails_after, milliseconds, off_by, workspace};
}
EXPORT int runs() { return state.runs; }
EXPORT int turns() { return state.turns; }

// It has one activation, no epilogue at all behind a transposed convolution, and at TF32 channels by the four.
EXPORT const char* test_vendor_prepare(const Problem* p, size_t* workspace) {
  *workspace = state.workspace;
  if (p->activation > 1) return "no such activation";
  if (p->kind == kConvTranspose2d && (p->bias.data || p->activation)) return "no epilogue";
  if (p->kind == kConv2d && p->precision == 1 && p->a.shape[1] % 4) return "channels by the four";
  return state.refuses;
}

EXPORT int test_vendor_run(const Problem* p, void* workspace, void*) {
  if (state.runs++ == state.fails_after) return 7;
  if (state.workspace) static_cast<char*>(workspace)[state.workspace - 1] = 1;
  std::this_thread::sleep_for(std::chrono::milliseconds(state.milliseconds));
  state.turns += p->out.as<float>()[0] != state.own;
  p->kind == kMatmul ? multiply(*p) : convolve(*p);
  if (state.off_by != 0) p->out.as<float>()[0] += static_cast<float>(state.off_by);
  state.own = p->out.as<float>()[0];
  return 0;
}
