// Many rows against panels, as in prefill: tiles of sums that stay in registers, weights that stay in the first cache
// while all rows of a call pass them. Each sum is what panel_dots of panels.h makes of it, to the bit.
#pragma once
#include "panels.h"

namespace {

#if HEADWAY_LEVEL >= 2
constexpr int TALL = 6, PAIR = 2;  // rows and panels of a tile
#elif HEADWAY_LEVEL == 1
constexpr int TALL = 2, PAIR = 1;
#else
constexpr int TALL = 1, PAIR = 1;
#endif
constexpr int DEEP = 32;  // groups of weights at a time

// Groups [0, count) of a panel of 4 bits in 8; zeros that are not its own are 128.
struct Widened {
  static constexpr int STEP = 9 * 64;
  alignas(64) char at[DEEP * STEP];

  Panel of(const Panel& p, int64_t count) {
    const vu up = (vu)splat_int(p.has_zeros ? 0 : 0x78787878);
    for (int64_t g = 0; g < count; g++) {
      const char* from = p.at + g * p.step;
      char* to = at + g * STEP;
      for (int i = 0; i < 4 * UNIT; i += W) {
        fetch(from + 4 * i);
        vi w = load_int((const int32_t*)from + i);
        *(vi_any*)(to + 4 * i) = (vi)((vu)(w & 0x0F0F0F0F) + up);
        *(vi_any*)(to + 4 * (i + 4 * UNIT)) = (vi)((vu)((w >> 4) & 0x0F0F0F0F) + up);
      }
      memcpy(to + 8 * 64, from + 4 * 64, (size_t)(p.step - 4 * 64));
    }
    return {at, STEP, p.has_scales, p.has_zeros};
  }
};

// Adds groups [from, from + count) of TALL rows to y [TALL][PAIR * 16]; the panels begin at group `from`.
template <bool SCALES, bool ZEROS>
INLINE void add_tile(float* y, const Rounded& x, int64_t row, const Panel (&p)[PAIR], int64_t from, int64_t count) {
  constexpr int BYTES = 8 * 64;
  const int64_t first = row * x.groups + from * TALL;
  const int32_t *q = x.q + first * (GROUP / 4) * WORDS, *below = x.below + first;
  const float* scale = x.scale + first;
  vf acc[TALL][PAIR][N];
  UNROLL for (int r = 0; r < TALL; r++)
    UNROLL for (int k = 0; k < PAIR; k++)
      UNROLL for (int i = 0; i < N; i++) acc[r][k][i] = load(y + (r * PAIR + k) * UNIT + i * W);
  const char* at[PAIR];
  UNROLL for (int k = 0; k < PAIR; k++) at[k] = p[k].at;
  for (int64_t g = 0; g < count; g++, q += GROUP / 4 * TALL * WORDS, scale += TALL, below += TALL) {
    vi sums[TALL][PAIR][N];
    vi zero[PAIR][N] = {};
    if (ZEROS)
      UNROLL for (int k = 0; k < PAIR; k++) read_bytes(zero[k], at[k] + BYTES + (SCALES ? 2 * UNIT : 0));
    UNROLL for (int r = 0; r < TALL; r++)
      UNROLL for (int k = 0; k < PAIR; k++)
        UNROLL for (int i = 0; i < N; i++)
          sums[r][k][i] = ZEROS ? zero[k][i] * (splat_int(below[r]) >> 7) : splat_int(below[r]);
    UNROLL for (int j = 0; j < GROUP / 4; j++)
      UNROLL for (int i = 0; i < N; i++) {
        vi w[PAIR];
        UNROLL for (int k = 0; k < PAIR; k++) w[k] = load_int((const int32_t*)(at[k] + j * 64) + i * W);
        UNROLL for (int r = 0; r < TALL; r++)
          UNROLL for (int k = 0; k < PAIR; k++)
            sums[r][k][i] = add_four(sums[r][k][i], w[k], q + (j * TALL + r) * WORDS);
      }
    vf each[PAIR][N] = {};
    if (SCALES)
      UNROLL for (int k = 0; k < PAIR; k++) read_halves(each[k], at[k] + BYTES);
    UNROLL for (int r = 0; r < TALL; r++) {
      vf by = splat(scale[r]);
      UNROLL for (int k = 0; k < PAIR; k++)
        UNROLL for (int i = 0; i < N; i++)
          acc[r][k][i] += __builtin_convertvector(sums[r][k][i], vf) * (SCALES ? by * each[k][i] : by);
    }
    UNROLL for (int k = 0; k < PAIR; k++) at[k] += p[k].step;
  }
  UNROLL for (int r = 0; r < TALL; r++)
    UNROLL for (int k = 0; k < PAIR; k++)
      UNROLL for (int i = 0; i < N; i++) store(y + (r * PAIR + k) * UNIT + i * W, acc[r][k][i]);
}

template <bool SCALES, bool ZEROS>
void add_tiles(float* y, const Rounded& x, int64_t rows, const Panel (&p)[PAIR], int64_t from, int64_t count) {
  for (int64_t row = 0; row < rows; row += TALL)
    add_tile<SCALES, ZEROS>(y + row * PAIR * UNIT, x, row, p, from, count);
}

// All rows, whole tiles of them, against PAIR panels of `bits` each: y [rows][PAIR * 16].
INLINE void panel_tiles(float* y, const Rounded& x, int64_t rows, const Panel (&panels)[PAIR], int bits) {
  memset(y, 0, (size_t)(rows * PAIR * UNIT) * sizeof(float));
  Widened widened[PAIR];
  for (int64_t from = 0; from < x.groups; from += DEEP) {
    int64_t count = x.groups - from < DEEP ? x.groups - from : DEEP;
    Panel now[PAIR];
    for (int k = 0; k < PAIR; k++) {
      now[k] = panels[k], now[k].at += from * now[k].step;
      if (bits == 4) now[k] = widened[k].of(now[k], count);
    }
    auto add = panels[0].has_scales ? panels[0].has_zeros ? add_tiles<true, true> : add_tiles<true, false>
               : panels[0].has_zeros ? add_tiles<false, true> : add_tiles<false, false>;
    add(y, x, rows, now, from, count);
  }
}

}  // namespace
