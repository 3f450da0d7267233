// What places of a grid read of an image, a vector of places at a time: elements, their weights, and how these change
// with the grid's numbers.
#pragma once
#include "cpu/lanes.h"
#include "cpu/strided.h"
#include "math/sampling.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int kPlaces = 64, kMostTaps = 16;

// What a vector of places reads along an axis: elements, their weights, and how the weights change with the grid's
// numbers.
template <class T>
struct AxisTaps {
  typename LanesOf<T>::type place[4], weight[4], slope[4];
};

// What kPlaces read of an image: `lines` of `width` neighbours, where they begin, and for every place and neighbour of
// a line its weight and the weight's slope along each axis.
template <class T>
struct Taps {
  int lines, width;
  int32_t offset[kMostTaps][kPlaces];
  T weights[kMostTaps * kPlaces], slopes[3][kMostTaps * kPlaces];

  const T* weight(int line) const { return weights + line * width * kPlaces; }
  const T* slope(int axis, int line) const { return slopes[axis] + line * width * kPlaces; }
};

constexpr int taps_of(int mode) { return mode == kNearest ? 1 : mode == kBilinear ? 2 : 4; }

struct Sampling : SamplingRule {
  int rank;         // of the image without its batch and channels
  int64_t size[3];  // depth, height, width

  template <class Attr>
  Sampling(const Attr& attr, const View& x)
      : SamplingRule{static_cast<int>(attr.mode), static_cast<int>(attr.padding), attr.corners != 0}, rank(x.rank - 2) {
    for (int d = 0; d < 3; d++) size[d] = d < 3 - rank ? 1 : x.shape[d + rank - 1];
  }
};

// The numbers of a vector of places of a grid by axis, x last: of the first n, the others are 0.
template <class T, class L>
NEEDLE_INLINE void read_numbers(const T* grid, int64_t place_step, int64_t number_step, int64_t n, int rank,
                                L* numbers) {
  constexpr int N = LanesOf<T>::width;
  if (n >= N && rank == 2 && place_step == 2 && number_step == 1) return split_pairs(grid, numbers[2], numbers[1]);
  for (int d = 3 - rank; d < 3; d++) {
    T each[N] = {};
    for (int p = 0; p < smaller(n, N); p++) each[p] = grid[p * place_step + (2 - d) * number_step];
    numbers[d] = load_lanes(each, N);
  }
}

template <int MODE, class T, class L>
NEEDLE_INLINE void put_taps(SamplingRule rule, L g, L size, AxisTaps<T>& taps) {
  rule.mode = MODE;
  taps_along(rule, g, size, [&](int k, L place, L weight, L slope) __attribute__((always_inline)) {
    taps.place[k] = place;
    taps.weight[k] = weight;
    taps.slope[k] = slope;
  });
}

template <class T, class L>
__attribute__((noinline)) void put_cubic_taps(const SamplingRule& rule, L g, L size, AxisTaps<T>& taps) {
  put_taps<kBicubic>(rule, g, size, taps);
}

template <int MODE, class T, class L>
NEEDLE_INLINE void along_axis(const SamplingRule& rule, L g, L size, AxisTaps<T>& taps) {
  if constexpr (MODE == kBicubic)  // long, so that it is there once
    put_cubic_taps(rule, g, size, taps);
  else
    put_taps<MODE>(rule, g, size, taps);
}

// The taps of an axis as so many neighbours: the first one's place, and what falls to each of them.
template <int MANY, class T, class L>
NEEDLE_INLINE void side_by_side(L size, bool slopes, AxisTaps<T>& taps) {
  const AxisTaps<T> from = taps;
  L first = size - L(static_cast<T>(MANY));
  for (int k = 0; k < MANY; k++) first = min(from.place[k], first);
  for (int q = 0; q < MANY; q++) {
    L weight(0), slope(0);
    for (int k = 0; k < MANY; k++) {
      const auto here = eq(from.place[k], first + L(static_cast<T>(q)));
      weight = weight + select(here, from.weight[k], L(0));
      if (slopes) slope = slope + select(here, from.slope[k], L(0));
    }
    taps.weight[q] = weight;
    taps.slope[q] = slope;
  }
  taps.place[0] = first;
}

// to = a * b[0] of the first place, a * b[1], ..., a * b[0] of the next one, ...
template <int WIDTH, class T, class L>
NEEDLE_INLINE void spread(L a, const L* b, T* to) {
  constexpr int N = LanesOf<T>::width;
  L each[WIDTH];
  for (int q = 0; q < WIDTH; q++) each[q] = a * b[q];
  interleave<WIDTH>(each);
  for (int q = 0; q < WIDTH; q++) store_lanes(to + q * N, each[q], N);
}

// What `n` places from `grid` on read.
template <int MODE, int WIDTH, class T>
void find_taps(const Sampling& s, const T* grid, int64_t place_step, int64_t number_step, int n, const int32_t* stride,
               bool slopes, Taps<T>& taps) {
  using L = typename LanesOf<T>::type;
  constexpr int N = LanesOf<T>::width, kEach = taps_of(MODE), kAcross = kEach / WIDTH;
  const bool volume = s.rank == 3;
  const int deep = volume ? kEach : 1;
  const L size[] = {L(static_cast<T>(s.size[0])), L(static_cast<T>(s.size[1])), L(static_cast<T>(s.size[2]))};
  taps.lines = deep * kEach * kAcross;
  taps.width = WIDTH;
  for (int first = 0; first < kPlaces; first += N) {
    L numbers[3];
    AxisTaps<T> z, y, x;
    read_numbers(grid + first * place_step, place_step, number_step, n - first, s.rank, numbers);
    along_axis<MODE>(s, numbers[2], size[2], x);
    along_axis<MODE>(s, numbers[1], size[1], y);
    if (volume) along_axis<MODE>(s, numbers[0], size[0], z);
    if (WIDTH > 1) side_by_side<WIDTH>(size[2], slopes, x);
    int t = 0;
    for (int i = 0; i < deep; i++)
      for (int j = 0; j < kEach; j++)
        for (int k = 0; k < kAcross; k++, t++) {
          const int64_t to = (t * kPlaces + first) * WIDTH;
          auto at = whole(y.place[j]) * stride[1] + whole(x.place[k]) * stride[2];
          if (volume) at += whole(z.place[i]) * stride[0];
          std::memcpy(taps.offset[t] + first, &at, sizeof at);
          const L both = volume ? z.weight[i] * y.weight[j] : y.weight[j];
          spread<WIDTH>(both, x.weight + k, taps.weights + to);
          if (!slopes) continue;
          spread<WIDTH>(both, x.slope + k, taps.slopes[2] + to);
          spread<WIDTH>(volume ? z.weight[i] * y.slope[j] : y.slope[j], x.weight + k, taps.slopes[1] + to);
          if (volume) spread<WIDTH>(z.slope[i] * y.weight[j], x.weight + k, taps.slopes[0] + to);
        }
  }
}

// find_taps of a mode, for as many neighbours at once as it can have.
template <int WIDTH, class T>
auto tap_finder(int mode) {
  if constexpr (WIDTH == 2) return find_taps<kBilinear, 2, T>;
  if constexpr (WIDTH == 4) return find_taps<kBicubic, 4, T>;
  if constexpr (WIDTH == 1)
    return mode == kNearest    ? find_taps<kNearest, 1, T>
           : mode == kBilinear ? find_taps<kBilinear, 1, T>
                               : find_taps<kBicubic, 1, T>;
}

}  // namespace
}  // namespace needle::NEEDLE_ISA
