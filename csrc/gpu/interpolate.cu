// Resizing of images of any strides, with torch's source coordinates. Gradients are gathered from the few outputs that
// an input pixel can have gone into; which of them did is computed as in the forward direction.
#include "gpu/image.cuh"

namespace needle::gpu {
namespace {

// An output position lies between two input positions; `part` is the weight of the second. They are one where the size
// stays: 0 times what lies beside a pixel would let NaN and infinity in.
struct Source {
  int low, high;
  double part;
  template <class T>
  __device__ __forceinline__ T mix(T a, T b) const {
    return low == high ? a : static_cast<T>(1 - part) * a + static_cast<T>(part) * b;
  }
  __device__ __forceinline__ double weight(int at) const {
    return (low == at ? 1 - part : 0) + (high == at ? part : 0);
  }
};

struct Bilinear {
  bool align_corners;
  double scale;
  __device__ __forceinline__ Source source(int out, int size) const {
    if (scale == 1) return {out < size ? out : size - 1, out < size ? out : size - 1, 0};
    double at = align_corners ? out * scale : (out + 0.5) * scale - 0.5;
    if (at < 0) at = 0;
    int low = static_cast<int>(at);
    low = low < size - 1 ? low : size - 1;
    return {low, low + 1 < size ? low + 1 : size - 1, at - low};
  }
};

struct Nearest {  // torch computes the index in float, which decides where a product falls on an integer
  float scale;
  __device__ __forceinline__ Source source(int out, int size) const {
    int at = static_cast<int>(static_cast<float>(out) * scale);
    at = at < size - 1 ? at : size - 1;
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
      T top = x.mix(in.at(s, y.low, x.low), in.at(s, y.low, x.high));
      out.at(s) = y.mix(top, x.mix(in.at(s, y.high, x.low), in.at(s, y.high, x.high)));
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
    for (int y = ys.begin; y < ys.end; y++) {
      T weight = static_cast<T>(rows.source(y, dx.height).weight(s.y));
      if (weight == 0) continue;
      T row = 0;
      for (int x = xs.begin; x < xs.end; x++) {
        T w = static_cast<T>(columns.source(x, dx.width).weight(s.x));
        if (w != 0) row += w * dy.at(s, y, x);
      }
      sum += weight * row;
    }
    dx.at(s) = sum;
  }
};

template <template <class, class> class Op, class Args, class Kind>
void run(const char* name, const Args& c, const View& from, const View& to, Kind rows, Kind columns) {
  for_pixels(name, c, to, [&](auto t) {
    using T = decltype(t);
    return Op<T, Kind>{Image<T>(from), Image<T>(to), rows, columns};
  });
}

}  // namespace

void interpolate_bilinear(const interpolate_bilinear_args& c) {
  run<Resize>("interpolate_bilinear", c, c.in.x, c.out.y, Bilinear{c.attr.align_corners != 0, c.attr.scale_h},
              Bilinear{c.attr.align_corners != 0, c.attr.scale_w});
}
void interpolate_bilinear_grad(const interpolate_bilinear_grad_args& c) {
  run<ResizeGrad>("interpolate_bilinear_grad", c, c.in.dy, c.out.dx,
                  Bilinear{c.attr.align_corners != 0, c.attr.scale_h},
                  Bilinear{c.attr.align_corners != 0, c.attr.scale_w});
}

void interpolate_nearest(const interpolate_nearest_args& c) {
  run<Resize>("interpolate_nearest", c, c.in.x, c.out.y, Nearest{static_cast<float>(c.attr.scale_h)},
              Nearest{static_cast<float>(c.attr.scale_w)});
}
void interpolate_nearest_grad(const interpolate_nearest_grad_args& c) {
  run<ResizeGrad>("interpolate_nearest_grad", c, c.in.dy, c.out.dx, Nearest{static_cast<float>(c.attr.scale_h)},
                  Nearest{static_cast<float>(c.attr.scale_w)});
}

}  // namespace needle::gpu
