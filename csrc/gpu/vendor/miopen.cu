// MIOpen's fusion plans: convolution, bias and activation, compiled once per shape. The declarations are those that we
// call. It computes float32 in float32; its Winograd kernels pass only where their results agree with ours.
#include <initializer_list>
#include <memory>
#include <utility>

#include "gpu/gemm.cuh"
#include "gpu/vendor/load.h"
#include "gpu/vendor/table.h"

extern "C" {
typedef struct miopenHandle* miopenHandle_t;
typedef struct miopenTensorDescriptor* miopenTensorDescriptor_t;
typedef struct miopenConvolutionDescriptor* miopenConvolutionDescriptor_t;
typedef struct miopenFusionPlanDescriptor* miopenFusionPlanDescriptor_t;
typedef struct miopenFusionOpDescriptor* miopenFusionOpDescriptor_t;
typedef struct miopenOperatorArgs* miopenOperatorArgs_t;
int miopenGetVersion(size_t* major, size_t* minor, size_t* patch);
int miopenCreate(miopenHandle_t*);
int miopenSetStream(miopenHandle_t, gpuStream_t);
int miopenCreateTensorDescriptor(miopenTensorDescriptor_t*);
int miopenSet4dTensorDescriptorEx(miopenTensorDescriptor_t, int type, int n, int c, int h, int w, int n_stride,
                                  int c_stride, int h_stride, int w_stride);
int miopenDestroyTensorDescriptor(miopenTensorDescriptor_t);
int miopenCreateConvolutionDescriptor(miopenConvolutionDescriptor_t*);
int miopenInitConvolutionDescriptor(miopenConvolutionDescriptor_t, int mode, int pad_h, int pad_w, int stride_h,
                                    int stride_w, int dilation_h, int dilation_w);
int miopenDestroyConvolutionDescriptor(miopenConvolutionDescriptor_t);
int miopenCreateFusionPlan(miopenFusionPlanDescriptor_t*, int direction, miopenTensorDescriptor_t input);
int miopenDestroyFusionPlan(miopenFusionPlanDescriptor_t);
int miopenCreateOpConvForward(miopenFusionPlanDescriptor_t, miopenFusionOpDescriptor_t*, miopenConvolutionDescriptor_t,
                              miopenTensorDescriptor_t weight);
int miopenCreateOpBiasForward(miopenFusionPlanDescriptor_t, miopenFusionOpDescriptor_t*, miopenTensorDescriptor_t);
int miopenCreateOpActivationForward(miopenFusionPlanDescriptor_t, miopenFusionOpDescriptor_t*, int mode);
int miopenCompileFusionPlan(miopenHandle_t, miopenFusionPlanDescriptor_t);
int miopenCreateOperatorArgs(miopenOperatorArgs_t*);
int miopenDestroyOperatorArgs(miopenOperatorArgs_t);
int miopenSetOpArgsConvForward(miopenOperatorArgs_t, miopenFusionOpDescriptor_t, const void* alpha, const void* beta,
                               const void* weight);
int miopenSetOpArgsBiasForward(miopenOperatorArgs_t, miopenFusionOpDescriptor_t, const void* alpha, const void* beta,
                               const void* bias);
int miopenSetOpArgsActivForward(miopenOperatorArgs_t, miopenFusionOpDescriptor_t, const void* alpha, const void* beta,
                                double activation_alpha, double activation_beta, double activation_gamma);
int miopenExecuteFusionPlan(miopenHandle_t, miopenFusionPlanDescriptor_t, miopenTensorDescriptor_t, const void* input,
                            miopenTensorDescriptor_t, void* output, miopenOperatorArgs_t);
}

namespace needle::gpu::vendor {
namespace {

// clang-format off
#define MIOPEN_FUNCTIONS(F) \
  F(GetVersion) F(Create) F(SetStream) F(CreateTensorDescriptor) F(Set4dTensorDescriptorEx) \
  F(DestroyTensorDescriptor) F(CreateConvolutionDescriptor) F(InitConvolutionDescriptor) \
  F(DestroyConvolutionDescriptor) F(CreateFusionPlan) F(DestroyFusionPlan) F(CreateOpConvForward) \
  F(CreateOpBiasForward) F(CreateOpActivationForward) F(CompileFusionPlan) F(CreateOperatorArgs) \
  F(DestroyOperatorArgs) F(SetOpArgsConvForward) F(SetOpArgsBiasForward) F(SetOpArgsActivForward) \
  F(ExecuteFusionPlan)
// clang-format on

struct Functions {
#define F(name) decltype(&miopen##name) name;
  MIOPEN_FUNCTIONS(F)
#undef F
} f;

constexpr int kFloat = 1, kConvolution = 0, kVertical = 0;  // miopenFloat, miopenConvolution, miopenVerticalFusion

miopenHandle_t handle(Status& status) { return handle_from<miopenHandle_t>(f.Create, status); }

struct Plan {
  miopenTensorDescriptor_t x = nullptr, w = nullptr, bias = nullptr, out = nullptr;
  miopenConvolutionDescriptor_t window = nullptr;
  miopenFusionPlanDescriptor_t fusion = nullptr;
  miopenFusionOpDescriptor_t convolve = nullptr, add = nullptr, activate = nullptr;  // the plan's
  miopenOperatorArgs_t operands = nullptr;
  ~Plan() {
    if (operands) (void)f.DestroyOperatorArgs(operands);
    if (fusion) (void)f.DestroyFusionPlan(fusion);
    if (window) (void)f.DestroyConvolutionDescriptor(window);
    for (auto* tensor : {x, w, bias, out}) {
      if (tensor) (void)f.DestroyTensorDescriptor(tensor);
    }
  }
};

void tensor(miopenTensorDescriptor_t* to, const View& v, Status& status) {
  status(f.CreateTensorDescriptor(to));
  if (status.error) return;
  int n[8];
  for (int d = 0; d < 4; d++) n[d] = static_cast<int>(v.shape[d]), n[4 + d] = static_cast<int>(v.stride[d]);
  status(f.Set4dTensorDescriptorEx(*to, kFloat, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7]));
}

// miopenActivationMode_t, -1: none. kTanh is beta tanh(alpha x), kRelu6 min(alpha, max(0, x)).
int mode_of(int64_t activation) {
  constexpr std::pair<Activation, int> kModes[] = {{kSigmoid, 1}, {kTanh, 2},      {kRelu, 3},
                                                   {kRelu6, 7},   {kLeakyRelu, 8}, {kElu, 9}};
  for (const auto& [ours, theirs] : kModes)
    if (activation == ours) return theirs;
  return -1;
}

const char* refused(const Problem& p) {
  if (p.kind != kConv2d) return "no gradients and transposed convolutions in a fusion plan";
  if (p.precision != kExact) return "no float32 arrays in this precision";
  if (p.groups != 1) return "no groups in a fusion plan";
  if (p.scale.data || p.residual.data) return "no scale or residual in a fusion plan";
  if (!p.bias.data && p.activation == kNone) return "nothing to fuse";
  if (p.activation != kNone && mode_of(p.activation) < 0) return "no epilogue for it";
  if (p.bias.data && p.bias.stride[0] != 1 && p.bias.shape[0] != 1) return "a bias with gaps";
  const int64_t reach_h = (p.b.shape[2] - 1) * p.dilation_h + 1, reach_w = (p.b.shape[3] - 1) * p.dilation_w + 1;
  const bool even = p.pad_top >= 0 && p.pad_left >= 0 &&
                    (p.a.shape[2] + 2 * p.pad_top - reach_h) / p.stride_h + 1 == p.out.shape[2] &&
                    (p.a.shape[3] + 2 * p.pad_left - reach_w) / p.stride_w + 1 == p.out.shape[3];
  if (!even) return "padding that differs from side to side";
  for (const View* v : {&p.a, &p.b, &p.out}) {
    for (int d = 0; d < 4; d++) {
      if (v->stride[d] <= 0 || v->stride[d] > INT32_MAX) return "strides that are no positive int";
    }
  }
  return nullptr;
}

std::vector<Way> prepare(const Problem& p, size_t, std::string* text) {
  if (const char* why = refused(p)) {
    *text = why;
    return {};
  }
  Status status;
  miopenHandle_t library = handle(status);
  auto plan = std::make_unique<Plan>();
  auto step = [&](auto function, auto... arguments) {
    if (!status.error) status(function(arguments...));
  };
  if (!status.error) {
    tensor(&plan->x, p.a, status);
    tensor(&plan->w, p.b, status);
    tensor(&plan->out, p.out, status);
  }
  step(f.CreateConvolutionDescriptor, &plan->window);
  step(f.InitConvolutionDescriptor, plan->window, kConvolution, static_cast<int>(p.pad_top),
       static_cast<int>(p.pad_left), static_cast<int>(p.stride_h), static_cast<int>(p.stride_w),
       static_cast<int>(p.dilation_h), static_cast<int>(p.dilation_w));
  step(f.CreateFusionPlan, &plan->fusion, kVertical, plan->x);
  step(f.CreateOpConvForward, plan->fusion, &plan->convolve, plan->window, plan->w);
  if (p.bias.data && !status.error) {
    const int64_t n = p.bias.shape[0];
    tensor(&plan->bias, {p.bias.data, {1, n, 1, 1}, {n, 1, 1, 1}, 4, DType::f32}, status);
    step(f.CreateOpBiasForward, plan->fusion, &plan->add, plan->bias);
  }
  if (p.activation != kNone) step(f.CreateOpActivationForward, plan->fusion, &plan->activate, mode_of(p.activation));
  step(f.CompileFusionPlan, library, plan->fusion);
  step(f.CreateOperatorArgs, &plan->operands);
  if (!status.error) return {{plan.release(), 0}};
  *text = "no fusion plan, status " + std::to_string(status.error);
  return {};
}

int run(void* made, const Problem& p, void*, void* stream) {
  const Plan& plan = *static_cast<Plan*>(made);
  Status status;
  miopenHandle_t library = handle(status);
  const float one = 1, zero = 0;
  const double alpha = p.activation == kRelu6 ? 6 : p.activation == kTanh ? 1 : double{p.alpha};
  status(f.SetStream(library, static_cast<gpuStream_t>(stream)));
  status(f.SetOpArgsConvForward(plan.operands, plan.convolve, &one, &zero, p.b.data));
  if (plan.add) status(f.SetOpArgsBiasForward(plan.operands, plan.add, &one, &zero, p.bias.data));
  if (plan.activate) status(f.SetOpArgsActivForward(plan.operands, plan.activate, &one, &zero, alpha, 1, 1));
  if (status.error) return status.error;
  return f.ExecuteFusionPlan(library, plan.fusion, plan.x, p.a.data, plan.out, p.out.data, plan.operands);
}

void forget(void* plan) { delete static_cast<Plan*>(plan); }

bool open(std::string* text) {
  void* library = open_library({"libMIOpen.so.1", "libMIOpen.so"}, text);
  if (!library) return false;
#define F(name) \
  if (!find(library, "miopen" #name, &f.name, text)) return false;
  MIOPEN_FUNCTIONS(F)
#undef F
  size_t version[3] = {};
  (void)f.GetVersion(&version[0], &version[1], &version[2]);
  *text = std::to_string(version[0]) + "." + std::to_string(version[1]) + "." + std::to_string(version[2]) + ", " +
          place(f.GetVersion);
  return true;
}

}  // namespace

const Library* miopen() {
  static const Library library = {"MIOpen", open, prepare, run, forget};
  return &library;
}

}  // namespace needle::gpu::vendor
