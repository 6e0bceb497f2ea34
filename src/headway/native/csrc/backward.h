// A tile of queries against a block of keys, backward. With the final logsumexp and delta = sum(d_out * out) - d_lse
// every block stands alone:
//
//   P = exp(S - lse),  dP = d_out V^T,  dS = P * (dP - delta),  dQ += dS K,  dV += P^T d_out,  dK += dS^T Q
//
// The exponentials of S are computed between the steps of the product d_out V^T.
#pragma once
#include "blocks.h"
#include "product.h"
#include "score.h"

namespace {

template <bool HALF>
struct BackTile {
  Sizes z;
  int count;
  float unit;       // base-2 exponent per raw score
  bool q_finite, g_finite;
  Ahead ahead;
  Row rows[TILE];
  float down[TILE], delta[TILE];
  float *q, *g;            // [rows][words]: queries and d_out, for products over their columns
  float *q_rows, *g_rows;  // [steps][columns]: the same for products over rows
  float* dq;               // [rows][columns]
  int low[4], high[4];     // rows that have touched each panel of the block
  uint16_t bits[ROWS][4];
  alignas(64) float x[ROWS * BLOCK];    // of a group: exponents, then weights
  alignas(64) float raw[ROWS * BLOCK];  // of a group: raw scores, when steps on scores follow
  alignas(64) float of_row[ROWS * BLOCK];  // of a group: dS as pairs along keys (HALF)
  alignas(64) float p[TILE * BLOCK];    // weights [row][64], or pairs of rows [row / 2][64]
  alignas(64) float ds[TILE * BLOCK];   // dS in the same form
};

#if HEADWAY_LEVEL >= 3
// Row a and row b as pairs of bf16, word by word.
INLINE __m512i pairs_of(vf a, vf b) {
  const __m512i way = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                       5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(way, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
}
#endif

// Weights of rows r (and r + 1, HALF) of a group, from their exponents in t.x.
template <bool HALF, int R, int C>
INLINE void weigh_rows(BackTile<HALF>& t, int row, int first, int r) {
  if (!HALF) {
    UNROLL for (int i = 0; i < C * N; i++) {
      vf p = exp2_only<HALF>((uint32_t)(t.bits[r][i / N] >> (i % N * W)), t.x + r * BLOCK + i * W);
      store(t.x + r * BLOCK + i * W, p);
      store(t.p + (row + r) * BLOCK + first * UNIT + i * W, p);
    }
    return;
  }
#if HEADWAY_LEVEL >= 3
  UNROLL for (int i = 0; i < C; i++) {
    vf a = exp2_only<HALF>(t.bits[r][i], t.x + r * BLOCK + i * W), b = {};
    store(t.x + r * BLOCK + i * W, a);
    if (R > 1) {
      b = exp2_only<HALF>(t.bits[r + 1][i], t.x + (r + 1) * BLOCK + i * W);
      store(t.x + (r + 1) * BLOCK + i * W, b);
    }
    _mm512_store_si512(t.p + (row + r) / 2 * BLOCK + (first + i) * UNIT, pairs_of(a, b));
  }
#endif
}

// Attention dropout: the weights of the values and the gradients of the weights, each times its factor.
template <bool HALF, int R, int C>
INLINE void drop_weights(BackTile<HALF>& t, int row, int first, const Extra* extra, vf (&ds)[R][C * N]) {
  if (!extra->drops()) return;
  alignas(64) float factors[ROWS][BLOCK];
  for (int r = 0; r < R; r++) {
    extra->keep(t.rows[row + r].head, t.rows[row + r].place, first, C, factors[r]);
    UNROLL for (int i = 0; i < C * N; i++) ds[r][i] *= load(&factors[r][i * W]);
    for (int j = 0; j < C * UNIT; j++) {
      float w = t.x[r * BLOCK + j] * factors[r][j];
      if (HALF)
        ((uint16_t*)(t.p + (row + r) / 2 * BLOCK + first * UNIT + j))[r & 1] = to_bf16(w);
      else
        t.p[(row + r) * BLOCK + first * UNIT + j] = w;
    }
  }
}

template <bool HALF, int R, int C, bool MASKED, bool EXTRA>
__attribute__((noinline)) void group(BackTile<HALF>& t, int row, const Block& block, int first,
                                     const uint16_t (*bits)[4], const Extra* extra, float* const* gradients) {
  const Sizes& z = t.z;
  int64_t q_step = whole_units(z.d), g_step = whole_units(z.dv);
  {
    vf s[R][C * N] = {};
    product<HALF, R, C>(s, t.q + row * q_step, q_step, 1, block.k_panels + first * UNIT, BLOCK, z.d);
    if (EXTRA) {
      UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int i = 0; i < C * N; i++) store(t.raw + r * BLOCK + i * W, s[r][i]);
        memcpy(t.x + r * BLOCK, t.raw + r * BLOCK, C * UNIT * 4);
        if (extra->c->score_count) extra->apply(t.rows[row + r].head, t.rows[row + r].place, first, C, t.x + r * BLOCK);
        UNROLL for (int i = 0; i < C * N; i++) s[r][i] = load(t.x + r * BLOCK + i * W);
      }
    }
    vf unit = splat(t.unit);
    UNROLL for (int r = 0; r < R; r++) {
      vf down = splat(t.down[row + r]);
      UNROLL for (int i = 0; i < C * N; i++) store(t.x + r * BLOCK + i * W, s[r][i] * unit + down);
      UNROLL for (int c = 0; c < C; c++) t.bits[r][c] = MASKED ? bits[r][c] : 0xFFFF;
    }
  }
  vf ds[R][C * N] = {};
  const float *g = t.g + row * g_step, *v = block.v_panels + first * UNIT;
  constexpr int AT_ONCE = HALF ? 2 : 1, EACH = 8;
  int r = 0, done = 0;
  for (; r < R && done + EACH <= z.dv; r += AT_ONCE, done += EACH, g += EACH, v += EACH * BLOCK) {
    product<HALF, R, C>(ds, g, g_step, 1, v, BLOCK, EACH);
    weigh_rows<HALF, R, C>(t, row, first, r);
  }
  product<HALF, R, C>(ds, g, g_step, 1, v, BLOCK, z.dv - done);
  for (; r < R; r += AT_ONCE) weigh_rows<HALF, R, C>(t, row, first, r);

  if (EXTRA) drop_weights<HALF, R, C>(t, row, first, extra, ds);
#define SEEN(r, i, x) (MASKED ? only((uint32_t)(bits[r][(i) / N] >> ((i) % N * W)), x) : x)
  UNROLL for (int r = 0; r < R; r++) {
    vf delta = splat(t.delta[row + r]);
    UNROLL for (int i = 0; i < C * N; i++)
      ds[r][i] = SEEN(r, i, load(t.x + r * BLOCK + i * W) * (ds[r][i] - delta));
  }
#undef SEEN
  if (EXTRA && extra->c->score_count)
    for (int r = 0; r < R; r++) {
      UNROLL for (int i = 0; i < C * N; i++) store(t.x + r * BLOCK + i * W, ds[r][i]);
      extra->pull_back(t.rows[row + r].head, t.rows[row + r].place, first, C, t.raw + r * BLOCK, t.x + r * BLOCK,
                       gradients);
      UNROLL for (int i = 0; i < C * N; i++) ds[r][i] = load(t.x + r * BLOCK + i * W);
    }
  const float* a = t.ds + row * BLOCK + first * UNIT;
#if HEADWAY_LEVEL >= 3
  if (HALF) {
    a = t.of_row;
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int i = 0; i < C; i += 2)
        _mm512_store_si512(t.of_row + r * BLOCK / 2 + i * UNIT / 2,
                           (__m512i)_mm512_cvtne2ps_pbh(i + 1 < C ? (__m512)ds[r][i + 1] : (__m512)vf{}, (__m512)ds[r][i]));
    UNROLL for (int r = 0; r < R; r += 2)
      UNROLL for (int i = 0; i < C; i++)
        _mm512_store_si512(t.ds + (row + r) / 2 * BLOCK + (first + i) * UNIT,
                           pairs_of(ds[r][i], r + 1 < R ? ds[r + 1][i] : vf{}));
  }
#endif
  if (!HALF)
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int i = 0; i < C * N; i++) store(t.ds + (row + r) * BLOCK + first * UNIT + i * W, ds[r][i]);
  float* dq = t.dq + (int64_t)row * z.wide_d;
  const float* k = block.k_rows + (int64_t)first * z.steps * z.wide_d;
  if (MASKED && __builtin_expect(!block.k_finite, 0))
    seen_only<HALF>(dq, z.wide_d, a, HALF ? BLOCK / 2 : BLOCK, R, C, bits, k, z.wide_d);
  else
    add_rows<HALF, R>(dq, z.wide_d, a, HALF ? BLOCK / 2 : BLOCK, 1, k, z.wide_d, C * z.steps);
}

// out [keys][wide] += A^T [keys][rows] B [rows][wide] where a row of B may hold NaN: weights of 0 touch nothing.
template <bool HALF>
__attribute__((noinline, cold)) void add_transposed_careful(float* out, const float* a, const float* b, int wide,
                                                            int keys, int rows) {
  for (int r = 0; r < rows; r++)
    for (int k = 0; k < keys; k++) {
      float w = HALF ? from_bf16(((const uint16_t*)(a + r / 2 * BLOCK + k))[r & 1]) : a[r * BLOCK + k];
      if (w == 0) continue;
      for (int i = 0; i < wide; i++)
        out[k * wide + i] +=
            w * (HALF ? from_bf16(((const uint16_t*)(b + r / 2 * wide + i))[r & 1]) : b[r * wide + i]);
    }
}

// The same by products: 6 keys at a time.
template <bool HALF>
__attribute__((noinline)) void add_transposed(float* out, const float* a, const float* b, int wide, int keys,
                                              int steps) {
  int k = 0;
  if (ROWS == 6)
    for (; k + 6 <= keys; k += 6) add_rows<HALF, ROWS>(out + k * wide, wide, a + k, 1, BLOCK, b, wide, steps);
  if (ROWS >= 4)
    for (; k + 4 <= keys; k += 4)
      add_rows<HALF, ROWS >= 4 ? 4 : 1>(out + k * wide, wide, a + k, 1, BLOCK, b, wide, steps);
  for (; k + 2 <= keys; k += 2) add_rows<HALF, 2>(out + k * wide, wide, a + k, 1, BLOCK, b, wide, steps);
}

// dV and dK of the block's keys from all rows of the tile; panels that the same rows have touched together.
template <bool HALF>
INLINE void keys_of(BackTile<HALF>& t, float* dk, float* dv) {
  const int by = HALF ? 2 : 1;
  for (int p = 0; p < 4;) {
    int end = p + 1;
    while (end < 4 && t.low[end] == t.low[p] && t.high[end] == t.high[p]) end++;
    int low = t.low[p] / by, steps = (t.high[p] + by - 1) / by - low, keys = (end - p) * UNIT, key = p * UNIT;
    if (t.high[p] > t.low[p]) {
      const float *g = t.g_rows + (int64_t)low * t.z.wide_dv, *q = t.q_rows + (int64_t)low * t.z.wide_d;
      const float *w = t.p + low * BLOCK + key, *ds = t.ds + low * BLOCK + key;
      if (__builtin_expect(t.g_finite, 1))
        add_transposed<HALF>(dv + key * t.z.wide_dv, w, g, t.z.wide_dv, keys, steps);
      else
        add_transposed_careful<HALF>(dv + key * t.z.wide_dv, w, g, t.z.wide_dv, keys, steps * by);
      if (__builtin_expect(t.q_finite, 1))
        add_transposed<HALF>(dk + key * t.z.wide_d, ds, q, t.z.wide_d, keys, steps);
      else
        add_transposed_careful<HALF>(dk + key * t.z.wide_d, ds, q, t.z.wide_d, keys, steps * by);
    }
    p = end;
  }
}

template <bool HALF, int R, bool MASKED, bool EXTRA>
INLINE void panels_of(BackTile<HALF>& t, int row, const Block& block, int first, int count, const uint16_t (*bits)[4],
                      const Extra* extra, float* const* gradients) {
  for (int p = first; p < first + count; p++) {
    if (t.low[p] > row) t.low[p] = row;
    if (t.high[p] < row + R) t.high[p] = row + R;
  }
  if (WIDE == 4) {
    switch (count) {
      case 4: return group<HALF, R, WIDE, MASKED, EXTRA>(t, row, block, first, bits, extra, gradients);
      case 3: return group<HALF, R, WIDE == 4 ? 3 : 1, MASKED, EXTRA>(t, row, block, first, bits, extra, gradients);
      case 2: return group<HALF, R, WIDE == 4 ? 2 : 1, MASKED, EXTRA>(t, row, block, first, bits, extra, gradients);
      case 1: return group<HALF, R, 1, MASKED, EXTRA>(t, row, block, first, bits, extra, gradients);
    }
    return;
  }
  for (int c = 0; c < count; c++) {
    uint16_t one[ROWS][4];
    if (MASKED)
      for (int r = 0; r < R; r++) one[r][0] = bits[r][c];
    group<HALF, R, 1, MASKED, EXTRA>(t, row, block, first + c, one, extra, gradients);
  }
}

template <bool HALF, int R, bool EXTRA>
INLINE void rows_of(BackTile<HALF>& t, int row, const Block& block, const uint64_t* seen, const Extra* extra,
                    float* const* gradients) {
  t.ahead.some();
  if (!seen) return panels_of<HALF, R, false, EXTRA>(t, row, block, 0, 4, nullptr, extra, gradients);
  uint16_t bits[ROWS][4];
  Span span = span_of(seen + row, R, bits);
  if (span.count == 0) return;
  if (span.all) return panels_of<HALF, R, false, EXTRA>(t, row, block, 0, 4, nullptr, extra, gradients);
  panels_of<HALF, R, true, EXTRA>(t, row, block, span.first, span.count, bits, extra, gradients);
}

// One block: seen [row] holds the keys that each row sees, null for all of them.
template <bool HALF, bool EXTRA>
INLINE void block_of(BackTile<HALF>& t, const Block& block, const uint64_t* seen, const Extra* extra,
                     float* const* gradients, float* dk, float* dv) {
  for (int p = 0; p < 4; p++) t.low[p] = TILE, t.high[p] = 0;
  if (seen || t.count % 2) {
    size_t size = (size_t)(HALF ? (t.count + 1) / 2 : t.count) * BLOCK * 4;
    memset(t.p, 0, size);
    memset(t.ds, 0, size);
  }
  int row = 0;
  if (ROWS == 6)
    for (; row + 6 <= t.count; row += 6) rows_of<HALF, ROWS, EXTRA>(t, row, block, seen, extra, gradients);
  if (ROWS >= 4)
    for (; row + 4 <= t.count; row += 4) rows_of<HALF, ROWS >= 4 ? 4 : 1, EXTRA>(t, row, block, seen, extra, gradients);
  for (; row + 2 <= t.count; row += 2) rows_of<HALF, 2, EXTRA>(t, row, block, seen, extra, gradients);
  for (; row < t.count; row++) rows_of<HALF, 1, EXTRA>(t, row, block, seen, extra, gradients);
  keys_of(t, dk, dv);
}

}  // namespace
