// Resizing of images of any strides, with torch's source coordinates. Gradients are gathered from the few outputs that
// an input pixel can have gone into; which of them did is computed as in the forward direction.
#include "gpu/image.cuh"

namespace needle::gpu {
namespace {

using Source = device::SourceOf<int>;

template <class T>
__device__ __forceinline__ T mix(const Source& s, T a, T b) {
  return s.low == s.high ? a : static_cast<T>(1 - s.part) * a + static_cast<T>(s.part) * b;
}
__device__ __forceinline__ double weight_of(const Source& s, int at) {
  return (s.low == at ? 1 - s.part : 0) + (s.high == at ? s.part : 0);
}

struct Bilinear {
  bool align_corners;
  double scale;
  __device__ __forceinline__ Source source(int out, int size) const {
    return device::bilinear_source(out, align_corners, scale, size);
  }
};
struct Nearest {
  float scale;
  __device__ __forceinline__ Source source(int out, int size) const {
    const int at = device::nearest_source(out, scale, size);
    return {at, at, 0};
  }
};

// Outputs that input `at` of `size` may have gone into: those whose source, about scale * output, is less than 2 away.
struct Range {
  int begin, end;
};
__device__ __forceinline__ Range reached(int at, int size, double scale, int outputs) {
  double first = (at - 2) / scale, last = (at + 2.5) / scale + 1;
  int begin = at > 0 && scale > 0 && first > 0 ? static_cast<int>(first) : 0;
  int end = at < size - 1 && scale > 0 && last < outputs ? static_cast<int>(last) + 1 : outputs;
  return {begin, end < outputs ? end : outputs};
}

template <class T, class Kind>
struct Resize {
  Image<T> in, out;
  Kind rows, columns;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team&, int64_t n, bool) const {
    Spot s = out.spot(n);
    Source y = rows.source(s.y, in.height), x = columns.source(s.x, in.width);
    if constexpr (std::is_same_v<Kind, Nearest>) {
      out.at(s) = in.at(s, y.low, x.low);
    } else {
      T top = mix(x, in.at(s, y.low, x.low), in.at(s, y.low, x.high));
      out.at(s) = mix(y, top, mix(x, in.at(s, y.high, x.low), in.at(s, y.high, x.high)));
    }
  }
};

template <class T, class Kind>
struct ResizeGrad {
  Image<T> dy, dx;
  Kind rows, columns;
  template <class Team>
  __device__ __forceinline__ void operator()(const Team&, int64_t n, bool) const {
    Spot s = dx.spot(n);
    Range ys = reached(s.y, dx.height, rows.scale, dy.height), xs = reached(s.x, dx.width, columns.scale, dy.width);
    T sum = 0;
#pragma unroll 1  // copies of these loops would not fit in registers
    for (int y = ys.begin; y < ys.end; y++) {
      T weight = static_cast<T>(weight_of(rows.source(y, dx.height), s.y));
      if (weight == 0) continue;
      T row = 0;
#pragma unroll 1
      for (int x = xs.begin; x < xs.end; x++) {
        T w = static_cast<T>(weight_of(columns.source(x, dx.width), s.x));
        if (w != 0) row += w * dy.at(s, y, x);
      }
      sum += weight * row;
    }
    dx.at(s) = sum;
  }
};

template <class T>
using ResizeBilinear = Resize<T, Bilinear>;
template <class T>
using ResizeNearest = Resize<T, Nearest>;
template <class T>
using ResizeBilinearGrad = ResizeGrad<T, Bilinear>;
template <class T>
using ResizeNearestGrad = ResizeGrad<T, Nearest>;

template <class Attr>
Bilinear bilinear(const Attr& a, double scale) {
  return {a.align_corners != 0, scale};
}
Nearest nearest(double scale) { return {static_cast<float>(scale)}; }

}  // namespace

void interpolate_bilinear(const interpolate_bilinear_args& c) {
  for_pixels<interpolate_bilinear_args::In::x_dtypes, ResizeBilinear>("interpolate_bilinear", c, c.out.y, c.in.x,
                                                                      c.out.y, bilinear(c.attr, c.attr.scale_h),
                                                                      bilinear(c.attr, c.attr.scale_w));
}
void interpolate_bilinear_grad(const interpolate_bilinear_grad_args& c) {
  for_pixels<interpolate_bilinear_grad_args::In::dy_dtypes, ResizeBilinearGrad>(
      "interpolate_bilinear_grad", c, c.out.dx, c.in.dy, c.out.dx, bilinear(c.attr, c.attr.scale_h),
      bilinear(c.attr, c.attr.scale_w));
}
void interpolate_nearest(const interpolate_nearest_args& c) {
  for_pixels<interpolate_nearest_args::In::x_dtypes, ResizeNearest>("interpolate_nearest", c, c.out.y, c.in.x, c.out.y,
                                                                    nearest(c.attr.scale_h), nearest(c.attr.scale_w));
}
void interpolate_nearest_grad(const interpolate_nearest_grad_args& c) {
  for_pixels<interpolate_nearest_grad_args::In::dy_dtypes, ResizeNearestGrad>(
      "interpolate_nearest_grad", c, c.out.dx, c.in.dy, c.out.dx, nearest(c.attr.scale_h), nearest(c.attr.scale_w));
}

}  // namespace needle::gpu
