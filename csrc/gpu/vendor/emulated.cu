// The emulation's vendor: a library that a test builds and names in NEEDLE_EMULATION_VENDOR. It has
//   const char* test_vendor_prepare(const Problem*, size_t* workspace)     null, or why it cannot do this
//   int test_vendor_run(const Problem*, void* workspace, void* stream)     0, or an error code
#include <cstdlib>

#include "gpu/portable.cuh"
#include "gpu/vendor/load.h"
#include "gpu/vendor/table.h"

namespace needle::gpu::vendor {
namespace {

const char* (*can)(const Problem*, size_t*);
int (*does)(const Problem*, void*, void*);

bool open(std::string* text) {
  const char* path = std::getenv("NEEDLE_EMULATION_VENDOR");
  if (!path) {
    *text = "NEEDLE_EMULATION_VENDOR names no library";
    return false;
  }
  void* library = open_library({path}, text);
  if (!library || !find(library, "test_vendor_prepare", &can, text) || !find(library, "test_vendor_run", &does, text))
    return false;
  *text = place(can);
  return true;
}

std::vector<Way> prepare(const Problem& p, size_t, std::string* text) {
  size_t workspace = 0;
  if (const char* why = can(&p, &workspace)) {
    *text = why;
    return {};
  }
  return {{new char, workspace}};
}

int run(void*, const Problem& p, void* workspace, void* stream) {
  if (!emulation::capture.graph) {
    emulation::the_streams->finish(stream);
    return does(&p, workspace, stream);
  }
  emulation::submit(stream, [=] { (void)does(&p, workspace, stream); });
  return 0;
}

void forget(void* plan) { delete static_cast<char*>(plan); }

}  // namespace

const Library* test_products() {
  static const Library library = {"test_products", open, prepare, run, forget};
  return &library;
}
const Library* test_convolutions() {
  static const Library library = {"test_convolutions", open, prepare, run, forget};
  return &library;
}

}  // namespace needle::gpu::vendor
