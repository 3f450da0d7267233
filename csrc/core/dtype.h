// Element types of arrays and their sizes.
#pragma once
#include <cstddef>
#include <cstdint>

namespace needle {

enum class DType : int32_t { f32, f64, i32, i64, b8 };

constexpr size_t dtype_size(DType d) {
  switch (d) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::b8:
      return 1;
  }
  return 0;
}

}  // namespace needle
