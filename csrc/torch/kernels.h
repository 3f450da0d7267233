// What the ops of torch.ops.needle need of needle: torch tensors as views, and the kernel tables of the devices.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "kernels/rows.h"

namespace needle::torch_ops {

using torch::stable::Tensor;

[[noreturn]] void fail(const char* op, const std::string& text);

// The number of an activation; fails on an unknown name.
int64_t activation_code(const char* op, std::string_view name);

// The kernel of this name for float32 tensors on the device of `t`, else null.
const KernelRow* find(std::string_view kernel, const Tensor& t);

View view_of(const Tensor& t);
// The same memory with other sizes and strides.
View view_of(const Tensor& t, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> stride);
// Dense float32 memory.
View view_of(float* data, std::initializer_list<int64_t> shape);
// `v` with zero strides where it is repeated; its shape must broadcast to `shape`.
View broadcast(const View& v, const int64_t* shape, int rank);

// Runs f(), whose kernels on the device of `t` take about `work` floating-point operations together: on a CPU with
// torch's threads beside it, in one parallel region.
void lead(const Tensor& t, double work, void (*body)(void*), void* ctx);
template <class F>
void together(const Tensor& t, double work, const F& f) {
  lead(t, work, [](void* ctx) { (*static_cast<const F*>(ctx))(); }, const_cast<F*>(&f));
}

// Threads that share the kernels of the `together` around this, 1 outside of one.
int threads();

// f(task) for every task, on these threads; a kernel in a task runs on its thread alone.
void share(int64_t tasks, void (*body)(void*, int64_t), void* ctx);
template <class F>
void each(int64_t tasks, const F& f) {
  share(tasks, [](void* ctx, int64_t task) { (*static_cast<const F*>(ctx))(task); }, const_cast<F*>(&f));
}

// Memory on a CPU that an op needs while it runs, 64-byte aligned, not cleared; freed blocks are kept for the next one.
class Room {
 public:
  explicit Room(int64_t floats);
  ~Room();
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  float* take(int64_t floats) { return std::exchange(next_, next_ + padded(floats)); }  // the next part of it
  static int64_t padded(int64_t floats) { return (floats + 15) / 16 * 16; }

 private:
  size_t bytes_;
  float *data_, *next_;
};

// Runs a kernel on the device of `t`: on torch's current stream there, on a CPU on the threads of `together` around it.
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
void run_map(std::string_view kernel, const Tensor& t, const View& out, std::initializer_list<View> in,
             std::initializer_list<double> attributes = {});

}  // namespace needle::torch_ops
