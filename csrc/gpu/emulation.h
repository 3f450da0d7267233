// A GPU on the host, for correctness only: blocks one after another, the threads of a block as fibers, so that barriers
// and shuffles really wait for each other. It is stricter than hardware: new memory and shared memory hold NaN, device
// arrays end at an unreadable page, and a barrier that some threads never reach is an error that names them.
//   NEEDLE_EMULATION_DEVICES=0   no device       NEEDLE_EMULATION_REVERSE=1   threads of a block run last to first
//   NEEDLE_EMULATION_GRAPHS=0    streams cannot be captured
//   NEEDLE_EMULATION_SEED=n      order of blocks, threads and streams by chance (emulation_disorder.h)
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "gpu/emulation_disorder.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define GPU_BOUNDS(threads, blocks)
#define GPU_UNSEEN __attribute__((no_sanitize_thread, noinline))  // by emulation_races.cpp
// The tag's address names the declaration, so that a loop or a helper called twice gets the same memory, as on a
// device.
#define GPU_SHARED(Type, name)                                             \
  Type& name = *static_cast<Type*>([] {                                    \
    static char tag;                                                       \
    return ::needle::emulation::shared(&tag, sizeof(Type), alignof(Type)); \
  }())

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

enum gpuError_t {
  gpuSuccess,
  gpuErrorMemoryAllocation,
  gpuErrorNoDevice,
  gpuErrorInvalidValue,
  gpuErrorStreamCaptureUnsupported
};
enum gpuMemcpyKind { gpuMemcpyDefault };
enum gpuEventFlags { gpuEventDisableTiming };
enum gpuStreamFlags { gpuStreamNonBlocking };
enum gpuStreamCaptureMode { gpuStreamCaptureModeThreadLocal };
using gpuStream_t = void*;
namespace needle::emulation {
struct Event {  // after the first `count` that the stream was given
  gpuStream_t stream = nullptr;
  uint64_t count = 0;
};
}  // namespace needle::emulation
using gpuEvent_t = needle::emulation::Event*;
struct gpuDeviceProp {
  char name[256];
  int multiProcessorCount;
  size_t totalGlobalMem;
};

namespace needle::emulation {

constexpr size_t kPage = 64 << 10;  // a multiple of every host's page
constexpr size_t kStack = 256 << 10, kSharedBytes = 64 << 10;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kFreedKept = 256;
constexpr int kWave = NEEDLE_WAVE, kMaxTags = 16;
constexpr size_t kGap = 256;  // before, between and behind shared arrays; what lies there must stay

struct Fiber {
  ucontext_t entry;
  jmp_buf state;
  bool started = false, done = true, waiting = false;
  unsigned exchanges = 0;
};
enum Meeting { kShuffle, kBallot, kSync, kMatrix };  // what lanes do together; kMatrix + n are matrix instructions
struct Matrices {
  float a[16][16], b[16][16];
};
struct Wave {
  int arrived, meeting;
  uint64_t epoch;                    // counts wave_sync; a shuffle orders no memory
  unsigned char slot[2][kWave][16];  // two turns: nobody can be two shuffles ahead of a lane that still reads
  Matrices matrices[2];              // as the slots, of matrix instructions (emulation_mma.h)
};
struct Device {  // one device, one launch at a time
  std::mutex mutex;
  Fiber fiber[kMaxThreads];
  Wave wave[kMaxThreads / kWave];
  unsigned threads = 0, arrived = 0, current = 0;
  uint64_t launch = 0, block = 0, epoch = 0;  // counts: of launches, blocks, and every block's block_sync
  bool inside = false;                        // a thread's own code is running
  Chance chance;
  bool disorder = false;
  std::vector<unsigned> ready;  // threads that can go on, when the order is open
  jmp_buf scheduler;
  void (*body)(void*) = nullptr;
  void* context = nullptr;
  char* stacks = nullptr;
  const void* tag[kMaxTags];
  size_t offset[kMaxTags], end[kMaxTags], shared_used = 0, shared_next = 0;
  int tags = 0;
  const char* error = nullptr;
  alignas(16) unsigned char shared[kSharedBytes + (kMaxTags + 2) * (kGap + 16)];
};
inline Device* const the_device = new Device;

// What a stream does, kept to be done later: functions that hold their arguments by value.
struct Graph {
  std::vector<std::function<void()>> work;
  bool broken = false;
};
// The stream that this thread captures, if it does. Waiting, and taking or freeing memory, then break the graph.
struct Capture {
  void* stream = nullptr;
  Graph* graph = nullptr;
};
inline thread_local Capture capture;
inline bool breaks_capture() {
  if (capture.graph) capture.graph->broken = true;
  return capture.graph != nullptr;
}
template <class F>
void submit(void* stream, const F& work) {
  if (!capture.graph) return the_streams->submit(stream, work);
  if (stream != capture.stream)
    throw std::runtime_error(
        "[launch] a kernel takes the stream that it is given, got another one while that is captured.");
  capture.graph->work.push_back(work);
}
inline Device& device() { return *the_device; }

// Only the first entry into a fiber uses ucontext, whose switches make system calls; later ones use setjmp, which is
// some 50 times faster. Both functions stay out of line so that no caller's variable lives across the second return.
__attribute__((noinline)) inline void leave(Device& d) {
  d.inside = false;
  if (_setjmp(d.fiber[d.current].state) == 0) _longjmp(d.scheduler, 1);
  device().inside = true;
}
__attribute__((noinline)) inline void enter(Device& d, unsigned i) {
  d.current = i;
  threadIdx.x = i;
  if (_setjmp(d.scheduler) != 0) return;
  if (d.fiber[i].started) _longjmp(d.fiber[i].state, 1);
  d.fiber[i].started = true;
  setcontext(&d.fiber[i].entry);
}
inline void fiber_main() {
  for (;;) {
    Device& d = device();
    d.inside = true;
    d.body(d.context);
    d.inside = false;
    d.fiber[d.current].done = true;
    leave(d);
  }
}
inline void prepare(Device& d, unsigned i) {
  if (!d.stacks) {
    void* p =
        mmap(nullptr, kStack * kMaxThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    d.stacks = static_cast<char*>(p);
  }
  Fiber& f = d.fiber[i];
  if (!f.started) {
    mprotect(d.stacks + kStack * i, kPage, PROT_NONE);
    getcontext(&f.entry);
    f.entry.uc_stack.ss_sp = d.stacks + kStack * i + kPage;
    f.entry.uc_stack.ss_size = kStack - kPage;
    f.entry.uc_link = nullptr;
    makecontext(&f.entry, fiber_main, 0);
  }
  f.done = f.waiting = false;
  f.exchanges = 0;
}

// Ends the launch with this sentence; the fiber never goes on.
[[noreturn]] inline void fault(const char* what) {
  device().error = what;
  for (;;) leave(device());
}

// The last of `count` threads from `first` frees the others and goes on at once, or whenever its turn comes.
inline void wait(Device& d, unsigned first, unsigned count, unsigned arrived) {
  if (arrived == count) {
    for (unsigned i = first; i < first + count; i++) {
      if (d.disorder && d.fiber[i].waiting) d.ready.push_back(i);
      d.fiber[i].waiting = false;
    }
    if (!d.disorder) return;
  } else {
    d.fiber[d.current].waiting = true;
  }
  leave(d);
}
inline void wait_block() {
  Device& d = device();
  unsigned n = ++d.arrived;
  if (n == d.threads) d.arrived = 0, d.epoch++;
  wait(d, 0, d.threads, n);
}
inline void meet_wave(int meeting) {
  Device& d = device();
  Wave& w = d.wave[d.current / kWave];
  if (w.arrived == 0) w.meeting = meeting;
  if (w.meeting != meeting) fault("all lanes of a wave take part in one instruction");
  int n = ++w.arrived;
  if (n == kWave) w.arrived = 0, w.epoch += meeting == kSync;
  wait(d, d.current / kWave * kWave, kWave, n);
}
inline void wait_wave() { meet_wave(kSync); }
// Which of the two slots or matrices this lane's next exchange with its wave takes.
inline unsigned turn(Device& d) { return d.fiber[d.current].exchanges++ % 2; }

template <class T>
T shuffle(T v, int lane) {
  static_assert(sizeof(T) <= 16 && std::is_trivially_copyable<T>::value, "a shuffle moves up to 16 bytes");
  Device& d = device();
  auto& slot = d.wave[d.current / kWave].slot[turn(d)];
  std::memcpy(slot[d.current % kWave], &v, sizeof v);
  meet_wave(kShuffle);
  if (lane >= 0 && lane < kWave) std::memcpy(&v, slot[lane], sizeof v);
  return v;
}
inline uint64_t ballot(bool p) {
  Device& d = device();
  auto& slot = d.wave[d.current / kWave].slot[turn(d)];
  slot[d.current % kWave][0] = p;
  meet_wave(kBallot);
  uint64_t bits = 0;
  for (int i = 0; i < kWave; i++) bits |= static_cast<uint64_t>(slot[i][0]) << i;
  return bits;
}

template <class T>
T* aligned(T* p) {
  if (reinterpret_cast<uintptr_t>(p) % alignof(T) != 0) fault("a vector access is not aligned to its size");
  return p;
}

// The dynamic part lies first, so its address needs no table.
inline void* dynamic_shared() { return device().shared + kGap; }
inline void* shared(const void* tag, size_t bytes, size_t align) {
  Device& d = device();
  for (int i = 0; i < d.tags; i++) {
    if (d.tag[i] == tag) return d.shared + d.offset[i];
  }
  const size_t rounded = (bytes + 15) / 16 * 16;
  if (d.tags == kMaxTags || d.shared_used + rounded > kSharedBytes) {
    fault("shared memory exceeds 64 KiB or 16 declarations");
  }
  const size_t offset = d.shared_next + (align < 16 ? align : 0);  // no better than its type asks for
  d.tag[d.tags] = tag;
  d.offset[d.tags] = offset;
  d.end[d.tags++] = offset + bytes;
  d.shared_used += rounded;
  d.shared_next = (offset + bytes + 15) / 16 * 16 + kGap;
  return d.shared + offset;
}
// Whether nothing was written outside of the shared arrays.
inline bool shared_intact(const Device& d, size_t dynamic_bytes) {
  size_t from = 0, to = kGap;
  for (int i = -1;; i++) {
    for (; from < to; from++)
      if (d.shared[from] != 0xff) return false;
    if (i == d.tags) return true;
    from = i < 0 ? kGap + dynamic_bytes : d.end[i];
    to = i + 1 < d.tags ? d.offset[i + 1] : d.shared_next;
  }
}

// Any thread that can go on, or in every other block one of those that became free last, so that waves run far ahead.
inline void run_disordered(Device& d) {
  const bool ahead = d.chance.below(2) == 0;
  const Order order(d.threads, &d.chance);
  d.ready.clear();
  for (unsigned n = 0; n < d.threads; n++) d.ready.push_back(static_cast<unsigned>(order[n]));
  while (!d.ready.empty() && !d.error) {
    const size_t n = d.ready.size(), last = ahead && n > kWave ? kWave : n, k = n - 1 - d.chance.below(last);
    const unsigned i = d.ready[k];
    d.ready[k] = d.ready.back();
    d.ready.pop_back();
    enter(d, i);
    if (!d.fiber[i].done && !d.fiber[i].waiting) d.ready.push_back(i);
  }
}

inline void run_block(Device& d, size_t dynamic_bytes, bool reverse) {
  d.arrived = 0;
  d.block++, d.epoch++;
  d.tags = 0;
  d.shared_used = (dynamic_bytes + 15) / 16 * 16;
  d.shared_next = kGap + d.shared_used + kGap;
  std::memset(d.shared, 0xff, sizeof d.shared);
  for (unsigned i = 0; i < d.threads; i++) prepare(d, i);
  for (unsigned w = 0; w < d.threads / kWave; w++) d.wave[w].arrived = 0;
  if (d.disorder) run_disordered(d);
  for (bool progress = !d.disorder; progress && !d.error;) {
    progress = false;
    for (unsigned n = 0; n < d.threads && !d.error; n++) {
      unsigned i = reverse ? d.threads - 1 - n : n;
      if (d.fiber[i].done || d.fiber[i].waiting) continue;
      enter(d, i);
      progress = true;
    }
  }
  const std::string block = "block " + std::to_string(blockIdx.x);
  for (unsigned i = 0; i < d.threads; i++) {
    if (d.fiber[i].done) continue;
    std::string what =
        d.error ? d.error
                : "a thread waits at a barrier, shuffle or matrix product that others of its block or wave left out";
    if (d.error) i = d.current;
    for (unsigned k = 0; k < d.threads; k++) d.fiber[k].started = d.fiber[k].started && d.fiber[k].done;
    d.error = nullptr;
    throw std::runtime_error("[launch] " + what + ", got thread " + std::to_string(i) + " of " + block + ".");
  }
  if (!shared_intact(d, dynamic_bytes))
    throw std::runtime_error("[launch] a kernel stays inside its shared arrays, got bytes written between them in " +
                             block + ".");
}

template <class F>
void run(dim3 grid, unsigned block, size_t dynamic_bytes, F&& body) {
  auto refuse = [](const std::string& what, const std::string& got) {
    throw std::runtime_error("[launch] " + what + ", got " + got + ".");
  };
  if (block == 0 || block > kMaxThreads || block % kWave != 0)
    refuse("a block is 1 to 1024 threads in whole waves", std::to_string(block));
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    refuse("a grid is 1 to 2^31-1 by 1 to 65535 by 1 to 65535 blocks",
           std::to_string(grid.x) + " by " + std::to_string(grid.y) + " by " + std::to_string(grid.z));
  if (dynamic_bytes > kSharedBytes) refuse("shared memory is at most 64 KiB", std::to_string(dynamic_bytes) + " bytes");
  Device& d = device();
  std::lock_guard<std::mutex> lock(d.mutex);
  const char* reverse = std::getenv("NEEDLE_EMULATION_REVERSE");
  d.disorder = d.chance.on();
  d.launch++;
  d.body = [](void* f) { (*static_cast<std::remove_reference_t<F>*>(f))(); };
  d.context = &body;
  d.threads = block;
  gridDim = grid;
  blockDim = dim3(block);
  const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
  const Order order(blocks, d.disorder ? &d.chance : nullptr);
  for (uint64_t n = 0; n < blocks; n++) {
    const uint64_t i = order[n];
    blockIdx = dim3(static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                    static_cast<unsigned>(i / grid.x / grid.y));
    run_block(d, dynamic_bytes, reverse && *reverse == '1');
  }
}

struct Mapping {
  size_t bytes;  // of the array
  void* base;
  size_t length;
};
struct Allocations {
  std::mutex mutex;
  std::map<const char*, Mapping> live;  // by first byte
  std::deque<Mapping> freed;            // unreadable, so that nobody else gets these addresses for a while
  Chance chance;
};
inline Allocations* const the_allocations = new Allocations;

inline bool is_device_memory(const void* p) {
  std::lock_guard<std::mutex> lock(the_allocations->mutex);
  auto it = the_allocations->live.upper_bound(static_cast<const char*>(p));
  if (it == the_allocations->live.begin()) return false;
  --it;
  return static_cast<const char*>(p) < it->first + it->second.bytes;
}

}  // namespace needle::emulation

#include "gpu/emulation_runtime.h"
