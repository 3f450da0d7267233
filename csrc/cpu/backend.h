#pragma once
#include "core/backend.h"

namespace needle {

// The CPU device: rows of the best ISA that this machine has, or of NEEDLE_ISA=scalar|avx2|avx512.
const Backend* cpu_backend();
const char* cpu_isa();
// Give memory that nobody uses back to the system: blocks kept for arrays to come, and what malloc holds.
void release_unused_memory();

}  // namespace needle
