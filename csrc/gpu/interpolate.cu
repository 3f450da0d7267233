// Resizing of images of any strides, with torch's source coordinates. Gradients are gathered from the few outputs that
// an input pixel can have gone into; which of them did is computed as in the forward direction.
#include "gpu/image.cuh"

namespace needle::gpu {
namespace {

using Source = device::SourceOf<int>;

template <class T>
__device__ __forceinline__ T mix(const Source& s, T a, T b) {
  using S = Scalar<T>;
  return s.low == s.high ? a : static_cast<S>(1 - s.part) * a + static_cast<S>(s.part) * b;
}
__device__ __forceinline__ double weight_of(const Source& s, int at) {
  return (s.low == at ? 1 - s.part : 0) + (s.high == at ? s.part : 0);
}
__device__ __forceinline__ double weight_of(int source, int at) { return source == at; }

// Outputs that input `at` of `size` may have gone into: those whose source, about scale * output, is less than 2 away.
__device__ __forceinline__ device::SpanOf<int> reached(int at, int size, double scale, int outputs) {
  double first = (at - 2) / scale, last = (at + 2.5) / scale + 1;
  int begin = at > 0 && scale > 0 && first > 0 ? static_cast<int>(first) : 0;
  int end = at < size - 1 && scale > 0 && last < outputs ? static_cast<int>(last) + 1 : outputs;
  return {begin, end < outputs ? end : outputs};
}

template <class Kind>
struct Resize {
  template <class T>
  struct Forward {
    Image<T> in;
    Kind rows, columns;
    __device__ __forceinline__ T operator()(const Image<T>&, const Spot& s) const {
      const auto y = source_of(rows, s.y, in.height), x = source_of(columns, s.x, in.width);
      if constexpr (std::is_same_v<Kind, device::Nearest>) {
        return in.get(s, y, x);
      } else {
        T top = mix(x, in.get(s, y.low, x.low), in.get(s, y.low, x.high));
        return mix(y, top, mix(x, in.get(s, y.high, x.low), in.get(s, y.high, x.high)));
      }
    }
  };

  template <class T>
  struct Backward {
    Image<T> dy;
    Kind rows, columns;
    __device__ __forceinline__ T operator()(const Image<T>& dx, const Spot& s) const {
      const auto ys = reached(s.y, dx.height, rows.scale, dy.height),
                 xs = reached(s.x, dx.width, columns.scale, dy.width);
      using S = Scalar<T>;
      T sum = 0;
#pragma unroll 1  // copies of these loops would not fit in registers
      for (int y = ys.begin; y < ys.end; y++) {
        S weight = static_cast<S>(weight_of(source_of(rows, y, dx.height), s.y));
        if (weight == 0) continue;
        T row = 0;
#pragma unroll 1
        for (int x = xs.begin; x < xs.end; x++) {
          S w = static_cast<S>(weight_of(source_of(columns, x, dx.width), s.x));
          if (w != 0) row += w * dy.get(s, y, x);
        }
        sum += weight * row;
      }
      return sum;
    }
  };
};

template <class Kind, class Args>
void resize(const char* op, const Args& c) {
  for_pixels<Args::In::x_dtypes, Resize<Kind>::template Forward>(op, c, c.out.y, c.in.x, Kind(c.attr, c.attr.scale_h),
                                                                 Kind(c.attr, c.attr.scale_w));
}
template <class Kind, class Args>
void resize_grad(const char* op, const Args& c) {
  for_pixels<Args::In::dy_dtypes, Resize<Kind>::template Backward>(
      op, c, c.out.dx, c.in.dy, Kind(c.attr, c.attr.scale_h), Kind(c.attr, c.attr.scale_w));
}

}  // namespace

void interpolate_bilinear(const interpolate_bilinear_args& c) { resize<device::Bilinear>("interpolate_bilinear", c); }
void interpolate_bilinear_grad(const interpolate_bilinear_grad_args& c) {
  resize_grad<device::Bilinear>("interpolate_bilinear_grad", c);
}
void interpolate_nearest(const interpolate_nearest_args& c) { resize<device::Nearest>("interpolate_nearest", c); }
void interpolate_nearest_grad(const interpolate_nearest_grad_args& c) {
  resize_grad<device::Nearest>("interpolate_nearest_grad", c);
}

}  // namespace needle::gpu
