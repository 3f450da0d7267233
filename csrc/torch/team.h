// Torch's threads for the length of one op: they enter one parallel region and share the tasks of every kernel in it,
// so that an op of several kernels wakes them once.
#pragma once
#include <sched.h>

#include "core/processor.h"
#include "core/shares.h"

namespace needle::torch_ops {

class Team {
 public:
  explicit Team(int threads) : threads_(threads) {}
  int threads() const { return threads_; }

  // The first thread's: the tasks on all threads that are there. One that comes late finds the job closed.
  void run(int64_t tasks, void (*body)(void*, int64_t), void* ctx) {
    shares_.reset(tasks, body, ctx, threads_);
    open_.store(true);
    jobs_.fetch_add(1);
    shares_.drain(0);
    open_.store(false);
    for (int spins = 0; joined_.load() != 0;) rest(&spins);
  }

  // The other threads', which stay until the first one leaves.
  void help(int id) {
    int seen = 0;
    for (int spins = 0; !over_.load(std::memory_order_acquire);) {
      const int jobs = jobs_.load(std::memory_order_acquire);
      if (jobs == seen) {
        rest(&spins);
        continue;
      }
      seen = jobs, spins = 0;
      joined_.fetch_add(1);
      if (open_.load()) shares_.drain(id);
      joined_.fetch_sub(1);
    }
  }

  void leave() { over_.store(true, std::memory_order_release); }

 private:
  // Between kernels others follow within microseconds; after that the core may have better work.
  static void rest(int* spins) {
    if (++*spins < 2000)
      spin_pause();
    else
      sched_yield();
  }

  const int threads_;
  Shares shares_;
  alignas(64) std::atomic<int> jobs_{0};
  alignas(64) std::atomic<bool> open_{false};
  std::atomic<bool> over_{false};
  std::atomic<int> joined_{0};
};

}  // namespace needle::torch_ops
