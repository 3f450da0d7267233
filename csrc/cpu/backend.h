#pragma once
#include "core/backend.h"

namespace needle {

// The CPU device: rows of the best ISA that this machine has, or of NEEDLE_ISA.
NEEDLE_SHARED const Backend* cpu_backend();
// The name of usable ISA number `i`, the best first; null where there are no more.
NEEDLE_SHARED const char* cpu_isa(int i = 0);
NEEDLE_SHARED const KernelRow* cpu_rows(const char* isa, int* n);  // of a usable ISA, else null
// Give memory that nobody uses back to the system: blocks kept for arrays to come, and what malloc holds.
NEEDLE_SHARED void release_unused_memory();

}  // namespace needle
