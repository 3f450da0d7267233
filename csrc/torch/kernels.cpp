#include "torch/kernels.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <vector>

#include "core/backend.h"

namespace needle::torch_ops {
namespace {

using torch::headeronly::ScalarType;

constexpr int kCpu = 0, kGpu = 1;  // torch calls ROCm's devices CUDA, too
const Backend* backends[2] = {};
void (*cpu_services)(Exec*) = nullptr;
constexpr const char* kNames[] = {
    "none",
#define ACTIVATION(code, name, cost, choice) #name,
#include "kernels/activations.def"
#undef ACTIVATION
};

const Backend* backend_of(const Tensor& t) {
  return t.is_cpu() ? backends[kCpu] : t.is_cuda() ? backends[kGpu] : nullptr;
}

// Device memory for a kernel comes from torch's allocator; it may be freed at once, since that is ordered by stream.
thread_local const Tensor* running = nullptr;
thread_local Tensor* scratch_memory[4] = {};

void* gpu_scratch(int slot, size_t bytes) {
  delete scratch_memory[slot];
  const int64_t size = static_cast<int64_t>(bytes ? bytes : 1);
  scratch_memory[slot] = new Tensor(torch::stable::new_empty(*running, {&size, 1}, ScalarType::Byte));
  return scratch_memory[slot]->data_ptr();
}

// Tasks on the threads of torch, which wait awake for the next op: a second pool would find the cores taken.
void torch_parallel(int64_t tasks, void (*body)(void*, int64_t), void* ctx) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(tasks, torch::stable::get_num_threads());
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin++)
      for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(ctx, t);
  });
}

View memory_of(const Tensor& t, int64_t rank) {
  View v;
  switch (t.scalar_type()) {
    case ScalarType::Float:
      v.dtype = DType::f32;
      break;
    case ScalarType::Bool:
      v.dtype = DType::b8;
      break;
    default:
      fail("view", "a kernel got a dtype that it does not take.");
  }
  if (rank > kMaxRank) fail("view", "tensors have at most 8 axes, got " + std::to_string(rank) + ".");
  v.data = t.data_ptr();
  v.rank = static_cast<int32_t>(rank);
  return v;
}

}  // namespace

void fail(const char* op, const std::string& text) { throw std::runtime_error("[" + std::string(op) + "] " + text); }

int64_t activation_code(const char* op, std::string_view name) {
  for (size_t i = 0; i < std::size(kNames); i++)
    if (name == kNames[i]) return static_cast<int64_t>(i);
  std::string known;
  for (const char* a : kNames) known += (known.empty() ? "" : ", ") + std::string(a);
  fail(op, "activation expects one of " + known + ", got " + std::string(name) + ".");
}

const KernelRow* find(const char* kernel, const Tensor& t) {
  const Backend* b = backend_of(t);
  if (!b || t.scalar_type() != ScalarType::Float) return nullptr;
  return b->find(kernel);
}

View view_of(const Tensor& t) {
  View v = memory_of(t, t.dim());
  for (int i = 0; i < v.rank; i++) v.shape[i] = t.size(i), v.stride[i] = t.stride(i);
  return v;
}

View view_of(const Tensor& t, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> stride) {
  View v = memory_of(t, static_cast<int64_t>(shape.size()));
  std::copy(shape.begin(), shape.end(), v.shape);
  std::copy(stride.begin(), stride.end(), v.stride);
  return v;
}

View broadcast(const View& v, const int64_t* shape, int rank) {
  View r = v;
  r.rank = rank;
  for (int i = 0; i < rank; i++) {
    const int from = i - (rank - v.rank);
    r.shape[i] = shape[i];
    r.stride[i] = from < 0 || v.shape[from] == 1 ? 0 : v.stride[from];
  }
  return r;
}

void run_map(const KernelRow* kernel, const Tensor& t, const View& out, std::initializer_list<View> in,
             std::initializer_list<double> attributes) {
  run(kernel, t, {&out, in.begin(), attributes.begin(), 1, static_cast<int>(in.size()), nullptr});
}

void run(const KernelRow* kernel, const Tensor& t, const Call& given) {
  Call call = given;
  if (t.is_cpu()) {
    Exec exec;
    cpu_services(&exec);
    exec.threads = static_cast<int>(torch::stable::get_num_threads());
    exec.parallel = torch_parallel;
    call.exec = &exec;
    kernel->run(call);
    return;
  }
  const int32_t device = t.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  auto stream = torch::stable::accelerator::getCurrentStream(device);
  Exec exec = {1, nullptr, gpu_scratch, stream.nativeHandle()};
  call.exec = &exec;
  running = &t;
  kernel->run(call);
  for (Tensor*& memory : scratch_memory) {
    delete memory;
    memory = nullptr;
  }
}

}  // namespace needle::torch_ops

// Takes the kernel table of a library: needle._core for the CPU, libneedle_cuda.so or libneedle_hip.so for a GPU.
// Returns null, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* needle_torch_open(int gpu, const char* path) {
  using namespace needle;
  using namespace needle::torch_ops;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return dlerror();
  auto table = reinterpret_cast<const Backend* (*)()>(dlsym(library, "needle_backend"));
  if (!table) return dlerror();
  if (!gpu) {
    cpu_services = reinterpret_cast<void (*)(Exec*)>(dlsym(library, "needle_exec"));
    if (!cpu_services) return dlerror();
  }
  backends[gpu ? kGpu : kCpu] = table();
  return nullptr;
}
