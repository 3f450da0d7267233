// The runtime functions of the emulated device, by portable.cuh's neutral names; the last part of emulation.h.
#pragma once
#include "gpu/emulation.h"

inline gpuError_t gpuGetDeviceCount(int* n) {
  const char* devices = std::getenv("NEEDLE_EMULATION_DEVICES");
  *n = devices && *devices == '0' ? 0 : 1;
  return *n ? gpuSuccess : gpuErrorNoDevice;
}
inline gpuError_t gpuGetDevice(int* device) {
  int n;
  *device = 0;
  return gpuGetDeviceCount(&n);
}
inline gpuError_t gpuGetDeviceProperties(gpuDeviceProp* p, int) {
  std::strcpy(p->name, "host emulation");
  p->multiProcessorCount = 4;  // few, so that small tests reach the kernels meant for a full device, too
  p->totalGlobalMem = 0;
  return gpuSuccess;
}
inline gpuError_t gpuGetLastError() { return gpuSuccess; }
inline const char* gpuGetErrorString(gpuError_t e) {
  return e == gpuSuccess                 ? "no error"
         : e == gpuErrorNoDevice         ? "no device"
         : e == gpuErrorMemoryAllocation ? "out of memory"
                                         : "operation not permitted when stream is capturing";
}
// An array ends at an unreadable page (up to the 16-byte rounding); the page before its first holds the mapping's
// length.
inline gpuError_t gpuMalloc(void** p, size_t bytes) {
  using needle::emulation::kPage;
  int n;
  if (gpuGetDeviceCount(&n) != gpuSuccess) return gpuErrorNoDevice;
  if (bytes > SIZE_MAX / 2) return gpuErrorMemoryAllocation;
  if (needle::emulation::breaks_capture()) return gpuErrorStreamCaptureUnsupported;
  size_t data = (bytes + 15) / 16 * 16, pages = (data + kPage - 1) / kPage * kPage, total = kPage + pages + kPage;
  void* raw = mmap(nullptr, total + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return gpuErrorMemoryAllocation;
  char* base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + kPage - 1) / kPage * kPage);
  size_t header[2] = {reinterpret_cast<size_t>(raw), total + kPage};
  std::memcpy(base, header, sizeof header);
  std::memset(base + kPage, 0xff, pages);
  mprotect(base + kPage + pages, kPage, PROT_NONE);
  *p = base + kPage + pages - data;
  std::lock_guard<std::mutex> lock(needle::emulation::the_allocations->mutex);
  needle::emulation::the_allocations->bytes[static_cast<const char*>(*p)] = data;
  return gpuSuccess;
}
inline gpuError_t gpuFree(void* p) {
  using needle::emulation::kPage;
  if (!p) return gpuSuccess;
  if (needle::emulation::breaks_capture()) return gpuErrorStreamCaptureUnsupported;
  {
    std::lock_guard<std::mutex> lock(needle::emulation::the_allocations->mutex);
    needle::emulation::the_allocations->bytes.erase(static_cast<const char*>(p));
  }
  size_t header[2];
  std::memcpy(header, reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(p) / kPage * kPage - kPage), sizeof header);
  munmap(reinterpret_cast<void*>(header[0]), header[1]);
  return gpuSuccess;
}
inline gpuError_t gpuMemcpyAsync(void* dst, const void* src, size_t bytes, gpuMemcpyKind, gpuStream_t stream) {
  needle::emulation::submit(stream, [=] { std::memmove(dst, src, bytes); });
  return gpuSuccess;
}
inline gpuError_t gpuMallocHost(void** p, size_t bytes) {
  *p = std::malloc(bytes);
  return *p ? gpuSuccess : gpuErrorMemoryAllocation;
}
inline gpuError_t gpuEventCreateWithFlags(gpuEvent_t* e, unsigned) {
  *e = 0;
  return gpuSuccess;
}
inline gpuError_t gpuEventRecord(gpuEvent_t, gpuStream_t) { return gpuSuccess; }
inline gpuError_t gpuEventSynchronize(gpuEvent_t) { return gpuSuccess; }
inline gpuError_t gpuStreamSynchronize(gpuStream_t) {
  return needle::emulation::breaks_capture() ? gpuErrorStreamCaptureUnsupported : gpuSuccess;
}
inline gpuError_t gpuStreamCreateWithFlags(gpuStream_t* s, unsigned) {
  *s = new char;
  return gpuSuccess;
}
inline gpuError_t gpuStreamDestroy(gpuStream_t s) {
  delete static_cast<char*>(s);
  return gpuSuccess;
}
using gpuGraph_t = needle::emulation::Graph*;
using gpuGraphExec_t = needle::emulation::Graph*;
inline gpuError_t gpuStreamBeginCapture(gpuStream_t s, gpuStreamCaptureMode) {
  const char* graphs = std::getenv("NEEDLE_EMULATION_GRAPHS");
  if ((graphs && *graphs == '0') || !s || needle::emulation::breaks_capture()) return gpuErrorStreamCaptureUnsupported;
  needle::emulation::capture = {s, new needle::emulation::Graph};
  return gpuSuccess;
}
inline gpuError_t gpuStreamEndCapture(gpuStream_t s, gpuGraph_t* graph) {
  auto& capture = needle::emulation::capture;
  if (!s || s != capture.stream) return gpuErrorStreamCaptureUnsupported;
  *graph = capture.graph;
  capture = {};
  if (!(*graph)->broken) return gpuSuccess;
  delete *graph;
  *graph = nullptr;
  return gpuErrorStreamCaptureUnsupported;
}
inline gpuError_t gpuGraphInstantiateWithFlags(gpuGraphExec_t* made, gpuGraph_t graph, unsigned long long) {
  *made = new needle::emulation::Graph(*graph);
  return gpuSuccess;
}
inline gpuError_t gpuGraphLaunch(gpuGraphExec_t graph, gpuStream_t) {
  for (const auto& work : graph->work) work();
  return gpuSuccess;
}
inline gpuError_t gpuGraphExecDestroy(gpuGraphExec_t graph) {
  delete graph;
  return gpuSuccess;
}
inline gpuError_t gpuGraphDestroy(gpuGraph_t graph) {
  delete graph;
  return gpuSuccess;
}
