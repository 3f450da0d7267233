// Reference-counted device memory. Writes bump a version; writes to watched memory (parameters of executables) bump the
// epoch.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <utility>

#include "core/backend.h"

namespace needle {

inline std::atomic<uint64_t>& epoch() {
  static std::atomic<uint64_t> value{1};
  return value;
}

class Storage {
 public:
  Storage(const Backend* backend, size_t bytes) : backend_(backend), bytes_(bytes), data_(backend->alloc(bytes)) {
    if (!data_) throw std::bad_alloc();
  }
  // Memory of someone else; `release` is called when the last reference goes, `forget` by `trim`.
  Storage(const Backend* backend, void* data, size_t bytes, std::function<void()> release,
          std::function<void()> forget = {})
      : backend_(backend), bytes_(bytes), data_(data), release_(std::move(release)), forget_(std::move(forget)) {}
  ~Storage() { release_ ? release_() : backend_->free(data_, bytes_); }
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const Backend* backend() const { return backend_; }
  uint64_t version() const { return version_.load(std::memory_order_relaxed); }
  void watch() { watched_.store(true, std::memory_order_relaxed); }
  // Someone may write from now on, with or without saying so.
  void lend() { lent_.store(true, std::memory_order_relaxed); }
  // Gives back memory that can be read again from where it came, if nobody can have written to it.
  void trim() const {
    if (forget_ && !lent_.load(std::memory_order_relaxed)) forget_();
  }
  void wrote() {
    version_.fetch_add(1, std::memory_order_relaxed);
    if (watched_.load(std::memory_order_relaxed)) epoch().fetch_add(1, std::memory_order_relaxed);
  }

 private:
  const Backend* backend_;
  size_t bytes_;
  void* data_;
  std::function<void()> release_, forget_;
  std::atomic<uint64_t> version_{0};
  std::atomic<bool> watched_{false}, lent_{false};
};

// A view of storage, owning a reference to it.
struct Array {
  std::shared_ptr<Storage> storage;
  View view;
};

}  // namespace needle
