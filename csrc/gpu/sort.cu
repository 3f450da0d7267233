// Numbers of elements in their order along an axis: tiles sorted in shared memory, of which the first are sorted again
// where few are wanted, else runs merged. Places of values in sorted numbers.
#include "gpu/lines.cuh"
#include "math/keys.h"

namespace needle::gpu {
namespace {

constexpr uint32_t kTile = 2048;  // items that a block sorts

// No two items of a line are equal, so that every way to sort them gives the same.
template <class Key>
struct alignas(2 * sizeof(Key)) Item {
  Key key;
  uint32_t number;
};
template <class Key>
__device__ __forceinline__ bool before(const Item<Key>& a, const Item<Key>& b) {
  return a.key < b.key || (a.key == b.key && a.number < b.number);
}

template <class Key>
struct Sort {
  Lines<2> lines;  // numbers, elements
  int64_t* numbers;
  const Item<Key>* from;  // items of lines, or null: elements
  Item<Key>* to;          // or null: numbers
  uint32_t size, wanted;  // items of a line, and how many of them become numbers
  Key flip;               // of keys, which makes the order descending
};

// The items of a line that are written: to where the next pass reads lines of `pitch`, or as numbers.
template <class Key>
__device__ __forceinline__ void put(const Sort<Key>& s, uint32_t line, uint32_t pitch, uint32_t place,
                                    const Item<Key>& item) {
  if (s.to) {
    if (place < pitch) s.to[static_cast<int64_t>(line) * pitch + place] = item;
  } else if (place < s.wanted) {
    int64_t at[2];
    s.lines.across.locate(line, at);
    s.numbers[at[0] + place * s.lines.step[0]] = item.number;
  }
}

// Tiles of `width` items, a power of two, of which a block has several: of each the first `kept` are left. Behind the
// end of a line are items that come last.
template <class T, class Key>
__global__ void GPU_BOUNDS(kThreads, 4)
    sort_tiles(Sort<Key> s, const T* x, Divisor tiles, uint32_t width, uint32_t kept, uint32_t pitch) {
  struct Block {
    Item<Key> of[kTile];
  };
  GPU_SHARED(Block, block);
  const uint32_t first = blockIdx.x * (kTile / width);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < kTile; i += kThreads) {
    const uint32_t tile = first + i / width, line = tiles.quotient(tile);
    const uint32_t place = (tile - line * tiles.d) * width + i % width;
    Item<Key> item = {static_cast<Key>(~Key{0}), ~uint32_t{0}};
    if (line < s.lines.count && place < s.size) {
      if (s.from) {
        item = s.from[static_cast<int64_t>(line) * s.size + place];
      } else {
        int64_t at[2];
        s.lines.across.locate(line, at);
        item = {static_cast<Key>(device::key_of(x[at[1] + place * s.lines.step[1]]) ^ s.flip), place};
      }
    }
    block.of[i] = item;
  }
  block_sync();
#pragma unroll 1
  for (uint32_t size = 2; size <= width; size *= 2) {  // Batcher's bitonic sort
#pragma unroll 1
    for (uint32_t distance = size / 2; distance > 0; distance /= 2) {
#pragma unroll 4
      for (uint32_t k = threadIdx.x; k < kTile / 2; k += kThreads) {
        const uint32_t low = k & (distance - 1), i = 2 * (k - low) + low;
        const Item<Key> a = block.of[i], b = block.of[i + distance];
        const bool upwards = (i & size & (width - 1)) == 0;
        if (upwards ? before(b, a) : before(a, b)) block.of[i] = b, block.of[i + distance] = a;
      }
      block_sync();
    }
  }
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < kTile; i += kThreads) {
    const uint32_t tile = first + i / width, line = tiles.quotient(tile);
    if (line < s.lines.count && i % width < kept)
      put(s, line, pitch, (tile - line * tiles.d) * kept + i % width, block.of[i]);
  }
}

// Two neighbouring sorted runs of a line to one: an item's place is its own and that which it would have in the other
// run.
template <class Key>
__global__ void GPU_BOUNDS(kThreads, 4) merge_runs(Sort<Key> s, Divisor size, uint32_t run) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= s.lines.count * s.size) return;
  const uint32_t line = size.quotient(i), place = i - line * s.size;
  const Item<Key>* from = s.from + static_cast<int64_t>(line) * s.size;
  const Item<Key> mine = from[place];
  const uint32_t first = place & ~(2 * run - 1), other = place & run ? first : first + run;
  const uint32_t begin = other < s.size ? other : s.size;
  uint32_t low = begin, high = s.size - begin < run ? s.size : begin + run;
#pragma unroll 1
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (before(from[middle], mine)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  put(s, line, s.size, first + (place & (run - 1)) + (low - begin), mine);
}

template <class T>
void sort_as(const argsort_args& c) {
  using Key = device::KeyOf<T>;
  const View &x = c.in.x, &y = c.out.y;
  if (x.size() > INT32_MAX) fail("argsort", "arrays on a GPU have at most 2^31 - 1 elements", std::to_string(x.size()));
  Sort<Key> s = {};
  s.lines = lines_of("argsort", {&y, &x}, c.attr.axis);
  s.numbers = y.as<int64_t>();
  s.size = static_cast<uint32_t>(x.shape[c.attr.axis]), s.wanted = static_cast<uint32_t>(y.shape[c.attr.axis]);
  s.flip = c.attr.descending ? static_cast<Key>(~Key{0}) : Key{0};
  const gpuStream_t stream = stream_of(c);
  const uint32_t lines = s.lines.count;
  int slot = 0;
  auto room = [&](uint32_t pitch) {  // for items, in turn one of two
    const size_t bytes = sizeof(Item<Key>) * lines * pitch;
    return static_cast<Item<Key>*>(c.exec->scratch(slot++ % 2, bytes));
  };
  auto sort = [&](uint32_t kept, uint32_t pitch) {
    uint32_t width = 1;
    while (width < s.size && width < kTile) width *= 2;
    const uint32_t tiles = pieces_of(s.size, width);
    launch(sort_tiles<T, Key>, dim3(pieces_of(lines * tiles, kTile / width)), kThreads, 0, stream, s, x.as<const T>(),
           Divisor(tiles), width, kept, pitch);
    s.from = s.to;
  };
  for (; s.size > kTile && s.wanted <= kTile / 4; s.size = pieces_of(s.size, kTile) * s.wanted) {
    const uint32_t pitch = pieces_of(s.size, kTile) * s.wanted;
    s.to = room(pitch);
    sort(s.wanted, pitch);
  }
  s.to = s.size > kTile ? room(s.size) : nullptr;
  sort(kTile, s.size);
  Item<Key>* other = s.size > 2 * kTile ? room(s.size) : nullptr;
  for (uint32_t run = kTile; run < s.size; run *= 2) {
    s.to = 2 * static_cast<uint64_t>(run) < s.size ? other : nullptr;
    launch(merge_runs<Key>, dim3(pieces_of(lines * s.size, kThreads)), kThreads, 0, stream, s, Divisor(s.size), run);
    other = const_cast<Item<Key>*>(s.from);
    s.from = s.to;
  }
}

template <class T>
struct Search {
  Loop<3> loop;  // places, values, lines of numbers
  const T *values, *numbers;
  int64_t* places;
  int64_t step;
  uint32_t count;  // of numbers
  bool right;
};

// How many numbers are before a value; all of them are before NaN.
template <class T>
__global__ void GPU_BOUNDS(kThreads, 4) search(Search<T> s) {
  for_elements(s.loop.total, [&](uint32_t i) {
    int64_t at[3];
    s.loop.locate(i, at);
    const T value = s.values[at[1]], *line = s.numbers + at[2];
    uint32_t found = value == value ? 0 : s.count, left = s.count - found;
#pragma unroll 1
    while (left > 0) {
      const uint32_t half = (left + 1) / 2;
      const T middle = line[(found + half - 1) * s.step];
      if (s.right ? middle <= value : middle < value) found += half;
      left -= half;
    }
    s.places[at[0]] = found;
  });
}

}  // namespace

void searchsorted(const searchsorted_args& c) {
  const View &y = c.out.y, &numbers = c.in.numbers;
  const int last = y.rank - 1;
  View lines = numbers;  // one for every value
  lines.shape[last] = y.shape[last], lines.stride[last] = 0;
  if (numbers.shape[last] > INT32_MAX)
    fail("searchsorted", "at most 2^31 - 1 numbers", std::to_string(numbers.shape[last]));
  with_type<searchsorted_args::In::numbers_dtypes>(numbers.dtype, [&](auto t) {
    using T = decltype(t);
    const Search<T> s = {loop_over("searchsorted", {&y, &c.in.values, &lines}),
                         c.in.values.as<const T>(),
                         numbers.as<const T>(),
                         y.as<int64_t>(),
                         numbers.stride[last],
                         static_cast<uint32_t>(numbers.shape[last]),
                         c.attr.right != 0};
    if (s.loop.total) launch(search<T>, grid_for(s.loop.total), kThreads, 0, stream_of(c), s);
  });
}

void argsort(const argsort_args& c) {
  if (c.out.y.size() == 0) return;
  with_type<argsort_args::In::x_dtypes>(c.in.x.dtype, [&](auto t) { sort_as<decltype(t)>(c); });
}

}  // namespace needle::gpu
