// A fork while another thread waits in a driver for memory: the child finds the lock of the device's memory free.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "core/device.h"
#include "core/pool.h"
#include "cpu/backend.h"

namespace needle {
const Backend* cpu_backend() { return nullptr; }
Exec cpu_exec() { return {}; }
}  // namespace needle

namespace {
std::atomic<bool> inside{false}, over{false};

// Ends in the parent, after the child.
void* slow_alloc(size_t bytes) {
  inside = true;
  while (!over) std::this_thread::yield();
  return std::malloc(bytes);
}
}  // namespace

int main() {
  const needle::Backend backend{
      "slow", slow_alloc, [](void* p, size_t) { std::free(p); }, nullptr, [](void*) {}, nullptr, nullptr, 0};
  needle::MemoryCache cache(&backend);
  std::thread other([&] {
    auto [p, size] = cache.take(100, nullptr, "an array");
    cache.give(p, size, nullptr);
  });
  while (!inside) std::this_thread::yield();
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    _exit(cache.statistics().used != 0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  over = true;
  other.join();
  return status != 0 || cache.statistics().cached != 512;
}
