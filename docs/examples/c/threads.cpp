// One model, run by several threads on pictures of their own: threads model.ndlc [threads] [runs of each]
// c++ -std=c++17 threads.cpp $(python -m needle.config --cflags --libs) -pthread -o threads
// Each thread looks whether every result is the one that the model gives alone.
#include <needle.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

void check(int status) {
  if (status != 0) throw std::runtime_error(needle_last_error());
}

struct Close {
  void operator()(needle_model* model) const { needle_close(model); }
};
using Model = std::unique_ptr<needle_model, Close>;

Model open(const char* path) {
  needle_model* model = nullptr;
  check(needle_open(path, &model));
  return Model(model);
}

using Memory = std::vector<std::vector<std::uint64_t>>;  // aligned for every dtype

// Memory for the inputs and outputs of plan 0; floats of inputs are numbers that depend on `seed`, others 0.
class Buffers {
 public:
  Buffers(const Model& model, std::uint32_t seed) {
    needle_tensor t;
    for (int i = 0; i < needle_input_count(model.get(), 0); i++) {
      check(needle_input(model.get(), 0, i, &t));
      std::vector<float> numbers(t.dtype == NEEDLE_FLOAT32 ? t.bytes / sizeof(float) : 0);
      for (float& x : numbers) x = static_cast<float>((seed = seed * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f;
      memory_.emplace_back((t.bytes + 7) / 8);
      if (!numbers.empty()) std::memcpy(memory_.back().data(), numbers.data(), t.bytes);
      inputs_.push_back(memory_.back().data());
    }
    for (int i = 0; i < needle_output_count(model.get(), 0); i++) {
      check(needle_output(model.get(), 0, i, &t));
      results_.emplace_back((t.bytes + 7) / 8);
      outputs_.push_back(results_.back().data());
    }
  }

  const Memory& run(const Model& model) {
    check(needle_run(model.get(), 0, inputs_.data(), outputs_.data()));
    return results_;
  }

 private:
  Memory memory_, results_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 2) throw std::runtime_error("threads expects a model.");
  const int count = argc > 2 ? std::atoi(argv[2]) : 4, runs = argc > 3 ? std::atoi(argv[3]) : 20;
  const Model model = open(argv[1]);
  std::vector<Buffers> buffers;
  std::vector<Memory> alone;
  for (int i = 0; i < count; i++) {
    buffers.emplace_back(model, static_cast<std::uint32_t>(i));
    alone.push_back(buffers.back().run(model));
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < count; i++)
    threads.emplace_back([&, i] {
      try {
        for (int k = 0; k < runs; k++) wrong += buffers[i].run(model) != alone[i];
      } catch (const std::exception& e) {
        std::fprintf(stderr, "%s\n", e.what());
        wrong++;
      }
    });
  for (auto& t : threads) t.join();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%d threads, %d runs each, %s: %.2f ms a run, %d wrong\n", count, runs, needle_isa(model.get()),
              1e3 * seconds / (count * runs), wrong.load());
  return wrong != 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
