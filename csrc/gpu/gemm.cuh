// Matrix products c (m, n) = act((a b^T) scale + bias + residual), where a (m, k), b (n, k) and c are strided matrices,
// or images of any layout read as such (implicit GEMM): an index is then three digits, each with its own stride.
#pragma once
#include "gpu/portable.cuh"
#include "kernels/rows.h"

namespace needle::gpu {

// Index i of an axis has the digits (i / inner / middle, i / inner % middle, i % inner). A matrix has but the first.
struct Digits {
  Divisor middle, inner;
};

// Where an element lies in memory, and at which row and column of an image. 32 bits: twice as many registers would not
// fit beside a tile's sums, so an operand spans at most 2^31 elements.
struct Line {
  int at, y, x;
};

struct Axis {
  Digits digits;
  int stride[3] = {};
  int y_step[2] = {};  // of the first and second digit
  int x_step[2] = {};  // of the second and third
};

// A matrix of rows x depth elements. In an image, those outside [0, height) x [0, width) are zero; the first is at (y,
// x).
struct Operand {
  const float* data;
  Axis row, depth;
  int height, width, y, x;
  bool by_row;  // neighbours in memory are rows, not k
  bool wide;    // four neighbours from a multiple of four on are one aligned float4, all of them inside or none
};

struct Place {
  float* data;
  int row[3], column[3];  // strides of the digits
};

struct PerChannel {  // one value per row or per column; `data` may be null
  const float* data;
  int64_t row, column;
};

struct Batch {  // products side by side: what each digit of the product's number adds to the offsets
  int rank, shape[kMaxRank - 2];
  int64_t a[kMaxRank - 2], b[kMaxRank - 2], out[kMaxRank - 2], residual[kMaxRank - 2], channels;
};

struct Gemm {
  Operand a, b;
  Digits row, column;   // of the results
  Place out, residual;  // residual.data may be null
  bool wide;            // four columns from a multiple of four on are one aligned float4 of out, neighbours in residual
  PerChannel scale, bias;
  Batch batch;
  int m, n, k, per_split;  // a block sums per_split of k; what the next blocks sum lies `part` elements further each
  int64_t part;
  int activation;
  float alpha;
};

enum Precision { kExact, kTf32, kFloat16, kBfloat16 };  // of the products; sums are float32 in all of them

// Launches the product; `image` when an axis has more than one digit. Empty ones and k = 0 are the caller's.
void run_gemm(const char* op, const Gemm& p, bool image, int precision, gpuStream_t stream);

// Elements from the first to the last of a view's axes from `axis` on; a product's operand has less than 2^31.
inline void check_span(const char* op, const View& v, int axis) {
  int64_t span = 1;
  for (int d = axis; d < v.rank; d++) span += (v.shape[d] - 1) * (v.stride[d] < 0 ? -v.stride[d] : v.stride[d]);
  if (span > INT32_MAX) fail(op, "an array spans at most 2^31 elements", std::to_string(span));
}

}  // namespace needle::gpu
