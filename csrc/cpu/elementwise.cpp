// The rows of maps.inc over arrays of any strides. A map only ever sees contiguous chunks of one type: operands that
// are strided, broadcast or of another dtype pass through a small buffer.
#include "cpu/elementwise.h"

#include <stdexcept>
#include <type_traits>

#include "cpu/transpose.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int kChunk = 512;  // elements; four buffers of doubles stay in the L1 cache
// Long maps fill the window in which a core looks for loads, and memory's prefetcher ends with a page: gelu_grad of
// arrays that are not in cache is 2.2 times as fast with loads announced.
constexpr int64_t kAhead = 1024;  // bytes
// Of a tile: elements, which of three operands stay in the L1 cache, and rows at least.
constexpr int64_t kTile = 2048, kTileRows = 16;
constexpr int64_t kShortRow = 128;  // elements below which rows are not worth a call of their own

template <class T>
using ChunkFunction = void (*)(int64_t n, T* out, const T* const* in, T p, T q);

template <class Map, class T>
void chunk(int64_t n, T* out, const T* const* in, T p, T q) {
  using L = typename LanesOf<T>::type;
  const T* from[Map::arity];
  for (int k = 0; k < Map::arity; k++) from[k] = in[k];
  for_lanes<T>(n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
    L x[Map::arity];
    for (int k = 0; k < Map::arity; k++) {
      x[k] = load_lanes(from[k] + i, lanes);
      if constexpr (sizeof(L) >= 32) __builtin_prefetch(from[k] + i + kAhead / sizeof(T));
    }
    store_lanes(out + i, apply_map<Map>(x, L(p), L(q)), lanes);
  });
}

struct Operand {
  char* data;
  DType dtype;
  int64_t stride;  // of the innermost dimension
  int64_t period;  // 0, or after how many elements the row repeats
};

constexpr char kAnyDType[] = "*";

// One row of the loop: direct where an operand is contiguous and of type T, else by chunks.
template <class T, int ARITY>
void row(int64_t n, const Operand* ops, const int64_t* at, int64_t first, ChunkFunction<T> f, T p, T q) {
  T buffer[ARITY + 1][kChunk];
  bool direct[ARITY + 1], constant[ARITY + 1], all = true;
  char* data[ARITY + 1];
  int64_t most = kChunk;
  for (int k = 0; k <= ARITY; k++) {
    if (ops[k].period) {
      direct[k] = false, constant[k] = true, most = kChunk / ops[k].period * ops[k].period;
      const T* values = reinterpret_cast<T*>(ops[k].data) + at[k];
      for (int64_t i = 0; i < smaller(n, most); i += ops[k].period)
        std::memcpy(buffer[k] + i, values, ops[k].period * sizeof(T));
      continue;
    }
    direct[k] = ops[k].dtype == dtype_of<T> && (ops[k].stride == 1 || n == 1);
    constant[k] = k > 0 && ops[k].stride == 0 && !direct[k];
    all = all && (direct[k] || constant[k]);
    data[k] = ops[k].data + (at[k] + first * ops[k].stride) * static_cast<int64_t>(dtype_size(ops[k].dtype));
    if (constant[k])
      with_type<kAnyDType>(ops[k].dtype, [&](auto s) {
        T value = static_cast<T>(*reinterpret_cast<decltype(s)*>(data[k]));
        for (int64_t i = 0; i < smaller(n, kChunk); i++) buffer[k][i] = value;
      });
  }
  bool whole = all;
  for (int k = 0; k <= ARITY; k++) whole = whole && direct[k];
  int64_t step = whole ? n : most;
  for (int64_t i = 0; i < n; i += step) {
    int64_t m = smaller(step, n - i);
    const T* in[ARITY];
    for (int k = 1; k <= ARITY; k++) {
      if (direct[k]) {
        in[k - 1] = reinterpret_cast<T*>(data[k]) + i;
        continue;
      }
      in[k - 1] = buffer[k];
      if (!constant[k])
        with_type<kAnyDType>(ops[k].dtype, [&](auto s) {
          convert(buffer[k], 1, reinterpret_cast<decltype(s)*>(data[k]) + i * ops[k].stride, ops[k].stride, m);
        });
    }
    f(m, direct[0] ? reinterpret_cast<T*>(data[0]) + i : buffer[0], in, p, q);
    if (!direct[0])
      with_type<kAnyDType>(ops[0].dtype, [&](auto s) {
        convert(reinterpret_cast<decltype(s)*>(data[0]) + i * ops[0].stride, ops[0].stride, buffer[0], 1, m);
      });
  }
}

constexpr int64_t kRepeats = INT64_MIN;  // instead of a stride

// Factors per channel of blocked images, and others of few elements that every row of a loop reads again: makes the two
// innermost dimensions one, in which such an operand repeats with the period that is returned, else 1.
template <class T, int ARITY>
int64_t repeated(const View* const* views, Loop<ARITY + 1>& loop) {
  const int r = loop.rank;
  const int64_t n = loop.inner();
  if (r < 2 || n > kShortRow) return 1;
  bool repeats[ARITY + 1];
  for (int k = 0; k <= ARITY; k++) {
    const int64_t outer = loop.stride[k][r - 2], inner = loop.stride[k][r - 1];
    repeats[k] = k > 0 && outer == 0 && inner == 1 && views[k]->dtype == dtype_of<T>;
    if (!repeats[k] && outer != inner * n) return 1;
  }
  for (int k = 0; k <= ARITY; k++) loop.stride[k][r - 2] = repeats[k] ? kRepeats : loop.stride[k][r - 1];
  loop.shape[r - 2] *= n, loop.rank--;
  return n;
}

// Whether operands are to be arranged in tiles of the two innermost dimensions: strided ones that lie without gaps
// along another dimension, which is moved next to the innermost one, and numbers for each of short rows.
template <class T, int ARITY>
bool tiles(const View* const* views, Loop<ARITY + 1>& loop) {
  const int last = loop.rank - 1;
  int across = -1;
  bool numbers = false;
  if (last < 1 || loop.stride[0][last] != 1) return false;
  for (int k = 0; k <= ARITY; k++) {
    if (views[k]->dtype != dtype_of<T>) return false;
    if (loop.stride[k][last] == 0) numbers = true;
    if (loop.stride[k][last] == 0 || loop.stride[k][last] == 1) continue;
    const int d = crossing(loop, k);
    if (d < 0 || (across >= 0 && d != across)) return false;
    across = d;
  }
  if (across >= 0) loop.move(across, last - 1);
  return across >= 0 || (numbers && loop.inner() <= kShortRow);
}

template <class T, int ARITY>
void run_tiles(const Exec* exec, const View* const* views, const Loop<ARITY + 1>& loop, ChunkFunction<T> f, T p, T q) {
  const int last = loop.rank - 1;
  const int64_t columns = loop.shape[last], rows = loop.shape[last - 1];
  const int64_t wide = smaller(columns, kTile / kTileRows), high = kTile / wide, tiles = ceil_div(rows, high);
  bool joined = wide == columns;  // rows follow each other in memory, or in a buffer
  for (int k = 0; k <= ARITY; k++)
    joined = joined && (loop.stride[k][last] != 1 || loop.stride[k][last - 1] == columns);
  parallel_ranges(exec, loop.outer() / rows * tiles, high * columns, [&](int64_t begin, int64_t end) {
    T buffer[ARITY][kTile];
    auto o = Odometer<ARITY + 1>::start(loop, last - 1, begin / tiles);
    int64_t tile = begin % tiles;
    for (int64_t t = begin; t < end; t++) {
      const int64_t row = tile * high, height = smaller(high, rows - row);
      for (int64_t column = 0; column < columns; column += wide) {
        const int64_t width = smaller(wide, columns - column);
        const T* in[ARITY];
        int64_t step[ARITY];  // between rows
        for (int k = 0; k < ARITY; k++) {
          const int64_t along = loop.stride[k + 1][last], across = loop.stride[k + 1][last - 1];
          in[k] = views[k + 1]->template as<T>() + o.at[k + 1] + row * across + column * along, step[k] = across;
          if (along == 1) continue;
          if (along == 0)
            for (int64_t i = 0; i < height; i++)
              for (int64_t j = 0; j < width; j++) buffer[k][i * wide + j] = in[k][i * across];
          else
            transpose(buffer[k], wide, in[k], along, width, height);
          in[k] = buffer[k], step[k] = wide;
        }
        T* out = views[0]->template as<T>() + o.at[0] + row * loop.stride[0][last - 1] + column;
        if (joined) {
          f(height * width, out, in, p, q);
          continue;
        }
        for (int64_t i = 0; i < height; i++) {
          f(width, out + i * loop.stride[0][last - 1], in, p, q);
          for (int k = 0; k < ARITY; k++) in[k] += step[k];
        }
      }
      if (++tile == tiles) o.next(), tile = 0;
    }
  });
}

template <class T, int ARITY>
void run(const Call& c, int n_attr, ChunkFunction<T> f) {
  const View* views[ARITY + 1] = {c.out};
  for (int k = 0; k < ARITY; k++) views[k + 1] = c.in + k;
  Loop<ARITY + 1> loop = loop_over(views);
  if (loop.inner() * loop.outer() == 0) return;
  T p = n_attr > 0 ? from_double<T>(c.attr[0]) : T(0), q = n_attr > 1 ? from_double<T>(c.attr[1]) : T(0);
  if (tiles<T, ARITY>(views, loop)) return run_tiles<T, ARITY>(c.exec, views, loop, f, p, q);
  const int64_t period = repeated<T, ARITY>(views, loop);
  Operand ops[ARITY + 1];
  for (int k = 0; k <= ARITY; k++)
    ops[k] = {views[k]->template as<char>(), views[k]->dtype, loop.stride[k][loop.rank - 1],
              loop.stride[k][loop.rank - 1] == kRepeats ? period : 0};
  bool direct = true;
  for (const Operand& o : ops) direct = direct && o.dtype == dtype_of<T> && o.stride == 1;
  if (direct)  // rows are short between the rings of blocked images: what `row` does for each of them would show
    return for_pieces(c.exec, loop, 1, [&](const int64_t* at, int64_t first, int64_t n) {
      const T* in[ARITY];
      for (int k = 0; k < ARITY; k++) in[k] = reinterpret_cast<T*>(ops[k + 1].data) + at[k + 1] + first;
      f(n, reinterpret_cast<T*>(ops[0].data) + at[0] + first, in, p, q);
    });
  for_pieces(c.exec, loop, period,
             [&](const int64_t* at, int64_t first, int64_t n) { row<T, ARITY>(n, ops, at, first, f, p, q); });
}

// Maps of whole quotients: by zero there is none.
template <class Map>
constexpr bool divides = std::is_same_v<Map, trunc_divide_map> || std::is_same_v<Map, floor_divide_map> ||
                         std::is_same_v<Map, fmod_map> || std::is_same_v<Map, remainder_map>;

template <class T>
void check_divisor(View divisor, const char* error) {
  for (int d = 0; d < divisor.rank; d++)
    if (divisor.stride[d] == 0 && divisor.shape[d] > 1) divisor.shape[d] = 1;
  const View* views[] = {&divisor};
  const Loop<1> loop = loop_over(views);
  const int64_t n = loop.inner(), stride = loop.stride[0][loop.rank - 1];
  auto o = Odometer<1>::start(loop, loop.rank - 1, 0);
  for (int64_t row = 0; row < (n ? loop.outer() : 0); row++, o.next()) {
    const T* values = divisor.as<T>() + o.at[0];
    for (int64_t i = 0; i < n; i++)
      if (values[i * stride] == 0) throw std::domain_error(error);
  }
}

// Computes in the dtype of the last input: `where` has a condition of another dtype in front. Bools count as int32.
template <class Map>
void dispatch(const Call& c, const char* no_quotient) {
  if constexpr (divides<Map>)
    with_type<Map::dtypes>(c.in[1].dtype, [&](auto s) {
      if constexpr (std::is_integral_v<decltype(s)>)
        if (c.out->size()) check_divisor<decltype(s)>(c.in[1], no_quotient);
    });
  with_type<Map::dtypes>(c.in[Map::arity - 1].dtype, [&](auto t) {
    using T = std::conditional_t<std::is_same_v<decltype(t), bool>, int32_t, decltype(t)>;
    run<T, Map::arity>(c, Map::attributes, chunk<Map, T>);
  });
}

struct MapRow {
  FloatMap run;
  int arity;
};

template <class Map>
constexpr MapRow map_row() {
  if constexpr (has_letter(Map::dtypes, 'f')) return {chunk<Map, float>, Map::arity};
  return {nullptr, Map::arity};
}

#define UNARY(name, ...) map_row<name##_map>(),
#define BINARY UNARY
#define TERNARY UNARY
constexpr MapRow kMaps[] = {
#include "kernels/maps.def"
};
#undef UNARY
#undef BINARY
#undef TERNARY

}  // namespace

FloatMap float_map(int number) { return kMaps[number].run; }
int map_arity(int number) { return kMaps[number].arity; }

#define UNARY(name, ...)                                                                            \
  void name(const Call& c) {                                                                        \
    dispatch<name##_map>(c, "[" #name "] an integer divisor expects numbers other than 0, got 0."); \
  }
#define BINARY UNARY
#define TERNARY UNARY
#include "kernels/maps.def"
#undef UNARY
#undef BINARY
#undef TERNARY

}  // namespace needle::NEEDLE_ISA
