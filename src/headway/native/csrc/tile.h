// A tile of queries in the forward: its running sums, and the work that its groups of rows have pending.
#pragma once
#include "blocks.h"

namespace {

// The reference maximum of every row starts at 0: any reference in the range of a float gives exact results. It is raised to
// the true maximum when a weight relative to it exceeds 2^STALE; a sum below LOST at the end shows that it was too high: the
// row is then computed again, starting from its true maximum.
constexpr float STALE = 8.0f, LOST = 0x1p-60f;

// What a group of rows processes next: up to four panels of keys, of one block or of several.
struct Panels {
  int count, first;  // first: index of the first in its block, if they are of one block
  bool whole;        // all four panels of a block
  bool careful;      // some value may be NaN or infinite, and some key is masked
  const float *k[4], *v[4];
  uint16_t bits[ROWS][4];  // mask of the keys that each row sees
};

// Panels of partly masked blocks of a group of rows, which wait until there are four.
struct Waiting {
  int count;
  bool careful;
  const float *k[7], *v[7];
  uint16_t bits[7][ROWS];
};

// A group of rows whose scores have yet to become weights.
struct Pending {
  int rows, row;  // rows 0: none is pending
  Panels of;
};

template <bool HALF>
struct Tile {
  Sizes z;
  int count;
  float unit;  // base-2 exponent per unit of raw score
  Ahead ahead;
  Row rows[TILE];
  // per row: the reference maximum, the raw score above which it is raised, and - reference * unit
  float top[TILE], limit[TILE], down[TILE];
  alignas(64) float total[TILE], whole[TILE];  // of the weights (total), and of the weights as rounded for the values (whole)
  bool sees[TILE];  // whether the row has seen some key
  Pending pending;
  Waiting waiting[TILE / 2];                 // [i]: of the group whose first row is 2 i
  alignas(64) float sum[TILE][W], rounded[TILE][W];
  alignas(64) float s[8 * BLOCK];            // pending exponents [row][64]; 8 rows if keys are read in place
  alignas(64) float p[8 * BLOCK];            // weights [row][64], as words
  float *q, *out;  // [rows][words], [rows][columns of values]

  // Starts a tile of so many rows. exact: the reference maximum of each row is that of the keys that it sees first.
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
  // Raises the reference maximum of row r to `now` if that exceeds the limit of the old one, and rescales the row's output.
  // Returns what must be added to the row's exponents, at most 0.
  float raise(int r, float now) {
    if (!(now > limit[r])) return 0;
    const float less = top[r] == -INFINITY ? -INFINITY : (top[r] - now) * unit, shrink = exp2f(less);
    top[r] = now, down[r] = -now * unit, limit[r] = limit_of(now);
    float* to = out + (int64_t)r * z.wide_dv;
    for (int i = 0; i < z.wide_dv; i += W) store(to + i, load(to + i) * shrink);
    return less;
  }
  float limit_of(float maximum) const { return unit > 0 ? maximum + STALE / unit : INFINITY; }

  // Adds up the sums of each row over their lanes.
  void add_up() {
    for (int r = 0; r < count; r += UNIT) {
      sums_of(sum + r, total + r);
      sums_of(HALF ? rounded + r : sum + r, whole + r);
    }
  }
  // Returns whether the reference maximum of row r was too high.
  bool lost(int r) const { return sees[r] && total[r] < LOST; }
};

}  // namespace
