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

// A device that failed, or that the process is leaving, says so at its next use.
void device_free(void* p, size_t) {
  if (gpuFree(p) != gpuSuccess) (void)gpuGetLastError();
}

void device_copy(void* dst, const void* src, size_t bytes, void* stream) {
  if (bytes) check(gpuMemcpyAsync(dst, src, bytes, gpuMemcpyDefault, static_cast<gpuStream_t>(stream)), "copy");
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

constexpr Backend kBackend = {kVendor,     device_alloc,      device_free, device_copy,
                              device_sync, device_properties, kRows,       sizeof kRows / sizeof kRows[0]};

}  // namespace
}  // namespace needle::gpu

extern "C" __attribute__((visibility("default"))) const needle::Backend* needle_backend() {
  return &needle::gpu::kBackend;
}
