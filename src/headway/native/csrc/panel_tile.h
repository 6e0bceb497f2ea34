// More than PANEL_ROWS rows against panels: tiles of sums that stay in registers, groups of weights that stay in the first
// cache while all rows of a call pass them, and the groups behind them fetched meanwhile. Each sum is what panel_dots of
// panels.h makes of it, to the bit.
#pragma once
#include "panels.h"

namespace {

// Rows and panels of a tile. Many rows are tiles of two panels, whose inputs are read once for both; a few rows are tiles
// of one, which wastes fewer of them.
constexpr int FEW_TALL = W < 16 ? W / 4 : 8, FEW_WIDE = 1;
constexpr int MANY_TALL = W < 16 ? FEW_TALL : 6, MANY_WIDE = W < 16 ? 1 : 2;
constexpr int64_t FEW_TILED = 16;  // rows
constexpr int DEEP = 32;           // groups of weights at a time, of one panel

INLINE int64_t tall_of(int64_t rows) { return rows > FEW_TILED ? MANY_TALL : FEW_TALL; }

// Memory from `at` to `end`, to be fetched `lines` at a time.
struct Onward {
  const char *at, *end;
  int64_t lines;

  __attribute__((always_inline)) void some() {
    for (int64_t i = 0; i < lines && at < end; i++, at += 64) fetch(at, 0);
  }
};

// Adds groups [from, from + count) of R rows, which lie TALL by TALL, to y [P][..][16], `side` numbers from one panel to
// the next; the panels begin at group `from`.
template <int BITS, int TALL, int R, int P, bool SCALES, bool ZEROS>
INLINE void add_tile(float* y, int64_t side, const Rounded& x, int64_t row, const Panel (&p)[P], int64_t from,
                     int64_t count, Onward (&onward)[P]) {
  constexpr int LOADS = BITS == 4 ? 4 : 8, BYTES = LOADS * 64, SHIFT = BITS == 4 ? 4 : 0;
  const int64_t first = row * x.groups + from * TALL;
  const int32_t *q = x.q + first * (GROUP / 4) * WORDS, *below = x.below + first;
  const float* scale = x.scale + first;
  vf acc[R][P][N];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int s = 0; s < P; s++)
      UNROLL for (int i = 0; i < N; i++) acc[r][s][i] = load(y + s * side + r * UNIT + i * W);
  int64_t at = 0;
  for (int64_t g = 0; g < count; g++, at += p[0].step, q += GROUP / 4 * TALL * WORDS, scale += TALL, below += TALL) {
    vi sums[R][P][N];
    UNROLL for (int s = 0; s < P; s++) {
      onward[s].some();
      vi zero[N] = {};
      if (ZEROS) read_bytes(zero, p[s].at + at + BYTES + (SCALES ? 2 * UNIT : 0));
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < N; i++)
          sums[r][s][i] = ZEROS ? zero[i] * (below[r] >> 7) : splat_int(below[r] >> SHIFT);
    }
    UNROLL for (int j = 0; j < LOADS; j++)
      UNROLL for (int i = 0; i < N; i++) {
        vi low[P], high[P];
        UNROLL for (int s = 0; s < P; s++) {
          const vi w = load_int((const int32_t*)(p[s].at + at + j * 64) + i * W);
          low[s] = BITS == 4 ? w & 0x0F0F0F0F : w, high[s] = (w >> 4) & 0x0F0F0F0F;
        }
        UNROLL for (int r = 0; r < R; r++) {
          const int32_t* x_r = q + (j * TALL + r) * WORDS;
          UNROLL for (int s = 0; s < P; s++) sums[r][s][i] = add_four(sums[r][s][i], low[s], x_r);
          if (BITS == 4)
            UNROLL for (int s = 0; s < P; s++)
              sums[r][s][i] = add_four(sums[r][s][i], high[s], x_r + 4 * TALL * WORDS);
        }
      }
    UNROLL for (int s = 0; s < P; s++) {
      vf each[N] = {};
      if (SCALES) read_halves(each, p[s].at + at + BYTES);
      UNROLL for (int r = 0; r < R; r++) {
        vf by = splat(scale[r]);
        UNROLL for (int i = 0; i < N; i++)
          acc[r][s][i] += __builtin_convertvector(sums[r][s][i], vf) * (SCALES ? by * each[i] : by);
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int s = 0; s < P; s++)
      UNROLL for (int i = 0; i < N; i++) store(y + s * side + r * UNIT + i * W, acc[r][s][i]);
}

// All rows: each tile fetches its part of the groups that follow.
template <int BITS, int TALL, int P, bool SCALES, bool ZEROS>
void add_tiles(float* y, int64_t side, const Rounded& x, int64_t rows, const Panel (&p)[P], int64_t from, int64_t count) {
  constexpr int SHORT = TALL > 1 ? TALL / 2 : 1;  // of the last tile, where they are enough
  const int64_t size = count * p[0].step, tiles = (rows + TALL - 1) / TALL,
                lines = (p[0].step + 64 * tiles - 1) / (64 * tiles);
  for (int64_t row = 0; row < rows; row += TALL, y += TALL * UNIT) {
    Onward onward[P];
    for (int s = 0; s < P; s++)
      onward[s] = {p[s].at + size + row / TALL * count * lines * 64, p[s].at + 2 * size, lines};
    if (rows - row > SHORT)
      add_tile<BITS, TALL, TALL, P, SCALES, ZEROS>(y, side, x, row, p, from, count, onward);
    else
      add_tile<BITS, TALL, SHORT, P, SCALES, ZEROS>(y, side, x, row, p, from, count, onward);
  }
}

// All rows against P panels: y [P][side / 16][16], whole tiles of them.
template <int BITS, int TALL, int P>
INLINE void panel_tiles(float* y, int64_t side, const Rounded& x, int64_t rows, Panel (&p)[P]) {
  memset(y, 0, (size_t)(P * side) * sizeof(float));
  auto add = p[0].has_scales  ? p[0].has_zeros ? add_tiles<BITS, TALL, P, true, true> : add_tiles<BITS, TALL, P, true, false>
             : p[0].has_zeros ? add_tiles<BITS, TALL, P, false, true>
                              : add_tiles<BITS, TALL, P, false, false>;
  for (int64_t from = 0; from < x.groups; from += DEEP / P) {
    const int64_t left = x.groups - from, count = left < DEEP / P ? left : DEEP / P;
    add(y, side, x, rows, p, from, count);
    for (Panel& one : p) one.at += count * one.step;
  }
}

}  // namespace
