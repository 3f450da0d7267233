// The executor: a flat list of kernel calls over one arena, run without Python, allocation or lookups.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "core/storage.h"

namespace needle {

enum class Space : int32_t { arena, constant, input, output };

// Where an operand lives: byte `offset` into the arena, or into constant, input or output number `index`.
struct Ref {
  Space space = Space::arena;
  int32_t index = 0;
  int64_t offset = 0;
  View view;  // shape, strides and dtype; the data pointer is filled in per frame
};

struct Step {
  const KernelRow* row = nullptr;
  std::vector<Ref> out, in;
  std::vector<double> attr;
};

class Plan {
 public:
  using Constants = std::vector<std::shared_ptr<Storage>>;

  Plan(const Backend* backend, std::vector<Step> steps, size_t arena_bytes, std::vector<View> inputs,
       std::vector<View> outputs);

  ~Plan();

  // Replaces the packed weights; runs in flight keep the ones they started with.
  void set_constants(Constants constants);

  // `inputs` and `outputs` are contiguous and have the plan's shapes. `seconds`, if given, gets one time per step.
  void run(const std::vector<void*>& inputs, const std::vector<void*>& outputs, double* seconds = nullptr);

  const Backend* backend() const { return backend_; }
  const std::vector<View>& inputs() const { return inputs_; }
  const std::vector<View>& outputs() const { return outputs_; }
  const std::vector<Step>& steps() const { return steps_; }
  size_t arena_bytes() const { return arena_bytes_; }
  size_t frames() const;

 private:
  struct Frame;  // one run in flight: its arena and the calls resolved to pointers
  std::unique_ptr<Frame> acquire();
  void release(std::unique_ptr<Frame> frame);
  void resolve(Frame& frame) const;

  const Backend* backend_;
  std::vector<Step> steps_;
  size_t arena_bytes_;
  std::vector<View> inputs_, outputs_;
  mutable std::mutex mutex_;
  std::shared_ptr<const Constants> constants_;
  std::atomic<double> seconds_{0};  // of the last run
  std::vector<std::unique_ptr<Frame>> free_;
  size_t frames_ = 0;
};

}  // namespace needle
