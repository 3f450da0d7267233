// hipBLASLt: matmul + bias + ReLU or GELU. The declarations are those that we call, of ROCm 6 and later.
#include "gpu/vendor/lt.h"
#include "gpu/vendor/table.h"

extern "C" {
typedef struct hipblasLtOperation* hipblasLtMatmulDesc_t;
typedef struct hipblasLtLayout* hipblasLtMatrixLayout_t;
typedef struct hipblasLtPreference* hipblasLtMatmulPreference_t;
typedef void* hipblasLtHandle_t;
struct hipblasLtMatmulAlgo_t {
  uint8_t data[16];
  size_t max_workspace_bytes;
};
struct hipblasLtMatmulHeuristicResult_t {
  hipblasLtMatmulAlgo_t algo;
  size_t workspaceSize;
  int state;
  float waves;
  int reserved[4];
};
int hipblasLtGetVersion(hipblasLtHandle_t, int*);
int hipblasLtCreate(hipblasLtHandle_t*);
int hipblasLtMatmulDescCreate(hipblasLtMatmulDesc_t*, int compute, int scale_type);
int hipblasLtMatmulDescDestroy(hipblasLtMatmulDesc_t);
int hipblasLtMatmulDescSetAttribute(hipblasLtMatmulDesc_t, int attribute, const void*, size_t);
int hipblasLtMatrixLayoutCreate(hipblasLtMatrixLayout_t*, int type, uint64_t rows, uint64_t columns, int64_t leading);
int hipblasLtMatrixLayoutDestroy(hipblasLtMatrixLayout_t);
int hipblasLtMatrixLayoutSetAttribute(hipblasLtMatrixLayout_t, int attribute, const void*, size_t);
int hipblasLtMatmulPreferenceCreate(hipblasLtMatmulPreference_t*);
int hipblasLtMatmulPreferenceDestroy(hipblasLtMatmulPreference_t);
int hipblasLtMatmulPreferenceSetAttribute(hipblasLtMatmulPreference_t, int attribute, const void*, size_t);
int hipblasLtMatmulAlgoGetHeuristic(hipblasLtHandle_t, hipblasLtMatmulDesc_t, hipblasLtMatrixLayout_t a,
                                    hipblasLtMatrixLayout_t b, hipblasLtMatrixLayout_t c, hipblasLtMatrixLayout_t d,
                                    hipblasLtMatmulPreference_t, int wished, hipblasLtMatmulHeuristicResult_t*,
                                    int* found);
int hipblasLtMatmul(hipblasLtHandle_t, hipblasLtMatmulDesc_t, const void* alpha, const void* a, hipblasLtMatrixLayout_t,
                    const void* b, hipblasLtMatrixLayout_t, const void* beta, const void* c, hipblasLtMatrixLayout_t,
                    void* d, hipblasLtMatrixLayout_t, const hipblasLtMatmulAlgo_t*, void* workspace, size_t,
                    gpuStream_t);
}

namespace needle::gpu::vendor {
namespace {

struct Hipblas {
  using Handle = hipblasLtHandle_t;
  using Operation = hipblasLtMatmulDesc_t;
  using Attribute = int;
  using Layout = hipblasLtMatrixLayout_t;
  using Preference = hipblasLtMatmulPreference_t;
  using Result = hipblasLtMatmulHeuristicResult_t;

  struct Functions {
#define F(name) decltype(&hipblasLt##name) name;
    LT_FUNCTIONS(F)
#undef F
    decltype(&hipblasLtGetVersion) GetVersion;
  };
  static Functions f;

  static constexpr int kFloat = 0;                       // HIP_R_32F
  static constexpr int32_t kPlain = 111, kTurned = 112;  // HIPBLAS_OP_N, _T
  static constexpr int kTransA = 0, kTransB = 1, kEpilogue = 2, kBiasPointer = 3;
  static constexpr int kBatchCount = 0, kBatchStride = 1, kMaxWorkspaceBytes = 1;

  static int compute(int64_t precision) {
    if (precision == kTf32) return 6;      // HIPBLAS_COMPUTE_32F_FAST_TF32
    if (precision == kFloat16) return 4;   // HIPBLAS_COMPUTE_32F_FAST_16F
    if (precision == kBfloat16) return 5;  // HIPBLAS_COMPUTE_32F_FAST_16BF
    return 2;                              // HIPBLAS_COMPUTE_32F
  }

  static uint32_t epilogue(int64_t activation, bool bias) {
    const uint32_t function = activation == kRelu ? 2 : activation == kGeluTanh ? 32 : 0, add = bias ? 4 : 0;
    return function | add ? function | add : 1;
  }

  template <class S>
  static void alignments(Preference, const Problem&, const S&) {}  // it has none to be told
};
Hipblas::Functions Hipblas::f;

bool open(std::string* text) {
  void* library = open_library({"libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"}, text);
  if (!library) return false;
#define F(name) \
  if (!find(library, "hipblasLt" #name, &Hipblas::f.name, text)) return false;
  LT_FUNCTIONS(F)
  F(GetVersion)
#undef F
  Status status;
  int version = 0;
  Hipblas::Handle handle = Lt<Hipblas>::handle(status);
  if (!status.error) status(Hipblas::f.GetVersion(handle, &version));
  *text = status.error ? "hipblasLtCreate gave status " + std::to_string(status.error)
                       : std::to_string(version) + ", " + place(Hipblas::f.GetVersion);
  return !status.error;
}

}  // namespace

const Library* hipblaslt() {
  static const Library library = {"hipblasLt", open, Lt<Hipblas>::prepare, Lt<Hipblas>::run, Lt<Hipblas>::forget};
  return &library;
}

}  // namespace needle::gpu::vendor
