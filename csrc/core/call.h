// The one calling convention: every kernel of every device is reached through `void (const Call&)`; kernels/rows.h
// gives its operands their names. Plain structs only, so that per-ISA files and GPU hosts include it without pulling in
// the standard library.
#pragma once
#include "core/dtype.h"

namespace needle {

constexpr int kMaxRank = 8;

// A strided array. Strides count elements; 0 broadcasts, negative flips. Blocked layouts are rank-5 views
// (N, C/16, H, W, 16); a halo or a channel slice shows only in the strides and the data pointer.
struct View {
  void* data = nullptr;
  int64_t shape[kMaxRank] = {};
  int64_t stride[kMaxRank] = {};
  int32_t rank = 0;  // negative: an optional operand that is not there
  DType dtype = DType::f32;

  // The elements, of type T; a row that lists a dtype which its kernel reads as another ends here.
  template <class T>
  __attribute__((always_inline)) T* as() const {
    if (!may_hold<std::remove_const_t<T>>(dtype) && !absent()) refuse_dtype(dtype);
    return static_cast<T*>(data);
  }
  int64_t size() const {
    int64_t n = 1;
    for (int i = 0; i < rank; i++) n *= shape[i];
    return n;
  }
  bool absent() const { return rank < 0; }
  // How far the first and the last element in memory are from `data`, in elements; both 0 when there are none.
  template <class Number>
  void span(Number* low, Number* high) const {
    *low = *high = 0;
    for (int i = 0; i < rank && size(); i++)
      (stride[i] < 0 ? *low : *high) += static_cast<Number>(shape[i] - 1) * stride[i];
  }
  bool contiguous() const {
    int64_t n = 1;
    for (int i = rank - 1; i >= 0; i--) {
      if (shape[i] != 1 && stride[i] != n) return false;
      n *= shape[i];
    }
    return true;
  }
};

// What a kernel may ask of its surroundings.
struct Exec {
  int threads;  // upper bound of threads that `parallel` uses
  // Runs body(ctx, task) for every task in [0, tasks), in any order, on up to `threads` threads; returns when all are
  // done.
  void (*parallel)(int64_t tasks, void (*body)(void* ctx, int64_t task), void* ctx);
  // Memory of the calling thread, 64-byte aligned, not cleared; stays valid until the same thread asks for the same
  // slot (0..3) again. Slot 0 and 1: inside task bodies. Slot 2 and 3: by the caller of `parallel`, shared with its
  // tasks.
  void* (*scratch)(int slot, size_t bytes);
  void* stream;  // device stream; null on CPU
};

struct Call {
  const View* out;
  const View* in;
  const double* attr;  // in the order in which the kernel's row names them
  int n_out, n_in;
  const Exec* exec;
};

// What of libneedle.so `needle._core` uses beside its C functions; all else of it is hidden.
#define NEEDLE_SHARED __attribute__((visibility("default")))

using Kernel = void (*)(const Call&);

// One row of the kernel table, whose texts are words separated by spaces: `name:dtypes` for an operand, `name?:dtypes`
// for an input that may be absent (kernels/kernels.def).
struct KernelRow {
  const char* name;
  const char* inputs;
  const char* outputs;
  const char* attrs;  // names
  bool groups;        // whether its operands may be there any number of times
  Kernel run;
};

// Ends the call of a kernel that reads or writes where numbers say, for one that is outside of [0, count).
[[noreturn]] void refuse_number(const char* name, int64_t number, int64_t count);

// parallel_for(exec, n, [&](int64_t task) {...}) without std::function.
template <class F>
void parallel_for(const Exec* exec, int64_t tasks, const F& f) {
  if (tasks == 1 || exec->threads == 1) {
    for (int64_t t = 0; t < tasks; t++) f(t);
    return;
  }
  exec->parallel(tasks, [](void* ctx, int64_t task) { (*static_cast<const F*>(ctx))(task); }, const_cast<F*>(&f));
}

}  // namespace needle
