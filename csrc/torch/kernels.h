// What the ops of torch.ops.needle need of needle: torch tensors as views, and the kernel tables of the devices.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <string>
#include <string_view>

#include "kernels/rows.h"

namespace needle::torch_ops {

using torch::stable::Tensor;

[[noreturn]] void fail(const char* op, const std::string& text);

// The number of an activation; fails on an unknown name.
int64_t activation_code(const char* op, std::string_view name);

// The kernel of this name for float32 tensors on the device of `t`, else null.
const KernelRow* find(const char* kernel, const Tensor& t);

View view_of(const Tensor& t);
// The same memory with other sizes and strides.
View view_of(const Tensor& t, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> stride);
// `v` with zero strides where it is repeated; its shape must broadcast to `shape`.
View broadcast(const View& v, const int64_t* shape, int rank);

// Runs a kernel on the device of `t`: on torch's current stream there, on torch's threads on a CPU.
void run(const KernelRow* kernel, const Tensor& t, const Call& call);

// A kernel of kernels.def: run<matmul_args>(kernel, x, {.a = ..., .b = ...}, {.y = ...}, {.activation = ...}).
template <class Args>
void run(const KernelRow* kernel, const Tensor& t, const typename Args::In& in, const typename Args::Out& out,
         const typename Args::Attr& attr) {
  const auto count = [](const auto& views) { return static_cast<int>(sizeof(views) / sizeof(View)); };
  run(kernel, t,
      {reinterpret_cast<const View*>(&out), reinterpret_cast<const View*>(&in), reinterpret_cast<const double*>(&attr),
       count(out), count(in), nullptr});
}

// A kernel of maps.def.
void run_map(const KernelRow* kernel, const Tensor& t, const View& out, std::initializer_list<View> in,
             std::initializer_list<double> attributes = {});

}  // namespace needle::torch_ops
