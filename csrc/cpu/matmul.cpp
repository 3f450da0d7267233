// Matrix products on the register tile: eager with any strides, and with a right side packed before.
#include "cpu/matmul.h"

#include "cpu/transpose.h"
#include "math/maps.h"

namespace needle::NEEDLE_ISA {
namespace {

void copy_lanes(const float* src, int64_t s_m, float* dst, int64_t d_m, int64_t rows, int64_t lanes) {
  for (int64_t m = 0; m < rows; m++) std::memcpy(dst + m * d_m, src + m * s_m, lanes * 4);
}

// Tiles whose last block sticks out of c work in a buffer on the stack.
void partial_tiles(Tile t, int blocks, int64_t rows, int64_t lanes) {
  constexpr int64_t kRows = 4 * kTileRows, kWidth = kWideBlocks * kBlock;
  float c[kRows * kWidth], residual[kRows * kWidth];
  for (int64_t m = 0; m < rows; m += kRows) {
    const int64_t n = smaller(kRows, rows - m);
    Tile part = t;
    part.a += m * t.a_m;
    part.c = c;
    part.c_m = kWidth;
    if (t.accumulate) copy_lanes(t.c + m * t.c_m, t.c_m, c, kWidth, n, lanes);
    if (t.residual) {
      copy_lanes(t.residual + m * t.r_m, t.r_m, residual, kWidth, n, lanes);
      part.residual = residual;
      part.r_m = kWidth;
    }
    tiles(part, blocks, n);
    copy_lanes(c, kWidth, t.c + m * t.c_m, t.c_m, n, lanes);
  }
}

}  // namespace

void product(const Matmul& g, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  const int64_t zero = 0;
  Tile t = {};
  t.a_m = g.a_m;
  t.a_k = g.a_k;
  t.runs = &zero;
  t.n_runs = 1;
  t.b_n = g.b_n;
  t.b_k = g.b_k;
  t.c_m = g.c_m;
  t.c_n = kBlock;
  t.r_m = g.r_m;
  t.r_n = kBlock;
  t.alpha = g.alpha;
  for (int64_t j = n0, n; j < n1; j += n) {
    n = tile_blocks(m1 - m0, n1 - j);
    const int64_t panels = m1 - m0 <= kTileRows ? 1 : ceil_div(g.K * n * kBlock * 4, kPanelBytes);
    const int64_t chunks = larger(1, larger(panels, g.K / kChain));
    const int64_t per_chunk = ceil_div(g.K, chunks), lanes = smaller(n * kBlock, g.N - j * kBlock);
    int64_t k = 0;
    do {
      const bool first = k == 0 && !g.accumulate;
      t.length = t.fetch = smaller(per_chunk, g.K - k);
      t.a = g.a + m0 * g.a_m + k * g.a_k;
      t.b = g.b + j * g.b_n + k * g.b_k;
      t.c = g.c + m0 * g.c_m + j * kBlock;
      const float* next = k + per_chunk < g.K      ? t.b + per_chunk * g.b_k
                          : (j + n) * kBlock < g.N ? g.b + (j + n) * g.b_n
                                                   : g.next;
      t.ahead = next && g.fetches ? next - t.b : 0;
      t.accumulate = !first;
      t.bias = first && g.bias ? g.bias + j * kBlock : nullptr;
      t.residual = first && g.residual ? g.residual + m0 * g.r_m + j * kBlock : nullptr;
      t.activation = k + per_chunk >= g.K ? g.activation : 0;
      if (lanes == n * kBlock)
        tiles(t, static_cast<int>(n), m1 - m0);
      else
        partial_tiles(t, static_cast<int>(n), m1 - m0, lanes);
      k += per_chunk;
    } while (k < g.K);
  }
}

void pack_columns(const float* b, int64_t s_k, int64_t s_n, int64_t K, int64_t N, int64_t n0, int64_t n1, float* dst) {
  const int64_t together = s_n < s_k ? 4 : 1;  // four lines of a row at once: rows may be a page apart
  for (int64_t n = n0; n < n1; n += together)
    pack_lanes({b + n * kBlock * s_n, s_n, s_k, 0, N - n * kBlock}, K,
               {dst + (n - n0) * K * kBlock, smaller(together, n1 - n), K * kBlock});
}

namespace {

void pack_columns_parallel(const Exec* exec, const float* b, int64_t s_k, int64_t s_n, int64_t K, int64_t N,
                           float* dst) {
  pack_parallel(exec, s_n, s_k, ceil_div(N, kBlock), K, 2 * kBlock, 32 * kBlock, 20. * K * N,
                [&](int64_t first, int64_t last, int64_t k0, int64_t k1) {
                  const int64_t n = first * kBlock;
                  pack_lanes({b + n * s_n + k0 * s_k, s_n, s_k, 0, N - n}, k1 - k0,
                             {dst + (first * K + k0) * kBlock, last - first, K * kBlock});
                });
}

// Rows 4 KB apart share one L1 set of 8 lines (14 rows lose 15 % of their speed), and strided k touch a page each: such
// rows are copied with a stride that does neither, unless too few columns follow to pay for it.
NEEDLE_INLINE bool needs_copy(const Matmul& g) {
  if (g.M == 1 || g.N < 3 * kBlock) return false;
  return g.a_k != 1 || (kTileRows > 8 && g.M > 8 && g.a_m % 1024 == 0);
}
NEEDLE_INLINE int64_t copy_stride(int64_t K) { return ceil_div(K, kBlock) * kBlock + kBlock; }

void copy_rows(const Matmul& g, int64_t m0, int64_t m1, float* dst) {
  const int64_t ld = copy_stride(g.K);
  int64_t m = m0;
  if (g.a_m == 1)
    for (int64_t n; (n = smaller(4, (m1 - m) / kBlock) * kBlock) > 0; m += n, dst += n * ld)  // some lines of a row
      for (int64_t k = 0; k < g.K; k += kBlock)
        for (int64_t i = 0; i < n; i += kBlock)
          transpose(dst + i * ld + k, ld, g.a + m + i + k * g.a_k, g.a_k, smaller(kBlock, g.K - k), kBlock);
  for (; m < m1; m++, dst += ld) {
    const float* s = g.a + m * g.a_m;
    if (g.a_k == 1)
      std::memcpy(dst, s, g.K * 4);
    else
      for (int64_t k = 0; k < g.K; k++) dst[k] = s[k * g.a_k];
  }
}

// Rows [m0, m1) in blocks that stay in L2, copied to `room` if that pays.
void product_by_rows(Matmul g, int64_t m0, int64_t m1, int64_t n0, int64_t n1, int64_t row_block, float* room) {
  for (int64_t m = m0; m < m1; m += row_block) {
    const int64_t end = smaller(m1, m + row_block);
    if (!room) {
      product(g, m, end, n0, n1);
      continue;
    }
    copy_rows(g, m, end, room);
    Matmul block = g;
    block.a_m = copy_stride(g.K);
    block.a_k = 1;
    block.a = room - m * block.a_m;
    product(block, m, end, n0, n1);
  }
}

// Rows of so many numbers stay in L2 beside columns that stream past them.
constexpr int64_t kRowsStay = 256 << 10;

NEEDLE_INLINE int64_t rows_of_each(int64_t M, int64_t blocks) {
  return ceil_div(ceil_div(M, blocks), kTileRows) * kTileRows;
}
NEEDLE_INLINE int64_t rows_per_block(int64_t M, int64_t K) {
  const int64_t most = larger(ceil_div(56, kTileRows), kRowsStay / larger(K, 1) / kTileRows) * kTileRows;
  return rows_of_each(M, ceil_div(M, most));
}

// Columns of B as they lie in memory.
struct Unpacked {
  const float* b;
  int64_t s_k, s_n;
};

// One product on all threads, with packed columns or with those of `unpacked`, of which each task packs a few before it
// uses them: what few rows multiply is then read from L2 (128 rows by 768 x 3072: 1.1 times as fast, 32 by 512 x 2048:
// 1.35).
void run(const Exec* exec, Matmul g, const Unpacked* unpacked = nullptr) {
  const double flops = 2. * g.M * g.N * g.K;
  const int64_t blocks = ceil_div(g.N, kBlock), step = g.M <= kWideRows ? kWideBlocks : kTileBlocks;
  const int64_t units = ceil_div(blocks, step);
  const int64_t wanted = task_count(exec, flops);
  // Threads share out columns, so that each reads its own from memory, and rows where columns do not go round; all of
  // the columns with some of the rows, where those are more and the columns stay in L2.
  const bool stays = g.N * g.K <= kStays;
  const int64_t most = ceil_div(g.M, 2 * kTileRows), least = ceil_div(smaller(exec->threads, wanted), units);
  const bool by_rows = !unpacked && stays && g.M > g.N && most >= smaller(wanted, 4 * exec->threads);
  const int64_t row_block =
      by_rows ? rows_of_each(g.M, smaller(wanted, most)) : smaller(rows_per_block(g.M, g.K), rows_of_each(g.M, least));
  const int64_t rows = unpacked ? g.M : row_block, row_tasks = ceil_div(g.M, rows);
  const int64_t per_task = by_rows ? units : ceil_div(units, smaller(units, ceil_div(wanted, row_tasks)));
  const int64_t n_tasks = ceil_div(units, per_task);
  g.fetches = row_tasks == 1 || !stays;
  const int64_t group = unpacked ? larger(1, kPanelBytes / (g.K * step * kBlock * 4)) * step : blocks;
  const bool copy = needs_copy(g), copies_own = copy && n_tasks == 1 && !unpacked;
  if (copy && !copies_own) {
    float* room = scratch<float>(exec, 3, g.M * copy_stride(g.K));
    const int64_t tasks = smaller(ceil_div(g.M, kBlock), task_count(exec, 20. * g.M * g.K));
    const int64_t part = ceil_div(ceil_div(g.M, tasks), kBlock) * kBlock;
    parallel_for(exec, ceil_div(g.M, part), [&](int64_t t) {
      copy_rows(g, t * part, smaller(g.M, (t + 1) * part), room + t * part * copy_stride(g.K));
    });
    g.a = room;
    g.a_m = copy_stride(g.K);
    g.a_k = 1;
  }
  parallel_for(exec, row_tasks * n_tasks, [&](int64_t t) {
    const int64_t m0 = t / n_tasks * rows, m1 = smaller(g.M, m0 + rows), n0 = t % n_tasks * per_task * step;
    const int64_t n1 = smaller(blocks, n0 + per_task * step);
    float* room = copies_own ? scratch<float>(exec, 0, row_block * copy_stride(g.K)) : nullptr;
    for (int64_t n = n0, end; n < n1; n = end) {
      end = smaller(n1, n + group);
      Matmul part = g;
      if (unpacked) {
        float* columns = scratch<float>(exec, 1, (end - n) * g.K * kBlock);
        pack_columns(unpacked->b, unpacked->s_k, unpacked->s_n, g.K, g.N, n, end, columns);
        part.b = columns - n * g.K * kBlock;
      }
      product_by_rows(part, m0, m1, n, end, row_block, room);
    }
    if (g.done && n_tasks == 1) g.done(g.context, m0, m1);
  });
  if (g.done && n_tasks > 1)
    parallel_parts(exec, g.M, 20. * g.M * g.N, [&](int64_t m0, int64_t m1) { g.done(g.context, m0, m1); });
}

// Few rows times columns that are contiguous in memory, as a linear layer has them: dot products, without a copy of B.
constexpr int kPackedRows = 256;  // most rows whose tasks pack columns themselves
constexpr int kMostDotRows = 12;  // more repay a copy
constexpr int kDotRows = 4, kDotColumns = kRegisters == 32 ? 4 : 2;

template <int ROWS, int COLUMNS>
NEEDLE_INLINE void dots(const Matmul& g, const float* b) {
  float total[ROWS][COLUMNS] = {};
  for (int64_t k0 = 0; k0 < g.K; k0 += kChain * V::N) {
    V sums[ROWS][COLUMNS];
    for (auto& row : sums)
      for (V& s : row) s = V(0.f);
    for_lanes<float>(smaller(kChain * V::N, g.K - k0), [&](int64_t i, int n) __attribute__((always_inline)) {
      V x[ROWS];
      for (int m = 0; m < ROWS; m++) x[m] = load_lanes(g.a + m * g.a_m + k0 + i, n);
      for (int j = 0; j < COLUMNS; j++) {
        const V w = load_lanes(b + j * g.b_n + k0 + i, n);
        for (int m = 0; m < ROWS; m++) sums[m][j] = fma(x[m], w, sums[m][j]);
      }
    });
    for (int m = 0; m < ROWS; m++)
      for (int j = 0; j < COLUMNS; j++) total[m][j] += reduce_add(sums[m][j]);
  }
  for (int m = 0; m < ROWS; m++)
    for (int j = 0; j < COLUMNS; j++) g.c[m * g.c_m + j] = total[m][j];
}

template <int ROWS>
void dot_columns(Matmul g, int64_t first, int64_t last) {
  float* c = g.c;
  int64_t n = first;
  for (; n + kDotColumns <= last; n += kDotColumns) g.c = c + n, dots<ROWS, kDotColumns>(g, g.b + n * g.b_n);
  for (; n < last; n++) g.c = c + n, dots<ROWS, 1>(g, g.b + n * g.b_n);
  for (int m = 0; m < ROWS; m++)
    for_lanes<float>(last - first, [&](int64_t i, int lanes) {
      float* y = c + m * g.c_m + first + i;
      V v = load_lanes(y, lanes);
      if (g.bias) v = v + load_lanes(g.bias + first + i, lanes);
      store_lanes(y, activate(g.activation, g.alpha, v), lanes);
    });
}

void dot_product(const Exec* exec, const Matmul& g) {
  using Columns = void (*)(Matmul, int64_t, int64_t);
  constexpr Columns of_rows[kDotRows + 1] = {nullptr, dot_columns<1>, dot_columns<2>, dot_columns<3>, dot_columns<4>};
  const double work = larger(4, 2 * g.M) * static_cast<double>(g.N * g.K);
  parallel_parts(exec, ceil_div(g.N, kBlock), work, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++) {
      Matmul part = g;
      for (int64_t m = 0; m < g.M; m += kDotRows) {
        of_rows[smaller(kDotRows, g.M - m)](part, block * kBlock, smaller(g.N, (block + 1) * kBlock));
        part.a += kDotRows * g.a_m;
        part.c += kDotRows * g.c_m;
      }
    }
  });
}

NEEDLE_INLINE bool same_for_all_batches(const View& v) {
  for (int d = 0; d < v.rank - 2; d++)
    if (v.shape[d] > 1 && v.stride[d] != 0) return false;
  return true;
}

}  // namespace

// Where the rows are too long for L2, one part of all of them after the other: columns are then read once. (128 rows by
// 3072 x 768 on two threads: 1.04 times as fast as blocks of rows.)
void product(const Exec* exec, const Matmul& g) {
  const int64_t parts = larger(1, ceil_div(g.M * g.K, kRowsStay));
  const int64_t length = ceil_div(g.K / parts, kChain) * kChain;
  if (parts == 1 || length < 2 * kChain || g.N * g.K <= kStays) return run(exec, g);
  for (int64_t k = 0; k < g.K; k += length) {
    const bool last = k + length >= g.K;
    Matmul part = g;
    part.K = smaller(length, g.K - k);
    part.a += k * g.a_k;
    part.b += k * g.b_k;
    part.accumulate = k > 0;
    if (k > 0) part.bias = part.residual = nullptr;
    if (!last) part.activation = 0, part.done = nullptr;
    run(exec, part);
  }
}

void pack_matrix(const pack_matrix_args& c) {
  const View& b = c.in.b;
  if (b.size() == 0) return;
  pack_columns_parallel(c.exec, b.as<const float>(), b.stride[0], b.stride[1], b.shape[0], b.shape[1],
                        c.out.packed.as<float>());
}

void matmul_packed(const matmul_packed_args& c) {
  const View &a = c.in.a, &out = c.out.y;
  if (out.size() == 0) return;
  const Optional& residual = c.in.residual;
  const int64_t K = a.shape[1];
  product(c.exec,
          {out.shape[0], out.shape[1], K, a.as<const float>(), a.stride[0], 1, c.in.packed.as<const float>(),
           K * kBlock, kBlock, out.as<float>(), out.stride[0], c.in.bias.as<const float>(), residual.as<const float>(),
           residual.stride[0], static_cast<int>(c.attr.activation), static_cast<float>(c.attr.alpha)});
}

void matmul(const matmul_args& c) {
  const View &a = c.in.a, &b = c.in.b, &out = c.out.y;
  if (out.dtype != DType::f32) return matmul_other(c);
  if (out.size() == 0) return;
  const int r = a.rank;
  int64_t M = a.shape[r - 2], batch = 1;
  const int64_t K = a.shape[r - 1], N = b.shape[r - 1], blocks = ceil_div(N, kBlock);
  for (int d = 0; d < r - 2; d++) batch *= a.shape[d];
  int64_t a_m = a.stride[r - 2];
  const int64_t s_k = b.stride[r - 2], s_n = b.stride[r - 1];
  const bool shared = same_for_all_batches(b);
  if (shared && batch > 1 && rows_collapse(a, &a_m)) {
    M *= batch;
    batch = 1;
  }
  if (batch > 1 && !shared && matmul_small(c)) return;

  // Few rows do not repay a copy of B whose rows are contiguous: only its last, partial block is copied then.
  const bool in_place = batch == 1 && s_n == 1 && M <= kTileRows;
  const bool dots = batch == 1 && s_n != 1 && s_k == 1 && a.stride[r - 1] == 1 && M <= kMostDotRows;
  // Few rows are done with a column before it has left the cache.
  const bool packs_late = batch == 1 && !in_place && !dots && s_k < s_n && M <= kPackedRows;
  const bool packs_shared = shared && !in_place && !dots && !packs_late;
  const int64_t packed_blocks = packs_shared ? blocks : in_place ? 1 : 0;
  float* bias = scratch<float>(c.exec, 2, (packed_blocks * K + blocks) * kBlock);
  float* packed = bias + blocks * kBlock;
  if (c.in.bias) {
    std::memset(bias, 0, blocks * kBlock * 4);
    for (int64_t n = 0; n < N; n++) bias[n] = c.in.bias.as<const float>()[n * c.in.bias.stride[0]];
  }
  Matmul g = {M,      N,          K,      a.as<const float>(), a_m, a.stride[r - 1],
              packed, K * kBlock, kBlock, out.as<float>(),     N,   c.in.bias ? bias : nullptr};
  g.activation = static_cast<int>(c.attr.activation);
  g.alpha = static_cast<float>(c.attr.alpha);
  const float* b_data = b.as<const float>();
  if (dots) {
    g.b = b_data;
    g.b_n = s_n;
    return dot_product(c.exec, g);
  }
  if (in_place) {
    const int64_t whole = N / kBlock;
    if (whole < blocks) {
      pack_columns(b_data, s_k, s_n, K, N, whole, blocks, packed);
      g.b = packed - whole * g.b_n;
      product(g, 0, M, whole, blocks);
    }
    g.N = whole * kBlock;
    g.b = b_data;
    g.b_n = kBlock;
    g.b_k = s_k;
    if (whole > 0) run(c.exec, g);
    return;
  }
  const Unpacked unpacked = {b_data, s_k, s_n};
  if (packs_late) return run(c.exec, g, &unpacked);
  if (packs_shared) pack_columns_parallel(c.exec, b_data, s_k, s_n, K, N, packed);
  if (batch == 1) return run(c.exec, g);

  const int64_t units = ceil_div(blocks, kTileBlocks), wanted = task_count(c.exec, 2. * batch * M * N * K);
  const int64_t per_task = ceil_div(units, smaller(units, ceil_div(wanted, batch))),
                n_tasks = ceil_div(units, per_task);
  const int64_t row_block = rows_per_block(M, K);
  const bool copy = needs_copy(g);
  parallel_for(c.exec, batch * n_tasks, [&](int64_t t) {
    const int64_t i = t / n_tasks, n0 = t % n_tasks * per_task * kTileBlocks;
    const int64_t n1 = smaller(blocks, n0 + per_task * kTileBlocks);
    Matmul one = g;
    one.a += batch_offset(a, i);
    one.c += i * M * N;
    if (!shared) {
      float* columns = scratch<float>(c.exec, 1, (n1 - n0) * K * kBlock);
      pack_columns(b_data + batch_offset(b, i), s_k, s_n, K, N, n0, n1, columns);
      one.b = columns - n0 * K * kBlock;
    }
    float* room = copy ? scratch<float>(c.exec, 0, row_block * copy_stride(K)) : nullptr;
    product_by_rows(one, 0, M, n0, n1, row_block, room);
  });
}

}  // namespace needle::NEEDLE_ISA
