// Elements of two dimensions from any strides and dtype to any others.
#pragma once
#include "cpu/transpose.h"

namespace needle::NEEDLE_ISA {

constexpr int64_t kShortRow = 128;  // elements below which rows are not worth a call of their own

// Bytes; few of them in two pieces that may overlap, without a call.
NEEDLE_INLINE void copy_bytes(char* to, const char* from, size_t bytes) {
  const auto ends = [&](auto width) {
    __builtin_memcpy(to, from, width);
    __builtin_memcpy(to + bytes - width, from + bytes - width, width);
  };
  if (bytes > 64 || bytes < 4) return static_cast<void>(std::memcpy(to, from, bytes));
  if (bytes >= 32) return ends(std::integral_constant<size_t, 32>());
  if (bytes >= 16) return ends(std::integral_constant<size_t, 16>());
  if (bytes >= 8) return ends(std::integral_constant<size_t, 8>());
  ends(std::integral_constant<size_t, 4>());
}

// out[i * out_stride] = in[i * in_stride]: dense, mirrored and every other element by vectors.
template <class T, class S>
NEEDLE_INLINE void move_row(T* out, int64_t out_stride, const S* in, int64_t in_stride, int64_t n) {
  int64_t i = 0;
  if (out_stride == 1) {
    if (in_stride == 1) {
      if constexpr (std::is_same_v<T, S>)
        copy_bytes(reinterpret_cast<char*>(out), reinterpret_cast<const char*>(in), n * sizeof(T));
      else if constexpr (std::is_same_v<S, bool>)  // GCC has no vectors of bools
        for (const uint8_t* bytes = reinterpret_cast<const uint8_t*>(in); i < n; i++) out[i] = bytes[i] != 0 ? 1 : 0;
      else
        for (; i < n; i++) out[i] = static_cast<T>(in[i]);
      return;
    }
    if (in_stride == 0) {
      const T value = static_cast<T>(*in);
      for (; i < n; i++) out[i] = value;
      return;
    }
    if constexpr (std::is_same_v<T, S> && sizeof(T) == 4) {
      const float* from = reinterpret_cast<const float*>(in);
      float* to = reinterpret_cast<float*>(out);
      if (in_stride == -1)
        for (; i + 4 <= n; i += 4) {
          const F4 v = load4(from - i - 3);
          store4(to + i, __builtin_shufflevector(v, v, 3, 2, 1, 0));
        }
      if (in_stride == 2)
        for (; i + 4 < n; i += 4)  // the last element has no neighbour that may be read
          store4(to + i, __builtin_shufflevector(load4(from + 2 * i), load4(from + 2 * i + 4), 0, 2, 4, 6));
    }
  }
  convert(out + i * out_stride, out_stride, in + i * in_stride, in_stride, n - i);
}

// f(count), which is a constant of 1 to 4.
template <class F>
NEEDLE_INLINE void with_few(int64_t count, const F& f) {
  switch (count) {
    case 1:
      return f(std::integral_constant<int64_t, 1>());
    case 2:
      return f(std::integral_constant<int64_t, 2>());
    case 3:
      return f(std::integral_constant<int64_t, 3>());
    default:
      return f(std::integral_constant<int64_t, 4>());
  }
}

// Not inlined, as there is one for every two dtypes: to[r * to_down + i * to_across] = from[r * from_down + i *
// from_across] for r < rows, i < columns.
template <class T, class S>
__attribute__((noinline)) void move(T* to, int64_t to_down, int64_t to_across, const S* from, int64_t from_down,
                                    int64_t from_across, int64_t rows, int64_t columns) {
  if constexpr (std::is_same_v<T, S>) {
    if (rows > 1 && from_down == 1 && from_across > 1 && to_across == 1)
      return transpose(to, to_down, from, from_across, columns, rows);
    if (rows > 1 && to_down == 1 && to_across > 1 && from_across == 1)
      return transpose(to, to_across, from, from_down, rows, columns);
    if (columns <= 4)
      return with_few(columns, [&](auto n) {
        for (int64_t r = 0; r < rows; r++, to += to_down, from += from_down)
          for (int64_t i = 0; i < n; i++) to[i * to_across] = from[i * from_across];
      });
  }
  for (int64_t r = 0; r < rows; r++) move_row(to + r * to_down, to_across, from + r * from_down, from_across, columns);
}

}  // namespace needle::NEEDLE_ISA
