// Views and arrays from Python's arguments, and calls of kernels: everything is checked before a kernel sees it.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <string_view>

#include "core/device.h"
#include "core/operands.h"
#include "kernels/rows.h"
#include "python/dlpack.h"

namespace needle::python {

namespace py = pybind11;

constexpr DLDataType kDLTypes[] = {
#define DTYPE(name, type, letter, text, code, bits) {code, bits, 1},
#include "kernels/dtypes.def"
#undef DTYPE
};

inline Array make_array(std::shared_ptr<Storage> storage, const Dims& shape, const Dims& strides, int64_t offset,
                        DType dtype) {
  if (shape.size() != strides.size()) throw py::value_error("[needle] shape and strides have different lengths.");
  View v = make_view(shape, &strides, dtype);
  int64_t size = static_cast<int64_t>(dtype_size(dtype)), first;
  if (v.size() && (__builtin_mul_overflow(offset, size, &first) || !lies_within(v, first, storage->bytes())))
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

inline Array empty_like(Device* device, const View& v) { return empty(device, shape_of(v), v.dtype); }

// Names as Python has them, interned: they are looked up in the dicts of keyword calls.
template <class Named, class Text>
std::vector<py::object> keys_of(const std::vector<Named>& all, const Text& text) {
  std::vector<py::object> keys;
  for (const Named& one : all)
    keys.push_back(py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text(one).c_str())));
  return keys;
}

struct BoundKernel : RowOperands {  // a row of a device's table
  BoundKernel(const KernelRow* row, Device* device)
      : RowOperands(row),
        device(device),
        input_keys(keys_of(inputs, [](const Operand& o) { return o.text; })),
        attr_keys(keys_of(attrs, [](const std::string& name) { return name; })) {}

  // on_input(value or null) and on_attr(value) for the values of a dict by name, in the row's order.
  template <class OnInput, class OnAttr>
  void walk(const py::dict& named, const OnInput& on_input, const OnAttr& on_attr) const {
    py::ssize_t found = 0;
    auto take = [&](const py::object& key) {
      py::handle value = PyDict_GetItemWithError(named.ptr(), key.ptr());
      found += value.ptr() != nullptr;
      return value;
    };
    for (size_t i = 0; i < inputs.size(); i++) {
      const py::handle value = take(input_keys[i]);
      const bool absent = !value || value.is_none();
      if (absent && !inputs[i].optional) fail(inputs[i].text + " is missing.");
      on_input(absent ? py::handle() : value);
    }
    for (size_t i = 0; i < attrs.size(); i++) {
      const py::handle value = take(attr_keys[i]);
      if (!value) fail("attribute " + attrs[i] + " is missing.");
      on_attr(value);
    }
    if (found == PyDict_GET_SIZE(named.ptr())) return;
    for (auto [key, value] : named) {
      const auto is = [key = key](const py::object& name) { return name.equal(key); };
      if (std::none_of(input_keys.begin(), input_keys.end(), is) &&
          std::none_of(attr_keys.begin(), attr_keys.end(), is))
        fail("takes no " + std::string(py::str(py::repr(key))) + ".");
    }
  }

  // Inputs (None where one is absent) and attributes, in order.
  py::tuple order(const py::dict& named) const {
    py::list ins, values;
    walk(
        named, [&](py::handle value) { ins.append(value ? value : py::none()); },
        [&](py::handle value) { values.append(value); });
    return py::make_tuple(ins, values);
  }

  Device* device;
  std::vector<py::object> input_keys, attr_keys;
};

inline void check_place(const BoundKernel& kernel, const Array& a) {
  const Backend *want = kernel.device->backend(), *got = a.storage->backend();
  if (got != want)
    throw py::value_error("[" + std::string(kernel.row->name) + "] operands are on different devices: " + want->name +
                          " and " + got->name + ".");
}

// Element-wise kernels and copy.
inline bool is_map(const KernelRow& row) {
#define UNARY(name, dtypes, attrs, expr) #name,
#define BINARY UNARY
#define TERNARY UNARY
  static const std::set<std::string_view> names = {
#include "kernels/maps.def"
      "copy"};
#undef UNARY
#undef BINARY
#undef TERNARY
  return names.count(row.name) > 0;
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

inline double number(py::handle value) {
  const double x = PyFloat_AsDouble(value.ptr());
  if (x == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return x;
}

inline void run_checked(const BoundKernel& kernel, const View* out, size_t n_out, const View* in, size_t n_in,
                        const double* attr, size_t n_attr) {
  kernel.check_counts(n_out, in, n_in, n_attr);
  kernel.check_dtypes(out, n_out, in, n_in);
  py::gil_scoped_release release;
  kernel.device->run(*kernel.row, out, static_cast<int>(n_out), in, static_cast<int>(n_in), attr);
}

inline void run_row(const BoundKernel& kernel, const View* out, size_t n_out, const View* in, size_t n_in,
                    py::handle attrs) {
  Items a(attrs, 2 * kMost);
  double attr[2 * kMost];
  for (size_t k = 0; k < a.size; k++) attr[k] = number(a[k]);
  run_checked(kernel, out, n_out, in, n_in, attr, a.size);
}

inline View operand(const BoundKernel& kernel, py::handle array) {
  if (array.is_none()) return kAbsent;
  const Array& a = array.cast<Array&>();
  check_place(kernel, a);
  return a.view;
}

inline void call_row(const BoundKernel& kernel, py::handle outs, py::handle ins, py::handle attrs) {
  const size_t most = kernel.row->groups ? SIZE_MAX : kMost;
  Items o(outs, most), i(ins, most);
  View few[2 * kMost];
  std::vector<View> many(o.size + i.size > 2 * kMost ? o.size + i.size : 0);
  View* view = many.empty() ? few : many.data();  // outputs, then inputs
  for (size_t k = 0; k < o.size; k++) view[k] = operand(kernel, o[k]);
  for (size_t k = 0; k < i.size; k++) view[o.size + k] = operand(kernel, i[k]);
  for (size_t k = 0; k < o.size; k++) o[k].cast<Array&>().storage->lend();
  run_row(kernel, view, o.size, view + o.size, i.size, attrs);
  for (size_t k = 0; k < o.size; k++) o[k].cast<Array&>().storage->wrote();
}

// The array under an NDArray, which makes it when it is first asked for.
inline py::object array_of(py::handle ndarray) {
  static const auto* made = new py::str("_reference");
  py::object array = ndarray.attr(*made);
  return array.is_none() ? ndarray.attr("_ref") : array;
}

// A call by name with NDArrays.
inline void call_named(const BoundKernel& kernel, py::handle outs, const py::dict& named) {
  Items o(outs, kMost);
  std::array<py::object, kMost> made;  // holds the arrays
  View view[2 * kMost];                // outputs, then inputs
  double attr[2 * kMost];
  size_t n_in = 0, n_attr = 0;
  for (size_t k = 0; k < o.size; k++) {
    made[k] = array_of(o[k]);
    view[k] = operand(kernel, made[k]);
  }
  kernel.walk(
      named,
      [&](py::handle value) { view[o.size + n_in++] = value ? operand(kernel, array_of(value)) : View(kAbsent); },
      [&](py::handle value) { attr[n_attr++] = number(value); });
  for (size_t k = 0; k < o.size; k++) made[k].cast<Array&>().storage->lend();
  run_checked(kernel, view, o.size, view + o.size, n_in, attr, n_attr);
  for (size_t k = 0; k < o.size; k++) made[k].cast<Array&>().storage->wrote();
}

// An element-wise row over inputs broadcast together, as numpy does, into a new array.
inline Array map_row(const BoundKernel& kernel, py::handle ins, std::string_view dtype, py::handle attrs) {
  const KernelRow& row = *kernel.row;
  if (!is_map(row)) throw py::value_error("[" + std::string(row.name) + "] is no element-wise kernel.");
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
