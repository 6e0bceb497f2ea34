// A tile of queries in the forward: its sums, and what its groups of rows wait for.
#pragma once
#include "blocks.h"

namespace {

// Every row starts with a maximum of 0: any reference within the range of a float is exact. It is raised to the true
// one when a score exceeds it by 2^8; a sum below 2^-60 shows that it was too high: such a row is computed again from
// its true maximum.
constexpr float STALE = 8.0f, LOST = 0x1p-60f;

// What a group of rows sees next: up to four panels of keys, of one block or of several.
struct Panels {
  int count, first;  // first: in the block, where they are of one
  bool whole;        // the four of a block
  bool careful;      // some value may be NaN, and some key is masked
  const float *k[4], *v[4];
  uint16_t bits[ROWS][4];  // the keys that each row sees
};

// Panels of edge blocks that wait until there are four.
struct Waiting {
  int count;
  bool careful;
  const float *k[7], *v[7];
  uint16_t bits[7][ROWS];
};

// Scores of a group of rows that wait to become weights.
struct Pending {
  int rows, row;  // rows 0: none
  Panels of;
};

template <bool HALF>
struct Tile {
  Sizes z;
  int count;
  float unit;  // base-2 exponent per raw score
  Ahead ahead;
  Row rows[TILE];
  float top[TILE], limit[TILE], down[TILE];
  alignas(64) float total[TILE], whole[TILE];  // of sum, and of what weights of values must be divided by
  bool sees[TILE];  // the row has seen some key
  Pending pending;
  Waiting waiting[TILE / 2];                 // of the group that starts with row 2 i
  alignas(64) float sum[TILE][W], rounded[TILE][W];
  alignas(64) float s[8 * BLOCK];            // pending exponents [row][64]; 8 rows where they are read directly
  alignas(64) float p[8 * BLOCK];            // weights [row][64], as words
  float *q, *out;  // [rows][words], [rows][columns of values]

  // exact: every row starts from the maximum of what it sees first.
  void reset(int rows_now, bool exact) {
    count = rows_now;
    pending.rows = 0;
    for (int r = 0; r < count; r++) {
      top[r] = exact ? -INFINITY : 0;
      limit[r] = exact ? -INFINITY : limit_of(0);
      down[r] = exact ? INFINITY : 0;
      sees[r] = false;
    }
    for (Waiting& w : waiting) w.count = 0;
    memset(sum, 0, sizeof *sum * whole_units(count));
    memset(rounded, 0, sizeof *rounded * whole_units(count));
    memset(out, 0, (size_t)count * z.wide_dv * 4);
  }
  // Renews the maximum of row r where `now` has left the range of the old one. Answers what is added to its exponents.
  float raise(int r, float now) {
    if (!(now > limit[r])) return 0;
    const float less = top[r] == -INFINITY ? -INFINITY : (top[r] - now) * unit, shrink = exp2f(less);
    top[r] = now, down[r] = -now * unit, limit[r] = limit_of(now);
    float* to = out + (int64_t)r * z.wide_dv;
    for (int i = 0; i < z.wide_dv; i += W) store(to + i, load(to + i) * shrink);
    return less;
  }
  float limit_of(float maximum) const { return unit > 0 ? maximum + STALE / unit : INFINITY; }

  void add_up() {
    for (int r = 0; r < count; r += UNIT) {
      sums_of(sum + r, total + r);
      sums_of(HALF ? rounded + r : sum + r, whole + r);
    }
  }
  bool lost(int r) const { return sees[r] && total[r] < LOST; }
};

}  // namespace
