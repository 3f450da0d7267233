// Loops whose steps depend on each other, inside one parallel call: a thread keeps its part of every step, so that what
// it reads again stays in its cache.
#pragma once
#include "core/processor.h"
#include "cpu/simd.h"

namespace needle::NEEDLE_ISA {

constexpr int kMaxParts = 64;

// body(step, part) for all steps in order and all parts of each; a step begins when every part of the one before is
// done. A thread takes its own part first and then whatever nobody has begun, so that late or missing threads stop
// nobody.
template <class F>
void for_steps(const Exec* exec, int64_t steps, int64_t parts, const F& body) {
  struct alignas(64) Counter {
    int64_t n = 0;
  };
  Counter begun[kMaxParts], done;
  parallel_for(exec, parts, [&](int64_t own) {
    for (int64_t step = 0; step < steps; step++) {
      for (int64_t i = 0; i < parts; i++) {
        const int64_t part = (own + i) % parts;
        int64_t expected = step;
        if (!__atomic_compare_exchange_n(&begun[part].n, &expected, step + 1, false, __ATOMIC_RELAXED,
                                         __ATOMIC_RELAXED))
          continue;
        body(step, part);
        __atomic_fetch_add(&done.n, 1, __ATOMIC_RELEASE);
      }
      while (__atomic_load_n(&done.n, __ATOMIC_ACQUIRE) < (step + 1) * parts) spin_pause();
    }
  });
}

}  // namespace needle::NEEDLE_ISA
