// Products of rows with panels at levels that add two 16-bit products in one instruction: codes are unpacked to 16 bits once
// for all rows, so that only multiplying and adding remains. Each result is bit for bit that of panel_dots.
#pragma once
#include "panel_codes.h"

namespace {

// Adds `count` groups of R rows, stored in tiles of TALL, to y [R][16].
template <class F, int TALL, int R, bool SCALES>
INLINE void add_shorts(float* y, Inputs x, const Codes<F, int16_t>& w, int64_t count) {
  for (int64_t g = 0; g < count; g++, x.next())
    UNROLL for (int part = 0; part < F::PARTS; part++) {
      vi sums[R][N] = {};
      const int32_t* code = (const int32_t*)w.codes[g][part * F::QUADS];
      UNROLL for (int at = 0; at < 2 * F::QUADS; at++) {
        vi two[N];
        UNROLL for (int i = 0; i < N; i++) two[i] = load_int(code + at * UNIT + i * W);
        UNROLL for (int r = 0; r < R; r++) {
          const int32_t inputs = x.q[(part * F::QUADS + at / 2) * TALL * WORDS + r * WORDS + at % 2];
          UNROLL for (int i = 0; i < N; i++) sums[r][i] = add_two(sums[r][i], two[i], inputs);
        }
      }
      UNROLL for (int r = 0; r < R; r++) {
        const vf by = splat(x.scale[r]);
        UNROLL for (int i = 0; i < N; i++) {
          float* to = y + r * UNIT + i * W;
          const vf factor = F::BLOCKS || SCALES ? by * load(w.scale[g][part] + i * W) : by;
          vf sum = load(to) + __builtin_convertvector(sums[r][i], vf) * factor;
          if (F::LOWS) sum += load(w.low[g] + i * W) * splat(x.mass[r]);
          store(to, sum);
        }
      }
    }
}

// All rows against a panel: y [rows rounded up to TALL][16].
template <class F, int TALL>
void panel_shorts(float* y, const Rounded& x, int64_t rows, Panel p) {
  constexpr int SHORT = TALL / 2;  // rows of the last tile, if these suffice
  memset(y, 0, (size_t)rounded(rows, TALL) * UNIT * sizeof(float));
  Codes<F, int16_t> w;
  for (int64_t from = 0; from < x.groups; from += w.DEPTH) {
    const int64_t left = x.groups - from, count = left < w.DEPTH ? left : w.DEPTH, size = p.bytes(count),
                  tiles = (rows + TALL - 1) / TALL;
    w.take(p, count);
    Onward onward{p.at + size, p.at + 2 * size, (size + 64 * tiles - 1) / (64 * tiles)};
    with_parts<F>(p, [&](auto scales, auto) {
      float* to = y;
      for (int64_t row = 0; row < rows; row += TALL, to += TALL * UNIT) {
        const Inputs in(x, row * x.groups, from, 1, TALL);
        onward.some();
        if (rows - row > SHORT)
          add_shorts<F, TALL, TALL, scales.value>(to, in, w, count);
        else
          add_shorts<F, TALL, SHORT, scales.value>(to, in, w, count);
      }
    });
    p.at += size;
  }
}

}  // namespace
