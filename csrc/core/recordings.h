// The graphs of a plan's frame. Where a call's inputs and outputs lie where they lay before, a graph is recorded at
// these places and copies nothing; all other calls share one over copies of them.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/device.h"

namespace needle {

struct Places {  // of inputs and outputs
  std::vector<void*> inputs, outputs;
  bool operator==(const Places&) const = default;
};

class Recordings {
 public:
  // Puts the steps at these places into a stream.
  using Start = std::function<void(const Places&, void* stream)>;

  // bytes: of every input and output.
  Recordings(Device* device, std::vector<size_t> input_bytes, std::vector<size_t> output_bytes);
  ~Recordings();

  // The first run is step by step. A graph is recorded right behind a run at its places: then the steps' workspace is
  // there, and what kernels choose for these alignments is chosen.
  void run(const Places& places, void* stream, const Start& start);

  bool any() const { return copying_ || !fixed_.empty(); }
  size_t fixed() const { return fixed_.size(); }       // those at places of calls
  const std::string& error() const { return error_; }  // why the device cannot record these steps, empty otherwise

 private:
  struct Recording {
    Places places;
    void* graph;
  };
  bool seen_before(const Places& places);
  void* record(const Places& places, const Start& start);
  void run_on_copies(const Places& places, void* stream, const Start& start);

  Device* device_;
  std::vector<size_t> input_bytes_, output_bytes_;
  bool ran_ = false;
  std::vector<Places> seen_;  // of the last calls, the newest last
  std::vector<Recording> fixed_;
  void* copying_ = nullptr;  // the graph over copies
  Places copies_;
  std::vector<std::shared_ptr<Storage>> held_;  // the copies
  std::string error_;
};

}  // namespace needle
