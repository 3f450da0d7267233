// Element types of arrays and their sizes, from kernels/dtypes.def.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace needle {

enum class DType : int32_t {
#define DTYPE(name, type, letter, text, code, bits) name,
#include "kernels/dtypes.def"
#undef DTYPE
};

constexpr size_t dtype_size(DType d) {
  switch (d) {
#define DTYPE(name, type, letter, text, code, bits) \
  case DType::name:                                 \
    return sizeof(type);
#include "kernels/dtypes.def"
#undef DTYPE
  }
  return 0;
}

template <class T>
struct DTypeOf;  // of C++ types that are elements
#define DTYPE(name, type, letter, text, code, bits)                                \
  template <>                                                                      \
  struct DTypeOf<type> {                                                           \
    static constexpr DType value = DType::name;                                    \
  };                                                                               \
  static_assert(sizeof(type) == (bits + 7) / 8, text " has another size");         \
  static_assert(std::is_arithmetic_v<type> || !std::is_convertible_v<float, type>, \
                text " needs explicit constructors, else sums are kept in it");    \
  static_assert(std::is_integral_v<type> == (code == 0 || code == 6), text " would be converted as another");
#include "kernels/dtypes.def"
#undef DTYPE
template <class T>
constexpr DType dtype_of = DTypeOf<T>::value;

// The unsigned integer of a size, for elements that are moved as they are.
template <size_t bytes>
using BitsOf =
    std::conditional_t<bytes == 1, uint8_t,
                       std::conditional_t<bytes == 2, uint16_t, std::conditional_t<bytes == 4, uint32_t, uint64_t>>>;

// Whether T, where it is an element type, is that of a dtype; bytes and bits may be any.
template <class T>
__attribute__((always_inline)) constexpr bool may_hold(DType dtype) {
#define DTYPE(name, type, letter, text, code, bits) \
  if (std::is_same_v<T, type>) return dtype == DType::name;
#include "kernels/dtypes.def"
#undef DTYPE
  return true;
}

// Ends the call of a kernel that has no code for a dtype, though its row may list it. Each library has its own.
[[noreturn]] void refuse_dtype(DType dtype);

}  // namespace needle
