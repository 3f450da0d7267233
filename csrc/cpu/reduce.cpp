// Sum, mean, product, maximum and minimum over any set of dimensions, and argmax. Float sums run in vectors for at most
// a few hundred terms and are then added up in double; products, whose parts would leave float's range, in double.

#include "cpu/move.h"
#include "math/reductions.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kRow = 2048;      // elements of a contiguous row that are summed in float
constexpr int64_t kFewTerms = 256;  // elements of a row that is reduced together with its neighbours
constexpr int64_t kColumns = 64;    // neighbouring outputs reduced together
constexpr int64_t kWide = 512;      // neighbouring outputs that are a unit of work
constexpr int64_t kFlush = 64;      // terms of a column that are summed in float
constexpr int64_t kBeside = 16;     // short rows whose largest elements are looked for together
constexpr int64_t kShort = 32;      // elements of such a row

template <class Op, class T>
using Kept = std::conditional_t<Op::exact, T, Accumulator<T>>;
template <class Op, class T>
constexpr bool in_vectors = std::is_same_v<T, float> && !std::is_same_v<Op, Product>;

// n numbers in `chains` chains, so that one addition need not wait for the one before.
template <class Op, int chains, class T, class A>
NEEDLE_INLINE A reduce_numbers(const T* p, int64_t stride, int64_t n) {
  A a[chains];
  for (A& x : a) x = from_double<A>(Op::limit);
  int64_t i = 0;
  for (; i + chains <= n; i += chains)
    for (int k = 0; k < chains; k++) a[k] = Op::combine(a[k], static_cast<A>(p[(i + k) * stride]));
  for (; i < n; i++) a[0] = Op::combine(a[0], static_cast<A>(p[i * stride]));
  for (int k = chains / 2; k > 0; k /= 2)
    for (int j = 0; j < k; j++) a[j] = Op::combine(a[j], a[j + k]);
  return a[0];
}

template <class Op, class T, class A>
NEEDLE_INLINE A reduce_row(const T* p, int64_t stride, int64_t n) {
  if constexpr (in_vectors<Op, T>)
    if (stride == 1 && n >= V::N) {
      V total = V::load(p);
      int64_t i = V::N;
      if (n >= 8 * V::N) {
        V v[8];
        for (int k = 0; k < 8; k++) v[k] = V::load(p + k * V::N);
        for (i = 8 * V::N; i + 8 * V::N <= n; i += 8 * V::N)
          for (int k = 0; k < 8; k++) v[k] = Op::combine(v[k], V::load(p + i + k * V::N));
        for (int k = 4; k > 0; k /= 2)
          for (int j = 0; j < k; j++) v[j] = Op::combine(v[j], v[j + k]);
        total = v[0];
      }
      for (; i + V::N <= n; i += V::N) total = Op::combine(total, V::load(p + i));
      float lanes[V::N];
      total.store(lanes);
      const A rest = reduce_numbers<Op, 1, float, A>(p + i, 1, n - i);
      return Op::combine(reduce_numbers<Op, V::N, float, A>(lanes, 1, V::N), rest);
    }
  if (n >= 32 && stride == 1) return reduce_numbers<Op, 16, T, A>(p, 1, n);
  if (n >= 8) return reduce_numbers<Op, 4, T, A>(p, stride, n);
  return reduce_numbers<Op, 1, T, A>(p, stride, n);
}

// `count` columns of a row, all contiguous: acc[j] = combine(acc[j], column j over the reduced positions [begin, end)).
template <class Op, class T, class A>
void reduce_columns(A* acc, const T* base, int64_t count, const Loop<1>& reduced, int64_t begin, int64_t end) {
  const int64_t step = reduced.stride[0][reduced.rank - 1];
  if (count <= kColumns / 2 && reduced.rank == 1 && step == count && end - begin > kColumns) {
    // Few columns without gaps: several terms side by side are as many columns.
    const int64_t together = kColumns / count, terms = (end - begin) / together;
    Loop<1> wide{{1, {terms}, {{together * count}}}};
    A acc_wide[kColumns];
    for (int64_t j = 0; j < together * count; j++) acc_wide[j] = from_double<A>(Op::limit);
    reduce_columns<Op>(acc_wide, base + begin * step, together * count, wide, 0, terms);
    for (int64_t j = 0; j < together * count; j++) acc[j % count] = Op::combine(acc[j % count], acc_wide[j]);
    begin += terms * together;
  }
  if constexpr (in_vectors<Op, T>) {
    const float limit = static_cast<float>(from_double<A>(Op::limit));
    float partial[kColumns];
    for (int64_t i = begin; i < end; i += kFlush) {
      const int64_t last = smaller(end, i + kFlush);
      // f(p, n): the next n terms, `step` apart
      auto for_terms = [&](const auto& f) {
        auto o = Odometer<1>::start(reduced, reduced.rank, i);
        for (int64_t t = i, n; t < last; t += n, o.skip(n)) f(base + o.at[0], n = smaller(last - t, o.left()));
      };
      if (count == kColumns) {
        constexpr int kVectors = kColumns / V::N;
        V v[kVectors];
        for (V& x : v) x = V(limit);
        for_terms([&](const float* p, int64_t n) {
          for (; n > 0; n--, p += step)
            for (int k = 0; k < kVectors; k++) v[k] = Op::combine(v[k], V::load(p + k * V::N));
        });
        for (int k = 0; k < kVectors; k++) v[k].store(partial + k * V::N);
      } else {
        for_lanes<float>(count, [&](int64_t j, int lanes) {
          V v[4];  // as many chains
          for (V& x : v) x = V(limit);
          for_terms([&](const float* p, int64_t n) {
            for (; n >= 4; n -= 4, p += 4 * step)
              for (int k = 0; k < 4; k++) v[k] = Op::combine(v[k], load_lanes(p + k * step + j, lanes));
            for (int k = 0; k < n; k++) v[k] = Op::combine(v[k], load_lanes(p + k * step + j, lanes));
          });
          store_lanes(partial + j, Op::combine(Op::combine(v[0], v[1]), Op::combine(v[2], v[3])), lanes);
        });
      }
      for (int64_t j = 0; j < count; j++) acc[j] = Op::combine(acc[j], static_cast<A>(partial[j]));
    }
  } else {
    auto o = Odometer<1>::start(reduced, reduced.rank, begin);
    for (int64_t t = begin; t < end; t++, o.next())
      for (int64_t j = 0; j < count; j++) acc[j] = Op::combine(acc[j], static_cast<A>(base[o.at[0] + j]));
  }
}

// result[r] of row r of at most kColumns rows of n contiguous elements, `stride` apart: each is folded to one vector,
// and the vectors are transposed.
template <class Op>
NEEDLE_INLINE void reduce_short_rows(float* result, const float* x, int64_t stride, int64_t n, int64_t rows) {
  float folded[kColumns * V::N], across[V::N * kColumns] = {};
  if (n > V::N) {
    for (int64_t r = 0; r < rows; r++) {
      const float* p = x + r * stride;
      V total = V::load(p);
      int64_t i = V::N;
      for (; i + V::N <= n; i += V::N) total = Op::combine(total, V::load(p + i));
      if (i < n)  // an element that comes twice changes no maximum, a zero no sum
        total = Op::combine(total, Op::exact ? V::load(p + n - V::N) : V::load_n(p + i, static_cast<int>(n - i)));
      total.store(folded + r * V::N);
    }
    x = folded, stride = n = V::N;
  }
  if (n < 4)
    for (int64_t i = 0; i < n; i++) move_row(across + i * kColumns, 1, x + i, stride, rows);
  else
    transpose(across, kColumns, x, stride, rows, n);
  for (int64_t j = 0; j < kColumns; j += V::N) {
    V total = V::load(across + j);
    for (int64_t i = 1; i < n; i++) total = Op::combine(total, V::load(across + i * kColumns + j));
    total.store(result + j);
  }
}

// How a reduction is cut: `groups` of `width` outputs, each over `units` of work, the units of a group in `parts`.
struct Cut {
  int64_t groups, width, units, parts;
};

template <class Op, class T, class Args>
void reduce_as(const Args& c, bool mean) {
  using A = Kept<Op, T>;
  const View &in = c.in.x, &out = c.out.y;
  Loop<1> reduced;  // of the input
  Loop<2> kept;     // of the input and the output
  split_dimensions(in, out, kept, reduced);
  kept.merge(), reduced.merge();
  const int64_t outputs = kept.inner() * kept.outer(), count = reduced.inner() * reduced.outer();
  if (outputs == 0) return;
  int64_t row = reduced.inner(), row_stride = reduced.stride[0][reduced.rank - 1];
  // Of windows, which share elements, outputs and rows are both without gaps.
  const bool columns = kept.stride[0][kept.rank - 1] == 1 && kept.inner() > 1 && count > 0 &&
                       (count == 1 || row_stride != 1 || kept.inner() > row);
  int64_t pieces = ceil_div(row, kRow), chunks = ceil_div(kept.inner(), kWide);
  Cut cut = columns ? Cut{kept.outer() * chunks, smaller(kWide, kept.inner()), count, 1}
                    : Cut{outputs, 1, reduced.outer() * pieces, 1};
  // Too few groups for the threads: the units of each are shared, and their results are combined at the end.
  if (cut.groups < 4 * c.exec->threads && count * outputs > 65536)
    cut.parts = larger(1, smaller(cut.units, smaller(ceil_div(8 * c.exec->threads, cut.groups),
                                                     count * outputs / 16384 / cut.groups)));
  A* partial = cut.parts > 1 ? scratch<A>(c.exec, 2, cut.groups * cut.parts * kWide) : nullptr;
  const T* x = in.as<T>();
  T* y = out.as<T>();
  double scale = mean ? 1.0 / static_cast<double>(count) : 1.0;
  auto finish = [&](int64_t offset, const A* acc, int64_t n) {
    T* to = y + offset;
    const int64_t step = n > 1 ? kept.stride[1][kept.rank - 1] : 0;
    const auto value = [&](A a) { return mean ? static_cast<T>(static_cast<double>(a) * scale) : static_cast<T>(a); };
    if (step == 1)
      for (int64_t j = 0; j < n; j++) to[j] = value(acc[j]);
    else
      for (int64_t j = 0; j < n; j++) to[j * step] = value(acc[j]);
  };
  if constexpr (in_vectors<Op, T>)
    if (!columns && row_stride == 1 && row == count && row > 0 && row <= kFewTerms && kept.inner() > 4) {
      const int64_t stride = kept.stride[0][kept.rank - 1], step = kept.stride[1][kept.rank - 1];
      const int64_t blocks = ceil_div(kept.inner(), kColumns);
      return parallel_each(c.exec, kept.outer() * blocks, kColumns * row, [&](int64_t t) {
        const auto o = Odometer<2>::start(kept, kept.rank - 1, t / blocks);
        const int64_t first = t % blocks * kColumns, n = smaller(kColumns, kept.inner() - first);
        float result[kColumns];
        reduce_short_rows<Op>(result, x + o.at[0] + first * stride, stride, row, n);
        A acc[kColumns];
        for (int64_t j = 0; j < kColumns; j++)
          acc[j] = Op::combine(from_double<A>(Op::limit), static_cast<A>(result[j]));
        finish(o.at[1] + first * step, acc, n);
      });
    }
  // Rows are often short: what leads to the next one would take longer than the row.
  if (!columns && cut.parts == 1 && cut.units == 1 && kept.rank == 1)
    return parallel_each(c.exec, outputs, count, [&](int64_t i) {
      const A total = reduce_row<Op, T, A>(x + i * kept.stride[0][0], row_stride, row);
      const A acc = Op::combine(from_double<A>(Op::limit), total);
      finish(i * kept.stride[1][0], &acc, 1);
    });
  // Where a group starts in the input and the output, and its number of outputs.
  auto locate = [&](int64_t group, int64_t* at) {
    auto o = Odometer<2>::start(kept, columns ? kept.rank - 1 : kept.rank, columns ? group / chunks : group);
    int64_t first = columns ? group % chunks * kWide : 0;
    at[0] = o.at[0] + first, at[1] = o.at[1] + first * kept.stride[1][kept.rank - 1];
    return columns ? smaller(kWide, kept.inner() - first) : 1;
  };
  int64_t work = cut.width * count / cut.parts;
  parallel_ranges(c.exec, cut.groups * cut.parts, work, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
      int64_t group = t / cut.parts, part = t % cut.parts, at[2];
      int64_t begin = cut.units * part / cut.parts, end = cut.units * (part + 1) / cut.parts;
      int64_t n = locate(group, at);
      A own[kWide];
      A* acc = partial ? partial + t * kWide : own;
      for (int64_t j = 0; j < n; j++) acc[j] = from_double<A>(Op::limit);
      if (columns) {
        for (int64_t j = 0; j < n; j += kColumns)
          reduce_columns<Op>(acc + j, x + at[0] + j, smaller(kColumns, n - j), reduced, begin, end);
      } else if (count > 0) {
        auto r = Odometer<1>::start(reduced, reduced.rank - 1, begin / pieces);
        int64_t piece = begin % pieces;
        for (int64_t u = begin; u < end; u++) {
          const T* p = x + at[0] + r.at[0] + piece * kRow * row_stride;
          acc[0] = Op::combine(acc[0], reduce_row<Op, T, A>(p, row_stride, smaller(kRow, row - piece * kRow)));
          if (++piece == pieces) r.next(), piece = 0;
        }
      }
      if (!partial) finish(at[1], acc, n);
    }
  });
  if (!partial) return;
  for (int64_t group = 0; group < cut.groups; group++) {
    int64_t at[2], n = locate(group, at);
    A* acc = partial + group * cut.parts * kWide;
    for (int64_t part = 1; part < cut.parts; part++)
      for (int64_t j = 0; j < n; j++) acc[j] = Op::combine(acc[j], acc[part * kWide + j]);
    finish(at[1], acc, n);
  }
}

template <class Op, class Args>
void reduce(const Args& c, bool mean = false) {
  with_type<Args::In::x_dtypes>(c.in.x.dtype, [&](auto t) { reduce_as<Op, decltype(t)>(c, mean); });
}

// First index of the largest element; a NaN counts as the largest, as in torch.
template <class T>
int64_t index_of_max(const T* p, int64_t stride, int64_t n) {
  int64_t best = 0;
  T top = p[0];
  for (int64_t i = 1; i < n && top == top; i++) {
    T x = p[i * stride];
    if (x > top || x != x) top = x, best = i;
  }
  return best;
}

// The same of `lanes` rows, `down` apart, side by side, which takes no guess of what is larger.
template <class T>
NEEDLE_INLINE void indices_of_max(const T* p, int64_t down, int64_t stride, int64_t n, int64_t lanes, int64_t* y,
                                  int64_t y_down) {
  T top[kBeside];
  std::conditional_t<sizeof(T) == 4, int32_t, int64_t> best[kBeside] = {};
  for (int64_t r = 0; r < lanes; r++) top[r] = p[r * down];
  for (int64_t i = 1; i < n; i++)
    for (int64_t r = 0; r < lanes; r++) {
      const T x = p[r * down + i * stride];
      const bool better =
          static_cast<int>(x > top[r]) | (static_cast<int>(x != x) & static_cast<int>(top[r] == top[r]));
      top[r] = better ? x : top[r];
      best[r] = better ? static_cast<decltype(+best[r])>(i) : best[r];
    }
  for (int64_t r = 0; r < lanes; r++) y[r * y_down] = best[r];
}

}  // namespace

void sum(const sum_args& c) { reduce<Sum>(c); }
void mean(const mean_args& c) { reduce<Sum>(c, true); }
void prod(const prod_args& c) { reduce<Product>(c); }
void max(const max_args& c) { reduce<Max>(c); }
void min(const min_args& c) { reduce<Min>(c); }

void argmax(const argmax_args& c) {
  int axis = static_cast<int>(c.attr.axis);
  View in = c.in.x;
  int64_t n = in.shape[axis], stride = in.stride[axis];
  in.shape[axis] = 1;
  const View* views[] = {&c.out.y, &in};
  const Loop<2> loop = loop_over(views);
  if (loop.inner() * loop.outer() == 0 || n == 0) return;
  const int64_t y_down = loop.stride[0][loop.rank - 1], down = loop.stride[1][loop.rank - 1];
  const bool beside = n <= kShort || (down == 1 && n < INT32_MAX);
  with_type<argmax_args::In::x_dtypes>(in.dtype, [&](auto t) {
    using T = decltype(t);
    for_runs(c.exec, loop, beside ? kBeside : 1, n, [&](const int64_t* at, int64_t first, int64_t rows) {
      int64_t* y = c.out.y.as<int64_t>() + at[0] + first * y_down;
      const T* x = in.as<const T>() + at[1] + first * down;
      if (!beside)
        *y = index_of_max(x, stride, n);
      else if (down == 1)
        indices_of_max(x, 1, stride, n, rows, y, y_down);
      else
        indices_of_max(x, down, stride, n, rows, y, y_down);
    });
  });
}

}  // namespace needle::NEEDLE_ISA
