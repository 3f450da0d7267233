// Does this device do what the kernels rely on? Each check is one small kernel with a known answer; hardware runs them
// too. In the emulation, misuse that hardware would let pass in silence has to be an error.
#include <cstdio>
#include <vector>

#include "gpu/mma.cuh"
#include "gpu/portable.cuh"

namespace needle::gpu {
namespace {

constexpr int kSide = 16, kBlock = kSide * kSide;

__global__ void check_sum(uint64_t* out) {  // twice in a row: the second must not meet values of the first
  int sum = wave_sum(lane_id() + 1);
  out[threadIdx.x] = sum + 1000000ull * wave_sum(lane_id());
}

__global__ void check_groups(uint64_t* out) {
  int i = lane_id();
  int pair = shfl_xor<8>(i, 5), sum = wave_sum<8>(i), last = shfl<16>(i, 15), next = shfl_down<WAVE>(i, 1);
  double wide = shfl_xor<WAVE>(i + 0.5, WAVE / 2);
  out[threadIdx.x] =
      pair + 100ull * sum + 100000ull * last + 10000000ull * next + 1000000000ull * static_cast<int>(2 * wide);
}

__global__ void check_max(uint64_t* out) {
  float top = wave_max(lane_id() == WAVE - 3 ? 7.0f : -1.0f);
  float nan = wave_max(lane_id() == 1 ? __builtin_nanf("") : 1.0f);
  out[threadIdx.x] = static_cast<uint64_t>(top) + (nan != nan ? 100 : 0);
}

__global__ void check_ballot(uint64_t* out) { out[threadIdx.x] = ballot(lane_id() % 3 == 0); }

struct Square {
  int cell[kSide][kSide + 1];
};

__global__ void check_transpose(uint64_t* out) {  // in place and repeated: either missing barrier changes the result
  GPU_SHARED(Square, square);
  int row = threadIdx.x / kSide, column = threadIdx.x % kSide;
  square.cell[row][column] = threadIdx.x;
  for (int turn = 0; turn < 3; turn++) {
    block_sync();
    int v = square.cell[column][row];
    block_sync();
    square.cell[row][column] = v + 1;
  }
  block_sync();
  out[threadIdx.x] = square.cell[row][column];
}

__global__ void check_neighbour(uint64_t* out) {  // dynamic shared memory, written and read within a wave
  int* line = dynamic_shared<int>();
  int base = threadIdx.x - lane_id();
  line[threadIdx.x] = threadIdx.x;
  wave_sync();
  int v = line[base + WAVE - 1 - lane_id()];
  wave_sync();
  line[threadIdx.x] = v * 2;
  wave_sync();
  out[threadIdx.x] = line[base + (lane_id() + 1) % WAVE];
}

__global__ void check_atomic(uint64_t* out, int* count) {
  atomic_add(count, 1);
  if (blockIdx.x + blockIdx.y == 0) out[threadIdx.x] = 0;
}

// Whole numbers that every precision holds, no two rows and no two columns alike.
__host__ __device__ inline int factor_a(int i, int k) { return (5 * i * i + 3 * i * k + 11 * k) % 17; }
__host__ __device__ inline int factor_b(int j, int k) { return (7 * j * j + 5 * j * k + 2 * k + 3) % 17; }

template <int P>
struct alignas(16) Product {
  Element<P> a[kSide][kSide + 16 / sizeof(Element<P>)], b[kSide][kSide + 16 / sizeof(Element<P>)];
  float sums[kSide][kSide];
};

template <int P>
__global__ void check_product(uint64_t* out) {  // by one wave, added up twice
  GPU_SHARED(Product<P>, product);
  int row = threadIdx.x / kSide, column = threadIdx.x % kSide;
  product.a[row][column] = convert<P>(static_cast<float>(factor_a(row, column)));
  product.b[row][column] = convert<P>(static_cast<float>(factor_b(row, column)));
  block_sync();
  if (threadIdx.x / WAVE == kBlock / WAVE - 1) {
    constexpr int kLine = sizeof product.a[0] / sizeof product.a[0][0];
    Fragment<P> a, b;
    a.load(product.a[0], kLine);
    b.load(product.b[0], kLine);
    Sums sums;
    sums.add(a, b);
    sums.add(a, b);
    for (int e = 0; e < Sums::kSums; e++) product.sums[Sums::row(e)][Sums::column(e)] = sums.v[e];
  }
  block_sync();
  float sum = product.sums[row][column];
  out[threadIdx.x] = sum >= 0 && sum < 1e6f ? static_cast<uint64_t>(sum) : ~0ull;  // else far from any, or NaN
}

uint64_t expected_product(int i, int j) {
  uint64_t sum = 0;
  for (int k = 0; k < kSide; k++) sum += 2 * factor_a(i, k) * factor_b(j, k);
  return sum;
}

uint64_t expected_groups(int i) {
  int first = i / 8 * 8, next = i + 1 < WAVE ? i + 1 : i;
  return (i ^ 5) + 100ull * (8 * first + 28) + 100000ull * (i / 16 * 16 + 15) + 10000000ull * next +
         1000000000ull * (2 * (i ^ (WAVE / 2)) + 1);
}

uint64_t expected_ballot() {
  uint64_t bits = 0;
  for (int i = 0; i < WAVE; i += 3) bits |= 1ull << i;
  return bits;
}

struct Memory {
  void* p = nullptr;
  explicit Memory(size_t bytes) { check(gpuMalloc(&p, bytes), "self_check"); }
  ~Memory() { (void)gpuFree(p); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};

template <class Launch, class Expected>
void run_check(const char* name, const Launch& start, const Expected& expected) {
  Memory out(kBlock * sizeof(uint64_t));
  std::vector<uint64_t> got(kBlock);
  start(static_cast<uint64_t*>(out.p));
  check(gpuMemcpyAsync(got.data(), out.p, kBlock * sizeof(uint64_t), gpuMemcpyDefault, nullptr), "self_check");
  check(gpuStreamSynchronize(nullptr), "self_check");
  for (int t = 0; t < kBlock; t++) {
    uint64_t want = expected(t);
    if (got[t] != want) {
      fail("self_check", std::string(name) + " of thread " + std::to_string(t) + " expects " + std::to_string(want),
           std::to_string(got[t]));
    }
  }
}

void self_check() {
  gpuStream_t s = nullptr;
  auto simple = [&](void (*kernel)(uint64_t*), size_t shared = 0) {
    return [=](uint64_t* out) { launch(kernel, dim3(1), kBlock, shared, s, out); };
  };
  run_check("sum", simple(check_sum), [](int) { return WAVE * (WAVE + 1) / 2 + 1000000ull * (WAVE * (WAVE - 1) / 2); });
  run_check("groups", simple(check_groups), [](int t) { return expected_groups(t % WAVE); });
  run_check("max", simple(check_max), [](int) { return 107; });
  run_check("ballot", simple(check_ballot), [](int) { return expected_ballot(); });
  run_check("transpose", simple(check_transpose), [](int t) { return t % kSide * kSide + t / kSide + 3; });
  run_check("neighbour", simple(check_neighbour, kBlock * sizeof(int)),
            [](int t) { return 2 * (t / WAVE * WAVE + WAVE - 1 - (t % WAVE + 1) % WAVE); });
  auto product = [](int t) { return expected_product(t / kSide, t % kSide); };
  run_check("TF32 product", simple(check_product<kTf32>), product);
  run_check("float16 product", simple(check_product<kFloat16>), product);
  run_check("bfloat16 product", simple(check_product<kBfloat16>), product);
  Memory count(sizeof(int));
  int zero = 0, total = 0;
  check(gpuMemcpyAsync(count.p, &zero, sizeof zero, gpuMemcpyDefault, s), "self_check");
  run_check(
      "atomic", [&](uint64_t* out) { launch(check_atomic, dim3(5, 3), kBlock, 0, s, out, static_cast<int*>(count.p)); },
      [](int) { return 0; });
  check(gpuMemcpyAsync(&total, count.p, sizeof total, gpuMemcpyDefault, s), "self_check");
  check(gpuStreamSynchronize(s), "self_check");
  if (total != 15 * kBlock)
    fail("self_check", "the atomic count expects " + std::to_string(15 * kBlock), std::to_string(total));
}

#if defined(NEEDLE_EMULATION)
void misuse_lost_lane(uint64_t* out) {
  if (lane_id() == 3) return;
  out[threadIdx.x] = wave_sum(1);
}
void misuse_half_barrier(uint64_t* out) {
  if (threadIdx.x < kBlock / 2) block_sync();
  out[threadIdx.x] = 0;
}
void misuse_shared(uint64_t* out) {
  struct Half {
    char bytes[40 << 10];
  };
  GPU_SHARED(Half, a);
  GPU_SHARED(Half, b);
  out[threadIdx.x] = a.bytes[0] + b.bytes[0];
}
template <int STEP>
void misuse_product(uint64_t* out) {
  GPU_SHARED(Product<kFloat16>, product);
  for (int e = threadIdx.x; e < kSide * kSide; e += kBlock) product.a[e / kSide][e % kSide] = 0;
  block_sync();
  if (STEP == 0 && lane_id() == 3) return;
  Fragment<kFloat16> a;
  a.load(product.a[0] + STEP, kSide);
  Sums sums;
  sums.add(a, a);
  out[threadIdx.x] = static_cast<uint64_t>(sums.v[0]);
}
void misuse_two_at_once(uint64_t* out) {
  if (lane_id() % 2) wave_sync();
  out[threadIdx.x] = lane_id() % 2 ? 0 : ballot(true);
}

void check_misuse() {
  Memory out(kBlock * sizeof(uint64_t));
  auto refuses = [&](const char* name, void (*kernel)(uint64_t*), unsigned block) {
    try {
      launch(kernel, dim3(1), block, 0, nullptr, static_cast<uint64_t*>(out.p));
      check(gpuStreamSynchronize(nullptr), "self_check");
    } catch (const std::runtime_error&) {
      return;
    }
    fail("self_check", std::string("the emulation must refuse ") + name, "no error");
  };
  refuses("a shuffle without one lane", misuse_lost_lane, kBlock);
  refuses("a barrier for half a block", misuse_half_barrier, kBlock);
  refuses("a matrix product without one lane", misuse_product<0>, kBlock);
  refuses("a matrix whose rows are not aligned", misuse_product<1>, kBlock);
  refuses("a ballot and a barrier in one wave", misuse_two_at_once, kBlock);
  refuses("80 KiB of shared memory", misuse_shared, kBlock);
  refuses("a block of half a wave", check_ballot, WAVE / 2);
}
#endif

}  // namespace
}  // namespace needle::gpu

// 0 when all checks pass; otherwise 1 and one sentence in `message`.
extern "C" __attribute__((visibility("default"))) int needle_self_check(char* message, int size) {
  try {
    needle::gpu::self_check();
#if defined(NEEDLE_EMULATION)
    needle::gpu::check_misuse();
    needle::gpu::self_check();  // an error must leave the emulation usable
#endif
    return 0;
  } catch (const std::exception& e) {
    std::snprintf(message, static_cast<size_t>(size), "%s", e.what());
    return 1;
  }
}
