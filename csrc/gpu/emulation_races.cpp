// Finds races whatever their order was: g++ -fsanitize=thread has every access call one of the functions below (its own
// library is not linked), and two accesses of one place, of which one writes, need a barrier between them. A block_sync
// orders all of a block, a wave_sync its wave, a shuffle no memory at all, and blocks of one launch nothing.
#include <cstdio>
#include <unordered_map>

#include "gpu/emulation.h"

namespace needle::emulation {
namespace {

struct Access {
  uint64_t launch = 0, block = 0, epoch = 0, wave_epoch = 0;
  int thread = -1;
};
struct Place {  // the last write, the last read, and before it those of another thread and of another wave
  Access write, read[3];
};

int wave(const Access& a) { return a.thread / kWave; }

bool unordered(const Access& a, const Access& b, bool on_device) {
  if (a.thread < 0 || a.launch != b.launch) return false;
  if (a.block != b.block) return on_device;
  return a.thread != b.thread && a.epoch == b.epoch && (wave(a) != wave(b) || a.wave_epoch == b.wave_epoch);
}

[[noreturn]] void report(const Access& other, bool on_device) {
  static char text[160];
  std::snprintf(text, sizeof text, "no barrier lies between two accesses of %s memory, the other one by thread %d%s",
                on_device ? "device" : "shared", other.thread,
                other.block == device().block ? "" : " of another block");
  fault(text);
}

void visit(Place& place, const Access& now, bool writes, bool on_device) {
  if (unordered(place.write, now, on_device)) report(place.write, on_device);
  if (writes) {
    for (const Access& read : place.read)
      if (unordered(read, now, on_device)) report(read, on_device);
    place.write = now;
    return;
  }
  auto& [last, thread, other_wave] = place.read;
  if (last.block != now.block || wave(last) != wave(now)) other_wave = last;
  if (last.block != now.block || last.thread != now.thread) thread = last;
  last = now;
}

void look(Device& d, const void* p, size_t bytes, bool writes) {
  static auto* shared_places = new Place[sizeof d.shared];
  static auto* device_places = new std::unordered_map<const char*, Place>;
  static uint64_t launch = 0;
  const Access now = {d.launch, d.block, d.epoch, d.wave[d.current / kWave].epoch, static_cast<int>(d.current)};
  const char* first = static_cast<const char*>(p);
  const char* shared = reinterpret_cast<const char*>(d.shared);
  if (first >= shared && first < shared + sizeof d.shared) {
    for (size_t i = 0; i < bytes; i++) visit(shared_places[first - shared + i], now, writes, false);
    return;
  }
  if (!is_device_memory(p)) return;
  if (launch != d.launch) device_places->clear();
  launch = d.launch;
  for (size_t i = 0; i < bytes; i += 4)
    visit((*device_places)[first + i], now, writes, true);  // of 4 bytes, or smaller
}

// The linker may take an inline function of the files that are watched: what it does here is not looked at.
void see(const void* p, size_t bytes, bool writes) {
  Device* d = the_device;
  if (!d || !d->inside) return;
  d->inside = false;
  look(*d, p, bytes, writes);
  d->inside = true;
}

}  // namespace
}  // namespace needle::emulation

using needle::emulation::see;
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* p, unsigned long n) { see(p, n, false); }
void __tsan_write_range(void* p, unsigned long n) { see(p, n, true); }
#define ACCESS(n)                                              \
  void __tsan_read##n(void* p) { see(p, n, false); }           \
  void __tsan_write##n(void* p) { see(p, n, true); }           \
  void __tsan_unaligned_read##n(void* p) { see(p, n, false); } \
  void __tsan_unaligned_write##n(void* p) { see(p, n, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
// Atomics are the host's alone.
#define ATOMIC(bits, type)                                                                                      \
  type __tsan_atomic##bits##_load(const volatile type* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); } \
  void __tsan_atomic##bits##_store(volatile type* p, type v, int) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); } \
  type __tsan_atomic##bits##_exchange(volatile type* p, type v, int) {                                          \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                                         \
  }                                                                                                             \
  type __tsan_atomic##bits##_fetch_add(volatile type* p, type v, int) {                                         \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                                          \
  }                                                                                                             \
  type __tsan_atomic##bits##_fetch_sub(volatile type* p, type v, int) {                                         \
    return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                                          \
  }                                                                                                             \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile type* p, type* was, type v, int, int) {            \
    return __atomic_compare_exchange_n(p, was, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                   \
  }
ATOMIC(8, unsigned char)
ATOMIC(32, unsigned)
ATOMIC(64, unsigned long)
}
