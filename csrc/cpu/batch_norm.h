// What batch norms of blocked images share.
#pragma once
#include "cpu/strided.h"

namespace needle::NEEDLE_ISA {

// y = activation((x - mean) * scale + bias + residual), blocked; vectors of C floats. Lanes beyond C are written as
// zeros.
void normalise_blocked(const Exec* exec, const View& x, const Optional& residual, const View& y, const float* mean,
                       const float* scale, const float* bias, int64_t channels, int code, float alpha);

}  // namespace needle::NEEDLE_ISA
