// What each ISA's object library gives: its rows. `cpu_backend` picks one by cpuid and NEEDLE_ISA.
#pragma once
#include "core/call.h"

#define NEEDLE_DECLARE_ISA(isa)   \
  namespace needle::isa {         \
  const KernelRow* table(int* n); \
  }
NEEDLE_DECLARE_ISA(scalar)
NEEDLE_DECLARE_ISA(avx2)
NEEDLE_DECLARE_ISA(avx512)
#undef NEEDLE_DECLARE_ISA
