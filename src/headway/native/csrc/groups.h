// Groups of a tile's rows whose sums fit into the registers, and loops whose sizes are compile-time constants.
#pragma once
#include "vec.h"

namespace {

// Calls f with the number of rows of a group as a compile-time constant.
template <class F>
INLINE void with_rows(int rows, F f) {
  switch (rows) {
    case 6: return f(Count<ROWS>());
    case 4: return f(Count<ROWS >= 4 ? 4 : 1>());
    case 2: return f(Count<2>());
    case 1: return f(Count<1>());
  }
}
// Calls f(rows, row) for each group of `count` rows. ROWS 6: 13 rows are 6, 6, 1, and 8 rows are 4, 4.
template <class F>
INLINE void each_group(int count, F f) {
  for (int row = 0, rows; row < count; row += rows) {
    const int left = count - row;
    rows = ROWS == 6 && left >= 6 && left != 8 ? 6 : ROWS >= 4 && left >= 4 ? 4 : left >= 2 ? 2 : 1;
    with_rows(rows, [&](auto known) __attribute__((always_inline)) { f(known, row); });
  }
}

// Calls f(size, at) for pieces of `count`: as many of size MOST as fit, then of half that size, and so on; with MOST 4,
// 11 is 4, 4, 2, 1.
template <int MOST, int LEAST = 1, class F>
INLINE void in_halves(int count, F f, int at = 0) {
  for (; at + MOST <= count; at += MOST) f(Count<MOST>(), at);
  if constexpr (MOST > LEAST) in_halves<MOST / 2, LEAST>(count, f, at);
}
// Calls f(units, first column) for pieces of `wide` columns.
template <class F>
INLINE void each_columns(int wide, F f) {
  in_halves<WIDE>(wide / UNIT, [&](auto units, int at) __attribute__((always_inline)) { f(units, at * UNIT); });
}

// A group of rows that sees panels [first, first + panels) of a block; `bits` are the masks of its rows.
struct Group {
  int row, rows, first, panels;
  bool masked;
  uint16_t bits[ROWS][4];
};

// Calls f with the number of panels as a compile-time constant; for levels that take several.
template <class F>
INLINE void with_panels(int panels, F f) {
  switch (panels) {
    case 4: return f(Count<WIDE>());
    case 3: return f(Count<WIDE == 4 ? 3 : 1>());
    case 2: return f(Count<WIDE == 4 ? 2 : 1>());
    case 1: return f(Count<1>());
  }
}
// Calls f(rows, panels, group) with both numbers as compile-time constants; once per panel at levels that take one at a time.
template <class F>
INLINE void each_panels(const Group& g, F f) {
  auto take = [&](auto panels, const Group& x) __attribute__((always_inline)) {
    with_rows(x.rows, [&](auto rows) __attribute__((always_inline)) { f(rows, panels, x); });
  };
  if (WIDE == 4) return with_panels(g.panels, [&](auto panels) __attribute__((always_inline)) { take(panels, g); });
  for (int c = 0; c < g.panels; c++) {
    Group one = g;
    one.first = g.first + c, one.panels = 1;
    for (int r = 0; r < g.rows; r++) one.bits[r][0] = g.bits[r][c];
    take(Count<1>(), one);
  }
}

}  // namespace
