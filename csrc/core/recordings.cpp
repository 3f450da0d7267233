#include "core/recordings.h"

#include <algorithm>
#include <exception>
#include <stdexcept>

namespace needle {
namespace {

// A loop that keeps its last result while it makes the next one has two places, an allocator between other work some
// more.
constexpr size_t kFixed = 4, kSeen = 8;

}  // namespace

Recordings::Recordings(Device* device, std::vector<size_t> input_bytes, std::vector<size_t> output_bytes)
    : device_(device), input_bytes_(std::move(input_bytes)), output_bytes_(std::move(output_bytes)) {}

Recordings::~Recordings() {
  if (!any()) return;
  try {
    device_->sync();                 // they may be running
  } catch (const std::exception&) {  // a device that failed says so at its next use
  }
  const Graphs* graphs = device_->backend()->graphs;
  for (const Recording& r : fixed_) graphs->destroy(r.graph);
  if (copying_) graphs->destroy(copying_);
}

void Recordings::run(const Places& places, void* stream, const Start& start) {
  const Graphs* graphs = device_->backend()->graphs;
  for (const Recording& r : fixed_) {
    if (r.places == places) return graphs->launch(r.graph, stream);
  }
  const bool again = seen_before(places);
  if (ran_ && !(again && fixed_.size() < kFixed)) return run_on_copies(places, stream, start);
  start(places, stream);
  if (void* graph = ran_ ? record(places, start) : nullptr) fixed_.push_back({places, graph});
  ran_ = true;
}

bool Recordings::seen_before(const Places& places) {
  if (std::find(seen_.begin(), seen_.end(), places) != seen_.end()) return true;
  if (seen_.size() == kSeen) seen_.erase(seen_.begin());
  seen_.push_back(places);
  return false;
}

void Recordings::run_on_copies(const Places& places, void* stream, const Start& start) {
  const Backend* backend = device_->backend();
  auto hold = [&](const std::vector<size_t>& bytes, std::vector<void*>& to) {
    for (size_t b : bytes) {
      held_.push_back(device_->allocate(b));
      to.push_back(held_.back()->data());
    }
  };
  if (held_.empty()) hold(input_bytes_, copies_.inputs), hold(output_bytes_, copies_.outputs);
  for (size_t i = 0; i < input_bytes_.size(); i++)
    backend->copy(copies_.inputs[i], places.inputs[i], input_bytes_[i], stream);
  if (copying_) {
    backend->graphs->launch(copying_, stream);
  } else {
    start(copies_, stream);
    copying_ = record(copies_, start);
  }
  for (size_t i = 0; i < output_bytes_.size(); i++)
    backend->copy(places.outputs[i], copies_.outputs[i], output_bytes_[i], stream);
}

// The steps at these places as a graph; null where that cannot be.
void* Recordings::record(const Places& places, const Start& start) {
  const Graphs* graphs = device_->backend()->graphs;
  try {
    void* stream = graphs->begin();
    std::exception_ptr error;
    try {
      start(places, stream);
    } catch (...) {
      error = std::current_exception();
    }
    void* graph = graphs->end(stream);  // also what was begun in vain
    if (error && graph) graphs->destroy(graph);
    if (error) std::rethrow_exception(error);
    if (!graph) throw std::runtime_error("[graph] the device cannot record this plan's kernels.");
    return graph;
  } catch (const std::exception& e) {
    error_ = e.what();
    return nullptr;
  }
}

}  // namespace needle
