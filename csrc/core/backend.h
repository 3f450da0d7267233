// A device is five functions and its kernel rows.
#pragma once
#include "core/call.h"

namespace needle {

struct DeviceProperties {
  char name[128];
  int32_t warp;  // 1 on CPU
  int32_t units;
  int64_t memory;  // bytes, 0 when unknown
};

struct Backend {
  const char* name;
  void* (*alloc)(size_t bytes);  // null when out of memory
  void (*free)(void* p, size_t bytes);
  void (*copy)(void* dst, const void* src, size_t bytes, void* stream);  // either side may be host memory
  void (*sync)(void* stream);
  bool (*properties)(DeviceProperties* out);  // false when there is no such device; `name` then says why
  const KernelRow* rows;
  int n_rows;
};

}  // namespace needle
