// cuBLASLt: matmul + bias + ReLU or GELU, of float32 arrays in float32, TF32, float16 or bfloat16.
#include <cublasLt.h>

#include "gpu/vendor/lt.h"
#include "gpu/vendor/table.h"

namespace needle::gpu::vendor {
namespace {

struct Cublas {
  using Handle = cublasLtHandle_t;
  using Operation = cublasLtMatmulDesc_t;
  using Attribute = cublasLtMatmulDescAttributes_t;
  using Layout = cublasLtMatrixLayout_t;
  using Preference = cublasLtMatmulPreference_t;
  using Result = cublasLtMatmulHeuristicResult_t;

  struct Functions {
#define F(name) decltype(&cublasLt##name) name;
    LT_FUNCTIONS(F)
#undef F
    decltype(&cublasLtGetVersion) GetVersion;
  };
  static Functions f;

  static constexpr auto kFloat = CUDA_R_32F;
  static constexpr int32_t kPlain = CUBLAS_OP_N, kTurned = CUBLAS_OP_T;
  static constexpr auto kTransA = CUBLASLT_MATMUL_DESC_TRANSA, kTransB = CUBLASLT_MATMUL_DESC_TRANSB,
                        kEpilogue = CUBLASLT_MATMUL_DESC_EPILOGUE, kBiasPointer = CUBLASLT_MATMUL_DESC_BIAS_POINTER;
  static constexpr auto kBatchCount = CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                        kBatchStride = CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
  static constexpr auto kMaxWorkspaceBytes = CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;

  static cublasComputeType_t compute(int64_t precision) {
    if (precision == kTf32) return CUBLAS_COMPUTE_32F_FAST_TF32;
    if (precision == kFloat16) return CUBLAS_COMPUTE_32F_FAST_16F;
    if (precision == kBfloat16) return CUBLAS_COMPUTE_32F_FAST_16BF;
    return CUBLAS_COMPUTE_32F;  // float32 without TF32
  }

  static uint32_t epilogue(int64_t activation, bool bias) {
    if (activation == kRelu) return bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    if (activation == kGeluTanh) return bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;  // by tanh
    return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  }

  // It takes for granted 256 bytes unless told otherwise.
  template <class S>
  static void alignments(Preference preference, const Problem& p, const S& status) {
    const View* c = p.residual.data ? &p.residual : &p.out;
    const std::pair<cublasLtMatmulPreferenceAttributes_t, const View*> all[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &p.b},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &p.a},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &p.out}};
    for (auto [attribute, v] : all) {
      const uint32_t bytes = alignment(v->data);
      status(f.MatmulPreferenceSetAttribute(preference, attribute, &bytes, sizeof bytes));
    }
  }
};
Cublas::Functions Cublas::f;

bool open(std::string* text) {
  void* library = open_library({"libcublasLt.so.13", "libcublasLt.so.12"}, text);
  if (!library) return false;
#define F(name) \
  if (!find(library, "cublasLt" #name, &Cublas::f.name, text)) return false;
  LT_FUNCTIONS(F)
  F(GetVersion)
#undef F
  *text = std::to_string(Cublas::f.GetVersion()) + ", " + place(Cublas::f.GetVersion);
  return true;
}

}  // namespace

const Library* cublaslt() {
  static const Library library = {"cublasLt", open, Lt<Cublas>::prepare, Lt<Cublas>::run, Lt<Cublas>::forget};
  return &library;
}

}  // namespace needle::gpu::vendor
