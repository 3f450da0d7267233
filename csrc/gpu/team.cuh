// Threads that share a reduction: a team walks over elements first, first + step, ... and adds up or compares what its
// members found. Every thread of a block calls sum and max equally often, also one with nothing to do.
#pragma once
#include "gpu/portable.cuh"
#include "kernels/rows.h"

namespace needle::gpu {

constexpr int kTeamThreads = 256;

template <class T>
__device__ __forceinline__ T infinity() {
  return static_cast<T>(__builtin_huge_val());
}

template <class T>
__device__ __forceinline__ T inverse_root(T v) {
  return 1 / device::sqrt(v);
}

struct ThreadTeam {  // no team at all
  static constexpr int step = 1, per_block = kTeamThreads;
  static constexpr int first = 0;
  __device__ static __forceinline__ int place() { return static_cast<int>(threadIdx.x); }
  template <class T>
  __device__ __forceinline__ T sum(T v) const {
    return v;
  }
  template <class T>
  __device__ __forceinline__ T max(T v) const {
    return v;
  }
};

struct WaveTeam {
  static constexpr int step = WAVE, per_block = kTeamThreads / WAVE;
  __device__ static __forceinline__ int place() { return static_cast<int>(threadIdx.x / WAVE); }
  int first = lane_id();
  template <class T>
  __device__ __forceinline__ T sum(T v) const {
    return wave_sum(v);
  }
  template <class T>
  __device__ __forceinline__ T max(T v) const {
    return wave_max(v);
  }
};

template <class T>
struct WaveValues {
  T v[kTeamThreads / WAVE];
};

struct BlockTeam {
  static constexpr int step = kTeamThreads, per_block = 1;
  __device__ static __forceinline__ int place() { return 0; }
  int first = static_cast<int>(threadIdx.x);
  // The values of all waves, a lane each; `rest` in the other lanes.
  template <class T>
  __device__ static __forceinline__ T of_waves(T v, T rest) {
    GPU_SHARED(WaveValues<T>, waves);
    block_sync();  // until everyone has read what an earlier call left here
    if (lane_id() == 0) waves.v[threadIdx.x / WAVE] = v;
    block_sync();
    return lane_id() < kTeamThreads / WAVE ? waves.v[lane_id()] : rest;
  }
  template <class T>
  __device__ __forceinline__ T sum(T v) const {
    return wave_sum(of_waves(wave_sum(v), T(0)));
  }
  template <class T>
  __device__ __forceinline__ T max(T v) const {
    return wave_max(of_waves(wave_max(v), -infinity<T>()));
  }
};

// A team per lane, one member in each wave: neighbouring teams read neighbouring elements.
struct ColumnTeam {
  static constexpr int step = kTeamThreads / WAVE, per_block = WAVE;
  __device__ static __forceinline__ int place() { return lane_id(); }
  int first = static_cast<int>(threadIdx.x / WAVE);
  template <class T>
  struct Values {
    T v[step][WAVE];
  };
  template <class T, class F>
  __device__ __forceinline__ T combined(T v, const F& combine) const {
    GPU_SHARED(Values<T>, values);
    block_sync();
    values.v[first][lane_id()] = v;
    block_sync();
    T total = values.v[0][lane_id()];
#pragma unroll
    for (int w = 1; w < step; w++) total = combine(total, values.v[w][lane_id()]);
    return total;
  }
  template <class T>
  __device__ __forceinline__ T sum(T v) const {
    return combined(v, [](T a, T b) { return a + b; });
  }
  template <class T>
  __device__ __forceinline__ T max(T v) const {
    return combined(v, [](T a, T b) { return device::maximum_map::apply(a, b, a, a); });
  }
};

// op(team, n, exists) for every n in [0, size), a team each; of a ColumnTeam also for those of its block beyond `size`,
// which only take part in its sums and maxima.
template <class Team, class Op>
__global__ void GPU_BOUNDS(kTeamThreads, 3) team_kernel(Op op, int64_t size) {
  int64_t n = static_cast<int64_t>(blockIdx.x) * Team::per_block + Team::place();
  if (n < size || std::is_same_v<Team, ColumnTeam>) op(Team(), n, n < size);
}

template <class Team, class Op>
void launch_teams(const Op& op, int64_t size, gpuStream_t stream) {
  int64_t blocks = (size + Team::per_block - 1) / Team::per_block;
  if (blocks == 0) return;
  if (blocks > INT32_MAX) fail("launch", "at most 2^31 blocks", std::to_string(blocks));
  launch(team_kernel<Team, Op>, dim3(static_cast<unsigned>(blocks)), kTeamThreads, 0, stream, op, size);
}

}  // namespace needle::gpu
