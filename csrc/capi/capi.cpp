// The functions of needle.h over PlanFile and Plan.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>

#include "capi/needle.h"
#include "core/operands.h"
#include "core/plan_file.h"
#include "core/pool.h"
#include "cpu/backend.h"

#define NEEDLE_C extern "C" NEEDLE_SHARED

using namespace needle;

static_assert(NEEDLE_MAX_RANK == kMaxRank);
static_assert(NEEDLE_FLOAT32 == static_cast<int>(DType::f32) && NEEDLE_FLOAT64 == static_cast<int>(DType::f64));
static_assert(NEEDLE_INT32 == static_cast<int>(DType::i32) && NEEDLE_INT64 == static_cast<int>(DType::i64));
static_assert(NEEDLE_BOOL == static_cast<int>(DType::b8) && std::size(kDTypes) == 5);

struct needle_model {
  struct Ready {
    const StoredPlan* stored;
    std::unique_ptr<Plan> plan;
  };
  PlanFile file;
  std::vector<Ready> plans;
};

namespace {

thread_local char last_error[1024];

// 0, or 1 with the error's text.
template <class F>
int guarded(const F& f) noexcept {
  try {
    f();
    return 0;
  } catch (const std::bad_alloc&) {
    std::snprintf(last_error, sizeof last_error, "[needle] out of memory.");
  } catch (const std::exception& e) {
    std::snprintf(last_error, sizeof last_error, "%s", e.what());
  } catch (...) {
    std::snprintf(last_error, sizeof last_error, "[needle] an unknown error.");
  }
  return 1;
}

[[noreturn]] void wrong(const std::string& text) { throw std::invalid_argument(text); }

const needle_model::Ready& at(const needle_model* model, int plan) {
  if (!model) wrong("[needle] expects a model, got NULL.");
  if (plan < 0 || static_cast<size_t>(plan) >= model->plans.size())
    wrong("[needle] the model has " + std::to_string(model->plans.size()) + " plans, got number " +
          std::to_string(plan) + ".");
  return model->plans[plan];
}

void tell(const std::vector<std::string>& names, const std::vector<View>& views, int index, const char* kind,
          needle_tensor* tensor) {
  if (!tensor) wrong("[needle] expects a tensor to fill, got NULL.");
  if (index < 0 || static_cast<size_t>(index) >= views.size())
    wrong("[needle] the plan has " + std::to_string(views.size()) + " " + kind + "s, got number " +
          std::to_string(index) + ".");
  const View& v = views[index];
  *tensor = {names[index].c_str(), static_cast<needle_dtype>(v.dtype), v.rank, {}, v.size() * dtype_size(v.dtype)};
  std::copy(v.shape, v.shape + v.rank, tensor->shape);
}

template <class Pointer>
std::vector<void*> places(const std::vector<View>& views, const Pointer* given, const char* kind) {
  if (!given && !views.empty()) wrong("[needle_run] expects addresses of " + std::string(kind) + "s, got NULL.");
  std::vector<void*> all;
  for (size_t i = 0; i < views.size(); i++) {
    all.push_back(const_cast<void*>(given[i]));
    const size_t size = dtype_size(views[i].dtype);
    const size_t beyond = reinterpret_cast<uintptr_t>(given[i]) % size;
    if ((!given[i] && views[i].size()) || beyond)
      wrong("[needle_run] " + std::string(kind) + " " + std::to_string(i) + " expects " + describe(views[i]) +
            " at a multiple of " + std::to_string(size) + " bytes, got " +
            (given[i] ? "an address " + std::to_string(beyond) + " beyond one." : "NULL."));
  }
  return all;
}

// Steps write results before later ones have read all inputs.
void refuse_overlaps(const Plan& plan, const std::vector<void*>& inputs, const std::vector<void*>& outputs) {
  auto range = [](const std::vector<View>& views, const std::vector<void*>& all, size_t i) {
    const auto from = reinterpret_cast<uintptr_t>(all[i]);
    return std::pair(from, from + views[i].size() * dtype_size(views[i].dtype));
  };
  for (size_t i = 0; i < outputs.size(); i++) {
    const auto out = range(plan.outputs(), outputs, i);
    auto refuse = [&](const std::vector<View>& views, const std::vector<void*>& all, size_t j, const char* kind) {
      const auto other = range(views, all, j);
      if (std::max(out.first, other.first) < std::min(out.second, other.second))
        wrong("[needle_run] output " + std::to_string(i) + " expects memory of its own, got some of " + kind + " " +
              std::to_string(j) + ".");
    };
    for (size_t j = 0; j < inputs.size(); j++) refuse(plan.inputs(), inputs, j, "input");
    for (size_t j = 0; j < i; j++) refuse(plan.outputs(), outputs, j, "output");
  }
}

}  // namespace

NEEDLE_C int needle_open(const char* path, needle_model** model) {
  if (model) *model = nullptr;
  return guarded([&] {
    if (!path || !model) wrong("[needle_open] expects a path and a place for the model, got NULL.");
    auto made = std::make_unique<needle_model>();
    made->file = PlanFile::read(path);
    const auto& all = made->file.plans();
    std::string wanted, there;
    for (int i = 0; const char* isa = cpu_isa(i); i++) {
      wanted += (i ? ", " : "") + std::string(isa);
      for (const StoredPlan& p : all)
        if (p.isa == isa) made->plans.push_back({&p, nullptr});
      if (!made->plans.empty()) break;
    }
    if (made->plans.empty()) {
      for (const StoredPlan& p : all)
        if (there.find(p.isa) == std::string::npos) there += (there.empty() ? "" : ", ") + p.isa;
      wrong("[open] " + std::string(path) + " has plans for " + (there.empty() ? "nothing" : there) +
            ", this CPU has " + wanted + ".");
    }
    auto arenas = std::make_shared<Arenas>();
    for (auto& ready : made->plans) ready.plan = made->file.bind(*ready.stored, arenas);
    *model = made.release();
  });
}

NEEDLE_C void needle_close(needle_model* model) { delete model; }

NEEDLE_C int needle_plan_count(const needle_model* model) {
  int n = 0;
  guarded([&] {
    at(model, 0);
    n = static_cast<int>(model->plans.size());
  });
  return n;
}

NEEDLE_C int needle_input_count(const needle_model* model, int plan) {
  int n = -1;
  guarded([&] { n = static_cast<int>(at(model, plan).stored->inputs.size()); });
  return n;
}

NEEDLE_C int needle_output_count(const needle_model* model, int plan) {
  int n = -1;
  guarded([&] { n = static_cast<int>(at(model, plan).stored->outputs.size()); });
  return n;
}

NEEDLE_C int needle_input(const needle_model* model, int plan, int index, needle_tensor* tensor) {
  return guarded([&] {
    const StoredPlan& p = *at(model, plan).stored;
    tell(p.input_names, p.inputs, index, "input", tensor);
  });
}

NEEDLE_C int needle_output(const needle_model* model, int plan, int index, needle_tensor* tensor) {
  return guarded([&] {
    const StoredPlan& p = *at(model, plan).stored;
    tell(p.output_names, p.outputs, index, "output", tensor);
  });
}

NEEDLE_C const char* needle_isa(const needle_model* model) { return model ? model->plans[0].stored->isa.c_str() : ""; }

NEEDLE_C int needle_run(needle_model* model, int plan, const void* const* inputs, void* const* outputs) {
  return guarded([&] {
    Plan& p = *at(model, plan).plan;
    const auto in = places(p.inputs(), inputs, "input"), out = places(p.outputs(), outputs, "output");
    refuse_overlaps(p, in, out);
    p.run(in, out);
  });
}

NEEDLE_C int needle_set_threads(int threads) {
  return guarded([&] {
    if (threads < 1 || threads > kMostThreads)
      wrong("[needle_set_threads] expects 1 to " + std::to_string(kMostThreads) + ", got " + std::to_string(threads) +
            ".");
    set_num_threads(threads);
  });
}

NEEDLE_C int needle_threads(void) { return num_threads(); }

NEEDLE_C const char* needle_last_error(void) { return last_error; }

NEEDLE_C const char* needle_version(void) { return NEEDLE_VERSION; }
