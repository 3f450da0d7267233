// cuDNN 9's graph API: convolution, scale, residual, bias and activation as one graph, whose engine is chosen by
// cuDNN's heuristics among those that compute in the precision asked for.
#include <cudnn_graph.h>

#include <initializer_list>
#include <utility>
#include <vector>

#include "gpu/gemm.cuh"
#include "gpu/vendor/load.h"
#include "gpu/vendor/table.h"

namespace needle::gpu::vendor {
namespace {

#define CUDNN_FUNCTIONS(F)   \
  F(GetVersion)              \
  F(Create)                  \
  F(SetStream)               \
  F(BackendCreateDescriptor) \
  F(BackendDestroyDescriptor) F(BackendFinalize) F(BackendSetAttribute) F(BackendGetAttribute) F(BackendExecute)

struct Functions {
#define F(name) decltype(&cudnn##name) name;
  CUDNN_FUNCTIONS(F)
#undef F
} f;

struct Failure {
  int status;
  const char* at;
};

void require(cudnnStatus_t status, const char* at) {
  if (status != CUDNN_STATUS_SUCCESS) throw Failure{status, at};
}

cudnnHandle_t handle() {
  Status status;
  cudnnHandle_t made = handle_from<cudnnHandle_t>(f.Create, status);
  require(static_cast<cudnnStatus_t>(status.error), "cudnnCreate");
  return made;
}

// The attribute type that goes with a C++ type.
constexpr auto type_of(int64_t) { return CUDNN_TYPE_INT64; }
constexpr auto type_of(float) { return CUDNN_TYPE_FLOAT; }
constexpr auto type_of(double) { return CUDNN_TYPE_DOUBLE; }
constexpr auto type_of(bool) { return CUDNN_TYPE_BOOLEAN; }
constexpr auto type_of(void*) { return CUDNN_TYPE_VOID_PTR; }
constexpr auto type_of(cudnnHandle_t) { return CUDNN_TYPE_HANDLE; }
constexpr auto type_of(cudnnDataType_t) { return CUDNN_TYPE_DATA_TYPE; }
constexpr auto type_of(cudnnConvolutionMode_t) { return CUDNN_TYPE_CONVOLUTION_MODE; }
constexpr auto type_of(cudnnPointwiseMode_t) { return CUDNN_TYPE_POINTWISE_MODE; }
constexpr auto type_of(cudnnBackendHeurMode_t) { return CUDNN_TYPE_HEUR_MODE; }

class Descriptor {
 public:
  Descriptor() = default;
  Descriptor(cudnnBackendDescriptorType_t type, const char* name) : name_(name) {
    require(f.BackendCreateDescriptor(type, &d_), name);
  }
  Descriptor(Descriptor&& other) noexcept : d_(std::exchange(other.d_, nullptr)), name_(other.name_) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(d_, other.d_);
    std::swap(name_, other.name_);
    return *this;
  }
  ~Descriptor() {
    if (d_) (void)f.BackendDestroyDescriptor(d_);
  }
  template <class T>
  Descriptor& set(cudnnBackendAttributeName_t attribute, const T* values, size_t n) {
    require(f.BackendSetAttribute(d_, attribute, type_of(T{}), static_cast<int64_t>(n), values), name_);
    return *this;
  }
  template <class T>
  Descriptor& set(cudnnBackendAttributeName_t attribute, T value) {
    return set(attribute, &value, 1);
  }
  template <class T>
  Descriptor& set(cudnnBackendAttributeName_t attribute, std::initializer_list<T> values) {
    return set(attribute, values.begin(), values.size());
  }
  Descriptor& set(cudnnBackendAttributeName_t attribute, const Descriptor& other) {
    require(f.BackendSetAttribute(d_, attribute, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &other.d_), name_);
    return *this;
  }
  Descriptor& set(cudnnBackendAttributeName_t attribute, const std::vector<Descriptor>& others) {
    std::vector<cudnnBackendDescriptor_t> all;
    for (const Descriptor& d : others) all.push_back(d.d_);
    require(f.BackendSetAttribute(d_, attribute, CUDNN_TYPE_BACKEND_DESCRIPTOR, static_cast<int64_t>(all.size()),
                                  all.data()),
            name_);
    return *this;
  }
  // How many of at most `n` values it gave.
  int64_t get(cudnnBackendAttributeName_t attribute, cudnnBackendAttributeType_t type, int64_t n, void* to) const {
    int64_t count = 0;
    require(f.BackendGetAttribute(d_, attribute, type, n, &count, to), name_);
    return count;
  }
  Descriptor&& done() {
    require(f.BackendFinalize(d_), name_);
    return std::move(*this);
  }
  cudnnBackendDescriptor_t raw() const { return d_; }

 private:
  cudnnBackendDescriptor_t d_ = nullptr;
  const char* name_ = "";
};

enum Tensor : int64_t { kX = 1, kW, kOut, kScale, kBias, kResidual, kFirstBetween };

Descriptor tensor(int64_t id, const int64_t (&shape)[4], const int64_t (&stride)[4], int64_t bytes, bool between) {
  Descriptor d(CUDNN_BACKEND_TENSOR_DESCRIPTOR, "tensor");
  d.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, id).set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_DATA_FLOAT);
  d.set(CUDNN_ATTR_TENSOR_DIMENSIONS, shape, 4).set(CUDNN_ATTR_TENSOR_STRIDES, stride, 4);
  d.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, bytes).set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, between);
  return d.done();
}

// An axis of one element may have any stride with us; cuDNN reads layouts from strides.
Descriptor image(int64_t id, const View& v) {
  int64_t shape[4], stride[4];
  const bool last = v.stride[1] == 1 && v.shape[1] > 1;
  for (int d = 0; d < 4; d++) shape[d] = v.shape[d], stride[d] = v.stride[d];
  if (shape[3] == 1) stride[3] = last ? shape[1] : 1;
  if (shape[2] == 1) stride[2] = shape[3] * stride[3];
  if (shape[1] == 1) stride[1] = shape[2] * stride[2];
  if (shape[0] == 1) stride[0] = last ? shape[2] * stride[2] : shape[1] * stride[1];
  return tensor(id, shape, stride, alignment(v.data), false);
}

Descriptor per_channel(int64_t id, const View& v) {
  const int64_t n = v.shape[0];
  return tensor(id, {1, n, 1, 1}, {n, 1, 1, 1}, alignment(v.data), false);
}

// What follows the convolution: with a second operand, or an activation.
Descriptor pointwise(cudnnPointwiseMode_t mode, const Problem& p) {
  Descriptor d(CUDNN_BACKEND_POINTWISE_DESCRIPTOR, "pointwise");
  d.set(CUDNN_ATTR_POINTWISE_MODE, mode).set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_DATA_FLOAT);
  if (mode == CUDNN_POINTWISE_RELU_FWD && p.activation == kRelu6) d.set(CUDNN_ATTR_POINTWISE_RELU_UPPER_CLIP, 6.0);
  if (mode == CUDNN_POINTWISE_RELU_FWD && p.activation == kLeakyRelu)
    d.set(CUDNN_ATTR_POINTWISE_RELU_LOWER_CLIP_SLOPE, double{p.alpha});
  if (mode == CUDNN_POINTWISE_ELU_FWD) d.set(CUDNN_ATTR_POINTWISE_ELU_ALPHA, double{p.alpha});
  if (mode == CUDNN_POINTWISE_SWISH_FWD) d.set(CUDNN_ATTR_POINTWISE_SWISH_BETA, 1.0);
  return d.done();
}

// False where cuDNN has no such activation.
bool mode_of(int64_t activation, cudnnPointwiseMode_t* mode) {
  constexpr std::pair<Activation, cudnnPointwiseMode_t> kModes[] = {
      {kRelu, CUDNN_POINTWISE_RELU_FWD},      {kRelu6, CUDNN_POINTWISE_RELU_FWD},
      {kLeakyRelu, CUDNN_POINTWISE_RELU_FWD}, {kSigmoid, CUDNN_POINTWISE_SIGMOID_FWD},
      {kSilu, CUDNN_POINTWISE_SWISH_FWD},     {kTanh, CUDNN_POINTWISE_TANH_FWD},
      {kGelu, CUDNN_POINTWISE_GELU_FWD},      {kGeluTanh, CUDNN_POINTWISE_GELU_APPROX_TANH_FWD},
      {kElu, CUDNN_POINTWISE_ELU_FWD}};
  for (const auto& [ours, theirs] : kModes)
    if (activation == ours) return *mode = theirs, true;
  return false;
}

// The padding at an axis' end: that at its beginning where this gives as many results, for engines like it; -1: none.
int64_t padding_after(int64_t size, int64_t out, int64_t kernel, int64_t stride, int64_t before, int64_t dilation) {
  const int64_t reach = (kernel - 1) * dilation + 1, needed = (out - 1) * stride + reach - size - before;
  if (before < 0 || needed > before) return before < 0 ? -1 : needed;
  return (size + 2 * before - reach) / stride + 1 == out ? before : needed < 0 ? -1 : needed;
}

// Engines that compute otherwise than asked for, or differently from run to run.
bool suits(const Descriptor& config, int64_t precision) {
  Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR, "engine");
  cudnnBackendDescriptor_t raw = engine.raw();
  config.get(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &raw);
  cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
  int64_t n =
      engine.get(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, CUDNN_NUMERICAL_NOTE_TYPE_COUNT, notes);
  for (int64_t i = 0; i < n && i < CUDNN_NUMERICAL_NOTE_TYPE_COUNT; i++) {
    switch (notes[i]) {
      case CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP:
        continue;
      case CUDNN_NUMERICAL_NOTE_TENSOR_CORE:
        if (precision != kExact) continue;  // of float32 operands they take TF32, no less exact than halves
        return false;
      default:
        return false;
    }
  }
  return true;
}

// Adds plans of at most `most` engines for the graph, in the order in which cuDNN expects them to be fast.
void add_engines(std::vector<Way>& to, const Descriptor& graph, int64_t precision, size_t most) {
  for (auto mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    Descriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, "heuristics");
    heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph).set(CUDNN_ATTR_ENGINEHEUR_MODE, mode);
    heuristics.done();
    int64_t n = heuristics.get(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, nullptr);
    std::vector<Descriptor> configs;
    std::vector<cudnnBackendDescriptor_t> raw;
    for (int64_t i = 0; i < n; i++) {
      configs.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, "engine configuration");
      raw.push_back(configs.back().raw());
    }
    n = heuristics.get(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, n, raw.data());
    for (int64_t i = 0; i < n && to.size() < most; i++) {
      try {
        if (!suits(configs[i], precision)) continue;
        Descriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, "plan");
        plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, handle()).set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[i]);
        plan.done();
        int64_t workspace = 0;
        plan.get(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &workspace);
        if (workspace > static_cast<int64_t>(kMaxWorkspace)) continue;
        to.push_back({new Descriptor(std::move(plan)), static_cast<size_t>(workspace)});
      } catch (const Failure&) {  // not every configuration that heuristics name can be built
      }
    }
    if (!to.empty()) return;
  }
}

Descriptor operations(const Problem& p, int64_t bottom, int64_t right) {
  std::vector<Descriptor> steps;
  int64_t between = kFirstBetween;
  int remaining =
      (p.scale.data != nullptr) + (p.residual.data != nullptr) + (p.bias.data != nullptr) + (p.activation != kNone);
  auto result = [&] {  // of the next step: in registers, or the graph's
    Descriptor d = image(kOut, p.out);
    if (remaining == 0) return d;
    int64_t shape[4], stride[4];
    for (int i = 0; i < 4; i++) shape[i] = p.out.shape[i], stride[i] = p.out.stride[i];
    return tensor(between++, shape, stride, 16, true);
  };
  Descriptor window(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR, "convolution");
  window.set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_DATA_FLOAT);
  window.set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_CROSS_CORRELATION)
      .set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, int64_t{2});
  window.set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, {p.pad_top, p.pad_left});
  window.set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, {bottom, right});
  window.set(CUDNN_ATTR_CONVOLUTION_DILATIONS, {p.dilation_h, p.dilation_w});
  window.set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, {p.stride_h, p.stride_w});
  window.done();
  Descriptor a = image(kX, p.a), b = image(kW, p.b), value = result();
  auto convolve = [&](auto type, auto first, auto second, auto to, auto how, auto alpha, auto beta) {
    Descriptor d(type, "convolution");
    d.set(first, a).set(second, b).set(to, value).set(how, window).set(alpha, 1.0f).set(beta, 0.0f);
    steps.push_back(d.done());
  };
#define ATTRIBUTE(direction, name) CUDNN_ATTR_OPERATION_CONVOLUTION_##direction##_##name
  if (p.kind == kConv2d) {
    convolve(CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, ATTRIBUTE(FORWARD, X), ATTRIBUTE(FORWARD, W),
             ATTRIBUTE(FORWARD, Y), ATTRIBUTE(FORWARD, CONV_DESC), ATTRIBUTE(FORWARD, ALPHA), ATTRIBUTE(FORWARD, BETA));
  } else if (p.kind == kConv2dWeightGrad) {
    convolve(CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, ATTRIBUTE(BWD_FILTER, X),
             ATTRIBUTE(BWD_FILTER, DY), ATTRIBUTE(BWD_FILTER, DW), ATTRIBUTE(BWD_FILTER, CONV_DESC),
             ATTRIBUTE(BWD_FILTER, ALPHA), ATTRIBUTE(BWD_FILTER, BETA));
  } else {  // the gradient of a convolution that reads our result
    convolve(CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, ATTRIBUTE(BWD_DATA, DY),
             ATTRIBUTE(BWD_DATA, W), ATTRIBUTE(BWD_DATA, DX), ATTRIBUTE(BWD_DATA, CONV_DESC),
             ATTRIBUTE(BWD_DATA, ALPHA), ATTRIBUTE(BWD_DATA, BETA));
  }
#undef ATTRIBUTE
  auto then = [&](cudnnPointwiseMode_t mode, const Descriptor& operand) {
    remaining--;
    Descriptor how = pointwise(mode, p), next = result();
    Descriptor step(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, "epilogue");
    step.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how).set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, value);
    if (operand.raw()) step.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, operand);
    step.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, next);
    steps.push_back(step.done());
    value = std::move(next);
  };
  // In this order its precompiled engines know the graph.
  if (p.scale.data) then(CUDNN_POINTWISE_MUL, per_channel(kScale, p.scale));
  if (p.residual.data) then(CUDNN_POINTWISE_ADD, image(kResidual, p.residual));
  if (p.bias.data) then(CUDNN_POINTWISE_ADD, per_channel(kBias, p.bias));
  cudnnPointwiseMode_t mode;
  if (mode_of(p.activation, &mode)) then(mode, Descriptor());
  Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, "graph");
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, steps).set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, handle());
  return graph.done();
}

const char* refused(const Problem& p, int64_t* bottom, int64_t* right) {
  cudnnPointwiseMode_t mode;
  if (p.activation != kNone && !mode_of(p.activation, &mode)) return "no epilogue for it";
  for (const View* v : {&p.scale, &p.bias}) {
    if (v->data && v->stride[0] != 1 && v->shape[0] != 1) return "a bias or scale with gaps";
  }
  for (const View* v : {&p.a, &p.b, &p.out, &p.residual}) {
    for (int d = 0; v->data && d < 4; d++) {
      if (v->stride[d] <= 0 && v->shape[d] > 1) return "strides that are not positive";
    }
  }
  const bool transposed = p.kind == kConvTranspose2d, of_weight = p.kind == kConv2dWeightGrad;
  const View &from = transposed ? p.out : p.a, &to = transposed ? p.a : of_weight ? p.b : p.out;
  const View& weight = of_weight ? p.out : p.b;
  *bottom = padding_after(from.shape[2], to.shape[2], weight.shape[2], p.stride_h, p.pad_top, p.dilation_h);
  *right = padding_after(from.shape[3], to.shape[3], weight.shape[3], p.stride_w, p.pad_left, p.dilation_w);
  return *bottom < 0 || *right < 0 ? "padding that crops" : nullptr;
}

std::vector<Way> prepare(const Problem& p, size_t most, std::string* text) {
  std::vector<Way> ways;
  int64_t bottom, right;
  if (const char* why = refused(p, &bottom, &right)) {
    *text = why;
    return ways;
  }
  try {
    add_engines(ways, operations(p, bottom, right), p.precision, most);
    if (ways.empty()) *text = "no engine of this precision for the graph";
  } catch (const Failure& e) {
    *text = std::string(e.at) + " gave status " + std::to_string(e.status);
  }
  return ways;
}

int run(void* plan, const Problem& p, void* workspace, void* stream) {
  try {
    require(f.SetStream(handle(), static_cast<cudaStream_t>(stream)), "stream");
    int64_t ids[6];
    void* pointers[6];
    size_t n = 0;
    const View* all[] = {&p.a, &p.b, &p.out, &p.scale, &p.bias, &p.residual};
    for (int64_t i = 0; i < 6; i++) {
      if (all[i]->data) ids[n] = kX + i, pointers[n++] = all[i]->data;
    }
    Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, "pack");
    pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, ids, n).set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, pointers, n);
    pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, workspace).done();
    require(f.BackendExecute(handle(), static_cast<Descriptor*>(plan)->raw(), pack.raw()), "execute");
    return 0;
  } catch (const Failure& e) {
    return e.status;
  }
}

void forget(void* plan) { delete static_cast<Descriptor*>(plan); }

bool open(std::string* text) {
  void* library = open_library({"libcudnn.so.9"}, text);
  if (!library) return false;
#define F(name) \
  if (!find(library, "cudnn" #name, &f.name, text)) return false;
  CUDNN_FUNCTIONS(F)
#undef F
  *text = std::to_string(f.GetVersion()) + ", " + place(f.GetVersion);
  return true;
}

}  // namespace

const Library* cudnn() {
  static const Library library = {"cudnn", open, prepare, run, forget};
  return &library;
}

}  // namespace needle::gpu::vendor
