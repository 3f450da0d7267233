// Steps of optimisers, in place on contiguous parameters and state. A call steps any number of parameters: outputs are
// a parameter and its state, then the next parameter and its state; inputs are their gradients.
#include "gpu/strided.cuh"

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

struct Rates {  // attributes as the kernels use them
  double v[9];
};

// f(outputs, gradient, i) for the elements of this block's piece.
template <class T, class F>
__device__ __forceinline__ void for_piece(const Parameters<T>& p, const F& f) {
  int g = 0;
  while (blockIdx.x >= p.last[g]) g++;
  const uint32_t block = blockIdx.x - (g ? p.last[g - 1] : 0);
  const int64_t first = static_cast<int64_t>(block) * kPiece + threadIdx.x;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int64_t i = first + k * static_cast<int64_t>(kThreads);
    if (i < p.size[g]) f(p.out[g], p.grad[g], i);
  }
}

// The gradient with weight decay; without, weights stay out of it: 0 times infinity is NaN.
template <class T>
__device__ __forceinline__ T decayed(T g, T w, T decay) {
  return decay != 0 ? g + decay * w : g;
}

// torch.optim.SGD: the first step starts the velocity at the gradient; without momentum it is not touched.
template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) step_sgd(Parameters<T> p, Rates r) {
  const T lr = T(r.v[0]), momentum = T(r.v[1]), fresh = T(1 - r.v[2]), decay = T(r.v[3]);
  const bool nesterov = r.v[4] != 0, start = r.v[5] != 0;
  for_piece(p, [&](T* const* out, const T* grad, int64_t i) {
    T w = out[0][i], g = decayed(grad[i], w, decay);
    T v = start ? g : momentum * out[1][i] + fresh * g;
    if (momentum != 0) out[1][i] = v;
    out[0][i] = w - lr * (nesterov ? g + momentum * v : v);
  });
}

// The course's rule: the velocity is a running mean of gradients.
template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) step_needle_sgd(Parameters<T> p, Rates r) {
  const T lr = T(r.v[0]), momentum = T(r.v[1]), fresh = T(1 - r.v[1]), decay = T(r.v[2]);
  for_piece(p, [&](T* const* out, const T* grad, int64_t i) {
    T w = out[0][i], g = decayed(grad[i], w, decay);
    T u = momentum * out[1][i] + fresh * g;
    out[1][i] = u;
    out[0][i] = w - lr * u;
  });
}

// torch.optim.Adam, and AdamW when `decoupled`: rates are its step size and the root of its second correction.
// The largest second moment is not touched unless `amsgrad`.
template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) step_adam(Parameters<T> p, Rates r) {
  const T shrink = T(1 - r.v[0] * r.v[4]), beta1 = T(r.v[1]), beta2 = T(r.v[2]), fresh1 = T(1 - r.v[1]),
          fresh2 = T(1 - r.v[2]), eps = T(r.v[3]), decay = T(r.v[4]), size = T(r.v[5]), root = T(r.v[8]);
  const bool decoupled = r.v[6] != 0, amsgrad = r.v[7] != 0;
  for_piece(p, [&](T* const* out, const T* grad, int64_t i) {
    T w = out[0][i], g = grad[i];
    if (decoupled) {
      w = w * shrink;
    } else {
      g = decayed(g, w, decay);
    }
    T m = beta1 * out[1][i] + fresh1 * g, v = beta2 * out[2][i] + fresh2 * g * g;
    out[1][i] = m;
    out[2][i] = v;
    if (amsgrad) {
      if (!(v < out[3][i])) out[3][i] = v;  // NaN, too
      v = out[3][i];
    }
    out[0][i] = w - size * m / (device::sqrt(v) * root + eps);
  });
}

// torch.optim.RMSprop: running mean of squares, momentum, running mean; the last two are not touched unless used.
template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) step_rmsprop(Parameters<T> p, Rates r) {
  const T lr = T(r.v[0]), alpha = T(r.v[1]), fresh = T(1 - r.v[1]), eps = T(r.v[2]), decay = T(r.v[3]),
          momentum = T(r.v[4]);
  const bool has_momentum = r.v[4] != 0, centered = r.v[5] != 0;
  for_piece(p, [&](T* const* out, const T* grad, int64_t i) {
    T w = out[0][i], g = decayed(grad[i], w, decay);
    T spread = alpha * out[1][i] + fresh * g * g;
    out[1][i] = spread;
    if (centered) {
      T mean = alpha * out[3][i] + fresh * g;
      out[3][i] = mean;
      spread = spread - mean * mean;
    }
    T step = g / (device::sqrt(spread) + eps);
    if (has_momentum) {
      step = momentum * out[2][i] + step;
      out[2][i] = step;
    }
    out[0][i] = w - lr * step;
  });
}

template <class T, class Args>
void step_as(const Args& c, const Rates& r, void (*kernel)(Parameters<T>, Rates)) {
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
    launch(kernel, dim3(blocks), kThreads, 0, stream_of(c), p, r);
    p = {};
    blocks = 0;
  }
}

#define STEP(rates, kernel) \
  if (c.groups)             \
  c.out->parameter.dtype == DType::f32 ? step_as(c, rates, kernel<float>) : step_as(c, rates, kernel<double>)

}  // namespace

void sgd_step(const sgd_step_args& c) {
  const auto& a = c.attr;
  const Rates r = {{a.lr, a.momentum, a.dampening, a.weight_decay, a.nesterov.value, a.first.value}};
  STEP(r, step_sgd);
}
void needle_sgd_step(const needle_sgd_step_args& c) {
  const Rates r = {{c.attr.lr, c.attr.momentum, c.attr.weight_decay}};
  STEP(r, step_needle_sgd);
}
void adam_step(const adam_step_args& c) {
  const auto& a = c.attr;
  const double size = a.lr / (1 - std::pow(a.beta1, a.step)), root = 1 / std::sqrt(1 - std::pow(a.beta2, a.step));
  const Rates r = {{a.lr, a.beta1, a.beta2, a.eps, a.weight_decay, size, a.decoupled.value, a.amsgrad.value, root}};
  STEP(r, step_adam);
}
void rmsprop_step(const rmsprop_step_args& c) {
  const auto& a = c.attr;
  const Rates r = {{a.lr, a.alpha, a.eps, a.weight_decay, a.momentum, a.centered.value}};
  STEP(r, step_rmsprop);
}

}  // namespace needle::gpu
