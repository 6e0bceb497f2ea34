// Products of more than PANEL_ROWS rows with panels: tiles of sums stay in registers, groups of weights stay in the L1 cache
// while all rows of a call pass, and the next groups are prefetched meanwhile. Each sum is bit for bit that of panel_dots in
// panels.h.
#pragma once
#include "panels.h"

namespace {

// Rows and panels of a tile. Many rows use tiles of two panels, whose inputs are read once for both; a few rows use tiles of
// one panel, with less padding.
constexpr int FEW_TALL = HAS_SHORTS ? 4 : TALL, FEW_WIDE = 1;
constexpr int MANY_TALL = W < 16 && !HAS_SHORTS ? FEW_TALL : 6, MANY_WIDE = W < 16 ? 1 : 2;
constexpr int64_t FEW_TILED = 16;  // rows up to which FEW_TALL is used
constexpr int DEEP = 32;           // groups of weights of one panel at a time

INLINE bool by_squares(int64_t rows) { return HAS_TILES && rows > FEW_TILED; }  // panel_matrix.h
INLINE int64_t tall_of(int64_t rows) { return by_squares(rows) ? UNIT : rows > FEW_TILED ? MANY_TALL : FEW_TALL; }

// Memory from `at` to `end` that is prefetched `lines` cache lines at a time.
struct Onward {
  const char *at, *end;
  int64_t lines;

  __attribute__((always_inline)) void some() {
    for (int64_t i = 0; i < lines && at < end; i++, at += 64) fetch(at, 0);
  }
};

// Adds groups [from, from + count) of R rows, stored in tiles of TALL, to y [P][..][16] with `side` floats from one panel to the
// next; the panels point at group `from`, the first of eight.
template <class F, int TALL, int R, int P, bool SCALES, bool ZEROS>
INLINE void add_tile(float* y, int64_t side, const Rounded& x, int64_t row, const Panel (&p)[P], int64_t from,
                     int64_t count, Onward (&onward)[P]) {
  vf acc[R][P][N];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int s = 0; s < P; s++)
      UNROLL for (int i = 0; i < N; i++) acc[r][s][i] = load(y + s * side + r * UNIT + i * W);
  auto fetch_some = [&](const char* const(&)[P]) __attribute__((always_inline)) {
    UNROLL for (int s = 0; s < P; s++) onward[s].some();
  };
  add_groups<F>(acc, p, Inputs(x, row * x.groups, from, 1, TALL), WORDS, count, SCALES, ZEROS, fetch_some);
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int s = 0; s < P; s++)
      UNROLL for (int i = 0; i < N; i++) store(y + s * side + r * UNIT + i * W, acc[r][s][i]);
}

// All rows; each tile prefetches its part of the groups that follow.
template <class F, int TALL, int P, bool SCALES, bool ZEROS>
void add_tiles(float* y, int64_t side, const Rounded& x, int64_t rows, const Panel (&p)[P], int64_t from, int64_t count) {
  constexpr int SHORT = TALL > 1 ? TALL / 2 : 1;  // rows of the last tile, if these suffice
  const int64_t size = p[0].bytes(count), tiles = (rows + TALL - 1) / TALL,
                lines = (p[0].bytes(8) / 8 + 64 * tiles - 1) / (64 * tiles);
  for (int64_t row = 0; row < rows; row += TALL, y += TALL * UNIT) {
    Onward onward[P];
    for (int s = 0; s < P; s++)
      onward[s] = {p[s].at + size + row / TALL * count * lines * 64, p[s].at + 2 * size, lines};
    if (rows - row > SHORT)
      add_tile<F, TALL, TALL, P, SCALES, ZEROS>(y, side, x, row, p, from, count, onward);
    else
      add_tile<F, TALL, SHORT, P, SCALES, ZEROS>(y, side, x, row, p, from, count, onward);
  }
}

// All rows against P panels: y [P][side / 16][16], in whole tiles.
template <class F, int TALL, int P>
INLINE void panel_tiles(float* y, int64_t side, const Rounded& x, int64_t rows, Panel (&p)[P]) {
  memset(y, 0, (size_t)(P * side) * sizeof(float));
  for (int64_t from = 0; from < x.groups; from += DEEP / P) {
    const int64_t left = x.groups - from, count = left < DEEP / P ? left : DEEP / P;
    with_parts<F>(p[0], [&](auto scales, auto zeros) {
      add_tiles<F, TALL, P, scales.value, zeros.value>(y, side, x, rows, p, from, count);
    });
    for (Panel& one : p) one.at += one.bytes(count);
  }
}

}  // namespace
