#include "core/guard.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace needle {

namespace {

constexpr unsigned char kFill = 0xFF;  // four of them are a NaN, eight, too

bool is_zone(const char* p) {
  return std::all_of(p, p + kGuardBytes, [](char c) { return static_cast<unsigned char>(c) == kFill; });
}

}  // namespace

std::shared_ptr<Storage> Guard::copy(const Backend* backend, const void* data, size_t bytes) {
  auto whole = std::make_shared<Storage>(backend, bytes + 2 * kGuardBytes);
  char* first = static_cast<char*>(whole->data());
  std::memset(first, kFill, bytes + 2 * kGuardBytes);
  if (data) std::memcpy(first + kGuardBytes, data, bytes);
  return std::make_shared<Storage>(backend, first + kGuardBytes, bytes, [whole] {});
}

bool Guard::intact(const Storage& copy) {
  const char* data = static_cast<const char*>(copy.data());
  return is_zone(data - kGuardBytes) && is_zone(data + copy.bytes());
}

void Guard::before(int i, char* arena) const {
  for (const auto& b : buffers_)
    if (b.first == i) std::memset(arena + b.offset - kGuardBytes, kFill, b.bytes + 2 * kGuardBytes);
}

void Guard::after(int i, const char* arena, const std::string& kernel) const {
  for (const auto& b : buffers_)
    if (b.first <= i && i <= b.last &&
        !(is_zone(arena + b.offset - kGuardBytes) && is_zone(arena + b.offset + b.bytes)))
      throw std::runtime_error("[plan] step " + std::to_string(i) + " '" + kernel +
                               "' wrote outside of its operands, at a buffer of " + std::to_string(b.bytes) +
                               " bytes made in step " + std::to_string(b.first) + ".");
}

}  // namespace needle
