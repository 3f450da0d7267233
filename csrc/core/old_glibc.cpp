// What our C++ library expects of a newer glibc than a wheel is linked with (scripts/wheels).

#include <sys/random.h>

#include <cstdint>

extern "C" {
[[gnu::visibility("hidden")]] char __libc_single_threaded = 0;  // as threads may run: counts are atomic

[[gnu::visibility("hidden")]] std::uint32_t arc4random() {
  std::uint32_t value = 0;
  while (getrandom(&value, sizeof value, 0) != sizeof value) {
  }
  return value;
}
}
