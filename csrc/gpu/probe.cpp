// needle_gpu_probe <library>: opens a GPU backend as needle does, prints its device or "no device", and runs its
// self-check.
#include <dlfcn.h>

#include <cstdio>

#include "core/backend.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: needle_gpu_probe <library>\n");
    return 2;
  }
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  auto get = reinterpret_cast<const needle::Backend* (*)()>(dlsym(library, "needle_backend"));
  auto self_check = reinterpret_cast<int (*)(char*, int)>(dlsym(library, "needle_self_check"));
  if (!get || !self_check) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  const needle::Backend* backend = get();
  needle::DeviceProperties properties = {};
  char message[512] = "";
  if (backend->properties(&properties)) {
    std::printf("%s: %s, wave %d, %d units\n", backend->name, properties.name, properties.warp, properties.units);
    int failed = self_check(message, sizeof message);
    std::printf("%s\n", failed ? message : "self-check passed");
    return failed;
  }
  bool clean = backend->alloc(16) == nullptr && self_check(message, sizeof message) == 1;
  std::printf("%s: no device (%d kernels, %s) %s\n", backend->name, backend->n_rows, clean ? "clean" : "not clean",
              message);
  return clean ? 0 : 1;
}
