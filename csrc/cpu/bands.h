// Convolutions with groups: blocks of 16 output channels, wherever groups begin and end in them, and the input channels
// that each has to read. Weights of a block lie in a panel, [phase][chunk][tap][term][lanes].
#pragma once
#include <cstring>

#include "cpu/pack.h"

namespace needle::NEEDLE_ISA {

// Of a convolution; inputs and outputs are those of a group, block is that of x.
struct Channels {
  int64_t groups, inputs, outputs, block;

  int64_t blocks() const { return ceil_div(groups * outputs, kBlock); }
};

// How 16 lanes of output channels meet the input channels of a chunk, `step` neighbours. Either every lane meets every
// channel, in as many terms (a broadcast number times 16 weights, zero for channels of other groups), or in every term
// each lane picks a channel of its own group: 16 permuted numbers times 16 weights. The numbers' places in the chunk
// precede the weights of all taps that are joined, neighbours in a kernel row: what one tap picks, the next pixel's tap
// before it needs as well. Or, without groups and where outputs are few, lanes are the 16 input channels of a chunk,
// times as many weights of each output, which are summed up over the lanes in the end: `lanes` is the number of outputs
// then, and what a tap has of a chunk lies by [output][input].
struct Form {
  int64_t step, terms, lanes;

  // packed: (chunks of all panels, taps / joined, terms, lanes).
  static Form of(const View& packed, int64_t block) {
    const int64_t terms = packed.shape[2], lanes = packed.shape[3];
    return {lanes > kBlock ? block : terms, terms, lanes};
  }
  bool picks() const { return lanes > kBlock; }
  bool dots() const { return lanes < kBlock; }
  int64_t joined() const { return picks() ? lanes / kBlock - 1 : 1; }
  int64_t chunk_floats(int64_t taps) const { return taps / joined() * terms * lanes; }
};

// Taps of a kernel row that may be joined, if pixels of y lie as far apart in x as taps.
NEEDLE_INLINE int64_t joined_taps(int64_t kernel_w, int64_t step, int64_t dilation) {
  return step == dilation && kernel_w % 2 == 1 && kernel_w <= kPickTaps ? kernel_w : 1;
}

// Neighbouring output blocks that read the same chunks of x, whose last one has `beyond` channels that they do not
// need.
struct ChannelBand {
  int64_t block, blocks, chunk, chunks, beyond;
  int64_t runs, panels;  // chunks of the bands before it, and these times their blocks
};

struct ChannelBands {
  const ChannelBand* data;
  int64_t count, runs, panels;  // runs, panels: of all bands
};

// Uses room for a ChannelBand per output block.
ChannelBands bands_of(const Channels& c, int64_t step, ChannelBand* room);

// The form of weights with so many taps that takes least time, if lanes that pick may join some of them. A single tap
// leaves out what a chunk has beyond the channels in any form (Runs::cut).
Form form_of(const Channels& c, int64_t taps, int64_t joined);
// Chunks of all panels.
int64_t panels_of(const Channels& c, int64_t step);

// What the lanes of an output block meet in each term of a chunk, by [term][lane]: the place of the channel in the
// chunk, and which input of the lane's group it is, -1 for none of them.
struct Picks {
  int32_t place[kBlock * kBlock], input[kBlock * kBlock];
};
void picks_of(const Channels& c, const Form& form, int64_t block, int64_t chunk, Picks& to);

// The panel of one output block in the form that picks. The tap at position t of term k is row rows[k * taps + t].
void pack_picks(const Weights& w, const Channels& c, int64_t block, const ChannelBand& band, const Form& form,
                const int32_t* rows, float* panel);

// The panel in the form whose lanes are inputs. The tap at position t of input i is term rows[i * taps + t].
void pack_dots(const Weights& w, int64_t inputs, int64_t outputs, const int32_t* rows, float* panel);

// Packs weights of `form`. phases(f) calls f(taps) for every phase; taps(g) calls g(kh, kw) for every tap of it. Uses
// scratch 0 and 3.
template <class Phases>
void pack_weights(const Exec* exec, const Weights& w, const Channels& c, const Form& form, float* dst,
                  const Phases& phases) {
  const int64_t chunk_floats = form.chunk_floats(w.taps);
  const auto number = [&](int64_t chunks) {
    int32_t *rows = scratch<int32_t>(exec, 3, chunks * form.terms * w.taps), row = 0;
    phases([&](const auto& taps) {
      for (int64_t term = 0; term < chunks * form.terms; term += form.terms)
        taps([&](int64_t kh, int64_t kw) {
          for (int64_t k = 0; k < form.terms; k++) rows[(term + k) * w.taps + w.position(kh, kw)] = row++;
        });
    });
    return rows;
  };
  if (c.groups == 1) {
    const int64_t inputs = ceil_div(c.inputs, form.step) * form.step, panel = inputs * w.taps * kBlock;
    const int32_t* rows = number(inputs / form.step);
    if (form.dots()) return pack_dots(w, inputs, form.lanes, rows, dst);
    pack_parallel(exec, w.s_output, w.s_input, c.blocks(), inputs, kBlock, 8 * kBlock, 20. * c.blocks() * panel,
                  [&](int64_t first, int64_t last, int64_t i0, int64_t i1) {
                    pack_inputs(w, first * kBlock, i0, i1,
                                {dst + first * panel, last - first, panel, rows + i0 * w.taps});
                  });
    return;
  }
  const ChannelBands bands =
      bands_of(c, form.step, static_cast<ChannelBand*>(exec->scratch(0, c.blocks() * sizeof(ChannelBand))));
  parallel_parts(exec, bands.count, 20. * bands.panels * chunk_floats, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const ChannelBand& band = bands.data[i];
      const int32_t* rows = number(band.chunks);
      const int64_t panel = band.chunks * chunk_floats, i0 = band.chunk * form.step;
      float* to = dst + band.panels * chunk_floats;
      for (int64_t b = 0; b < band.blocks; b++, to += panel)
        if (form.picks())
          pack_picks(w, c, band.block + b, band, form, rows, to);
        else
          pack_inputs(w, (band.block + b) * kBlock, i0, i0 + band.chunks * form.step, {to, 1, panel, rows});
    }
  });
}

// One phase, of all taps in their order.
NEEDLE_INLINE void pack_weights(const Exec* exec, const Weights& w, const Channels& c, const Form& form, float* dst) {
  pack_weights(exec, w, c, form, dst, [&](const auto& phase) {
    phase([&](const auto& tap) {
      for (int64_t kh = 0; kh < w.taps_h; kh++)
        for (int64_t kw = 0; kw < w.taps_w; kw++) tap(kh, kw);
    });
  });
}

}  // namespace needle::NEEDLE_ISA
