// The pieces of a matrix product that other kernels use.
#pragma once
#include "cpu/pack.h"

namespace needle::NEEDLE_ISA {

// c (M, N) = activation(a (M, K) b (K, N) + bias + residual), b in blocks of 16 columns.
struct Matmul {
  int64_t M, N, K;
  const float* a;
  int64_t a_m, a_k;
  const float* b;
  int64_t b_n, b_k;
  float* c;
  int64_t c_m;
  const float* bias = nullptr;      // padded to 16, or null
  const float* residual = nullptr;  // M x N, or null
  int64_t r_m = 0;
  int activation = 0;
  float alpha = 0;
  const float* next = nullptr;                                    // what is read after b
  bool accumulate = false;                                        // into c, in place of bias and residual
  bool fetches = true;                                            // columns into L2 before their turn
  void (*done)(void* context, int64_t m0, int64_t m1) = nullptr;  // told which rows of c are complete, on any thread
  void* context = nullptr;
};

// Rows [m0, m1) times blocks [n0, n1) of 16 columns, on the calling thread.
void product(const Matmul& g, int64_t m0, int64_t m1, int64_t n0, int64_t n1);

// The whole, on all threads.
void product(const Exec* exec, const Matmul& g);

// Column blocks [n0, n1) of B (K, N) into dst: [n][K][16], zero padded.
void pack_columns(const float* b, int64_t s_k, int64_t s_n, int64_t K, int64_t N, int64_t n0, int64_t n1, float* dst);

// Where matrix `index` of a batch begins: the offset over all axes but the last two.
NEEDLE_INLINE int64_t batch_offset(const View& v, int64_t index) {
  int64_t at = 0;
  for (int d = v.rank - 3; d >= 0; d--) {
    at += index % v.shape[d] * v.stride[d];
    index /= v.shape[d];
  }
  return at;
}

void matmul(const matmul_args& c);

// Kernel matmul for every dtype but float32.
void matmul_other(const matmul_args& c);
// Runs many products of small matrices, and returns whether they are such.
bool matmul_small(const matmul_args& c);

}  // namespace needle::NEEDLE_ISA
