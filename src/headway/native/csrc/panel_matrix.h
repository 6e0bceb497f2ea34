// Products of rows with panels by instructions for whole tiles (AMX): 16 rows by 16 outputs by the inputs of a group. The sums
// of a group are integers, and are added up as in panels.h: each result is bit for bit that of panel_dots.
#pragma once
#include "panel_shorts.h"

namespace {

// Adds the integer sums of a group, or of one of its parts, for 16 rows to their float sums.
template <class F, bool SCALES, bool ZEROS>
INLINE void add_square(vf (&acc)[UNIT], const int32_t* sums, const Codes<F, int8_t>& w, const Inputs& x, int64_t g, int64_t part) {
  constexpr bool SCALED_GROUPS = F::BLOCKS || SCALES;
  UNROLL for (int r = 0; r < UNIT; r++) {
    const int64_t at = g * UNIT + r;
    vi sum = load_int(sums + r * UNIT);
    if (F::WHOLE && ZEROS) sum += load_int(w.offset[g]) * (x.below[at] >> 7);
    const vf by = splat(x.scale[at]);
    acc[r] += __builtin_convertvector(sum, vf) * (SCALED_GROUPS ? by * load(w.scale[g][part]) : by);
    if (F::LOWS) acc[r] += load(w.low[g]) * splat(x.mass[at]);
  }
}

// All rows, 16 by 16, against `count` groups from `from` on: adds to y [rows][16]. Each step prefetches its part of the groups
// that follow. Four sums are in flight: the tiles of the next are multiplied while the last are added.
template <class F, bool SCALES, bool ZEROS>
void add_squares(float* y, const Rounded& x, int64_t rows, Tiles<F::QUADS>& tiles, const Codes<F, int8_t>& w, const Panel& p,
                 int64_t from, int64_t count) {
  constexpr int PARTS = F::PARTS, WEIGHTS = GROUP * UNIT / PARTS;
  alignas(64) int32_t sums[4][UNIT * UNIT];
  const int64_t parts = count * PARTS, steps = (rows + UNIT - 1) / UNIT * ((parts + 3) / 4), size = p.bytes(count);
  Onward onward{p.at + size, p.at + 2 * size, (size + 64 * steps - 1) / (64 * steps)};
  for (int64_t row = 0; row < rows; row += UNIT, y += UNIT * UNIT) {
    const Inputs in(x, row * x.groups, from, 1, UNIT);
    vf acc[UNIT];
    UNROLL for (int r = 0; r < UNIT; r++) acc[r] = load(y + r * UNIT);
    for (int64_t first = 0; first < parts; first += 4) {
      auto each = [&](auto f) __attribute__((always_inline)) {
        f(Count<0>(), first);
        if (first + 1 < parts) f(Count<1>(), first + 1);
        if (first + 2 < parts) f(Count<2>(), first + 2);
        if (first + 3 < parts) f(Count<3>(), first + 3);
      };
      onward.some();
      const char* next = (const char*)in.q + (first + 4) / PARTS * GROUP * UNIT;  // the inputs exceed the L1 cache
      UNROLL for (int i = 0; i < 4 * GROUP * UNIT / PARTS; i += 64) __builtin_prefetch(next + i);
      each([&](auto i, int64_t part) __attribute__((always_inline)) {
        const int8_t* inputs = (const int8_t*)in.q + part / PARTS * GROUP * UNIT + part % PARTS * (GROUP / PARTS);
        tiles.template start<i.value>(inputs, w.codes[0][0][0] + part * WEIGHTS);
      });
      each([&](auto i, int64_t) __attribute__((always_inline)) { tiles.template finish<i.value>(sums[i.value]); });
      each([&](auto i, int64_t part) __attribute__((always_inline)) {
        add_square<F, SCALES, ZEROS>(acc, sums[i.value], w, in, part / PARTS, part % PARTS);
      });
    }
    UNROLL for (int r = 0; r < UNIT; r++) store(y + r * UNIT, acc[r]);
  }
}

// All rows against a panel: y [rows rounded up to 16][16].
template <class F>
void panel_squares(float* y, const Rounded& x, int64_t rows, Panel p) {
  memset(y, 0, (size_t)rounded(rows, UNIT) * UNIT * sizeof(float));
  Tiles<F::QUADS> tiles;
  Codes<F, int8_t> weights;
  for (int64_t from = 0; from < x.groups; from += DEEP) {
    const int64_t left = x.groups - from, count = left < DEEP ? left : DEEP;
    weights.take(p, count);
    with_parts<F>(p, [&](auto scales, auto zeros) {
      add_squares<F, scales.value, zeros.value>(y, x, rows, tiles, weights, p, from, count);
    });
    p.at += p.bytes(count);
  }
}

constexpr int SQUARE = HAS_TILES ? UNIT : FEW_TALL;

// All rows against P panels, with tile instructions if TALL is SQUARE, or with 16-bit products: y [P][side / 16][16].
template <class F, int TALL, int P>
INLINE void many_rows(float* y, int64_t side, const Rounded& x, int64_t rows, Panel (&p)[P]) {
  if constexpr (HAS_TILES && TALL == SQUARE)
    for (int s = 0; s < P; s++) panel_squares<F>(y + s * side, x, rows, p[s]);
  else if constexpr (HAS_SHORTS)
    for (int s = 0; s < P; s++) panel_shorts<F, TALL>(y + s * side, x, rows, p[s]);
  else
    panel_tiles<F, TALL>(y, side, x, rows, p);
}

}  // namespace
