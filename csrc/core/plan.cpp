#include "core/plan.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/pool.h"

namespace needle {

struct Plan::Frame {
  struct Border {  // an operand that lives in an input or output: its pointer changes with every run
    View* view;
    Space space;
    int32_t index;
    int64_t offset;
  };
  std::unique_ptr<Storage> arena;
  std::shared_ptr<const Constants> constants;
  std::vector<View> views;
  std::vector<Call> calls;
  std::vector<Border> borders;
};

namespace {

// First and last byte (relative to the view's pointer) that a view reaches.
std::pair<int64_t, int64_t> extent(const View& v) {
  int64_t low = 0, high = 0, size = static_cast<int64_t>(dtype_size(v.dtype));
  for (int i = 0; i < v.rank; i++) {
    if (v.shape[i] == 0) return {0, 0};
    int64_t reach = (v.shape[i] - 1) * v.stride[i];
    (reach < 0 ? low : high) += reach;
  }
  return {low * size, (high + 1) * size};
}

void check_range(const Step& step, const Ref& ref, size_t bytes) {
  auto [low, high] = extent(ref.view);
  if (ref.offset + low < 0 || ref.offset + high > static_cast<int64_t>(bytes))
    throw std::out_of_range("[plan] step '" + std::string(step.row->name) + "' reaches outside its buffer of " +
                            std::to_string(bytes) + " bytes.");
}

}  // namespace

Plan::Plan(const Backend* backend, std::vector<Step> steps, size_t arena_bytes, std::vector<View> inputs,
           std::vector<View> outputs)
    : backend_(backend),
      steps_(std::move(steps)),
      arena_bytes_(std::max<size_t>(arena_bytes, 64)),
      inputs_(std::move(inputs)),
      outputs_(std::move(outputs)),
      constants_(std::make_shared<Constants>()) {
  auto bytes = [&](const std::vector<View>& views, const Step& step, const Ref& ref) {
    if (ref.index < 0 || ref.index >= static_cast<int>(views.size()))
      throw std::out_of_range("[plan] step '" + std::string(step.row->name) + "' names a border that does not exist.");
    return views[ref.index].size() * dtype_size(views[ref.index].dtype);
  };
  for (const Step& step : steps_)
    for (const auto* refs : {&step.out, &step.in})
      for (const Ref& ref : *refs) {
        if (ref.space == Space::arena) check_range(step, ref, arena_bytes_);
        if (ref.space == Space::input) check_range(step, ref, bytes(inputs_, step, ref));
        if (ref.space == Space::output) check_range(step, ref, bytes(outputs_, step, ref));
      }
}

Plan::~Plan() = default;

void Plan::set_constants(Constants constants) {
  for (const Step& step : steps_)
    for (const Ref& ref : step.in)
      if (ref.space == Space::constant) {
        if (ref.index < 0 || ref.index >= static_cast<int>(constants.size()))
          throw std::out_of_range("[plan] step '" + std::string(step.row->name) + "' names a missing constant.");
        check_range(step, ref, constants[ref.index]->bytes());
      }
  auto fresh = std::make_shared<const Constants>(std::move(constants));
  std::lock_guard<std::mutex> lock(mutex_);
  constants_ = std::move(fresh);
}

size_t Plan::frames() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return frames_;
}

void Plan::resolve(Frame& frame) const {
  size_t count = 0;
  for (const Step& step : steps_) count += step.out.size() + step.in.size();
  frame.views.clear(), frame.calls.clear(), frame.borders.clear();
  frame.views.reserve(count);
  auto place = [&](const Ref& ref) {
    View view = ref.view;
    if (ref.space == Space::arena) view.data = static_cast<char*>(frame.arena->data()) + ref.offset;
    if (ref.space == Space::constant)
      view.data = static_cast<char*>((*frame.constants)[ref.index]->data()) + ref.offset;
    frame.views.push_back(view);
    if (ref.space == Space::input || ref.space == Space::output)
      frame.borders.push_back({&frame.views.back(), ref.space, ref.index, ref.offset});
  };
  for (const Step& step : steps_) {
    const View* out = frame.views.data() + frame.views.size();
    for (const Ref& ref : step.out) place(ref);
    const View* in = frame.views.data() + frame.views.size();
    for (const Ref& ref : step.in) place(ref);
    frame.calls.push_back(
        {out, in, step.attr.data(), static_cast<int>(step.out.size()), static_cast<int>(step.in.size()), nullptr});
  }
}

std::unique_ptr<Plan::Frame> Plan::acquire() {
  std::unique_ptr<Frame> frame;
  std::shared_ptr<const Constants> constants;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    constants = constants_;
    if (!free_.empty()) {
      frame = std::move(free_.back());
      free_.pop_back();
    } else {
      frames_++;
    }
  }
  bool fresh = !frame;
  if (fresh) {
    frame = std::make_unique<Frame>();
    frame->arena = std::make_unique<Storage>(backend_, arena_bytes_);
    std::memset(frame->arena->data(), 0, arena_bytes_);  // padded channels start as zeros, never as NaN
  }
  if (fresh || frame->constants != constants) {
    frame->constants = std::move(constants);
    resolve(*frame);
  }
  return frame;
}

void Plan::release(std::unique_ptr<Frame> frame) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(std::move(frame));
}

void Plan::run(const std::vector<void*>& inputs, const std::vector<void*>& outputs, double* seconds) {
  auto frame = acquire();
  for (const auto& b : frame->borders)
    b.view->data = static_cast<char*>(b.space == Space::input ? inputs[b.index] : outputs[b.index]) + b.offset;
  {
    using clock = std::chrono::steady_clock;
    LiveRun live(seconds_.load(std::memory_order_relaxed));
    Exec exec = cpu_exec();
    const auto begin = clock::now();
    for (size_t i = 0; i < steps_.size(); i++) {
      Call& call = frame->calls[i];
      call.exec = &exec;
      if (!seconds) {
        steps_[i].row->run(call);
        continue;
      }
      auto start = clock::now();
      steps_[i].row->run(call);
      seconds[i] = std::chrono::duration<double>(clock::now() - start).count();
    }
    seconds_.store(std::chrono::duration<double>(clock::now() - begin).count(), std::memory_order_relaxed);
  }
  release(std::move(frame));
}

}  // namespace needle
