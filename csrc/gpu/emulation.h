// A GPU on the host, for correctness only: blocks one after another, the threads of a block as fibers, so that barriers
// and shuffles really wait for each other. It is stricter than hardware: new memory and shared memory hold NaN, device
// arrays end at an unreadable page, and a barrier that some threads never reach is an error that names them.
//   NEEDLE_EMULATION_DEVICES=0   no device       NEEDLE_EMULATION_REVERSE=1   threads of a block run last to first
//   NEEDLE_EMULATION_GRAPHS=0    streams cannot be captured
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

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define GPU_BOUNDS(threads, blocks)
// The tag's address names the declaration, so that a loop or a helper called twice gets the same memory, as on a
// device.
#define GPU_SHARED(Type, name)                              \
  Type& name = *static_cast<Type*>([] {                     \
    static char tag;                                        \
    return ::needle::emulation::shared(&tag, sizeof(Type)); \
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

enum gpuError_t { gpuSuccess, gpuErrorMemoryAllocation, gpuErrorNoDevice, gpuErrorStreamCaptureUnsupported };
enum gpuMemcpyKind { gpuMemcpyDefault };
enum gpuEventFlags { gpuEventDisableTiming };
enum gpuStreamFlags { gpuStreamNonBlocking };
enum gpuStreamCaptureMode { gpuStreamCaptureModeThreadLocal };
using gpuEvent_t = int;
using gpuStream_t = void*;
struct gpuDeviceProp {
  char name[256];
  int multiProcessorCount;
  size_t totalGlobalMem;
};

namespace needle::emulation {

constexpr size_t kPage = 64 << 10;  // a multiple of every host's page
constexpr size_t kStack = 256 << 10, kSharedBytes = 64 << 10;
constexpr unsigned kMaxThreads = 1024;
constexpr int kWave = NEEDLE_WAVE, kMaxTags = 16;

struct Fiber {
  ucontext_t entry;
  jmp_buf state;
  bool started = false, done = true, waiting = false;
  unsigned shuffles = 0;
};
struct Wave {
  int arrived;
  unsigned char slot[2][kWave][16];  // two turns: nobody can be two shuffles ahead of a lane that still reads
};
struct Device {  // one device, one launch at a time
  std::mutex mutex;
  Fiber fiber[kMaxThreads];
  Wave wave[kMaxThreads / kWave];
  unsigned threads = 0, arrived = 0, current = 0;
  jmp_buf scheduler;
  void (*body)(void*) = nullptr;
  void* context = nullptr;
  char* stacks = nullptr;
  const void* tag[kMaxTags];
  size_t offset[kMaxTags], shared_used = 0;
  int tags = 0;
  const char* error = nullptr;
  alignas(16) unsigned char shared[kSharedBytes];
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
  if (!capture.graph) return work();
  if (stream != capture.stream)
    throw std::runtime_error(
        "[launch] a kernel takes the stream that it is given, got another one while that is captured.");
  capture.graph->work.push_back(work);
}
inline Device& device() { return *the_device; }

// Only the first entry into a fiber uses ucontext, whose switches make system calls; later ones use setjmp, which is
// some 50 times faster. Both functions stay out of line so that no caller's variable lives across the second return.
__attribute__((noinline)) inline void leave(Device& d) {
  if (_setjmp(d.fiber[d.current].state) == 0) _longjmp(d.scheduler, 1);
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
    d.body(d.context);
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
  f.shuffles = 0;
}

// The last of `count` threads from `first` frees the others and goes on at once.
inline void wait(Device& d, unsigned first, unsigned count, unsigned arrived) {
  if (arrived == count) {
    for (unsigned i = first; i < first + count; i++) d.fiber[i].waiting = false;
  } else {
    d.fiber[d.current].waiting = true;
    leave(d);
  }
}
inline void wait_block() {
  Device& d = device();
  unsigned n = ++d.arrived;
  if (n == d.threads) d.arrived = 0;
  wait(d, 0, d.threads, n);
}
inline void wait_wave() {
  Device& d = device();
  Wave& w = d.wave[d.current / kWave];
  int n = ++w.arrived;
  if (n == kWave) w.arrived = 0;
  wait(d, d.current / kWave * kWave, kWave, n);
}

template <class T>
T shuffle(T v, int lane) {
  static_assert(sizeof(T) <= 16 && std::is_trivially_copyable<T>::value, "a shuffle moves up to 16 bytes");
  Device& d = device();
  auto& slot = d.wave[d.current / kWave].slot[d.fiber[d.current].shuffles++ % 2];
  std::memcpy(slot[d.current % kWave], &v, sizeof v);
  wait_wave();
  if (lane >= 0 && lane < kWave) std::memcpy(&v, slot[lane], sizeof v);
  return v;
}
inline uint64_t ballot(bool p) {
  Device& d = device();
  auto& slot = d.wave[d.current / kWave].slot[d.fiber[d.current].shuffles++ % 2];
  slot[d.current % kWave][0] = p;
  wait_wave();
  uint64_t bits = 0;
  for (int i = 0; i < kWave; i++) bits |= static_cast<uint64_t>(slot[i][0]) << i;
  return bits;
}

// Ends the launch with this sentence; the fiber never goes on.
[[noreturn]] inline void fault(const char* what) {
  device().error = what;
  for (;;) leave(device());
}
template <class T>
T* aligned(T* p) {
  if (reinterpret_cast<uintptr_t>(p) % alignof(T) != 0) fault("a vector access is not aligned to its size");
  return p;
}

// The dynamic part lies first, so its address needs no table.
inline void* dynamic_shared() { return device().shared; }
inline void* shared(const void* tag, size_t bytes) {
  Device& d = device();
  for (int i = 0; i < d.tags; i++) {
    if (d.tag[i] == tag) return d.shared + d.offset[i];
  }
  if (d.tags == kMaxTags || d.shared_used + bytes > kSharedBytes) {
    fault("shared memory exceeds 64 KiB or 16 declarations");
  }
  d.tag[d.tags] = tag;
  d.offset[d.tags++] = d.shared_used;
  void* p = d.shared + d.shared_used;
  d.shared_used += (bytes + 15) / 16 * 16;
  return p;
}

inline void run_block(Device& d, size_t dynamic_bytes, bool reverse) {
  d.arrived = 0;
  d.tags = 0;
  d.shared_used = (dynamic_bytes + 15) / 16 * 16;
  std::memset(d.shared, 0xff, sizeof d.shared);
  for (unsigned i = 0; i < d.threads; i++) prepare(d, i);
  for (unsigned w = 0; w < d.threads / kWave; w++) d.wave[w].arrived = 0;
  for (bool progress = true; progress && !d.error;) {
    progress = false;
    for (unsigned n = 0; n < d.threads && !d.error; n++) {
      unsigned i = reverse ? d.threads - 1 - n : n;
      if (d.fiber[i].done || d.fiber[i].waiting) continue;
      enter(d, i);
      progress = true;
    }
  }
  for (unsigned i = 0; i < d.threads; i++) {
    if (d.fiber[i].done) continue;
    std::string what =
        d.error ? d.error : "a thread waits at a barrier or shuffle that others of its block or wave left out";
    for (unsigned k = 0; k < d.threads; k++) d.fiber[k].started = d.fiber[k].started && d.fiber[k].done;
    d.error = nullptr;
    throw std::runtime_error("[launch] " + what + ", got thread " + std::to_string(i) + " of block " +
                             std::to_string(blockIdx.x) + ".");
  }
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
  const char* order = std::getenv("NEEDLE_EMULATION_REVERSE");
  d.body = [](void* f) { (*static_cast<std::remove_reference_t<F>*>(f))(); };
  d.context = &body;
  d.threads = block;
  gridDim = grid;
  blockDim = dim3(block);
  for (unsigned z = 0; z < grid.z; z++) {
    for (unsigned y = 0; y < grid.y; y++) {
      for (unsigned x = 0; x < grid.x; x++) {
        blockIdx = dim3(x, y, z);
        run_block(d, dynamic_bytes, order && *order == '1');
      }
    }
  }
}

struct Allocations {
  std::mutex mutex;
  std::map<const char*, size_t> bytes;  // by first byte
};
inline Allocations* const the_allocations = new Allocations;

inline bool is_device_memory(const void* p) {
  std::lock_guard<std::mutex> lock(the_allocations->mutex);
  auto it = the_allocations->bytes.upper_bound(static_cast<const char*>(p));
  if (it == the_allocations->bytes.begin()) return false;
  --it;
  return static_cast<const char*>(p) < it->first + it->second;
}

}  // namespace needle::emulation

#include "gpu/emulation_runtime.h"
