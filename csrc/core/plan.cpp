#include "core/plan.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

#include "core/operands.h"
#include "core/pool.h"
#include "core/recordings.h"

namespace needle {

struct Plan::Frame {
  struct Border {  // an operand that lives in an input or output: its pointer changes with every run
    View* view;
    Space space;
    int32_t index;
    int64_t offset;
  };
  explicit Frame(Device* device) : scratch(device) {}
  std::shared_ptr<Storage> arena;  // on the CPU only while it runs
  const void* base = nullptr;      // where that begins for which the views were made
  std::shared_ptr<const Constants> constants;
  std::vector<View> views;
  std::vector<Call> calls;
  std::vector<Border> borders;
  Scratch scratch;  // what kernels ask for stays where it is: graphs hold its address
  std::unique_ptr<Recordings> recordings;
};

// A frame for one run, given back even when a kernel throws.
struct Plan::Lease {
  explicit Lease(Plan* plan) : plan(plan), frame(plan->acquire()) {}
  ~Lease() { plan->release(std::move(frame)); }
  Plan* plan;
  std::unique_ptr<Frame> frame;
};

namespace {

using Clock = std::chrono::steady_clock;

size_t bytes_of(const View& v) { return v.size() * dtype_size(v.dtype); }

void check_range(const Step& step, const Ref& ref, size_t bytes) {
  if (!lies_within(ref.view, ref.offset, bytes))
    throw std::out_of_range("[plan] step '" + std::string(step.row->name) + "' reaches outside its buffer of " +
                            std::to_string(bytes) + " bytes.");
}

}  // namespace

std::shared_ptr<Storage> Arenas::take(Device* device, size_t bytes, const void* wanted) {
  std::shared_ptr<Storage> small;  // goes before the new one comes
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it)
      if ((*it)->bytes() >= bytes && (found == free_.end() || (*it)->data() == wanted)) found = it;
    if (found != free_.end()) {
      auto arena = std::move(*found);
      free_.erase(found);
      return arena;
    }
    if (!free_.empty()) {
      small = std::move(free_.back());
      free_.pop_back();
      count_--;
    }
  }
  small.reset();
  auto arena = device->allocate(bytes, "a plan's arena");
  // Plans write all that they read (guarded runs fill it with NaN): this only touches the pages before the first run.
  if (device->is_cpu()) std::memset(arena->data(), 0, bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  count_++;
  return arena;
}

void Arenas::give(std::shared_ptr<Storage> arena) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(std::move(arena));
}

size_t Arenas::count() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return count_;
}

Plan::Plan(Device* device, std::vector<Step> steps, size_t arena_bytes, std::vector<View> inputs,
           std::vector<View> outputs, std::shared_ptr<Arenas> arenas)
    : device_(device),
      steps_(std::move(steps)),
      arena_bytes_(std::max<size_t>(arena_bytes, 64)),
      inputs_(std::move(inputs)),
      outputs_(std::move(outputs)),
      constants_(std::make_shared<Constants>()),
      originals_(constants_),
      arenas_(std::move(arenas)),
      recordable_(device->backend()->graphs != nullptr) {
  auto bytes = [&](const std::vector<View>& views, const Step& step, const Ref& ref) {
    if (ref.index < 0 || ref.index >= static_cast<int>(views.size()))
      throw std::out_of_range("[plan] step '" + std::string(step.row->name) + "' names a border that does not exist.");
    return bytes_of(views[ref.index]);
  };
  for (const Step& step : steps_)
    for (const auto* refs : {&step.out, &step.in})
      for (const Ref& ref : *refs) {
        if (ref.space == Space::arena) check_range(step, ref, arena_bytes_);
        if (ref.space == Space::constant && refs == &step.out) state_.push_back(ref.index);
        if (ref.space == Space::input) check_range(step, ref, bytes(inputs_, step, ref));
        if (ref.space == Space::output) check_range(step, ref, bytes(outputs_, step, ref));
      }
  std::sort(state_.begin(), state_.end());
  state_.erase(std::unique(state_.begin(), state_.end()), state_.end());
}

Plan::~Plan() {
  for (auto& frame : free_) forget(*frame);
}

void Plan::set_constants(Constants constants) {
  for (const Step& step : steps_)
    for (const auto* refs : {&step.out, &step.in})
      for (const Ref& ref : *refs) {
        if (ref.space != Space::constant) continue;
        if (ref.index < 0 || ref.index >= static_cast<int>(constants.size()))
          throw std::out_of_range("[plan] step '" + std::string(step.row->name) + "' names a missing constant.");
        const Storage& storage = *constants[ref.index];
        if (storage.backend() != device_->backend())
          throw std::invalid_argument("[plan] constants of a plan on " + std::string(device_->backend()->name) +
                                      "() are there, got one on " + storage.backend()->name + "().");
        check_range(step, ref, storage.bytes());
      }
  auto originals = std::make_shared<const Constants>(std::move(constants)), fresh = originals;
  if (guard_) {
    Constants copies;
    std::map<const Storage*, std::shared_ptr<Storage>> made;  // constants may be views of one storage
    for (const auto& held : *originals) {
      auto& copy = made[held.get()];
      if (!copy) copy = Guard::copy(held->backend(), held->data(), held->bytes());
      copies.push_back(copy);
    }
    fresh = std::make_shared<const Constants>(std::move(copies));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  constants_.swap(fresh);  // the old ones go after the lock
  originals_.swap(originals);
}

std::shared_ptr<const Plan::Constants> Plan::constants() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return originals_;
}

std::unique_ptr<Plan> Plan::like(const std::vector<int64_t>& numbers, const std::vector<double>& attributes,
                                 size_t arena_bytes) const {
  auto steps = steps_;
  auto inputs = inputs_, outputs = outputs_;
  auto number = numbers.begin();
  auto attribute = attributes.begin();
  auto take = [](auto& at, const auto& all, auto* to, int count) {
    if (all.end() - at < count) throw std::out_of_range("[plan] got too few numbers for its steps.");
    std::copy(at, at + count, to);
    at += count;
  };
  for (Step& step : steps) {
    for (auto* refs : {&step.out, &step.in})
      for (Ref& ref : *refs) {
        if (ref.view.absent()) continue;
        take(number, numbers, &ref.offset, 1);
        take(number, numbers, ref.view.shape, ref.view.rank);
        take(number, numbers, ref.view.stride, ref.view.rank);
      }
    take(attribute, attributes, step.attr.data(), static_cast<int>(step.attr.size()));
  }
  for (auto* views : {&inputs, &outputs})
    for (View& view : *views) {
      take(number, numbers, view.shape, view.rank);
      int64_t stride = 1;
      for (int i = view.rank - 1; i >= 0; stride *= view.shape[i--]) view.stride[i] = stride;
    }
  if (number != numbers.end() || attribute != attributes.end())
    throw std::out_of_range("[plan] got too many numbers for its steps.");
  return std::make_unique<Plan>(device_, std::move(steps), arena_bytes, std::move(inputs), std::move(outputs), arenas_);
}

std::pair<std::vector<int64_t>, std::vector<double>> Plan::numbers() const {
  std::vector<int64_t> numbers;
  std::vector<double> attributes;
  auto give = [](auto& to, const auto* from, size_t count) { to.insert(to.end(), from, from + count); };
  for (const Step& step : steps_) {
    for (const auto* refs : {&step.out, &step.in})
      for (const Ref& ref : *refs) {
        if (ref.view.absent()) continue;
        numbers.push_back(ref.offset);
        give(numbers, ref.view.shape, ref.view.rank);
        give(numbers, ref.view.stride, ref.view.rank);
      }
    give(attributes, step.attr.data(), step.attr.size());
  }
  for (const auto* views : {&inputs_, &outputs_})
    for (const View& view : *views) give(numbers, view.shape, view.rank);
  return {std::move(numbers), std::move(attributes)};
}

void Plan::set_attributes(size_t step, std::vector<double> attributes) {
  if (step >= steps_.size() || attributes.size() != steps_[step].attr.size())
    throw std::out_of_range("[plan] step " + std::to_string(step) + " does not take " +
                            std::to_string(attributes.size()) + " attributes.");
  if (attributes == steps_[step].attr) return;
  std::copy(attributes.begin(), attributes.end(), steps_[step].attr.begin());  // frames hold their address
  if (!recordable_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& frame : free_) forget(*frame);
  graph_error_ = "attributes of its steps change from run to run";
  recordable_ = false;
}

void Plan::guard(std::vector<GuardedBuffer> buffers) {
  if (!device_->is_cpu()) throw std::invalid_argument("[plan] guards are for plans on the CPU.");
  for (const auto& b : buffers)
    if (b.offset < kGuardBytes || b.offset + b.bytes + kGuardBytes > arena_bytes_)
      throw std::out_of_range("[plan] a buffer has no room for its guards.");
  guard_ = std::make_unique<const Guard>(std::move(buffers));
}

size_t Plan::arenas() const { return arenas_->count(); }

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
    }
  }
  if (!frame) frame = std::make_unique<Frame>(device_);
  if (!frame->arena) frame->arena = arenas_->take(device_, arena_bytes_, frame->base);
  if (frame->base != frame->arena->data() || frame->constants != constants) {
    forget(*frame);
    frame->base = frame->arena->data();
    frame->constants = std::move(constants);
    resolve(*frame);
  }
  return frame;
}

void Plan::release(std::unique_ptr<Frame> frame) {
  if (device_->is_cpu()) arenas_->give(std::move(frame->arena));  // elsewhere work may be under way, and graphs hold it
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(std::move(frame));
}

// ---- running -------------------------------------------------------------------------------------------------------

void Plan::start(Frame& frame, const Exec& exec, const std::vector<void*>& inputs, const std::vector<void*>& outputs,
                 double* seconds, const std::vector<Pause>& pauses) const {
  for (const auto& b : frame.borders)
    b.view->data = static_cast<char*>(b.space == Space::input ? inputs[b.index] : outputs[b.index]) + b.offset;
  if (seconds) device_->sync();
  size_t done = 0;
  for (const Pause& pause : pauses) {
    run_steps(frame, exec, done, pause.steps, seconds);
    pause.call();
    done = pause.steps;
  }
  run_steps(frame, exec, done, steps_.size(), seconds);
}

void Plan::run_steps(Frame& frame, const Exec& exec, size_t first, size_t last, double* seconds) const {
  for (size_t i = first; i < last; i++) {
    Call& call = frame.calls[i];
    call.exec = &exec;
    if (guard_) {
      char* arena = static_cast<char*>(frame.arena->data());
      guard_->before(static_cast<int>(i), arena);
      steps_[i].row->run(call);
      guard_->after(static_cast<int>(i), arena, steps_[i].row->name);
      continue;
    }
    if (!seconds) {
      steps_[i].row->run(call);
      continue;
    }
    auto begin = Clock::now();
    steps_[i].row->run(call);
    device_->sync();
    seconds[i] = std::chrono::duration<double>(Clock::now() - begin).count();
  }
}

// On copies of inputs and outputs between zones.
void Plan::run_guarded(Frame& frame, const std::vector<void*>& inputs, const std::vector<void*>& outputs,
                       double* seconds) const {
  std::vector<std::shared_ptr<Storage>> copies;
  std::vector<void*> in, out;
  auto add = [&](const View& v, const void* data, std::vector<void*>& to) {
    copies.push_back(Guard::copy(device_->backend(), data, bytes_of(v)));
    to.push_back(copies.back()->data());
  };
  for (size_t i = 0; i < inputs.size(); i++) add(inputs_[i], inputs[i], in);
  for (const View& v : outputs_) add(v, nullptr, out);
  for (size_t i = 0; i < originals_->size(); i++)  // which another plan may have written
    std::memcpy((*frame.constants)[i]->data(), (*originals_)[i]->data(), (*originals_)[i]->bytes());
  start(frame, cpu_exec(), in, out, seconds);
  for (const Constants* held : {static_cast<const Constants*>(&copies), frame.constants.get()})
    for (const auto& storage : *held)
      if (!Guard::intact(*storage))
        throw std::runtime_error("[plan] a kernel wrote outside of an input, output or constant of " +
                                 std::to_string(storage->bytes()) + " bytes.");
  for (size_t i = 0; i < inputs.size(); i++)
    if (std::memcmp(in[i], inputs[i], bytes_of(inputs_[i])))
      throw std::runtime_error("[plan] a kernel wrote to input " + std::to_string(i) + ".");
  for (size_t i = 0; i < outputs.size(); i++) std::memcpy(outputs[i], out[i], bytes_of(outputs_[i]));
  for (int i : state_) {
    const Storage& original = *(*originals_)[i];
    std::memcpy(original.data(), (*frame.constants)[i]->data(), original.bytes());
  }
}

void Plan::forget(Frame& frame) {
  if (frame.recordings && frame.recordings->any()) graphs_--;
  frame.recordings.reset();
}

std::string Plan::graph_error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return graph_error_;
}

void Plan::run(const std::vector<void*>& inputs, const std::vector<void*>& outputs, double* seconds,
               const std::vector<Pause>& pauses) {
  for (size_t i = 0; i < pauses.size(); i++)
    if (pauses[i].steps > steps_.size() || (i && pauses[i].steps < pauses[i - 1].steps))
      throw std::out_of_range("[plan] pauses expect steps in their order, got " + std::to_string(pauses[i].steps) +
                              ".");
  Lease lease(this);
  const bool within = device_->is_cpu() && !guard_;
  launch(*lease.frame, inputs, outputs, seconds, within ? pauses : std::vector<Pause>());
  for (int i : state_) (*originals_)[i]->wrote();
  if (!within)
    for (const Pause& pause : pauses) pause.call();
  runs_++;
}

void Plan::launch(Frame& frame, const std::vector<void*>& inputs, const std::vector<void*>& outputs, double* seconds,
                  const std::vector<Pause>& pauses) {
  if (device_->is_cpu()) {
    LiveRun live(seconds_.load(std::memory_order_relaxed));
    const auto begin = Clock::now();
    guard_ ? run_guarded(frame, inputs, outputs, seconds) : start(frame, cpu_exec(), inputs, outputs, seconds, pauses);
    seconds_.store(std::chrono::duration<double>(Clock::now() - begin).count(), std::memory_order_relaxed);
    return;
  }
  auto put = [&](const Places& places, void* stream) {
    start(frame, Device::exec(&frame.scratch, stream), places.inputs, places.outputs, seconds);
  };
  if (seconds || !recordable_) return put({inputs, outputs}, device_->stream());
  if (!frame.recordings) {
    auto bytes = [](const std::vector<View>& views) {
      std::vector<size_t> all;
      for (const View& v : views) all.push_back(bytes_of(v));
      return all;
    };
    frame.recordings = std::make_unique<Recordings>(device_, bytes(inputs_), bytes(outputs_));
  }
  const bool had = frame.recordings->any();
  frame.recordings->run({inputs, outputs}, device_->stream(), put);
  if (!had && frame.recordings->any()) graphs_++;
  if (frame.recordings->error().empty()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  graph_error_ = frame.recordings->error();
  recordable_ = false;
}

}  // namespace needle
