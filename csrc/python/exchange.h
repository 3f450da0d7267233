// Arrays from and to the outside: numpy, files, DLPack.
#pragma once
#include <pybind11/numpy.h>

#include "core/file_map.h"
#include "python/calls.h"

namespace needle::python {

inline const KernelRow* find_row(Device* device, const char* name) {
  if (const KernelRow* row = device->backend()->find(name)) return row;
  throw NoKernel("[" + std::string(name) + "] there is no such kernel on " + device->backend()->name + "().");
}

inline Array dense_copy(Device* device, const Array& a) {
  const KernelRow* copy = find_row(device, "copy");
  Array out = empty_like(device, a.view);
  device->run(*copy, &out.view, 1, &a.view, 1, nullptr);
  return out;
}

inline py::dtype numpy_dtype(DType d) {
  switch (d) {
#define DTYPE(name, type, letter, text, code, bits) \
  case DType::name:                                 \
    return py::dtype::of<type>();
#include "kernels/dtypes.def"
#undef DTYPE
  }
  throw std::logic_error("[needle] an array has an unknown dtype.");
}

// A contiguous array of the host on a device; it may be changed again when this returns, though the copy may be under
// way.
inline Array moved(Device* device, const Array& a) {
  Array out = empty_like(device, a.view);
  device->backend()->copy(out.view.data, a.view.data, a.view.size() * dtype_size(a.view.dtype), device->stream());
  return out;
}

// A copy of device memory: numpy cannot see the memory itself.
inline py::array fetched(Device* device, const Array& a, bool write) {
  const char* name = device->backend()->name;
  if (write)
    throw py::value_error("[numpy] memory of " + std::string(name) + "() is not numpy's, .numpy() gives a copy.");
  std::vector<py::ssize_t> shape(a.view.shape, a.view.shape + a.view.rank);
  py::array out(numpy_dtype(a.view.dtype), shape);
  if (a.view.size() == 0) return out;
  void* to = out.mutable_data();
  py::gil_scoped_release release;
  Array dense = a.view.contiguous() ? a : dense_copy(device, a);
  device->copy(to, dense.view.data, a.view.size() * dtype_size(a.view.dtype));
  return out;
}

// Fills a contiguous array from a numpy array of its dtype.
inline void store(Array& a, const py::array& values) {
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
inline py::array to_numpy(const Array& a, bool write) {
  Device* device = Device::of(a.storage->backend());
  if (!device->is_cpu()) return fetched(device, a, write);
  std::vector<py::ssize_t> shape(a.view.shape, a.view.shape + a.view.rank), strides(a.view.rank);
  for (int i = 0; i < a.view.rank; i++)
    strides[i] = a.view.stride[i] * static_cast<py::ssize_t>(dtype_size(a.view.dtype));
  auto* owner = new std::shared_ptr<Storage>(a.storage);
  py::capsule base(owner, [](void* p) { delete static_cast<std::shared_ptr<Storage>*>(p); });
  py::array out(numpy_dtype(a.view.dtype), shape, strides, a.view.data, base);
  if (write)
    a.storage->lend();
  else
    out.attr("flags").attr("writeable") = false;
  return out;
}

// Bytes `first` ... of a file as an array, which reads them when they are used; a copy where the dtype's alignment asks
// for one.
inline Array from_file(const std::shared_ptr<FileMap>& file, int64_t first, const Dims& shape,
                       const std::string& dtype) {
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
inline int32_t dlpack_device(const Backend* backend) {
  const std::string_view name = backend->name;
  return name == "cuda" ? kDLCUDA : name == "hip" ? kDLROCM : kDLCPU;
}

inline py::capsule to_dlpack(const Array& a) {
  a.storage->lend();
  auto* e = new Exported{{}, a.storage, a.view};
  e->tensor = {{e->view.data,
                {dlpack_device(a.storage->backend()), 0},
                e->view.rank,
                kDLTypes[static_cast<int>(e->view.dtype)],
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

inline Array from_dlpack(const py::capsule& capsule, Device* device) {
  if (!PyCapsule_IsValid(capsule.ptr(), "dltensor"))
    throw py::value_error("[from_dlpack] expects an unused 'dltensor' capsule.");
  auto* m = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  const DLTensor& t = m->dl_tensor;
  const int32_t type = dlpack_device(device->backend());
  if (t.device.device_type != type || t.device.device_id != 0)
    throw py::value_error("[from_dlpack] expects memory of device type " + std::to_string(type) + ":0, got " +
                          std::to_string(t.device.device_type) + ":" + std::to_string(t.device.device_id) + ".");
  int dtype = -1;
  for (size_t i = 0; i < std::size(kDTypes); i++)
    if (t.dtype.code == kDLTypes[i].code && t.dtype.bits == kDLTypes[i].bits && t.dtype.lanes == 1)
      dtype = static_cast<int>(i);
  if (dtype < 0)
    throw py::type_error("[from_dlpack] expects " + names_of(kAnyDType) + ", got type code " +
                         std::to_string(t.dtype.code) + " with " + std::to_string(t.dtype.bits) + " bits.");
  Dims shape(t.shape, t.shape + t.ndim), strides;
  if (t.strides) strides.assign(t.strides, t.strides + t.ndim);
  View v = make_view(shape, t.strides ? &strides : nullptr, static_cast<DType>(dtype));
  int64_t low, high, size = static_cast<int64_t>(dtype_size(v.dtype));
  v.span(&low, &high);
  char* first = static_cast<char*>(t.data) + t.byte_offset;
  v.data = first;
  auto storage =
      std::make_shared<Storage>(device->backend(), first + low * size, v.size() ? (high - low + 1) * size : 0, [m] {
        if (m->deleter) m->deleter(m);
      });
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  return {std::move(storage), v};
}

}  // namespace needle::python
