// The only file that knows CUDA from HIP from the host emulation. Kernels use the names below and nothing of a vendor.
//
//   gpuMalloc ... gpuGetErrorString     the vendor's functions, same signatures
//   launch(kernel, grid, block, shared, stream, args...)
//   WAVE, kSharedLimit                  lanes of a wave: 32 or 64, a constant; bytes of shared memory a block may use
//   GPU_SHARED(Type, name)              a block's static shared memory; dynamic_shared<T>() is the other one
//   GPU_BOUNDS(threads, blocks)         before a kernel's name: size of a block, blocks per unit
//   lane_id()  block_sync()  wave_sync()  atomic_add(p, v)
//   shfl<W>(v, lane)  shfl_xor<W>(v, bits)  shfl_down<W>(v, n)  ballot(p)  wave_sum(v)  wave_max(v)
//   uniform(v)                          an int that all lanes of a wave have alike, so that branches on it are scalar
//   rounded(v)                          a float as memory would hold it: a product in it is not joined with a later sum
//   opaque(v)                           v; what is made from it is made where it is used, not kept in registers
//   read4 / write4                      an aligned float4
//   read_vector<T>(p)                   an aligned T that holds several elements of an array
//   write_vector(p, Vector<T, N>)       N elements of one in a single access
//   device::activate, device::relu_map  the shared maths of math/maps.h, as device code
//
// Blocks are one-dimensional, a whole number of waves, and every lane of a wave takes part in each shuffle and ballot.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#if defined(NEEDLE_EMULATION)
#include "gpu/emulation.h"
#elif defined(__HIP__)
#include <hip/hip_runtime.h>
#define NEEDLE_VENDOR(name) hip##name
#ifndef NEEDLE_WAVE
#define NEEDLE_WAVE 64  // gfx90a and gfx942; the host pass has to agree, so this cannot come from the device's macros
#endif
#define gpuMallocHost hipHostMalloc
#else
#include <cuda_runtime.h>
#define gpuMallocHost cudaMallocHost
#define NEEDLE_VENDOR(name) cuda##name
#define NEEDLE_WAVE 32
#endif

#ifdef NEEDLE_VENDOR
#define gpuError_t NEEDLE_VENDOR(Error_t)
#define gpuSuccess NEEDLE_VENDOR(Success)
#define gpuGetErrorString NEEDLE_VENDOR(GetErrorString)
#define gpuGetLastError NEEDLE_VENDOR(GetLastError)
#define gpuGetDevice NEEDLE_VENDOR(GetDevice)
#define gpuGetDeviceCount NEEDLE_VENDOR(GetDeviceCount)
#define gpuGetDeviceProperties NEEDLE_VENDOR(GetDeviceProperties)
#define gpuStream_t NEEDLE_VENDOR(Stream_t)
#define gpuStreamSynchronize NEEDLE_VENDOR(StreamSynchronize)
#define gpuStreamCreateWithFlags NEEDLE_VENDOR(StreamCreateWithFlags)
#define gpuStreamNonBlocking NEEDLE_VENDOR(StreamNonBlocking)
#define gpuStreamDestroy NEEDLE_VENDOR(StreamDestroy)
#define gpuStreamBeginCapture NEEDLE_VENDOR(StreamBeginCapture)
#define gpuStreamCaptureModeThreadLocal NEEDLE_VENDOR(StreamCaptureModeThreadLocal)
#define gpuStreamEndCapture NEEDLE_VENDOR(StreamEndCapture)
#define gpuGraph_t NEEDLE_VENDOR(Graph_t)
#define gpuGraphDestroy NEEDLE_VENDOR(GraphDestroy)
#define gpuGraphExec_t NEEDLE_VENDOR(GraphExec_t)
#define gpuGraphInstantiateWithFlags NEEDLE_VENDOR(GraphInstantiateWithFlags)
#define gpuGraphLaunch NEEDLE_VENDOR(GraphLaunch)
#define gpuGraphExecDestroy NEEDLE_VENDOR(GraphExecDestroy)
#define gpuMalloc NEEDLE_VENDOR(Malloc)
#define gpuFree NEEDLE_VENDOR(Free)
#define gpuMemcpyAsync NEEDLE_VENDOR(MemcpyAsync)
#define gpuEvent_t NEEDLE_VENDOR(Event_t)
#define gpuEventCreateWithFlags NEEDLE_VENDOR(EventCreateWithFlags)
#define gpuEventDisableTiming NEEDLE_VENDOR(EventDisableTiming)
#define gpuEventRecord NEEDLE_VENDOR(EventRecord)
#define gpuEventSynchronize NEEDLE_VENDOR(EventSynchronize)
#define gpuEventCreate NEEDLE_VENDOR(EventCreate)
#define gpuEventDestroy NEEDLE_VENDOR(EventDestroy)
#define gpuEventElapsedTime NEEDLE_VENDOR(EventElapsedTime)
#define gpuStreamIsCapturing NEEDLE_VENDOR(StreamIsCapturing)
#define gpuStreamCaptureStatus NEEDLE_VENDOR(StreamCaptureStatus)
#define gpuStreamCaptureStatusNone NEEDLE_VENDOR(StreamCaptureStatusNone)
#define gpuMemcpyDefault NEEDLE_VENDOR(MemcpyDefault)
#define gpuFuncSetAttribute NEEDLE_VENDOR(FuncSetAttribute)
#define gpuFuncAttributeMaxDynamicSharedMemorySize NEEDLE_VENDOR(FuncAttributeMaxDynamicSharedMemorySize)
#define GPU_SHARED(Type, name) __shared__ Type name
// At most `threads` a block, and registers few enough for `blocks` of them per unit; HIP counts waves on each of 4
// SIMDs.
#ifdef __HIP__
#define GPU_BOUNDS(threads, blocks) __launch_bounds__(threads, ((threads) / NEEDLE_WAVE * (blocks) + 3) / 4)
#else
#define GPU_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#endif
#define NEEDLE_MAP_NOINLINE static __device__ __attribute__((noinline))
extern __shared__ unsigned char needle_dynamic_shared[] __attribute__((aligned(16)));
#endif

#define NEEDLE_MAP_INLINE static __device__ __forceinline__
#include "math/maps.h"

namespace needle::gpu {

#if defined(NEEDLE_EMULATION)
using DeviceProperty = gpuDeviceProp;
constexpr const char* kVendor = NEEDLE_WAVE == 32 ? "emulation_w32" : "emulation_w64";
#elif defined(__HIP__)
using DeviceProperty = hipDeviceProp_t;
constexpr const char* kVendor = "hip";
#else
using DeviceProperty = cudaDeviceProp;
constexpr const char* kVendor = "cuda";
#endif

constexpr int WAVE = NEEDLE_WAVE;
constexpr size_t kSharedLimit = 64 << 10;  // LDS of gfx90a and gfx942; CUDA has more, but one source has one limit
static_assert(WAVE == 32 || WAVE == 64, "a wave has 32 or 64 lanes");
#ifdef __AMDGCN_WAVEFRONT_SIZE__
static_assert(WAVE == __AMDGCN_WAVEFRONT_SIZE__, "NEEDLE_WAVE is not the wavefront size of this target");
#endif

// ---- on the device -------------------------------------------------------------------------------------------------

// What write_vector writes at once.
template <class T, int N>
struct alignas(N * sizeof(T)) Vector {
  T v[N];
} __attribute__((may_alias));

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % WAVE); }

#if defined(NEEDLE_EMULATION)

inline int uniform(int v) { return v; }
inline int64_t opaque(int64_t v) { return v; }
template <class T>
T rounded(T v) {
  return v;
}
inline void block_sync() { emulation::wait_block(); }
inline void wave_sync() { emulation::wait_wave(); }
inline uint64_t ballot(bool p) { return emulation::ballot(p); }
template <int W, class T>
T shfl(T v, int lane) {
  return emulation::shuffle(v, lane_id() / W * W + (lane & (W - 1)));
}
template <int W, class T>
T shfl_xor(T v, int bits) {
  return emulation::shuffle(v, lane_id() ^ bits);
}
template <int W, class T>
T shfl_down(T v, int n) {
  return emulation::shuffle(v, lane_id() % W + n < W ? lane_id() + n : lane_id());
}
template <class T>
T* dynamic_shared() {
  return static_cast<T*>(emulation::dynamic_shared());
}
template <class T>
T read_vector(const void* p) {
  typedef T __attribute__((may_alias)) Any;
  emulation::aligned(static_cast<const T*>(p));
  return *static_cast<const Any*>(p);
}
template <class T, int N>
void write_vector(void* p, const Vector<T, N>& v) {
  *emulation::aligned(static_cast<Vector<T, N>*>(p)) = v;
}
inline float4 read4(const float* p) { return *emulation::aligned(reinterpret_cast<const float4*>(p)); }
inline void write4(float* p, float4 v) { *emulation::aligned(reinterpret_cast<float4*>(p)) = v; }
template <class T>
GPU_UNSEEN T atomic_add(T* p, T v) {
  T old = *p;
  *p += v;
  return old;
}

#else

__device__ __forceinline__ void block_sync() { __syncthreads(); }
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  return reinterpret_cast<T*>(needle_dynamic_shared);
}
template <class T>
__device__ __forceinline__ T atomic_add(T* p, T v) {
  return atomicAdd(p, v);
}
template <class T>
__device__ __forceinline__ T read_vector(const void* p) {
  return *static_cast<const T*>(p);
}
template <class T, int N>
__device__ __forceinline__ void write_vector(void* p, const Vector<T, N>& v) {
  *static_cast<Vector<T, N>*>(p) = v;
}
__device__ __forceinline__ float4 read4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ void write4(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }

#if defined(__HIP__)
__device__ __forceinline__ int uniform(int v) { return __builtin_amdgcn_readfirstlane(v); }
__device__ __forceinline__ int64_t opaque(int64_t v) {
#if defined(__AMDGCN__)
  asm volatile("" : "+v"(v));
#endif
  return v;
}
template <class T>
__device__ __forceinline__ T rounded(T v) {
#if defined(__AMDGCN__)
  asm volatile("" : "+v"(v));
#endif
  return v;
}
__device__ __forceinline__ void wave_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
__device__ __forceinline__ uint64_t ballot(bool p) { return __ballot(p); }
#define NEEDLE_SHUFFLE(name, v, by, W) __##name(v, by, W)
#else
__device__ __forceinline__ int uniform(int v) { return v; }
__device__ __forceinline__ int64_t opaque(int64_t v) {
  asm volatile("" : "+l"(v));
  return v;
}
__device__ __forceinline__ float rounded(float v) {
  asm volatile("" : "+f"(v));
  return v;
}
__device__ __forceinline__ double rounded(double v) {
  asm volatile("" : "+d"(v));
  return v;
}
__device__ __forceinline__ void wave_sync() { __syncwarp(); }
__device__ __forceinline__ uint64_t ballot(bool p) { return __ballot_sync(0xffffffffu, p); }
#define NEEDLE_SHUFFLE(name, v, by, W) __##name##_sync(0xffffffffu, v, by, W)
#endif
template <int W, class T>
__device__ __forceinline__ T shfl(T v, int lane) {
  return NEEDLE_SHUFFLE(shfl, v, lane, W);
}
template <int W, class T>
__device__ __forceinline__ T shfl_xor(T v, int bits) {
  return NEEDLE_SHUFFLE(shfl_xor, v, bits, W);
}
template <int W, class T>
__device__ __forceinline__ T shfl_down(T v, int n) {
  return NEEDLE_SHUFFLE(shfl_down, v, n, W);
}

#endif

// n / d by one multiplication, for 0 <= n < 2^31: with shift = ceil(log2 d) and magic = 2^32 (2^shift - d) / d + 1 it
// is (high half of n * magic + n) >> shift (Granlund and Montgomery, 1994).
struct Divisor {
  uint32_t d, magic, shift;
  Divisor(int64_t divisor = 1) : d(divisor > 0 ? static_cast<uint32_t>(divisor) : 1), magic(1), shift(0) {
    while ((uint64_t{1} << shift) < d) shift++;
    magic = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }
  __device__ __forceinline__ uint32_t quotient(uint32_t n) const {
    return (static_cast<uint32_t>(static_cast<uint64_t>(n) * magic >> 32) + n) >> shift;
  }
  __device__ __forceinline__ int quotient(int n) const { return static_cast<int>(quotient(static_cast<uint32_t>(n))); }
};

// `v` of the W lanes of an aligned group combined; every lane gets the result.
template <int W, class T, class F>
__device__ __forceinline__ T wave_reduce(T v, const F& combine) {
  static_assert(W <= WAVE && (W & (W - 1)) == 0, "a group is a power of two inside a wave");
#pragma unroll
  for (int bits = W / 2; bits > 0; bits /= 2) v = combine(v, shfl_xor<W>(v, bits));
  return v;
}
template <int W = WAVE, class T>
__device__ __forceinline__ T wave_sum(T v) {
  return wave_reduce<W>(v, [](T a, T b) { return a + b; });
}
template <int W = WAVE, class T>
__device__ __forceinline__ T wave_max(T v) {
  return wave_reduce<W>(v, [](T a, T b) { return a < b || b != b ? b : a; });  // NaN wins, as in torch
}

// ---- on the host ---------------------------------------------------------------------------------------------------

[[noreturn]] inline void fail(const char* op, const std::string& what, const std::string& got) {
  throw std::runtime_error(std::string("[") + op + "] " + what + ", got " + got + ".");
}

inline void check(gpuError_t e, const char* op) {
  if (e == gpuSuccess) return;
  (void)gpuGetLastError();  // otherwise the next launch would report this error again
  fail(op, "the device refused the call", gpuGetErrorString(e));
}

// The stream of a kernel's call or of its surroundings.
template <class Args>
gpuStream_t stream_of(const Args& c) {
  return static_cast<gpuStream_t>(c.exec->stream);
}

inline bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Whether `p` is memory of the device; host memory that no one told the driver about is an error to HIP.
inline bool is_device_memory(const void* p) {
#if defined(NEEDLE_EMULATION)
  return emulation::is_device_memory(p);
#elif defined(__HIP__)
  hipPointerAttribute_t a;
  if (hipPointerGetAttributes(&a, p) != hipSuccess) {
    (void)hipGetLastError();
    return false;
  }
#if HIP_VERSION_MAJOR >= 6
  return a.type == hipMemoryTypeDevice;
#else
  return a.memoryType == hipMemoryTypeDevice;
#endif
#else
  cudaPointerAttributes a;
  check(cudaPointerGetAttributes(&a, p), "copy");
  return a.type == cudaMemoryTypeDevice;
#endif
}

// The current device's compute units: what a grid has to fill.
inline int device_units() {
  static const int units = [] {
    int device = 0;
    DeviceProperty p;
    check(gpuGetDevice(&device), "device");
    check(gpuGetDeviceProperties(&p, device), "device");
    return p.multiProcessorCount;
  }();
  return units;
}

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, unsigned block, size_t shared, gpuStream_t stream, const A&... args) {
  static_assert(sizeof...(P) == sizeof...(A), "a kernel gets as many arguments as it has parameters");
#if defined(NEEDLE_EMULATION)
  emulation::submit(stream, [=] { emulation::run(grid, block, shared, [&] { kernel(static_cast<P>(args)...); }); });
#else
  if (shared > (48 << 10)) {  // CUDA gives more than 48 KiB only when asked
    check(gpuFuncSetAttribute(reinterpret_cast<const void*>(kernel), gpuFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared)),
          "launch");
  }
  // clang-format off
  kernel<<<grid, block, shared, stream>>>(static_cast<P>(args)...);
  // clang-format on
  check(gpuGetLastError(), "launch");
#endif
}

}  // namespace needle::gpu
