// More than PANEL_ROWS rows against panels: tiles of sums that stay in registers, groups of weights that stay in the first
// cache while all rows of a call pass them, and the groups behind them fetched meanwhile. Each sum is what panel_dots of
// panels.h makes of it, to the bit.
#pragma once
#include "panels.h"

namespace {

constexpr int TALL = W < 16 ? W / 4 : 8;         // rows of a tile
constexpr int SHORT = TALL > 1 ? TALL / 2 : 1;  // of the last one, where they are enough
constexpr int DEEP = 32;                        // groups of weights at a time

// Memory from `at` to `end`, to be fetched `lines` at a time.
struct Onward {
  const char *at, *end;
  int64_t lines;

  __attribute__((always_inline)) void some() {
    for (int64_t i = 0; i < lines && at < end; i++, at += 64) fetch(at, 0);
  }
};

// Adds groups [from, from + count) of R rows, which lie TALL by TALL, to y [R][16]; the panel begins at group `from`.
template <int BITS, int R, bool SCALES, bool ZEROS>
INLINE void add_tile(float* y, const Rounded& x, int64_t row, const Panel& p, int64_t from, int64_t count, Onward onward) {
  constexpr int LOADS = BITS == 4 ? 4 : 8, BYTES = LOADS * 64, SHIFT = BITS == 4 ? 4 : 0;
  const int64_t first = row * x.groups + from * TALL;
  const int32_t *q = x.q + first * (GROUP / 4) * WORDS, *below = x.below + first;
  const float* scale = x.scale + first;
  vf acc[R][N];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int i = 0; i < N; i++) acc[r][i] = load(y + r * UNIT + i * W);
  const char* at = p.at;
  for (int64_t g = 0; g < count; g++, at += p.step, q += GROUP / 4 * TALL * WORDS, scale += TALL, below += TALL) {
    onward.some();
    vi sums[R][N], zero[N] = {};
    if (ZEROS) read_bytes(zero, at + BYTES + (SCALES ? 2 * UNIT : 0));
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int i = 0; i < N; i++)
        sums[r][i] = ZEROS ? zero[i] * (below[r] >> 7) : splat_int(below[r] >> SHIFT);
    UNROLL for (int j = 0; j < LOADS; j++)
      UNROLL for (int i = 0; i < N; i++) {
        const vi w = load_int((const int32_t*)(at + j * 64) + i * W);
        const vi low = BITS == 4 ? w & 0x0F0F0F0F : w, high = (w >> 4) & 0x0F0F0F0F;
        UNROLL for (int r = 0; r < R; r++) {
          const int32_t* x_r = q + (j * TALL + r) * WORDS;
          sums[r][i] = add_four(sums[r][i], low, x_r);
          if (BITS == 4) sums[r][i] = add_four(sums[r][i], high, x_r + 4 * TALL * WORDS);
        }
      }
    vf each[N] = {};
    if (SCALES) read_halves(each, at + BYTES);
    UNROLL for (int r = 0; r < R; r++) {
      vf by = splat(scale[r]);
      UNROLL for (int i = 0; i < N; i++)
        acc[r][i] += __builtin_convertvector(sums[r][i], vf) * (SCALES ? by * each[i] : by);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int i = 0; i < N; i++) store(y + r * UNIT + i * W, acc[r][i]);
}

// All rows: each tile fetches its part of the groups that follow.
template <int BITS, bool SCALES, bool ZEROS>
void add_tiles(float* y, const Rounded& x, int64_t rows, const Panel& p, int64_t from, int64_t count) {
  const int64_t size = count * p.step, tiles = (rows + TALL - 1) / TALL, lines = (p.step + 64 * tiles - 1) / (64 * tiles);
  const char* next = p.at + size;
  for (int64_t row = 0; row < rows; row += TALL, y += TALL * UNIT) {
    const Onward onward{next + row / TALL * count * lines * 64, next + size, lines};
    if (rows - row > SHORT)
      add_tile<BITS, TALL, SCALES, ZEROS>(y, x, row, p, from, count, onward);
    else
      add_tile<BITS, SHORT, SCALES, ZEROS>(y, x, row, p, from, count, onward);
  }
}

// All rows against a panel: y [rows][16], whole tiles of them.
template <int BITS>
INLINE void panel_tiles(float* y, const Rounded& x, int64_t rows, Panel p) {
  memset(y, 0, (size_t)(rounded(rows, TALL) * UNIT) * sizeof(float));
  auto add = p.has_scales  ? p.has_zeros ? add_tiles<BITS, true, true> : add_tiles<BITS, true, false>
             : p.has_zeros ? add_tiles<BITS, false, true>
                           : add_tiles<BITS, false, false>;
  for (int64_t from = 0; from < x.groups; from += DEEP) {
    int64_t count = x.groups - from < DEEP ? x.groups - from : DEEP;
    add(y, x, rows, p, from, count);
    p.at += count * p.step;
  }
}

}  // namespace
