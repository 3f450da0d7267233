// Weight gradient of conv2d on blocks of channels: for each tap the outer product of a pixel's input channels (rows,
// broadcast) and output channels (lanes), summed over pixels in registers.
#include "cpu/conv2d_weight_grad.h"
#include "cpu/transpose.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kGroupBlocks = 4;      // blocks of channels of a task, so that what it reads and its sums stay in L2
constexpr int64_t kGroupTaps = 36;       // taps times blocks of input channels of a task
constexpr int64_t kJoined = 8 * kBlock;  // rows that one pass of tiles reads from a pixel on, at most

struct Pixel {
  int64_t x, dy;  // where its channels lie
};

// sums[rows[m] + j * sums_block + lane] = sum over pixels of x[pixel.x + m] dy[pixel.dy + j * dy_block + lane], or +=.
struct Outer {
  const float *x, *dy;
  int64_t dy_block;
  const Pixel* pixels;
  int64_t count;
  float* sums;
  const int64_t* rows;
  int64_t sums_block;
  bool accumulate;
  const float* ahead;  // what is read next comes into L2: a line per pixel, at ahead[at[2 i]]
  const int64_t* at;
};

template <int ROWS, int BLOCKS>
void outer(const Outer& t) {
  constexpr int P = kPerBlock;
  V acc[ROWS][BLOCKS * P];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
    for (int j = 0; j < BLOCKS * P; j++) acc[m][j] = V(0.f);
  const float *x0 = t.x, *dy0 = t.dy;
  const int64_t dy_block = t.dy_block;
  const Pixel* const end = t.pixels + t.count;
  const auto add = [&](const Pixel* p) __attribute__((always_inline)) {
    const float *x = x0 + p->x, *dy = dy0 + p->dy;
    V d[BLOCKS * P];
#pragma GCC unroll 8
    for (int j = 0; j < BLOCKS * P; j++) d[j] = V::load(dy + j / P * dy_block + j % P * V::N);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
      const V channel(x[m]);
#pragma GCC unroll 8
      for (int j = 0; j < BLOCKS * P; j++) acc[m][j] = fma(channel, d[j], acc[m][j]);
    }
  };
  if (t.ahead) {
    const float* const ahead = t.ahead;
    const int64_t* at = t.at;
    for (const Pixel* p = t.pixels; p < end; p++, at += 2) {
      __builtin_prefetch(ahead + *at, 0, 2);
      add(p);
    }
  } else {
    for (const Pixel* p = t.pixels; p < end; p++) add(p);
  }
  float* const sums = t.sums;
  const int64_t* const rows = t.rows;
  const int64_t sums_block = t.sums_block;
  const auto each = [&](const auto& f) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
      float* row = sums + rows[m];
#pragma GCC unroll 8
      for (int j = 0; j < BLOCKS * P; j++) f(acc[m][j], row + j / P * sums_block + j % P * V::N);
    }
  };
  if (t.accumulate)
    each([](V sum, float* to) __attribute__((always_inline)) { (sum + V::load(to)).store(to); });
  else
    each([](V sum, float* to) __attribute__((always_inline)) { sum.store(to); });
}

using OuterFn = void (*)(const Outer&);
#define UP_TO_3(B) nullptr, outer<1, B>, outer<2, B>, outer<3, B>
#define UP_TO_6(B) UP_TO_3(B), outer<4, B>, outer<5, B>, outer<6, B>
#define UP_TO_14(B)                                                                                          \
  UP_TO_6(B), outer<7, B>, outer<8, B>, outer<9, B>, outer<10, B>, outer<11, B>, outer<12, B>, outer<13, B>, \
      outer<14, B>
#if NEEDLE_REGISTER_BLOCKS == 32
constexpr OuterFn kOuter[][kTileRows + 1] = {{UP_TO_14(1)}, {UP_TO_14(2)}};
#elif NEEDLE_REGISTER_BLOCKS == 8
constexpr OuterFn kOuter[][kTileRows + 1] = {{UP_TO_6(1)}};
#else
constexpr OuterFn kOuter[][kTileRows + 1] = {{UP_TO_3(1)}};
#endif
static_assert(sizeof kOuter / sizeof *kOuter == kTileBlocks);

void locate(const Gradient& g, int64_t first, int64_t count, Pixel* pixels) {
  int64_t column = first % g.width, row = first / g.width % g.height, image = first / g.width / g.height;
  const int64_t step = g.window.stride_w * g.block();
  for (int64_t i = 0; i < count;) {
    const int64_t x = image * g.x.image + row * g.window.stride_h * g.x.row, dy = image * g.dy.image + row * g.dy.row;
    for (; i < count && column < g.width; i++, column++) pixels[i] = {x + column * step, dy + column * g.dy.pixel};
    column = 0;
    if (++row == g.height) row = 0, image++;
  }
}

// What a task sums up: blocks [o0, o1) of output channels times input channels [c0, c1).
struct Part {
  int64_t o0, o1, c0, c1;
};

// What comes into L2 while other pixels are summed up: the lines of some blocks of channels, one after the other.
struct Fetches {
  struct Lines {
    const float* from;
    const int64_t* at;  // of every second number, as in pixels
  } lines[6 * kGroupBlocks];
  int64_t count = 0, done = 0;

  void add(const Gradient& g, const Part& p, const Pixel* pixels, int64_t x_done, int64_t dy_done) {
    const int64_t last_row = (g.window.kernel_h - 1) * g.window.dilation_h;
    for (int64_t in = p.c0 / g.block() + x_done; in * g.block() < p.c1; in++)
      lines[count++] = {g.x.at(0, in, last_row), &pixels->x};
    for (int64_t o = p.o0 + dy_done; o < p.o1; o++) lines[count++] = {g.dy.at(0, o, 0), &pixels->dy};
  }
  Lines next() { return done < count ? lines[done++] : Lines{}; }
};

// The sums of a part over pixels [first, last): [output block][input channel][tap][16].
void add_pixels(const Gradient& g, const Part& part, int64_t first, int64_t last, float* sums, int64_t sums_block) {
  const Window& w = g.window;
  const int64_t block = g.block(), taps = g.taps();
  const int64_t joined = w.dilation_w == 1 ? smaller(w.kernel_w, kJoined / block) : 1;
  int64_t of_taps[kJoined], of_channels[kBlock];  // where the sums of rows lie
  for (int64_t i = 0; i < block; i++) {
    of_channels[i] = i * taps * kBlock;
    for (int64_t tap = 0; tap < joined; tap++) of_taps[tap * block + i] = of_channels[i] + tap * kBlock;
  }
  if (first == last) std::memset(sums, 0, (part.o1 - part.o0) * sums_block * 4);
  Pixel pixels[2][kPixels] = {};
  const int64_t sections = ceil_div(last - first, kPixels);
  const auto begin = [&](int64_t section) { return first + (last - first) * section / sections; };
  if (sections > 0) locate(g, first, begin(1) - first, pixels[0]);
  for (int64_t section = 0; section < sections; section++) {
    Outer t = {};
    t.count = begin(section + 1) - begin(section);
    t.pixels = pixels[section % 2];
    Pixel* const next = pixels[1 - section % 2];
    Fetches fetches;
    if (section == 0) fetches.add(g, part, t.pixels, 1, kTileBlocks);
    if (section + 1 < sections) {
      locate(g, begin(section + 1), begin(section + 2) - begin(section + 1), next);
      fetches.add(g, part, next, 0, 0);
    }
    t.dy_block = g.dy.channels;
    t.sums_block = sums_block;
    t.accumulate = section > 0;
    for (int64_t o = part.o0, blocks; o < part.o1; o += blocks) {
      blocks = smaller(kTileBlocks, part.o1 - o);
      t.dy = g.dy.at(0, o, 0);
      for (int64_t c = part.c0, end; c < part.c1; c = end) {
        const int64_t in = c / block, lane = c - in * block;
        end = smaller((in + 1) * block, part.c1);
        // Channels of neighbouring pixels follow each other: all taps of a kernel row are rows of one outer product.
        const int64_t together = end - c == block ? joined : 1;
        for (int64_t kh = 0; kh < w.kernel_h; kh++)
          for (int64_t kw = 0, n; kw < w.kernel_w; kw += n) {
            n = smaller(together, w.kernel_w - kw);
            t.x = g.x.at(0, in, kh * w.dilation_h) + kw * w.dilation_w * block + lane;
            t.sums = sums + (o - part.o0) * sums_block + ((c - part.c0) * taps + kh * w.kernel_w + kw) * kBlock;
            t.rows = together == 1 ? of_channels : of_taps;
            int64_t rows = n * (end - c);
            for (int64_t left = ceil_div(rows, kTileRows); left > 0; left--) {
              const int64_t m = ceil_div(rows, left);
              const auto [from, at] = fetches.next();
              t.ahead = from, t.at = at;
              kOuter[blocks - 1][m](t);
              t.x += m;
              t.rows += m;
              rows -= m;
            }
          }
      }
    }
  }
}

// Sums of one block of output channels, [input channel][tap][16], into dw.
void write(const Gradient& g, int64_t o, int64_t c0, int64_t c1, const float* sums) {
  const View& dw = g.dw;
  const int64_t taps = g.taps(), first = o * kBlock, lanes = smaller(kBlock, g.out_channels() - first);
  const int64_t columns = g.window.kernel_w;
  const bool dense = dw.stride[3] == 1 && dw.stride[2] == columns && dw.stride[1] == taps;
  if (dense && g.groups == 1 && lanes == kBlock)
    return transpose(dw.as<float>() + first * dw.stride[0] + c0 * taps, dw.stride[0], sums, kBlock, (c1 - c0) * taps,
                     kBlock);
  for (int64_t lane = 0; lane < lanes; lane++) {
    const int64_t group = (first + lane) / g.outputs, begin = group * g.inputs;
    for (int64_t c = larger(c0, begin); c < smaller(c1, begin + g.inputs); c++) {
      const float* from = sums + (c - c0) * taps * kBlock + lane;
      float* to = dw.as<float>() + (first + lane) * dw.stride[0] + (c - begin) * dw.stride[1];
      for (int64_t kh = 0; kh < g.window.kernel_h; kh++)
        for (int64_t kw = 0; kw < columns; kw++, from += kBlock) to[kh * dw.stride[2] + kw * dw.stride[3]] = *from;
    }
  }
}

void full(const Exec* exec, const Gradient& g) {
  const int64_t block = g.block(), taps = g.taps(), O = g.out_channels(), out_blocks = ceil_div(O, kBlock);
  const int64_t pixels = g.pixels();
  // Blocks of one group share their input. Where images are small, so are tasks.
  int64_t o_step =
      g.groups == 1 ? (taps == 1 ? 2 : 1) * kGroupBlocks : larger(1, smaller(kGroupBlocks, g.outputs / kBlock));
  int64_t in_step = larger(1, smaller(kGroupBlocks, kGroupTaps / taps)), c_step, o_tasks, c_tasks;
  const auto channels = [&](int64_t o_task, int64_t* end) {
    const int64_t first = o_task * o_step * kBlock, last = smaller(O, first + o_step * kBlock) - 1;
    *end = (last / g.outputs + 1) * g.inputs;
    return first / g.outputs * g.inputs;
  };
  for (;; in_step > 1 ? in_step /= 2 : o_step /= 2) {
    c_step = in_step * block, o_tasks = ceil_div(out_blocks, o_step), c_tasks = 1;
    for (int64_t o = 0, end; o < o_tasks; o++) {
      const int64_t begin = channels(o, &end);
      c_tasks = larger(c_tasks, ceil_div(end - begin / block * block, c_step));
    }
    if (o_tasks * c_tasks * larger(1, pixels / kStretch) >= kTasks || (in_step == 1 && o_step <= kTileBlocks)) break;
  }
  const auto part_of = [&](int64_t task) {
    const int64_t o_task = task / c_tasks;
    int64_t end;
    const int64_t begin = channels(o_task, &end), first = begin / block * block + task % c_tasks * c_step;
    return Part{o_task * o_step, smaller(out_blocks, (o_task + 1) * o_step), larger(begin, first),
                smaller(end, first + c_step)};
  };
  const int64_t tasks = o_tasks * c_tasks;
  const int64_t sums_block = c_step * taps * kBlock, sums_floats = o_step * sums_block;
  const double flops = 2. * O * g.inputs * taps * static_cast<double>(pixels);
  const int64_t parts = stretches(pixels, tasks, kStretch);
  float* sums = parts > 1 ? scratch<float>(exec, 2, tasks * parts * sums_floats) : nullptr;
  parallel_parts(exec, tasks * parts, flops, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const int64_t task = t % tasks, stretch = t / tasks;
      const Part part = part_of(task);
      if (part.c0 >= part.c1) continue;
      float* own = sums ? sums + (task * parts + stretch) * sums_floats : scratch<float>(exec, 1, sums_floats);
      add_pixels(g, part, pixels * stretch / parts, pixels * (stretch + 1) / parts, own, sums_block);
      for (int64_t o = part.o0; !sums && o < part.o1; o++)
        write(g, o, part.c0, part.c1, own + (o - part.o0) * sums_block);
    }
  });
  if (!sums) return;
  parallel_parts(exec, tasks * o_step, 4. * tasks * parts * sums_floats, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const int64_t task = t / o_step, o = t % o_step;
      const Part part = part_of(task);
      if (part.c0 >= part.c1 || part.o0 + o >= part.o1) continue;
      float* all = sums + task * parts * sums_floats + o * sums_block;
      add_parts(all, (part.c1 - part.c0) * taps * kBlock, parts, sums_floats);
      write(g, part.o0 + o, part.c0, part.c1, all);
    }
  });
}

}  // namespace

void conv2d_weight_grad_blocked(const conv2d_weight_grad_blocked_args& c) {
  const View &x = c.in.x, &dy = c.in.dy, &dw = c.out.dweight;
  if (dw.size() == 0) return;
  Gradient g = {Window(c.attr, dw.shape[2], dw.shape[3]),
                dy.shape[0],
                dy.shape[2],
                dy.shape[3],
                c.attr.groups,
                dw.shape[1],
                dw.shape[0] / c.attr.groups,
                Images<const float>::of(x),
                Images<const float>::of(dy),
                dw};
  g.x.pixel = x.shape[4];
  g.dy.pixel = kBlock;
  g.x.data -= g.window.pad_top * g.x.row + g.window.pad_left * g.x.pixel;
  if (g.inputs == 1 && g.outputs == 1 && g.groups > 1 && g.block() == kBlock) return depthwise_gradient(c.exec, g);
  is_narrow({g.groups, g.inputs, g.outputs, g.block()}) ? narrow_gradient(c.exec, g) : full(c.exec, g);
}

}  // namespace needle::NEEDLE_ISA
