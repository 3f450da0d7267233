#include "core/device.h"

#include <dlfcn.h>

#include <algorithm>

#include "core/pool.h"
#include "cpu/backend.h"

namespace needle {
namespace {

std::mutex opening;
std::map<std::string, Device*>& opened() {
  static auto* devices = new std::map<std::string, Device*>;  // never destroyed: arrays may outlive static destructors
  return *devices;
}

std::string megabytes(size_t bytes) { return std::to_string((bytes + 524288) >> 20) + " MiB"; }

// Of one thread, which runs one kernel at a time.
thread_local std::map<Device*, Scratch> eager_scratch;
thread_local Scratch* running = nullptr;

}  // namespace

// ---- memory --------------------------------------------------------------------------------------------------------

// Eight classes for each power of two waste at most an eighth.
size_t MemoryCache::rounded(size_t bytes) const {
  if (limit_ == 0) return bytes;
  size_t unit = 512;
  while (unit * 16 < bytes) unit *= 2;
  return std::max<size_t>(1, (bytes + unit - 1) / unit) * unit;
}

std::pair<void*, size_t> MemoryCache::take(size_t bytes, void* stream, const char* what) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t size = rounded(bytes);
  auto it = free_.find({stream, size});
  void* p = nullptr;
  if (it != free_.end() && !it->second.empty()) {
    p = it->second.back();
    it->second.pop_back();
    statistics_.cached -= size, statistics_.reused++;
  } else {
    p = backend_->alloc(size);
    if (!p) {
      release_locked();
      p = backend_->alloc(size);
    }
    if (!p) {
      DeviceProperties properties = {};
      std::string total = backend_->properties(&properties) && properties.memory
                              ? " of " + megabytes(static_cast<size_t>(properties.memory))
                              : "";
      throw OutOfMemory("[" + std::string(backend_->name) + "] out of memory: " + what + " of " + megabytes(bytes) +
                        " does not fit beside " + megabytes(statistics_.used) + " in use" + total + ".");
    }
    statistics_.taken++;
  }
  statistics_.used += size;
  statistics_.peak = std::max(statistics_.peak, statistics_.used);
  return {p, size};
}

void MemoryCache::give(void* p, size_t size, void* stream) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  statistics_.used -= size;
  if (limit_ - statistics_.cached >= size) {
    free_[{stream, size}].push_back(p);
    statistics_.cached += size;
    return;
  }
  try {
    backend_->sync(stream);
  } catch (const std::exception&) {  // a device that failed says so at its next use; nobody hears a destructor
  }
  backend_->free(p, size);
}

void MemoryCache::release_locked() {
  for (auto& [key, blocks] : free_) {
    if (!blocks.empty()) backend_->sync(key.first);
    for (void* p : blocks) backend_->free(p, key.second);
  }
  free_.clear();
  statistics_.cached = 0;
}

void MemoryCache::release() {
  std::lock_guard<std::mutex> lock(mutex_);
  release_locked();
}

void MemoryCache::limit(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  release_locked();
  limit_ = bytes;
}

MemoryStatistics MemoryCache::statistics() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return statistics_;
}

// ---- devices -------------------------------------------------------------------------------------------------------

void refuse_dtype(DType dtype) {
  constexpr const char* names[] = {
#define DTYPE(name, type, letter, text, code, bits) text,
#include "kernels/dtypes.def"
#undef DTYPE
  };
  throw std::invalid_argument("[needle] a kernel has no code for dtype " + std::string(names[static_cast<int>(dtype)]) +
                              ".");
}

Device* Device::cpu() {
  static auto* device = new Device(cpu_backend());
  return device;
}

Device* Device::open(const std::string& path) {
  std::lock_guard<std::mutex> lock(opening);
  Device*& device = opened()[path];
  if (device) return device;
  auto fail = [&](const std::string& why) {
    opened().erase(path);
    throw std::runtime_error("[device] " + path + " cannot be used: " + why + ".");
  };
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) fail(dlerror());
  auto get = reinterpret_cast<const Backend* (*)()>(dlsym(library, "needle_backend"));
  if (!get) fail("it has no function needle_backend");
  device = new Device(get());
  return device;
}

Device* Device::of(const Backend* backend) {
  if (backend == cpu()->backend_) return cpu();
  std::lock_guard<std::mutex> lock(opening);
  for (auto& [path, device] : opened())
    if (device->backend_ == backend) return device;
  throw std::runtime_error("[device] there is no open device named " + std::string(backend->name) + ".");
}

bool Device::present(DeviceProperties* properties, std::string* why) const {
  *properties = {};
  if (backend_->properties(properties)) return true;
  *why = properties->name;
  return false;
}

std::shared_ptr<Storage> Device::allocate(size_t bytes, const char* what) {
  if (is_cpu()) return std::make_shared<Storage>(backend_, bytes);
  void* stream = stream_;
  auto [p, size] = cache_.take(bytes, stream, what);
  return std::make_shared<Storage>(backend_, p, bytes,
                                   [this, p = p, size = size, stream] { cache_.give(p, size, stream); });
}

void* Scratch::take(int slot, size_t bytes) {
  auto& memory = slot_[slot];
  if (!memory || memory->bytes() < bytes) {
    memory.reset();
    memory = device_->allocate(bytes, "a kernel's workspace");
  }
  return memory->data();
}

Exec Device::exec(Scratch* scratch, void* stream) {
  running = scratch;
  return {1, nullptr, [](int slot, size_t bytes) { return running->take(slot, bytes); }, stream};
}

void Device::run(const KernelRow& row, const View* out, int n_out, const View* in, int n_in, const double* attr) {
  if (is_cpu()) {
    Exec exec = cpu_exec();
    row.run({out, in, attr, n_out, n_in, &exec});
    return;
  }
  Exec exec = Device::exec(&eager_scratch.try_emplace(this, this).first->second, stream_);
  row.run({out, in, attr, n_out, n_in, &exec});
}

void Device::copy(void* dst, const void* src, size_t bytes) {
  backend_->copy(dst, src, bytes, stream_);
  backend_->sync(stream_);
}

void Device::set_stream(void* stream) {
  if (stream == stream_) return;
  sync();
  eager_scratch.erase(this);
  stream_ = stream;
}

}  // namespace needle
