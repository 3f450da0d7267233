// Faults that the emulation has to find: `faults NAME` prints what came out, "right" where the fault stayed hidden.
#include <cstdio>
#include <cstring>
#include <vector>

#include "gpu/portable.cuh"

using namespace needle::gpu;

namespace {

constexpr int kThreads = 128;

struct Line {
  float v[kThreads];
};

// In ascending order the left neighbour has always written already.
void race(float* out, int barrier) {
  GPU_SHARED(Line, line);
  const int t = static_cast<int>(threadIdx.x);
  line.v[t] = static_cast<float>(t);
  if (barrier) block_sync();
  out[t] = line.v[t ? t - 1 : 0];
}

// The same inside a wave, where a shuffle lets all lanes arrive but orders no memory.
void wave_race(float* out, int barrier) {
  GPU_SHARED(Line, line);
  const int t = static_cast<int>(threadIdx.x), first = t - lane_id();
  line.v[t] = static_cast<float>(t);
  if (barrier)
    wave_sync();
  else
    (void)wave_sum(1);
  out[t] = line.v[first + WAVE - 1 - lane_id()];
}

// Two blocks write one element.
void blocks(float* out, int apart) {
  const int t = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 || !apart) out[t] = static_cast<float>(t + 1000 * (1 - static_cast<int>(blockIdx.x)));
}

// One element too many, which lands where nobody reads.
void overrun(float* out, int inside) {
  GPU_SHARED(Line, line);
  GPU_SHARED(Line, behind);
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0 && !inside) line.v[kThreads] = 7;
  block_sync();
  behind.v[t] = static_cast<float>(t);
  out[t] = behind.v[t];
}

void add(float* out, const float* in) { out[threadIdx.x] = in[threadIdx.x] + 1; }
void fill(float* out, float v) { out[threadIdx.x] = v; }

float* device(float value) {
  void* p = nullptr;
  check(gpuMalloc(&p, kThreads * sizeof(float)), "faults");
  launch(fill, dim3(1), kThreads, 0, nullptr, static_cast<float*>(p), value);
  check(gpuStreamSynchronize(nullptr), "faults");
  return static_cast<float*>(p);
}
std::vector<float> host(const float* p) {
  std::vector<float> v(kThreads);
  check(gpuMemcpyAsync(v.data(), p, kThreads * sizeof(float), gpuMemcpyDefault, nullptr), "faults");
  check(gpuStreamSynchronize(nullptr), "faults");
  return v;
}
gpuStream_t stream() {
  gpuStream_t s = nullptr;
  check(gpuStreamCreateWithFlags(&s, gpuStreamNonBlocking), "faults");
  return s;
}

template <class F>
bool of_kernel(void (*kernel)(float*, int), int sound, unsigned grid, const F& expected) {
  float* out = device(0);
  launch(kernel, dim3(grid), kThreads, 0, nullptr, out, sound);
  const std::vector<float> got = host(out);
  for (int t = 0; t < kThreads; t++)
    if (got[t] != static_cast<float>(expected(t))) return false;
  return true;
}

bool streams(bool wait) {
  float *a = device(0), *b = device(0);
  gpuStream_t first = stream(), second = stream();
  launch(fill, dim3(1), kThreads, 0, first, a, 4.0f);
  if (wait) check(gpuStreamSynchronize(first), "faults");
  launch(add, dim3(1), kThreads, 0, second, b, static_cast<const float*>(a));
  check(gpuStreamSynchronize(second), "faults");
  return host(b)[5] == 5;
}

bool host_buffer(bool wait) {
  float* a = device(0);
  std::vector<float> buffer(kThreads, 3);
  gpuEvent_t done = nullptr;
  check(gpuEventCreateWithFlags(&done, gpuEventDisableTiming), "faults");
  check(gpuMemcpyAsync(a, buffer.data(), kThreads * sizeof(float), gpuMemcpyDefault, nullptr), "faults");
  check(gpuEventRecord(done, nullptr), "faults");
  if (wait) check(gpuEventSynchronize(done), "faults");
  buffer.assign(kThreads, 9);
  return host(a)[5] == 3;
}

bool use_after_free(bool sound) {
  float* a = device(1);
  if (!sound) check(gpuFree(a), "faults");
  float* b = device(2);  // where `a` was, if the allocator hands that out again
  launch(fill, dim3(1), kThreads, 0, nullptr, a, 1.0f);
  return host(b)[5] == 2;
}

bool before_first(bool sound) {
  for (int i = 0; i < 8; i++) {  // arrays lie at either end of their pages, by chance
    float* a = device(2);
    launch(fill, dim3(1), kThreads, 0, nullptr, a - (sound ? 0 : kThreads), 2.0f);
    if (host(a)[5] != 2) return false;
  }
  return true;
}

bool run(const char* name, bool sound) {
  auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("race")) return of_kernel(race, sound, 1, [](int t) { return t ? t - 1 : 0; });
  if (is("wave_race"))
    return of_kernel(wave_race, sound, 1, [](int t) { return t / WAVE * WAVE + WAVE - 1 - t % WAVE; });
  if (is("blocks")) return of_kernel(blocks, sound, 2, [&](int t) { return sound ? t + 1000 : t; });
  if (is("overrun")) return of_kernel(overrun, sound, 1, [](int t) { return t; });
  if (is("streams")) return streams(sound);
  if (is("host_buffer")) return host_buffer(sound);
  if (is("use_after_free")) return use_after_free(sound);
  if (is("before_first")) return before_first(sound);
  fail("faults", "knows no such fault", name);
}

}  // namespace

int main(int, char** argv) {
  try {
    std::puts(run(argv[1], std::strcmp(argv[2], "sound") == 0) ? "right" : "wrong");
  } catch (const std::exception& e) {
    std::puts(e.what());
  }
}
