// The lines of arrays along an axis of theirs.
#pragma once
#include "gpu/strided.cuh"

namespace needle::gpu {

// Of N arrays of one shape but for that axis; their elements are `step` apart in a line.
template <int N>
struct Lines {
  Loop<N> across;  // from line to line
  int64_t step[N];
  uint32_t count;
};

template <int N>
Lines<N> lines_of(const char* op, const View* const (&views)[N], int64_t axis) {
  Lines<N> l = {};
  for (int d = 0; d < views[0]->rank; d++) {
    int64_t strides[N];
    for (int k = 0; k < N; k++) strides[k] = views[k]->stride[d];
    if (d != axis) l.across.add(views[0]->shape[d], strides);
  }
  l.across.finish(op);
  for (int k = 0; k < N; k++) {
    l.step[k] = views[k]->stride[axis];
    if (views[k]->shape[axis] > INT32_MAX)
      fail(op, "an axis on a GPU has at most 2^31 - 1 elements", std::to_string(views[k]->shape[axis]));
  }
  l.count = static_cast<uint32_t>(l.across.total);
  return l;
}

inline unsigned pieces_of(uint32_t n, uint32_t size) { return n / size + (n % size != 0); }

}  // namespace needle::gpu
