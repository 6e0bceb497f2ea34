// The rows of a tile in groups whose sums fit into the registers, and code that knows their number when it is compiled.
#pragma once
#include "vec.h"

namespace {

template <int R>
struct Count {
  static constexpr int value = R;
};
// Calls f(rows, row) for each group of rows, with their number known to the compiler.
template <class F>
INLINE void each_group(int count, F f) {
  for (int row = 0, left; (left = count - row) > 0;) {
    if (ROWS == 6 && left >= 6 && left != 8)
      f(Count<ROWS>(), row), row += ROWS;
    else if (ROWS >= 4 && left >= 4)
      f(Count<ROWS >= 4 ? 4 : 1>(), row), row += 4;
    else if (left >= 2)
      f(Count<2>(), row), row += 2;
    else
      f(Count<1>(), row), row += 1;
  }
}

// Calls f with the number of rows of such a group known to the compiler.
template <class F>
INLINE void with_rows(int rows, F f) {
  switch (rows) {
    case 6: return f(Count<ROWS>());
    case 4: return f(Count<ROWS >= 4 ? 4 : 1>());
    case 2: return f(Count<2>());
    case 1: return f(Count<1>());
  }
}

// Calls f(units, first column) for pieces of `wide` columns, with their number of units known to the compiler.
template <class F>
INLINE void each_columns(int wide, F f) {
  int at = 0;
  if (WIDE == 4) {
    for (; at + 64 <= wide; at += 64) f(Count<WIDE>(), at);
    if (at + 32 <= wide) f(Count<WIDE == 4 ? 2 : 1>(), at), at += 32;
  }
  for (; at < wide; at += UNIT) f(Count<1>(), at);
}

// A group of rows that sees panels [first, first + panels) of the block; `bits` are those of its rows.
struct Group {
  int row, rows, first, panels;
  bool masked;
  uint16_t bits[ROWS][4];
};

// Calls f(rows, panels, group) with both numbers known to the compiler; where a level takes one panel at a time, for each.
template <class F>
INLINE void each_panels(const Group& g, F f) {
  auto take = [&](auto panels, const Group& x) __attribute__((always_inline)) {
    with_rows(x.rows, [&](auto rows) __attribute__((always_inline)) { f(rows, panels, x); });
  };
  if (WIDE == 4) {
    switch (g.panels) {
      case 4: return take(Count<WIDE>(), g);
      case 3: return take(Count<WIDE == 4 ? 3 : 1>(), g);
      case 2: return take(Count<WIDE == 4 ? 2 : 1>(), g);
      case 1: return take(Count<1>(), g);
    }
    return;
  }
  for (int c = 0; c < g.panels; c++) {
    Group one = g;
    one.first = g.first + c, one.panels = 1;
    for (int r = 0; r < g.rows; r++) one.bits[r][0] = g.bits[r][c];
    take(Count<1>(), one);
  }
}

}  // namespace
