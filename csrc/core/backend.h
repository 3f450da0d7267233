// A device is five functions, its kernel rows, and graphs where it has them.
#pragma once
#include <cstring>

#include "core/call.h"

namespace needle {

struct DeviceProperties {
  char name[128];
  int32_t warp;  // 1 on CPU
  int32_t units;
  int64_t memory;  // bytes, 0 when unknown
};

// Launches recorded once and started as one.
struct Graphs {
  void* (*begin)();            // the stream whose launches are recorded and do not run; of the calling thread only
  void* (*end)(void* stream);  // the graph, or null when something of it cannot be recorded
  void (*launch)(void* graph, void* stream);
  void (*destroy)(void* graph);
};

struct Backend {
  const char* name;
  void* (*alloc)(size_t bytes);  // null when out of memory
  void (*free)(void* p, size_t bytes);
  // Either side may be host memory, which is free for other use when this returns.
  void (*copy)(void* dst, const void* src, size_t bytes, void* stream);
  void (*sync)(void* stream);
  bool (*properties)(DeviceProperties* out);  // false when there is no such device; `name` then says why
  const KernelRow* rows;
  int n_rows;
  const Graphs* graphs = nullptr;

  const KernelRow* find(const char* kernel) const {  // null when there is none
    for (int i = 0; i < n_rows; i++)
      if (std::strcmp(rows[i].name, kernel) == 0) return &rows[i];
    return nullptr;
  }
};

}  // namespace needle
