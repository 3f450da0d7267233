// Steps of optimisers, in place on contiguous parameters and state. A call steps any number of parameters: outputs are
// a parameter and its state, then the next parameter and its state; inputs are their gradients.
#include "gpu/strided.cuh"
#include "math/optimizers.h"

namespace needle::gpu {
namespace {

constexpr int kParameters = 32, kOutputs = 4;  // of a launch, whose arguments have to stay below 4 KiB
constexpr uint32_t kPiece = 4 * kThreads;      // elements of a block

template <class T>
struct Parameters {
  T* out[kParameters][kOutputs];
  const T* grad[kParameters];
  int64_t size[kParameters];
  uint32_t last[kParameters];  // the block after the parameter's last one
  int count;
};

// Element i of a parameter (0) and its state.
template <class T>
struct State {
  T* const* out;
  int64_t i;
  __device__ __forceinline__ T read(int k) const { return out[k][i]; }
  __device__ __forceinline__ void write(int k, T v) const { out[k][i] = v; }
};

template <class T, class Rule>
__global__ void GPU_BOUNDS(kThreads, 4) step_piece(Parameters<T> p, Rule rule) {
  int g = 0;
  while (blockIdx.x >= p.last[g]) g++;
  const uint32_t block = blockIdx.x - (g ? p.last[g - 1] : 0);
  const int64_t first = static_cast<int64_t>(block) * kPiece + threadIdx.x;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int64_t i = first + k * static_cast<int64_t>(kThreads);
    if (i >= p.size[g]) continue;
    const State<T> s = {p.out[g], i};
    T w = s.read(0);
    Rule::step(rule, w, p.grad[g][i], s);
    s.write(0, w);
  }
}

template <class T, class Args, class Rule>
void step_as(const Args& c, const Rule& rule) {
  constexpr int kOutputs = sizeof(*c.out) / sizeof(View);
  Parameters<T> p = {};
  uint32_t blocks = 0;
  for (int g = 0; g < c.groups; g++) {
    const View* out = &c.out[g].parameter;
    const int64_t size = out->size(), more = (size + kPiece - 1) / kPiece;
    if (size > 0) {
      if (more > INT32_MAX / 2) fail("optim", "a parameter has at most 2^40 elements", std::to_string(size));
      for (int k = 0; k < kOutputs; k++) p.out[p.count][k] = out[k].as<T>();
      p.grad[p.count] = c.in[g].grad.template as<T>();
      p.size[p.count] = size;
      p.last[p.count++] = blocks += static_cast<uint32_t>(more);
    }
    if (p.count == 0 || (p.count < kParameters && g + 1 < c.groups)) continue;
    launch(step_piece<T, Rule>, dim3(blocks), kThreads, 0, stream_of(c), p, rule);
    p = {};
    blocks = 0;
  }
}

template <template <class, class> class Rule, class Args>
void step(const Args& c) {
  if (c.groups == 0) return;
  with_type<Args::In::grad_dtypes>(c.out->parameter.dtype, [&](auto t) {
    using T = decltype(t);
    step_as<T>(c, Rule<T, T>(c.attr));
  });
}

}  // namespace

void sgd_step(const sgd_step_args& c) { step<device::Sgd>(c); }
void needle_sgd_step(const needle_sgd_step_args& c) { step<device::NeedleSgd>(c); }
void adam_step(const adam_step_args& c) { step<device::Adam>(c); }
void rmsprop_step(const rmsprop_step_args& c) { step<device::RmsProp>(c); }
void nadam_step(const nadam_step_args& c) { step<device::NAdam>(c); }
void radam_step(const radam_step_args& c) { step<device::RAdam>(c); }
void adamax_step(const adamax_step_args& c) { step<device::Adamax>(c); }
void lion_step(const lion_step_args& c) { step<device::Lion>(c); }
void adagrad_step(const adagrad_step_args& c) { step<device::Adagrad>(c); }
void adadelta_step(const adadelta_step_args& c) { step<device::Adadelta>(c); }

}  // namespace needle::gpu
