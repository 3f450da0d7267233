// What a row's operands may be, by its texts (core/call.h), and views of numbers that may be any.
#pragma once
#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/call.h"

namespace needle {

struct NoKernel : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct WrongDType : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct DTypeInfo {
  const char* name;
  char letter;
};
constexpr DTypeInfo kDTypes[] = {
#define DTYPE(name, type, letter, text, code, bits) {text, letter},
#include "kernels/dtypes.def"
#undef DTYPE
};
constexpr unsigned kAnyDType = (1u << std::size(kDTypes)) - 1;

inline const DTypeInfo& info(DType d) { return kDTypes[static_cast<int>(d)]; }

// The names of dtypes as an English list; `bits`: one for each dtype.
inline std::string names_of(unsigned bits) {
  std::string text;
  for (unsigned d = 0; bits >> d; d++)
    if (bits >> d & 1) text += (text.empty() ? "" : bits >> (d + 1) ? ", " : " or ") + std::string(kDTypes[d].name);
  return text;
}

inline DType parse_dtype(std::string_view name) {
  for (size_t i = 0; i < std::size(kDTypes); i++)
    if (name == kDTypes[i].name) return static_cast<DType>(i);
  throw WrongDType("[needle] dtype expects " + names_of(kAnyDType) + ", got " + std::string(name) + ".");
}

using Dims = std::vector<int64_t>;
constexpr int64_t kMostElements = int64_t{1} << 56;  // their bytes are counted in 64 bits

inline View make_view(const Dims& shape, const Dims* strides, DType dtype) {
  if (shape.size() > kMaxRank)
    throw std::invalid_argument("[needle] arrays have at most " + std::to_string(kMaxRank) + " dimensions, got " +
                                std::to_string(shape.size()) + ".");
  View v;
  v.rank = static_cast<int32_t>(shape.size());
  v.dtype = dtype;
  int64_t n = 1;
  for (int i = v.rank - 1; i >= 0; i--) {
    if (shape[i] < 0)
      throw std::invalid_argument("[needle] shape entries are not negative, got " + std::to_string(shape[i]) + ".");
    if (shape[i] && n > kMostElements / shape[i])
      throw std::invalid_argument("[needle] arrays have at most " + std::to_string(kMostElements) + " elements.");
    v.shape[i] = shape[i];
    v.stride[i] = strides ? (*strides)[i] : n;
    n *= shape[i];
  }
  return v;
}

// Whether a view whose first element is at byte `offset` lies within so many bytes.
inline bool lies_within(const View& v, int64_t offset, size_t bytes) {
  __extension__ typedef __int128 Wide;  // offsets and strides may be any numbers
  Wide low, high;
  v.span(&low, &high);
  const Wide size = static_cast<Wide>(dtype_size(v.dtype));
  return v.size() == 0 || (offset + low * size >= 0 && offset + (high + 1) * size <= static_cast<Wide>(bytes));
}

inline Dims shape_of(const View& v) { return Dims(v.shape, v.shape + v.rank); }

inline std::string describe(const View& v) {
  std::string s = std::string(info(v.dtype).name) + " (";
  for (int i = 0; i < v.rank; i++) s += (i ? ", " : "") + std::to_string(v.shape[i]);
  return s + (v.rank == 1 ? ",)" : ")");
}

// The words of a text, which spaces part. Streams would bring a megabyte of libstdc++ into libraries that hold it.
inline std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  for (size_t at = 0, end; (at = text.find_first_not_of(' ', at)) != text.npos; at = end) {
    end = std::min(text.find(' ', at), text.size());
    words.emplace_back(text.substr(at, end - at));
  }
  return words;
}

// An operand of a row, from its text `name:dtypes`.
struct Operand {
  std::string text;  // its name
  bool optional;
  unsigned dtypes;  // a bit for each, or 0 for the dtype of the first operand

  static std::vector<Operand> list(const char* text) {
    std::vector<Operand> all;
    for (const std::string& word : words_of(text)) {
      const size_t colon = word.find(':');
      const bool optional = word[colon - 1] == '?';
      unsigned bits = 0;
      for (char letter : word.substr(colon + 1)) bits |= letter == '*' ? kAnyDType : bit_of(letter);
      all.push_back({word.substr(0, colon - optional), optional, bits});
    }
    return all;
  }

  static unsigned bit_of(char letter) {
    for (size_t d = 0; d < std::size(kDTypes); d++)
      if (kDTypes[d].letter == letter) return 1u << d;
    throw std::logic_error("[needle] kernels.def has a letter that no dtype has, " + std::string(1, letter) + ".");
  }
};

// What calls of a row are checked against.
struct RowOperands {
  explicit RowOperands(const KernelRow* row)
      : row(row),
        inputs(Operand::list(row->inputs)),
        outputs(Operand::list(row->outputs)),
        attrs(words_of(row->attrs)) {}

  template <class Error = std::invalid_argument>
  [[noreturn]] void fail(const std::string& text) const {
    throw Error("[" + std::string(row->name) + "] " + text);
  }

  void check_counts(size_t n_out, const View* in, size_t n_in, size_t n_attr) const {
    const size_t groups = row->groups ? n_out / outputs.size() : 1;
    if (n_out != groups * outputs.size() || n_in != groups * inputs.size())
      fail("expects " + std::to_string(outputs.size()) + " outputs for " + std::to_string(inputs.size()) +
           " inputs, got " + std::to_string(n_out) + " for " + std::to_string(n_in) + ".");
    for (size_t k = 0; k < n_in; k++)
      if (in[k].absent() && !inputs[k % inputs.size()].optional) fail(inputs[k % inputs.size()].text + " is missing.");
    if (n_attr != attrs.size())
      fail("expects " + std::to_string(attrs.size()) + " attributes, got " + std::to_string(n_attr) + ".");
  }

  // Outputs and inputs as the row asks for, those of further groups of the first one's dtype.
  void check_dtypes(const View* out, size_t n_out, const View* in, size_t n_in) const {
    if (n_in + n_out == 0) return;
    const DType first = n_in ? in->dtype : out->dtype;
    auto check = [&](const View* views, size_t n, const std::vector<Operand>& operands) {
      for (size_t k = 0; k < n; k++) {
        const Operand& operand = operands[k % operands.size()];
        const unsigned dtypes = k < operands.size() ? operand.dtypes : 0;
        const DType got = views[k].dtype;
        if (views[k].absent() || (dtypes ? dtypes >> static_cast<int>(got) & 1 : got == first)) continue;
        if (!dtypes)
          fail<WrongDType>("expects operands of one dtype, got " + std::string(info(first).name) + " and " +
                           info(got).name + ".");
        if (k == 0 && (n_in == 0 || views == in))
          fail<NoKernel>("has no kernel for dtype " + std::string(info(got).name) + ".");
        fail<WrongDType>(operand.text + " expects " + names_of(dtypes) + ", got " + info(got).name + ".");
      }
    };
    check(in, n_in, inputs);
    check(out, n_out, outputs);
  }

  const KernelRow* row;
  std::vector<Operand> inputs, outputs;
  std::vector<std::string> attrs;
};

}  // namespace needle
