// What the ops of torch.ops.needle need of needle: torch tensors as views, and the kernel tables of the devices.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <string>
#include <string_view>

#include "core/call.h"

namespace needle::torch_ops {

using torch::stable::Tensor;

[[noreturn]] void fail(const char* op, const std::string& text);

// The number of an activation; fails on an unknown name.
double activation_code(const char* op, std::string_view name);

// The kernel of this name and these attributes for float32 tensors on the device of `t`, else null.
const KernelRow* find(const char* kernel, const char* attributes, const Tensor& t);

View view_of(const Tensor& t);
// The same memory with other sizes and strides.
View view_of(const Tensor& t, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> stride);
// `v` with zero strides where it is repeated; its shape must broadcast to `shape`.
View broadcast(const View& v, const int64_t* shape, int rank);

struct Operands {  // the inputs of a call, without the absent ones
  View views[5];
  int count = 0;
  Operands& add(const View& v) {
    views[count++] = v;
    return *this;
  }
};

// Runs a kernel on the device of `t`: on torch's current stream there, on the process's own threads on a CPU.
void run(const KernelRow* kernel, const Tensor& t, const View& out, const Operands& in,
         std::initializer_list<double> attributes);

}  // namespace needle::torch_ops
