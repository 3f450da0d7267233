// Plans with their constants as one file, whose constants are used where they lie, but for state, which steps write:
// the file holds its first values, and plans work on one copy. A file may be anything: what `read` gives and `bind`
// makes of it has names, counts, dtypes and places that fit; what kernels make of sizes that do not fit together is
// left to the digest.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/file_map.h"
#include "core/plan.h"

namespace needle {

// What numbers an output has to have; other inputs than these are refused, with the text of the condition.
struct Condition {
  std::vector<double> expected;
  std::string text;
};

// A plan whose steps name their kernels.
struct StoredPlan {
  std::string isa;  // whose kernels it is made of and its weights are packed for
  size_t arena_bytes = 0;
  std::vector<std::string> input_names, output_names;
  std::vector<View> inputs, outputs;
  std::vector<Condition> conditions;  // on the outputs behind the results, one for each
  size_t checked = 0;                 // steps after which these are in memory; none of them writes state
  std::vector<uint64_t> constants;    // of each of its constants, which of the file's it is
  std::vector<std::string> kernels;
  std::vector<Step> steps;  // without rows

  size_t results() const { return outputs.size() - conditions.size(); }
};

class PlanFile {
 public:
  // Throws std::invalid_argument, with a sentence about `path`, for what is no such file of this build of the library.
  static PlanFile read(const std::string& path);

  // checks: what computes the conditions' outputs before the plan runs, null where the plan itself does.
  void add(const Plan& plan, const Plan* checks, std::vector<std::string> input_names,
           std::vector<std::string> output_names, std::vector<Condition> conditions);
  void add(const PlanFile& other);  // all of its plans
  void write(const std::string& path) const;

  const std::vector<StoredPlan>& plans() const { return plans_; }
  // One of the plans, made to run; std::invalid_argument, with a sentence, where it cannot.
  std::unique_ptr<Plan> bind(const StoredPlan& stored, std::shared_ptr<Arenas> arenas);
  bool has_state() const;  // of the plans that were bound
  void reset();            // gives it its first values again

 private:
  // Throws what was wrong as a sentence about a file.
  [[noreturn]] static void refused(const std::string& path, const std::exception& e);

  struct Constant {
    std::shared_ptr<Storage> storage;
    uint64_t digest = 0;
    bool written = false;                // it is state
    std::shared_ptr<Storage> live = {};  // that of the plans that were bound
    bool checked = false;
  };
  std::string path_;  // of the file that was read
  std::vector<StoredPlan> plans_;
  std::vector<Constant> constants_;
};

}  // namespace needle
