// Images and volumes read at places that a grid gives (Jaderberg et al., arXiv 1506.02025), and the gradients.
//
// Places are taken kPlaces at a time: what is read for them and with which weights is found once and serves all
// channels. Arrays of places have that many numbers, however few are wanted, so that loops over them are vectors from
// end to end. An image is a volume of depth 1. What has weight 0 is not read: beside the image there may be anything.
#include "cpu/taps.h"

namespace needle::NEEDLE_ISA {
namespace {

// The places of a view, its axes from `first` up to `end`, as one row after the other with a common step.
struct Places {
  int axes = 0;
  int64_t shape[kMaxRank], stride[kMaxRank];

  Places(const View& v, int first, int end) {
    for (int d = first; d < end; d++) {
      if (axes && stride[axes - 1] == v.stride[d] * v.shape[d])
        shape[axes - 1] *= v.shape[d], stride[axes - 1] = v.stride[d];
      else
        shape[axes] = v.shape[d], stride[axes++] = v.stride[d];
    }
  }
  int64_t count() const {
    int64_t n = 1;
    for (int d = 0; d < axes; d++) n *= shape[d];
    return n;
  }
  int64_t at(int64_t index) const {
    int64_t offset = 0;
    for (int d = axes - 1; d > 0; d--) {
      offset += index % shape[d] * stride[d];
      index /= shape[d];
    }
    return offset + index * stride[0];
  }
  int64_t step() const { return stride[axes - 1]; }
  int64_t row() const { return shape[axes - 1]; }
};

// f(first, n) for stretches of places that lie in one row.
template <class F>
void for_stretches(int64_t begin, int64_t end, int64_t row, int64_t most, const F& f) {
  while (begin < end) {
    const int64_t stop = smaller(end, begin - begin % row + row);
    for (int64_t n; begin < stop; begin += n) f(begin, static_cast<int>(n = smaller(most, stop - begin)));
  }
}

void strides_of(const View& x, int32_t* stride) {
  const int rank = x.rank - 2;
  for (int d = 0; d < 3; d++) stride[d] = d < 3 - rank ? 0 : static_cast<int32_t>(x.stride[d + rank - 1]);
}

// What a line reads of x.
template <int WIDTH, class T>
NEEDLE_INLINE void pick(const T* __restrict x, const int32_t* __restrict offset, T* __restrict found) {
  constexpr int N = LanesOf<T>::width;
  for (int p = 0; p < kPlaces; p += N / WIDTH) store_lanes(found + p * WIDTH, neighbours<WIDTH>(x, offset + p), N);
}

template <class T>
NEEDLE_INLINE T weighted(T x, T weight) {
  return select(eq(weight, T(0)), T(0), x * weight);
}

// sums = the sums of the neighbours that follow each other in `terms`.
template <int WIDTH, class T>
NEEDLE_INLINE void add_neighbours(const T* terms, T* sums) {
  using L = typename LanesOf<T>::type;
  constexpr int N = LanesOf<T>::width;
  for (int p = 0; p < kPlaces; p += N) {
    L each[WIDTH];
    for (int q = 0; q < WIDTH; q++) each[q] = load_lanes(terms + p * WIDTH + q * N, N);
    store_lanes(sums + p, sum_neighbours<WIDTH>(each), N);
  }
}

// What a vector of places reads of x is sent for, where they lie close together.
template <class T>
NEEDLE_INLINE void fetch_ahead(const T* x, const int32_t* at, int n) {
  __builtin_prefetch(x + at[0]);
  __builtin_prefetch(x + at[n - 1]);
}

// sums = what the taps read of x, weighted; what they read of the array `next` is sent for.
template <int WIDTH, class T>
NEEDLE_INLINE void read_taps(const Taps<T>& taps, const T* x, const T* next, T* sums) {
  using L = typename LanesOf<T>::type;
  constexpr int N = LanesOf<T>::width, kEach = N / WIDTH;
  for (int p = 0; p < kPlaces; p += N) {
    L terms[WIDTH];
    for (int q = 0; q < WIDTH; q++) terms[q] = L(0);
    for (int t = 0; t < taps.lines; t++) {
      const int32_t* at = taps.offset[t] + p;
      if (next != x) fetch_ahead(next, at, N);
      for (int q = 0; q < WIDTH; q++)
        terms[q] = terms[q] +
                   weighted(neighbours<WIDTH>(x, at + q * kEach), load_lanes(taps.weight(t) + p * WIDTH + q * N, N));
    }
    store_lanes(sums + p, sum_neighbours<WIDTH>(terms), N);
  }
}

// f(how many neighbours along an image's last axis are read at once, as a constant): of doubles, which are rare, one.
template <class T, class F>
void with_width(const Sampling& s, bool dense, const F& f) {
  const int each = taps_of(s.mode);
  if constexpr (sizeof(T) == 4)
    if (dense && s.size[2] >= each && each > 1)
      return each == 2 ? f(std::integral_constant<int, 2>()) : f(std::integral_constant<int, 4>());
  f(std::integral_constant<int, 1>());
}

// What places read in mode nearest: an element of the image, and 1, or 0 beside it.
template <class T>
struct Nearest {
  static constexpr int kMost = 256;
  int32_t offset[kMost];
  T weight[kMost];
};

template <int PADDING, class T>
void find_nearest(const Sampling& s, const T* grid, int64_t place_step, int64_t number_step, int n,
                  const int32_t* stride, Nearest<T>& nearest) {
  using L = typename LanesOf<T>::type;
  constexpr int N = LanesOf<T>::width;
  const SamplingRule rule = {kNearest, PADDING, s.corners};
  const L size[] = {L(static_cast<T>(s.size[0])), L(static_cast<T>(s.size[1])), L(static_cast<T>(s.size[2]))};
  for (int64_t first = 0; first < n; first += N) {
    L numbers[3], weight(1);
    auto at = whole(L(0));
    const auto along = [&](int d) __attribute__((always_inline)) {
      taps_along(rule, numbers[d], size[d], [&](int, L place, L inside, L) __attribute__((always_inline)) {
        at += whole(place) * stride[d];
        weight = weight * inside;
      });
    };
    read_numbers(grid + first * place_step, place_step, number_step, n - first, s.rank, numbers);
    along(2);
    along(1);
    if (s.rank == 3) along(0);
    std::memcpy(nearest.offset + first, &at, sizeof at);
    store_lanes(nearest.weight + first, weight, N);
  }
}

template <class T>
void read_nearest(const Nearest<T>& nearest, int n, const T* x, const T* next, T* y, int64_t y_step) {
  using L = typename LanesOf<T>::type;
  constexpr int N = LanesOf<T>::width;
  for_lanes<T>(n, [&](int64_t first, int many) {
    decltype(whole(L(0))) at;
    std::memcpy(&at, nearest.offset + first, sizeof at);
    if (next != x) fetch_ahead(next, nearest.offset + first, N);
    const L found = weighted(gather(x, at), load_lanes(nearest.weight + first, N));
    if (y_step == 1) return store_lanes(y + first, found, many);
    T each[N];
    store_lanes(each, found, N);
    for (int p = 0; p < many; p++) y[(first + p) * y_step] = each[p];
  });
}

// How many channels are read at a time: with more of them the pages that they lie in are more than a core keeps.
constexpr int64_t kChannels = 8;

}  // namespace

void grid_sample(const grid_sample_args& c) {
  const View &x = c.in.x, &grid = c.in.grid, &y = c.out.y;
  if (y.size() == 0) return;
  const Sampling s(c.attr, x);
  const Places to = {y, 2, y.rank}, from = {grid, 1, grid.rank - 1};
  const int64_t places = to.count(), channels = x.shape[1], row = smaller(to.row(), from.row());
  const int64_t place_step = from.step(), number_step = grid.stride[grid.rank - 1];
  int32_t stride[3];
  strides_of(x, stride);
  const auto sample = [&]<class T>(T, int64_t begin, int64_t end, int most, const auto& find, const auto& read) {
    for (int64_t k0 = 0; k0 < channels; k0 += kChannels)
      for_stretches(begin, end, row, most, [&](int64_t first, int n) {
        const int64_t image = first / places, place = first % places;
        const T* in = x.as<const T>() + image * x.stride[0];
        T* out = y.as<T>() + image * y.stride[0] + to.at(place);
        find(grid.as<const T>() + image * grid.stride[0] + from.at(place), n);
        const int64_t end = smaller(k0 + kChannels, channels);
        for (int64_t k = k0; k < end; k++)
          read(in + k * x.stride[1], in + smaller(k + 1, end - 1) * x.stride[1], n, out + k * y.stride[1]);
      });
  };
  with_type<grid_sample_args::In::x_dtypes>(x.dtype, [&]<class T>(T t) {
    with_width<T>(s, stride[2] == 1, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      parallel_ranges(c.exec, x.shape[0] * places, 16 + 4 * channels, [&](int64_t begin, int64_t end) {
        if (s.mode == kNearest) {
          Nearest<T> nearest;
          const auto find = s.padding == kZeros    ? find_nearest<kZeros, T>
                            : s.padding == kBorder ? find_nearest<kBorder, T>
                                                   : find_nearest<kReflection, T>;
          sample(
              t, begin, end, Nearest<T>::kMost,
              [&](const T* numbers, int n) { find(s, numbers, place_step, number_step, n, stride, nearest); },
              [&](const T* in, const T* next, int n, T* out) { read_nearest(nearest, n, in, next, out, to.step()); });
        } else {
          Taps<T> taps;
          const auto find = tap_finder<kWidth, T>(s.mode);
          sample(
              t, begin, end, kPlaces,
              [&](const T* numbers, int n) { find(s, numbers, place_step, number_step, n, stride, false, taps); },
              [&](const T* in, const T* next, int n, T* out) {
                T sums[kPlaces];
                const bool all = n == kPlaces && to.step() == 1;
                read_taps<kWidth>(taps, in, next, all ? out : sums);
                for (int p = 0; !all && p < n; p++) out[p * to.step()] = sums[p];
              });
        }
      });
    });
  });
}

// With an image for each thread both gradients come from one look at the places; else the image's is shared out by
// channels, the grid's by places.
void grid_sample_grad(const grid_sample_grad_args& c) {
  const View &x = c.in.x, &grid = c.in.grid, &dy = c.in.dy, &dx = c.out.dx, &dgrid = c.out.dgrid;
  const Sampling s(c.attr, x);
  const Places by = {dy, 2, dy.rank}, from = {grid, 1, grid.rank - 1}, into = {dgrid, 1, dgrid.rank - 1};
  const Places rows = {dx, 2, dx.rank - 1};
  const int64_t places = by.count(), channels = x.shape[1], images = x.shape[0];
  const int64_t row = smaller(smaller(by.row(), from.row()), into.row());
  int32_t of_x[3], of_dx[3];
  strides_of(x, of_x);
  strides_of(dx, of_dx);
  const bool alike = of_x[0] == of_dx[0] && of_x[1] == of_dx[1] && of_x[2] == of_dx[2];
  const auto run = [&]<class T, int WIDTH>(T, std::integral_constant<int, WIDTH>) {
    const auto find = tap_finder<WIDTH, T>(s.mode);
    const auto look = [&](int64_t image, int64_t place, int n, const int32_t* stride, bool slopes, Taps<T>& taps) {
      find(s, grid.as<const T>() + image * grid.stride[0] + from.at(place), from.step(), grid.stride[grid.rank - 1], n,
           stride, slopes, taps);
    };
    const auto seeds = [&](int64_t image, int64_t k, int64_t place, int n, T* g) {  // for every neighbour
      const T* of = dy.as<const T>() + image * dy.stride[0] + k * dy.stride[1] + by.at(place);
      for (int p = 0; p < n; p++)
        for (int q = 0; q < WIDTH; q++) g[p * WIDTH + q] = of[p * by.step()];
    };
    const auto clear = [&](T* base) {
      const int64_t width = dx.shape[dx.rank - 1], step = dx.stride[dx.rank - 1], many = rows.count();
      for (int64_t i = 0; i < many; i++) {
        T* of = base + rows.at(i);
        for (int64_t j = 0; j < width; j++) of[j * step] = T(0);
      }
    };
    using Line = T[WIDTH * kPlaces];
    using Met = T[kMostTaps * kPlaces];
    const auto add = [&](const Taps<T>& taps, const Line& g, int n, T* out) {
      for (int t = 0; t < taps.lines; t++) {
        const T* weight = taps.weight(t);
        Line terms;
        for (int p = 0; p < WIDTH * kPlaces; p++) terms[p] = weighted(g[p], weight[p]);
        for (int p = 0; p < n; p++)
          for (int q = 0; q < WIDTH; q++) out[taps.offset[t][p] + q] += terms[p * WIDTH + q];
      }
    };
    const auto meet = [&](const Taps<T>& taps, const Line& g, const T* in, Met& met) {
      Line found;
      for (int t = 0; t < taps.lines; t++) {
        pick<WIDTH>(in, taps.offset[t], found);
        T* sums = met + t * WIDTH * kPlaces;
        for (int p = 0; p < WIDTH * kPlaces; p++) sums[p] += g[p] * found[p];
      }
    };
    const auto finish = [&](const Taps<T>& taps, const Met& met, int64_t image, int64_t place, int n) {
      T* out = dgrid.as<T>() + image * dgrid.stride[0] + into.at(place);
      for (int d = 3 - s.rank; d < 3; d++) {
        Line terms = {};
        for (int t = 0; s.mode != kNearest && t < taps.lines; t++) {
          const T *slope = taps.slope(d, t), *of = met + t * WIDTH * kPlaces;
          for (int p = 0; p < WIDTH * kPlaces; p++) terms[p] += weighted(of[p], slope[p]);
        }
        T sums[kPlaces];
        add_neighbours<WIDTH>(terms, sums);
        for (int p = 0; p < n; p++) out[p * into.step() + (2 - d) * dgrid.stride[dgrid.rank - 1]] = sums[p];
      }
    };
    const auto image_at = [&](const View& v, int64_t image, int64_t k) {
      return v.as<T>() + image * v.stride[0] + k * v.stride[1];
    };
    const bool still = s.mode == kNearest;  // the grid's gradient is 0
    const bool together = images >= c.exec->threads && alike;
    const int64_t parts = together ? 1 : larger(1, smaller(channels, 2 * c.exec->threads));
    parallel_each(c.exec, images * parts, places * (32 + 8 * ceil_div(channels, parts)), [&](int64_t task) {
      const int64_t image = task / parts, part = task % parts;
      const int64_t k0 = channels * part / parts, k1 = channels * (part + 1) / parts;
      for (int64_t k = k0; k < k1; k++) clear(image_at(dx, image, k));
      for_stretches(0, places, row, kPlaces, [&](int64_t place, int n) {
        Taps<T> taps;
        Met met;
        if (together && !still) std::memset(met, 0, sizeof(met));
        look(image, place, n, of_dx, together && !still, taps);
        for (int64_t k = k0; k < k1; k++) {
          Line g = {};
          seeds(image, k, place, n, g);
          add(taps, g, n, image_at(dx, image, k));
          if (together && !still) meet(taps, g, image_at(x, image, k), met);
        }
        if (together) finish(taps, met, image, place, n);
      });
    });
    if (together) return;
    parallel_ranges(c.exec, images * places, 32 + 8 * channels, [&](int64_t begin, int64_t end) {
      for_stretches(begin, end, row, kPlaces, [&](int64_t first, int n) {
        const int64_t image = first / places, place = first % places;
        Taps<T> taps;
        Met met = {};
        if (still) return finish(taps, met, image, place, n);
        look(image, place, n, of_x, true, taps);
        for (int64_t k = 0; k < channels; k++) {
          Line g = {};
          seeds(image, k, place, n, g);
          meet(taps, g, image_at(x, image, k), met);
        }
        finish(taps, met, image, place, n);
      });
    });
  };
  with_type<grid_sample_grad_args::In::x_dtypes>(x.dtype, [&]<class T>(T t) {
    with_width<T>(s, of_x[2] == 1 && of_dx[2] == 1, [&](auto width) { run(t, width); });
  });
}

}  // namespace needle::NEEDLE_ISA
