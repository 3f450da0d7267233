// Distances between rows of two matrices, by differences: |a|^2 + |b|^2 - 2 a b would cancel between neighbours.
#include "cpu/strided.h"
#include "math/norms.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int kRows = 4, kVectors = 2;  // of the result, which stay in registers

// y (rows x kVectors lanes) from rows of a and kVectors columns of vectors of b, of which `next` lies behind each.
template <class Norm, int ROWS, class T>
void tile(const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t next, int64_t terms, T p, T* y,
          int64_t y_row) {
  using L = typename LanesOf<T>::type;
  constexpr int N = LanesOf<T>::width;
  L totals[ROWS][kVectors];
  for (auto& row : totals)
    for (L& t : row) t = L(T(0));
  for (int64_t m = 0; m < terms; m++, b += next) {
    L columns[kVectors];
    for (int v = 0; v < kVectors; v++) columns[v] = load_lanes(b + v * N, N);
    for (int r = 0; r < ROWS; r++) {
      const L mine(a[r * a_row + m * a_step]);
      for (int v = 0; v < kVectors; v++) totals[r][v] = Norm::add(totals[r][v], mine - columns[v], L(p));
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < kVectors; v++) store_lanes(y + r * y_row + v * N, Norm::finish(totals[r][v], L(p)), N);
}

// The distance of two rows.
template <class Norm, class T>
T distance(const T* a, const T* b, int64_t terms, T p) {
  using L = typename LanesOf<T>::type;
  constexpr int N = LanesOf<T>::width, kChains = 4;
  L totals[kChains];
  for (L& t : totals) t = L(T(0));
  int64_t m = 0;
  for (; m + kChains * N <= terms; m += kChains * N)
    for (int k = 0; k < kChains; k++)
      totals[k] = Norm::add(totals[k], load_lanes(a + m + k * N, N) - load_lanes(b + m + k * N, N), L(p));
  for_lanes<T>(terms - m, [&](int64_t i, int lanes) {
    totals[0] = Norm::add(totals[0], load_lanes(a + m + i, lanes) - load_lanes(b + m + i, lanes), L(p));
  });
  T each[N];
  store_lanes(each, Norm::join(Norm::join(totals[0], totals[1]), Norm::join(totals[2], totals[3])), N);
  for (int i = 1; i < N; i++) each[0] = Norm::join(each[0], each[i]);
  return Norm::finish(each[0], p);
}

template <class Norm, class T>
void distances(const cdist_args& c) {
  constexpr int kColumns = kVectors * LanesOf<T>::width;
  const View &a = c.in.a, &b = c.in.b, &y = c.out.y;
  const int64_t rows = y.shape[1], columns = y.shape[2], terms = a.shape[2], parts = ceil_div(columns, kColumns);
  const T p = static_cast<T>(c.attr.p);
  // Tiles of few and long rows would be empty for the most part.
  const bool few = (rows < kRows || columns <= kColumns / 2) && terms > 8 * LanesOf<T>::width;
  if (few && a.stride[2] == 1 && b.stride[2] == 1)
    return parallel_each(c.exec, y.shape[0] * rows * columns, terms, [&](int64_t t) {
      const int64_t j = t % columns, i = t / columns % rows, batch = t / columns / rows;
      y.as<T>()[batch * y.stride[0] + i * y.stride[1] + j * y.stride[2]] =
          distance<Norm>(a.as<const T>() + batch * a.stride[0] + i * a.stride[1],
                         b.as<const T>() + batch * b.stride[0] + j * b.stride[1], terms, p);
    });
  T* packed = scratch<T>(c.exec, 2, larger(1, parts * kColumns * terms));  // [part][term][columns of a part]
  for (int64_t batch = 0; batch < y.shape[0]; batch++) {
    const T *from = b.as<const T>() + batch * b.stride[0], *mine = a.as<const T>() + batch * a.stride[0];
    T* out = y.as<T>() + batch * y.stride[0];
    parallel_each(c.exec, parts, terms * kColumns, [&](int64_t part) {
      T* to = packed + part * terms * kColumns;
      for (int64_t j = 0; j < kColumns; j++) {
        const int64_t column = smaller(part * kColumns + j, columns - 1);
        for (int64_t m = 0; m < terms; m++) to[m * kColumns + j] = from[column * b.stride[1] + m * b.stride[2]];
      }
    });
    const int64_t stretches = ceil_div(rows, kRows);
    parallel_each(c.exec, stretches, columns * (kRows * terms / 4 + 1), [&](int64_t stretch) {
      const int64_t first = stretch * kRows, n = smaller(kRows, rows - first);
      T found[kRows * kColumns];
      for (int64_t part = 0; part < parts; part++) {
        const T *x = mine + first * a.stride[1], *columns_of = packed + part * terms * kColumns;
        if (n == kRows)
          tile<Norm, kRows>(x, a.stride[1], a.stride[2], columns_of, kColumns, terms, p, found, kColumns);
        else
          for (int64_t r = 0; r < n; r++)
            tile<Norm, 1>(x + r * a.stride[1], 0, a.stride[2], columns_of, kColumns, terms, p, found + r * kColumns, 0);
        const int64_t width = smaller(kColumns, columns - part * kColumns);
        for (int64_t r = 0; r < n; r++) {
          T* to = out + (first + r) * y.stride[1] + part * kColumns * y.stride[2];
          for (int64_t j = 0; j < width; j++) to[j * y.stride[2]] = found[r * kColumns + j];
        }
      }
    });
  }
}

// The sum over rows of b, `next` apart, of their weights times the differences of a and them or, if `signs`, the signs
// of these: VECTORS vectors of a row, of which `lanes` lanes each.
template <bool SIGNS, int VECTORS, class T>
void pulled(const T* a, const T* b, int64_t next, const T* weights, int64_t count, T* to, int lanes) {
  using L = typename LanesOf<T>::type;
  constexpr int N = LanesOf<T>::width;
  constexpr int64_t kTerms = 64;  // that are summed in a row
  L mine[VECTORS], total[VECTORS];
  for (int v = 0; v < VECTORS; v++) mine[v] = load_lanes(a + v * N, lanes), total[v] = L(T(0));
  for (int64_t first = 0; first < count; first += kTerms) {
    L sums[VECTORS];
    for (L& x : sums) x = L(T(0));
    for (int64_t j = first; j < smaller(count, first + kTerms); j++) {
      const L weight(weights[j]);
      for (int v = 0; v < VECTORS; v++) {
        const L d = mine[v] - load_lanes(b + j * next + v * N, lanes);
        sums[v] =
            fma(weight, SIGNS ? select(lt(L(T(0)), d), L(T(1)), select(lt(d, L(T(0))), L(T(-1)), d)) : d, sums[v]);
      }
    }
    for (int v = 0; v < VECTORS; v++) total[v] = total[v] + sums[v];
  }
  for (int v = 0; v < VECTORS; v++) store_lanes(to + v * N, total[v], lanes);
}

}  // namespace

// Rows of a (B, P, M) and b (B, R, M) to (B, P, R), in the p-norm.
void cdist(const cdist_args& c) {
  if (c.out.y.size() == 0) return;
  const double p = c.attr.p;
  with_type<cdist_args::In::a_dtypes>(
      c.in.a.dtype, [&]<class T>(T) { with_norm(p, [&](auto norm) { distances<decltype(norm), T>(c); }); });
}

// The gradient of a from those of the distances y, p being 1 or 2; rows of a, b and da are dense. That of b is what the
// same gives for both swapped and y and dy transposed.
void cdist_grad(const cdist_grad_args& c) {
  const View &a = c.in.a, &b = c.in.b, &y = c.in.y, &dy = c.in.dy, &da = c.out.da;
  const int64_t rows = a.shape[1], count = b.shape[1], terms = a.shape[2];
  if (da.size() == 0) return;
  auto run = [&]<class S, class T>(S, T) {
    constexpr int kTogether = 4, N = LanesOf<T>::width;
    parallel_each(c.exec, a.shape[0] * rows, 2 * count * (terms / N + 1), [&](int64_t t) {
      const int64_t batch = t / rows, i = t % rows;
      const T* slopes = dy.as<const T>() + batch * dy.stride[0] + i * dy.stride[1];
      const T* sizes = y.as<const T>() + batch * y.stride[0] + i * y.stride[1];
      T* weights = scratch<T>(c.exec, 0, larger(1, count));
      for (int64_t j = 0; j < count; j++) {
        const T slope = slopes[j * dy.stride[2]], size = sizes[j * y.stride[2]];
        weights[j] = S::value ? slope : size == 0 ? T(0) : slope / size;
      }
      const T* mine = a.as<const T>() + batch * a.stride[0] + i * a.stride[1];
      const T* others = b.as<const T>() + batch * b.stride[0];
      T* to = da.as<T>() + batch * da.stride[0] + i * da.stride[1];
      int64_t m = 0;
      for (; m + kTogether * N <= terms; m += kTogether * N)
        pulled<S::value, kTogether>(mine + m, others + m, b.stride[1], weights, count, to + m, N);
      for_lanes<T>(terms - m, [&](int64_t k, int lanes) {
        pulled<S::value, 1>(mine + m + k, others + m + k, b.stride[1], weights, count, to + m + k, lanes);
      });
    });
  };
  with_type<cdist_grad_args::In::a_dtypes>(
      a.dtype, [&](auto type) { c.attr.p == 1 ? run(std::true_type(), type) : run(std::false_type(), type); });
}

}  // namespace needle::NEEDLE_ISA
