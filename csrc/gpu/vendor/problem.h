// A product or convolution with its epilogue, as a vendor's library gets it, and what such a library offers.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/call.h"

namespace needle::gpu::vendor {

enum Kind : int32_t { kMatmul, kConv2d, kConvTranspose2d, kConv2dWeightGrad };

// out = activation(a b scale + bias + residual), all float32, of any strides; what is absent has no data.
//   kMatmul           a (batch, m, k), b (batch, k, n), out and residual (batch, m, n), bias (n)
//   kConv2d           a (N, C, H, W), b (O, C / groups, KH, KW), out and residual (N, O, OH, OW), scale and bias (O)
//   kConvTranspose2d  a (N, C, H, W), b (C, O / groups, KH, KW), the others likewise
//   kConv2dWeightGrad a (N, C, H, W), b the gradient (N, O, OH, OW), out (O, C / groups, KH, KW), nothing else
struct Problem {
  Kind kind;
  View a, b, out, scale, bias, residual;
  int64_t stride_h, stride_w, pad_top, pad_left, dilation_h, dilation_w, groups;  // convolutions
  int64_t activation;                                                             // enum Activation
  int64_t precision;                                                              // enum Precision
  float alpha;
};

// A way of a library to do problems of some shapes, strides and alignments.
struct Way {
  void* plan;
  size_t workspace;  // bytes that it needs
};

// A library that may do such problems. Nothing here throws; calls come one at a time.
struct Library {
  const char* name;
  // Finds and opens it; false where it is missing. `text`: its version and place, or why not.
  bool (*open)(std::string* text);
  // Can it do this? At most so many ways, the most promising first; none, and why not in `text`.
  std::vector<Way> (*prepare)(const Problem& p, size_t most, std::string* text);
  // Does it on this stream; 0, or the library's error code.
  int (*run)(void* plan, const Problem& p, void* workspace, void* stream);
  void (*forget)(void* plan);
};

// Bytes to a multiple of which a pointer points, at most 16.
inline uint32_t alignment(const void* p) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(p) | 16;
  return static_cast<uint32_t>(bits & -bits);
}

constexpr size_t kMaxWorkspace = 32 << 20;  // what cuBLAS asks for on Hopper

}  // namespace needle::gpu::vendor
