// Stored plans made to run: their steps with the kernels of this library, checked one by one.
#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>

#include "core/digest.h"
#include "core/operands.h"
#include "core/plan_file.h"
#include "cpu/backend.h"

namespace needle {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

// Steps of a stored plan with their rows, as this library has them.
class Binder {
 public:
  // state: which of the constants steps may write.
  Binder(const StoredPlan& plan, const Plan::Constants& constants, std::vector<bool> state)
      : plan_(plan), written_(plan.outputs.size()), state_(std::move(state)) {
    for (const auto& storage : constants) constants_.push_back(storage->bytes());
    inputs_ = bytes_of(plan.inputs), outputs_ = bytes_of(plan.outputs);
    rows_ = cpu_rows(plan.isa.c_str(), &n_rows_);
    if (!rows_) refuse("this CPU has no " + plan.isa);
  }

  std::vector<Step> steps() {
    std::vector<Step> steps = plan_.steps;
    for (size_t i = 0; i < steps.size(); i++) try {
        bind(steps[i], plan_.kernels[i], plan_.conditions.empty() || i >= plan_.checked);
      } catch (const std::runtime_error& e) {
        refuse("step " + std::to_string(i) + " cannot be run: " + e.what());
      } catch (const std::logic_error& e) {
        refuse("step " + std::to_string(i) + " cannot be run: " + e.what());
      }
    for (size_t i = 0; i < written_.size(); i++)
      if (!written_[i] && outputs_[i]) refuse("output " + std::to_string(i) + " is never written");
    return steps;
  }

 private:
  // may_write: to state, which holds still until the conditions are known to hold.
  void bind(Step& step, const std::string& kernel, bool may_write) {
    auto found = known_.find(kernel);
    if (found == known_.end()) {
      const auto* row = std::find_if(rows_, rows_ + n_rows_, [&](const KernelRow& one) { return kernel == one.name; });
      if (row == rows_ + n_rows_) refuse("there is no kernel " + kernel);
      found = known_.emplace(kernel, RowOperands(row)).first;
    }
    const RowOperands& row = found->second;
    step.row = row.row;
    std::vector<View> views;
    for (const auto* refs : {&step.out, &step.in})
      for (const Ref& ref : *refs) {
        check(ref, refs == &step.out, may_write);
        views.push_back(ref.view);
      }
    const View* in = views.data() + step.out.size();
    row.check_counts(step.out.size(), in, step.in.size(), step.attr.size());
    row.check_dtypes(views.data(), step.out.size(), in, step.in.size());
  }

  void check(const Ref& ref, bool out, bool may_write) {
    if (ref.view.absent()) {
      if (out) refuse("it lacks a result");
      return;
    }
    if (!lies_within(ref.view, ref.offset, bytes(ref))) refuse("it reaches outside its buffer");
    if (out && (ref.space == Space::input || (ref.space == Space::constant && !state_[ref.index])))
      refuse("it writes to an input or a constant");
    if (out && ref.space == Space::constant && !may_write) refuse("it writes state before its conditions are checked");
    if (ref.offset % static_cast<int64_t>(dtype_size(ref.view.dtype))) refuse("an operand lies between two elements");
    if (out && ref.space == Space::output) written_[ref.index] = true;
  }

  size_t bytes(const Ref& ref) const {
    if (ref.space == Space::arena) return plan_.arena_bytes;
    const auto& all = ref.space == Space::constant ? constants_ : ref.space == Space::input ? inputs_ : outputs_;
    if (ref.index < 0 || static_cast<size_t>(ref.index) >= all.size()) refuse("it names a buffer that is not there");
    return all[ref.index];
  }

  static std::vector<size_t> bytes_of(const std::vector<View>& views) {
    std::vector<size_t> bytes;
    for (const View& v : views) bytes.push_back(v.size() * dtype_size(v.dtype));
    return bytes;
  }

  const StoredPlan& plan_;
  std::vector<bool> written_, state_;
  std::vector<size_t> constants_, inputs_, outputs_;
  const KernelRow* rows_ = nullptr;
  int n_rows_ = 0;
  std::map<std::string, RowOperands> known_;
};

}  // namespace

std::unique_ptr<Plan> PlanFile::bind(const StoredPlan& stored, std::shared_ptr<Arenas> arenas) try {
  Plan::Constants constants;
  std::vector<bool> state;
  for (uint64_t index : stored.constants) {
    Constant& c = constants_.at(index);
    if (!c.checked && digest(c.storage->data(), c.storage->bytes()) != c.digest)
      refuse("constant " + std::to_string(index) + " is damaged");
    c.checked = true;
    if (c.written && !c.live) {
      c.live = std::make_shared<Storage>(cpu_backend(), c.storage->bytes());
      std::memcpy(c.live->data(), c.storage->data(), c.storage->bytes());
    }
    state.push_back(c.written);
    constants.push_back(c.written ? c.live : c.storage);
  }
  auto steps = Binder(stored, constants, std::move(state)).steps();
  auto plan = std::make_unique<Plan>(Device::cpu(), std::move(steps), stored.arena_bytes, stored.inputs, stored.outputs,
                                     std::move(arenas));
  plan->set_constants(std::move(constants));
  return plan;
} catch (const std::invalid_argument& e) {
  refused(path_, e);
}

bool PlanFile::has_state() const {
  return std::any_of(constants_.begin(), constants_.end(), [](const Constant& c) { return c.live != nullptr; });
}

void PlanFile::reset() {
  for (Constant& c : constants_)
    if (c.live) std::memcpy(c.live->data(), c.storage->data(), c.storage->bytes());
}

}  // namespace needle
