// Element-wise kernels see dense pieces of one type that stay in the L1 cache. Operands that are strided, broadcast or
// of another dtype pass through a buffer; a piece is a part of a row, or several rows, of the two innermost dimensions.
#pragma once
#include "cpu/move.h"

namespace needle::NEEDLE_ISA {

constexpr int64_t kPieceBytes = 8192;
constexpr int64_t kTile = 128;  // columns of a piece in which operands are transposed
constexpr int64_t kCell = 32;   // elements of two dimensions that are as one row, since a piece of them would not pay
constexpr char kAnyDType[] = "*";

// K operands, of which the first n_out are written and n_in from `first_in` on are read.
template <class T, int K>
struct Pieces {
  static constexpr int64_t kMost = kPieceBytes / sizeof(T);
  const View* const* views;
  int n_out, first_in, n_in;
  Loop<K> loop;
  int dimensions = 2;                      // that pieces are of; 3 where columns are the cells of two
  int64_t columns, middle, width, height;  // of the innermost dimensions, of a piece
  int64_t down[K], across[K], cell[K];     // strides; of a cell's rows
  int64_t in_cell;                         // elements of a cell's row
  bool row_lies[K], rows_lie[K];           // whether pieces of one row, or of several, are used where they lie
  bool by_rows = false;  // operands whose single rows are used where they lie are, in pieces of several, too
  bool joined = true;    // rows follow each other in memory, or repeat

  // one_by_one: f takes the rows of a piece one by one, where that saves copies of some.
  Pieces(const View* const (&views)[K], int n_out, int first_in, int n_in, int64_t most = kMost,
         bool one_by_one = false)
      : views(views), n_out(n_out), first_in(first_in), n_in(n_in), loop(loop_over(views)) {
    bool crossed = false;
    for (int k = first_in; k < first_in + n_in && !crossed; k++) {
      const int d = crossing(loop, k);
      crossed = d >= 0;
      if (crossed) loop.move(d, loop.rank - 2);
    }
    const int r = loop.rank;
    columns = in_cell = loop.inner(), middle = r > 1 ? loop.shape[r - 2] : 1;
    if (r > 2 && !crossed && columns * middle <= kCell && loop.shape[r - 3] >= 8)
      columns *= middle, middle = loop.shape[r - 3], dimensions = 3;
    for (int k = 0; k < K; k++) {
      across[k] = loop.stride[k][r - 1];
      down[k] = r >= dimensions ? loop.stride[k][r - dimensions] : 0;
      cell[k] = r > 1 ? loop.stride[k][r - 2] : 0;
      row_lies[k] =
          views[k]->dtype == dtype_of<T> && (across[k] == 1 || columns == 1) && (dimensions == 2 || cell[k] == in_cell);
      rows_lie[k] = row_lies[k] && down[k] == columns * across[k];
      joined = joined && (down[k] == 0 || down[k] == columns * across[k]);
    }
    width = smaller(columns, crossed ? kTile : most);
    for (int k = 0; k < first_in + n_in; k++)
      by_rows = by_rows || (one_by_one && crossed && row_lies[k] && !(rows_lie[k] && width == columns));
    height = joined || crossed || columns < kShortRow ? larger(1, smaller(middle, most / larger(width, 1))) : 1;
  }

  int64_t size() const { return loop.inner() * loop.outer(); }
  int64_t outer() const { return size() / (columns * middle); }

  // Elements of operand k from its array, where a piece begins there, to a buffer; and back.
  template <class S>
  void load(int k, T* to, const S* from, int64_t rows, int64_t n) const {
    if (dimensions == 2) return move(to, n, 1, from, down[k], across[k], rows, n);
    for (int64_t i = 0; i < n; i++) move(to + i, n, 1, from + in_cells(k, i), down[k], 0, rows, 1);
  }
  template <class S>
  void store(int k, S* to, const T* from, int64_t rows, int64_t n) const {
    if (dimensions == 2) return move(to, down[k], across[k], from, n, 1, rows, n);
    for (int64_t i = 0; i < n; i++) move(to + in_cells(k, i), down[k], 0, from + i, n, 0, rows, 1);
  }
  int64_t in_cells(int k, int64_t i) const { return i / in_cell * cell[k] + i % in_cell * across[k]; }
};

// The operands over the present piece.
template <class T, int K>
class Piece {
  struct Operand {
    char* data;          // the piece in its array
    const char* filled;  // what the buffer holds, where pieces repeat it
    int64_t rows, columns;
    bool direct;
  };
  const Pieces<T, K>& all_;
  T* const memory_;
  Operand operands_[K];
  int64_t rows_, columns_;

  __attribute__((noinline)) void enter(int k, const int64_t* at, int64_t row, int64_t column) {
    Operand& o = operands_[k];
    const View& view = *all_.views[k];
    const int64_t down = all_.down[k], across = all_.across[k];
    o.data = static_cast<char*>(view.data) +
             (at[k] + row * down + column * across) * static_cast<int64_t>(dtype_size(view.dtype));
    o.direct = rows_ == 1 || all_.by_rows ? all_.row_lies[k] : all_.rows_lie[k] && columns_ == all_.columns;
    if (o.direct || k < all_.n_out) return;
    const bool repeats = down == 0 || rows_ == 1;
    if (repeats && o.filled == o.data && o.columns >= columns_ && (rows_ == 1 || o.columns == columns_) &&
        o.rows >= rows_)
      return;
    with_type<kAnyDType>(
        view.dtype, [&]<class S>(S) { all_.load(k, buffer(k), reinterpret_cast<const S*>(o.data), rows_, columns_); });
    o.filled = repeats && (down == 0 || across == 0) ? o.data : nullptr;
    o.rows = rows_, o.columns = columns_;
  }

 public:
  // memory: kMost elements for each operand
  Piece(const Pieces<T, K>& all, T* memory) : all_(all), memory_(memory) {
    for (Operand& o : operands_) o = {nullptr, nullptr, 0, 0, false};
  }

  void enter(const int64_t* at, int64_t row, int64_t column, int64_t rows, int64_t columns) {
    rows_ = rows, columns_ = columns;
    for (int k = 0; k < all_.n_out; k++) enter(k, at, row, column);
    for (int k = all_.first_in; k < all_.first_in + all_.n_in; k++) enter(k, at, row, column);
  }

  int64_t size() const { return rows_ * columns_; }
  int64_t rows() const { return rows_; }
  // From one row to the next of what `in` or `out` gives.
  int64_t step(int k) const { return operands_[k].direct ? all_.down[k] : columns_; }
  const T* in(int k) const { return operands_[k].direct ? reinterpret_cast<const T*>(operands_[k].data) : buffer(k); }
  // Where result k is to be written: into its array where it lies there as it is, else to `own`, which `leave` stores.
  T* out(int k, T* own) const { return operands_[k].direct ? reinterpret_cast<T*>(operands_[k].data) : own; }
  T* buffer(int k) const { return memory_ + k * all_.kMost; }
  __attribute__((noinline)) void leave(int k, const T* values) const {
    if (operands_[k].direct) return;
    with_type<kAnyDType>(all_.views[k]->dtype, [&]<class S>(S) {
      all_.store(k, reinterpret_cast<S*>(operands_[k].data), values, rows_, columns_);
    });
  }
};

// f(piece) for every piece; `work` per element. A thread has `buffers` of pieces, K and those that f uses behind them.
template <class T, int K, class F>
NEEDLE_INLINE void for_dense(const Exec* exec, const Pieces<T, K>& all, int64_t work, int buffers, const F& f) {
  const int64_t across = ceil_div(all.columns, all.width), down = ceil_div(all.middle, all.height);
  parallel_ranges(exec, all.outer() * down * across, all.height * all.width * work, [&](int64_t begin, int64_t end) {
    Piece<T, K> piece(all, scratch<T>(exec, 0, buffers * all.kMost));
    const int outer = static_cast<int>(larger(0, all.loop.rank - all.dimensions));
    auto o = Odometer<K>::start(all.loop, outer, begin / (down * across));
    for (int64_t i = begin, j = begin % (down * across); i < end; i++) {
      const int64_t row = j / across * all.height, column = j % across * all.width;
      piece.enter(o.at, row, column, smaller(all.height, all.middle - row), smaller(all.width, all.columns - column));
      f(piece);
      if (++j == down * across) o.next(), j = 0;
    }
  });
}

}  // namespace needle::NEEDLE_ISA
