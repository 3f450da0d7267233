// Several element-wise maps as one pass: pieces of the arrays go through all of them while they lie in the L1 cache.
// The program is data, and every map is the code that runs it alone, so that results are the same to the last bit.
#include "cpu/elementwise.h"
#include "cpu/transpose.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int kInputs = 8, kOutputs = 4, kSlots = 8, kOperands = kOutputs + kInputs, kLength = 32;
constexpr int64_t kMost = 2048,
                  kPiece = 1024;   // elements of a piece: with two slots, with more; L1 holds all of its buffers
constexpr int64_t kLongRow = 128;  // elements that repay a piece of their own
constexpr int64_t kTile = 64;      // elements of a row of a tile
constexpr char kAnyDType[] = "*";

// One row of a program: what computes, of which values, and where the result goes.
struct Row {
  double map;          // place in maps.def; negative: the value itself
  double operands[3];  // an input's number, or kInputs + a slot
  double slot;
  double output;  // that the result is stored to, or negative
  double p, q;
};

struct Instruction {
  FloatMap run;  // or null
  int arity, operands[3], slot, output;
  float p, q;
};

struct Chain {
  const View* views[kOperands];  // outputs, then inputs; unused ones are the first output
  Loop<kOperands> loop;
  Instruction code[kLength];
  int length, n_in, n_out, slots;
  int64_t piece;
  // Of the two innermost dimensions, in elements; what an element takes; whether pieces of one row, or of several, are
  // used where they lie.
  int64_t columns, middle, down[kOperands], across[kOperands], bytes[kOperands];
  bool row_lies[kOperands], rows_lie[kOperands];

  void read(const View& program) {
    const Row* rows = reinterpret_cast<const Row*>(program.as<double>());
    length = static_cast<int>(smaller(program.shape[0], kLength));
    n_out = slots = 0;
    for (int i = 0; i < length; i++) {
      const Row& row = rows[i];
      const int map = static_cast<int>(row.map);
      Instruction& o = code[i];
      o.run = map < 0 ? nullptr : float_map(map);
      o.arity = map < 0 ? 1 : map_arity(map);
      for (int k = 0; k < 3; k++) o.operands[k] = static_cast<int>(row.operands[k]);
      o.slot = static_cast<int>(row.slot), o.output = static_cast<int>(row.output);
      o.p = static_cast<float>(row.p), o.q = static_cast<float>(row.q);
      n_out = static_cast<int>(larger(n_out, o.output + 1));
      slots = static_cast<int>(larger(slots, o.slot + 1));
    }
    piece = slots > 2 ? kPiece : kMost;
  }

  void measure() {
    const int r = loop.rank;
    columns = loop.inner(), middle = r > 1 ? loop.shape[r - 2] : 1;
    for (int k = 0; k < kOperands; k++) {
      across[k] = loop.stride[k][r - 1];
      down[k] = r > 1 ? loop.stride[k][r - 2] : 0;
      bytes[k] = static_cast<int64_t>(dtype_size(views[k]->dtype));
      row_lies[k] = views[k]->dtype == DType::f32 && (across[k] == 1 || columns == 1);
      rows_lie[k] = row_lies[k] && down[k] == columns * across[k];
    }
  }
};

struct Value {  // of an operand over the present piece
  char* data;   // the piece in its array
  float* buffer;
  const char* filled;  // what the buffer holds, where pieces repeat it
  int64_t rows, columns;
  bool direct;
};

// Elements [rows, columns) from strided memory of any dtype as dense float32, or back.
void load(const View& view, const char* from, int64_t down, int64_t across, int64_t rows, int64_t columns, float* to) {
  with_type<kAnyDType>(view.dtype, [&](auto s) {
    using S = decltype(s);
    if (std::is_same_v<S, float> && down == 1 && across > 1)
      return transpose(to, columns, reinterpret_cast<const float*>(from), across, columns, rows);
    for (int64_t r = 0; r < rows; r++, to += columns) {
      const S* x = reinterpret_cast<const S*>(from) + r * down;
      if (across == 0) {
        const float value = static_cast<float>(*x);
        for (int64_t i = 0; i < columns; i++) to[i] = value;
      } else if (std::is_same_v<S, float> && across == 1) {
        std::memcpy(to, x, columns * sizeof(float));
      } else {
        convert(to, 1, x, across, columns);
      }
    }
  });
}
void store(const View& view, char* to, int64_t down, int64_t across, int64_t rows, int64_t columns, const float* from) {
  with_type<kAnyDType>(view.dtype, [&](auto s) {
    using S = decltype(s);
    for (int64_t r = 0; r < rows; r++, from += columns)
      convert(reinterpret_cast<S*>(to) + r * down, across, from, 1, columns);
  });
}

struct Worker {
  const Chain& c;
  float* slots;
  Value values[kOperands];

  // memory: a buffer for each operand and slot, apart by more than a page's bits
  Worker(const Chain& chain, float* memory) : c(chain), slots(memory + kOperands * kMost) {
    for (int k = 0; k < kOperands; k++) values[k] = {nullptr, memory + k * kMost, nullptr, 0, 0, false};
  }

  void enter(int k, const int64_t* at, int64_t row, int64_t column, int64_t rows, int64_t columns) {
    Value& v = values[k];
    const int64_t down = c.down[k], across = c.across[k];
    v.data = static_cast<char*>(c.views[k]->data) + (at[k] + row * down + column * across) * c.bytes[k];
    v.direct = rows == 1 ? c.row_lies[k] : c.rows_lie[k] && columns == c.columns;
    if (v.direct || k < kOutputs) return;
    const bool repeats = down == 0 || rows == 1;
    if (repeats && v.filled == v.data && v.columns >= columns && (rows == 1 || v.columns == columns) && v.rows >= rows)
      return;
    load(*c.views[k], v.data, down, across, rows, columns, v.buffer);
    v.filled = repeats && (down == 0 || across == 0) ? v.data : nullptr;
    v.rows = rows, v.columns = columns;
  }

  void run(const int64_t* at, int64_t row, int64_t column, int64_t rows, int64_t columns) {
    for (int k = 0; k < c.n_out; k++) enter(k, at, row, column, rows, columns);
    for (int k = kOutputs; k < kOutputs + c.n_in; k++) enter(k, at, row, column, rows, columns);
    const int64_t n = rows * columns;
    const float* held[kSlots];  // where the value of each slot lies
    for (int i = 0; i < c.length; i++) {
      const Instruction& o = c.code[i];
      const float* in[3];
      for (int k = 0; k < o.arity; k++) {
        const int operand = o.operands[k];
        if (operand >= kInputs) {
          in[k] = held[operand - kInputs];
          continue;
        }
        const Value& v = values[kOutputs + operand];
        in[k] = v.direct ? reinterpret_cast<const float*>(v.data) : v.buffer;
      }
      const bool direct = o.output >= 0 && values[o.output].direct;
      float* to = direct ? reinterpret_cast<float*>(values[o.output].data) : slots + o.slot * kMost;
      if (o.run)
        o.run(n, to, in, o.p, o.q);
      else if (to != in[0])
        std::memcpy(to, in[0], n * sizeof(float));
      held[o.slot] = to;
      if (o.output >= 0 && !direct)
        store(*c.views[o.output], values[o.output].data, c.down[o.output], c.across[o.output], rows, columns, to);
    }
  }
};

}  // namespace

// Inputs a..h of any dtype, broadcast by strides of 0, as float32; a result is stored in its output's dtype. Outputs
// that a program has not are y0 once more.
void chain(const chain_args& c) {
  const Optional* inputs[kInputs] = {&c.in.a, &c.in.b, &c.in.c, &c.in.d, &c.in.e, &c.in.f, &c.in.g, &c.in.h};
  const View* outputs[kOutputs] = {&c.out.y0, &c.out.y1, &c.out.y2, &c.out.y3};
  Chain chain;
  chain.n_in = 0;
  for (int k = 0; k < kOutputs; k++) chain.views[k] = outputs[k];
  for (int k = 0; k < kInputs; k++) {
    chain.views[kOutputs + k] = *inputs[k] ? inputs[k] : outputs[0];
    if (*inputs[k]) chain.n_in = k + 1;
  }
  if (c.out.y0.size() == 0) return;
  chain.loop = loop_over(chain.views);
  bool crossed = false;  // pieces are tiles, in which operands are transposed
  for (int k = kOutputs; k < kOutputs + chain.n_in && !crossed; k++) {
    const int d = crossing(chain.loop, k);
    crossed = d >= 0;
    if (crossed) chain.loop.move(d, chain.loop.rank - 2);
  }
  chain.read(c.in.program);
  chain.measure();

  const int64_t columns = chain.columns, middle = chain.middle, outer = chain.loop.outer() / middle;
  bool joined = true;  // rows follow each other in memory, or repeat
  for (int k = 0; k < kOperands; k++)
    joined = joined && (chain.down[k] == 0 || chain.down[k] == columns * chain.across[k]);
  // A piece is a part of a row, or several rows.
  const int64_t width = smaller(columns, crossed ? kTile : chain.piece);
  const int64_t rows = joined || crossed || columns < kLongRow ? larger(1, smaller(middle, chain.piece / width)) : 1;
  const int64_t across = ceil_div(columns, width), down = ceil_div(middle, rows);
  parallel_ranges(c.exec, outer * down * across, rows * width * chain.length, [&](int64_t begin, int64_t end) {
    Worker worker(chain, scratch<float>(c.exec, 0, (kOperands + kSlots) * kMost));
    auto o = Odometer<kOperands>::start(chain.loop, static_cast<int>(larger(0, chain.loop.rank - 2)),
                                        begin / (down * across));
    for (int64_t i = begin, j = begin % (down * across); i < end; i++) {
      const int64_t row = j / across * rows, column = j % across * width;
      worker.run(o.at, row, column, smaller(rows, middle - row), smaller(width, columns - column));
      if (++j == down * across) o.next(), j = 0;
    }
  });
}

}  // namespace needle::NEEDLE_ISA
