// Rows of (M, D) views whose elements are neighbours, each walked by a team and kept in its registers where it fits.
#pragma once
#include "gpu/quad.cuh"
#include "gpu/team.cuh"

namespace needle::gpu {

// Of Quads it has a quarter of the elements. A view (M) is a column.
template <class T>
struct Rows {
  using Element = T;
  using Line = T*;  // to what a row's elements are added as numbers
  template <class U>
  using Of = Rows<U>;
  T* data;
  int64_t stride;
  Rows() = default;
  Rows(const View& v)
      : data(reinterpret_cast<T*>(v.as<Scalar<T>>())), stride(v.rank > 0 ? v.stride[0] / kLanes<T> : 0) {}
  __device__ __forceinline__ T* operator[](int64_t row) const { return data + row * stride; }
};

// A thread's elements of a row of `size`: first, first + step, ..., which it loads at once and keeps when they are at
// most N; of longer rows N is 0, and every pass reads them again.
template <class T, int N, class Team, class Line = T*>
struct Row {
  using Element = T;
  static constexpr bool kept = N > 0;
  Line from;
  int64_t first, size;
  T held[N > 0 ? N : 1];

  __device__ __forceinline__ Row(const Team& team, Line from, int64_t size)
      : from(from), first(team.first), size(size) {
#pragma unroll
    for (int k = 0; k < N; k++)
      if (first + k * Team::step < size) held[k] = read(from + (first + k * Team::step));
  }
  // f(element, place, element of another row, ...) for every element; what f makes of one stays only if N > 0.
  template <class F, class... Others>
  __device__ __forceinline__ void each(const F& f, Others&... others) {
    if constexpr (N > 0) {
#pragma unroll
      for (int k = 0; k < N; k++) {
        const int64_t i = first + k * Team::step;
        if (i < size) f(held[k], i, others.held[k]...);
      }
    } else {
      for (int64_t i = first; i < size; i += Team::step) {
        T v = read(from + i);
        f(v, i, read(others.from + i)...);
      }
    }
  }
  // Writes f(element, place, ...) to the same place of `to`; of a row that is kept when all are there, so that what f
  // loads is not held up by stores.
  template <class F, class... Others>
  __device__ __forceinline__ void put(Line to, const F& f, Others&... others) {
    each(
        [&](T& v, int64_t i, const auto&... rest) {
          v = f(v, i, rest...);
          if constexpr (N == 0) write(to + i, v);
        },
        others...);
    if constexpr (N > 0) each([&](const T& v, int64_t i) { write(to + i, v); });
  }
};

// Runs Op<Rows<T>, N>{parts..., d} for rows of d elements T, of which `arrays` are kept at a time: a wave each, unless
// they are long or too few to fill the device.
template <class T, template <class, int> class Op, int arrays = 1, class... Parts>
void launch_rows(gpuStream_t stream, int64_t rows, int64_t d, const Parts&... parts) {
  constexpr int N = (sizeof(T) == 4 ? 16 : 8) / arrays;
  d /= kLanes<T>;
  if (d <= 2 * WAVE) return launch_teams<WaveTeam>(Op<Rows<T>, 2>{parts..., d}, rows, stream);
  const Op<Rows<T>, N> op = {parts..., d};
  if (d <= N * WAVE && rows >= 8LL * device_units()) return launch_teams<WaveTeam>(op, rows, stream);
  if (d <= N * kTeamThreads) return launch_teams<BlockTeam>(op, rows, stream);
  launch_teams<BlockTeam>(Op<Rows<T>, 0>{parts..., d}, rows, stream);
}

// f(T{}) with the dtype of rows, one of `letters`, or with Quad where all of `views` allow it.
template <const char* letters, class F>
void with_rows(std::initializer_list<const View*> views, const F& f) {
  bool wide = true;
  for (const View* v : views) wide = wide && quads(*v, v->rank - 1);
  if (wide) return f(Quad{});
  with_type<letters>((*views.begin())->dtype, f);
}

}  // namespace needle::gpu
