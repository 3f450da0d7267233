// What processors call by names of their own: a pause in a loop that waits for another thread, and the register that
// says how denormals are taken. No inline function is seen by the linker, since per-ISA files include it, too.
#pragma once
#include <cstdint>

#define NEEDLE_HERE static inline __attribute__((always_inline))

namespace needle {

#if defined(__x86_64__)
constexpr uint64_t kFlushDenormals = 0x8040;  // FTZ | DAZ
NEEDLE_HERE void spin_pause() { __builtin_ia32_pause(); }
NEEDLE_HERE uint64_t float_mode() { return __builtin_ia32_stmxcsr(); }
NEEDLE_HERE void set_float_mode(uint64_t mode) { __builtin_ia32_ldmxcsr(static_cast<uint32_t>(mode)); }
#elif defined(__aarch64__)
constexpr uint64_t kFlushDenormals = 1 << 24;  // FZ, of operands and results
NEEDLE_HERE void spin_pause() { asm volatile("yield" ::: "memory"); }
NEEDLE_HERE uint64_t float_mode() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
NEEDLE_HERE void set_float_mode(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
constexpr uint64_t kFlushDenormals = 0;  // kept
NEEDLE_HERE void spin_pause() { asm volatile("" ::: "memory"); }
NEEDLE_HERE uint64_t float_mode() { return 0; }
NEEDLE_HERE void set_float_mode(uint64_t) {}
#endif

}  // namespace needle
#undef NEEDLE_HERE
