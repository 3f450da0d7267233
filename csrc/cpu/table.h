// What each ISA's object library gives: its rows. `cpu_backend` picks one by what the CPU has and NEEDLE_ISA.
#pragma once
#include "core/call.h"

// The ISAs of this processor's kind, the best first; CMakeLists.txt compiles them.
#if defined(__x86_64__)
#define NEEDLE_ISAS(isa) isa(avx512) isa(avx2) isa(scalar)
#elif defined(__aarch64__)
#define NEEDLE_ISAS(isa) isa(neon) isa(scalar)
#else
#define NEEDLE_ISAS(isa) isa(scalar)
#endif

#define NEEDLE_DECLARE_ISA(isa)   \
  namespace needle::isa {         \
  const KernelRow* table(int* n); \
  }
NEEDLE_ISAS(NEEDLE_DECLARE_ISA)
#undef NEEDLE_DECLARE_ISA
