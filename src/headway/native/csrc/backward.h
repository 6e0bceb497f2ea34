// The backward of a tile of queries against a block of keys. With the final logsumexp and delta = sum(d_out * out) - d_lse
// every block is independent of the others:
//
//   P = exp(S - lse),  dP = d_out V^T,  dS = P * (dP - delta),  dQ += dS K,  dV += P^T d_out,  dK += dS^T Q
//
// Three passes over the groups of rows of the tile, each with one layout of the block in the L1 cache: the scores;
// d_out V^T, with the exponentials of the scores between its steps, and dS; dQ. Then dV and dK of the block's keys.
#pragma once
#include "back_tile.h"
#include "microkernel.h"
#include "score.h"

namespace {

// Computes the weights of the next panels of a group (row r, panel c), in place of their exponents in t.x and, where the
// products over rows read them, in t.p. In bf16 t.p holds pairs of rows, so two rows are computed at a time; in float it is
// written only if EXTRA: steps on scores overwrite t.x, and dropout needs other weights.
template <bool HALF, int R, int C, bool EXTRA>
INLINE void weigh(BackTile<HALF>& t, const Group& g, int& r, int& c) {
  int at = (g.row + r) * BLOCK + (g.first + c) * UNIT;
  if constexpr (HALF) {
    vf p[2 * N];
    uint16_t bits[2] = {g.bits[r][c], R > 1 ? g.bits[r + 1][c] : (uint16_t)0};
    exp2_of_rows(p, bits, t.x + at, BLOCK);
    UNROLL for (int i = 0; i < N; i++) {
      store(t.x + at + i * W, p[i]), store(t.x + at + BLOCK + i * W, p[N + i]);
      store(t.p + (g.row + r) / 2 * BLOCK + (g.first + c) * UNIT + i * W, row_pairs(p[i], p[N + i]));
    }
    if (++c == C) c = 0, r += 2;
    return;
  }
  vf p[AT_ONCE<HALF> * N];
  exp2_only<HALF>(p, g.bits[r] + c, t.x + at);
  const int count = c + AT_ONCE<HALF> <= C ? AT_ONCE<HALF> : C - c;
  UNROLL for (int i = 0; i < AT_ONCE<HALF> * N && i < count * N; i++) {
    store(t.x + at + i * W, p[i]);
    if (EXTRA) store(t.p + at + i * W, p[i]);
  }
  if ((c += AT_ONCE<HALF>) >= C) c = 0, r++;
}

// Attention dropout: multiplies the weights of the values and the gradients of the weights by their factors.
template <bool HALF, int R, int C>
INLINE void drop_weights(BackTile<HALF>& t, const Group& g, const Extra* extra, vf (&ds)[R][C * N]) {
  if (!extra->drops()) return;
  alignas(64) float factors[BLOCK];
  for (int r = 0; r < R; r++) {
    int row = g.row + r, at = row * BLOCK + g.first * UNIT;
    extra->keep(t.rows[row].head, t.rows[row].place, g.first, C, factors);
    UNROLL for (int i = 0; i < C * N; i++) ds[r][i] *= load(factors + i * W);
    for (int j = 0; j < C * UNIT; j++) {
      float w = t.x[at + j] * factors[j];
      if (HALF)
        ((uint16_t*)(t.p + row / 2 * BLOCK + g.first * UNIT + j))[row & 1] = to_bf16(w);
      else
        t.p[at + j] = w;
    }
  }
}

// Pass 1: the exponents of the weights.
template <bool HALF, int R, int C, bool EXTRA>
__attribute__((noinline)) void scores_of(BackTile<HALF>& t, const Group& g, const Block& block, const Extra* extra) {
  int64_t q_step = whole_units(t.z.d);
  vf s[R][C * N] = {};
  const float* k[C];
  UNROLL for (int i = 0; i < C; i++) k[i] = block.k_panels + (g.first + i) * panel_size(t.z.d);
  product<HALF, R, C>(s, t.q + g.row * q_step, q_step, 1, k, LINE, t.z.d);
  vf unit = splat(t.unit);
  UNROLL for (int r = 0; r < R; r++) {
    float* x = t.x + (g.row + r) * BLOCK + g.first * UNIT;
    vf down = splat(t.down[g.row + r]);
    if (EXTRA && extra->c->score_count) {
      UNROLL for (int i = 0; i < C * N; i++) store(x + i * W, s[r][i]);
      memcpy(t.raw + (x - t.x), x, C * UNIT * 4);
      extra->apply(t.rows[g.row + r].head, t.rows[g.row + r].place, g.first, C, x);
      UNROLL for (int i = 0; i < C * N; i++) s[r][i] = load(x + i * W);
    }
    UNROLL for (int i = 0; i < C * N; i++) store(x + i * W, s[r][i] * unit + down);
  }
}

// Pass 2: the weights and dS, each in the layouts that the products read.
template <bool HALF, int R, int C, bool EXTRA>
__attribute__((noinline)) void gradients_of(BackTile<HALF>& t, const Group& g, const Block& block, const Extra* extra,
                                            float* const* gradients) {
  const Sizes& z = t.z;
  int64_t g_step = whole_units(z.dv);
  vf ds[R][C * N] = {};
  const float *d_out = t.g + g.row * g_step, *v[C];
  UNROLL for (int i = 0; i < C; i++) v[i] = block.v_panels + (g.first + i) * panel_size(t.z.dv);
  constexpr int EACH = HALF ? 2 : 8;  // steps between two pieces of exponentials
  int done = 0, r = 0, c = 0;
  for (; r < R && done + EACH <= z.dv; done += EACH, d_out += EACH) {
    product<HALF, R, C>(ds, d_out, g_step, 1, v, LINE, EACH);
    UNROLL for (int i = 0; i < C; i++) v[i] += EACH * LINE;
    weigh<HALF, R, C, EXTRA>(t, g, r, c);
  }
  product<HALF, R, C>(ds, d_out, g_step, 1, v, LINE, z.dv - done);
  while (r < R) weigh<HALF, R, C, EXTRA>(t, g, r, c);
  if (EXTRA) drop_weights<HALF, R, C>(t, g, extra, ds);
  int at = g.row * BLOCK + g.first * UNIT;
  UNROLL for (int r = 0; r < R; r++) {
    vf delta = splat(t.delta[g.row + r]);
    UNROLL for (int i = 0; i < C * N; i++)
      ds[r][i] = only((uint32_t)(g.bits[r][i / N] >> (i % N * W)), load(t.x + at + r * BLOCK + i * W) * (ds[r][i] - delta));
  }
  if (EXTRA && extra->c->score_count)
    for (int r = 0; r < R; r++) {
      float* x = t.x + at + r * BLOCK;
      UNROLL for (int i = 0; i < C * N; i++) store(x + i * W, ds[r][i]);
      extra->pull_back(t.rows[g.row + r].head, t.rows[g.row + r].place, g.first, C, t.raw + at + r * BLOCK, x, gradients);
      UNROLL for (int i = 0; i < C * N; i++) ds[r][i] = load(x + i * W);
    }
  if constexpr (HALF) {
    UNROLL for (int r = 0; r < R; r++) {
      float* to = t.of_row + (at + r * BLOCK) / 2;
      UNROLL for (int i = 0; i + 1 < C * N; i += 2)
        store(to + i * W / 2, joined(ds[r][i], ds[r][i + 1]));
      if (C * N % 2) put<true>(to + C / 2 * UNIT, 0, ds[r][C * N - 1]);
    }
    UNROLL for (int r = 0; r < R; r += 2)
      UNROLL for (int i = 0; i < C * N; i++)
        store(t.ds + (g.row + r) / 2 * BLOCK + g.first * UNIT + i * W, row_pairs(ds[r][i], r + 1 < R ? ds[r + 1][i] : vf{}));
    return;
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int i = 0; i < C * N; i++) store(t.ds + at + r * BLOCK + i * W, ds[r][i]);
}

// Pass 3: dQ.
template <bool HALF, int R>
__attribute__((noinline)) void queries_of(BackTile<HALF>& t, const Group& g, const Block& block) {
  int wide = t.z.wide_d, at = g.row * BLOCK + g.first * UNIT;
  const float *a = HALF ? t.of_row + at / 2 : t.ds + at, *k[4];
  for (int i = 0; i < 4; i++) k[i] = block.k_rows + (int64_t)(g.first + i) * t.z.steps * wide;
  float* dq = t.dq + (int64_t)g.row * wide;
  if (g.masked && __builtin_expect(!block.k_finite, 0))
    seen_only<HALF>(dq, a, R, g.panels, g.bits, k, wide);
  else
    add_rows<HALF, R>(dq, a, HALF ? BLOCK / 2 : BLOCK, 1, k, wide, 1, g.panels * t.z.steps);
}

// Adds to dV and dK of the block's keys from all rows of the tile; panels seen by the same rows are computed together.
template <bool HALF>
INLINE void keys_of(BackTile<HALF>& t, const float* weights, float* dk, float* dv) {
  const int by = HALF ? 2 : 1;
  for (int p = 0; p < 4;) {
    int end = p + 1;
    while (end < 4 && t.low[end] == t.low[p] && t.high[end] == t.high[p]) end++;
    int low = t.low[p] / by, steps = (t.high[p] + by - 1) / by - low, keys = (end - p) * UNIT, key = p * UNIT;
    if (t.high[p] > t.low[p]) {
      const float *g = t.g_rows + (int64_t)low * t.z.wide_dv, *q = t.q_rows + (int64_t)low * t.z.wide_d;
      const float *w = weights + low * BLOCK + key, *ds = t.ds + low * BLOCK + key;
      if (__builtin_expect(t.g_finite, 1))
        add_transposed<HALF>(dv + key * t.z.wide_dv, w, g, t.z.wide_dv, keys, steps);
      else
        add_transposed_careful<HALF>(dv + key * t.z.wide_dv, w, g, t.z.wide_dv, keys, steps);
      if (__builtin_expect(t.q_finite, 1))
        add_transposed<HALF>(dk + key * t.z.wide_d, ds, q, t.z.wide_d, keys, steps);
      else
        add_transposed_careful<HALF>(dk + key * t.z.wide_d, ds, q, t.z.wide_d, keys, steps);
    }
    p = end;
  }
}

// Rows that see only the panels `span` of a block: sets weights and dS of the other panels to 0.
template <bool HALF>
INLINE void clear_beside(BackTile<HALF>& t, const Span& span, int row, int rows, float* weights) {
  const int by = HALF ? 2 : 1;
  for (int r = row / by; r < (row + rows + by - 1) / by; r++)
    for (int p = 0; p < 4; p++)
      if (p < span.first || p >= span.first + span.count)
        UNROLL for (int i = 0; i < UNIT; i += W)
          store(weights + r * BLOCK + p * UNIT + i, vf{}), store(t.ds + r * BLOCK + p * UNIT + i, vf{});
}

// Finds the groups of rows that see some key of the block, and for each panel the range of rows that do.
template <bool HALF>
INLINE void find_groups(BackTile<HALF>& t, const uint64_t* seen, float* weights) {
  t.groups_now = 0;
  for (int p = 0; p < 4; p++) t.low[p] = TILE, t.high[p] = 0;
  for (int row = 0, rows; row < t.count; row += rows) {
    int left = t.count - row;
    rows = left >= ROWS ? ROWS : left >= 4 && ROWS >= 4 ? 4 : left >= 2 ? 2 : 1;
    Group& g = t.groups[t.groups_now];
    Span span = {0, 4, true};
    if (seen) span = span_of(seen + row, rows, g.bits);
    if (span.count < 4) clear_beside(t, span, row, rows, weights);
    if (span.count == 0) continue;
    if (span.all) memset(g.bits, 0xFF, sizeof g.bits), span = {0, 4, true};
    g.row = row, g.rows = rows, g.first = span.first, g.panels = span.count, g.masked = !span.all;
    t.groups_now++;
    for (int p = g.first; p < g.first + g.panels; p++) {
      if (t.low[p] > row) t.low[p] = row;
      if (t.high[p] < row + rows) t.high[p] = row + rows;
    }
  }
}

// One block: seen [row] are the bits of the keys that each row sees, null if all rows see all keys.
template <bool HALF, bool EXTRA>
INLINE void block_of(BackTile<HALF>& t, const Block& block, const uint64_t* seen, const Extra* extra,
                     float* const* gradients, float* dk, float* dv) {
  float* weights = HALF || EXTRA ? t.p : t.x;
  find_groups(t, seen, weights);
  for (int i = 0; i < t.groups_now; i++) {
    t.ahead.some();
    each_panels(t.groups[i], [&](auto rows, auto panels, const Group& g) __attribute__((always_inline)) {
      scores_of<HALF, rows.value, panels.value, EXTRA>(t, g, block, extra);
    });
  }
  for (int i = 0; i < t.groups_now; i++) {
    t.next.some();
    each_panels(t.groups[i], [&](auto rows, auto panels, const Group& g) __attribute__((always_inline)) {
      gradients_of<HALF, rows.value, panels.value, EXTRA>(t, g, block, extra, gradients);
    });
  }
  for (int i = 0; i < t.groups_now; i++)
    with_rows(t.groups[i].rows, [&](auto rows) __attribute__((always_inline)) {
      queries_of<HALF, rows.value>(t, t.groups[i], block);
    });
  keys_of(t, weights, dk, dv);
}

}  // namespace
