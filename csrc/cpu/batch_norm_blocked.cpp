// Batch normalisation of images in blocks of channels, in training two passes over memory each way, and sums per
// channel. Sums are cut into parts that no number of threads changes.
#include <stdexcept>
#include <type_traits>

#include "cpu/batch_norm.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kSection = 256;  // pixels whose terms are summed in float; 16 KB, read again from the L1 cache
constexpr int64_t kPart = 2048;    // pixels of a block of channels that a task sums up, at least
constexpr int64_t kParts = 64;     // of a block of channels, at most
constexpr int kAtOnce = 4;         // vectors, of one to four pixels: chains of sums hide the latency of an addition
static_assert(kAtOnce % kPerBlock == 0);

// `row` of a block of channels.
NEEDLE_INLINE float* row_of(const View& v, int64_t image, int64_t block, int64_t row) {
  return v.as<float>() + image * v.stride[0] + block * v.stride[1] + row * v.stride[2];
}

// COUNT values per channel, zeros beyond the last channel, in memory of the caller that tasks share.
template <int COUNT>
struct Factors {
  const float* data;

  struct Block {
    V values[COUNT][kPerBlock];
    const V* operator[](int i) const { return values[i]; }
  };

  template <class F>
  Factors(const Exec* exec, int64_t blocks, int64_t channels, const F& fill) {  // fill(channel, values)
    float* to = scratch<float>(exec, 3, blocks * COUNT * kBlock);
    data = to;
    for (int64_t k = 0; k < blocks * kBlock; k++) {
      float values[COUNT] = {};
      if (k < channels) fill(k, values);
      for (int i = 0; i < COUNT; i++) to[(k / kBlock * COUNT + i) * kBlock + k % kBlock] = values[i];
    }
  }
  Block of(int64_t block) const {
    Block b;
    for (int i = 0; i < COUNT; i++)
      for (int k = 0; k < kPerBlock; k++) b.values[i][k] = V::load(data + (block * COUNT + i) * kBlock + k * V::N);
    return b;
  }
};

// f(image, block, row, rows) for all rows of all blocks, in tasks.
template <class F>
NEEDLE_INLINE void for_bands(const Exec* exec, const View& x, const F& f) {
  const int64_t blocks = x.shape[1], h = x.shape[2];
  parallel_ranges(exec, x.shape[0] * blocks * h, x.shape[3] * kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin, rows; t < end; t += rows) {
      rows = smaller(h - t % h, end - t);
      f(t / h / blocks, t / h % blocks, t % h, rows);
    }
  });
}

// f(image, row, rows, column, columns) for the sections of the rows [begin, end) of all images.
template <class F>
NEEDLE_INLINE void for_sections(const View& x, int64_t begin, int64_t end, const F& f) {
  const int64_t h = x.shape[2], w = x.shape[3], most = larger(1, kSection / larger(1, w));
  for (int64_t t = begin, rows; t < end; t += rows) {
    rows = smaller(smaller(most, h - t % h), end - t);
    for (int64_t column = 0; column < w; column += kSection)
      f(t / h, t % h, rows, column, smaller(kSection, w - column));
  }
}

// Sums of terms per channel over some rows: row(r) gives f(i, k, sums), which adds the terms of the floats from i on,
// vector k of their block.
template <int SUMS, class Row>
NEEDLE_INLINE void add_up(float (&totals)[SUMS][kBlock], int64_t rows, int64_t pixels, const Row& row) {
  V sums[kAtOnce][SUMS];
  for (auto& chain : sums)
    for (V& s : chain) s = V(0.f);
  const int64_t vectors = pixels * kPerBlock;
  for (int64_t r = 0; r < rows; r++) {
    const auto f = row(r);
    int64_t i = 0;
    for (; i + kAtOnce <= vectors; i += kAtOnce)
      for (int j = 0; j < kAtOnce; j++) f((i + j) * V::N, j % kPerBlock, sums[j]);
    for (; i < vectors; i += kPerBlock)
      for (int j = 0; j < kPerBlock; j++) f((i + j) * V::N, j, sums[j]);
  }
  for (int s = 0; s < SUMS; s++)
    for (int k = 0; k < kPerBlock; k++) {
      for (int j = kPerBlock; j < kAtOnce; j += kPerBlock) sums[k][s] = sums[k][s] + sums[j + k][s];
      sums[k][s].store(totals[s] + k * V::N);
    }
}

// The parts in which the rows of a block of channels are summed up.
struct Parts {
  int64_t rows, count;

  explicit Parts(const View& x) : rows(x.shape[0] * x.shape[2]) {
    count = larger(1, smaller(smaller(kParts, rows), rows * x.shape[3] / kPart));
  }
  int64_t begin(int64_t part) const { return rows * part / count; }
  int64_t end(int64_t part) const { return begin(part + 1); }
};

struct Pair {
  double a[kBlock], b[kBlock];
};

// Calls part(pair, block, begin, end) for every part of every block, in tasks, then finish(block, pairs, parts).
template <class Part, class Finish>
NEEDLE_INLINE void in_parts(const Exec* exec, const View& x, const Part& part, const Finish& finish) {
  const Parts parts(x);
  const int64_t blocks = x.shape[1], n = parts.count;
  Pair* pairs = scratch<Pair>(exec, 2, blocks * n);
  parallel_each(exec, blocks * n, parts.rows * x.shape[3] * kBlock / n, [&](int64_t t) {
    Pair& pair = pairs[t];
    for (int k = 0; k < kBlock; k++) pair.a[k] = pair.b[k] = 0;
    part(pair, t / n, parts.begin(t % n), parts.end(t % n));
  });
  for (int64_t block = 0; block < blocks; block++) finish(block, pairs + block * n, parts);
}

// Sums and squared distances from the mean of the values that have been seen: Chan's way of adding more.
struct Moments {
  Pair& seen;
  double count = 0;

  template <class F>
  void add(double n, const F& values) {  // values(k, &mean, &squares)
    const double each = count > 0 ? 1 / count : 0, weight = count * n / (count + n);
    for (int k = 0; k < kBlock; k++) {
      double mean, squares;
      values(k, &mean, &squares);
      const double apart = mean - seen.a[k] * each;
      seen.b[k] += count > 0 ? squares + apart * apart * weight : squares;
      seen.a[k] += mean * n;
    }
    count += n;
  }
};

// Of some rows of a block, in one pass over memory: a section's mean first, then the distances from it, read from the
// cache.
void part_moments(const View& x, Pair& pair, int64_t block, int64_t begin, int64_t end) {
  const int64_t step = x.stride[2];
  Moments moments{pair};
  for_sections(x, begin, end, [&](int64_t image, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const float* from = row_of(x, image, block, row) + column * kBlock;
    const double n = static_cast<double>(rows * columns);
    float sum[1][kBlock], around[2][kBlock], centre[kBlock];
    add_up(sum, rows, columns,
           [&](int64_t r) { return [p = from + r * step](int64_t i, int, V* s) { s[0] = s[0] + V::load(p + i); }; });
    for (int k = 0; k < kBlock; k++) centre[k] = sum[0][k] / static_cast<float>(n);
    V middle[kPerBlock];
    for (int k = 0; k < kPerBlock; k++) middle[k] = V::load(centre + k * V::N);
    add_up(around, rows, columns, [&](int64_t r) {
      return [p = from + r * step, &middle](int64_t i, int k, V* s) {
        const V d = V::load(p + i) - middle[k];
        s[0] = s[0] + d;
        s[1] = fma(d, d, s[1]);
      };
    });
    moments.add(n, [&](int k, double* mean, double* squares) {
      const double off = static_cast<double>(around[0][k]) / n;
      *mean = static_cast<double>(centre[k]) + (off == off ? off : 0);  // an infinite mean stays so
      *squares = static_cast<double>(around[1][k]) - off * off * n;
    });
  });
}

// Sums and squared distances of all parts of a block, and of how many pixels.
Pair joined(const Pair* pairs, const Parts& parts, int64_t width, double* count) {
  Pair all = {};
  Moments moments{all};
  for (int64_t p = 0; p < parts.count; p++) {
    const double n = static_cast<double>((parts.end(p) - parts.begin(p)) * width);
    moments.add(n, [&](int k, double* mean, double* squares) { *mean = pairs[p].a[k] / n, *squares = pairs[p].b[k]; });
  }
  *count = moments.count;
  return all;
}

// Calls body(f) with f(y, g): the gradient g before an activation whose output lies at y.
template <class Body>
NEEDLE_INLINE void with_slope(int code, float alpha, const Body& body) {
  if (code == kNone) return body([](const float*, V g) { return g; });
  if (code == kRelu) return body([](const float* y, V g) { return relu_grad_map::apply(V::load(y), g, g, g); });
  body([=](const float* at, V g) {
    const V y = V::load(at);
    switch (code) {
      case kRelu6:
        return relu6_grad_map::apply(y, g, g, g);
      case kLeakyRelu:
        return leaky_relu_grad_map::apply(y, g, V(alpha), g);
      case kSigmoid:
        return sigmoid_grad_map::apply(y, g, g, g);
      default:
        return tanh_grad_map::apply(y, g, g, g);
    }
  });
}

#define NEEDLE_SLOPE_ERROR(name)                                                                          \
  "[" name                                                                                                \
  "] activation expects none, or relu, relu6, leaky_relu, sigmoid or tanh and its output y, got none of " \
  "them."

// Number of the activation, one whose slope its output tells.
template <class Args>
int slope_of(const Args& c, const char* error) {
  const int code = static_cast<int>(c.attr.activation);
  if (code == kNone) return code;
  const bool told = code == kRelu || code == kRelu6 || code == kLeakyRelu || code == kSigmoid || code == kTanh;
  if (!told || !c.in.y) throw std::domain_error(error);
  return code;
}

// dx = weight inverse (dy - (dbias + normal dweight) / n), dy behind the activation; that goes to dresidual, if given.
template <class Args>
void gradient(const Args& c, const View* dresidual, const char* error) {
  const View &x = c.in.x, &dy = c.in.dy, &dx = c.out.dx, &out = c.in.y ? c.in.y : x;
  const float *mean = c.in.mean.template as<float>(), *inverse = c.in.inverse.template as<float>(),
              *weight = c.in.weight.template as<float>(), *dweight = c.in.dweight.template as<float>(),
              *dbias = c.in.dbias.template as<float>();
  const int64_t channels = c.in.mean.shape[0], w = x.shape[3];
  const double each = 1 / static_cast<double>(x.shape[0] * x.shape[2] * w);
  const Factors<4> factors(c.exec, x.shape[1], channels, [&](int64_t k, float* f) {
    f[0] = mean[k];
    f[1] = static_cast<float>(static_cast<double>(weight[k]) * inverse[k]);
    f[2] = static_cast<float>(dbias[k] * each);
    f[3] = static_cast<float>(static_cast<double>(dweight[k]) * inverse[k] * each);
  });
  with_slope(slope_of(c, error), static_cast<float>(c.attr.alpha), [&](const auto& slope) {
    for_bands(c.exec, x, [&](int64_t image, int64_t block, int64_t first, int64_t rows) {
      const auto f = factors.of(block);
      const V *centre = f[0], *scale = f[1], *average = f[2], *tilt = f[3];
      for (int64_t row = first; row < first + rows; row++) {
        const float *from = row_of(x, image, block, row), *g = row_of(dy, image, block, row);
        const float* y = row_of(out, image, block, row);
        float *to = row_of(dx, image, block, row), *kept = dresidual ? row_of(*dresidual, image, block, row) : nullptr;
        const auto pass = [&](auto keeps) {
          for (int64_t i = 0; i < w * kBlock; i += kBlock)
            for (int k = 0; k < kPerBlock; k++) {
              const int64_t at = i + k * V::N;
              const V d = slope(y + at, V::load(g + at)), off = V::load(from + at) - centre[k];
              if constexpr (keeps) d.store(kept + at);
              (fnma(off, tilt[k], d - average[k]) * scale[k]).store(to + at);
            }
        };
        kept ? pass(std::true_type()) : pass(std::false_type());
      }
    });
  });
}

// factors: mean, scale and shift of the blocks of every sample of so many images.
void normalise(const Exec* exec, const View& x, const Optional& residual, const View& y, const Factors<3>& factors,
               int64_t images, int64_t channels, int code, float alpha) {
  const bool moves_zero = activate(code, alpha, 0.f) != 0;
  with_activation(code, alpha, [&](const auto& f) {
    for_bands(exec, x, [&](int64_t image, int64_t block, int64_t first, int64_t rows) {
      const auto values = factors.of(image / images * x.shape[1] + block);
      const V *centre = values[0], *factor = values[1], *shift = values[2];
      const int64_t valid = smaller(kBlock, channels - block * kBlock), size = x.shape[3] * kBlock;
      for (int64_t row = first; row < first + rows; row++) {
        const float *from = row_of(x, image, block, row),
                    *more = residual ? row_of(residual, image, block, row) : nullptr;
        float* to = row_of(y, image, block, row);
        const auto pass = [&](auto adds) {
          for (int64_t i = 0; i < size; i += kBlock)
            for (int k = 0; k < kPerBlock; k++) {
              const int64_t at = i + k * V::N;
              V v = (V::load(from + at) - centre[k]) * factor[k] + shift[k];
              if constexpr (adds) v = v + V::load(more + at);
              f(v).store(to + at);
            }
        };
        more ? pass(std::true_type()) : pass(std::false_type());
        if (moves_zero)
          for (int64_t i = 0; i < size; i += kBlock)
            for (int64_t k = valid; k < kBlock; k++) to[i + k] = 0;
      }
    });
  });
}

}  // namespace

void normalise_blocked(const Exec* exec, const View& x, const Optional& residual, const View& y, const float* mean,
                       const float* scale, const float* bias, int64_t channels, int code, float alpha) {
  const Factors<3> factors(exec, x.shape[1], channels,
                           [&](int64_t k, float* f) { f[0] = mean[k], f[1] = scale[k], f[2] = bias[k]; });
  normalise(exec, x, residual, y, factors, larger(1, x.shape[0]), channels, code, alpha);
}

void batch_norm_blocked(const batch_norm_blocked_args& c) {
  const int64_t channels = c.in.mean.shape[0];
  float* scale = scratch<float>(c.exec, 2, channels);
  for (int64_t k = 0; k < channels; k++) scale[k] = c.in.weight.as<float>()[k] * c.in.inverse.as<float>()[k];
  normalise_blocked(c.exec, c.in.x, c.in.residual, c.out.y, c.in.mean.as<float>(), scale, c.in.bias.as<float>(),
                    channels, static_cast<int>(c.attr.activation), static_cast<float>(c.attr.alpha));
}

void batch_norm_moments(const batch_norm_moments_args& c) {
  const View& x = c.in.x;
  const auto part = [&](Pair& pair, int64_t block, int64_t begin, int64_t end) {
    part_moments(x, pair, block, begin, end);
  };
  in_parts(c.exec, x, part, [&](int64_t block, const Pair* pairs, const Parts& parts) {
    double count;
    const Pair all = joined(pairs, parts, x.shape[3], &count);
    for (int64_t k = 0, channel = block * kBlock; k < kBlock && channel < c.out.mean.shape[0]; k++, channel++) {
      const double var = max(0.0, all.b[k] / count);  // in this order not a number stays none
      c.out.mean.as<float>()[channel] = static_cast<float>(all.a[k] / count);
      c.out.var.as<float>()[channel] = static_cast<float>(var);
      c.out.inverse.as<float>()[channel] = static_cast<float>(1 / ::sqrt(var + c.attr.eps));
    }
  });
}

// Samples of so many images, each normalised over groups of channels: moments per channel, which the channels of a
// group share then.
void group_norm_blocked(const group_norm_blocked_args& c) {
  const View& x = c.in.x;
  if (x.size() == 0) return;
  const int64_t images = static_cast<int64_t>(c.attr.images), samples = x.shape[0] / images, blocks = x.shape[1];
  const int64_t channels = static_cast<int64_t>(c.attr.channels), groups = static_cast<int64_t>(c.attr.groups);
  View first = x;
  first.shape[0] = images;
  const Parts parts(first);
  Pair* pairs = scratch<Pair>(c.exec, 2, samples * blocks * parts.count);
  parallel_each(c.exec, samples * blocks * parts.count, parts.rows * x.shape[3] * kBlock / parts.count, [&](int64_t t) {
    const int64_t block = t / parts.count % blocks, part = t % parts.count;
    View sample = first;
    sample.data = x.as<float>() + t / parts.count / blocks * images * x.stride[0];
    pairs[t] = {};
    part_moments(sample, pairs[t], block, parts.begin(part), parts.end(part));
  });

  double pixels = 0;
  Pair* whole = scratch<Pair>(c.exec, 0, samples * blocks);
  for (int64_t i = 0; i < samples * blocks; i++) whole[i] = joined(pairs + i * parts.count, parts, x.shape[3], &pixels);

  const float *weight = c.in.weight.as<const float>(), *bias = c.in.bias.as<const float>();
  const int64_t each = channels / groups;
  double mean = 0, inverse = 0;
  const auto next_group = [&](const Pair* sample, int64_t from) {
    double total = 0, squares = 0;
    for (int64_t k = from; k < from + each; k++) total += sample[k / kBlock].a[k % kBlock];
    mean = total / (pixels * static_cast<double>(each));
    for (int64_t k = from; k < from + each; k++) {
      const double apart = sample[k / kBlock].a[k % kBlock] / pixels - mean;
      squares += sample[k / kBlock].b[k % kBlock] + apart * apart * pixels;
    }
    inverse = 1 / ::sqrt(max(0.0, squares / (pixels * static_cast<double>(each))) + c.attr.eps);
  };
  const int64_t lanes = blocks * kBlock;
  const Factors<3> factors(c.exec, samples * blocks, samples * lanes, [&](int64_t i, float* f) {
    const int64_t k = i % lanes;
    if (k >= channels) return;
    if (k % each == 0) next_group(whole + i / lanes * blocks, k);
    f[0] = static_cast<float>(mean);
    f[1] = static_cast<float>(inverse * (weight ? static_cast<double>(weight[k]) : 1));
    f[2] = bias ? bias[k] : 0;
  });
  normalise(c.exec, x, kAbsent, c.out.y, factors, images, channels, static_cast<int>(c.attr.activation),
            static_cast<float>(c.attr.alpha));
}

void batch_norm_grad_sums(const batch_norm_grad_sums_args& c) {
  const View &x = c.in.x, &dy = c.in.dy, &out = c.in.y ? c.in.y : x;
  const float *mean = c.in.mean.as<float>(), *inverse = c.in.inverse.as<float>();
  const int64_t channels = c.in.mean.shape[0];
  const Factors<1> means(c.exec, x.shape[1], channels, [&](int64_t k, float* f) { f[0] = mean[k]; });
  const auto sums_of = [&](const auto& slope) {
    const auto part = [&](Pair& pair, int64_t block, int64_t begin, int64_t end) {
      const auto middle = means.of(block);
      for_sections(x, begin, end, [&](int64_t image, int64_t row, int64_t rows, int64_t column, int64_t columns) {
        float sums[2][kBlock];
        add_up(sums, rows, columns, [&](int64_t r) {
          const int64_t at = column * kBlock;
          const float *from = row_of(x, image, block, row + r) + at, *g = row_of(dy, image, block, row + r) + at,
                      *y = row_of(out, image, block, row + r) + at;
          return [=, &middle, &slope](int64_t i, int k, V* s) {
            const V d = slope(y + i, V::load(g + i));
            s[0] = s[0] + d;
            s[1] = fma(d, V::load(from + i) - middle[0][k], s[1]);
          };
        });
        for (int k = 0; k < kBlock; k++)
          pair.a[k] += static_cast<double>(sums[0][k]), pair.b[k] += static_cast<double>(sums[1][k]);
      });
    };
    in_parts(c.exec, x, part, [&](int64_t block, const Pair* pairs, const Parts& parts) {
      for (int64_t k = 0, channel = block * kBlock; k < kBlock && channel < channels; k++, channel++) {
        double total = 0, slant = 0;
        for (int64_t p = 0; p < parts.count; p++) total += pairs[p].a[k], slant += pairs[p].b[k];
        c.out.dbias.as<float>()[channel] = static_cast<float>(total);
        c.out.dweight.as<float>()[channel] = static_cast<float>(slant * static_cast<double>(inverse[channel]));
      }
    });
  };
  with_slope(slope_of(c, NEEDLE_SLOPE_ERROR("batch_norm_grad_sums")), static_cast<float>(c.attr.alpha), sums_of);
}

void sum_channels(const sum_channels_args& c) {
  const View &x = c.in.x, &y = c.out.y;
  const auto part = [&](Pair& pair, int64_t block, int64_t begin, int64_t end) {
    for_sections(x, begin, end, [&](int64_t image, int64_t row, int64_t rows, int64_t column, int64_t columns) {
      float sum[1][kBlock];
      add_up(sum, rows, columns, [&](int64_t r) {
        const float* from = row_of(x, image, block, row + r) + column * kBlock;
        return [from](int64_t i, int, V* s) { s[0] = s[0] + V::load(from + i); };
      });
      for (int k = 0; k < kBlock; k++) pair.a[k] += static_cast<double>(sum[0][k]);
    });
  };
  in_parts(c.exec, x, part, [&](int64_t block, const Pair* pairs, const Parts& parts) {
    for (int64_t k = 0, channel = block * kBlock; k < kBlock && channel < y.shape[0]; k++, channel++) {
      double total = 0;
      for (int64_t p = 0; p < parts.count; p++) total += pairs[p].a[k];
      y.as<float>()[channel * y.stride[0]] = static_cast<float>(total);
    }
  });
}

void batch_norm_grad_apply(const batch_norm_grad_apply_args& c) {
  gradient(c, nullptr, NEEDLE_SLOPE_ERROR("batch_norm_grad_apply"));
}
void batch_norm_grad_apply_residual(const batch_norm_grad_apply_residual_args& c) {
  gradient(c, &c.out.dresidual, NEEDLE_SLOPE_ERROR("batch_norm_grad_apply_residual"));
}

}  // namespace needle::NEEDLE_ISA
