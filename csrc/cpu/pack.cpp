// Columns of 16 lanes from strided memory.
#include "cpu/pack.h"

#include "cpu/transpose.h"

namespace needle::NEEDLE_ISA {
namespace {

typedef float Row __attribute__((vector_size(4 * V::N)));

// Indices of a shuffle that does the same in every four lanes; those of its second operand begin at V::N.
#if defined(NEEDLE_ISA_AVX512)
#define IN_FOURS(a, b, c, d) \
  a, b, c, d, a + 4, b + 4, c + 4, d + 4, a + 8, b + 8, c + 8, d + 8, a + 12, b + 12, c + 12, d + 12
#elif defined(NEEDLE_ISA_AVX2)
#define IN_FOURS(a, b, c, d) a, b, c, d, a + 4, b + 4, c + 4, d + 4
#else
#define IN_FOURS(a, b, c, d) a, b, c, d
#endif

#if defined(NEEDLE_ISA_AVX512) || defined(NEEDLE_ISA_AVX2)
typedef float F8 __attribute__((vector_size(32)));
NEEDLE_INLINE F8 join(F4 a, F4 b) { return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7); }
#endif

template <class Load>
NEEDLE_INLINE Row every_fourth(const Load& load, int lane) {  // of a vector's lanes, four columns of each
#if defined(NEEDLE_ISA_AVX512)
  return __builtin_shufflevector(join(load(lane), load(lane + 4)), join(load(lane + 8), load(lane + 12)), 0, 1, 2, 3, 4,
                                 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(NEEDLE_ISA_AVX2)
  return join(load(lane), load(lane + 4));
#else
  return load(lane);
#endif
}

// COLUMNS neighbours in memory, at most four. kFull: no lane is zero.
template <int COLUMNS, bool kFull, class At>
NEEDLE_INLINE void transpose_columns(const Lanes& from, const float* p, const At& at) {
  constexpr int N = V::N;
  for (int v = 0; v < kBlock; v += N) {
    const auto load = [&](int lane) {
      F4 x = {};
      if (kFull || (lane >= from.first && lane < from.last)) std::memcpy(&x, p + lane * from.s_lane, COLUMNS * 4);
      return x;
    };
    const Row a = every_fourth(load, v), b = every_fourth(load, v + 1), c = every_fourth(load, v + 2),
              d = every_fourth(load, v + 3);
    const Row ab0 = __builtin_shufflevector(a, b, IN_FOURS(0, N, 1, N + 1)),
              cd0 = __builtin_shufflevector(c, d, IN_FOURS(0, N, 1, N + 1)),
              ab1 = __builtin_shufflevector(a, b, IN_FOURS(2, N + 2, 3, N + 3)),
              cd1 = __builtin_shufflevector(c, d, IN_FOURS(2, N + 2, 3, N + 3));
    V(__builtin_shufflevector(ab0, cd0, IN_FOURS(0, 1, N, N + 1))).store(at(0) + v);
    if (COLUMNS > 1) V(__builtin_shufflevector(ab0, cd0, IN_FOURS(2, 3, N + 2, N + 3))).store(at(1) + v);
    if (COLUMNS > 2) V(__builtin_shufflevector(ab1, cd1, IN_FOURS(0, 1, N, N + 1))).store(at(2) + v);
    if (COLUMNS > 3) V(__builtin_shufflevector(ab1, cd1, IN_FOURS(2, 3, N + 2, N + 3))).store(at(3) + v);
  }
}

template <bool kFull, class At>
NEEDLE_INLINE void transpose_lanes(const Lanes& from, int64_t columns, const At& at) {
  int64_t c = 0;
  const auto next = [&](int j) { return at(c + j); };
  for (; c + 4 <= columns; c += 4) transpose_columns<4, kFull>(from, from.data + c, next);
  if (columns - c == 1) transpose_columns<1, kFull>(from, from.data + c, next);
  if (columns - c == 2) transpose_columns<2, kFull>(from, from.data + c, next);
  if (columns - c == 3) transpose_columns<3, kFull>(from, from.data + c, next);
}

template <class At>
NEEDLE_INLINE void pack_lanes_to(const Lanes& from, int64_t columns, const Panels& panels, const At& at) {
  if (from.s_lane == 1 && from.first == 0 && (from.s_column != 1 || columns == 1)) {
    for (int64_t c = 0; c < columns; c++) {
      const float* p = from.data + c * from.s_column;
      float* to = panels.data + at(c);
      for (int64_t left = from.last, b = 0; b < panels.blocks; b++, left -= kBlock, p += kBlock, to += panels.panel) {
        __builtin_prefetch(p + panels.blocks * kBlock);  // pack_parallel's next blocks
        if (left >= kBlock)
          for (int v = 0; v < kBlock; v += V::N) V::load(p + v).store(to + v);
        else
          for (int v = 0; v < kBlock; v += V::N)
            V::load_n(p + v, static_cast<int>(larger(0, smaller(V::N, left - v)))).store(to + v);
      }
    }
    return;
  }
  for (int64_t b = 0; b < panels.blocks; b++) {
    Lanes one = from;
    one.data += b * kBlock * from.s_lane;
    one.first = larger(0, from.first - b * kBlock);
    one.last = smaller(kBlock, from.last - b * kBlock);
    float* dst = panels.data + b * panels.panel;
    const auto to = [&](int64_t c) { return dst + at(c); };
    if (one.s_column == 1 && one.first == 0 && one.last == kBlock) {
      transpose_lanes<true>(one, columns, to);
    } else if (one.s_column == 1 && one.first < one.last) {
      transpose_lanes<false>(one, columns, to);
    } else {
      for (int64_t c = 0; c < columns; c++) {
        for (int v = 0; v < kBlock; v += V::N) V(0.f).store(to(c) + v);
        for (int64_t lane = one.first; lane < one.last; lane++)
          to(c)[lane] = one.data[lane * one.s_lane + c * one.s_column];
      }
    }
  }
}

// Turns an axis round that lies backwards in memory.
bool forwards(const float*& data, int64_t size, int64_t& stride) {
  if (stride >= 0) return false;
  data += (size - 1) * stride;
  stride = -stride;
  return true;
}

Weights weights_of(const View& w, int64_t groups, int64_t outputs, int64_t inputs, int64_t s_output, int64_t s_input,
                   int64_t s_group) {
  Weights r = {groups,
               outputs,
               inputs,
               w.shape[2],
               w.shape[3],
               w.shape[2] * w.shape[3],
               w.as<const float>(),
               s_output,
               s_input,
               s_group,
               w.stride[2],
               w.stride[3],
               false,
               false};
  r.flip_h = forwards(r.data, r.taps_h, r.s_h);
  r.flip_w = forwards(r.data, r.taps_w, r.s_w);
  return r;
}

}  // namespace

Weights Weights::of(const View& w, int64_t groups) {
  const int64_t outputs = w.shape[0] / groups;
  return weights_of(w, groups, outputs, w.shape[1], w.stride[0], w.stride[1], outputs * w.stride[0]);
}

Weights Weights::of_transposed(const View& w, int64_t groups) {
  const int64_t inputs = w.shape[0] / groups;
  return weights_of(w, groups, w.shape[1], inputs, w.stride[1], w.stride[0], inputs * w.stride[0]);
}

void pack_lanes(const Lanes& from, int64_t columns, const Panels& to) {
  if (!to.rows)
    pack_lanes_to(from, columns, to, [](int64_t c) { return c * kBlock; });
  else if (to.step == 1)
    pack_lanes_to(from, columns, to, [rows = to.rows](int64_t c) { return int64_t{rows[c]} * kBlock; });
  else
    pack_lanes_to(from, columns, to, [&](int64_t c) { return int64_t{to.rows[c * to.step]} * kBlock; });
}

void pack_inputs(const Weights& w, int64_t output, int64_t i0, int64_t i1, const Panels& panels) {
  // Runs of columns in memory: inputs of one tap, taps of one input, or both joined.
  const bool one_run = w.taps_w == 1 || w.taps_h == 1 || w.s_h == w.taps_w * w.s_w;
  const int64_t s_tap = w.taps_w == 1 ? w.s_h : w.s_w, run = one_run ? w.taps : w.taps_w;
  const bool by_tap = w.taps == 1 || (w.inputs > 1 && w.s_input < s_tap && w.s_input > -s_tap);
  const bool joined = one_run && w.s_input == w.taps * s_tap;
  const int64_t lanes = panels.blocks * kBlock;
  Panels to = panels;
  for (int64_t i = i0, end; i < i1; i = end) {
    const int64_t source = i / w.inputs;
    to.rows = panels.rows + (i - i0) * w.taps;
    if (source >= w.groups) return pack_lanes({}, (i1 - i) * w.taps, to);
    end = smaller(i1, (source + 1) * w.inputs);
    const int64_t output_in_source = output - source * w.outputs, input = i - source * w.inputs;
    Lanes from = {w.data + source * w.s_group + output_in_source * w.s_output + input * w.s_input, w.s_output,
                  joined || !by_tap ? s_tap : w.s_input, smaller(lanes, larger(0, -output_in_source)),
                  larger(0, smaller(lanes, w.outputs - output_in_source))};
    const float* data = from.data;
    if (joined || from.first >= from.last) {
      pack_lanes(from, (end - i) * w.taps, to);
      continue;
    }
    const int32_t* rows = to.rows;
    if (by_tap) {
      to.step = w.taps;
      for (int64_t t = 0; t < w.taps; t++) {
        from.data = data + t / w.taps_w * w.s_h + t % w.taps_w * w.s_w;
        to.rows = rows + t;
        pack_lanes(from, end - i, to);
      }
      to.step = 1;
      continue;
    }
    for (int64_t n = 0; n < end - i; n++)
      for (int64_t t = 0; t < w.taps; t += run) {
        from.data = data + n * w.s_input + t / w.taps_w * w.s_h;
        to.rows = rows + n * w.taps + t;
        pack_lanes(from, run, to);
      }
  }
}

}  // namespace needle::NEEDLE_ISA
