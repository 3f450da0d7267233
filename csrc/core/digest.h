// A number that tells whether memory changed, at the speed at which it can be read.
#pragma once
#include <cstdint>
#include <cstring>

namespace needle {

// Every step maps hash and word one to one, so that one changed word always shows; several escape with probability
// 2^-64. Four chains, since each waits for its multiplication.
inline uint64_t digest(const void* data, size_t bytes) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;  // 2^64 / golden ratio
  const char* p = static_cast<const char*>(data);
  auto step = [](uint64_t h, uint64_t word) {
    h ^= word;
    return (h << 29 | h >> 35) * kOdd;
  };
  auto word_at = [](const char* from, size_t n) {
    uint64_t word = 0;
    std::memcpy(&word, from, n);
    return word;
  };
  uint64_t h[4] = {bytes, 1, 2, 3};
  const char* end = p + bytes;
  for (; end - p >= 32; p += 32) {
    for (int i = 0; i < 4; i++) h[i] = step(h[i], word_at(p + 8 * i, 8));
  }
  for (; p < end; p += 8) h[0] = step(h[0], word_at(p, end - p < 8 ? end - p : 8));
  return step(step(step(h[0], h[1]), h[2]), h[3]);
}

}  // namespace needle
