// The Python module needle._core. It names no op: kernels are reached through their table rows.
#include <optional>

#include "core/digest.h"
#include "core/offsets.h"
#include "core/plan_file.h"
#include "core/pool.h"
#include "cpu/backend.h"
#include "python/exchange.h"

using namespace needle;
using namespace needle::python;

namespace {

// (space, index, byte offset, shape, strides, dtype), None for an input that is absent
using RefTuple = std::tuple<int, int, int64_t, Dims, Dims, std::string>;

Ref make_ref(const std::optional<RefTuple>& t) {
  if (!t) return {Space::absent, 0, 0, kAbsent};
  const auto& [space, index, offset, shape, strides, dtype] = *t;
  if (space < 0 || space > 3) throw py::value_error("[plan] unknown memory space.");
  return {static_cast<Space>(space), index, offset, make_view(shape, &strides, parse_dtype(dtype))};
}

using StepTuple =
    std::tuple<const BoundKernel*, std::vector<RefTuple>, std::vector<std::optional<RefTuple>>, std::vector<double>>;
using Border = std::pair<Dims, std::string>;

std::unique_ptr<Plan> make_plan(Device* device, const std::vector<StepTuple>& steps, size_t arena_bytes,
                                const std::vector<Border>& inputs, const std::vector<Border>& outputs,
                                std::shared_ptr<Arenas> arenas) {
  if (!arenas || !device->is_cpu())
    arenas = std::make_shared<Arenas>();  // work of several plans may be under way there
  std::vector<Step> list;
  for (const auto& [kernel, outs, ins, attr] : steps) {
    if (kernel->device != device)
      throw py::value_error("[plan] steps are kernels of " + std::string(device->backend()->name) + "(), got '" +
                            kernel->row->name + "' of " + kernel->device->backend()->name + "().");
    Step s{kernel->row, {}, {}, attr};
    for (const auto& r : outs) s.out.push_back(make_ref(r));
    for (const auto& r : ins) s.in.push_back(make_ref(r));
    std::vector<View> views;
    for (const auto* refs : {&s.out, &s.in})
      for (const Ref& r : *refs) views.push_back(r.view);
    kernel->check_counts(s.out.size(), views.data() + s.out.size(), s.in.size(), attr.size());
    kernel->check_dtypes(views.data(), s.out.size(), views.data() + s.out.size(), s.in.size());
    list.push_back(std::move(s));
  }
  auto views = [](const std::vector<Border>& borders) {
    std::vector<View> v;
    for (const auto& [shape, dtype] : borders) v.push_back(make_view(shape, nullptr, parse_dtype(dtype)));
    return v;
  };
  return std::make_unique<Plan>(device, std::move(list), arena_bytes, views(inputs), views(outputs), std::move(arenas));
}

// What shapes do not change: of every step its kernel, and of each operand the space, index, rank and dtype.
std::vector<py::tuple> form_of(const Plan& plan) {
  std::vector<py::tuple> rows;
  for (const Step& step : plan.steps()) {
    py::list operands;
    for (const auto* refs : {&step.out, &step.in})
      for (const Ref& r : *refs) {
        if (r.view.absent())
          operands.append(py::none());
        else
          operands.append(py::make_tuple(static_cast<int>(r.space), r.index, r.view.rank, info(r.view.dtype).name));
      }
    rows.push_back(py::make_tuple(step.row->name, operands));
  }
  return rows;
}

// host: memory of the CPU will do on every device.
void check_border(const Plan& plan, const char* kind, bool host, size_t i, const Array& array, const View& want) {
  const View& got = array.view;
  const Backend *place = plan.device()->backend(), *found = array.storage->backend();
  if (place != found && !(found == cpu_backend() && host))
    throw py::value_error("[executable] " + std::string(kind) + " " + std::to_string(i) + " expects an array on " +
                          place->name + "(), got " + found->name + "().");
  bool same = got.rank == want.rank && got.dtype == want.dtype;
  for (int d = 0; same && d < got.rank; d++) same = got.shape[d] == want.shape[d];
  if (!same)
    throw py::value_error("[executable] " + std::string(kind) + " " + std::to_string(i) + " expects " + describe(want) +
                          ", got " + describe(got) + ".");
}

void run_plan(Plan& plan, const std::vector<Array*>& outs, const std::vector<Array*>& ins, double* seconds,
              const std::vector<Pause>& pauses = {}) {
  if (ins.size() != plan.inputs().size() || outs.size() != plan.outputs().size())
    throw py::value_error("[executable] expects " + std::to_string(plan.inputs().size()) + " inputs and " +
                          std::to_string(plan.outputs().size()) + " outputs, got " + std::to_string(ins.size()) +
                          " and " + std::to_string(outs.size()) + ".");
  std::vector<void*> in(ins.size()), out(outs.size());
  std::vector<Array> copies;  // inputs of any stride and from the host become compact; strided outputs are written last
  std::vector<std::pair<Array*, Array>> late;
  Device* device = plan.device();
  for (size_t i = 0; i < ins.size(); i++) check_border(plan, "input", true, i, *ins[i], plan.inputs()[i]);
  for (size_t i = 0; i < outs.size(); i++) check_border(plan, "output", false, i, *outs[i], plan.outputs()[i]);
  for (Array* a : outs) a->storage->lend();
  {
    py::gil_scoped_release release;
    for (size_t i = 0; i < ins.size(); i++) {
      Array a = *ins[i];
      if (!a.view.contiguous()) a = dense_copy(Device::of(a.storage->backend()), a);
      if (a.storage->backend() != device->backend()) a = moved(device, a);
      in[i] = a.view.data;
      copies.push_back(std::move(a));
    }
    for (size_t i = 0; i < outs.size(); i++) {
      const View& v = outs[i]->view;
      out[i] = v.data;
      if (v.contiguous()) continue;
      late.emplace_back(outs[i], empty_like(device, v));
      out[i] = late.back().second.view.data;
    }
    plan.run(in, out, seconds, pauses);
    for (auto& [target, source] : late)
      device->run(*find_row(device, "copy"), &target->view, 1, &source.view, 1, nullptr);
  }
  for (Array* a : outs) a->storage->wrote();
}

// Results as new arrays.
std::vector<Array> run_new(Plan& plan, const std::vector<Array*>& ins, const std::vector<Pause>& pauses = {}) {
  std::vector<Array> outs;
  std::vector<Array*> refs;
  for (const View& v : plan.outputs()) outs.push_back(empty_like(plan.device(), v));
  for (Array& a : outs) refs.push_back(&a);
  run_plan(plan, refs, ins, nullptr, pauses);
  return outs;
}

// The same, with call(i) after the first places[i] steps.
std::vector<Array> run_paused(Plan& plan, const std::vector<Array*>& ins, const std::vector<size_t>& places,
                              const py::function& call) {
  std::vector<Pause> pauses;
  for (size_t i = 0; i < places.size(); i++)
    pauses.push_back({places[i], [&call, i] {
                        py::gil_scoped_acquire acquire;
                        call(i);
                      }});
  return run_new(plan, ins, pauses);
}

// Results as numpy arrays; None where `run_new` has to look closer: at parameters changed since `epoch`, or at inputs
// that are no numpy arrays of the plan's shapes and dtypes, lying as the plan reads them. One call, since the lines of
// code and data that Python takes for the same cost a tenth of a millisecond after a run that has emptied the caches.
py::object run_numpy(Plan& plan, const py::tuple& inputs, uint64_t parameters) {
  const std::vector<View>& want = plan.inputs();
  if (!plan.device()->is_cpu() || inputs.size() != want.size() || epoch().load() != parameters) return py::none();
  std::vector<void*> in, out;
  for (size_t i = 0; i < want.size(); i++) {
    if (!py::isinstance<py::array>(inputs[i])) return py::none();
    const auto a = py::reinterpret_borrow<py::array>(inputs[i]);
    bool same = a.ndim() == want[i].rank && (a.flags() & py::array::c_style);
    for (int d = 0; same && d < want[i].rank; d++) same = a.shape(d) == want[i].shape[d];
    if (!same || !a.dtype().is(numpy_dtype(want[i].dtype))) return py::none();
    in.push_back(const_cast<void*>(a.data()));
    if (reinterpret_cast<uintptr_t>(in.back()) % dtype_size(want[i].dtype)) return py::none();
  }
  py::list results;
  for (const View& v : plan.outputs()) {
    const Array a = empty_like(Device::cpu(), v);
    out.push_back(a.view.data);
    results.append(to_numpy(a, true));
  }
  {
    py::gil_scoped_release release;
    plan.run(in, out);
  }
  return results;  // with the lock: it may count a reference
}

std::vector<std::string> operand_names(const std::vector<Operand>& all) {
  std::vector<std::string> names;
  for (const Operand& one : all) names.push_back(one.text);
  return names;
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
    } catch (const WrongDType& e) {
      PyErr_SetString(PyExc_TypeError, e.what());
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
      .def_property_readonly("shape", [](const Array& a) { return py::tuple(py::cast(shape_of(a.view))); })
      .def_property_readonly(
          "strides",
          [](const Array& a) { return py::tuple(py::cast(Dims(a.view.stride, a.view.stride + a.view.rank))); })
      .def_property_readonly("offset",
                             [](const Array& a) {
                               return (static_cast<char*>(a.view.data) - static_cast<char*>(a.storage->data())) /
                                      static_cast<int64_t>(dtype_size(a.view.dtype));
                             })
      .def_property_readonly("dtype", [](const Array& a) { return info(a.view.dtype).name; })
      .def_property_readonly("device", [](const Array& a) { return a.storage->backend()->name; })
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
      .def_property_readonly("inputs", [](const BoundKernel& k) { return operand_names(k.inputs); })
      .def_property_readonly("outputs", [](const BoundKernel& k) { return operand_names(k.outputs); })
      .def_property_readonly("attrs", [](const BoundKernel& k) { return k.attrs; })
      .def_property_readonly("dtypes",
                             [](const BoundKernel& k) {
                               const unsigned bits = (k.inputs.empty() ? k.outputs : k.inputs)[0].dtypes;
                               py::list names;
                               for (size_t d = 0; d < std::size(kDTypes); d++)
                                 if (bits >> d & 1) names.append(kDTypes[d].name);
                               return names;
                             })
      .def("order", &BoundKernel::order, py::arg("named"))
      .def(
          "check",
          [](const BoundKernel& k, const std::vector<std::string_view>& outs,
             const std::vector<std::optional<std::string_view>>& ins) {
            std::vector<View> views(outs.size() + ins.size());
            for (size_t i = 0; i < outs.size(); i++) views[i].dtype = parse_dtype(outs[i]);
            for (size_t i = 0; i < ins.size(); i++) {
              View& v = views[outs.size() + i];
              ins[i] ? void(v.dtype = parse_dtype(*ins[i])) : void(v = kAbsent);
            }
            const View* in = views.data() + outs.size();
            k.check_counts(outs.size(), in, ins.size(), k.attrs.size());
            k.check_dtypes(views.data(), outs.size(), in, ins.size());
          },
          py::arg("outs"), py::arg("ins"))
      .def("__call__", call_row, py::arg("outs"), py::arg("ins"), py::arg("attrs"))
      .def("call", call_named, py::arg("outs"), py::arg("named"))
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
      .def(
          "allocate", [](Device& d, size_t bytes) { return d.allocate(bytes); }, py::arg("nbytes"))
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

  m.def(
      "plan_offsets",
      [](const std::vector<std::tuple<int64_t, int64_t, int64_t>>& buffers, int64_t alignment) {
        std::vector<Lifetime> list;
        for (const auto& [bytes, first, last] : buffers) list.push_back({bytes, first, last});
        auto offsets = plan_offsets(list, alignment);
        const int64_t total = offsets.back();
        offsets.pop_back();
        return std::make_pair(std::move(offsets), total);
      },
      py::arg("buffers"), py::arg("alignment"));
  py::class_<Arenas, std::shared_ptr<Arenas>>(m, "Arenas").def(py::init());
  py::class_<Plan>(m, "Plan")
      .def(py::init(&make_plan), py::arg("device"), py::arg("steps"), py::arg("arena_bytes"), py::arg("inputs"),
           py::arg("outputs"), py::arg("arenas") = std::shared_ptr<Arenas>())
      .def("set_constants",
           [](Plan& p, const std::vector<Array*>& arrays) {
             Plan::Constants c;
             for (Array* a : arrays) c.push_back(a->storage);
             p.set_constants(std::move(c));
           })
      .def(
          "guard",
          [](Plan& p, const std::vector<std::tuple<size_t, size_t, int, int>>& buffers) {
            std::vector<GuardedBuffer> list;
            for (const auto& [offset, bytes, first, last] : buffers) list.push_back({offset, bytes, first, last});
            p.guard(std::move(list));
          },
          py::arg("buffers"))
      .def("like", &Plan::like, py::arg("numbers"), py::arg("attributes"), py::arg("arena_bytes"))
      .def_property_readonly("numbers", &Plan::numbers)
      .def_property_readonly("form", form_of)
      .def("run", [](Plan& p, const std::vector<Array*>& outs,
                     const std::vector<Array*>& ins) { run_plan(p, outs, ins, nullptr); })
      .def("run_new", [](Plan& p, const std::vector<Array*>& ins) { return run_new(p, ins); })
      .def("run_paused", run_paused, py::arg("ins"), py::arg("places"), py::arg("call"))
      .def("run_numpy", run_numpy, py::arg("inputs"), py::arg("epoch"))
      .def("profile",
           [](Plan& p, const std::vector<Array*>& outs, const std::vector<Array*>& ins) {
             std::vector<double> seconds(p.steps().size());
             run_plan(p, outs, ins, seconds.data());
             return seconds;
           })
      .def_property_readonly("arena_bytes", &Plan::arena_bytes)
      .def("set_attributes", &Plan::set_attributes, py::arg("step"), py::arg("attributes"))
      .def_property_readonly("arenas", &Plan::arenas)
      .def_property_readonly("runs", &Plan::runs)
      .def_property_readonly("graphs", &Plan::graphs)
      .def_property_readonly("graph_error", &Plan::graph_error);

  m.def(
      "write_plans",
      [](const std::string& path,
         const std::vector<std::tuple<const Plan*, const Plan*, std::vector<std::string>, std::vector<std::string>,
                                      std::vector<std::pair<std::vector<double>, std::string>>>>& plans) {
        PlanFile file;
        for (const auto& [plan, checks, inputs, outputs, guards] : plans) {
          std::vector<Condition> conditions;
          for (const auto& [expected, text] : guards) conditions.push_back({expected, text});
          file.add(*plan, checks, inputs, outputs, std::move(conditions));
        }
        file.write(path);
      },
      py::arg("path"), py::arg("plans"));
  m.def(
      "join_plan_files",
      [](const std::string& path, const std::vector<std::string>& parts) {
        PlanFile file;
        for (const std::string& part : parts) file.add(PlanFile::read(part));
        file.write(path);
      },
      py::arg("path"), py::arg("parts"));

  m.attr("ACTIVATIONS") = py::make_tuple("none"
#define ACTIVATION(code, name, cost, choice) , #name
#include "kernels/activations.def"
#undef ACTIVATION
  );
#define UNARY(name, dtypes, attrs, expr) #name,
#define BINARY UNARY
#define TERNARY UNARY
  const char* const maps[] = {
#include "kernels/maps.def"
  };
#undef UNARY
#undef BINARY
#undef TERNARY
  m.attr("MAPS") = py::tuple(py::cast(std::vector<std::string>(std::begin(maps), std::end(maps))));
  m.attr("GUARD_BYTES") = kGuardBytes;
  m.def("num_threads", &num_threads, "How many threads the process's pool has, its callers among them.");
  m.def(
      "set_num_threads",
      [](int n) {
        if (n < 1 || n > kMostThreads)
          throw py::value_error("[set_num_threads] expects 1 to " + std::to_string(kMostThreads) + ", got " +
                                std::to_string(n) + ".");
        py::gil_scoped_release release;
        set_num_threads(n);
      },
      "Give the process's pool n threads, 1 to 1024, its callers among them; ValueError for others.");
  m.def(
      "isa", [] { return cpu_isa(); },
      "The instruction set of the kernels that run: 'scalar', 'neon', 'avx2' or 'avx512'.");
  m.def("release_unused_memory", &release_unused_memory, py::call_guard<py::gil_scoped_release>());
  m.def("epoch", [] { return epoch().load(); });
  m.def("bump_epoch", [] { epoch().fetch_add(1); });
  m.def("digests", [](const std::vector<py::array_t<uint8_t, py::array::c_style>>& arrays) {
    std::vector<std::pair<const void*, size_t>> memory;
    for (const auto& a : arrays) memory.emplace_back(a.data(), a.nbytes());
    std::vector<uint64_t> found;
    py::gil_scoped_release release;
    for (auto [data, bytes] : memory) found.push_back(digest(data, bytes));
    return found;
  });
}
