// Where arrays live and kernels run: the CPU, or a device that a library of csrc/gpu gives through `needle_backend()`.
#pragma once
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/forks.h"
#include "core/storage.h"

namespace needle {

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct MemoryStatistics {
  size_t used, cached, peak;  // bytes; peak: the most that was in use at a time
  int64_t taken, reused;      // arrays that needed new memory, and that got a freed block
};

// Device memory by size classes. A freed block goes to the next array of its class on its stream, where everything that
// still uses it comes first; asking the driver would wait for the whole device.
class MemoryCache {
 public:
  explicit MemoryCache(const Backend* backend) : backend_(backend) {}
  std::pair<void*, size_t> take(size_t bytes, void* stream, const char* what);  // a block and its size; or OutOfMemory
  void give(void* p, size_t size, void* stream) noexcept;
  void release();            // gives all freed blocks back to the device
  void limit(size_t bytes);  // of freed blocks; with 0 every array has memory of exactly its size for itself
  MemoryStatistics statistics() const;

 private:
  using Blocks = std::map<std::pair<void*, size_t>, std::vector<void*>>;  // by stream and size
  void free_all(const Blocks& freed);
  const Backend* backend_;
  std::mutex& mutex_ = fork_lock(this);
  // Under the lock:
  size_t rounded(size_t bytes) const;
  void count_used(size_t size);
  Blocks without_blocks();
  Blocks free_;
  size_t limit_ = SIZE_MAX;
  MemoryStatistics statistics_ = {};
};

class Device;

// Memory that kernels on a device ask for through Exec: a block for each of its slots, which grows and is kept.
class Scratch {
 public:
  explicit Scratch(Device* device) : device_(device) {}
  void* take(int slot, size_t bytes);

 private:
  Device* device_;
  std::shared_ptr<Storage> slot_[4];
};

class Device {
 public:
  static Device* cpu();
  // The device of the library at `path`, opened once per process. Throws when it cannot be opened.
  static Device* open(const std::string& path);
  static Device* of(const Backend* backend);  // the one that has this backend

  const Backend* backend() const { return backend_; }
  bool is_cpu() const { return this == cpu(); }
  // Whether there is hardware; if not, `why` gets the driver's reason.
  bool present(DeviceProperties* properties, std::string* why) const;

  // `what` will lie there, for the message of OutOfMemory.
  std::shared_ptr<Storage> allocate(size_t bytes, const char* what = "an array");
  // What this thread's next kernels on a GPU are called with; `scratch` outlives those calls.
  static Exec exec(Scratch* scratch, void* stream);
  void run(const KernelRow& row, const View* out, int n_out, const View* in, int n_in, const double* attr);
  void copy(void* dst, const void* src, size_t bytes);  // between host and device; returns when it is done
  void sync() { backend_->sync(stream_); }

  void* stream() const { return stream_; }
  void set_stream(void* stream);  // waits for the work on the present one
  MemoryCache& cache() { return cache_; }

 private:
  explicit Device(const Backend* backend) : backend_(backend), cache_(backend) {}
  const Backend* backend_;
  MemoryCache cache_;
  std::atomic<void*> stream_{nullptr};
};

}  // namespace needle
