// Products of groups of rows with a matrix each: the product of every group, one after the other.
#include <cstring>

#include "cpu/matmul.h"

namespace needle::NEEDLE_ISA {
namespace {

void multiply(const Exec* exec, const View& a, const View& b, const View& y) {
  if (y.size() == 0) return;
  if (a.shape[1] == 0) {
    std::memset(y.data, 0, y.size() * dtype_size(y.dtype));
    return;
  }
  const matmul_args::In in = {a, b, kAbsent};
  const matmul_args::Out out = {y};
  const matmul_args::Attr attr = {};
  matmul({in, out, attr, exec});
}

View part(View v, int axis, int64_t begin, int64_t end) {
  v.data = static_cast<char*>(v.data) + begin * v.stride[axis] * static_cast<int64_t>(dtype_size(v.dtype));
  v.shape[axis] = end - begin;
  return v;
}

View matrix(const View& v, int64_t index) {
  View m = part(v, 0, index, index + 1);
  m.rank = 2;
  for (int d = 0; d < 2; d++) m.shape[d] = v.shape[d + 1], m.stride[d] = v.stride[d + 1];
  return m;
}

View transposed(View v) {
  std::swap(v.shape[0], v.shape[1]);
  std::swap(v.stride[0], v.stride[1]);
  return v;
}

// f(group, first row, end) over all groups, the smallest end first. Gives where the last group ends.
template <class F>
int64_t for_groups(const View& ends, int64_t rows, const F& f) {
  int64_t begin = 0;
  with_type<grouped_matmul_args::In::ends_dtypes>(ends.dtype, [&](auto n) {
    const int64_t groups = ends.shape[0];
    for (int64_t group = 0; group < groups;) {
      int64_t passed = 0, next = rows;  // ends up to here, and the first behind
      for (int64_t g = 0; g < groups; g++) {
        const int64_t end = smaller(rows, ends.as<decltype(n)>()[g * ends.stride[0]]);
        if (end <= begin)
          passed++;
        else
          next = smaller(next, end);
      }
      for (; group < passed; group++) f(group, begin, begin);
      if (group < groups) f(group++, begin, next), begin = next;
    }
  });
  return begin;
}

}  // namespace

void grouped_matmul(const grouped_matmul_args& c) {
  const View& y = c.out.y;
  const int64_t rows = y.shape[0],
                done = for_groups(c.in.ends, rows, [&](int64_t g, int64_t begin, int64_t end) {
                  multiply(c.exec, part(c.in.a, 0, begin, end), matrix(c.in.b, g), part(y, 0, begin, end));
                });
  const View rest = part(y, 0, done, rows);
  if (rest.size()) std::memset(rest.data, 0, rest.size() * dtype_size(rest.dtype));
}

void grouped_outer(const grouped_outer_args& c) {
  for_groups(c.in.ends, c.in.a.shape[0], [&](int64_t g, int64_t begin, int64_t end) {
    multiply(c.exec, transposed(part(c.in.a, 0, begin, end)), part(c.in.b, 0, begin, end), matrix(c.out.y, g));
  });
}

}  // namespace needle::NEEDLE_ISA
