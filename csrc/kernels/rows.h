// What the kernels of kernels.def receive: operands and attributes by name, over the arrays of a call.
#pragma once
#include "core/call.h"

namespace needle {

#define NEEDLE_ALWAYS __attribute__((always_inline))  // else an ISA's code could be linked into another

using Real = double;
struct Int {
  double value;
  Int() = default;
  NEEDLE_ALWAYS constexpr Int(int64_t v) : value(static_cast<double>(v)) {}
  NEEDLE_ALWAYS operator int64_t() const { return static_cast<int64_t>(value); }
};

struct Optional : View {
  NEEDLE_ALWAYS explicit operator bool() const { return !absent(); }
};
constexpr Optional kAbsent = {{nullptr, {}, {}, -1, DType::f32}};

// What stands for the operands or attributes of a kernel without any: references to them are made all the same.
constexpr View kNoViews[1] = {};
constexpr double kNoAttributes[1] = {};
template <class T, class S>
NEEDLE_ALWAYS inline const T* seen_as(const S* given, const S* none) {
  return reinterpret_cast<const T*>(given ? given : none);
}

// conv2d_args has in.x, in.weight, in.bias, out.y and attr.stride_h, ...; In::x_dtypes are the letters of x.
template <class Row>
struct Args {
  using In = typename Row::In;
  using Out = typename Row::Out;
  using Attr = typename Row::Attr;
  const In& in;
  const Out& out;
  const Attr& attr;
  const Exec* exec;

  NEEDLE_ALWAYS static Args of(const Call& c) {
    return {*seen_as<In>(c.in, kNoViews), *seen_as<Out>(c.out, kNoViews), *seen_as<Attr>(c.attr, kNoAttributes),
            c.exec};
  }
};

// Of a row of GROUPS: in[i].grad, out[i].parameter, ...
template <class Row>
struct GroupArgs {
  using In = typename Row::In;
  using Out = typename Row::Out;
  using Attr = typename Row::Attr;
  const In* in;
  const Out* out;
  const Attr& attr;
  const Exec* exec;
  int groups;

  NEEDLE_ALWAYS static GroupArgs of(const Call& c) {
    return {seen_as<In>(c.in, kNoViews), seen_as<Out>(c.out, kNoViews), *seen_as<Attr>(c.attr, kNoAttributes), c.exec,
            static_cast<int>(c.n_in * sizeof(View) / sizeof(In))};
  }
};

#define NEEDLE_OPERAND(Type, name, ...) \
  Type name;                            \
  static constexpr char name##_dtypes[] = "" __VA_ARGS__;
#define IN(...) NEEDLE_OPERAND(View, __VA_ARGS__)
#define OPTIONAL(...) NEEDLE_OPERAND(Optional, __VA_ARGS__)
#define OUT IN
#define INT(name) Int name;
#define REAL(name) Real name;
#define MAP(name, inputs, attrs)
#define NEEDLE_ROW(name, inputs, outputs, ...) \
  struct name##_row {                          \
    struct In {                                \
      inputs                                   \
    };                                         \
    struct Out {                               \
      outputs                                  \
    };                                         \
    struct Attr {                              \
      __VA_ARGS__                              \
    };                                         \
  };
#define KERNEL(name, devices, ...) \
  NEEDLE_ROW(name, __VA_ARGS__)    \
  using name##_args = Args<name##_row>;
#define GROUPS(name, devices, ...) \
  NEEDLE_ROW(name, __VA_ARGS__)    \
  using name##_args = GroupArgs<name##_row>;
#include "kernels/kernels.def"
#undef NEEDLE_OPERAND
#undef IN
#undef OPTIONAL
#undef OUT
#undef INT
#undef REAL
#undef MAP
#undef KERNEL
#undef GROUPS
#undef NEEDLE_ROW

template <class Args, void (*kernel)(const Args&)>
void run_row(const Call& c) {
  kernel(Args::of(c));
}

constexpr bool has_letter(const char* letters, char letter) {
  for (; *letters; letters++)
    if (*letters == letter || *letters == '*') return true;
  return false;
}

// Calls f(T{}) with the element type of a dtype, one of those whose letters a row lists:
// with_type<sum_args::In::x_dtypes>.
template <const char* letters, class F>
NEEDLE_ALWAYS inline void with_type(DType dtype, const F& f) {
  switch (dtype) {
#define DTYPE(name, type, letter, text, code, bits)              \
  case DType::name:                                              \
    if constexpr (has_letter(letters, letter)) return f(type{}); \
    break;
#include "kernels/dtypes.def"
#undef DTYPE
  }
  refuse_dtype(dtype);
}

}  // namespace needle
