// Views and arrays from Python's arguments, and calls of kernels: everything is checked before a kernel sees it.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string_view>

#include "core/device.h"
#include "python/dlpack.h"

namespace needle::python {

namespace py = pybind11;

struct DTypeInfo {
  const char* name;
  char letter;
  DLDataType dl;
};
constexpr DTypeInfo kDTypes[] = {{"float32", 'f', {2, 32, 1}},
                                 {"float64", 'd', {2, 64, 1}},
                                 {"int32", 'i', {0, 32, 1}},
                                 {"int64", 'l', {0, 64, 1}},
                                 {"bool", 'b', {6, 8, 1}}};

inline const DTypeInfo& info(DType d) { return kDTypes[static_cast<int>(d)]; }

inline DType parse_dtype(std::string_view name) {
  for (int i = 0; i < 5; i++)
    if (name == kDTypes[i].name) return static_cast<DType>(i);
  throw py::type_error("[needle] dtype expects float32, float64, int32, int64 or bool, got " + std::string(name) + ".");
}

using Dims = std::vector<int64_t>;

inline View make_view(const Dims& shape, const Dims* strides, DType dtype) {
  if (shape.size() > kMaxRank)
    throw py::value_error("[needle] arrays have at most " + std::to_string(kMaxRank) + " dimensions, got " +
                          std::to_string(shape.size()) + ".");
  View v;
  v.rank = static_cast<int32_t>(shape.size());
  v.dtype = dtype;
  int64_t n = 1;
  for (int i = v.rank - 1; i >= 0; i--) {
    if (shape[i] < 0)
      throw py::value_error("[needle] shape entries are not negative, got " + std::to_string(shape[i]) + ".");
    v.shape[i] = shape[i];
    v.stride[i] = strides ? (*strides)[i] : n;
    n *= shape[i];
  }
  return v;
}

inline Array make_array(std::shared_ptr<Storage> storage, const Dims& shape, const Dims& strides, int64_t offset,
                        DType dtype) {
  if (shape.size() != strides.size()) throw py::value_error("[needle] shape and strides have different lengths.");
  View v = make_view(shape, &strides, dtype);
  int64_t low = offset, high = offset;
  for (int i = 0; i < v.rank; i++) {
    if (v.shape[i] == 0) low = high = 0;
    if (v.size()) (v.stride[i] < 0 ? low : high) += (v.shape[i] - 1) * v.stride[i];
  }
  int64_t size = static_cast<int64_t>(dtype_size(dtype));
  if (v.size() && (low < 0 || (high + 1) * size > static_cast<int64_t>(storage->bytes())))
    throw py::value_error("[needle] a view reaches outside its storage of " + std::to_string(storage->bytes()) +
                          " bytes.");
  v.data = static_cast<char*>(storage->data()) + offset * size;
  return {std::move(storage), v};
}

inline Array empty(Device* device, const Dims& shape, DType dtype) {
  View v = make_view(shape, nullptr, dtype);
  auto storage = device->allocate(v.size() * dtype_size(dtype));
  v.data = storage->data();
  return {std::move(storage), v};
}

struct BoundKernel {  // a row of a device's table
  const KernelRow* row;
  Device* device;
};

struct NoKernel : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void check_call(const KernelRow& row, size_t n_out, size_t n_in, size_t n_attr, const View* first) {
  const std::string_view attrs = row.attrs;
  const size_t names = attrs.empty() ? 0 : 1 + std::count(attrs.begin(), attrs.end(), ' ');
  auto fail = [&](const std::string& text) { throw py::value_error("[" + std::string(row.name) + "] " + text); };
  if (row.max_in == kAnyGroups) {
    if (n_out % row.n_out || n_out / row.n_out * row.min_in != n_in)
      fail("expects " + std::to_string(row.n_out) + " outputs for " + std::to_string(row.min_in) + " inputs, got " +
           std::to_string(n_out) + " for " + std::to_string(n_in) + ".");
  } else if (static_cast<int>(n_out) != row.n_out)
    fail("expects " + std::to_string(row.n_out) + " outputs, got " + std::to_string(n_out) + ".");
  else if (static_cast<int>(n_in) < row.min_in || static_cast<int>(n_in) > row.max_in)
    fail("expects " + std::to_string(row.min_in) + " to " + std::to_string(row.max_in) + " inputs, got " +
         std::to_string(n_in) + ".");
  if (names != n_attr)
    fail("expects attributes '" + std::string(attrs) + "', got " + std::to_string(n_attr) + " values.");
  if (first && !std::strchr(row.dtypes, info(first->dtype).letter))
    throw NoKernel("[" + std::string(row.name) + "] has no kernel for dtype " + info(first->dtype).name + ".");
}

inline void check_place(const BoundKernel& kernel, const Array& a) {
  const Backend *want = kernel.device->backend(), *got = a.storage->backend();
  if (got != want)
    throw py::value_error("[" + std::string(kernel.row->name) + "] operands are on different devices: " + want->name +
                          " and " + got->name + ".");
}

// Element-wise kernels and copy convert their operands as they read them; all others take floats of one type only.
inline bool converts(const KernelRow& row) {
#define UNARY(name, dtypes, attrs, expr) #name,
#define BINARY UNARY
#define TERNARY UNARY
  static const std::set<std::string_view> names = {
#include "math/maps.inc"
      "copy"};
#undef UNARY
#undef BINARY
#undef TERNARY
  return names.count(row.name) > 0;
}

inline void check_one_float(const KernelRow& row, const View* views, size_t n) {
  auto floating = [](const View& v) { return v.dtype == DType::f32 || v.dtype == DType::f64; };
  const View* first = nullptr;
  for (size_t i = 0; i < n; i++) {
    if (!floating(views[i])) continue;
    if (!first) first = &views[i];
    if (views[i].dtype != first->dtype && !converts(row))
      throw py::type_error("[" + std::string(row.name) + "] expects operands of one dtype, got " +
                           info(first->dtype).name + " and " + info(views[i].dtype).name + ".");
  }
}

// The items of a list or tuple, read in place: pybind11's vectors cost more than a small kernel.
struct Items {
  explicit Items(py::handle h, size_t most)
      : fast(py::reinterpret_steal<py::object>(PySequence_Fast(h.ptr(), "[needle] expects a list or tuple."))) {
    if (!fast) throw py::error_already_set();
    size = static_cast<size_t>(PySequence_Fast_GET_SIZE(fast.ptr()));
    if (size > most) throw py::value_error("[needle] expects at most " + std::to_string(most) + " operands.");
  }
  py::handle operator[](size_t i) const { return PySequence_Fast_GET_ITEM(fast.ptr(), i); }

  py::object fast;
  size_t size;
};

inline Dims dims_of(py::handle shape) {
  Items sizes(shape, SIZE_MAX);
  Dims dims(sizes.size);
  for (size_t i = 0; i < dims.size(); i++) dims[i] = sizes[i].cast<int64_t>();
  return dims;
}

constexpr size_t kMost = 16;  // outputs, inputs, and half as many attributes of a call

inline void run_row(const BoundKernel& kernel, const View* out, size_t n_out, const View* in, size_t n_in,
                    py::handle attrs) {
  Items a(attrs, 2 * kMost);
  double attr[2 * kMost];
  for (size_t k = 0; k < a.size; k++) {
    attr[k] = PyFloat_AsDouble(a[k].ptr());
    if (attr[k] == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  }
  check_call(*kernel.row, n_out, n_in, a.size, n_in ? in : nullptr);
  py::gil_scoped_release release;
  kernel.device->run(*kernel.row, out, static_cast<int>(n_out), in, static_cast<int>(n_in), attr);
}

inline View operand(const BoundKernel& kernel, py::handle array) {
  const Array& a = array.cast<Array&>();
  check_place(kernel, a);
  return a.view;
}

inline void call_row(const BoundKernel& kernel, py::handle outs, py::handle ins, py::handle attrs) {
  const KernelRow& row = *kernel.row;
  const size_t most = row.max_in == kAnyGroups ? SIZE_MAX : kMost;
  Items o(outs, most), i(ins, most);
  View few[2 * kMost];
  std::vector<View> many(o.size + i.size > 2 * kMost ? o.size + i.size : 0);
  View* view = many.empty() ? few : many.data();  // outputs, then inputs
  for (size_t k = 0; k < o.size; k++) view[k] = operand(kernel, o[k]);
  for (size_t k = 0; k < i.size; k++) view[o.size + k] = operand(kernel, i[k]);
  check_one_float(row, view, o.size + i.size);
  for (size_t k = 0; k < o.size; k++) o[k].cast<Array&>().storage->lend();
  run_row(kernel, view, o.size, view + o.size, i.size, attrs);
  for (size_t k = 0; k < o.size; k++) o[k].cast<Array&>().storage->wrote();
}

// An element-wise row over inputs broadcast together, as numpy does, into a new array.
inline Array map_row(const BoundKernel& kernel, py::handle ins, std::string_view dtype, py::handle attrs) {
  const KernelRow& row = *kernel.row;
  if (!converts(row)) throw py::value_error("[" + std::string(row.name) + "] is no element-wise kernel.");
  Items items(ins, kMost);
  View in[kMost];
  Dims shape;
  for (size_t k = 0; k < items.size; k++) {
    in[k] = operand(kernel, items[k]);
    if (in[k].rank > static_cast<int>(shape.size())) shape.insert(shape.begin(), in[k].rank - shape.size(), 1);
    for (int d = 1; d <= in[k].rank; d++) {
      int64_t& size = shape[shape.size() - d];
      const int64_t n = in[k].shape[in[k].rank - d];
      if (n != size && n != 1 && size != 1) {
        std::string shapes;
        for (size_t j = 0; j < items.size; j++) {
          if (j) shapes.append(", ");
          shapes.append(py::repr(items[j].attr("shape")).cast<std::string>());
        }
        throw py::value_error("[" + std::string(row.name) + "] shapes " + shapes + " do not broadcast together.");
      }
      if (size == 1) size = n;
    }
  }
  Array out = empty(kernel.device, shape, parse_dtype(dtype));
  for (size_t k = 0; k < items.size; k++) {
    View v = out.view;
    for (int d = 1; d <= v.rank; d++) {
      const int from = in[k].rank - d;
      v.stride[v.rank - d] = from < 0 || in[k].shape[from] != v.shape[v.rank - d] ? 0 : in[k].stride[from];
    }
    v.data = in[k].data, v.dtype = in[k].dtype;
    in[k] = v;
  }
  run_row(kernel, &out.view, 1, in, items.size, attrs);
  return out;
}

// A row over inputs into a new array of shape `to`, given back as one of shape `shape` with as many elements.
inline Array new_row(const BoundKernel& kernel, py::handle ins, std::string_view dtype, py::handle attrs, py::handle to,
                     py::handle shape) {
  const KernelRow& row = *kernel.row;
  Items items(ins, kMost);
  View view[1 + kMost];  // the output, then inputs
  Array out = empty(kernel.device, dims_of(to), parse_dtype(dtype));
  view[0] = out.view;
  for (size_t k = 0; k < items.size; k++) view[1 + k] = operand(kernel, items[k]);
  check_one_float(row, view, 1 + items.size);
  run_row(kernel, view, 1, view + 1, items.size, attrs);
  if (shape.is(to)) return out;
  View shown = make_view(dims_of(shape), nullptr, out.view.dtype);
  if (shown.size() != out.view.size())
    throw py::value_error("[" + std::string(row.name) + "] expects a result of " + std::to_string(out.view.size()) +
                          " elements, got a shape of " + std::to_string(shown.size()) + ".");
  shown.data = out.view.data;
  return {std::move(out.storage), shown};
}

}  // namespace needle::python
