#include "cpu/backend.h"

#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/forks.h"
#include "cpu/table.h"

namespace needle {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

struct Isa {
  const char* name;
  const KernelRow* (*table)(int*);
};

// Whether this CPU has an ISA of its kind.
bool supports(const std::string& isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == "avx2") return avx2;
  if (isa == "avx512")
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
#endif
  return isa == "scalar" || isa == "neon";
}

// Those that this CPU has, the best first; of NEEDLE_ISA that one alone.
const std::vector<Isa>& isas() {
  static const std::vector<Isa> usable = [] {
#define NEEDLE_ISA_HERE(isa) {#isa, isa::table},
    const Isa all[] = {NEEDLE_ISAS(NEEDLE_ISA_HERE)};
#undef NEEDLE_ISA_HERE
    const char* set = std::getenv("NEEDLE_ISA");
    const std::string wanted = set ? set : "";
    std::vector<Isa> found;
    for (const Isa& i : all)
      if (supports(i.name) && (!set || wanted == i.name)) found.push_back(i);
    if (!found.empty()) return found;
    for (const char* known : {"neon", "avx2", "avx512"})
      if (wanted == known) throw std::runtime_error("[needle] NEEDLE_ISA=" + wanted + " is not supported by this CPU.");
    throw std::runtime_error("[needle] NEEDLE_ISA expects scalar, neon, avx2 or avx512, got " + wanted + ".");
  }();
  return usable;
}

// Freed blocks are kept for the next array of their size: fresh pages cost more than most kernels that fill them, and
// outputs of the same size do not make the process grow from run to run.
class BlockCache {
 public:
  void* alloc(size_t bytes) {
    size_t size = rounded(bytes);
    if (size >= kSmallest) {
      std::lock_guard<std::mutex> lock(mutex_);
      auto it = blocks_.find(size);
      if (it != blocks_.end()) {
        void* p = it->second;
        blocks_.erase(it);
        cached_ -= size;
        return p;
      }
    }
    bool huge = size >= 2 * kHugePage;
    void* p = nullptr;
    if (posix_memalign(&p, huge ? kHugePage : 64, size) != 0) return nullptr;
    if (huge) madvise(p, size, MADV_HUGEPAGE);
    return p;
  }

  void free(void* p, size_t bytes) {
    size_t size = rounded(bytes);
    if (size >= kSmallest) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (cached_ + size <= kLimit) {
        blocks_.emplace(size, p);
        cached_ += size;
        return;
      }
    }
    std::free(p);
  }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& block : blocks_) std::free(block.second);
    blocks_.clear();
    cached_ = 0;
  }

  static BlockCache& instance() {
    static BlockCache* cache = new BlockCache;  // never destroyed: arrays may outlive static destructors
    return *cache;
  }

 private:
  static constexpr size_t kSmallest = size_t{64} << 10, kLimit = size_t{256} << 20;  // bytes
  static size_t rounded(size_t bytes) {
    size_t unit = bytes >= kSmallest ? 4096 : 64;
    return bytes ? (bytes + unit - 1) / unit * unit : 64;
  }
  std::mutex& mutex_ = fork_lock(this);
  std::unordered_multimap<size_t, void*> blocks_;
  size_t cached_ = 0;
};

bool properties(DeviceProperties* out) {
  *out = {};
  std::strncpy(out->name, cpu_isa(), sizeof out->name - 1);
  out->warp = 1;
  out->units = static_cast<int32_t>(sysconf(_SC_NPROCESSORS_ONLN));
  out->memory = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  return true;
}

}  // namespace

const char* cpu_isa(int i) { return i < static_cast<int>(isas().size()) ? isas()[i].name : nullptr; }

const KernelRow* cpu_rows(const char* isa, int* n) {
  for (const Isa& one : isas())
    if (std::strcmp(one.name, isa) == 0) return one.table(n);
  return nullptr;
}

void release_unused_memory() {
  BlockCache::instance().clear();
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

const Backend* cpu_backend() {
  static const Backend backend = [] {
    int n = 0;
    const KernelRow* rows = isas()[0].table(&n);
    return Backend{"cpu",
                   [](size_t bytes) { return BlockCache::instance().alloc(bytes); },
                   [](void* p, size_t bytes) { BlockCache::instance().free(p, bytes); },
                   [](void* dst, const void* src, size_t bytes, void*) { std::memcpy(dst, src, bytes); },
                   [](void*) {},
                   properties,
                   rows,
                   n};
  }();
  return &backend;
}

}  // namespace needle
