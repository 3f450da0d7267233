// The tasks of one job, in a share for each thread.
#pragma once
#include <algorithm>
#include <atomic>

#include "core/call.h"

namespace needle {

constexpr int kMostShares = 64;

class Shares {
 public:
  // Before any thread drains; at most kMostShares.
  void reset(int64_t tasks, void (*body)(void*, int64_t), void* ctx, int shares) {
    body_ = body, ctx_ = ctx, tasks_ = tasks, shares_ = std::min(shares, kMostShares);
    for (int i = 0; i < shares_; i++) next_[i].task.store(first(i), std::memory_order_relaxed);
  }

  // Every thread starts with its own share of the tasks, in steps after each other the same part of the data, which
  // then lies in its cache; then it helps the others.
  void drain(int id) {
    for (int i = 0; i < shares_; i++) {
      const int share = (id + i) % shares_;
      const int64_t end = first(share + 1);
      for (int64_t t; (t = next_[share].task.fetch_add(1, std::memory_order_relaxed)) < end;) body_(ctx_, t);
    }
  }

 private:
  int64_t first(int share) const { return tasks_ * share / shares_; }

  void (*body_)(void*, int64_t) = nullptr;
  void* ctx_ = nullptr;
  int64_t tasks_ = 0;
  int shares_ = 1;
  struct alignas(64) Next {
    std::atomic<int64_t> task{0};
  };
  Next next_[kMostShares];
};

}  // namespace needle
