// Element types of arrays and their sizes, from kernels/dtypes.def.
#pragma once
#include <cstddef>
#include <cstdint>

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
#define DTYPE(name, type, letter, text, code, bits) \
  template <>                                       \
  struct DTypeOf<type> {                            \
    static constexpr DType value = DType::name;     \
  };
#include "kernels/dtypes.def"
#undef DTYPE
template <class T>
constexpr DType dtype_of = DTypeOf<T>::value;

}  // namespace needle
