// Which input positions the outputs of pools and resizes read, in positions of type I; torch's rules.
#pragma once
#include "math/maps.h"

namespace needle::NEEDLE_ISA {

template <class Attr, class = void>
constexpr bool kDilates = false;
template <class Attr>
constexpr bool kDilates<Attr, decltype(void(Attr::dilation_h))> = true;

// The attributes of a window that slides over images.
template <class I>
struct WindowOf {
  I kernel_h, kernel_w, stride_h, stride_w, pad_top, pad_left, dilation_h = 1, dilation_w = 1;

  WindowOf() = default;
  template <class Attr>
  explicit WindowOf(const Attr& a) : WindowOf(a, a.kernel_h, a.kernel_w) {}
  template <class Attr>
  WindowOf(const Attr& a, int64_t kernel_h, int64_t kernel_w)
      : kernel_h(static_cast<I>(kernel_h)),
        kernel_w(static_cast<I>(kernel_w)),
        stride_h(static_cast<I>(a.stride_h)),
        stride_w(static_cast<I>(a.stride_w)),
        pad_top(static_cast<I>(a.pad_top)),
        pad_left(static_cast<I>(a.pad_left)) {
    if constexpr (kDilates<Attr>) dilation_h = static_cast<I>(a.dilation_h), dilation_w = static_cast<I>(a.dilation_w);
  }
};

template <class I>
NEEDLE_MAP_INLINE I lesser(I a, I b) {
  return a < b ? a : b;
}

// Input positions [begin, end).
template <class I>
struct SpanOf {
  I begin, end;
};

// The part of a window that lies inside the image, in steps of the dilation.
template <class I>
NEEDLE_MAP_INLINE SpanOf<I> clip(I out, I stride, I pad, I kernel, I dilation, I size) {
  I begin = out * stride - pad, end = begin + (kernel - 1) * dilation + 1;
  if (begin < 0) begin += (-begin + dilation - 1) / dilation * dilation;
  return {begin, lesser(end, size)};
}
template <class I>
NEEDLE_MAP_INLINE SpanOf<I> rows_of(const WindowOf<I>& w, I out, I, I height) {
  return clip(out, w.stride_h, w.pad_top, w.kernel_h, w.dilation_h, height);
}
template <class I>
NEEDLE_MAP_INLINE SpanOf<I> columns_of(const WindowOf<I>& w, I out, I, I width) {
  return clip(out, w.stride_w, w.pad_left, w.kernel_w, w.dilation_w, width);
}

// How an average pool divides: by `divisor` where it is not 0; else a window counts at most up to the end of the
// padding, or only what is inside the image.
template <class I>
struct AverageOf : WindowOf<I> {
  bool count_padding;
  I divisor;

  template <class Attr>
  explicit AverageOf(const Attr& a)
      : WindowOf<I>(a), count_padding(a.count_include_pad != 0), divisor(static_cast<I>(a.divisor)) {}
};
template <class I>
NEEDLE_MAP_INLINE I divisor_of(const AverageOf<I>& w, I y, I x, SpanOf<I> ys, SpanOf<I> xs, I height, I width) {
  if (w.divisor != 0) return w.divisor;
  if (!w.count_padding) return (ys.end - ys.begin) * (xs.end - xs.begin);
  I bottom = height + 2 * w.pad_top - y * w.stride_h, right = width + 2 * w.pad_left - x * w.stride_w;
  return lesser(w.kernel_h, bottom) * lesser(w.kernel_w, right);
}

// An adaptive pool: its windows share the image out.
struct Adaptive {};
template <class I>
NEEDLE_MAP_INLINE SpanOf<I> bin(I out, I outputs, I size) {
  const int64_t wide = out;  // times a size it need not fit an I
  return {static_cast<I>(wide * size / outputs), static_cast<I>(((wide + 1) * size + outputs - 1) / outputs)};
}
template <class I>
NEEDLE_MAP_INLINE SpanOf<I> rows_of(const Adaptive&, I out, I outputs, I height) {
  return bin(out, outputs, height);
}
template <class I>
NEEDLE_MAP_INLINE SpanOf<I> columns_of(const Adaptive&, I out, I outputs, I width) {
  return bin(out, outputs, width);
}
template <class I>
NEEDLE_MAP_INLINE I divisor_of(const Adaptive&, I, I, SpanOf<I> ys, SpanOf<I> xs, I, I) {
  return (ys.end - ys.begin) * (xs.end - xs.begin);
}

// An output of a resize lies between two input positions; `part` is the weight of the second. They are one where the
// size stays: 0 times what lies beside a pixel would let NaN and infinity in.
template <class I>
struct SourceOf {
  I low, high;
  double part;
};

// How a resize finds sources along one axis.
struct Bilinear {
  bool align_corners;
  double scale;
  template <class Attr>
  Bilinear(const Attr& a, double scale) : align_corners(a.align_corners != 0), scale(scale) {}
};
struct Nearest {
  float scale;  // torch computes the index in float, which decides where a product falls on an integer
  template <class Attr>
  Nearest(const Attr&, double scale) : scale(static_cast<float>(scale)) {}
};
template <class I>
NEEDLE_MAP_INLINE SourceOf<I> source_of(const Bilinear& b, I out, I size) {
  if (b.scale == 1) return {lesser<I>(out, size - 1), lesser<I>(out, size - 1), 0};
  double at = b.align_corners ? out * b.scale : (out + 0.5) * b.scale - 0.5;
  if (at < 0) at = 0;
  const I low = lesser<I>(static_cast<I>(at), size - 1);
  return {low, lesser<I>(low + 1, size - 1), at - static_cast<double>(low)};
}
template <class I>
NEEDLE_MAP_INLINE I source_of(const Nearest& n, I out, I size) {
  return lesser<I>(static_cast<I>(static_cast<float>(out) * n.scale), size - 1);
}

}  // namespace needle::NEEDLE_ISA
