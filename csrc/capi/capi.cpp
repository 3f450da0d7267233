// The functions of needle.h over PlanFile and Plan.
#include <algorithm>
#include <atomic>
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
  bool has_state = false;
  std::atomic_flag in_use;  // its state
};

namespace {

thread_local char last_error[1024];

// Of a text that is too long the middle goes: what is wrong stands at its end.
void tell(const char* text) noexcept {
  const size_t length = std::strlen(text), part = sizeof last_error / 2 - 4;
  if (length < sizeof last_error) {
    std::memcpy(last_error, text, length + 1);
  } else {
    std::snprintf(last_error, sizeof last_error, "%.*s ... %s", static_cast<int>(part), text, text + length - part);
  }
}

// 0, or 1 with the error's text.
template <class F>
int guarded(const F& f) noexcept {
  try {
    f();
    return 0;
  } catch (const std::bad_alloc&) {
    tell("[needle] out of memory.");
  } catch (const std::exception& e) {
    tell(e.what());
  } catch (...) {
    tell("[needle] an unknown error.");
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

void tell(const std::vector<std::string>& names, const std::vector<View>& views, size_t count, int index,
          const char* kind, needle_tensor* tensor) {
  if (!tensor) wrong("[needle] expects a tensor to fill, got NULL.");
  if (index < 0 || static_cast<size_t>(index) >= count)
    wrong("[needle] the plan has " + std::to_string(count) + " " + kind + "s, got number " + std::to_string(index) +
          ".");
  const View& v = views[index];
  *tensor = {names[index].c_str(), static_cast<needle_dtype>(v.dtype), v.rank, {}, v.size() * dtype_size(v.dtype)};
  std::copy(v.shape, v.shape + v.rank, tensor->shape);
}

template <class Pointer>
std::vector<void*> places(const std::vector<View>& views, size_t count, const Pointer* given, const char* kind) {
  if (!given && count > 0) wrong("[needle_run] expects addresses of " + std::string(kind) + "s, got NULL.");
  std::vector<void*> all;
  for (size_t i = 0; i < count; i++) {
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

double number_at(DType dtype, const void* data, size_t i) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(data)[i];
    case DType::f64:
      return static_cast<const double*>(data)[i];
    case DType::i32:
      return static_cast<const int32_t*>(data)[i];
    case DType::i64:
      return static_cast<double>(static_cast<const int64_t*>(data)[i]);
    case DType::b8:
      return static_cast<const uint8_t*>(data)[i] != 0;
  }
  wrong("[needle_run] a condition has an unknown dtype.");
}

std::string told(const std::vector<double>& numbers) {
  std::string text;
  char one[32];
  for (double n : numbers) {
    std::snprintf(one, sizeof one, "%.17g", n);
    text += (text.empty() ? "" : ", ") + std::string(one);
  }
  return text;
}

// The state of a model, where it has any, for one run; nobody waits, so no lock is held that a forked child would miss.
class Turn {
 public:
  Turn(needle_model& model, const char* caller) : used_(model.has_state ? &model.in_use : nullptr) {
    if (used_ && used_->test_and_set(std::memory_order_acquire))
      wrong("[" + std::string(caller) + "] expects one run at a time of a model that keeps state, got another's.");
  }
  ~Turn() {
    if (used_) used_->clear(std::memory_order_release);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  std::atomic_flag* used_;
};

void check(const Condition& condition, DType dtype, const void* data) {
  std::vector<double> found;
  for (size_t i = 0; i < condition.expected.size(); i++) found.push_back(number_at(dtype, data, i));
  if (found != condition.expected)
    wrong("[needle_run] the model holds for inputs that answer `" + condition.text + "` with " +
          told(condition.expected) + ", got " + told(found) + ".");
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
    made->has_state = made->file.has_state();
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
  guarded([&] { n = static_cast<int>(at(model, plan).stored->results()); });
  return n;
}

NEEDLE_C int needle_input(const needle_model* model, int plan, int index, needle_tensor* tensor) {
  return guarded([&] {
    const StoredPlan& p = *at(model, plan).stored;
    tell(p.input_names, p.inputs, p.inputs.size(), index, "input", tensor);
  });
}

NEEDLE_C int needle_output(const needle_model* model, int plan, int index, needle_tensor* tensor) {
  return guarded([&] {
    const StoredPlan& p = *at(model, plan).stored;
    tell(p.output_names, p.outputs, p.results(), index, "output", tensor);
  });
}

NEEDLE_C const char* needle_isa(const needle_model* model) { return model ? model->plans[0].stored->isa.c_str() : ""; }

NEEDLE_C int needle_run(needle_model* model, int plan, const void* const* inputs, void* const* outputs) {
  return guarded([&] {
    const auto& [stored, ready] = at(model, plan);
    Plan& p = *ready;
    const auto in = places(p.inputs(), p.inputs().size(), inputs, "input");
    auto out = places(p.outputs(), stored->results(), outputs, "output");
    refuse_overlaps(p, in, out);
    std::vector<std::vector<double>> looked_at;  // what conditions are about, aligned for every dtype
    for (const Condition& c : stored->conditions) {
      looked_at.emplace_back(c.expected.size());
      out.push_back(looked_at.back().data());
    }
    std::vector<Pause> pauses;  // one, whose error ends the run before it writes state
    if (!looked_at.empty())
      pauses.push_back({stored->checked, [&, stored = stored] {
                          for (size_t i = 0; i < looked_at.size(); i++)
                            check(stored->conditions[i], p.outputs()[stored->results() + i].dtype, looked_at[i].data());
                        }});
    const Turn turn(*model, "needle_run");
    p.run(in, out, nullptr, pauses);
  });
}

NEEDLE_C int needle_has_state(const needle_model* model) { return model && model->has_state; }

NEEDLE_C int needle_reset(needle_model* model) {
  return guarded([&] {
    at(model, 0);
    const Turn turn(*model, "needle_reset");
    model->file.reset();
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
