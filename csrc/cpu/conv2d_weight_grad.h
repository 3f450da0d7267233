// What the weight gradients of blocked images share: the problem, and how pixels are summed up in parts.
#pragma once
#include "cpu/conv.h"

namespace needle::NEEDLE_ISA {

constexpr int64_t kPixels = 256;     // pixels that are summed in registers at a time
constexpr int64_t kSections = 1024;  // such sums that are added up in one chain
constexpr int64_t kTasks = 32;       // that there are at least, where there are pixels enough for them
constexpr int64_t kStretch = 1024;   // pixels that are worth sums of their own

constexpr int kRowTaps = 3;  // taps of a kernel row that meet a pixel together, at most

struct Gradient {
  Window window;
  int64_t images, height, width, groups, inputs, outputs;  // inputs and outputs: channels of a group
  Images<const float> x, dy;                               // x includes the padding
  View dw;
  int64_t block() const { return x.pixel; }
  int64_t taps() const { return window.kernel_h * window.kernel_w; }
  int64_t pixels() const { return images * height * width; }
  int64_t out_channels() const { return groups * outputs; }
};

// Stretches of pixels, of which each is worth `least` of them, such that there are kTasks tasks: by the shapes alone,
// so that sums do not depend on the number of threads.
NEEDLE_INLINE int64_t stretches(int64_t pixels, int64_t tasks, int64_t least) {
  return larger(1, larger(smaller(pixels / least, ceil_div(kTasks, tasks)), ceil_div(pixels, kPixels * kSections)));
}

// sums[0 .. n) of the first of `parts` sums, `apart` floats from each other, becomes that of all.
NEEDLE_INLINE void add_parts(float* sums, int64_t n, int64_t parts, int64_t apart) {
  for (int64_t part = 1; part < parts; part++)
    for (int64_t i = 0; i < n; i += V::N) (V::load(sums + i) + V::load(sums + part * apart + i)).store(sums + i);
}

// f(first, count) for stretches of nearly one size, each of at most `most`.
template <class F>
NEEDLE_INLINE void evenly(int64_t items, int64_t most, const F& f) {
  const int64_t n = ceil_div(items, most);
  for (int64_t i = 0; i < n; i++) f(items * i / n, items * (i + 1) / n - items * i / n);
}

// Every channel has a filter of its own.
void depthwise_gradient(const Exec* exec, const Gradient& g);
// Whether that of groups is summed up in the terms of the forward pass, which pays where no lane meets other groups.
NEEDLE_INLINE bool is_narrow(const Channels& c) {
  return c.groups > 1 && c.block == kBlock && (c.outputs == kBlock || form_of(c, kRowTaps, kRowTaps).picks());
}
void narrow_gradient(const Exec* exec, const Gradient& g);

}  // namespace needle::NEEDLE_ISA
