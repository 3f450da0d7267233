// What hardware leaves open, for the emulation to decide: NEEDLE_EMULATION_SEED=n picks the order of blocks, of threads
// wherever one waits, and of streams, whose work then runs late. Without it all is in order and at once. A part of
// emulation.h.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace needle::emulation {

inline uint64_t seed() {
  const char* text = std::getenv("NEEDLE_EMULATION_SEED");
  return text ? std::strtoull(text, nullptr, 10) : 0;
}

class Chance {  // of one place that draws; starts anew when the seed changes
 public:
  bool on() {
    if (const uint64_t now = seed(); now != seed_) seed_ = state_ = now;
    return seed_ != 0;
  }
  // One of 0 to n - 1 (splitmix64).
  uint64_t below(uint64_t n) {
    uint64_t v = state_ += 0x9e3779b97f4a7c15;
    v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9;
    v = (v ^ v >> 27) * 0x94d049bb133111eb;
    return (v ^ v >> 31) % n;
  }

 private:
  uint64_t seed_ = 0, state_ = 0;
};

// Every number below `size` once: in order, or by steps that have no factor in common with it.
class Order {
 public:
  Order(uint64_t size, Chance* chance) : size_(size) {
    if (!chance || size < 2) return;
    first_ = chance->below(size);
    do step_ = 1 + chance->below(size);
    while (std::gcd(step_, size) != 1);
  }
  uint64_t operator[](uint64_t n) const { return (first_ + n * step_) % size_; }

 private:
  uint64_t size_, first_ = 0, step_ = 1;
};

// Work that streams have yet to do. Each keeps its order; between two of them there is none but what waits for it.
// Only the default stream that CUDA and HIP have from old is ordered with none here: needle's other streams are of the
// non-blocking kind.
class Streams {
 public:
  void submit(void* stream, std::function<void()> work) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (!chance_.on() || running_) {
      finish_all();
      return work();
    }
    rethrow();
    queues_[stream].push_back(std::move(work));
    submitted_[stream]++;
    while (chance_.below(4) == 0 && step(nullptr)) {
    }
  }
  // Until `stream` has done the first `count` of all that it was ever given; what others do meanwhile is open.
  void finish(void* stream, uint64_t count) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (running_) return;
    rethrow();
    auto left = [&] { return queues_.count(stream) ? queues_[stream].size() : 0; };
    while (submitted_[stream] - left() < count) {
      if (chance_.below(2) == 0) step(nullptr);
      if (submitted_[stream] - left() < count) step(&queues_[stream]);
    }
  }
  void finish(void* stream) { finish(stream, submitted(stream)); }
  // As freeing memory does on hardware. An error waits for the next call that can tell it.
  void finish_quietly() noexcept {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    try {
      if (!running_) finish_all();
    } catch (const std::exception& e) {
      error_ = e.what();
    }
  }
  uint64_t submitted(void* stream) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return submitted_[stream];
  }

 private:
  using Queue = std::deque<std::function<void()>>;
  // The next of one queue or of any; false when there is none.
  bool step(Queue* of) {
    if (!of) {
      std::vector<Queue*> ready;
      for (auto& [stream, queue] : queues_)
        if (!queue.empty()) ready.push_back(&queue);
      if (ready.empty()) return false;
      of = ready[chance_.below(ready.size())];
    }
    auto work = std::move(of->front());
    of->pop_front();
    running_ = true;
    try {
      work();
    } catch (...) {  // as on hardware, nothing that was to follow happens
      running_ = false;
      for (auto& [stream, queue] : queues_) queue.clear();
      throw;
    }
    running_ = false;
    return true;
  }
  void finish_all() {
    if (running_) return;
    while (step(nullptr)) {
    }
  }
  void rethrow() {
    if (error_.empty()) return;
    throw std::runtime_error(std::exchange(error_, ""));
  }

  std::recursive_mutex mutex_;
  std::map<void*, Queue> queues_;
  std::map<void*, uint64_t> submitted_;
  Chance chance_;
  bool running_ = false;
  std::string error_;
};
inline Streams* const the_streams = new Streams;

}  // namespace needle::emulation
