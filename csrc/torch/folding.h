// A batch norm by given statistics as a scale and a shift per channel.
#pragma once
#include "torch/memory.h"

namespace needle::torch_ops {

// A value per channel, along `axis` of an array like `v` of four axes.
inline View per_channel(const View& values, const View& v, int axis) {
  View channels = values;
  channels.rank = 4;
  for (int i = 0; i < 4; i++) channels.shape[i] = i == axis ? values.shape[0] : 1;
  channels.stride[axis] = values.stride[0];
  return broadcast(channels, v.shape, 4);
}

// 1 / sqrt(var + eps).
inline void inverse_of(const Tensor& var, double eps, const View& inverse) {
  run_map("add_scalar", var, inverse, {view_of(var)}, {eps});
  run_map("rsqrt", var, inverse, {inverse});
}

// What a batch norm of y + bias does: y * scale + shift.
inline void scale_and_shift(const Tensor& t, const Maybe& bias, const Tensor& mean, const Tensor& var,
                            const Maybe& gamma, const Maybe& beta, double eps, const View& scale, const View& shift) {
  inverse_of(var, eps, scale);
  if (gamma) run_map("mul", t, scale, {scale, view_of(*gamma)});
  if (bias)
    run_map("sub", t, shift, {view_of(*bias), view_of(mean)});
  else
    run_map("neg", t, shift, {view_of(mean)});
  run_map("mul", t, shift, {shift, scale});
  if (beta) run_map("add", t, shift, {shift, view_of(*beta)});
}

}  // namespace needle::torch_ops
