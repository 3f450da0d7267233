#include "core/forks.h"

#include <pthread.h>

#include <cstdint>

namespace needle {
namespace {

#ifdef __SANITIZE_THREAD__
constexpr int kLocks = 1;  // who takes a second one waits for itself, and a test sees it
#else
constexpr int kLocks = 64;  // threads that run different plans rarely meet
#endif
struct alignas(64) Lock {
  std::mutex mutex;
};
constinit Lock locks[kLocks];

void take() {
  for (Lock& lock : locks) lock.mutex.lock();
}
void give() {
  for (Lock& lock : locks) lock.mutex.unlock();
}
[[maybe_unused]] const int registered = pthread_atfork(take, give, give);

}  // namespace

std::mutex& fork_lock(const void* object) {
  // Fibonacci hashing: neighbours in memory get locks far apart.
  const uint64_t mixed = reinterpret_cast<uintptr_t>(object) * uint64_t{0x9E3779B97F4A7C15};
  return locks[(mixed >> 32) % kLocks].mutex;
}

}  // namespace needle
