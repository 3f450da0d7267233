// Several element-wise maps as one pass: a thread takes up to 16 elements through all of them, with its values in
// shared memory between the maps. The program is data, and every map is the code that runs it alone, so that results
// are the same to the last bit.
#include "gpu/elementwise.cuh"

namespace needle::gpu {
namespace {

constexpr int kInputs = 8, kOutputs = 4, kSlots = 8, kLength = 32, kOperands = kOutputs + kInputs;
constexpr int kAtOnce = 4;                      // Quads that a thread starts to load before it uses the first
constexpr unsigned kWidth = 128;                // threads of a block
constexpr int kColumn = kWidth * sizeof(Quad);  // bytes of one Quad of every thread
constexpr int kDepth = 2;  // at most 2^kDepth Quads a thread: choosing a map costs as much as computing a cheap one
constexpr int kShare = WAVE == 32 ? 32 << 10 : 16 << 10;  // bytes a block, so that a unit has room for several

enum Number {
  kCopy = -1,
#define UNARY(name, ...) k_##name,
#define BINARY UNARY
#define TERNARY UNARY
#include "kernels/maps.def"
#undef UNARY
#undef BINARY
#undef TERNARY
};

// An array with its own dimensions, which are fewer than those that all arrays step through together.
struct Operand {
  Loop<1> loop;
  void* data;
  DType dtype;
  bool grouped;  // four neighbours are steps of one stride apart
  bool same;     // a stride of 0
  bool quads;    // they are floats that can be moved as one, or the same one
};

struct Chain {
  const double* program;
  int length, n_in, depth;
  uint32_t total;
  Operand y[kOutputs], x[kInputs];
};

// A row of the program, its values by the bytes in front of their columns in shared memory, two in a word.
struct alignas(16) Instruction {
  int map, dear;
  uint32_t first_two, third_and_result;
  int output;
  float p, q;
};
struct Code {
  Instruction rows[kLength];
};

template <class Map>
constexpr bool kFloats = has_letter(Map::dtypes, 'f');

// f(j, where) for elements i + j of an array, j < count <= 4, one after the other.
template <class F>
__device__ __forceinline__ void for_four(const Operand& a, uint32_t i, int count, const F& f) {
  int64_t at[1];
  a.loop.locate(i, at);
  const int64_t step = a.loop.stride[0][a.loop.rank - 1];
#pragma unroll 1
  for (int j = 0; j < count; j++) {
    f(j, at[0]);
    if (a.grouped) {
      at[0] += step;
    } else {
      a.loop.locate(i + j + 1, at);
    }
  }
}

__device__ __forceinline__ float* quad_at(const Operand& a, uint32_t i) {
  int64_t at[1];
  a.loop.locate(i, at);
  return static_cast<float*>(a.data) + at[0];
}

// The map of kCopy.
struct Same {
  static constexpr int arity = 1;
  static constexpr char dtypes[] = "f";
  static __device__ __forceinline__ float apply(float x, float, float) { return x; }
};

template <class... Maps>
struct Set {
  template <class Map>
  static constexpr bool has = (std::is_same_v<Map, Maps> || ...);
};

// Maps of many instructions and constants, an element at a time and in a function of their own, so that the others need
// fewer registers.
using Dear =
    Set<device::softplus_map, device::sin_map, device::cos_map, device::tan_map, device::asin_map, device::acos_map,
        device::atan_map, device::sinh_map, device::cosh_map, device::asinh_map, device::acosh_map, device::atanh_map,
        device::erfc_map, device::erfinv_map, device::lgamma_map, device::digamma_map, device::log2_map,
        device::log10_map, device::exp2_map, device::power_scalar_map, device::power_map, device::atan2_map,
        device::hypot_map, device::floor_divide_map, device::trunc_divide_map, device::remainder_map, device::fmod_map>;

__device__ bool is_dear(int map) {
  switch (map) {
#define UNARY(name, ...) \
  case k_##name:         \
    return Dear::has<device::name##_map>;
#define BINARY UNARY
#define TERNARY UNARY
#include "kernels/maps.def"
#undef UNARY
#undef BINARY
#undef TERNARY
  }
  return false;
}

// row: map, three operands, slot, output, two attributes, as in csrc/cpu/chain.cpp.
__device__ Instruction instruction(const double* row, int n_in, int depth) {
  const auto column = [&](double value) {
    const int number = static_cast<int>(value);
    return static_cast<uint32_t>(number < kInputs ? number : number - kInputs + n_in) * kColumn << depth;
  };
  Instruction o;
  o.map = static_cast<int>(row[0]), o.dear = is_dear(o.map);
  o.first_two = column(row[1]) | column(row[2]) << 16;
  o.third_and_result = column(row[3]) | column(kInputs + row[4]) << 16;
  o.output = static_cast<int>(row[5]);
  o.p = static_cast<float>(row[6]), o.q = static_cast<float>(row[7]);
  return o;
}

// The row's map of `bytes` of columns.
template <class Map, bool dear>
__device__ __forceinline__ void compute(unsigned char* values, const Instruction& o, int bytes) {
  unsigned char* const to = values + (o.third_and_result >> 16);
  const unsigned char* const from[] = {values + (o.first_two & 0xffff), values + (o.first_two >> 16),
                                       values + (o.third_and_result & 0xffff)};
  if constexpr (!kFloats<Map> || Dear::has<Map> != dear) {
    return;
  } else if constexpr (dear) {
#pragma unroll 1
    for (int at = 0; at < bytes; at += at % kColumn == 12 ? kColumn - 12 : 4) {
      float x[Map::arity];
#pragma unroll
      for (int k = 0; k < Map::arity; k++) x[k] = *reinterpret_cast<const float*>(from[k] + at);
      *reinterpret_cast<float*>(to + at) = device::apply_map<Map>(x, o.p, o.q);
    }
  } else {
#pragma unroll 1
    for (int at = 0; at < bytes; at += kColumn) {
      Quad x[Map::arity], r;
#pragma unroll
      for (int k = 0; k < Map::arity; k++) x[k] = *reinterpret_cast<const Quad*>(from[k] + at);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float lanes[Map::arity];
#pragma unroll
        for (int k = 0; k < Map::arity; k++) lanes[k] = x[k].v[j];
        r.v[j] = device::apply_map<Map>(lanes, o.p, o.q);
      }
      *reinterpret_cast<Quad*>(to + at) = r;
    }
  }
}

// Out of line: in the loops of the kernel, compilers would keep the constants of all maps in registers.
template <bool dear>
NEEDLE_MAP_NOINLINE void run_row(unsigned column, Instruction o, int bytes) {
  unsigned char* const values = dynamic_shared<unsigned char>() + column;
  switch (uniform(o.map)) {
    case kCopy:
      return compute<Same, dear>(values, o, bytes);
#define UNARY(name, ...) \
  case k_##name:         \
    return compute<device::name##_map, dear>(values, o, bytes);
#define BINARY UNARY
#define TERNARY UNARY
#include "kernels/maps.def"
#undef UNARY
#undef BINARY
#undef TERNARY
  }
}

__device__ __forceinline__ int count_from(uint32_t i, uint32_t total) {
  return i >= total ? 0 : total - i < 4 ? static_cast<int>(total - i) : 4;
}

__global__ void GPU_BOUNDS(kWidth, 8) run_chain(Chain c) {
  GPU_SHARED(Code, code);
  const int depth = c.depth;
  Quad* const values = dynamic_shared<Quad>() + threadIdx.x;
  if (threadIdx.x < static_cast<unsigned>(c.length))
    code.rows[threadIdx.x] = instruction(c.program + 8 * threadIdx.x, c.n_in, depth);
  block_sync();
  const uint32_t groups = (c.total + 3) / 4;
#pragma unroll 1
  for (uint32_t g = (blockIdx.x * kWidth << depth) + threadIdx.x; g < groups; g += gridDim.x * kWidth << depth) {
    // Quad f is that of input f >> depth, at element place(f).
    const auto place = [&](int f) { return 4 * (g + (f & ((1 << depth) - 1)) * kWidth); };
    const int quads = c.n_in << depth;
#pragma unroll 1
    for (int f = 0; f < quads; f += kAtOnce) {
      Quad v[kAtOnce];
      bool whole[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; k++) {
        const uint32_t i = place(f + k);
        const Operand& x = c.x[(f + k) >> depth];
        whole[k] = f + k < quads && x.quads && count_from(i, c.total) == 4;
        if (whole[k]) {
          const float* const p = quad_at(x, i);
          v[k] = x.same ? Quad(*p) : read(reinterpret_cast<const Quad*>(p));
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; k++)
        if (whole[k]) values[(f + k) * kWidth] = v[k];
    }
#pragma unroll 1
    for (int f = 0; f < quads; f++) {
      const Operand& x = c.x[f >> depth];
      const uint32_t i = place(f);
      const int count = count_from(i, c.total);
      if (count == 0 || (count == 4 && x.quads)) continue;
      Quad* const to = values + f * kWidth;
      for_four(x, i, x.same ? 1 : count, [&](int j, int64_t at) { to->v[j] = load_as<float>(x.data, x.dtype, at); });
      if (x.same) *to = Quad(to->v[0]);
    }
#pragma unroll 1
    for (int s = 0; s < c.length; s++) {
      const Instruction o = code.rows[s];
      const unsigned column = threadIdx.x * sizeof(Quad);
      uniform(o.dear) ? run_row<true>(column, o, kColumn << depth) : run_row<false>(column, o, kColumn << depth);
      const int output = uniform(o.output);
      if (output < 0) continue;
      const Operand& y = c.y[output];
#pragma unroll 1
      for (int f = 0; f < 1 << depth; f++) {
        const uint32_t i = place(f);
        const int count = count_from(i, c.total);
        const Quad* const from = values + (o.third_and_result >> 16) / sizeof(Quad) + f * kWidth;
        if (count == 4 && y.quads) {
          write(reinterpret_cast<Quad*>(quad_at(y, i)), *from);
        } else if (count > 0) {
          for_four(y, i, count, [&](int j, int64_t at) { store_as(y.data, y.dtype, at, from->v[j]); });
        }
      }
    }
  }
}

template <int N>
Operand operand(const Loop<N>& loop, const View& v, int k) {
  Operand a = {};
  a.data = v.data, a.dtype = v.dtype;
  a.loop.rank = loop.rank, a.loop.total = loop.total;
  for (int d = 0; d < loop.rank; d++) a.loop.shape[d] = loop.shape[d], a.loop.stride[0][d] = loop.stride[k][d];
  a.loop.finish("chain");
  a.grouped = a.loop.rank == 1 || a.loop.shape[a.loop.rank - 1] % 4 == 0;
  a.same = a.grouped && a.loop.stride[0][a.loop.rank - 1] == 0;
  a.quads = v.dtype == DType::f32 && (a.same || (a.loop.groups(0, 4) && aligned(v.data)));
  return a;
}

}  // namespace

// Inputs a..h of any dtype, broadcast by strides of 0, as float32; a result is stored in its output's dtype. Outputs
// that a program has not are y0 once more.
void chain(const chain_args& args) {
  const Optional* inputs[kInputs] = {&args.in.a, &args.in.b, &args.in.c, &args.in.d,
                                     &args.in.e, &args.in.f, &args.in.g, &args.in.h};
  const View* views[kOperands] = {&args.out.y0, &args.out.y1, &args.out.y2, &args.out.y3};
  Chain c = {};
  for (int k = 0; k < kInputs; k++) {
    views[kOutputs + k] = *inputs[k] ? inputs[k] : views[0];
    if (*inputs[k]) c.n_in = k + 1;
  }
  const Loop<kOperands> loop = loop_over("chain", views);
  const int64_t length = args.in.program.shape[0], slots = args.attr.slots;
  if (length > kLength)
    fail("chain", "a program has at most " + std::to_string(kLength) + " maps", std::to_string(length));
  if (slots > kSlots)
    fail("chain", "a program has at most " + std::to_string(kSlots) + " slots", std::to_string(slots));
  if (loop.total == 0) return;
  c.program = args.in.program.as<double>(), c.length = static_cast<int>(length),
  c.total = static_cast<uint32_t>(loop.total);
  for (int k = 0; k < kOutputs; k++) c.y[k] = operand(loop, *views[k], k);
  for (int k = 0; k < c.n_in; k++) c.x[k] = operand(loop, *views[kOutputs + k], kOutputs + k);
  const int64_t groups = (loop.total + 3) / 4, columns = c.n_in + slots;
  while (c.depth < kDepth && columns * kColumn << (c.depth + 1) <= kShare &&
         groups >> (c.depth + 1) >= int64_t{16} * kWidth * device_units())
    c.depth++;
  const int64_t threads = (groups + (1 << c.depth) - 1) >> c.depth;
  launch(run_chain, grid_for(threads * kThreads / kWidth), kWidth, columns * kColumn << c.depth, stream_of(args), c);
}

}  // namespace needle::gpu
