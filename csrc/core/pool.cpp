#include "core/pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/processor.h"
#include "core/shares.h"

namespace needle {
namespace {

using Clock = std::chrono::steady_clock;
// How long a worker looks for the next job before it sleeps: inside a run, and where the next run or eager call came
// within that time before, the longer, since waking it takes a good part of small kernels; else the shorter, since
// torch may need the core.
constexpr Clock::duration kSpin = std::chrono::microseconds(80), kLongSpin = std::chrono::microseconds(500);
constexpr double kLong = 5e-4;  // seconds; OpenMP's threads take 0.1 to 0.2 ms to end and to start again

// The first line of a small file, empty where there is none.
std::string line_of(const std::string& path) {
  char line[64] = "";
  if (std::FILE* file = std::fopen(path.c_str(), "re")) {
    if (!std::fgets(line, sizeof line, file)) line[0] = '\0';
    std::fclose(file);
  }
  const std::string text = line;
  return text.substr(0, text.find('\n'));
}

// Threads of one job: the caller opens the job, workers join while it is open, the caller closes it and waits for the
// ones that joined. A worker that wakes late costs nothing: it finds the job closed.
class Pool {
 public:
  void run(int64_t tasks, void (*body)(void*, int64_t), void* ctx) {
    std::unique_lock<std::mutex> lock(job_, std::defer_lock);
    // A task goes alone, and so does a run beside another that has the workers. Every run in flight has a core for its
    // caller: what is left is for workers, since more threads than cores wait for each other at the end of every job.
    const int live = live_.load(std::memory_order_relaxed), room = threads() - (live > 1 ? live : 1);
    if (inside_ || room < 1 || !lock.try_lock()) {
      for (int64_t t = 0; t < tasks; t++) body(ctx, t);
      return;
    }
    start_workers();
    room_ = room;
    shares_.reset(tasks, body, ctx, room + 1);
    open_.store(true);
    sequence_.fetch_add(1);
    if (parked_.load() > 0) sequence_.notify_all();
    inside_ = true;
    shares_.drain(0);
    inside_ = false;
    open_.store(false);
    while (joined_.load() != 0) spin_pause();
  }

  int threads() const { return threads_.load(std::memory_order_relaxed); }

  void resize(int n) {
    std::lock_guard<std::mutex> lock(job_);
    stop_workers();
    threads_ = n;
  }

  // In a forked child the other threads are gone, in the middle of anything.
  void forget_workers() {
    new (&job_) std::mutex;
    new (&workers_) std::vector<std::thread>;
    joined_ = 0, parked_ = 0, live_ = live_here_, open_ = false, inside_ = false, forked_ = true;
  }

  // Threads of the OpenMP runtime under torch spin for some 5 ms after a parallel region, on the cores that workers
  // need. OpenMP's soft pause ends those of the calling thread; without any it takes 0.6 us. In a forked child they are
  // gone, and the runtime would wait for them.
  void rest_openmp() {
    using Pause = int (*)(int);
    if (threads() == 1 || forked_) return;
    if (!pause_) pause_ = reinterpret_cast<Pause>(dlsym(RTLD_DEFAULT, "omp_pause_resource_all"));
    if (Pause pause = pause_) pause(1);
  }

  void enter() { live_.fetch_add(1), live_here_++; }
  void leave() { live_.fetch_sub(1), live_here_--; }

  // Never destroyed: workers may outlive static destructors. No static of the function: a fork may come while a thread
  // makes it, for which the child would wait.
  static Pool& instance() {
    Pool* pool = made.load();
    if (pool) return *pool;
    Pool* mine = new Pool;
    if (made.compare_exchange_strong(pool, mine)) return *mine;
    delete mine;
    return *pool;
  }
  static std::atomic<Pool*> made;

 private:
  Pool() : threads_(default_threads()) {}

  static int default_threads() {
    if (const char* s = std::getenv("NEEDLE_NUM_THREADS"))
      if (int n = std::atoi(s); n > 0) return std::min(n, kMostThreads);
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    std::set<std::pair<std::string, std::string>> cores;  // hyperthreads share (package, core)
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
      if (!CPU_ISSET(cpu, &set)) continue;
      std::string dir = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
      const std::string core = line_of(dir + "core_id");
      if (!core.empty()) cores.emplace(line_of(dir + "physical_package_id"), core);
    }
    if (!cores.empty()) n = std::min<int>(n, static_cast<int>(cores.size()));
    double quota = 0, period = 0;  // "max 100000" where there is none
    if (std::sscanf(line_of("/sys/fs/cgroup/cpu.max").c_str(), "%lf %lf", &quota, &period) == 2 && period > 0)
      n = std::min(n, std::max(1, static_cast<int>(quota / period + 0.5)));
    return std::max(1, n);
  }

  void start_workers() {
    while (static_cast<int>(workers_.size()) < threads() - 1) {
      quit_ = false;
      const int id = static_cast<int>(workers_.size()) + 1;
      try {
        workers_.emplace_back([this, id, seen = sequence_.load()]() mutable { work(id, seen); });
      } catch (const std::system_error&) {  // the system gives no more of them
        threads_ = id;
      }
    }
  }

  void stop_workers() {
    quit_ = true;
    sequence_.fetch_add(1);
    sequence_.notify_all();
    for (auto& w : workers_) w.join();
    workers_.clear();
    quit_ = false;
  }

  void work(int id, uint32_t seen) {
    set_float_mode(float_mode() | kFlushDenormals);
    inside_ = true;
    for (Clock::duration pause = kLongSpin;;) {
      wait(seen, pause);
      seen = sequence_.load();
      if (quit_) return;
      const int before = joined_.fetch_add(1);
      if (open_.load() && before < room_) shares_.drain(id);
      joined_.fetch_sub(1);
    }
  }

  // Until there is a job after `seen`. pause: how long the last wait was in which no run was live; set by one like it.
  void wait(uint32_t seen, Clock::duration& pause) {
    const auto begin = Clock::now();
    bool idle = false;
    while (!found(seen)) {
      idle = idle || live_.load(std::memory_order_relaxed) == 0;
      if (Clock::now() - begin < (idle && pause >= kLongSpin ? kSpin : kLongSpin)) continue;
      parked_.fetch_add(1);
      sequence_.wait(seen);
      parked_.fetch_sub(1);
      break;
    }
    if (idle) pause = Clock::now() - begin;
  }

  // Looks for a job after `seen` for a microsecond or two.
  bool found(uint32_t seen) const {
    for (int i = 0; i < 64; i++) {
      if (sequence_.load(std::memory_order_relaxed) != seen) return true;
      spin_pause();
    }
    return false;
  }

  std::atomic<int> threads_;
  std::mutex job_;
  std::vector<std::thread> workers_;
  std::atomic<bool> quit_{false};
  std::atomic<int (*)(int)> pause_{nullptr};
  bool forked_ = false;

  int room_ = 0;  // workers that may take tasks
  Shares shares_;
  alignas(64) std::atomic<uint32_t> sequence_{0};
  alignas(64) std::atomic<bool> open_{false};
  std::atomic<int> joined_{0}, parked_{0};
  std::atomic<int> live_{0};           // runs in flight
  static thread_local int live_here_;  // those of this thread
  static thread_local bool inside_;    // a task that asks for parallel work again runs it alone
};

thread_local bool Pool::inside_ = false;
thread_local int Pool::live_here_ = 0;
constinit std::atomic<Pool*> Pool::made{nullptr};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
  if (Pool* pool = Pool::made.load()) pool->forget_workers();
});

struct Scratch {
  void* data = nullptr;
  size_t bytes = 0;
  ~Scratch() { std::free(data); }
};

void* scratch(int slot, size_t bytes) {
  static thread_local Scratch slots[4];
  Scratch& s = slots[slot];
  if (s.bytes < bytes) {
    std::free(s.data);
    s.bytes = (bytes + 4095) / 4096 * 4096;
    s.data = std::aligned_alloc(64, s.bytes);
  }
  return s.data;
}

}  // namespace

int num_threads() { return Pool::instance().threads(); }
void set_num_threads(int n) { Pool::instance().resize(n); }

Exec cpu_exec() {
  return {num_threads(),
          [](int64_t tasks, void (*body)(void*, int64_t), void* ctx) { Pool::instance().run(tasks, body, ctx); },
          scratch, nullptr};
}

LiveRun::LiveRun(double expected) : mode_(float_mode()) {
  if (expected >= kLong) Pool::instance().rest_openmp();
  set_float_mode(mode_ | kFlushDenormals);
  Pool::instance().enter();
}
LiveRun::~LiveRun() {
  Pool::instance().leave();
  set_float_mode(mode_);
}

}  // namespace needle
