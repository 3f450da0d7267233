// Calls of torch, and tensors as the ops lay them out.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <array>
#include <vector>

#include "torch/checks.h"

namespace needle::torch_ops {

using Pair = std::vector<int64_t>;

template <class... A>
Tensor call(const char* op, const A&... args) {
  std::array<StableIValue, sizeof...(A)> stack{torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Dense with channels last and not dense with channels first: sizes of 1 leave both open, which counts as first.
inline bool channels_last(const Tensor& t) {
  if (t.is_contiguous() || t.dim() != 4) return false;
  int64_t expected = 1;
  for (int64_t axis : {1, 3, 2, 0}) {
    if (t.size(axis) != 1 && t.stride(axis) != expected) return false;
    expected *= t.size(axis);
  }
  return true;
}

inline std::vector<int64_t> size_of(const Tensor& t) { return {t.sizes().begin(), t.sizes().end()}; }

inline Tensor empty(const Tensor& like, const std::vector<int64_t>& size, bool last = false) {
  using torch::headeronly::MemoryFormat;
  return torch::stable::empty(size, like.scalar_type(), std::nullopt, like.device(), std::nullopt,
                              last ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous);
}

inline Optional optional_view(const Maybe& t) { return t ? Optional{view_of(*t)} : kAbsent; }

}  // namespace needle::torch_ops
