// Images and volumes read at places that a grid gives (Jaderberg et al., arXiv 1506.02025), and the gradients.
//
// Places are taken kPlaces at a time: what is read for them and with which weights is found once and serves all
// channels. Arrays of places have that many numbers, however few are wanted, so that loops over them are vectors from
// end to end. An image is a volume of depth 1. What has weight 0 is not read: beside the image there may be anything.
#include "cpu/strided.h"
#include "math/sampling.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int kPlaces = 64, kMostTaps = 16;

// What a place reads along an axis: elements, their weights, and how the weights change with the grid's number.
template <class T>
struct AxisTaps {
  T place[4][kPlaces], weight[4][kPlaces], slope[4][kPlaces];
};

// What it reads of an image: `lines` of `width` neighbours, where they begin, and for every place and neighbour of a
// line its weight and the weight's slope along each axis.
template <class T>
struct Taps {
  int lines, width;
  int32_t offset[kMostTaps][kPlaces];
  T weights[kMostTaps * kPlaces], slopes[3][kMostTaps * kPlaces];

  const T* weight(int line) const { return weights + line * width * kPlaces; }
  const T* slope(int axis, int line) const { return slopes[axis] + line * width * kPlaces; }
};

struct Sampling : SamplingRule {
  int rank;         // of the image without its batch and channels
  int64_t size[3];  // depth, height, width

  template <class Attr>
  Sampling(const Attr& attr, const View& x)
      : SamplingRule{static_cast<int>(attr.mode), static_cast<int>(attr.padding), attr.corners != 0}, rank(x.rank - 2) {
    for (int d = 0; d < 3; d++) size[d] = d < 3 - rank ? 1 : x.shape[d + rank - 1];
  }
  int per_axis() const { return mode == kNearest ? 1 : mode == kBilinear ? 2 : 4; }
};

// The numbers of n places of a grid by axis, x last, and 0 up to kPlaces.
template <class T>
NEEDLE_INLINE void read_numbers(const T* __restrict grid, int64_t place_step, int64_t number_step, int n, int rank,
                                T (*__restrict numbers)[kPlaces]) {
  if (n == kPlaces && rank == 2 && place_step == 2 && number_step == 1) {
    for (int p = 0; p < kPlaces; p++) numbers[2][p] = grid[2 * p], numbers[1][p] = grid[2 * p + 1];
    return;
  }
  for (int d = 3 - rank; d < 3; d++)
    for (int p = 0; p < kPlaces; p++) numbers[d][p] = p < n ? grid[p * place_step + (2 - d) * number_step] : T(0);
}

// Taps of kPlaces numbers of a grid along an axis of `elements`.
template <int MODE, class T>
void along_axis(SamplingRule rule, const T* grid, int64_t elements, bool slopes, AxisTaps<T>& taps) {
  using L = typename LanesOf<T>::type;
  constexpr int N = LanesOf<T>::width;
  const L size(static_cast<T>(elements));
  rule.mode = MODE;
  for (int p = 0; p < kPlaces; p += N)
    taps_along(rule, load_lanes(grid + p, N), size,
               [&](int k, L place, L weight, L slope) __attribute__((always_inline)) {
                 store_lanes(taps.place[k] + p, place, N);
                 store_lanes(taps.weight[k] + p, weight, N);
                 if (slopes) store_lanes(taps.slope[k] + p, slope, N);
               });
}

// The taps of an axis as so many neighbours: the first one's place, and what falls to each of them.
template <class T>
void side_by_side(int many, int64_t elements, bool slopes, AxisTaps<T>& taps) {
  using L = typename LanesOf<T>::type;
  constexpr int N = LanesOf<T>::width;
  for (int p = 0; p < kPlaces; p += N) {
    const auto at = [&](T(&of)[4][kPlaces], int k) { return load_lanes(of[k] + p, N); };
    L first(static_cast<T>(elements - many)), weights[4], changes[4];
    for (int k = 0; k < many; k++) first = min(at(taps.place, k), first);
    for (int q = 0; q < many; q++) {
      weights[q] = changes[q] = L(0);
      for (int k = 0; k < many; k++) {
        const auto here = eq(at(taps.place, k), first + L(static_cast<T>(q)));
        weights[q] = weights[q] + select(here, at(taps.weight, k), L(0));
        if (slopes) changes[q] = changes[q] + select(here, at(taps.slope, k), L(0));
      }
    }
    store_lanes(taps.place[0] + p, first, N);
    for (int q = 0; q < many; q++) store_lanes(taps.weight[q] + p, weights[q], N);
    for (int q = 0; slopes && q < many; q++) store_lanes(taps.slope[q] + p, changes[q], N);
  }
}

// to[p][q] = a[p] * b[q][p].
template <int WIDTH, class T>
NEEDLE_INLINE void spread(const T* __restrict a, const T (*__restrict b)[kPlaces], T* __restrict to) {
  for (int p = 0; p < kPlaces; p++)
    for (int q = 0; q < WIDTH; q++) to[p * WIDTH + q] = a[p] * b[q][p];
}

// What `n` places from `grid` on read.
template <int WIDTH, class T>
void find_taps(const Sampling& s, const T* grid, int64_t place_step, int64_t number_step, int n, const int32_t* stride,
               bool slopes, Taps<T>& taps) {
  AxisTaps<T> axes[3];
  int32_t element[3][4][kPlaces];
  const int each = s.per_axis(), deep = s.rank == 3 ? each : 1, across = each / WIDTH;
  T numbers[3][kPlaces];
  read_numbers(grid, place_step, number_step, n, s.rank, numbers);
  for (int d = 3 - s.rank; d < 3; d++) {
    const auto along = s.mode == kNearest    ? along_axis<kNearest, T>
                       : s.mode == kBilinear ? along_axis<kBilinear, T>
                                             : along_axis<kBicubic, T>;
    along(s, numbers[d], s.size[d], slopes, axes[d]);
    if (d == 2 && WIDTH > 1) side_by_side(WIDTH, s.size[d], slopes, axes[d]);
    for (int k = 0; k < (d == 2 ? across : each); k++)
      for (int p = 0; p < kPlaces; p++) element[d][k][p] = static_cast<int32_t>(axes[d].place[k][p]) * stride[d];
  }
  taps.lines = deep * each * across;
  taps.width = WIDTH;
  const AxisTaps<T>&z = axes[0], &y = axes[1], &x = axes[2];
  for (int t = 0; t < taps.lines; t++) {
    const int i = t / (each * across), j = t / across % each, k = t % across;
    const int64_t at = t * WIDTH * kPlaces;
    T both[kPlaces], of_z[kPlaces], of_y[kPlaces];
    const bool volume = s.rank == 3;
    for (int p = 0; p < kPlaces; p++) taps.offset[t][p] = element[1][j][p] + element[2][k][p];
    if (volume)
      for (int p = 0; p < kPlaces; p++) taps.offset[t][p] += element[0][i][p];
    for (int p = 0; p < kPlaces; p++) both[p] = volume ? z.weight[i][p] * y.weight[j][p] : y.weight[j][p];
    spread<WIDTH>(both, x.weight + k, taps.weights + at);
    if (!slopes) continue;
    spread<WIDTH>(both, x.slope + k, taps.slopes[2] + at);
    for (int p = 0; p < kPlaces; p++) of_y[p] = volume ? z.weight[i][p] * y.slope[j][p] : y.slope[j][p];
    spread<WIDTH>(of_y, x.weight + k, taps.slopes[1] + at);
    if (!volume) continue;
    for (int p = 0; p < kPlaces; p++) of_z[p] = z.slope[i][p] * y.weight[j][p];
    spread<WIDTH>(of_z, x.weight + k, taps.slopes[0] + at);
  }
}

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
void for_stretches(int64_t begin, int64_t end, int64_t row, const F& f) {
  while (begin < end) {
    const int64_t stop = smaller(end, begin - begin % row + row);
    for (int64_t n; begin < stop; begin += n) f(begin, static_cast<int>(n = smaller(kPlaces, stop - begin)));
  }
}

void strides_of(const View& x, int32_t* stride) {
  const int rank = x.rank - 2;
  for (int d = 0; d < 3; d++) stride[d] = d < 3 - rank ? 0 : static_cast<int32_t>(x.stride[d + rank - 1]);
}

// What a line reads of x: apart from what is computed of it, so that this is in vectors. Single numbers move as words
// that compilers do not look into: they would put vectors together of them, which takes longer than to store them.
template <int WIDTH, class T>
NEEDLE_INLINE void pick(const T* __restrict x, const int32_t* __restrict offset, T* __restrict found) {
  for (int p = 0; p < kPlaces; p++) {
    if constexpr (WIDTH * sizeof(T) == sizeof(uint32_t)) {
      uint32_t word;
      std::memcpy(&word, x + offset[p], sizeof word);
      asm("" : "+r"(word));
      std::memcpy(found + p, &word, sizeof word);
    } else {
      std::memcpy(found + p * WIDTH, x + offset[p], WIDTH * sizeof(T));
    }
  }
}

// sums[p] = the sum of the neighbours that follow each other in `terms`.
template <int WIDTH, class T>
NEEDLE_INLINE void add_neighbours(const T* __restrict terms, T* __restrict sums) {
  for (int p = 0; p < kPlaces; p++) {
    T sum = terms[p * WIDTH];
    for (int q = 1; q < WIDTH; q++) sum += terms[p * WIDTH + q];
    sums[p] = sum;
  }
}

template <class T>
NEEDLE_INLINE T weighted(T x, T weight) {
  return weight == 0 ? T(0) : x * weight;
}

// sums = what the taps read of x, weighted.
template <int WIDTH, class T>
NEEDLE_INLINE void read_taps(const Taps<T>& taps, const T* __restrict x, T* __restrict sums) {
  T found[WIDTH * kPlaces], terms[WIDTH * kPlaces];
  pick<WIDTH>(x, taps.offset[0], found);
  for (int p = 0; p < WIDTH * kPlaces; p++) terms[p] = weighted(found[p], taps.weights[p]);
  for (int t = 1; t < taps.lines; t++) {
    pick<WIDTH>(x, taps.offset[t], found);
    const T* weight = taps.weight(t);
    for (int p = 0; p < WIDTH * kPlaces; p++) terms[p] += weighted(found[p], weight[p]);
  }
  add_neighbours<WIDTH>(terms, sums);
}

// f(how many neighbours along an image's last axis are read at once, as a constant): of doubles, which are rare, one.
template <class T, class F>
void with_width(const Sampling& s, bool dense, const F& f) {
  const int each = s.per_axis();
  if constexpr (sizeof(T) == 4)
    if (dense && s.size[2] >= each && each > 1)
      return each == 2 ? f(std::integral_constant<int, 2>()) : f(std::integral_constant<int, 4>());
  f(std::integral_constant<int, 1>());
}

// n places in mode nearest, of all channels: a vector of places at a time, with nothing kept but where they read.
template <int PADDING, class T>
void sample_nearest(const Sampling& s, const View& x, const T* in, const T* grid, int64_t place_step,
                    int64_t number_step, int n, const View& y, T* out, int64_t out_step) {
  using L = typename LanesOf<T>::type;
  constexpr int N = LanesOf<T>::width;
  const SamplingRule rule = {kNearest, PADDING, s.corners};
  const int64_t channels = x.shape[1], x_channel = x.stride[1], y_channel = y.stride[1];
  const int rank = s.rank;
  int32_t stride[3];
  strides_of(x, stride);
  const L size[] = {L(static_cast<T>(s.size[0])), L(static_cast<T>(s.size[1])), L(static_cast<T>(s.size[2]))};
  T numbers[3][kPlaces];
  read_numbers(grid, place_step, number_step, n, rank, numbers);
  for (int first = 0; first < n; first += N) {
    const int many = smaller(N, n - first);
    auto at = whole(L(0));
    L inside(1);
    for (int d = 3 - rank; d < 3; d++)
      taps_along(rule, load_lanes(numbers[d] + first, N), size[d],
                 [&](int, L place, L weight, L) __attribute__((always_inline)) {
                   at += whole(place) * stride[d];
                   inside = inside * weight;
                 });
    T* to = out + first * out_step;
    for (int64_t k = 0; k < channels; k++, to += y_channel) {
      const L found = select(eq(inside, L(0)), L(0), gather(in + k * x_channel, at));
      if (out_step == 1) {
        store_lanes(to, found, many);
        continue;
      }
      T each[N];
      store_lanes(each, found, N);
      for (int p = 0; p < many; p++) to[p * out_step] = each[p];
    }
  }
}

}  // namespace

void grid_sample(const grid_sample_args& c) {
  const View &x = c.in.x, &grid = c.in.grid, &y = c.out.y;
  if (y.size() == 0) return;
  const Sampling s(c.attr, x);
  const Places to = {y, 2, y.rank}, from = {grid, 1, grid.rank - 1};
  const int64_t places = to.count(), channels = x.shape[1], row = smaller(to.row(), from.row());
  int32_t stride[3];
  strides_of(x, stride);
  with_type<grid_sample_args::In::x_dtypes>(x.dtype, [&]<class T>(T) {
    with_width<T>(s, stride[2] == 1, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      parallel_ranges(c.exec, x.shape[0] * places, 16 + 4 * channels, [&](int64_t begin, int64_t end) {
        for_stretches(begin, end, row, [&](int64_t first, int n) {
          const int64_t image = first / places, place = first % places;
          const T *in = x.as<const T>() + image * x.stride[0], *numbers = grid.as<const T>() + image * grid.stride[0];
          T* out = y.as<T>() + image * y.stride[0] + to.at(place);
          numbers += from.at(place);
          if (s.mode == kNearest) {
            const auto sample = s.padding == kZeros    ? sample_nearest<kZeros, T>
                                : s.padding == kBorder ? sample_nearest<kBorder, T>
                                                       : sample_nearest<kReflection, T>;
            return sample(s, x, in, numbers, from.step(), grid.stride[grid.rank - 1], n, y, out, to.step());
          }
          Taps<T> taps;
          find_taps<kWidth>(s, numbers, from.step(), grid.stride[grid.rank - 1], n, stride, false, taps);
          for (int64_t k = 0; k < channels; k++, out += y.stride[1]) {
            T sums[kPlaces];
            const bool all = n == kPlaces && to.step() == 1;
            read_taps<kWidth>(taps, in + k * x.stride[1], all ? out : sums);
            for (int p = 0; !all && p < n; p++) out[p * to.step()] = sums[p];
          }
        });
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
    const auto look = [&](int64_t image, int64_t place, int n, const int32_t* stride, bool slopes, Taps<T>& taps) {
      find_taps<WIDTH>(s, grid.as<const T>() + image * grid.stride[0] + from.at(place), from.step(),
                       grid.stride[grid.rank - 1], n, stride, slopes, taps);
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
      for_stretches(0, places, row, [&](int64_t place, int n) {
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
      for_stretches(begin, end, row, [&](int64_t first, int n) {
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
