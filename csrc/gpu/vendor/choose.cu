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
#include "gpu/vendor/finish.h"
#include "gpu/vendor/fold.h"
#include "gpu/vendor/load.h"
#include "gpu/vendor/report.h"
#include "gpu/vendor/table.h"

#ifdef NEEDLE_EMULATION
#include <chrono>
#endif

namespace needle::gpu::vendor {
namespace {

constexpr int kRounds = 7, kMaxRepeats = 20, kTrials = 5;
constexpr size_t kWays = 4;                                           // of a library that are timed
constexpr double kRoundMicroseconds = 500, kWarmMicroseconds = 5000;  // a GPU at rest has a fifth of its clock
constexpr int kCallsUntilAgain = 16;                                  // where there was no memory to compare in
// How far a library's result may be from ours, of the largest: sums in another order, or products of this precision.
constexpr float kTolerance[] = {2e-5f, 5e-3f, 5e-3f, 4e-2f};
constexpr float kSumTolerance = 6e-5f;  // of exact sums over all pixels of all images
constexpr int kWorkspaceSlot = 3;       // no product of ours uses scratch memory

enum Mode { kOff, kOn, kAuto };
constexpr const char* kModes[] = {"off", "on", "auto"};

struct State {
  std::mutex mutex;
  Mode mode = kAuto;
  std::string wished;                               // a mode's name; empty: that of NEEDLE_GPU_VENDOR
  bool ready = false;                               // mode is known, libraries were looked for
  Opened opened[2];                                 // for products and for convolutions
  std::unordered_map<std::string, Choice> choices;  // by key()
};

int side(Kind kind) { return kind == kMatmul ? 0 : 1; }

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
  for (Kind kind : {kMatmul, kConv2d}) {
    Opened& o = s.opened[side(kind)];
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

// A product may write over what it adds, element by element.
bool in_place(const Problem& p) {
  bool same = p.kind == kMatmul && p.residual.data && p.residual.data == p.out.data;
  for (int d = 0; d < p.out.rank; d++) same = same && (p.out.shape[d] == 1 || p.out.stride[d] == p.residual.stride[d]);
  return same;
}

std::string key(const Problem& p, const Exec* exec) {
  int64_t words[16 + 6 * (2 * 4 + 2)];
  int n = 0;
  int32_t alpha;
  std::memcpy(&alpha, &p.alpha, sizeof alpha);
  for (int64_t v :
       {int64_t{p.kind}, p.stride_h, p.stride_w, p.pad_top, p.pad_left, p.dilation_h, p.dilation_w, p.groups,
        p.activation, p.precision, int64_t{alpha}, int64_t{exec->scratch != nullptr}, int64_t{in_place(p)}})
    words[n++] = v;
  for (const View* v : {&p.a, &p.b, &p.out, &p.scale, &p.bias, &p.residual}) {
    words[n++] = v->data ? alignment(v->data) : 0;
    if (!v->data) continue;
    for (int d = 0; d < v->rank; d++) words[n++] = v->shape[d], words[n++] = v->stride[d];
  }
  return {reinterpret_cast<const char*>(words), n * sizeof words[0]};
}

float tolerance(const Problem& p) {
  return p.kind == kConv2dWeightGrad && p.precision == kExact ? kSumTolerance : kTolerance[p.precision];
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

// Whether a run would find other operands than the one before.
bool writes_operand(const Problem& p) {
  Span out = span(p.out);
  for (const View* v : {&p.a, &p.b, &p.scale, &p.bias, &p.residual}) {
    if (!v->data || (v == &p.residual && in_place(p))) continue;
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

// What a library gets of a problem whose epilogue's end is ours.
Problem without(Problem p, After after) {
  if (after >= kActivation) p.activation = kNone;
  if (after == kAll) p.scale = p.bias = p.residual = {};
  return p;
}

// And what that leaves to `finish`.
Problem rest(Problem p, After after) {
  if (after == kActivation) p.scale = p.bias = p.residual = {};
  return p;
}

// The library's ways, with as much of the epilogue as it has; none, and why not.
std::vector<Attempt> attempts_of(const Library& library, const Problem& p, bool timed, std::string* why) {
  std::vector<Attempt> found;
  const bool more = p.scale.data || p.bias.data || p.residual.data;
  const bool parts[] = {true, p.activation != kNone, more && !in_place(p)};
  // In exact float32 cuDNN's fused engines can take three times as long as the convolution alone.
  const bool apart = timed && p.kind != kMatmul && p.precision == kExact;
  auto add = [&](const Problem& problem, bool is_folded) {
    for (After end : {kNothing, kActivation, kAll}) {
      std::string reason;
      if (!parts[end]) continue;
      const std::vector<Way> ways = library.prepare(without(problem, end), timed ? kWays : 1, &reason);
      for (const Way& way : ways) found.push_back({way, end, is_folded});
      if (why->empty()) *why = reason;
      if (!ways.empty() && !apart) return;
    }
  };
  add(p, false);
  void* memory = reinterpret_cast<void*>(uintptr_t{256});  // of which a library reads the alignment alone
  if (can_fold(p) && (timed || found.empty())) add(folded(p, memory), true);
  if (!found.empty()) why->clear();
  return found;
}

// Leaves the best of the library's ways that agrees with ours in c.taken, of which `run` makes one call and gives the
// library's error; c.library is the library if it is faster, too. Afterwards `out` may hold any result.
template <class Ours, class Run>
void decide(Choice& c, const Library* library, const std::vector<Attempt>& attempts, bool timed, gpuStream_t stream,
            const Ours& ours, const Run& run) {
  const Problem& p = c.problem;
  Span out = span(p.out);
  const size_t bytes = static_cast<size_t>(out.size) * sizeof(float);
  const bool kept = in_place(p);
  Memory copy(bytes), parts(kParts * sizeof(Largest)), original(kept ? bytes : 1);
  auto reset = [&](void* to, const void* from) {
    if (kept) check(gpuMemcpyAsync(to, from, bytes, gpuMemcpyDefault, stream), "vendor");
  };
  if (!copy.p || !parts.p || !original.p) {
    c.again = kCallsUntilAgain, c.why = "no memory to compare the results in";
    return;
  }
  std::vector<Attempt> good;
  reset(original.p, out.first);
  for (const Attempt& attempt : attempts) {
    ours();  // so that what lies between a view's elements is the same on both sides
    reset(out.first, original.p);
    if (int error = run(attempt)) {
      c.error = error, c.why = "error " + std::to_string(error);
      reset(out.first, original.p);
      continue;
    }
    check(gpuMemcpyAsync(copy.p, out.first, bytes, gpuMemcpyDefault, stream), "vendor");
    reset(out.first, original.p);
    ours();
    float apart =
        relative_difference(out.first, static_cast<float*>(copy.p), out.size, static_cast<Largest*>(parts.p), stream);
    reset(out.first, original.p);
    if (apart <= tolerance(p)) {
      good.push_back(attempt);
    } else {
      c.why = "results differ by " + number(apart) + " of the largest";
    }
  }
  if (good.empty()) return;
  c.taken = good[0];
  if (timed) {
    Clock clock(stream);
    int error = 0;
    double least = HUGE_VAL;
    auto theirs = [&] { error = error ? error : run(c.taken); };
    for (size_t i = 0; good.size() > 1 && i < good.size(); i++) {
      const Attempt best = std::exchange(c.taken, good[i]);
      double us = HUGE_VAL;
      for (int n = 0; n < kTrials; n++) us = std::min(us, clock(1, theirs));
      if (us >= least) c.taken = best;
      least = std::min(us, least);
    }
    race(c, clock, ours, theirs);
    reset(out.first, original.p);
    if (error) c.error = error, c.why = "error " + std::to_string(error);
    if (!error && c.ours_us <= c.theirs_us) c.why = "slower";
    if (error || c.ours_us <= c.theirs_us) return;
  }
  c.library = library, c.error = 0, c.why.clear();
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
  return s.opened[side(kind)].library != nullptr;
}

void choose(const Problem& p, const Exec* exec, void (*ours)(const void*), const void* context) {
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);  // libraries' handles are for one thread at a time
  const Library* library = s.opened[side(p.kind)].library;
  auto run_ours = [&] { ours(context); };
  if (!library || writes_operand(p)) {
    lock.unlock();
    return run_ours();
  }
  gpuStream_t stream = static_cast<gpuStream_t>(exec->stream);
  auto run_theirs = [&](const Attempt& a) {
    const size_t made = a.folded ? fold_bytes(p) : 0, bytes = made + a.way.workspace;
    char* memory = bytes ? static_cast<char*>(exec->scratch(kWorkspaceSlot, bytes)) : nullptr;
    if (a.folded) fold(p, memory, stream);
    const Problem given = without(a.folded ? folded(p, memory) : p, a.after);
    if (int error = library->run(a.way.plan, given, a.way.workspace ? memory + made : nullptr, stream)) return error;
    if (a.after != kNothing) finish(rest(p, a.after), stream);
    return 0;
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
    std::vector<Attempt> attempts;
    auto forget_all_but = [&](void* kept) {
      for (const Attempt& a : attempts) {
        if (a.way.plan != kept) library->forget(a.way.plan);
      }
    };
    try {
      attempts = attempts_of(*library, p, s.mode == kAuto, &c.why);
      if (!exec->scratch) {
        auto needy = std::partition(attempts.begin(), attempts.end(),
                                    [](const Attempt& a) { return !a.way.workspace && !a.folded; });
        if (needy == attempts.begin() && !attempts.empty()) c.why = "a call without scratch memory";
        for (auto a = needy; a != attempts.end(); ++a) library->forget(a->way.plan);
        attempts.erase(needy, attempts.end());
      }
      if (!attempts.empty()) decide(c, library, attempts, s.mode == kAuto, stream, run_ours, run_theirs);
    } catch (...) {  // the device failed, or an argument of ours: no choice to keep
      forget_all_but(nullptr);
      s.choices.erase(it);
      throw;
    }
    forget_all_but(c.library ? c.taken.way.plan : nullptr);
    if (!c.library && c.error) say_once(library->name, c.why);
  }
  if (c.library) {
    int error = run_theirs(c.taken);
    if (!error) return;
    c.library = nullptr;
    c.error = error, c.why = "error " + std::to_string(error);
    library->forget(c.taken.way.plan);
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
    if (choice.library) choice.library->forget(choice.taken.way.plan);
  }
  s.choices.clear();
  s.wished = mode;
  s.ready = false;
}

}  // namespace needle::gpu::vendor
