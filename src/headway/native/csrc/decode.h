// Few queries against many keys, as in decoding: blocks that all queries see whole are read row by row in place, and not
// packed, because the speed of memory decides.
#pragma once
#include "forward.h"

namespace {

// Returns a vector whose lane i is the sum of the lanes of x[i].
INLINE vf sums_of(const vf (&x)[16]) {
  vf a[8], b[4], c[2];
  UNROLL for (int i = 0; i < 8; i++) a[i] = low_lanes(x[2 * i], x[2 * i + 1]) + high_lanes(x[2 * i], x[2 * i + 1]);
  UNROLL for (int i = 0; i < 4; i++) b[i] = low_pairs(a[2 * i], a[2 * i + 1]) + high_pairs(a[2 * i], a[2 * i + 1]);
  UNROLL for (int i = 0; i < 2; i++) c[i] = even_fours(b[2 * i], b[2 * i + 1]) + odd_fours(b[2 * i], b[2 * i + 1]);
  return even_fours(c[0], c[1]) + odd_fours(c[0], c[1]);
}

// Returns whether the blocks of this call can be read in place: few rows, in whole vectors, without steps on scores.
template <bool HALF>
INLINE bool is_direct(const headway_call& c, int64_t rows) {
  constexpr int64_t WHOLE = HALF ? 32 : 16;
  return c.plan.tiles == 1 && rows <= 8 && !c.score_count && !(c.dropout > 0) && c.dim % WHOLE == 0 &&
         c.dim_v % WHOLE == 0;
}

// The addresses of the 64 keys and 64 values of a block.
struct Places {
  const float *k[BLOCK], *v[BLOCK];
};

// R rows from `row` on against a block. A vector of scores holds R rows by KEYS = 16 / R keys: for R = 4, lanes 0-3 are keys
// 0-3 of the first row, lanes 4-7 the same keys of the second. Sums of values have their columns in the order in which
// low_halves and high_halves interleave pairs of rows; `arrange` restores it. FIRST: what follows is prefetched into L1.
template <bool HALF, int R, bool FIRST>
struct Direct {
  static constexpr int KEYS = 16 / R, GROUPS = BLOCK / KEYS, WORDS = HALF ? 8 : 16;

  static __attribute__((noinline)) void block(Tile<HALF>& t, int row, const Places& at) {
    scores(t, row, at);
    weights(t, row);
    values(t, row, at);
  }

  // Returns a vector whose lanes of row r hold of_rows[r].
  INLINE vf by_row(const float* of_rows) {
    vf x;
    UNROLL for (int i = 0; i < 16; i++) x[i] = of_rows[i / KEYS];
    return x;
  }

  // Computes the exponents into t.s, [group][row][key].
  INLINE void scores(Tile<HALF>& t, int row, const Places& at) {
    int64_t step = whole_units(t.z.d);
    const float* q = t.q + row * step;
    vf limit = by_row(t.limit + row);
    uint32_t over = 0;
    for (int g = 0; g < GROUPS; g++) {
      const float* const* k = at.k + g * KEYS;
      vf acc[16] = {};
      UNROLL for (int j = 0; j < KEYS; j += 2)
        for (int i = 0; i < t.z.d; i += W) {
          vf x = load(k[j] + i), y = load(k[j + 1] + i);
          fetch_onward<FIRST>(k[j] + i), fetch_onward<FIRST>(k[j + 1] + i);
          UNROLL for (int r = 0; r < R; r++) {
            vf z = load(q + r * step + i);
            acc[r * KEYS + j] = multiply_add<HALF>(acc[r * KEYS + j], x, z);
            acc[r * KEYS + j + 1] = multiply_add<HALF>(acc[r * KEYS + j + 1], y, z);
          }
        }
      vf s = sums_of(acc);
      over |= greater(s, limit);
      store(t.s + g * 16, s);
    }
    if (__builtin_expect(over != 0, 0)) raise(t, row);
    vf unit = splat(t.unit), down = by_row(t.down + row);
    for (int g = 0; g < GROUPS; g++) store(t.s + g * 16, load(t.s + g * 16) * unit + down);
  }

  // Raises the reference maximum of the rows and rescales their sums.
  static __attribute__((noinline, cold)) void raise(Tile<HALF>& t, int row) {
    float shrink[R];
    for (int r = 0; r < R; r++) {
      float now = -INFINITY;
      for (int g = 0; g < GROUPS; g++)
        for (int j = 0; j < KEYS; j++) now = t.s[g * 16 + r * KEYS + j] > now ? t.s[g * 16 + r * KEYS + j] : now;
      shrink[r] = exp2f(t.raise(row + r, now));
    }
    for (int i = 0; i < 16; i++) {
      t.sum[row][i] *= shrink[i / KEYS];
      if (HALF) t.rounded[row][i] *= shrink[i % 8 / (KEYS / 2)];
    }
  }

  // Computes the weights into t.p, [group][row][word]. Until `arrange`, sum[row] and rounded[row] hold the sums of all R rows.
  INLINE void weights(Tile<HALF>& t, int row) {
    constexpr int EACH = AT_ONCE<HALF>;
    static const uint16_t all[4] = {0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF};
    vf total = load(t.sum[row]), rounded = load(t.rounded[row]);
    for (int g = 0; g < GROUPS; g += EACH) {
      vf p[EACH];
      exp2_only<HALF>(p, all, t.s + g * 16);
      UNROLL for (int i = 0; i < EACH; i++) total += p[i];
      if constexpr (HALF) {
        const vf pairs = joined(p[0], p[1]);
        store(t.p + g * 8, pairs);
        rounded = add_pairs(rounded, pairs, (vf)splat_int(0x3F803F80));
        continue;
      }
      UNROLL for (int i = 0; i < EACH; i++) store(t.p + (g + i) * 16, p[i]);
    }
    store(t.sum[row], total);
    store(t.rounded[row], rounded);
  }

  // Adds weights times values, a quarter of the keys at a time: its values stay in the L1 cache while columns are processed.
  INLINE void values(Tile<HALF>& t, int row, const Places& at) {
    constexpr int MOST = R == 8 ? 2 : R == 4 ? 4 : 8, QUARTER = GROUPS / 4;
    for (int g = 0; g < GROUPS; g += QUARTER)
      in_halves<MOST, HALF ? 2 : 1>(t.z.wide_dv / UNIT, [&](auto units, int c) __attribute__((always_inline)) {
        columns<units.value>(t, row, at, g, g + QUARTER, c * UNIT);
      });
  }

  // Columns c .. c + 16 C - 1 of the values, for groups g .. end - 1 of keys.
  template <int C>
  INLINE void columns(Tile<HALF>& t, int row, const Places& at, int g, int end, int c) {
    int64_t wide = t.z.wide_dv;
    float* out = t.out + row * wide + c;
    vf acc[R][C];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < C; i++) acc[r][i] = load(out + r * wide + i * 16);
    for (; g < end; g++) {
      const float* const* v = at.v + g * KEYS;
      const float* p = t.p + g * WORDS;
      UNROLL for (int j = 0; j < KEYS; j += HALF ? 2 : 1) {
        vf y[C];
        if constexpr (HALF) {
          UNROLL for (int i = 0; i < C; i += 2) {
            const vf a = load(v[j] + c / 2 + i * 8), b = load(v[j + 1] + c / 2 + i * 8);
            fetch_onward<FIRST>(v[j] + c / 2 + i * 8), fetch_onward<FIRST>(v[j + 1] + c / 2 + i * 8);
            y[i] = low_halves(a, b), y[i + 1] = high_halves(a, b);
          }
        } else {
          UNROLL for (int i = 0; i < C; i++) {
            fetch_onward<FIRST>(v[j] + c + i * 16);
            y[i] = load(v[j] + c + i * 16);
          }
        }
        UNROLL for (int r = 0; r < R; r++) {
          vf x = splat(p[HALF ? r * (KEYS / 2) + j / 2 : r * KEYS + j]);
          UNROLL for (int i = 0; i < C; i++) acc[r][i] = multiply_add<HALF>(acc[r][i], x, y[i]);
        }
      }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < C; i++) store(out + r * wide + i * 16, acc[r][i]);
  }

  // Separates the sums of the rows and restores the order of the columns, as the rest of the tile expects.
  static void arrange(Tile<HALF>& t, int row) {
    float sum[16], rounded[16];
    memcpy(sum, t.sum[row], sizeof sum);
    memcpy(rounded, t.rounded[row], sizeof rounded);
    for (int r = 0; r < R; r++) {
      for (int i = 0; i < 16; i++) {
        t.sum[row + r][i] = i / KEYS == r ? sum[i] : 0;
        t.rounded[row + r][i] = HALF && i % 8 / (HALF ? KEYS / 2 : 1) == r ? rounded[i] : 0;
      }
      if (!HALF) continue;
      float* out = t.out + (int64_t)(row + r) * t.z.wide_dv;
      for (int c = 0; c < t.z.wide_dv; c += 32) {
        float mixed[32];
        memcpy(mixed, out + c, sizeof mixed);
        for (int i = 0; i < 32; i++) out[c + i] = mixed[i % 8 / 4 * 16 + i / 8 * 4 + i % 4];
      }
    }
  }
};

// Returns the row at `place` in place, or, if it is not in the type of the products, as words at `to`.
template <bool HALF>
INLINE const float* row_at(const Rows& r, int64_t place, float* to) {
  const char* at = r.at(place);
  if (r.type == (HALF ? HEADWAY_BFLOAT16 : HEADWAY_FLOAT32)) return (const float*)at;
  fetch_onward(at, r.width * bytes_of(r.type));
  read_words<HALF>(r, place, to);
  return to;
}

// All rows of the tile against a block; `words` has room for a block of keys and of values.
template <bool HALF>
INLINE void direct_block(Tile<HALF>& t, const Rows& k, const Rows& v, int64_t begin, float* words) {
  Places at;
  for (int i = 0; i < BLOCK; i++) {
    at.k[i] = row_at<HALF>(k, begin + i, words + i * t.z.d);
    at.v[i] = row_at<HALF>(v, begin + i, words + BLOCK * t.z.d + i * t.z.dv);
  }
  in_halves<8>(t.count, [&](auto rows, int row) __attribute__((always_inline)) {
    constexpr int R = rows.value;
    // If more rows read the block again, it must stay in the L1 cache in between: no prefetches into L1.
    if (R < 8 && FIRST_LEVEL && t.count == R)
      Direct<HALF, R, R < 8>::block(t, row, at);
    else
      Direct<HALF, R, false>::block(t, row, at);
  });
}

template <bool HALF>
INLINE void arrange(Tile<HALF>& t) {
  for (int r = 0; r < t.count; r++) t.sees[r] = true;
  in_halves<8>(t.count, [&](auto rows, int row) __attribute__((always_inline)) {
    Direct<HALF, rows.value, false>::arrange(t, row);
  });
}

}  // namespace
