// Several element-wise maps as one pass: pieces of the arrays go through all of them while they lie in the L1 cache.
// The program is data, and every map is the code that runs it alone, so that results are the same to the last bit.
#include "cpu/elementwise.h"
#include "cpu/pieces.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int kInputs = 8, kOutputs = 4, kSlots = 8, kOperands = kOutputs + kInputs, kLength = 32;
using Floats = Pieces<float, kOperands>;

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

struct Program {
  Instruction code[kLength];
  int length, n_out = 0;

  explicit Program(const View& program) {
    const Row* rows = reinterpret_cast<const Row*>(program.as<double>());
    length = static_cast<int>(smaller(program.shape[0], kLength));
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
    }
  }

  void run(const Piece<float, kOperands>& piece, float* slots) const {
    const int64_t n = piece.size();
    const float* held[kSlots];  // where the value of each slot lies
    for (int i = 0; i < length; i++) {
      const Instruction& o = code[i];
      const float* in[3];
      for (int k = 0; k < o.arity; k++) {
        const int operand = o.operands[k];
        in[k] = operand >= kInputs ? held[operand - kInputs] : piece.in(kOutputs + operand);
      }
      float* to = slots + o.slot * Floats::kMost;
      if (o.output >= 0) to = piece.out(o.output, to);
      if (o.run)
        o.run(n, to, in, o.p, o.q);
      else if (to != in[0])
        std::memcpy(to, in[0], n * sizeof(float));
      held[o.slot] = to;
      if (o.output >= 0) piece.leave(o.output, to);
    }
  }
};

}  // namespace

// Inputs a..h of any dtype, broadcast by strides of 0, as float32; a result is stored in its output's dtype. Outputs
// that a program has not are y0 once more.
void chain(const chain_args& c) {
  const Optional* inputs[kInputs] = {&c.in.a, &c.in.b, &c.in.c, &c.in.d, &c.in.e, &c.in.f, &c.in.g, &c.in.h};
  const View* outputs[kOutputs] = {&c.out.y0, &c.out.y1, &c.out.y2, &c.out.y3};
  const View* views[kOperands];  // outputs, then inputs
  int n_in = 0;
  for (int k = 0; k < kOutputs; k++) views[k] = outputs[k];
  for (int k = 0; k < kInputs; k++) {
    views[kOutputs + k] = *inputs[k] ? inputs[k] : outputs[0];
    if (*inputs[k]) n_in = k + 1;
  }
  if (c.out.y0.size() == 0) return;
  const Program program(c.in.program);
  const int64_t most = c.attr.slots > 2 ? Floats::kMost / 2 : Floats::kMost;  // so that L1 holds all buffers
  const Floats pieces(views, program.n_out, kOutputs, n_in, most);
  for_dense(c.exec, pieces, program.length, kOperands + kSlots,
            [&](const Piece<float, kOperands>& piece) { program.run(piece, piece.buffer(kOperands)); });
}

}  // namespace needle::NEEDLE_ISA
