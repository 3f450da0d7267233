// The kernel rows of this ISA, made from the .inc lists.
#include "cpu/table.h"

#include "cpu/simd.h"
#include "math/maps.h"

namespace needle::NEEDLE_ISA {

#define ROW(name, min_in, max_in, n_out, dtypes, attrs) void name(const Call&);
#include "cpu/kernels.inc"
#undef ROW

const KernelRow* table(int* n) {
#define ROW(name, min_in, max_in, n_out, dtypes, attrs) {#name, min_in, max_in, n_out, dtypes, attrs, name},
  static constexpr KernelRow rows[] = {
#include "cpu/kernels.inc"
  };
#undef ROW
  *n = sizeof rows / sizeof rows[0];
  return rows;
}

}  // namespace needle::NEEDLE_ISA
