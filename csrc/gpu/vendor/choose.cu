// Our kernel or the vendor's library: when a problem comes first, their results are compared once and both are timed on
// its own arrays; the faster one is kept.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "gpu/gemm.cuh"
#include "gpu/vendor/agree.h"
#include "gpu/vendor/choose.h"
#include "gpu/vendor/load.h"
#include "gpu/vendor/report.h"
#include "gpu/vendor/table.h"

#ifdef NEEDLE_EMULATION
#include <chrono>
#endif

namespace needle::gpu::vendor {
namespace {

constexpr int kRounds = 7, kMaxRepeats = 20;
constexpr double kRoundMicroseconds = 500, kWarmMicroseconds = 5000;  // a GPU at rest has a fifth of its clock
constexpr int kCallsUntilAgain = 16;                                  // where there was no memory to compare in
// How far a library's result may be from ours, of the largest: sums in another order, or products of this precision.
constexpr float kTolerance[] = {2e-5f, 5e-3f, 5e-3f, 4e-2f};
constexpr int kWorkspaceSlot = 3;  // no product of ours uses scratch memory

enum Mode { kOff, kOn, kAuto };
constexpr const char* kModes[] = {"off", "on", "auto"};

struct State {
  std::mutex mutex;
  Mode mode = kAuto;
  std::string wished;  // a mode's name; empty: that of NEEDLE_GPU_VENDOR
  bool ready = false;  // mode is known, libraries were looked for
  Opened opened[2];
  std::unordered_map<std::string, Choice> choices;  // by key()
};

State& state() {
  static auto* s = new State;  // never destroyed: libraries may be gone by then
  return *s;
}

Mode mode_named(const std::string& name) {
  for (Mode m : {kOff, kOn, kAuto}) {
    if (name == kModes[m]) return m;
  }
  fail("vendor", "NEEDLE_GPU_VENDOR expects off, on or auto", name);
}

void prepare(State& s) {
  if (s.ready) return;
  const char* environment = std::getenv("NEEDLE_GPU_VENDOR");
  std::string name = !s.wished.empty() || !environment ? s.wished : environment;
  s.mode = name.empty() ? kAuto : mode_named(name);
  s.ready = true;
  for (int kind : {kMatmul, kConv2d}) {
    Opened& o = s.opened[kind];
    o = {};
    const Library* library = library_for(kind);
    if (!library) {
      o.text = "this build had no headers of it";
    } else if (s.mode == kOff) {
      o.name = library->name;
      o.text = "vendors' libraries are off";
    } else {
      o.name = library->name;
      o.library = library->open(&o.text) ? library : nullptr;
    }
  }
}

// ---- what a plan depends on -----------------------------------------------------------------------------------------

std::string key(const Problem& p, const Exec* exec) {
  int64_t words[16 + 6 * (2 * 4 + 2)];
  int n = 0;
  int32_t alpha;
  std::memcpy(&alpha, &p.alpha, sizeof alpha);
  for (int64_t v : {int64_t{p.kind}, p.stride_h, p.stride_w, p.pad_top, p.pad_left, p.dilation_h, p.dilation_w,
                    p.groups, p.activation, p.precision, int64_t{alpha}, int64_t{exec->scratch != nullptr}})
    words[n++] = v;
  for (const View* v : {&p.a, &p.b, &p.out, &p.scale, &p.bias, &p.residual}) {
    words[n++] = v->data ? alignment(v->data) : 0;
    if (!v->data) continue;
    for (int d = 0; d < v->rank; d++) words[n++] = v->shape[d], words[n++] = v->stride[d];
  }
  return {reinterpret_cast<const char*>(words), n * sizeof words[0]};
}

struct Span {
  float* first;
  int64_t size;
};

Span span(const View& v) {
  int64_t low, high;
  v.span(&low, &high);
  return {v.as<float>() + low, high - low + 1};
}

// Trying a problem runs it several times, which a result that is an operand, too, would not survive.
bool writes_operand(const Problem& p) {
  Span out = span(p.out);
  for (const View* v : {&p.a, &p.b, &p.scale, &p.bias, &p.residual}) {
    if (!v->data) continue;
    Span in = span(*v);
    if (in.first < out.first + out.size && out.first < in.first + in.size) return true;
  }
  return false;
}

// ---- trying ---------------------------------------------------------------------------------------------------------

bool capturing(gpuStream_t stream) {
#ifdef NEEDLE_EMULATION
  return emulation::capture.graph && emulation::capture.stream == stream;
#else
  gpuStreamCaptureStatus status = gpuStreamCaptureStatusNone;
  if (gpuStreamIsCapturing(stream, &status) == gpuSuccess) return status != gpuStreamCaptureStatusNone;
  (void)gpuGetLastError();  // the default stream, while another one is captured
  return true;
#endif
}

// Microseconds of the device for `repeats` runs.
class Clock {
 public:
  explicit Clock(gpuStream_t stream) : stream_(stream) {
#ifndef NEEDLE_EMULATION
    for (gpuEvent_t& e : at_) check(gpuEventCreate(&e), "vendor");
#endif
  }
  Clock(const Clock&) = delete;
  ~Clock() {
#ifndef NEEDLE_EMULATION
    for (gpuEvent_t e : at_) (void)gpuEventDestroy(e);
#endif
  }
  template <class F>
  double operator()(int repeats, const F& run) {
#ifdef NEEDLE_EMULATION
    check(gpuStreamSynchronize(stream_), "vendor");
    auto from = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; i++) run();
    check(gpuStreamSynchronize(stream_), "vendor");
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - from).count();
#else
    check(gpuEventRecord(at_[0], stream_), "vendor");
    for (int i = 0; i < repeats; i++) run();
    check(gpuEventRecord(at_[1], stream_), "vendor");
    check(gpuEventSynchronize(at_[1]), "vendor");
    float milliseconds = 0;
    check(gpuEventElapsedTime(&milliseconds, at_[0], at_[1]), "vendor");
    return milliseconds * 1e3;
#endif
  }

 private:
  gpuStream_t stream_;
  gpuEvent_t at_[2] = {};
};

struct Memory {
  void* p = nullptr;
  explicit Memory(size_t bytes) {
    if (gpuMalloc(&p, bytes) != gpuSuccess) p = nullptr, (void)gpuGetLastError();
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    if (p && gpuFree(p) != gpuSuccess) (void)gpuGetLastError();
  }
};

double median(double (&of)[kRounds]) {
  std::nth_element(of, of + kRounds / 2, of + kRounds);
  return of[kRounds / 2];
}

// Times both in turns after a warm-up: were one timed after the other, a clock that still rises would favour the
// second.
template <class Ours, class Theirs>
void race(Choice& c, Clock& clock, const Ours& ours, const Theirs& theirs) {
  double spent = 0, once = 0;
  for (int i = 0; i < kMaxRepeats && spent < kWarmMicroseconds; i++) {
    once = std::max(clock(1, ours), 1.0);
    spent += once + clock(1, theirs);
  }
  const int repeats = std::clamp(static_cast<int>(kRoundMicroseconds / once), 1, kMaxRepeats);
  double own[kRounds], other[kRounds];
  for (int i = 0; i < kRounds; i++) {
    if (i % 2) other[i] = clock(repeats, theirs) / repeats;
    own[i] = clock(repeats, ours) / repeats;
    if (i % 2 == 0) other[i] = clock(repeats, theirs) / repeats;
  }
  c.ours_us = median(own);
  c.theirs_us = median(other);
}

// Fills in a choice; afterwards `out` may hold either result. `theirs` gives the library's error code.
template <class Ours, class Theirs>
void decide(Choice& c, const Problem& p, bool timed, gpuStream_t stream, const Ours& ours, const Theirs& theirs) {
  auto refuse = [&](const std::string& why) { c.library = nullptr, c.why = why; };
  auto failed = [&](int error) { c.error = error, refuse("error " + std::to_string(error)); };
  Span out = span(p.out);
  const size_t bytes = static_cast<size_t>(out.size) * sizeof(float);
  Memory copy(bytes), parts(kParts * sizeof(Largest));
  if (!copy.p || !parts.p) {
    c.again = kCallsUntilAgain;
    return refuse("no memory to compare the results in");
  }
  ours();  // so that what lies between a view's elements is the same on both sides
  if (int error = theirs()) return failed(error);
  check(gpuMemcpyAsync(copy.p, out.first, bytes, gpuMemcpyDefault, stream), "vendor");
  ours();
  float apart =
      relative_difference(out.first, static_cast<float*>(copy.p), out.size, static_cast<Largest*>(parts.p), stream);
  if (!(apart <= kTolerance[p.precision])) return refuse("results differ by " + number(apart) + " of the largest");
  if (!timed) return;
  Clock clock(stream);
  int error = 0;
  auto run_theirs = [&] { error = error ? error : theirs(); };
  race(c, clock, ours, run_theirs);
  if (error) return failed(error);
  if (c.ours_us <= c.theirs_us) refuse("slower");
}

void say_once(const char* library, const std::string& why) {
  static bool said = false;
  if (!said) std::fprintf(stderr, "[vendor] %s: %s; needle's own kernels go on (said once).\n", library, why.c_str());
  said = true;
}

}  // namespace

bool wanted(Kind kind) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  prepare(s);
  return s.opened[kind].library != nullptr;
}

void choose(const Problem& p, const Exec* exec, void (*ours)(const void*), const void* context) {
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);  // libraries' handles are for one thread at a time
  const Library* library = s.opened[p.kind].library;
  auto run_ours = [&] { ours(context); };
  if (!library || writes_operand(p)) {
    lock.unlock();
    return run_ours();
  }
  gpuStream_t stream = static_cast<gpuStream_t>(exec->stream);
  void* workspace = nullptr;
  auto run_theirs = [&](Choice& c) {
    if (c.workspace && !workspace) workspace = exec->scratch(kWorkspaceSlot, c.workspace);
    return library->run(c.plan, p, workspace, stream);
  };
  const std::string name = key(p, exec);
  if (auto known = s.choices.find(name); known != s.choices.end() && known->second.again && --known->second.again == 0)
    s.choices.erase(known);
  auto [it, is_new] = s.choices.try_emplace(name);
  Choice& c = it->second;
  if (is_new) {
    if (capturing(stream)) {  // tried when it comes next
      s.choices.erase(it);
      return run_ours();
    }
    c.problem = p;
    try {
      c.plan = library->prepare(p, &c.workspace, &c.why);
      if (c.plan && c.workspace && !exec->scratch) c.why = "a call without scratch memory";
      if (c.plan && c.why.empty()) {
        c.library = library;
        decide(c, p, s.mode == kAuto, stream, run_ours, [&] { return run_theirs(c); });
      }
    } catch (...) {  // the device failed, or an argument of ours: no choice to keep
      if (c.plan) library->forget(c.plan);
      s.choices.erase(it);
      throw;
    }
    if (!c.library && c.plan) library->forget(std::exchange(c.plan, nullptr));
    if (!c.library && c.error) say_once(library->name, c.why);
  }
  if (c.library) {
    int error = run_theirs(c);
    if (!error) return;
    c.library = nullptr;
    c.error = error, c.why = "error " + std::to_string(error);
    library->forget(std::exchange(c.plan, nullptr));
    say_once(library->name, c.why);
  }
  lock.unlock();
  run_ours();
}

std::string report() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  prepare(s);
  std::vector<const Choice*> choices;
  for (auto& [key, choice] : s.choices) choices.push_back(&choice);
  return report(kModes[s.mode], s.opened, choices);
}

void restart(const char* mode) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  for (auto& [key, choice] : s.choices) {
    if (choice.plan) choice.library->forget(choice.plan);
  }
  s.choices.clear();
  s.wished = mode;
  s.ready = false;
}

}  // namespace needle::gpu::vendor
