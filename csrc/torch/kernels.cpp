#include "torch/kernels.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "core/backend.h"
#include "torch/team.h"

namespace needle::torch_ops {
namespace {

using torch::headeronly::ScalarType;

constexpr double kWorthThreads = 5e6;  // waking a thread takes some microseconds
constexpr int kCpu = 0, kGpu = 1;      // torch calls ROCm's devices CUDA, too
std::unordered_map<std::string_view, const KernelRow*> rows[2];
const Backend* host = nullptr;
void (*cpu_services)(Exec*) = nullptr;
constexpr const char* kNames[] = {
    "none",
#define ACTIVATION(code, name, cost, choice) #name,
#include "kernels/activations.def"
#undef ACTIVATION
};

// Device memory for a kernel comes from torch's allocator; it may be freed at once, since that is ordered by stream.
thread_local const Tensor* running = nullptr;
thread_local Tensor* scratch_memory[4] = {};

void* gpu_scratch(int slot, size_t bytes) {
  delete scratch_memory[slot];
  const int64_t size = static_cast<int64_t>(bytes ? bytes : 1);
  scratch_memory[slot] = new Tensor(torch::stable::new_empty(*running, {&size, 1}, ScalarType::Byte));
  return scratch_memory[slot]->data_ptr();
}

thread_local Team* team = nullptr;  // that this thread leads, and not in a task of it

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

const KernelRow* find(std::string_view kernel, const Tensor& t) {
  const int device = t.is_cpu() ? kCpu : kGpu;
  if ((device == kGpu && !t.is_cuda()) || t.scalar_type() != ScalarType::Float) return nullptr;
  const auto row = rows[device].find(kernel);
  return row == rows[device].end() ? nullptr : row->second;
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

View view_of(float* data, std::initializer_list<int64_t> shape) {
  View v;
  v.data = data;
  v.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), v.shape);
  for (int64_t i = v.rank - 1, n = 1; i >= 0; n *= v.shape[i--]) v.stride[i] = n;
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

void run_map(std::string_view kernel, const Tensor& t, const View& out, std::initializer_list<View> in,
             std::initializer_list<double> attributes) {
  run(find(kernel, t), t, {&out, in.begin(), attributes.begin(), 1, static_cast<int>(in.size()), nullptr});
}

void run(const KernelRow* kernel, const Tensor& t, const Call& given) {
  Call call = given;
  if (t.is_cpu()) {
    Exec exec;
    cpu_services(&exec);
    exec.threads = threads();
    exec.parallel = share;
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

Room::Room(int64_t floats)
    : bytes_(static_cast<size_t>(floats) * sizeof(float)),
      data_(static_cast<float*>(host->alloc(bytes_))),
      next_(data_) {
  if (!data_) fail("memory", "there are no " + std::to_string(bytes_) + " bytes.");
}
Room::~Room() { host->free(data_, bytes_); }

void share(int64_t tasks, void (*body)(void*, int64_t), void* ctx) {
  Team* own = std::exchange(team, nullptr);
  if (own)
    own->run(tasks, body, ctx);
  else
    for (int64_t t = 0; t < tasks; t++) body(ctx, t);
  team = own;
}

int threads() { return team ? team->threads() : 1; }

void lead(const Tensor& t, double work, void (*body)(void*), void* ctx) {
  const int64_t threads = work < kWorthThreads || team || !t.is_cpu() ? 1 : torch::stable::get_num_threads();
  if (threads == 1) return body(ctx);
  Team all(static_cast<int>(threads));
  std::exception_ptr error;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin++) {
      if (begin > 0) {
        all.help(static_cast<int>(begin));
        continue;
      }
      team = &all;
      try {
        body(ctx);
      } catch (...) {
        error = std::current_exception();
      }
      team = nullptr;
      all.leave();
    }
  });
  if (error) std::rethrow_exception(error);
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
  const Backend* backend = table();
  if (!gpu) host = backend;
  for (int i = 0; i < backend->n_rows; i++) rows[gpu ? kGpu : kCpu][backend->rows[i].name] = &backend->rows[i];
  return nullptr;
}
