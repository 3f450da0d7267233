#include "core/device.h"

#include <dlfcn.h>

#include <algorithm>
#include <utility>

#include "core/forks.h"
#include "core/pool.h"
#include "cpu/backend.h"

namespace needle {
namespace {

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

// Drivers are called without the lock, which a fork takes first: they have locks, and handlers of forks, of their own.
std::pair<void*, size_t> MemoryCache::take(size_t bytes, void* stream, const char* what) {
  size_t size;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    size = rounded(bytes);
    auto it = free_.find({stream, size});
    if (it != free_.end() && !it->second.empty()) {
      void* p = it->second.back();
      it->second.pop_back();
      statistics_.cached -= size, statistics_.reused++;
      count_used(size);
      return {p, size};
    }
  }
  void* p = backend_->alloc(size);
  if (!p) {
    release();
    p = backend_->alloc(size);
  }
  if (!p) {
    DeviceProperties properties = {};
    std::string total = backend_->properties(&properties) && properties.memory
                            ? " of " + megabytes(static_cast<size_t>(properties.memory))
                            : "";
    throw OutOfMemory("[" + std::string(backend_->name) + "] out of memory: " + what + " of " + megabytes(bytes) +
                      " does not fit beside " + megabytes(statistics().used) + " in use" + total + ".");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  statistics_.taken++;
  count_used(size);
  return {p, size};
}

void MemoryCache::count_used(size_t size) {
  statistics_.used += size;
  statistics_.peak = std::max(statistics_.peak, statistics_.used);
}

void MemoryCache::give(void* p, size_t size, void* stream) noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    statistics_.used -= size;
    if (limit_ - statistics_.cached >= size) {
      free_[{stream, size}].push_back(p);
      statistics_.cached += size;
      return;
    }
  }
  try {
    backend_->sync(stream);
  } catch (const std::exception&) {  // a device that failed says so at its next use; nobody hears a destructor
  }
  backend_->free(p, size);
}

MemoryCache::Blocks MemoryCache::without_blocks() {
  statistics_.cached = 0;
  return std::exchange(free_, {});
}

void MemoryCache::free_all(const Blocks& freed) {
  for (auto& [key, blocks] : freed) {
    if (!blocks.empty()) backend_->sync(key.first);
    for (void* p : blocks) backend_->free(p, key.second);
  }
}

void MemoryCache::release() {
  std::unique_lock<std::mutex> lock(mutex_);
  const Blocks freed = without_blocks();
  lock.unlock();
  free_all(freed);
}

void MemoryCache::limit(size_t bytes) {
  std::unique_lock<std::mutex> lock(mutex_);
  limit_ = bytes;
  const Blocks freed = without_blocks();
  lock.unlock();
  free_all(freed);
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

void refuse_number(const char* name, int64_t number, int64_t count) {
  throw std::out_of_range("[" + std::string(name) + "] index expects numbers from 0 to " + std::to_string(count - 1) +
                          ", got " + std::to_string(number) + ".");
}

Device* Device::cpu() {
  static auto* device = new Device(cpu_backend());
  return device;
}

Device* Device::open(const std::string& path) {
  std::mutex& opening = fork_lock(&opened());
  {
    std::lock_guard<std::mutex> lock(opening);
    auto it = opened().find(path);
    if (it != opened().end()) return it->second;
  }
  auto fail = [&](const std::string& why) {
    throw std::runtime_error("[device] " + path + " cannot be used: " + why + ".");
  };
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) fail(dlerror());
  auto get = reinterpret_cast<const Backend* (*)()>(dlsym(library, "needle_backend"));
  if (!get) fail("it has no function needle_backend");
  std::unique_ptr<Device> device(new Device(get()));
  std::lock_guard<std::mutex> lock(opening);
  auto [it, first] = opened().try_emplace(path, device.get());  // another thread may have been faster
  if (first) (void)device.release();
  return it->second;
}

Device* Device::of(const Backend* backend) {
  if (backend == cpu()->backend_) return cpu();
  std::lock_guard<std::mutex> lock(fork_lock(&opened()));
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
