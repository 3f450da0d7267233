// Offsets of buffers in an arena: greedy by size over lifetimes (Pisarchyk and Lee, arXiv 2001.03288).
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace needle {

struct Lifetime {
  int64_t bytes, first, last;  // the steps that first and last touch a buffer
};

// One offset for each, whole numbers of `alignment`, and the arena's bytes behind them; buffers alive at the same step
// lie apart.
inline std::vector<int64_t> plan_offsets(const std::vector<Lifetime>& buffers, int64_t alignment) {
  std::vector<size_t> order(buffers.size()), placed;
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return buffers[a].bytes != buffers[b].bytes ? buffers[a].bytes > buffers[b].bytes
                                                : buffers[a].first < buffers[b].first;
  });
  auto aligned = [&](size_t i) { return (buffers[i].bytes + alignment - 1) / alignment * alignment; };
  std::vector<int64_t> start(buffers.size() + 1, 0);
  for (size_t i : order) {  // `placed` is in the order of what starts there
    int64_t at = 0, size = aligned(i);
    for (size_t other : placed) {
      if (buffers[other].first > buffers[i].last || buffers[i].first > buffers[other].last) continue;
      if (start[other] - at >= size) break;
      at = std::max(at, start[other] + aligned(other));
    }
    start[i] = at;
    placed.insert(std::upper_bound(placed.begin(), placed.end(), at,
                                   [&](int64_t value, size_t other) { return value < start[other]; }),
                  i);
    start.back() = std::max(start.back(), at + size);
  }
  return start;
}

}  // namespace needle
