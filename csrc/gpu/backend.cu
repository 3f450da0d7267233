// The device as needle sees it: five functions and the kernel rows, handed over by one C symbol.
#include <cstdio>

#include "core/backend.h"
#include "gpu/portable.cuh"

namespace needle::gpu {

#define ROW(name, min_in, max_in, n_out, dtypes, attrs) void name(const Call&);
#include "gpu/kernels.inc"
#undef ROW

namespace {

#define ROW(name, min_in, max_in, n_out, dtypes, attrs) {#name, min_in, max_in, n_out, dtypes, attrs, name},
constexpr KernelRow kRows[] = {
#include "gpu/kernels.inc"
};
#undef ROW

void* device_alloc(size_t bytes) {
  void* p = nullptr;
  if (gpuMalloc(&p, bytes ? bytes : 1) == gpuSuccess) return p;
  (void)gpuGetLastError();
  return nullptr;
}

void device_free(void* p, size_t) { check(gpuFree(p), "free"); }

void device_copy(void* dst, const void* src, size_t bytes, void* stream) {
  if (bytes) check(gpuMemcpyAsync(dst, src, bytes, gpuMemcpyDefault, static_cast<gpuStream_t>(stream)), "copy");
}

void device_sync(void* stream) { check(gpuStreamSynchronize(static_cast<gpuStream_t>(stream)), "sync"); }

bool device_properties(DeviceProperties* out) {
  int n = 0, device = 0;
  DeviceProperty p;
  if (gpuGetDeviceCount(&n) != gpuSuccess || n == 0 || gpuGetDevice(&device) != gpuSuccess ||
      gpuGetDeviceProperties(&p, device) != gpuSuccess) {
    (void)gpuGetLastError();
    return false;
  }
  std::snprintf(out->name, sizeof out->name, "%s", p.name);
  out->warp = WAVE;
  out->units = p.multiProcessorCount;
  out->memory = static_cast<int64_t>(p.totalGlobalMem);
  return true;
}

constexpr Backend kBackend = {kVendor,     device_alloc,      device_free, device_copy,
                              device_sync, device_properties, kRows,       sizeof kRows / sizeof kRows[0]};

}  // namespace
}  // namespace needle::gpu

extern "C" __attribute__((visibility("default"))) const needle::Backend* needle_backend() {
  return &needle::gpu::kBackend;
}
