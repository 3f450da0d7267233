// Order along an axis: numbers of elements in their order, places in sorted numbers, running sums, products and maxima.
#include "cpu/move.h"
#include "math/keys.h"
#include "math/reductions.h"

namespace needle::NEEDLE_ISA {
namespace {

template <class Key>
struct Item {
  Key key;
  Key number;  // of the element
};

constexpr int kRanked = 16;  // items whose places are counted, which takes no guess of what is larger
constexpr int kFew = 40;     // items that are sorted by insertion
constexpr int kDigit = 8, kDigits = 1 << kDigit;
constexpr int kCoarse = 12;  // bits by which the first of many are told from the others
constexpr int kKept = 16;    // so few are found in one pass

template <class Key>
void insert_all(Item<Key>* items, int64_t n) {
  for (int64_t i = 1; i < n; i++) {
    const Item<Key> item = items[i];
    int64_t j = i;
    for (; j > 0 && item.key < items[j - 1].key; j--) items[j] = items[j - 1];
    items[j] = item;
  }
}

// Items in order, equal ones as they come, digit by digit from the last; `room` has as much memory. Where they are
// then.
template <class Key>
Item<Key>* sorted(Item<Key>* items, Item<Key>* room, int64_t n) {
  if (n <= kFew) return insert_all(items, n), items;
  constexpr int kPasses = sizeof(Key) * 8 / kDigit;
  int64_t counts[kPasses][kDigits] = {};
  for (int64_t i = 0; i < n; i++)
    for (int p = 0; p < kPasses; p++) counts[p][items[i].key >> (p * kDigit) & (kDigits - 1)]++;
  for (int p = 0; p < kPasses; p++) {
    int64_t* count = counts[p];
    if (count[items[0].key >> (p * kDigit) & (kDigits - 1)] == n) continue;  // all have this digit
    int64_t place = 0;
    for (int d = 0; d < kDigits; d++) {
      const int64_t here = count[d];
      count[d] = place;
      place += here;
    }
    for (int64_t i = 0; i < n; i++) room[count[items[i].key >> (p * kDigit) & (kDigits - 1)]++] = items[i];
    Item<Key>* other = items;
    items = room;
    room = other;
  }
  return items;
}

// The first `wanted` of all items, in order, kept so while the others pass by.
template <class T, class Key>
void keep_first(const T* x, int64_t step, int64_t n, Key flip, int64_t wanted, Item<Key>* kept) {
  for (int64_t i = 0; i < wanted; i++) kept[i] = {static_cast<Key>(key_of(x[i * step]) ^ flip), static_cast<Key>(i)};
  insert_all(kept, wanted);
  Key worst = kept[wanted - 1].key;
  for (int64_t i = wanted; i < n; i++) {
    const Key key = key_of(x[i * step]) ^ flip;
    if (key >= worst) continue;
    int64_t j = wanted - 1;
    for (; j > 0 && key < kept[j - 1].key; j--) kept[j] = kept[j - 1];
    kept[j] = {key, static_cast<Key>(i)};
    worst = kept[wanted - 1].key;
  }
}

// Of a row of at most kRanked elements the numbers of its first `wanted`; `n` may be a constant.
template <class T, class Count>
NEEDLE_INLINE void rank_row(const T* x, int64_t step, Count n, bool descending, int64_t* y, int64_t y_step,
                            int64_t wanted) {
  using Key = KeyOf<T>;
  const Key flip = descending ? static_cast<Key>(~Key(0)) : 0;
  Key keys[kRanked];
  for (int64_t i = 0; i < n; i++) keys[i] = key_of(x[i * step]) ^ flip;
  for (int64_t i = 0; i < n; i++) {
    int64_t place = 0;
    for (int64_t j = 0; j < i; j++) place += keys[j] <= keys[i];
    for (int64_t j = i + 1; j < n; j++) place += keys[j] < keys[i];
    if (place < wanted) y[place * y_step] = i;
  }
}

// Of one row the numbers of its first `wanted` elements.
template <class T>
void order_row(const Exec* exec, const T* x, int64_t step, int64_t n, bool descending, int64_t* y, int64_t y_step,
               int64_t wanted) {
  using Key = KeyOf<T>;
  const Key flip = descending ? static_cast<Key>(~Key(0)) : 0;
  auto* items = scratch<Item<Key>>(exec, 0, 2 * n);
  int64_t many = n;
  const Item<Key>* found = items;
  if (wanted <= kKept && wanted < n / 4) {
    keep_first(x, step, n, flip, wanted, items);
  } else if (wanted < n / 4 && n > kFew) {  // leave out what is behind the coarse digit of the last one wanted
    constexpr int kShift = sizeof(Key) * 8 - kCoarse;
    auto* counts = scratch<int64_t>(exec, 1, int64_t(1) << kCoarse);
    std::memset(counts, 0, sizeof(int64_t) << kCoarse);
    for (int64_t i = 0; i < n; i++) counts[(key_of(x[i * step]) ^ flip) >> kShift]++;
    Key last = 0;
    for (int64_t before = counts[0]; before < wanted; before += counts[++last]) {
    }
    many = 0;
    for (int64_t i = 0; i < n; i++) {
      const Key key = key_of(x[i * step]) ^ flip;
      items[many] = {key, static_cast<Key>(i)};
      many += key >> kShift <= last;
    }
    found = sorted(items, items + n, many);
  } else {
    for (int64_t i = 0; i < n; i++) items[i] = {static_cast<Key>(key_of(x[i * step]) ^ flip), static_cast<Key>(i)};
    found = sorted(items, items + n, n);
  }
  for (int64_t i = 0; i < wanted; i++) y[i * y_step] = static_cast<int64_t>(found[i].number);
}

constexpr int kSearches = 8;  // that go on side by side, each waiting for what it reads

// How many of `count` sorted numbers of each row stand before a value.
template <bool Right, class T>
void search(const T* const* rows, int64_t step, int64_t count, const T* values, int64_t* found) {
  for (int k = 0; k < kSearches; k++) found[k] = 0;
  for (int64_t left = count; left > 0;) {
    const int64_t half = (left + 1) / 2;
    for (int k = 0; k < kSearches; k++) {
      const T middle = rows[k][(found[k] + half - 1) * step];
      const bool before = Right ? middle <= values[k] : middle < values[k];
      found[k] += half & -static_cast<int64_t>(before);  // branches that are guessed take three times as long
    }
    left -= half;
  }
}

// Views without one axis, whose lanes are walked together.
template <int N>
struct Rows {
  View views[N];
  int64_t size[N], step[N];  // of the axis

  Rows(const View* const (&given)[N], int axis) {
    for (int k = 0; k < N; k++) {
      View& v = views[k] = *given[k];
      size[k] = v.shape[axis];
      step[k] = v.stride[axis];
      v.rank--;
      for (int d = axis; d < v.rank; d++) v.shape[d] = v.shape[d + 1], v.stride[d] = v.stride[d + 1];
    }
  }

  // f(offsets, steps, n) for n rows beside each other, as many as `most` where there is work for all threads.
  template <class F>
  void beside(const Exec* exec, int64_t most, int64_t work, const F& f) const {
    const View* all[N];
    for (int k = 0; k < N; k++) all[k] = &views[k];
    const Loop<N> loop = loop_over<N>(all);
    const int64_t each = larger(1, loop.outer() * loop.inner() / (4 * exec->threads));
    for_runs(exec, loop, exec->threads == 1 ? most : smaller(most, each), work,
             [&](const int64_t* at, int64_t first, int64_t n) {
               int64_t from[N], down[N];
               for (int k = 0; k < N; k++) {
                 down[k] = loop.stride[k][loop.rank - 1];
                 from[k] = at[k] + first * down[k];
               }
               f(from, down, n);
             });
  }

  // f(offsets) for every row.
  template <class F>
  void each(const Exec* exec, int64_t work, const F& f) const {
    beside(exec, 64, work, [&](const int64_t* from, const int64_t* down, int64_t n) {
      int64_t at[N];
      for (int64_t r = 0; r < n; r++) {
        for (int k = 0; k < N; k++) at[k] = from[k] + r * down[k];
        f(at);
      }
    });
  }
};

constexpr int64_t kBeside = 16;  // rows that are walked together and do not wait for each other

// f(count, first) for eight of the rows at a time, and then for single ones: counts are constants.
template <class F>
NEEDLE_INLINE void by_eights(int64_t rows, const F& f) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) f(std::integral_constant<int64_t, 8>(), r);
  for (; r < rows; r++) f(std::integral_constant<int64_t, 1>(), r);
}

}  // namespace

// Numbers along an axis of the first y.shape[axis] elements in order, equal ones in theirs.
void argsort(const argsort_args& c) {
  if (c.out.y.size() == 0) return;
  const int axis = static_cast<int>(c.attr.axis);
  const Rows<2> rows({&c.out.y, &c.in.x}, axis);
  const bool descending = c.attr.descending != 0;
  with_type<argsort_args::In::x_dtypes>(c.in.x.dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t n = rows.size[1], wanted = smaller(rows.size[0], n), x_step = rows.step[1], y_step = rows.step[0];
    const T* x = c.in.x.as<const T>();
    int64_t* y = c.out.y.as<int64_t>();
    const auto rank = [&](auto count) {
      rows.each(c.exec, 16 * n,
                [&](const int64_t* at) { rank_row(x + at[1], x_step, count, descending, y + at[0], y_step, wanted); });
    };
    if (n <= 4) return with_few(n, rank);
    if (n <= kRanked) return rank(n);
    rows.each(c.exec, 16 * n, [&](const int64_t* at) {
      order_row(c.exec, x + at[1], x_step, n, descending, y + at[0], y_step, wanted);
    });
  });
}

// Where values (..., M) stand in sorted numbers (..., N): before equal ones, or `right` of them; NaN behind all.
void searchsorted(const searchsorted_args& c) {
  if (c.out.y.size() == 0) return;
  const int last = c.out.y.rank - 1;
  const int64_t count = c.in.numbers.shape[last], step = c.in.numbers.stride[last];
  View numbers = c.in.numbers;  // one row of them for every value
  numbers.shape[last] = c.out.y.shape[last];
  numbers.stride[last] = 0;
  const Loop<3> loop = loop_over({&c.out.y, &c.in.values, &numbers});
  const int64_t* strides[3];
  for (int k = 0; k < 3; k++) strides[k] = &loop.stride[k][loop.rank - 1];
  const bool right = c.attr.right != 0;
  with_type<searchsorted_args::In::numbers_dtypes>(c.in.values.dtype, [&](auto t) {
    using T = decltype(t);
    for_pieces(c.exec, loop, kSearches, [&](const int64_t* at, int64_t first, int64_t many) {
      for (int64_t i = first; i < first + many; i += kSearches) {
        const int n = static_cast<int>(smaller(kSearches, first + many - i));
        const T* rows[kSearches];
        T values[kSearches] = {};
        int64_t found[kSearches];
        for (int k = 0; k < kSearches; k++)
          rows[k] = c.in.numbers.as<T>() + at[2] + smaller(i + k, i + n - 1) * *strides[2];
        for (int k = 0; k < n; k++) values[k] = c.in.values.as<T>()[at[1] + (i + k) * *strides[1]];
        right ? search<true>(rows, step, count, values, found) : search<false>(rows, step, count, values, found);
        for (int k = 0; k < n; k++) {
          const bool number = values[k] == values[k];
          c.out.y.as<int64_t>()[at[0] + (i + k) * *strides[0]] = number ? found[k] : count;
        }
      }
    });
  });
}

namespace {

// What an operation makes of all elements up to each along an axis, from its end if `reverse`, in A.
template <class Op, class T, class A, class Args>
void running(const Args& c, bool reverse) {
  const Rows<2> rows({&c.out.y, &c.in.x}, static_cast<int>(c.attr.axis));
  const int64_t n = rows.size[0], turn = reverse ? n - 1 : 0, sign = reverse ? -1 : 1;
  const int64_t x_step = sign * rows.step[1], y_step = sign * rows.step[0];
  const T* from = c.in.x.template as<T>() + turn * rows.step[1];
  T* to = c.out.y.template as<T>() + turn * rows.step[0];
  rows.beside(c.exec, kBeside, n, [&](const int64_t* at, const int64_t* down, int64_t lanes) {
    const auto pass = [&](auto count, T* y, const T* x, int64_t y_down, int64_t x_down) __attribute__((always_inline)) {
      A total[kBeside];
      for (A& t : total) t = static_cast<A>(Op::limit);
      for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < count; j++) {
          total[j] = Op::combine(total[j], static_cast<A>(x[i * x_step + j * x_down]));
          y[i * y_step + j * y_down] = static_cast<T>(total[j]);
        }
    };
    T* y = to + at[0];
    const T* x = from + at[1];
    if (down[0] == 1 && down[1] == 1) return pass(lanes, y, x, 1, 1);
    by_eights(lanes, [&](auto count, int64_t first) {
      pass(count, y + first * down[0], x + first * down[1], down[0], down[1]);
    });
  });
}

}  // namespace

void cumsum(const cumsum_args& c) {
  if (c.out.y.size() == 0) return;
  with_type<cumsum_args::In::x_dtypes>(c.in.x.dtype,
                                       [&]<class T>(T) { running<Sum, T, Accumulator<T>>(c, c.attr.reverse != 0); });
}

void cumprod(const cumprod_args& c) {
  if (c.out.y.size() == 0) return;
  with_type<cumprod_args::In::x_dtypes>(c.in.x.dtype, [&]<class T>(T) {
    running<Product, T, std::conditional_t<std::is_integral_v<T>, uint64_t, double>>(c,
                                                                                     false);  // which may wrap around
  });
}

// dx[k] is the product of x before k times s[k] = dy[k] + x[k + 1] s[k + 1]: no division, which zeros would not stand.
void cumprod_grad(const cumprod_grad_args& c) {
  if (c.out.dx.size() == 0) return;
  const Rows<3> rows({&c.out.dx, &c.in.x, &c.in.dy}, static_cast<int>(c.attr.axis));
  const int64_t n = rows.size[0];
  with_type<cumprod_grad_args::In::x_dtypes>(c.in.x.dtype, [&]<class T>(T) {
    rows.beside(c.exec, kBeside, 4 * n, [&](const int64_t* at, const int64_t* down, int64_t lanes) {
      const T *x = c.in.x.as<const T>() + at[1], *dy = c.in.dy.as<const T>() + at[2];
      T* dx = c.out.dx.as<T>() + at[0];
      double *before = scratch<double>(c.exec, 0, n * kBeside), product[kBeside], sum[kBeside] = {};
      for (double& p : product) p = 1;
      for (int64_t i = 0; i < n; i++)
        for (int64_t r = 0; r < lanes; r++) {
          before[i * kBeside + r] = product[r];
          product[r] *= static_cast<double>(x[r * down[1] + i * rows.step[1]]);
        }
      for (int64_t i = n - 1; i >= 0; i--)
        for (int64_t r = 0; r < lanes; r++) {
          const double next = i + 1 < n ? static_cast<double>(x[r * down[1] + (i + 1) * rows.step[1]]) : 0.0;
          sum[r] = static_cast<double>(dy[r * down[2] + i * rows.step[2]]) + next * sum[r];
          dx[r * down[0] + i * rows.step[0]] = static_cast<T>(before[i * kBeside + r] * sum[r]);
        }
    });
  });
}

// Numbers of the largest of all elements up to each along an axis, the last of equal ones.
void cummax(const cummax_args& c) {
  if (c.out.y.size() == 0) return;
  const Rows<2> rows({&c.out.y, &c.in.x}, static_cast<int>(c.attr.axis));
  with_type<cummax_args::In::x_dtypes>(c.in.x.dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t n = rows.size[0], x_step = rows.step[1], y_step = rows.step[0];
    rows.beside(c.exec, kBeside, n, [&](const int64_t* at, const int64_t* down, int64_t lanes) {
      const int64_t y_down = down[0], x_down = down[1];
      by_eights(lanes, [&]<class N>(N, int64_t first) {
        const T* x = c.in.x.as<const T>() + at[1] + first * x_down;
        int64_t *y = c.out.y.as<int64_t>() + at[0] + first * y_down, number[N::value] = {};
        KeyOf<T> most[N::value] = {};
        for (int64_t i = 0; i < n; i++)
          for (int64_t r = 0; r < N::value; r++) {
            const auto key = key_of(x[r * x_down + i * x_step]);
            number[r] = key >= most[r] ? i : number[r];  // 0 is no larger than any
            most[r] = key >= most[r] ? key : most[r];
            y[r * y_down + i * y_step] = number[r];
          }
      });
    });
  });
}

}  // namespace needle::NEEDLE_ISA
