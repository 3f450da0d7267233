// The rows of maps.def over arrays of any strides. A map only ever sees dense pieces of one type.
#include "cpu/elementwise.h"

#include <stdexcept>
#include <type_traits>

#include "cpu/pieces.h"

namespace needle::NEEDLE_ISA {
namespace {

// Long maps fill the window in which a core looks for loads, and memory's prefetcher ends with a page: gelu_grad of
// arrays that are not in cache is 2.2 times as fast with loads announced.
constexpr int64_t kAhead = 1024;  // bytes
constexpr int64_t kRow = 32;      // elements of a row of their own that are worth a call

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

template <class T, int ARITY>
void run(const Call& c, int n_attr, ChunkFunction<T> f) {
  const View* views[ARITY + 1] = {c.out};
  for (int k = 0; k < ARITY; k++) views[k + 1] = c.in + k;
  const Pieces<T, ARITY + 1> pieces(views, 1, 1, ARITY, Pieces<T, ARITY + 1>::kMost, true);
  if (pieces.size() == 0) return;
  T p = n_attr > 0 ? from_double<T>(c.attr[0]) : T(0), q = n_attr > 1 ? from_double<T>(c.attr[1]) : T(0);
  bool direct = pieces.columns >= kRow && (!pieces.joined || pieces.columns >= kShortRow);
  for (bool lies : pieces.row_lies) direct = direct && lies;
  if (direct)  // rows are short between the rings of blocked images: what a piece takes would show
    return for_pieces(c.exec, pieces.loop, 1, [&](const int64_t* at, int64_t first, int64_t n) {
      const T* in[ARITY];
      for (int k = 0; k < ARITY; k++) in[k] = views[k + 1]->template as<T>() + at[k + 1] + first;
      f(n, views[0]->template as<T>() + at[0] + first, in, p, q);
    });
  for_dense(c.exec, pieces, 1, ARITY + 1, [&](const Piece<T, ARITY + 1>& piece) {
    const T* in[ARITY];
    for (int k = 0; k < ARITY; k++) in[k] = piece.in(k + 1);
    T* out = piece.out(0, piece.buffer(0));
    const int64_t rows = pieces.by_rows ? piece.rows() : 1, n = piece.size() / rows;
    for (int64_t r = 0; r < rows; r++) {
      f(n, out + r * piece.step(0), in, p, q);
      for (int k = 0; k < ARITY; k++) in[k] += piece.step(k + 1);
    }
    piece.leave(0, out);
  });
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
