// A tile of queries against blocks of keys: scores, online softmax, and the weighted sum of values.
//
// The exponentials of one group of rows are computed between the products of the next group, so that the multiply units
// never wait for them: `advance` computes scores(group n) interleaved with exp2(group n - 1), then values(group n - 1) are
// added. Levels with few registers (WIDE 1) have no room for both: they finish group n - 1 first, and take one panel at a time.
//
// Blocks that a group sees whole are processed at once. Of partly masked blocks it takes the panels that some of its rows
// sees, and collects them, from any blocks, until there are four: narrow products would leave the multiply units idle.
#pragma once
#include "groups.h"
#include "microkernel.h"
#include "score.h"
#include "tile.h"

namespace {

// Computes the weights 2^s of row r of the pending scores for AT_ONCE panels from c on, 0 for masked keys. Returns their
// sum per lane.
template <bool HALF>
INLINE vf weigh(Tile<HALF>& t, int r, int c) {
  vf p[AT_ONCE<HALF> * N];
  if (WIDE < 4)
    UNROLL for (int i = 0; i < N; i++) p[i] = exp2_of_each(load(t.s + r * BLOCK + c * UNIT + i * W));
  else
    exp2_only<HALF>(p, t.pending.of.bits[r] + c, t.s + r * BLOCK + c * UNIT);
  vf total = p[0];
  UNROLL for (int i = 1; i < AT_ONCE<HALF> * N; i++) total += p[i];
  if constexpr (HALF) {
    float* rounded = t.rounded[t.pending.row + r];
    vf whole = load(rounded);
    UNROLL for (int i = 0; i < AT_ONCE<HALF> * N; i += 2) {
      const vf pairs = joined(p[i], p[i + 1]);
      store((float*)((uint16_t*)t.p + r * BLOCK + c * UNIT + i * W), pairs);
      whole = add_pairs(whole, pairs, (vf)splat_int(0x3F803F80));
    }
    store(rounded, whole);
    return total;
  }
  UNROLL for (int i = 0; i < AT_ONCE<HALF> * N; i++) store(t.p + r * BLOCK + c * UNIT + i * W, p[i]);
  return total;
}

// Adds the pending weights times their values to the output.
template <bool HALF, int R>
__attribute__((noinline)) void settle_rows(Tile<HALF>& t) {
  const Panels& of = t.pending.of;
  int wide = t.z.wide_dv;
  float* out = t.out + (int64_t)t.pending.row * wide;
  if (__builtin_expect(of.careful, 0))
    seen_only<HALF>(out, t.p, R, of.count, of.bits, of.v, wide);
  else
    add_rows<HALF, R>(out, t.p, HALF ? BLOCK / 2 : BLOCK, 1, of.v, wide, of.whole ? 1 : of.count,
                      of.whole ? 4 * t.z.steps : t.z.steps);
}

template <bool HALF>
INLINE void settle(Tile<HALF>& t) {
  with_rows(t.pending.rows, [&](auto rows) __attribute__((always_inline)) {
    settle_rows<HALF, rows.value>(t);
  });
  t.pending.rows = 0;
}

// Finishes the pending scores: weights, dropout, values. Nothing overlaps with the exponentials here.
template <bool HALF>
__attribute__((noinline)) void finish(Tile<HALF>& t, const Extra* extra) {
  const Panels& of = t.pending.of;
  for (int r = 0; r < t.pending.rows; r++) {
    vf total = {};
    for (int c = 0; c < of.count; c += AT_ONCE<HALF>) total += weigh(t, r, c);
    add_to(t.sum[t.pending.row + r], total);
  }
  if (extra && extra->drops())
    for (int r = 0; r < t.pending.rows; r++) {
      const Row& row = t.rows[t.pending.row + r];
      float factors[BLOCK];
      extra->keep(row.head, row.place, of.first, of.count, factors);
      for (int i = 0; i < of.count * UNIT; i++) {
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

// Raises the reference maximum of rows whose raw scores, t.s [row][begin .. end - 1], exceed the range of the old one; the
// scores before `begin` are exponents already. Pending values are added first, since they may belong to the same rows.
template <bool HALF>
__attribute__((noinline, cold)) void raise(Tile<HALF>& t, int row, int rows, int begin, int end,
                                           const uint16_t (*bits)[4]) {
  settle(t);
  for (int r = 0; r < rows; r++) {
    int at = row + r;
    float now = -INFINITY, *s = t.s + r * BLOCK;
    for (int i = begin; i < end; i++)
      if ((bits[r][i / UNIT] >> i % UNIT & 1) && s[i] > now) now = s[i];
    float less = t.raise(at, now), shrink = exp2f(less);
    if (less == 0) continue;
    for (int i = 0; i < begin; i++) s[i] += less;
    store(t.sum[at], load(t.sum[at]) * shrink);
    store(t.rounded[at], load(t.rounded[at]) * shrink);
  }
}

// Computes the exponents of rows row .. row + R - 1 for C panels, the first of which is panel `at`.
template <bool HALF, int R, int C, bool MASKED, bool EXTRA>
__attribute__((noinline)) void advance(Tile<HALF>& t, int row, const Panels& of, int at, const Extra* extra) {
  const Sizes& z = t.z;
  vf acc[R][C * N] = {};
  const float* k[C];
  UNROLL for (int i = 0; i < C; i++) k[i] = MASKED ? of.k[at + i] : of.k[0] + (at + i) * panel_size(z.d);
  int64_t q_step = whole_units(z.d);
  const float* q = t.q + row * q_step;
  constexpr int EACH = HALF ? 2 : 8;  // steps of the product between two pieces of exponentials
  int before = t.pending.of.count, pieces = t.pending.rows * ((before + AT_ONCE<HALF> - 1) / AT_ONCE<HALF>), done = 0;
  int r = 0, c = 0;
#define WEIGH_NEXT (add_to(t.sum[t.pending.row + r], weigh(t, r, c)), c += AT_ONCE<HALF>, c < before || (c = 0, r++), pieces--)
  for (; WIDE == 4 && pieces && done + EACH <= z.d; done += EACH, q += EACH) {
    product<HALF, R, C>(acc, q, q_step, 1, k, LINE, EACH);
    UNROLL for (int i = 0; i < C; i++) k[i] += EACH * LINE;
    WEIGH_NEXT;
  }
  product<HALF, R, C>(acc, q, q_step, 1, k, LINE, z.d - done);
  while (WIDE == 4 && pieces) WEIGH_NEXT;
#undef WEIGH_NEXT

  if (EXTRA && extra->c->score_count) {
    alignas(64) float s[R][C * UNIT];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < C * N; i++) store(&s[r][i * W], acc[r][i]);
    for (int r = 0; r < R; r++) extra->apply(t.rows[row + r].head, t.rows[row + r].place, of.first + at, C, s[r]);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < C * N; i++) acc[r][i] = load(&s[r][i * W]);
  }
  float* s = t.s + at * UNIT;
  vf unit = splat(t.unit), stale = splat(STALE);
  auto exponents = [&]() __attribute__((always_inline)) {  // returns whether some are out of range
    vf most = splat(-INFINITY);
    UNROLL for (int r = 0; r < R; r++) {
      vf down = splat(t.down[row + r]);
      UNROLL for (int i = 0; i < C * N; i++) {
        vf x = acc[r][i] * unit + down;
        if (MASKED) x = where((uint32_t)(of.bits[r][at + i / N] >> (i % N * W)), x, splat(-INFINITY));
        store(s + r * BLOCK + i * W, x);
        most = vmax(x, most);  // in this order: if x is NaN, vmax keeps `most`, so that other rows are still checked
      }
    }
    return greater(most, stale) != 0;
  };
  if (exponents()) {
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < C * N; i++) store(s + r * BLOCK + i * W, acc[r][i]);
    raise(t, row, R, at * UNIT, (at + C) * UNIT, of.bits);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < C * N; i++) acc[r][i] = load(s + r * BLOCK + i * W);
    exponents();
  }
}

// Scores of R rows for their next panels, which become the pending ones; what was pending is finished.
template <bool HALF, int R, bool MASKED, bool EXTRA>
INLINE void panels_of(Tile<HALF>& t, int row, const Panels& of, const Extra* extra) {
  if (EXTRA || WIDE < 4) finish(t, extra);
  if (WIDE < 4)
    for (int i = 0; i < of.count; i++) advance<HALF, R, 1, MASKED, EXTRA>(t, row, of, i, extra);
  else
    with_panels(of.count, [&](auto panels) __attribute__((always_inline)) {
      advance<HALF, R, panels.value, MASKED, EXTRA>(t, row, of, 0, extra);
    });
  settle(t);
  t.pending = {R, row, of};
}

// Takes up to four of the waiting panels of a group.
template <bool HALF, int R>
INLINE void take_waiting(Tile<HALF>& t, int row) {
  Waiting& w = t.waiting[row / 2];
  Panels of;
  of.count = w.count < 4 ? w.count : 4, of.first = 0, of.whole = false, of.careful = w.careful;
  for (int i = 0; i < 4; i++) {
    bool there = i < of.count;
    of.k[i] = w.k[i], of.v[i] = w.v[i];
    for (int r = 0; r < R; r++) of.bits[r][i] = there ? w.bits[i][r] : 0;
  }
  w.count -= of.count;
  for (int i = 0; i < w.count; i++) {
    w.k[i] = w.k[of.count + i], w.v[i] = w.v[of.count + i];
    memcpy(w.bits[i], w.bits[of.count + i], sizeof w.bits[i]);
  }
  panels_of<HALF, R, true, false>(t, row, of, nullptr);
}

// R rows against a block: seen [query] are the bits of the keys that each query sees, null if they see all; `whole` are the
// four panels of the block.
template <bool HALF, int R, bool EXTRA>
INLINE void rows_of(Tile<HALF>& t, int row, const Block& block, const Panels& whole, const uint64_t* seen,
                    const Extra* extra) {
  t.ahead.some();
  uint64_t of_rows[R], some = 0, all = ALL;
  if (seen)
    for (int r = 0; r < R; r++) {
      of_rows[r] = seen[t.rows[row + r].query];
      some |= of_rows[r], all &= of_rows[r];
      t.sees[row + r] |= of_rows[r] != 0;
    }
  else
    for (int r = 0; r < R; r++) t.sees[row + r] = true;
  if (seen && !some) return;
  if (all == ALL) return panels_of<HALF, R, false, EXTRA>(t, row, whole, extra);
  if (!EXTRA) {
    Waiting& w = t.waiting[row / 2];
    if (!w.count) w.careful = false;
    w.careful |= !block.v_finite;
    for (int p = 0; p < 4; p++) {
      if (!(some >> p * UNIT & 0xFFFF)) continue;
      w.k[w.count] = whole.k[p], w.v[w.count] = whole.v[p];
      for (int r = 0; r < R; r++) w.bits[w.count][r] = (uint16_t)(of_rows[r] >> p * UNIT);
      w.count++;
    }
    if (w.count >= 4) take_waiting<HALF, R>(t, row);
    return;
  }
  Panels of;
  Span span = span_of(of_rows, R, of.bits);
  of.count = span.count, of.first = span.first, of.whole = span.count == 4, of.careful = !block.v_finite;
  for (int i = 0; i < of.count; i++) of.k[i] = whole.k[of.first + i], of.v[i] = whole.v[of.first + i];
  panels_of<HALF, R, true, EXTRA>(t, row, of, extra);
}

// All rows of the tile against a block.
template <bool HALF, bool EXTRA>
INLINE void block_of(Tile<HALF>& t, const Block& block, const uint64_t* seen, const Extra* extra) {
  Panels whole;
  whole.count = 4, whole.first = 0, whole.whole = true, whole.careful = false;
  for (int p = 0; p < 4; p++) {
    whole.k[p] = block.k_panels + p * panel_size(t.z.d);
    whole.v[p] = block.v_rows + p * t.z.steps * t.z.wide_dv;
  }
  memset(whole.bits, 0xFF, sizeof whole.bits);
  each_group(t.count, [&](auto rows, int row) __attribute__((always_inline)) {
    rows_of<HALF, rows.value, EXTRA>(t, row, block, whole, seen, extra);
  });
}

// Processes all panels that still wait.
template <bool HALF>
__attribute__((noinline)) void flush(Tile<HALF>& t) {
  each_group(t.count, [&](auto rows, int row) __attribute__((always_inline)) {
    while (t.waiting[row / 2].count) take_waiting<HALF, rows.value>(t, row);
  });
  finish(t, nullptr);
}

}  // namespace
