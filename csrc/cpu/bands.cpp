// Which form the weights of a convolution with groups take, and the packing of the one in which lanes pick channels.
#include "cpu/bands.h"

namespace needle::NEEDLE_ISA {
namespace {

// Measured costs, where a broadcast number times 16 weights costs 1; NEON's are by its instructions.
constexpr double kRunCost = 1, kLaneSumCost = 6, kPermuteCost = V::N >= 8 ? 0.5 : NEEDLE_REGISTER_BLOCKS == 8 ? 1 : 3;

struct Span {
  int64_t first, last;

  int64_t size() const { return larger(0, last - first); }
  Span inside(Span other) const { return {larger(first, other.first), smaller(last, other.last)}; }
};

// The input channels of an output channel's group.
Span inputs_of(const Channels& c, int64_t output) {
  const int64_t group = output / c.outputs;
  return group < c.groups ? Span{group * c.inputs, (group + 1) * c.inputs} : Span{0, 0};
}

// f(vector of lanes, term, vector of channels, which one of these each lane has at its turn) for every term in which an
// output block meets the channels of a chunk; returns how many terms one vector needs at most.
template <class F>
int64_t each_pick(const Channels& c, int64_t block, int64_t chunk, const F& f) {
  int64_t most = 0;
  for (int64_t v = 0; v < kPerBlock; v++) {
    int64_t term = 0;
    for (int64_t from = chunk * kBlock; from < (chunk + 1) * kBlock; from += V::N) {
      int64_t terms = 0;
      for (int64_t o = block * kBlock + v * V::N, end = o + V::N; o < end; o++)
        terms = larger(terms, inputs_of(c, o).inside({from, from + V::N}).size());
      for (int64_t k = 0; k < terms; k++) f(v, term++, from, k);
    }
    most = larger(most, term);
  }
  return most;
}

}  // namespace

ChannelBands bands_of(const Channels& c, int64_t step, ChannelBand* room) {
  const int64_t blocks = c.blocks(), outputs = c.groups * c.outputs;
  ChannelBands all = {room, 0, 0, 0};
  int64_t group = 0, last = 0;  // groups of a block's first and last channel
  for (int64_t block = 0; block < blocks; block++) {
    while ((group + 1) * c.outputs <= block * kBlock) group++;
    while ((last + 1) * c.outputs < smaller(outputs, (block + 1) * kBlock)) last++;
    const int64_t end = (last + 1) * c.inputs, chunk = group * c.inputs / step, chunks = ceil_div(end, step) - chunk;
    const int64_t beyond = (chunk + chunks) * step - end;
    ChannelBand* before = room + all.count - 1;
    if (all.count > 0 && before->chunk == chunk && before->chunks == chunks) {
      before->blocks++;
      before->beyond = beyond;  // later blocks read as far, or further
    } else {
      room[all.count++] = {block, 1, chunk, chunks, beyond, all.runs, all.panels};
      all.runs += chunks;
    }
    all.panels += chunks;
  }
  return all;
}

int64_t panels_of(const Channels& c, int64_t step) {
  int64_t panels = 0;
  for (int64_t block = 0; block < c.blocks(); block++) {
    const Span first = inputs_of(c, block * kBlock),
               last = inputs_of(c, smaller(c.groups * c.outputs, (block + 1) * kBlock) - 1);
    panels += ceil_div(last.last, step) - first.first / step;
  }
  return panels;
}

Form form_of(const Channels& c, int64_t taps, int64_t joined) {
  Form best = {c.block, c.block, kBlock};
  if (c.groups == 1 && c.block == kBlock && c.outputs <= kMostDots) {
    const double terms = static_cast<double>(ceil_div(c.inputs, kBlock) * taps);
    const double sums = static_cast<double>(c.outputs) * (terms + kLaneSumCost) + kRunCost * terms;
    const double others = static_cast<double>(c.inputs * taps) + kRunCost * terms;
    if (sums < others) return {kBlock, kBlock, c.outputs};
  }
  if (c.groups == 1 && (taps == 1 || c.inputs % c.block == 0)) return best;
  double least = static_cast<double>(panels_of(c, c.block)) * (static_cast<double>(c.block) + kRunCost);
  const auto consider = [&](const Form& form, double term_cost) {
    const double cost =
        static_cast<double>(panels_of(c, form.step)) * (static_cast<double>(form.terms) * term_cost + kRunCost);
    if (cost < least) least = cost, best = form;
  };
  for (int64_t step = c.block - 1; step > 0; step--)
    if (c.block % step == 0) consider({step, step, kBlock}, 1);
  if (c.groups == 1 || c.block < kBlock || c.inputs >= kBlock) return best;
  int64_t terms = 0;
  for (int64_t block = 0; block < c.blocks(); block++) {
    const int64_t first = inputs_of(c, block * kBlock).first / kBlock,
                  last = inputs_of(c, smaller(c.groups * c.outputs, (block + 1) * kBlock) - 1).last;
    for (int64_t chunk = first; chunk * kBlock < last; chunk++)
      terms = larger(terms, each_pick(c, block, chunk, [](int64_t, int64_t, int64_t, int64_t) {}));
  }
  consider({kBlock, terms, (1 + joined) * kBlock}, 1 + kPermuteCost / static_cast<double>(joined));
  return best;
}

void picks_of(const Channels& c, const Form& form, int64_t block, int64_t chunk, Picks& to) {
  for (int64_t i = 0; i < form.terms * kBlock; i++) {
    const Span own = inputs_of(c, block * kBlock + i % kBlock);
    const int64_t term = i / kBlock, channel = chunk * form.step + term;
    const bool has = !form.picks() && own.first <= channel && channel < own.last;
    to.place[i] = form.picks() ? 0 : static_cast<int32_t>(term);
    to.input[i] = has ? static_cast<int32_t>(channel - own.first) : -1;
  }
  if (!form.picks()) return;
  each_pick(c, block, chunk, [&](int64_t v, int64_t term, int64_t from, int64_t k) {
    for (int64_t lane = v * V::N; lane < (v + 1) * V::N; lane++) {
      const Span own = inputs_of(c, block * kBlock + lane), here = own.inside({from, from + V::N});
      const bool has = k < here.size();
      // A lane whose turn it is not picks a channel of its group all the same, where there is one.
      const int64_t channel = has ? here.first + k : here.size() > 0 ? here.first : from;
      to.place[term * kBlock + lane] = static_cast<int32_t>(channel - chunk * kBlock);
      if (has) to.input[term * kBlock + lane] = static_cast<int32_t>(channel - own.first);
    }
  });
}

void pack_dots(const Weights& w, int64_t inputs, int64_t outputs, const int32_t* rows, float* panel) {
  for (int64_t i = 0; i < inputs; i++)
    for (int64_t t = 0; t < w.taps; t++) {
      const int64_t row = rows[i * w.taps + t];
      const float* from = w.data + i * w.s_input + t / w.taps_w * w.s_h + t % w.taps_w * w.s_w;
      float* to = panel + row / kBlock * outputs * kBlock + row % kBlock;
      for (int64_t o = 0; o < outputs; o++) to[o * kBlock] = i < w.inputs ? from[o * w.s_output] : 0;
    }
}

void pack_picks(const Weights& w, const Channels& c, int64_t block, const ChannelBand& band, const Form& form,
                const int32_t* rows, float* panel) {
  const int64_t joined = form.joined();
  std::memset(panel, 0, band.chunks * form.chunk_floats(w.taps) * 4);
  for (int64_t chunk = 0; chunk < band.chunks; chunk++) {
    Picks picks;
    picks_of(c, form, block, band.chunk + chunk, picks);
    for (int64_t term = 0; term < form.terms; term++)
      for (int64_t t = 0; t < w.taps; t++) {
        const int64_t tap = rows[(chunk * form.terms + term) * w.taps + t] / form.terms;  // of all chunks
        float* to = panel + (tap / joined * form.terms + term) * form.lanes;
        std::memcpy(to, picks.place + term * kBlock, kBlock * sizeof *picks.place);
        to += (1 + tap % joined) * kBlock;
        for (int64_t lane = 0; lane < kBlock; lane++) {
          const int64_t o = block * kBlock + lane, input = picks.input[term * kBlock + lane];
          if (input >= 0)
            to[lane] = w.data[o / c.outputs * w.s_group + o % c.outputs * w.s_output + input * w.s_input +
                              t / w.taps_w * w.s_h + t % w.taps_w * w.s_w];
        }
      }
  }
}

// Chunks of all panels, taps that are joined, terms and lanes.
void conv2d_panels(const conv2d_panels_args& c) {
  const Channels channels = {c.attr.groups, c.attr.inputs, c.attr.outputs, c.attr.block};
  const Form form = form_of(channels, c.attr.taps, joined_taps(c.attr.kernel_w, c.attr.stride_w, c.attr.dilation_w));
  int64_t* to = c.out.y.as<int64_t>();
  to[0] = panels_of(channels, form.step);
  to[1] = form.joined();
  to[2] = form.terms;
  to[3] = form.lanes;
}

}  // namespace needle::NEEDLE_ISA
