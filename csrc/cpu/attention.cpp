// softmax(q k^T * scale + mask) v and its gradients, one head at a time: a block of rows of scores stays in L2 between
// the products.
#include "cpu/matmul.h"
#include "cpu/rows.h"

namespace needle::NEEDLE_ISA {
namespace {

constexpr int64_t kScoreBytes = 256 << 10;    // scores of one block of rows
constexpr int64_t kPartRows = 4 * kTileRows;  // fewer do not repay packing keys and values once more

// Lanes of x where a bool is true, else -inf.
NEEDLE_INLINE V masked(const bool* m, int n, V x) {
  typedef uint8_t Bytes __attribute__((vector_size(V::N)));
  Bytes bytes = {};
  std::memcpy(&bytes, m, n);
  return select(lt(V(0.f), V(__builtin_convertvector(bytes, decltype(x.v)))), x, V(-HUGE_VALF));
}
NEEDLE_INLINE V masked(const float* m, int n, V x) { return x + load_lanes(m, n); }

// One row of scores masked: bool keeps where true, f32 is added.
void mask_row(const View& mask, int64_t at, int64_t n, float* x) {
  const int64_t step = mask.stride[mask.rank - 1];
  with_type<attention_args::In::mask_dtypes>(mask.dtype, [&]<class T>(T) {
    const T* m = mask.as<const T>() + at;
    if (step == 1)
      return for_lanes<float>(
          n, [&](int64_t j, int lanes) { store_lanes(x + j, masked(m + j, lanes, load_lanes(x + j, lanes)), lanes); });
    for (int64_t j = 0; j < n; j++) {
      if constexpr (std::is_same_v<T, bool>)
        x[j] = m[j * step] ? x[j] : -HUGE_VALF;
      else
        x[j] += m[j * step];
    }
  });
}

void scale_row(const float* src, int64_t step, int64_t n, float scale, float* dst) {
  if (step == 1)
    return for_lanes<float>(n, [&](int64_t i, int m) { store_lanes(dst + i, load_lanes(src + i, m) * V(scale), m); });
  for (int64_t i = 0; i < n; i++) dst[i] = src[i * step] * scale;
}

// Row x[0, n) becomes e ** (x - max); returns 1 / sum, or `nothing` where everything is masked.
float exponentials(float* x, int64_t n, float nothing) {
  const float top = row_max(x, n);
  if (top == -HUGE_VALF) {  // also where NaN is beside what is masked, which a maximum passes over
    for (int64_t i = 0; i < n; i++)
      if (x[i] != top) nothing = NAN;
    std::memset(x, 0, n * 4);
    return nothing;
  }
  const double sum = row_sum<float>(n, [&](int64_t i, int lanes) {
    V e = exp(load_lanes(x + i, lanes) - V(top));
    store_lanes(x + i, e, lanes);
    return e;
  });
  return static_cast<float>(1 / sum);
}

// From a row of exponentials x, 1 / their sum and the gradient g of the probabilities: x becomes the probabilities, g
// the gradient of the scores.
void score_gradients(float* x, float* g, int64_t n, float inverse) {
  const float mean = static_cast<float>(row_sum<float>(n, [&](int64_t i, int lanes) {
    V p = load_lanes(x + i, lanes) * V(inverse);
    store_lanes(x + i, p, lanes);
    return p * load_lanes(g + i, lanes);
  }));
  for_lanes<float>(n, [&](int64_t i, int lanes) {
    store_lanes(g + i, load_lanes(x + i, lanes) * (load_lanes(g + i, lanes) - V(mean)), lanes);
  });
}

float* matrix_at(const View& x, int64_t index) { return x.as<float>() + batch_offset(x, index); }

// The right side (K, N) of a product: as it lies where blocks of 16 columns can be read there, else packed.
struct Columns {
  const float* data;
  int64_t block, step;
};
bool lies_in_blocks(const View& x) { return x.stride[x.rank - 1] == 1 && x.shape[x.rank - 1] % kBlock == 0; }
int64_t room_for(const View& x) {
  return lies_in_blocks(x) ? 0 : ceil_div(x.shape[x.rank - 1], kBlock) * kBlock * x.shape[x.rank - 2];
}
Columns packed(const float* x, int64_t s_k, int64_t s_n, int64_t K, int64_t N, float* room) {
  pack_columns(x, s_k, s_n, K, N, 0, ceil_div(N, kBlock), room);
  return {room, K * kBlock, kBlock};
}
Columns columns_of(const View& x, int64_t head, float* room) {
  const int64_t K = x.shape[x.rank - 2], N = x.shape[x.rank - 1], s_k = x.stride[x.rank - 2];
  if (lies_in_blocks(x)) return {matrix_at(x, head), kBlock, s_k};
  return packed(matrix_at(x, head), s_k, x.stride[x.rank - 1], K, N, room);
}
Columns columns_of_transposed(const View& x, int64_t head, float* room) {
  const int r = x.rank;
  return packed(matrix_at(x, head), x.stride[r - 1], x.stride[r - 2], x.shape[r - 1], x.shape[r - 2], room);
}

// c (M, N) = a (M, K) b (K, N), or what is added to c.
void multiply(int64_t M, int64_t N, int64_t K, const float* a, int64_t a_m, int64_t a_k, const Columns& b, float* c,
              int64_t c_m, bool add = false) {
  Matmul g = {M, N, K, a, a_m, a_k, b.data, b.block, b.step, c, c_m};
  if (add) g.residual = c, g.r_m = c_m;
  g.fetches = false;  // all lies in L2
  product(g, 0, M, 0, ceil_div(N, kBlock));
}

struct Sizes {
  int64_t heads = 1, L, E, S, D;
  int64_t ld, q_ld, y_ld;  // of rows of scores, queries and results in scratch: one line off a power of two
  int64_t keys;            // S up to whole blocks
  int64_t block;           // rows of scores at a time

  Sizes(const View& q, const View& k, const View& v) {
    const int r = q.rank;
    for (int d = 0; d < r - 2; d++) heads *= q.shape[d];
    L = q.shape[r - 2], E = q.shape[r - 1], S = k.shape[r - 2], D = v.shape[r - 1];
    keys = ceil_div(S, kBlock) * kBlock;
    ld = keys + kBlock, q_ld = (ceil_div(E, kBlock) + 1) * kBlock, y_ld = (ceil_div(D, kBlock) + 1) * kBlock;
    const int64_t fit = kScoreBytes / 4 / ld / kTileRows * kTileRows;
    const int64_t most = larger(kTileRows, smaller(8 * kTileRows, fit));
    block = larger(1, ceil_div(L, larger(1, ceil_div(L, most))));
  }
  // Into how many parts a head's rows are cut, so that there are about `tasks` of them.
  int64_t parts(int64_t tasks) const {
    return larger(1, smaller(ceil_div(L, kPartRows), ceil_div(tasks, larger(1, heads))));
  }
};

// A block of rows in scratch: queries times `scale`, e ** (scores - the largest), and 1 / the sums of those.
struct Rows {
  float *queries, *scores, *inverse;
};

// The sum of x[i] * y[i].
NEEDLE_INLINE float dot(const float* x, const float* y, int64_t n) {
  V sum(0.f);
  for_lanes<float>(n, [&](int64_t i, int m) { sum = fma(load_lanes(x + i, m), load_lanes(y + i, m), sum); });
  return reduce_add(sum);
}

// y[0, n) = scale times the sum of weights[j] * x[j][0, n) over `rows` rows of x, `step` apart; n is at most kPiece.
constexpr int64_t kPiece = 4 * V::N;
void weighted_sum(const float* weights, const float* x, int64_t rows, int64_t step, int64_t n, float scale, float* y) {
  V total[4] = {V(0.f), V(0.f), V(0.f), V(0.f)};
  for (int64_t first = 0; first < rows; first += kChain) {
    const int64_t end = smaller(rows, first + kChain);
    V sum[4] = {V(0.f), V(0.f), V(0.f), V(0.f)};
    if (n == kPiece)
      for (int64_t j = first; j < end; j++)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) sum[v] = fma(V(weights[j]), V::load(x + j * step + v * V::N), sum[v]);
    else
      for (int64_t j = first; j < end; j++)
        for_lanes<float>(n, [&](int64_t i, int lanes) {
          sum[i / V::N] = fma(V(weights[j]), load_lanes(x + j * step + i, lanes), sum[i / V::N]);
        });
    for (int v = 0; v < 4; v++) total[v] = total[v] + sum[v];
  }
  for_lanes<float>(n, [&](int64_t i, int lanes) { store_lanes(y + i, total[i / V::N] * V(scale), lanes); });
}

// The queries [m, m + rows) of a head times `scale`.
template <class Args>
void scale_queries(const Args& c, const Sizes& z, int64_t head, int64_t m, int64_t rows, float* to) {
  const View& q = c.in.q;
  const float* from = matrix_at(q, head) + m * q.stride[q.rank - 2];
  for (int64_t i = 0; i < rows; i++)
    scale_row(from + i * q.stride[q.rank - 2], q.stride[q.rank - 1], z.E, c.attr.scale, to + i * z.q_ld);
}

// How many keys the queries up to `end` see at most.
template <class Args>
int64_t keys_seen(const Args& c, const Sizes& z, int64_t end) {
  return c.attr.causal ? smaller(z.S, end) : z.S;
}

// Scores of queries [m, m + rows) with the first `limit` keys become e ** (masked score - the largest).
template <class Args>
void soften(const Args& c, const Sizes& z, int64_t head, int64_t m, int64_t rows, int64_t limit, const Rows& to) {
  const View& mask = c.in.mask;
  const float nothing = c.in.mask && c.attr.strict ? NAN : 0;  // what a row without a key is multiplied by
  for (int64_t i = 0; i < rows; i++) {
    float* x = to.scores + i * z.ld;
    const int64_t n = smaller(limit, keys_seen(c, z, m + i + 1));
    if (c.in.mask) mask_row(mask, batch_offset(mask, head) + (m + i) * mask.stride[mask.rank - 2], n, x);
    to.inverse[i] = exponentials(x, n, nothing);
    std::memset(x + n, 0, (limit - n) * 4);
  }
}

// Fills `to` for queries [m, m + rows) of a head; returns how many keys they see at most.
template <class Args>
int64_t score(const Args& c, const Sizes& z, int64_t head, int64_t m, int64_t rows, const Columns& keys,
              const Rows& to) {
  const int64_t limit = keys_seen(c, z, m + rows);
  scale_queries(c, z, head, m, rows, to.queries);
  multiply(rows, ceil_div(limit, kBlock) * kBlock, z.E, to.queries, z.q_ld, 1, keys, to.scores, z.ld);
  soften(c, z, head, m, rows, limit, to);
  return limit;
}

// Rows `ld` apart.
struct Matrix {
  float* data;
  int64_t ld;
};
Matrix matrix_of(const View& x, int64_t head) { return {matrix_at(x, head), x.stride[x.rank - 2]}; }

void clear(const Matrix& x, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i++) std::memset(x.data + i * x.ld, 0, columns * 4);
}
void add(const float* from, int64_t n, float* to) {
  for_lanes<float>(n,
                   [&](int64_t i, int m) { store_lanes(to + i, load_lanes(to + i, m) + load_lanes(from + i, m), m); });
}

}  // namespace

static Rows rows_in(const Exec* exec, const Sizes& z) {
  float* scores = scratch<float>(exec, 0, z.block * (z.ld + z.q_ld + 1));
  return {scores + z.block * z.ld, scores, scores + z.block * (z.ld + z.q_ld)};
}

// One query of every head reads keys and values where they lie: packing them would take longer than using them.
static void attend_one(const attention_args& c, const Sizes& z) {
  const View &k = c.in.k, &v = c.in.v;
  const int64_t k_ld = k.stride[k.rank - 2], v_ld = v.stride[v.rank - 2];
  parallel_each(c.exec, z.heads, z.S * (z.E + z.D), [&](int64_t head) {
    const Rows b = rows_in(c.exec, z);
    const int64_t limit = keys_seen(c, z, 1);
    scale_queries(c, z, head, 0, 1, b.queries);
    const float *keys = matrix_at(k, head), *values = matrix_at(v, head);
    for (int64_t j = 0; j < limit; j++) b.scores[j] = dot(b.queries, keys + j * k_ld, z.E);
    soften(c, z, head, 0, 1, limit, b);
    float* y = matrix_at(c.out.y, head);
    for (int64_t d = 0; d < z.D; d += kPiece)
      weighted_sum(b.scores, values + d, limit, v_ld, smaller(kPiece, z.D - d), b.inverse[0], y + d);
  });
}

// q (..., L, E), k (..., S, E), v (..., S, D), mask (..., L, S) of bool or f32; the last axis of out (..., L, D) is
// dense. A query that sees no key gives zeros, with strict NaN.
void attention(const attention_args& c) {
  const View &k = c.in.k, &v = c.in.v, &out = c.out.y;
  if (out.size() == 0) return;
  const Sizes z(c.in.q, k, v);
  if (z.L == 1 && k.stride[k.rank - 1] == 1 && v.stride[v.rank - 1] == 1) return attend_one(c, z);
  // Every part of a head packs its keys once more: no more parts than give every thread its share.
  const int64_t wanted = smaller(6 * c.exec->threads, task_count(c.exec, 2. * z.heads * z.L * z.S * (z.E + z.D)));
  const int64_t parts = z.parts(wanted);

  parallel_for(c.exec, z.heads * parts, [&](int64_t t) {
    const int64_t head = t / parts, part = t % parts, first = z.L * part / parts, end = z.L * (part + 1) / parts;
    float* room = scratch<float>(c.exec, 1, z.keys * z.E + room_for(v));
    const Columns keys = columns_of_transposed(k, head, room), values = columns_of(v, head, room + z.keys * z.E);
    const Rows b = rows_in(c.exec, z);
    const Matrix y = matrix_of(out, head);

    for (int64_t m = first; m < end; m += z.block) {
      const int64_t rows = smaller(z.block, end - m), limit = score(c, z, head, m, rows, keys, b);
      float* target = y.data + m * y.ld;
      multiply(rows, z.D, limit, b.scores, z.ld, 1, values, target, y.ld);
      for (int64_t i = 0; i < rows; i++) scale_row(target + i * y.ld, 1, z.D, b.inverse[i], target + i * y.ld);
    }
  });
}

// From what `attention` takes and dy (..., L, D): dq, dk, dv, whose last axes are dense. Scores and probabilities are
// computed again, a block of rows at a time: nothing of L x S is kept.
void attention_grad(const attention_grad_args& c) {
  const View &k = c.in.k, &v = c.in.v, &dy = c.in.dy;
  const Sizes z(c.in.q, k, v);
  // Parts of a head have sums of dk and dv of their own: no more parts than give every thread its share.
  const int64_t wanted = smaller(4 * c.exec->threads, task_count(c.exec, 5. * z.heads * z.L * z.S * (z.E + z.D)));
  const int64_t parts = z.parts(wanted), sums = z.S * (z.E + z.D);
  float* others = scratch<float>(c.exec, 2, z.heads * (parts - 1) * sums);

  parallel_for(c.exec, z.heads * parts, [&](int64_t t) {
    const int64_t head = t / parts, part = parts - 1 - t % parts;  // causal: those that see most keys come first
    const int64_t first = z.L * part / parts, end = z.L * (part + 1) / parts;
    float* own = part ? others + (head * (parts - 1) + part - 1) * sums : nullptr;
    const Matrix dk = part ? Matrix{own, z.E} : matrix_of(c.out.dk, head),
                 dv = part ? Matrix{own + z.S * z.E, z.D} : matrix_of(c.out.dv, head), dq = matrix_of(c.out.dq, head);
    clear(dk, z.S, z.E);
    clear(dv, z.S, z.D);
    float* room = scratch<float>(c.exec, 1, z.keys * (z.E + z.D) + room_for(k));
    const Columns keys_t = columns_of_transposed(k, head, room),
                  values_t = columns_of_transposed(v, head, room + z.keys * z.E),
                  keys = columns_of(k, head, room + z.keys * (z.E + z.D));
    float* p = scratch<float>(c.exec, 0, z.block * (2 * z.ld + z.q_ld + z.y_ld + 1));
    float *ds = p + z.block * z.ld, *queries = ds + z.block * z.ld, *grads = queries + z.block * z.q_ld;
    const Rows b = {queries, p, grads + z.block * z.y_ld};

    for (int64_t m = first; m < end; m += z.block) {
      const int64_t rows = smaller(z.block, end - m), limit = score(c, z, head, m, rows, keys_t, b);
      const float* from = matrix_at(dy, head) + m * dy.stride[dy.rank - 2];
      for (int64_t i = 0; i < rows; i++)
        scale_row(from + i * dy.stride[dy.rank - 2], dy.stride[dy.rank - 1], z.D, 1, grads + i * z.y_ld);
      multiply(rows, ceil_div(limit, kBlock) * kBlock, z.D, grads, z.y_ld, 1, values_t, ds, z.ld);
      for (int64_t i = 0; i < rows; i++) score_gradients(p + i * z.ld, ds + i * z.ld, limit, b.inverse[i]);
      multiply(limit, z.D, rows, p, 1, z.ld, {grads, kBlock, z.y_ld}, dv.data, dv.ld, true);
      multiply(limit, z.E, rows, ds, 1, z.ld, {queries, kBlock, z.q_ld}, dk.data, dk.ld, true);
      float* target = dq.data + m * dq.ld;
      multiply(rows, z.E, limit, ds, z.ld, 1, keys, target, dq.ld);
      for (int64_t i = 0; i < rows; i++) scale_row(target + i * dq.ld, 1, z.E, c.attr.scale, target + i * dq.ld);
    }
  });

  parallel_each(c.exec, parts > 1 ? z.heads * z.S : 0, parts * (z.E + z.D), [&](int64_t i) {
    const int64_t head = i / z.S, j = i % z.S;
    const Matrix dk = matrix_of(c.out.dk, head), dv = matrix_of(c.out.dv, head);
    for (int64_t part = 1; part < parts; part++) {
      const float* own = others + (head * (parts - 1) + part - 1) * sums;
      add(own + j * z.E, z.E, dk.data + j * dk.ld);
      add(own + z.S * z.E + j * z.D, z.D, dv.data + j * dv.ld);
    }
  });
}

}  // namespace needle::NEEDLE_ISA
