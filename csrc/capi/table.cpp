// The CPU's kernel table and services for other libraries of this process: csrc/torch takes them from here.
#include "core/pool.h"
#include "cpu/backend.h"

extern "C" __attribute__((visibility("default"))) const needle::Backend* needle_backend() {
  return needle::cpu_backend();
}
extern "C" __attribute__((visibility("default"))) void needle_exec(needle::Exec* out) { *out = needle::cpu_exec(); }
