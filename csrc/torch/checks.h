// Checks of the operands of torch.ops.needle.*; each failure is one sentence.
#pragma once
#include <optional>

#include "torch/kernels.h"

namespace needle::torch_ops {

using Maybe = std::optional<Tensor>;

inline std::string shape_of(const Tensor& t) {
  std::string s = "(";
  for (int64_t i = 0; i < t.dim(); i++) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + (t.dim() == 1 ? ",)" : ")");
}

inline void check_rank(const char* op, const char* name, const Tensor& t, int64_t rank) {
  if (t.dim() != rank)
    fail(op, std::string(name) + " expects " + std::to_string(rank) + " axes, got shape " + shape_of(t) + ".");
}

inline void check_like(const char* op, const Tensor& input, const char* name, const Maybe& t) {
  if (!t) return;
  if (t->scalar_type() != input.scalar_type()) fail(op, std::string(name) + " has another dtype than input.");
  if (!(t->device() == input.device())) fail(op, std::string(name) + " is on another device than input.");
}

struct Named {
  const char* name;
  const Maybe& tensor;
};

inline void check_all(const char* op, const Tensor& input, std::initializer_list<Named> others) {
  for (const Named& n : others) check_like(op, input, n.name, n.tensor);
}

// Operands with `size` numbers, one for each channel.
inline void check_vectors(const char* op, const Tensor& input, int64_t size, std::initializer_list<Named> vectors) {
  for (const auto& [name, t] : vectors)
    if (t && (t->dim() != 1 || t->size(0) != size))
      fail(op, std::string(name) + " expects shape (" + std::to_string(size) + ",), got " + shape_of(*t) + ".");
  check_all(op, input, vectors);
}

}  // namespace needle::torch_ops
