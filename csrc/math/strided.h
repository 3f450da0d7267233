// Loops over strided arrays as every backend plans them: dimensions sorted and merged.
#pragma once
#include <stdint.h>

#include "core/call.h"

namespace needle::NEEDLE_ISA {

// `value` as a T; infinities and large values become the limits of an integer type.
template <class T>
T from_double(double value) {
  if constexpr (T(0.5) == T(0)) {
    constexpr T high = static_cast<T>(~(uint64_t{1} << (8 * sizeof(T) - 1)));
    if (value >= static_cast<double>(high)) return high;
    if (value <= -static_cast<double>(high)) return -high - 1;
  }
  return static_cast<T>(value);
}

// N arrays of one shape. Dimensions of size 1 are gone, the rest are sorted by the first array's stride, large to
// small, and neighbours that all arrays step through as one are merged. Rank is at least 1.
template <int N>
struct MergedLoop {
  int rank = 0;
  int64_t shape[kMaxRank];
  int64_t stride[N][kMaxRank];

  void add(int64_t size, const int64_t* strides) {
    if (size == 1) return;
    auto magnitude = [](int64_t s) { return s < 0 ? -s : s; };
    int d = rank++;
    for (; d > 0 && magnitude(stride[0][d - 1]) < magnitude(strides[0]); d--) {
      shape[d] = shape[d - 1];
      for (int k = 0; k < N; k++) stride[k][d] = stride[k][d - 1];
    }
    shape[d] = size;
    for (int k = 0; k < N; k++) stride[k][d] = strides[k];
  }

  // Dimension `from` becomes dimension `to`, a later one.
  void move(int from, int to) {
    const auto swap = [](int64_t& a, int64_t& b) {
      const int64_t c = a;
      a = b, b = c;
    };
    for (int d = from; d < to; d++) {
      swap(shape[d], shape[d + 1]);
      for (int k = 0; k < N; k++) swap(stride[k][d], stride[k][d + 1]);
    }
  }

  void merge() {
    int last = 0;
    for (int d = 1; d < rank; d++) {
      bool one = true;
      for (int k = 0; k < N; k++) one = one && stride[k][last] == stride[k][d] * shape[d];
      if (one) {
        shape[last] *= shape[d];
      } else {
        shape[++last] = shape[d];
      }
      for (int k = 0; k < N; k++) stride[k][last] = stride[k][d];
    }
    if (rank == 0) {
      shape[0] = 1;
      for (int k = 0; k < N; k++) stride[k][0] = 1;
    }
    rank = rank == 0 ? 1 : last + 1;
  }
};

// The loop over arrays of one shape; `l` has no dimensions yet.
template <int N, class Loop>
void add_dimensions(Loop& l, const View* const (&views)[N]) {
  for (int d = 0; d < views[0]->rank; d++) {
    int64_t strides[N];
    for (int k = 0; k < N; k++) strides[k] = views[k]->stride[d];
    l.add(views[0]->shape[d], strides);
  }
}

// The dimensions that a reduction of `in` keeps go to a loop over `in` and `out`, the others to one over `in`.
template <class Kept, class Reduced>
void split_dimensions(const View& in, const View& out, Kept& kept, Reduced& reduced) {
  for (int d = 0; d < in.rank; d++) {
    const int64_t strides[2] = {in.stride[d], out.stride[d]};
    out.shape[d] == in.shape[d] ? kept.add(in.shape[d], strides) : reduced.add(in.shape[d], strides);
  }
}

// Batch and row dimensions as one, when their strides allow it.
inline bool rows_collapse(const View& v, int64_t* stride) {
  int64_t n = 1, first = 0;
  for (int d = v.rank - 2; d >= 0; d--) {
    if (v.shape[d] == 1) continue;
    if (n == 1) first = v.stride[d];
    if (v.stride[d] != n * first) return false;
    n *= v.shape[d];
  }
  *stride = first;
  return true;
}

}  // namespace needle::NEEDLE_ISA
