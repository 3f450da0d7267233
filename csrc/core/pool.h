// The process's one thread pool: the caller and up to N-1 parked workers.
#pragma once
#include "core/call.h"

namespace needle {

constexpr int kMostThreads = 1024;

NEEDLE_SHARED int num_threads();
NEEDLE_SHARED void set_num_threads(int n);  // 1 to kMostThreads

// The services handed to CPU kernels; `threads` is num_threads() at the time of the call.
NEEDLE_SHARED Exec cpu_exec();

// While alive on a thread: workers spin a little between ops instead of parking, and denormals are flushed to zero.
// A run that expects to take long first has this thread's OpenMP threads, if there are any, leave the cores.
class NEEDLE_SHARED LiveRun {
 public:
  explicit LiveRun(double expected_seconds = 0);
  ~LiveRun();
  LiveRun(const LiveRun&) = delete;
  LiveRun& operator=(const LiveRun&) = delete;

 private:
  uint64_t mode_;  // of the thread's floats, before
};

}  // namespace needle
