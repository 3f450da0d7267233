// The Python module needle._core. It names no op: kernels are reached through their table rows.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <set>
#include <string_view>

#include "core/device.h"
#include "core/file_map.h"
#include "core/plan.h"
#include "core/pool.h"
#include "cpu/backend.h"
#include "python/dlpack.h"

namespace py = pybind11;
using namespace needle;

namespace {

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

const DTypeInfo& info(DType d) { return kDTypes[static_cast<int>(d)]; }

DType parse_dtype(std::string_view name) {
  for (int i = 0; i < 5; i++)
    if (name == kDTypes[i].name) return static_cast<DType>(i);
  throw py::type_error("[needle] dtype expects float32, float64, int32, int64 or bool, got " + std::string(name) + ".");
}

using Dims = std::vector<int64_t>;

View make_view(const Dims& shape, const Dims* strides, DType dtype) {
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

Array make_array(std::shared_ptr<Storage> storage, const Dims& shape, const Dims& strides, int64_t offset,
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

Array empty(Device* device, const Dims& shape, DType dtype) {
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

void check_call(const KernelRow& row, size_t n_out, size_t n_in, size_t n_attr, const View* first) {
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

void check_place(const BoundKernel& kernel, const Array& a) {
  const Backend *want = kernel.device->backend(), *got = a.storage->backend();
  if (got != want)
    throw py::value_error("[" + std::string(kernel.row->name) + "] operands are on different devices: " + want->name +
                          " and " + got->name + ".");
}

// Element-wise kernels and copy convert their operands as they read them; all others take floats of one type only.
bool converts(const KernelRow& row) {
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

void check_one_float(const KernelRow& row, const View* views, size_t n) {
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

Dims dims_of(py::handle shape) {
  Items sizes(shape, SIZE_MAX);
  Dims dims(sizes.size);
  for (size_t i = 0; i < dims.size(); i++) dims[i] = sizes[i].cast<int64_t>();
  return dims;
}

constexpr size_t kMost = 16;  // outputs, inputs, and half as many attributes of a call

void run_row(const BoundKernel& kernel, const View* out, size_t n_out, const View* in, size_t n_in, py::handle attrs) {
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

View operand(const BoundKernel& kernel, py::handle array) {
  const Array& a = array.cast<Array&>();
  check_place(kernel, a);
  return a.view;
}

void call_row(const BoundKernel& kernel, py::handle outs, py::handle ins, py::handle attrs) {
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
Array map_row(const BoundKernel& kernel, py::handle ins, std::string_view dtype, py::handle attrs) {
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
Array new_row(const BoundKernel& kernel, py::handle ins, std::string_view dtype, py::handle attrs, py::handle to,
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

const KernelRow* find_row(Device* device, const char* name) {
  const Backend* b = device->backend();
  for (int i = 0; i < b->n_rows; i++)
    if (std::strcmp(b->rows[i].name, name) == 0) return &b->rows[i];
  throw NoKernel("[" + std::string(name) + "] there is no such kernel on " + b->name + "().");
}

Array dense_copy(Device* device, const Array& a) {
  const KernelRow* copy = find_row(device, "copy");
  Array out = empty(device, Dims(a.view.shape, a.view.shape + a.view.rank), a.view.dtype);
  device->run(*copy, &out.view, 1, &a.view, 1, nullptr);
  return out;
}

// A copy of device memory: numpy cannot see the memory itself.
py::array fetched(Device* device, const Array& a, bool write) {
  const char* name = device->backend()->name;
  if (write)
    throw py::value_error("[numpy] memory of " + std::string(name) + "() is not numpy's, .numpy() gives a copy.");
  std::vector<py::ssize_t> shape(a.view.shape, a.view.shape + a.view.rank);
  py::array out(py::dtype(info(a.view.dtype).name), shape);
  if (a.view.size() == 0) return out;
  void* to = out.mutable_data();
  py::gil_scoped_release release;
  Array dense = a.view.contiguous() ? a : dense_copy(device, a);
  device->copy(to, dense.view.data, a.view.size() * dtype_size(a.view.dtype));
  return out;
}

// Fills a contiguous array from a numpy array of its dtype.
void store(Array& a, const py::array& values) {
  const size_t bytes = a.view.size() * dtype_size(a.view.dtype);
  if (!a.view.contiguous() || static_cast<size_t>(values.nbytes()) != bytes || !(values.flags() & py::array::c_style))
    throw py::value_error("[store] expects contiguous arrays of one size.");
  if (bytes) {
    const void* from = values.data();
    py::gil_scoped_release release;
    Device::of(a.storage->backend())->copy(a.view.data, from, bytes);
  }
  a.storage->wrote();
}

// `write`: whether the numpy array may be written to.
py::array to_numpy(const Array& a, bool write) {
  Device* device = Device::of(a.storage->backend());
  if (!device->is_cpu()) return fetched(device, a, write);
  std::vector<py::ssize_t> shape(a.view.shape, a.view.shape + a.view.rank), strides(a.view.rank);
  for (int i = 0; i < a.view.rank; i++)
    strides[i] = a.view.stride[i] * static_cast<py::ssize_t>(dtype_size(a.view.dtype));
  auto* owner = new std::shared_ptr<Storage>(a.storage);
  py::capsule base(owner, [](void* p) { delete static_cast<std::shared_ptr<Storage>*>(p); });
  py::array out(py::dtype(info(a.view.dtype).name), shape, strides, a.view.data, base);
  if (write)
    a.storage->lend();
  else
    out.attr("flags").attr("writeable") = false;
  return out;
}

// Bytes `first` ... of a file as an array, which reads them when they are used; a copy where the dtype's alignment asks
// for one.
Array from_file(const std::shared_ptr<FileMap>& file, int64_t first, const Dims& shape, const std::string& dtype) {
  View v = make_view(shape, nullptr, parse_dtype(dtype));
  const size_t size = dtype_size(v.dtype), bytes = v.size() * size;
  if (first < 0 || static_cast<size_t>(first) > file->bytes() || bytes > file->bytes() - first)
    throw py::value_error("[load] a tensor reaches outside its file of " + std::to_string(file->bytes()) + " bytes.");
  char* data = file->data() + first;
  if (!bytes || reinterpret_cast<uintptr_t>(data) % size) {
    Array copy = empty(Device::cpu(), shape, v.dtype);
    std::memcpy(copy.view.data, data, bytes);
    return copy;
  }
  v.data = data;
  auto storage = std::make_shared<Storage>(
      cpu_backend(), data, bytes, [file] {}, [file, data, bytes] { file->forget(data, bytes); });
  return {std::move(storage), v};
}

struct Exported {
  DLManagedTensor tensor;
  std::shared_ptr<Storage> storage;
  View view;
};

// The emulation's memory is the host's, which other libraries may read and write.
int32_t dlpack_device(const Backend* backend) {
  const std::string_view name = backend->name;
  return name == "cuda" ? kDLCUDA : name == "hip" ? kDLROCM : kDLCPU;
}

py::capsule to_dlpack(const Array& a) {
  a.storage->lend();
  auto* e = new Exported{{}, a.storage, a.view};
  e->tensor = {{e->view.data,
                {dlpack_device(a.storage->backend()), 0},
                e->view.rank,
                info(e->view.dtype).dl,
                e->view.shape,
                e->view.stride,
                0},
               e,
               [](DLManagedTensor* t) { delete static_cast<Exported*>(t->manager_ctx); }};
  return py::capsule(&e->tensor, "dltensor", [](PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;  // someone took it
    auto* t = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    t->deleter(t);
  });
}

Array from_dlpack(const py::capsule& capsule, Device* device) {
  if (!PyCapsule_IsValid(capsule.ptr(), "dltensor"))
    throw py::value_error("[from_dlpack] expects an unused 'dltensor' capsule.");
  auto* m = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  const DLTensor& t = m->dl_tensor;
  const int32_t type = dlpack_device(device->backend());
  if (t.device.device_type != type || t.device.device_id != 0)
    throw py::value_error("[from_dlpack] expects memory of device type " + std::to_string(type) + ":0, got " +
                          std::to_string(t.device.device_type) + ":" + std::to_string(t.device.device_id) + ".");
  int dtype = -1;
  for (int i = 0; i < 5; i++)
    if (t.dtype.code == kDTypes[i].dl.code && t.dtype.bits == kDTypes[i].dl.bits && t.dtype.lanes == 1) dtype = i;
  if (dtype < 0)
    throw py::type_error("[from_dlpack] expects float32, float64, int32, int64 or bool, got type code " +
                         std::to_string(t.dtype.code) + " with " + std::to_string(t.dtype.bits) + " bits.");
  Dims shape(t.shape, t.shape + t.ndim), strides;
  if (t.strides) strides.assign(t.strides, t.strides + t.ndim);
  View v = make_view(shape, t.strides ? &strides : nullptr, static_cast<DType>(dtype));
  int64_t low = 0, high = 0, size = static_cast<int64_t>(dtype_size(v.dtype));
  for (int i = 0; i < v.rank && v.size(); i++) (v.stride[i] < 0 ? low : high) += (v.shape[i] - 1) * v.stride[i];
  char* first = static_cast<char*>(t.data) + t.byte_offset;
  v.data = first;
  auto storage =
      std::make_shared<Storage>(device->backend(), first + low * size, v.size() ? (high - low + 1) * size : 0, [m] {
        if (m->deleter) m->deleter(m);
      });
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  return {std::move(storage), v};
}

// (space, index, byte offset, shape, strides, dtype)
using RefTuple = std::tuple<int, int, int64_t, Dims, Dims, std::string>;

Ref make_ref(const RefTuple& t) {
  const auto& [space, index, offset, shape, strides, dtype] = t;
  if (space < 0 || space > 3) throw py::value_error("[plan] unknown memory space.");
  return {static_cast<Space>(space), index, offset, make_view(shape, &strides, parse_dtype(dtype))};
}

using StepTuple = std::tuple<const BoundKernel*, std::vector<RefTuple>, std::vector<RefTuple>, std::vector<double>>;
using Border = std::pair<Dims, std::string>;

std::unique_ptr<Plan> make_plan(const std::vector<StepTuple>& steps, size_t arena_bytes,
                                const std::vector<Border>& inputs, const std::vector<Border>& outputs) {
  std::vector<Step> list;
  for (const auto& [kernel, outs, ins, attr] : steps) {
    Step s{kernel->row, {}, {}, attr};
    for (const auto& r : outs) s.out.push_back(make_ref(r));
    for (const auto& r : ins) s.in.push_back(make_ref(r));
    check_call(*kernel->row, s.out.size(), s.in.size(), attr.size(), s.in.empty() ? nullptr : &s.in[0].view);
    list.push_back(std::move(s));
  }
  auto views = [](const std::vector<Border>& borders) {
    std::vector<View> v;
    for (const auto& [shape, dtype] : borders) v.push_back(make_view(shape, nullptr, parse_dtype(dtype)));
    return v;
  };
  return std::make_unique<Plan>(cpu_backend(), std::move(list), arena_bytes, views(inputs), views(outputs));
}

std::string describe(const View& v) {
  std::string s = std::string(info(v.dtype).name) + " (";
  for (int i = 0; i < v.rank; i++) s += (i ? ", " : "") + std::to_string(v.shape[i]);
  return s + (v.rank == 1 ? ",)" : ")");
}

void check_border(const Plan& plan, const char* kind, size_t i, const Array& array, const View& want) {
  const View& got = array.view;
  const Backend *place = plan.backend(), *found = array.storage->backend();
  if (place != found)
    throw py::value_error("[executable] " + std::string(kind) + " " + std::to_string(i) + " expects an array on " +
                          place->name + "(), got " + found->name + "().");
  bool same = got.rank == want.rank && got.dtype == want.dtype;
  for (int d = 0; same && d < got.rank; d++) same = got.shape[d] == want.shape[d];
  if (!same)
    throw py::value_error("[executable] " + std::string(kind) + " " + std::to_string(i) + " expects " + describe(want) +
                          ", got " + describe(got) + ".");
}

void run_plan(Plan& plan, const std::vector<Array*>& outs, const std::vector<Array*>& ins, double* seconds) {
  if (ins.size() != plan.inputs().size() || outs.size() != plan.outputs().size())
    throw py::value_error("[executable] expects " + std::to_string(plan.inputs().size()) + " inputs and " +
                          std::to_string(plan.outputs().size()) + " outputs, got " + std::to_string(ins.size()) +
                          " and " + std::to_string(outs.size()) + ".");
  std::vector<void*> in(ins.size()), out(outs.size());
  std::vector<Array> copies;  // inputs of any stride are compacted, strided outputs are written at the end
  std::vector<std::pair<Array*, Array>> late;
  static const KernelRow* copy = find_row(Device::cpu(), "copy");
  for (size_t i = 0; i < ins.size(); i++) check_border(plan, "input", i, *ins[i], plan.inputs()[i]);
  for (size_t i = 0; i < outs.size(); i++) check_border(plan, "output", i, *outs[i], plan.outputs()[i]);
  for (Array* a : outs) a->storage->lend();
  auto dense = [&](const View& v) {
    return empty(Device::of(plan.backend()), Dims(v.shape, v.shape + v.rank), v.dtype);
  };
  {
    py::gil_scoped_release release;
    Exec exec = cpu_exec();
    for (size_t i = 0; i < ins.size(); i++) {
      in[i] = ins[i]->view.data;
      if (ins[i]->view.contiguous()) continue;
      copies.push_back(dense(ins[i]->view));
      copy->run({&copies.back().view, &ins[i]->view, nullptr, 1, 1, &exec});
      in[i] = copies.back().view.data;
    }
    for (size_t i = 0; i < outs.size(); i++) {
      out[i] = outs[i]->view.data;
      if (outs[i]->view.contiguous()) continue;
      late.emplace_back(outs[i], dense(outs[i]->view));
      out[i] = late.back().second.view.data;
    }
    plan.run(in, out, seconds);
    for (auto& [target, source] : late) copy->run({&target->view, &source.view, nullptr, 1, 1, &exec});
  }
  for (Array* a : outs) a->storage->wrote();
}

py::dict kernels(Device* device) {
  py::dict d;
  const Backend* b = device->backend();
  for (int i = 0; i < b->n_rows; i++) d[b->rows[i].name] = BoundKernel{&b->rows[i], device};
  return d;
}

// Why there is no such device, or None.
py::object missing(Device* device) {
  DeviceProperties p;
  std::string why;
  return device->present(&p, &why) ? py::none() : py::object(py::str(why));
}

py::dict properties(Device* device) {
  DeviceProperties p;
  std::string why;
  if (!device->present(&p, &why))
    throw std::runtime_error("[" + std::string(device->backend()->name) + "] " + why + ".");
  using namespace py::literals;
  return py::dict("name"_a = p.name, "warp"_a = p.warp, "units"_a = p.units, "memory"_a = p.memory);
}

py::dict memory(Device* device) {
  MemoryStatistics s = device->cache().statistics();
  using namespace py::literals;
  return py::dict("used"_a = s.used, "cached"_a = s.cached, "peak"_a = s.peak, "taken"_a = s.taken,
                  "reused"_a = s.reused);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  py::register_exception<NoKernel>(m, "NoKernel", PyExc_TypeError);
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      std::rethrow_exception(p);
    } catch (const OutOfMemory& e) {
      PyErr_SetString(PyExc_MemoryError, e.what());
    }
  });
  py::class_<Storage, std::shared_ptr<Storage>>(m, "Storage")
      .def(py::init([](size_t bytes) { return std::make_shared<Storage>(cpu_backend(), bytes); }), py::arg("nbytes"))
      .def("ptr",
           [](Storage& s) {
             s.lend();
             return reinterpret_cast<uintptr_t>(s.data());
           })
      .def_property_readonly("nbytes", &Storage::bytes)
      .def_property_readonly("size", [](const Storage& s) { return s.bytes() / sizeof(float); })
      .def_property_readonly("version", &Storage::version)
      .def("watch", &Storage::watch)
      .def("wrote", &Storage::wrote)
      .def("trim", &Storage::trim);

  py::class_<FileMap, std::shared_ptr<FileMap>>(m, "FileMap")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def("array", from_file, py::arg("first"), py::arg("shape"), py::arg("dtype"));

  py::class_<Array>(m, "Array")
      .def(py::init([](std::shared_ptr<Storage> s, const Dims& shape, const Dims& strides, int64_t offset,
                       const std::string& dtype) {
             return make_array(std::move(s), shape, strides, offset, parse_dtype(dtype));
           }),
           py::arg("storage"), py::arg("shape"), py::arg("strides"), py::arg("offset"), py::arg("dtype"))
      .def_readonly("storage", &Array::storage)
      .def_property_readonly(
          "shape", [](const Array& a) { return py::tuple(py::cast(Dims(a.view.shape, a.view.shape + a.view.rank))); })
      .def_property_readonly(
          "strides",
          [](const Array& a) { return py::tuple(py::cast(Dims(a.view.stride, a.view.stride + a.view.rank))); })
      .def_property_readonly("offset",
                             [](const Array& a) {
                               return (static_cast<char*>(a.view.data) - static_cast<char*>(a.storage->data())) /
                                      static_cast<int64_t>(dtype_size(a.view.dtype));
                             })
      .def_property_readonly("dtype", [](const Array& a) { return info(a.view.dtype).name; })
      .def("contiguous", [](const Array& a) { return a.view.contiguous(); })
      .def("numpy", to_numpy, py::arg("write") = true)
      .def("store", store, py::arg("values"))
      .def("dlpack", to_dlpack);

  m.def("empty", [](py::handle shape, std::string_view dtype) {
    return empty(Device::cpu(), dims_of(shape), parse_dtype(dtype));
  });
  m.def("from_dlpack", from_dlpack, py::arg("capsule"), py::arg("device"));

  py::class_<BoundKernel>(m, "Kernel")
      .def_property_readonly("name", [](const BoundKernel& k) { return k.row->name; })
      .def_property_readonly("attrs", [](const BoundKernel& k) { return py::str(k.row->attrs).attr("split")(); })
      .def_property_readonly("dtypes",
                             [](const BoundKernel& k) {
                               py::list names;
                               for (const char* s = k.row->dtypes; *s; s++)
                                 for (const auto& d : kDTypes)
                                   if (d.letter == *s) names.append(d.name);
                               return names;
                             })
      .def_property_readonly("min_in", [](const BoundKernel& k) { return k.row->min_in; })
      .def_property_readonly("max_in", [](const BoundKernel& k) { return k.row->max_in; })
      .def_property_readonly("n_out", [](const BoundKernel& k) { return k.row->n_out; })
      .def("__call__", call_row, py::arg("outs"), py::arg("ins"), py::arg("attrs"))
      .def("map", map_row, py::arg("ins"), py::arg("dtype"), py::arg("attrs"))
      .def("new", new_row, py::arg("ins"), py::arg("dtype"), py::arg("attrs"), py::arg("to"), py::arg("shape"));

  m.def("kernels", [] { return kernels(Device::cpu()); });

  py::class_<Device, std::unique_ptr<Device, py::nodelete>>(m, "Device")
      .def_property_readonly("name", [](Device& d) { return d.backend()->name; })
      .def("missing", missing)
      .def("properties", properties)
      .def("kernels", kernels)
      .def("empty", [](Device& d, py::handle shape,
                       std::string_view dtype) { return empty(&d, dims_of(shape), parse_dtype(dtype)); })
      .def("allocate", &Device::allocate, py::arg("nbytes"))
      .def("sync", &Device::sync, py::call_guard<py::gil_scoped_release>())
      .def("memory", memory)
      .def("release_memory", [](Device& d) { d.cache().release(); })
      .def(
          "limit_cache", [](Device& d, size_t bytes) { d.cache().limit(bytes); }, py::arg("nbytes"))
      .def_property(
          "stream", [](Device& d) { return reinterpret_cast<uintptr_t>(d.stream()); },
          [](Device& d, uintptr_t stream) { d.set_stream(reinterpret_cast<void*>(stream)); });
  m.def("cpu", &Device::cpu, py::return_value_policy::reference);
  m.def("open", &Device::open, py::arg("path"), py::return_value_policy::reference);

  py::class_<Plan>(m, "Plan")
      .def(py::init(&make_plan), py::arg("steps"), py::arg("arena_bytes"), py::arg("inputs"), py::arg("outputs"))
      .def("set_constants",
           [](Plan& p, const std::vector<Array*>& arrays) {
             Plan::Constants c;
             for (Array* a : arrays) c.push_back(a->storage);
             p.set_constants(std::move(c));
           })
      .def("run", [](Plan& p, const std::vector<Array*>& outs,
                     const std::vector<Array*>& ins) { run_plan(p, outs, ins, nullptr); })
      .def("run_new",
           [](Plan& p, const std::vector<Array*>& ins) {
             std::vector<Array> outs;
             std::vector<Array*> refs;
             for (const View& v : p.outputs())
               outs.push_back(empty(Device::of(p.backend()), Dims(v.shape, v.shape + v.rank), v.dtype));
             for (Array& a : outs) refs.push_back(&a);
             run_plan(p, refs, ins, nullptr);
             return outs;
           })
      .def("profile",
           [](Plan& p, const std::vector<Array*>& outs, const std::vector<Array*>& ins) {
             std::vector<double> seconds(p.steps().size());
             run_plan(p, outs, ins, seconds.data());
             return seconds;
           })
      .def_property_readonly("arena_bytes", &Plan::arena_bytes)
      .def_property_readonly("frames", &Plan::frames);

  m.def("num_threads", &num_threads);
  m.def("set_num_threads", [](int n) {
    if (n < 1) throw py::value_error("[set_num_threads] expects at least 1, got " + std::to_string(n) + ".");
    py::gil_scoped_release release;
    set_num_threads(n);
  });
  m.def("isa", &cpu_isa);
  m.def("epoch", [] { return epoch().load(); });
  m.def("bump_epoch", [] { epoch().fetch_add(1); });
}
