// Zones of NaN around everything that a plan's kernels touch, and NaN in what nothing has written yet: such runs are
// slow and find kernels that write outside of their operands, or read there and use it.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/storage.h"

namespace needle {

constexpr size_t kGuardBytes = 256;  // keeps the alignment of what lies between two zones

// A buffer of the arena, in use from step `first` to step `last`.
struct GuardedBuffer {
  size_t offset, bytes;
  int first, last;
};

class Guard {
 public:
  explicit Guard(std::vector<GuardedBuffer> buffers) : buffers_(std::move(buffers)) {}

  // A copy of `bytes` at `data` (NaN where that is null) between two zones.
  static std::shared_ptr<Storage> copy(const Backend* backend, const void* data, size_t bytes);

  // Fills what step `i` is the first to use, and the zones around it.
  void before(int i, char* arena) const;
  // Throws where a zone was written to around a buffer in use; `kernel` is that of step `i`.
  void after(int i, const char* arena, const std::string& kernel) const;
  // Whether the zones around a copy are as they were.
  static bool intact(const Storage& copy);

 private:
  std::vector<GuardedBuffer> buffers_;
};

}  // namespace needle
