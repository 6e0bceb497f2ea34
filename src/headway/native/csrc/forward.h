// A tile of queries against its blocks of keys: scores, online softmax, values.
//
// The exponentials of one group of rows are computed between the products of the next one, so that the units that
// multiply never wait for them: `advance` is scores(group n) with exp2(group n - 1), then values(group n - 1).
#pragma once
#include "blocks.h"
#include "product.h"
#include "score.h"

namespace {

constexpr float STALE = 8.0f;  // the maximum is renewed when a score exceeds it by 2^8

// Scores of a group of rows that wait to become weights.
struct Pending {
  int rows = 0, row;       // rows 0: none
  int first, panels;       // of the block
  const float* v_rows;
  bool careful;  // some value may be NaN, and some key is masked
};

template <bool HALF>
struct Tile {
  Sizes z;
  int count;
  float unit;  // base-2 exponent per raw score
  Pending wait;
  Ahead ahead;
  Row rows[TILE];
  float top[TILE], limit[TILE], down[TILE];
  uint16_t bits[ROWS][4];                    // of the pending scores
  alignas(64) float sum[TILE][W], rounded[TILE][W];
  alignas(64) float s[ROWS * BLOCK];         // pending exponents [row][64]
  alignas(64) float p[ROWS * BLOCK];         // weights [row][64], as words
  float *q, *out;  // [rows][words], [rows][columns of values]

  void reset(int rows_now) {
    count = rows_now;
    wait.rows = 0;
    for (int r = 0; r < count; r++) top[r] = limit[r] = -INFINITY, down[r] = INFINITY;
    memset(sum, 0, sizeof sum);
    memset(rounded, 0, sizeof rounded);
    memset(out, 0, (size_t)count * z.wide_dv * 4);
  }
};

// Weights of row r of the pending scores: 2^s where the bit is set, else 0; sums on the way.
template <bool HALF>
INLINE void weigh(Tile<HALF>& t, int r) {
  constexpr int C = WIDE;
  int row = t.wait.row + r;
  vf p[C * N];
  exp2_only<HALF, C>(p, t.bits[r], t.s + r * BLOCK);
#if HEADWAY_LEVEL >= 3
  if (HALF) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
    __m512bh low = _mm512_cvtne2ps_pbh((__m512)p[1], (__m512)p[0]);
    __m512bh high = _mm512_cvtne2ps_pbh((__m512)p[3], (__m512)p[2]);
    store(t.sum[row], load(t.sum[row]) + ((p[0] + p[1]) + (p[2] + p[3])));
    _mm512_store_si512((uint16_t*)t.p + r * BLOCK, (__m512i)low);
    _mm512_store_si512((uint16_t*)t.p + r * BLOCK + 32, (__m512i)high);
    __m512 whole = _mm512_dpbf16_ps((__m512)load(t.rounded[row]), low, ones);
    store(t.rounded[row], (vf)_mm512_dpbf16_ps(whole, high, ones));
    return;
  }
#endif
  vf total = p[0];
  UNROLL for (int i = 1; i < C * N; i++) total += p[i];
  store(t.sum[row], load(t.sum[row]) + total);
  UNROLL for (int i = 0; i < C * N; i++) store(t.p + r * BLOCK + i * W, p[i]);
}

// The pending weights times their values.
template <bool HALF, int R>
__attribute__((noinline)) void settle_rows(Tile<HALF>& t) {
  const Pending& w = t.wait;
  int wide = t.z.wide_dv;
  float* out = t.out + (int64_t)w.row * wide;
  const float* v = w.v_rows + (int64_t)w.first * t.z.steps * wide;
  if (__builtin_expect(w.careful, 0))
    seen_only<HALF>(out, wide, t.p, HALF ? BLOCK / 2 : BLOCK, R, w.panels, t.bits, v, wide);
  else
    add_rows<HALF, R>(out, wide, t.p, HALF ? BLOCK / 2 : BLOCK, 1, v, wide, w.panels * t.z.steps);
}

template <bool HALF>
INLINE void settle(Tile<HALF>& t) {
  switch (t.wait.rows) {
    case 6: settle_rows<HALF, ROWS>(t); break;
    case 4: settle_rows<HALF, ROWS >= 4 ? 4 : 1>(t); break;
    case 2: settle_rows<HALF, 2>(t); break;
    case 1: settle_rows<HALF, 1>(t); break;
  }
  t.wait.rows = 0;
}

// Everything that waits, without anything to hide it behind.
template <bool HALF>
__attribute__((noinline)) void finish(Tile<HALF>& t, const Extra* extra) {
  for (int r = 0; r < t.wait.rows; r++) weigh(t, r);
  if (extra && extra->drops())
    for (int r = 0; r < t.wait.rows; r++) {
      const Row& row = t.rows[t.wait.row + r];
      float factors[BLOCK];
      extra->keep(row.head, row.place, t.wait.first, t.wait.panels, factors);
      for (int i = 0; i < t.wait.panels * UNIT; i++) {
        if (HALF) {
          uint16_t* p = (uint16_t*)t.p + r * BLOCK + i;
          *p = to_bf16(from_bf16(*p) * factors[i]);
        } else {
          t.p[r * BLOCK + i] *= factors[i];
        }
      }
    }
  settle(t);
}

// Renews the maximum of rows whose scores have left the range of the old one; what waits is settled before, since
// it may be of the same rows.
template <bool HALF>
__attribute__((noinline, cold)) void raise(Tile<HALF>& t, int row, int rows, const vf* most) {
  settle(t);
  for (int r = 0; r < rows; r++) {
    int at = row + r;
    float now = max_of(most[r]);
    if (!(now > t.limit[at])) continue;
    bool empty = t.top[at] == -INFINITY;
    float shrink = empty ? 0.0f : exp2f((t.top[at] - now) * t.unit);
    t.top[at] = now;
    t.down[at] = -now * t.unit;
    t.limit[at] = t.unit > 0 ? now + STALE / t.unit : INFINITY;
    if (empty) continue;
    float* out = t.out + (int64_t)at * t.z.wide_dv;
    for (int i = 0; i < t.z.wide_dv; i += W) store(out + i, load(out + i) * shrink);
    store(t.sum[at], load(t.sum[at]) * shrink);
    store(t.rounded[at], load(t.rounded[at]) * shrink);
  }
}

// Scores of R rows from `row` against C panels of a block, which then wait; what waited before is settled.
// `bits` [R][C]: the keys that each row sees (MASKED).
template <bool HALF, int R, int C, bool MASKED, bool EXTRA>
__attribute__((noinline)) void advance(Tile<HALF>& t, int row, const Block& block, int first,
                                       const uint16_t (*bits)[4], const Extra* extra) {
  const Sizes& z = t.z;
  vf acc[R][C * N] = {};
  const float* k = block.k_panels + first * UNIT;
  int64_t q_step = whole_units(z.d);
  const float* q = t.q + row * q_step;
  constexpr int EACH = HALF ? 4 : 8;  // steps of the product between two rows of exponentials
  int waits = 0, done = 0;
  for (; waits < t.wait.rows && done + EACH <= z.d; waits++, done += EACH, q += EACH, k += EACH * BLOCK) {
    product<HALF, R, C>(acc, q, q_step, 1, k, BLOCK, EACH);
    weigh(t, waits);
  }
  product<HALF, R, C>(acc, q, q_step, 1, k, BLOCK, z.d - done);
  for (; waits < t.wait.rows; waits++) weigh(t, waits);

  if (EXTRA && extra->c->score_count) {
    alignas(64) float s[R][C * UNIT];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < C * N; i++) store(&s[r][i * W], acc[r][i]);
    for (int r = 0; r < R; r++) extra->apply(t.rows[row + r].head, t.rows[row + r].place, first, C, s[r]);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < C * N; i++) acc[r][i] = load(&s[r][i * W]);
  }
#define SEEN(r, i, x) (MASKED ? where((uint32_t)(bits[r][(i) / N] >> ((i) % N * W)), x, splat(-INFINITY)) : x)
  uint32_t over = 0;
  vf most[R];
  UNROLL for (int r = 0; r < R; r++) {
    most[r] = SEEN(r, 0, acc[r][0]);
    UNROLL for (int i = 1; i < C * N; i++) most[r] = vmax(most[r], SEEN(r, i, acc[r][i]));
    over |= greater(most[r], splat(t.limit[row + r]));
  }
#undef SEEN
  if (__builtin_expect(over != 0, 0)) raise(t, row, R, most);
  settle(t);
  vf unit = splat(t.unit);
  UNROLL for (int r = 0; r < R; r++) {
    vf down = splat(t.down[row + r]);
    UNROLL for (int i = 0; i < C * N; i++) store(t.s + r * BLOCK + i * W, acc[r][i] * unit + down);
    UNROLL for (int c = 0; c < 4; c++) t.bits[r][c] = c >= C ? 0 : MASKED ? bits[r][c] : 0xFFFF;
  }
  t.wait = {R, row, first, C, block.v_rows, MASKED && !block.v_finite};
}

template <bool HALF, int R, bool MASKED, bool EXTRA>
INLINE void panels_of(Tile<HALF>& t, int row, const Block& block, int first, int count,
                      const uint16_t (*bits)[4], const Extra* extra) {
  if (WIDE == 4) {
    if (EXTRA) finish(t, extra);
    switch (count) {
      case 4: return advance<HALF, R, WIDE, MASKED, EXTRA>(t, row, block, first, bits, extra);
      case 3: return advance<HALF, R, WIDE == 4 ? 3 : 1, MASKED, EXTRA>(t, row, block, first, bits, extra);
      case 2: return advance<HALF, R, WIDE == 4 ? 2 : 1, MASKED, EXTRA>(t, row, block, first, bits, extra);
      case 1: return advance<HALF, R, 1, MASKED, EXTRA>(t, row, block, first, bits, extra);
    }
    return;
  }
  for (int c = 0; c < count; c++) {
    uint16_t one[ROWS][4];
    if (MASKED)
      for (int r = 0; r < R; r++) one[r][0] = bits[r][c];
    advance<HALF, R, 1, MASKED, EXTRA>(t, row, block, first + c, one, extra);
    if (EXTRA) finish(t, extra);
  }
}

// R rows against the panels of a block that some of them sees; seen [query] holds the bits, null for all of them.
template <bool HALF, int R, bool EXTRA>
INLINE void rows_of(Tile<HALF>& t, int row, const Block& block, const uint64_t* seen, const Extra* extra) {
  t.ahead.some();
  if (!seen) return panels_of<HALF, R, false, EXTRA>(t, row, block, 0, 4, nullptr, extra);
  uint64_t of_rows[R];
  for (int r = 0; r < R; r++) of_rows[r] = seen[t.rows[row + r].query];
  uint16_t bits[ROWS][4];
  Span span = span_of(of_rows, R, bits);
  if (span.count == 0) return;
  if (span.all) return panels_of<HALF, R, false, EXTRA>(t, row, block, 0, 4, nullptr, extra);
  panels_of<HALF, R, true, EXTRA>(t, row, block, span.first, span.count, bits, extra);
}

template <bool HALF, bool EXTRA>
INLINE void block_of(Tile<HALF>& t, const Block& block, const uint64_t* seen, const Extra* extra) {
  for (int row = 0, left; (left = t.count - row) > 0;) {
    if (ROWS == 6 && left >= 6 && left != 8) {
      rows_of<HALF, ROWS, EXTRA>(t, row, block, seen, extra), row += ROWS;
    } else if (ROWS >= 4 && left >= 4) {
      rows_of<HALF, ROWS >= 4 ? 4 : 1, EXTRA>(t, row, block, seen, extra), row += 4;
    } else if (left >= 2) {
      rows_of<HALF, 2, EXTRA>(t, row, block, seen, extra), row += 2;
    } else {
      rows_of<HALF, 1, EXTRA>(t, row, block, seen, extra), row += 1;
    }
  }
}

}  // namespace
