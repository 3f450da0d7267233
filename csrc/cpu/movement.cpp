// Kernels that only move elements: copies between any strides and dtypes, fills, blocked layouts and their halos.
#include "cpu/move.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kTogether = 2048;  // elements of short rows that are one piece of work

// An inner dimension contiguous in `out` and another, the next one out, contiguous in `in`.
template <class T>
void copy_transposed(const copy_args& c, const Loop<2>& loop) {
  constexpr int64_t kTile = 32;
  int r = loop.rank;
  int64_t m = loop.shape[r - 1], n = loop.shape[r - 2], tiles = ceil_div(n, kTile);
  T *out = c.out.y.as<T>(), *in = c.in.x.as<T>();
  int64_t outer = loop.outer() / n;
  parallel_ranges(c.exec, outer * tiles, kTile * m, [&](int64_t begin, int64_t end) {
    auto o = Odometer<2>::start(loop, r - 2, begin / tiles);
    int64_t tile = begin % tiles;
    for (int64_t t = begin; t < end; t++) {
      int64_t j = tile * kTile, width = smaller(kTile, n - j);
      for (int64_t i = 0; i < m; i += kTile)
        transpose(out + o.at[0] + j * loop.stride[0][r - 2] + i, loop.stride[0][r - 2],
                  in + o.at[1] + i * loop.stride[1][r - 1] + j, loop.stride[1][r - 1], smaller(kTile, m - i), width);
      if (++tile == tiles) o.next(), tile = 0;
    }
  });
}

// `move` of elements of two types.
using Move = void (*)(char* to, int64_t to_down, int64_t to_across, const char* from, int64_t from_down,
                      int64_t from_across, int64_t rows, int64_t columns);
template <class T, class S>
void move_of(char* to, int64_t to_down, int64_t to_across, const char* from, int64_t from_down, int64_t from_across,
             int64_t rows, int64_t columns) {
  move(reinterpret_cast<T*>(to), to_down, to_across, reinterpret_cast<const S*>(from), from_down, from_across, rows,
       columns);
}

void copy_rows(const copy_args& c, const Loop<2>& loop, Move move) {
  const int last = loop.rank - 1;
  const int64_t out_step = loop.stride[0][last], in_step = loop.stride[1][last], columns = loop.inner();
  const int64_t out_size = static_cast<int64_t>(dtype_size(c.out.y.dtype)),
                in_size = static_cast<int64_t>(dtype_size(c.in.x.dtype));
  char* to = c.out.y.as<char>();
  const char* from = c.in.x.as<const char>();
  if (last == 0 || columns >= kShortRow)
    return for_pieces(c.exec, loop, 1, [&](const int64_t* at, int64_t first, int64_t n) {
      move(to + (at[0] + first * out_step) * out_size, n, out_step, from + (at[1] + first * in_step) * in_size, n,
           in_step, 1, n);
    });
  const int64_t rows = loop.shape[last - 1], high = smaller(rows, ceil_div(kTogether, columns));
  const int64_t out_down = loop.stride[0][last - 1], in_down = loop.stride[1][last - 1], tiles = ceil_div(rows, high);
  parallel_ranges(c.exec, loop.outer() / rows * tiles, high * columns, [&](int64_t begin, int64_t end) {
    auto o = Odometer<2>::start(loop, last - 1, begin / tiles);
    for (int64_t t = begin, tile = begin % tiles; t < end; t++) {
      const int64_t row = tile * high;
      move(to + (o.at[0] + row * out_down) * out_size, out_down, out_step, from + (o.at[1] + row * in_down) * in_size,
           in_down, in_step, smaller(high, rows - row), columns);
      if (++tile == tiles) o.next(), tile = 0;
    }
  });
}

// Moves the dimension that is contiguous in the input next to the innermost one. Returns whether there is one.
bool transposes(Loop<2>& l) {
  const int d = l.stride[0][l.rank - 1] == 1 ? crossing(l, 1) : -1;
  if (d >= 0) l.move(d, l.rank - 2);
  return d >= 0;
}

}  // namespace

void copy(const copy_args& c) {
  const View* views[] = {&c.out.y, &c.in.x};
  Loop<2> loop = loop_over(views);
  if (loop.inner() * loop.outer() == 0) return;
  using In = copy_args::In;
  const DType to = c.out.y.dtype, from = c.in.x.dtype;
  if (to == from) {  // only the size matters: bits are copied as they are
    const bool transposed = transposes(loop);
    return with_type<In::x_dtypes>(to, [&](auto t) {
      using Bits = BitsOf<sizeof(t)>;
      transposed ? copy_transposed<Bits>(c, loop) : copy_rows(c, loop, move_of<Bits, Bits>);
    });
  }
  with_type<copy_args::Out::y_dtypes>(to, [&](auto t) {
    with_type<In::x_dtypes>(from, [&](auto s) { copy_rows(c, loop, move_of<decltype(t), decltype(s)>); });
  });
}

void fill(const fill_args& c) {
  const View* views[] = {&c.out.y};
  const Loop<1> loop = loop_over(views);
  const int64_t step = loop.stride[0][loop.rank - 1];
  if (loop.inner() * loop.outer() == 0) return;
  with_type<fill_args::Out::y_dtypes>(c.out.y.dtype, [&]<class T>(T) {
    const T value = from_double<T>(c.attr.value);
    for_pieces(c.exec, loop, 1, [&](const int64_t* at, int64_t first, int64_t n) {
      T* p = c.out.y.as<T>() + at[0] + first * step;
      if (step == 1)
        for (int64_t j = 0; j < n; j++) p[j] = value;
      else
        for (int64_t j = 0; j < n; j++) p[j * step] = value;
    });
  });
}

namespace {

constexpr int64_t kPixels = 16;

// Calls f(plain, blocked, channels, pixels) with where the rows of a block begin in both; whole planes where they have
// no gaps. Where channels are neighbours in the plain array, all blocks of a few pixels come one after the other, so
// that whole lines of memory are read and written.
template <class F>
NEEDLE_INLINE void for_rows(const Exec* exec, const View& plain, const View& blocked, const F& f) {
  const int64_t h = plain.shape[2], w = plain.shape[3], b = blocked.shape[4], blocks = blocked.shape[1];
  if (plain.shape[0] * h * w == 0) return;
  const bool whole = h == 1 || (plain.stride[2] == w * plain.stride[3] && blocked.stride[2] == w * b);
  const bool channels_last = plain.stride[1] == 1 && blocks > 1;
  const int64_t rows = whole ? 1 : h, row_pixels = h * w / rows;
  int64_t piece = row_pixels;
  if (channels_last)
    piece = smaller(piece, kPixels);
  else if (whole)
    piece = smaller(piece, larger(64, grain(exec, h * w * blocks * plain.shape[0], b) / 8 * 8));
  const int64_t pieces = ceil_div(row_pixels, piece), places = rows * pieces;
  parallel_each(exec, plain.shape[0] * blocks * places, piece * b, [&](int64_t t) __attribute__((always_inline)) {
    const int64_t n = t / (blocks * places), u = t % (blocks * places);
    const int64_t block = channels_last ? u % blocks : u / places, place = channels_last ? u / blocks : u % places;
    const int64_t row = place / pieces, first = place % pieces * piece, pixels = smaller(piece, row_pixels - first);
    f(plain.as<float>() + n * plain.stride[0] + block * b * plain.stride[1] + row * plain.stride[2] +
          first * plain.stride[3],
      blocked.as<float>() + n * blocked.stride[0] + block * blocked.stride[1] + row * blocked.stride[2] + first * b,
      larger(0, smaller(b, plain.shape[1] - block * b)), pixels);
  });
}

}  // namespace

void to_blocked(const to_blocked_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  for_rows(c.exec, x, y, [&](const float* from, float* to, int64_t channels, int64_t pixels) {
    block_pixels(from, x.stride[1], x.stride[3], channels, to, y.shape[4], pixels);
  });
}

void from_blocked(const from_blocked_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  for_rows(c.exec, y, x, [&](float* to, const float* from, int64_t channels, int64_t pixels) {
    unblock_pixels(from, x.shape[4], to, y.stride[1], y.stride[3], channels, pixels);
  });
}

namespace {

// N lanes of pixels in blocks; `step` floats from one to the next of those that are read.
template <int N>
void copy_lanes(float* to, const float* from, int64_t step, int64_t pixels) {
  for (int64_t i = 0; i < pixels; i++) std::memcpy(to + i * kBlock, from + i * step, N * sizeof(float));
}
constexpr void (*kCopyLanes[kBlock + 1])(float*, const float*, int64_t, int64_t) = {
    nullptr,        copy_lanes<1>,  copy_lanes<2>,  copy_lanes<3>,  copy_lanes<4>,  copy_lanes<5>,
    copy_lanes<6>,  copy_lanes<7>,  copy_lanes<8>,  copy_lanes<9>,  copy_lanes<10>, copy_lanes<11>,
    copy_lanes<12>, copy_lanes<13>, copy_lanes<14>, copy_lanes<15>, copy_lanes<16>};
constexpr float kZeros[kBlock] = {};

}  // namespace

void copy_channels(const copy_channels_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  const int64_t blocks = y.shape[1], rows = y.shape[2], end = c.attr.start + c.attr.channels;
  parallel_each(c.exec, y.shape[0] * blocks * rows, y.shape[3] * kBlock, [&](int64_t t) {
    const int64_t row = t % rows, block = t / rows % blocks, n = t / rows / blocks;
    const float* from = x.as<float>() + n * x.stride[0] + row * x.stride[2];
    float* to = y.as<float>() + n * y.stride[0] + block * y.stride[1] + row * y.stride[2];
    int64_t lane = block == 0 ? static_cast<int64_t>(c.attr.start) : 0;
    const int64_t stop = smaller(kBlock, end - block * kBlock);
    while (lane < stop) {  // the lanes of one block of x at a time
      const int64_t channel = c.attr.first + block * kBlock + lane - c.attr.start, place = channel % kBlock;
      const int64_t lanes = smaller(stop - lane, kBlock - place);
      kCopyLanes[lanes](to + lane, from + channel / kBlock * x.stride[1] + place, kBlock, y.shape[3]);
      lane += lanes;
    }
    if (lane < kBlock) kCopyLanes[kBlock - lane](to + lane, kZeros, 0, y.shape[3]);
  });
}

namespace {

// A plain array seen as one with blocks of a single channel.
View as_blocked(View v) {
  if (v.rank == 4) v.rank = 5, v.shape[4] = 1, v.stride[4] = 1;
  return v;
}

}  // namespace

// Writes zeros around a blocked (or plain 4-D) view, whose rows are contiguous.
void zero_halo(const zero_halo_args& c) {
  const View out = as_blocked(c.out.y);
  int64_t top = c.attr.top, bottom = c.attr.bottom, left = c.attr.left, right = c.attr.right;
  int64_t h = out.shape[2], w = out.shape[3], b = out.shape[4], rows = top + h + bottom;
  // Few bytes per row: planes count as their border, so that small images stay on one thread.
  int64_t work = (top + bottom) * (left + w + right) * b + h * (left + right) * b;
  parallel_each(c.exec, out.shape[0] * out.shape[1], work, [&](int64_t t) {
    float* plane = out.as<float>() + t / out.shape[1] * out.stride[0] + t % out.shape[1] * out.stride[1];
    for (int64_t y = -top; y < rows - top; y++) {
      float* p = plane + y * out.stride[2] - left * b;
      if (y < 0 || y >= h) {
        std::memset(p, 0, (left + w + right) * b * sizeof(float));
      } else {
        std::memset(p, 0, left * b * sizeof(float));
        std::memset(p + (left + w) * b, 0, right * b * sizeof(float));
      }
    }
  });
}

}  // namespace needle::NEEDLE_ISA
