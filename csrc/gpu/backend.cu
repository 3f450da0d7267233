// The device as needle sees it: five functions, graphs and the kernel rows, handed over by one C symbol.
#include <cstdio>
#include <cstring>
#include <mutex>

#include "core/backend.h"
#include "gpu/portable.cuh"
#include "kernels/rows.h"

namespace needle {

void refuse_dtype(DType dtype) {
  gpu::fail("kernel", "expects a dtype that it has code for", "number " + std::to_string(static_cast<int>(dtype)));
}

}  // namespace needle

namespace needle::gpu {

#define NEEDLE_ON_CPU(...)
#define NEEDLE_ON_GPU(...) __VA_ARGS__
#include "kernels/table.inc"

namespace {

void* device_alloc(size_t bytes) {
  void* p = nullptr;
  if (gpuMalloc(&p, bytes ? bytes : 1) == gpuSuccess) return p;
  (void)gpuGetLastError();
  return nullptr;
}

// A device that failed, or that the process is leaving, says so at its next use.
void device_free(void* p, size_t) {
  if (gpuFree(p) != gpuSuccess) (void)gpuGetLastError();
}

void copy_async(void* dst, const void* src, size_t bytes, gpuStream_t stream) {
  check(gpuMemcpyAsync(dst, src, bytes, gpuMemcpyDefault, stream), "copy");
}

// Two pinned pieces of host memory: while the device copies from or to one, the host fills or empties the other.
class Staging {
 public:
  static constexpr size_t kPiece = 4 << 20;

  // False where there is no pinned memory to be had.
  bool copy(char* dst, const char* src, size_t bytes, bool to_device, gpuStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ready_ && !prepare()) return false;
    const size_t pieces = (bytes + kPiece - 1) / kPiece;
    auto size = [&](size_t i) { return i + 1 < pieces ? kPiece : bytes - i * kPiece; };
    for (size_t i = 0; i < pieces + 1; i++) {
      if (i < pieces) {
        check(gpuEventSynchronize(done_[i % 2]), "copy");
        if (to_device) std::memcpy(piece_[i % 2], src + i * kPiece, size(i));
        copy_async(to_device ? dst + i * kPiece : piece_[i % 2], to_device ? piece_[i % 2] : src + i * kPiece, size(i),
                   stream);
        check(gpuEventRecord(done_[i % 2], stream), "copy");
      }
      if (to_device || i == 0) continue;
      check(gpuEventSynchronize(done_[(i - 1) % 2]), "copy");
      std::memcpy(dst + (i - 1) * kPiece, piece_[(i - 1) % 2], size(i - 1));
    }
    return true;
  }

 private:
  bool prepare() {
    for (int i = 0; i < 2; i++) {
      void* p = nullptr;
      if (gpuMallocHost(&p, kPiece) != gpuSuccess) {
        (void)gpuGetLastError();
        return false;
      }
      piece_[i] = static_cast<char*>(p);
      check(gpuEventCreateWithFlags(&done_[i], gpuEventDisableTiming), "copy");
    }
    return ready_ = true;
  }
  std::mutex mutex_;
  char* piece_[2] = {};
  gpuEvent_t done_[2] = {};
  bool ready_ = false;
};

void device_copy(void* dst, const void* src, size_t bytes, void* stream) {
  static auto* staging = new Staging;  // never destroyed: the driver may be gone by then
  gpuStream_t s = static_cast<gpuStream_t>(stream);
  if (!bytes) return;
  const bool to_device = is_device_memory(dst), inside = to_device && is_device_memory(src);
  if (!inside && staging->copy(static_cast<char*>(dst), static_cast<const char*>(src), bytes, to_device, s)) return;
  copy_async(dst, src, bytes, s);
  if (!inside) check(gpuStreamSynchronize(s), "copy");
}

void device_sync(void* stream) { check(gpuStreamSynchronize(static_cast<gpuStream_t>(stream)), "sync"); }

bool device_properties(DeviceProperties* out) {
  int n = 0, device = 0;
  DeviceProperty p;
  gpuError_t error = gpuGetDeviceCount(&n);
  if (error == gpuSuccess && n > 0) error = gpuGetDevice(&device);
  if (error == gpuSuccess && n > 0) error = gpuGetDeviceProperties(&p, device);
  if (error != gpuSuccess || n == 0) {  // too old a driver is such an error, too
    (void)gpuGetLastError();
    std::snprintf(out->name, sizeof out->name, "%s", error != gpuSuccess ? gpuGetErrorString(error) : "no device");
    return false;
  }
  std::snprintf(out->name, sizeof out->name, "%s", p.name);
  out->warp = WAVE;
  out->units = p.multiProcessorCount;
  out->memory = static_cast<int64_t>(p.totalGlobalMem);
  return true;
}

// The default stream cannot be captured; in a stream of its own nothing waits for other work, since nothing runs.
void* graph_begin() {
  gpuStream_t stream = nullptr;
  check(gpuStreamCreateWithFlags(&stream, gpuStreamNonBlocking), "graph");
  const gpuError_t error = gpuStreamBeginCapture(stream, gpuStreamCaptureModeThreadLocal);
  if (error == gpuSuccess) return stream;
  (void)gpuStreamDestroy(stream);
  check(error, "graph");
  return nullptr;
}

void* graph_end(void* captured) {
  gpuStream_t stream = static_cast<gpuStream_t>(captured);
  gpuGraph_t graph = nullptr;
  gpuGraphExec_t made = nullptr;
  if (gpuStreamEndCapture(stream, &graph) != gpuSuccess ||
      gpuGraphInstantiateWithFlags(&made, graph, 0) != gpuSuccess) {
    (void)gpuGetLastError();
    made = nullptr;
  }
  if (graph) (void)gpuGraphDestroy(graph);
  (void)gpuStreamDestroy(stream);
  return made;
}

void graph_launch(void* graph, void* stream) {
  check(gpuGraphLaunch(static_cast<gpuGraphExec_t>(graph), static_cast<gpuStream_t>(stream)), "graph");
}

void graph_destroy(void* graph) {
  if (gpuGraphExecDestroy(static_cast<gpuGraphExec_t>(graph)) != gpuSuccess) (void)gpuGetLastError();
}

constexpr Graphs kGraphs = {graph_begin, graph_end, graph_launch, graph_destroy};

constexpr Backend kBackend = {kVendor,     device_alloc,      device_free, device_copy,
                              device_sync, device_properties, kRows,       sizeof kRows / sizeof kRows[0],
                              &kGraphs};

}  // namespace
}  // namespace needle::gpu

extern "C" __attribute__((visibility("default"))) const needle::Backend* needle_backend() {
  return &needle::gpu::kBackend;
}
