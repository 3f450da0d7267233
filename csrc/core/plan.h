// The executor: a flat list of kernel calls over one arena, run without Python, allocation or lookups. On a GPU a run
// only starts the work, in the device's stream; from the second run on as one graph, where the device has graphs
// (recordings.h).
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/forks.h"
#include "core/guard.h"

namespace needle {

enum class Space : int32_t { arena, constant, input, output, absent };

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

// Where a run calls back: after so many of its steps, whose results are then in memory. On a GPU, where a run only
// starts the work, and in guarded plans it is after the last step.
struct Pause {
  size_t steps;
  std::function<void()> call;  // what it throws ends the run
};

// What runs on the CPU compute in. Plans that share it have as many arenas as runs were in flight at a time, all of
// them together: nothing stays in an arena from run to run.
class Arenas {
 public:
  // A free one of at least so many bytes, the one that begins at `wanted` if that is free; else a new one, in place of
  // a smaller free one.
  std::shared_ptr<Storage> take(Device* device, size_t bytes, const void* wanted);
  void give(std::shared_ptr<Storage> arena);
  size_t count() const;

 private:
  std::mutex& mutex_ = fork_lock(this);
  std::vector<std::shared_ptr<Storage>> free_;
  size_t count_ = 0;
};

class Plan {
 public:
  using Constants = std::vector<std::shared_ptr<Storage>>;

  Plan(Device* device, std::vector<Step> steps, size_t arena_bytes, std::vector<View> inputs, std::vector<View> outputs,
       std::shared_ptr<Arenas> arenas);

  ~Plan();

  // From now on runs look for what kernels write outside of these buffers, of inputs, outputs and constants; on the
  // CPU.
  void guard(std::vector<GuardedBuffer> buffers);

  // Replaces the packed weights; runs in flight keep the ones they started with. Those that steps write are state:
  // every run says that it wrote them.
  void set_constants(Constants constants);
  std::shared_ptr<const Constants> constants() const;

  // The same steps for other shapes. numbers: of every operand that is there, outputs first, its offset, shape and
  // strides; then the shapes of the plan's inputs and of its outputs. attributes: of all steps.
  std::unique_ptr<Plan> like(const std::vector<int64_t>& numbers, const std::vector<double>& attributes,
                             size_t arena_bytes) const;

  std::pair<std::vector<int64_t>, std::vector<double>> numbers() const;  // as `like` takes them

  // Other attributes for a step, between two runs, which a recorded graph would not see: such a plan runs step by step.
  void set_attributes(size_t step, std::vector<double> attributes);

  // `inputs` and `outputs` lie on the device, are contiguous and have the plan's shapes. `seconds`, if given, gets one
  // time per step. `pauses`: in the order of their steps.
  void run(const std::vector<void*>& inputs, const std::vector<void*>& outputs, double* seconds = nullptr,
           const std::vector<Pause>& pauses = {});

  Device* device() const { return device_; }
  const std::vector<View>& inputs() const { return inputs_; }
  const std::vector<View>& outputs() const { return outputs_; }
  const std::vector<Step>& steps() const { return steps_; }
  size_t arena_bytes() const { return arena_bytes_; }
  size_t arenas() const;                     // that it takes one of
  size_t runs() const { return runs_; }      // those that came to their end
  size_t graphs() const { return graphs_; }  // frames that are run as graphs
  std::string graph_error() const;           // why none can be made, empty otherwise

 private:
  struct Frame;  // one run in flight: its arena and the calls resolved to pointers
  struct Lease;
  std::unique_ptr<Frame> acquire();
  void release(std::unique_ptr<Frame> frame);
  void resolve(Frame& frame) const;
  void start(Frame& frame, const Exec& exec, const std::vector<void*>& inputs, const std::vector<void*>& outputs,
             double* seconds, const std::vector<Pause>& pauses = {}) const;
  void run_steps(Frame& frame, const Exec& exec, size_t first, size_t last, double* seconds) const;
  void launch(Frame& frame, const std::vector<void*>& inputs, const std::vector<void*>& outputs, double* seconds,
              const std::vector<Pause>& pauses);
  void run_guarded(Frame& frame, const std::vector<void*>& inputs, const std::vector<void*>& outputs,
                   double* seconds) const;
  void forget(Frame& frame);

  Device* device_;
  std::vector<Step> steps_;
  size_t arena_bytes_;
  std::vector<View> inputs_, outputs_;
  std::unique_ptr<const Guard> guard_;
  std::mutex& mutex_ = fork_lock(this);
  std::shared_ptr<const Constants> constants_;
  std::vector<int> state_;                      // constants that steps write
  std::shared_ptr<const Constants> originals_;  // the same, but in guarded plans: what their copies are made from
  std::atomic<size_t> runs_{0};
  std::atomic<double> seconds_{0};  // of the last run
  std::vector<std::unique_ptr<Frame>> free_;
  std::shared_ptr<Arenas> arenas_;
  std::atomic<size_t> graphs_{0};
  std::atomic<bool> recordable_;
  std::string graph_error_;
};

}  // namespace needle
