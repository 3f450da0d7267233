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
         : e == gpuErrorInvalidValue     ? "invalid argument"
                                         : "operation not permitted when stream is capturing";
}
// An array ends at an unreadable page (up to the 16-byte rounding) or, by chance, begins after one.
inline gpuError_t gpuMalloc(void** p, size_t bytes) {
  using namespace needle::emulation;
  int n;
  if (gpuGetDeviceCount(&n) != gpuSuccess) return gpuErrorNoDevice;
  if (bytes > SIZE_MAX / 2) return gpuErrorMemoryAllocation;
  if (breaks_capture()) return gpuErrorStreamCaptureUnsupported;
  const size_t data = (bytes + 15) / 16 * 16, pages = (data + kPage - 1) / kPage * kPage, length = pages + 3 * kPage;
  void* raw = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return gpuErrorMemoryAllocation;
  char* first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + 2 * kPage - 1) / kPage * kPage);
  if (pages && mprotect(first, pages, PROT_READ | PROT_WRITE) != 0) {
    munmap(raw, length);
    return gpuErrorMemoryAllocation;
  }
  std::memset(first, 0xff, pages);
  std::lock_guard<std::mutex> lock(the_allocations->mutex);
  Chance& chance = the_allocations->chance;
  if (!chance.on() || chance.below(2) == 0) first += pages - data;
  the_allocations->live[first] = {data, raw, length};
  *p = first;
  return gpuSuccess;
}
// Waits for all work, as on hardware.
inline gpuError_t gpuFree(void* p) {
  using namespace needle::emulation;
  if (!p) return gpuSuccess;
  if (breaks_capture()) return gpuErrorStreamCaptureUnsupported;
  the_streams->finish_quietly();
  std::lock_guard<std::mutex> lock(the_allocations->mutex);
  auto& live = the_allocations->live;
  auto& freed = the_allocations->freed;
  auto it = live.find(static_cast<const char*>(p));
  if (it == live.end()) return gpuErrorInvalidValue;
  // New pages in the old place give the memory back and keep the addresses.
  (void)mmap(it->second.base, it->second.length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
             0);
  freed.push_back(it->second);
  live.erase(it);
  if (freed.size() <= kFreedKept) return gpuSuccess;
  munmap(freed.front().base, freed.front().length);
  freed.pop_front();
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
  *e = new needle::emulation::Event;
  return gpuSuccess;
}
inline gpuError_t gpuEventRecord(gpuEvent_t e, gpuStream_t s) {
  *e = {s, needle::emulation::the_streams->submitted(s)};
  return gpuSuccess;
}
inline gpuError_t gpuEventSynchronize(gpuEvent_t e) {
  needle::emulation::the_streams->finish(e->stream, e->count);
  return gpuSuccess;
}
inline gpuError_t gpuStreamSynchronize(gpuStream_t s) {
  if (needle::emulation::breaks_capture()) return gpuErrorStreamCaptureUnsupported;
  needle::emulation::the_streams->finish(s);
  return gpuSuccess;
}
inline gpuError_t gpuStreamCreateWithFlags(gpuStream_t* s, unsigned) {
  *s = new char;
  return gpuSuccess;
}
inline gpuError_t gpuStreamDestroy(gpuStream_t s) {
  needle::emulation::the_streams->finish(s);
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
inline gpuError_t gpuGraphLaunch(gpuGraphExec_t graph, gpuStream_t stream) {
  for (const auto& work : graph->work) needle::emulation::the_streams->submit(stream, work);
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
