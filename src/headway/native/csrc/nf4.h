// NF4 weights as bitsandbytes stores them: 4-bit codes of 16 values, and a scale for each block of 64 inputs of an output,
// itself an 8-bit code (double quantization). Weights equal those of `Nf4.dequantize`: value times scale, rounded to the type
// of x. Codes are looked up one per lane of a register at a time, so inputs are reordered to match: `spread_place`. A row's
// sums have the same bits however many rows there are.
#pragma once
#include "compressed.h"

namespace {

constexpr int SCALED = 64;  // inputs of a block

// Codes per lane, and lanes that are looked up together; wide registers hold two codes of each of these lanes at once.
template <Floats KIND>
constexpr int LANE_CODES = KIND == Floats::PAIRS ? 4 : 8;
template <Floats KIND>
constexpr int CODE_LANES = KIND == Floats::PAIRS ? 16 : W < 8 ? W : 8;
template <Floats KIND>
constexpr int CODES = LANE_CODES<KIND>* CODE_LANES<KIND>;  // inputs that are reordered together: a block, or half of one

// Returns the place of input i: first the inputs of the first code of each lane, then those of the second, ... Lanes of
// 8 codes, 8 of them: inputs 0, 8, 16, .. 56 are at places 0..7, inputs 1, 9, .. at 8..15.
template <Floats KIND>
INLINE int64_t spread_place(int64_t i) {
  constexpr int64_t ALL = CODES<KIND>, EACH = LANE_CODES<KIND>;
  return i / ALL * ALL + i % EACH * CODE_LANES<KIND> + i % ALL / EACH;
}

// The codes of an output, the codes of their scales, and the number of the output's first block in the whole matrix.
struct Coded {
  const char* codes;
  const uint8_t* scales;
  uint64_t first;
};

INLINE Coded coded_row(const headway_matrix& m, int64_t output, int64_t inputs) {
  const headway_nf4& n = *m.nf4;
  return {(const char*)m.weights + output * m.step, n.scales + output * (inputs / SCALED),
          (uint64_t)(n.first + output * n.row)};
}

// Reads the scales of `count` blocks of an output from block `from` on. The offset is added in a separate loop: product and
// sum in one expression would be fused and rounded once, not twice as in `Nf4.scale`.
INLINE void read_scales(float* __restrict to, const headway_nf4& n, const Coded& w, int64_t from, int64_t count) {
  const float *map = n.map, offset = n.offset;
  const uint8_t* codes = w.scales + from;
  fetch((const char*)codes, 256);
  for (int64_t at = 0; at < count;) {
    const uint64_t block = w.first + (uint64_t)(from + at), left = 256 - block % 256;
    const float largest = n.largest[block / 256];
    const int64_t end = at + (int64_t)left < count ? at + (int64_t)left : count;
    for (; at + 8 <= end; at += 8) {
      const uint64_t eight = word_at((const char*)codes + at);
      UNROLL for (int i = 0; i < 8; i++) to[at + i] = map[eight >> 8 * i & 0xFF] * largest;
    }
    for (; at < end; at++) to[at] = map[codes[at]] * largest;
  }
  for (int64_t at = 0; at < count; at++) to[at] += offset;
}

constexpr int64_t LINE_BLOCKS = LONGEST_LINE / SCALED;  // blocks whose scales are read at a time

// Calls f(at, W words) for all weights of the codes at p, of a block with scale `scale`.
template <Floats KIND, class F>
INLINE void each_weight(const char* p, const float* values, float scale, F f) {
  vf table[N];
  UNROLL for (int i = 0; i < N; i++) table[i] = kept<KIND == Floats::WIDENED>(load(values + i * W) * scale);
  if constexpr (KIND == Floats::PAIRS)
    look_up_pairs(table, p, f);
  else
    look_up(table, p, f);
}

// Like `dots`, for outputs in NF4, with the same sums; x is in the order of spread_place.
template <Floats KIND, int R, int S>
INLINE void coded_dots(float* y, int64_t y_side, const float* x, int64_t x_row, const Coded (&w)[S], const headway_nf4& n,
                       int64_t count) {
  constexpr bool PAIRS = KIND == Floats::PAIRS;
  alignas(64) float scales[S][LINE_BLOCKS];
  vf acc[S][R][sums_of(KIND)] = {};
  for (int64_t line = 0; line < count; line += LONGEST_LINE) {
    const int64_t end = count - line < LONGEST_LINE ? count : line + LONGEST_LINE;
    for (int s = 0; s < S; s++) read_scales(scales[s], n, w[s], line / SCALED, (end - line) / SCALED);
    for (int64_t from = line; from < end; from += CODES<KIND>) {
      const float* block = x + (PAIRS ? from / 2 : from);
      UNROLL for (int s = 0; s < S; s++) {
        const char* codes = w[s].codes + from / 2;
        fetch(codes);
        auto add = [&](int at, vf one) __attribute__((always_inline)) {
          UNROLL for (int r = 0; r < R; r++) {
            vf& to = acc[s][r][at / W % sums_of(KIND)];
            to = multiply_add<PAIRS>(to, load(block + r * x_row + at), one);
          }
        };
        each_weight<KIND>(codes, n.values, scales[s][(from - line) / SCALED], add);
      }
    }
  }
  write_sums(y, y_side, acc);
}

// Writes the weights of S outputs, LONGEST_LINE at most, as `dots` reads them with reordered rows: if there are more rows than
// one pass over the codes serves.
template <Floats KIND, int S>
INLINE void plain_lines(char* const (&lines)[S], const Coded (&w)[S], const headway_nf4& n, int64_t count) {
  alignas(64) float scales[S][LINE_BLOCKS];
  for (int s = 0; s < S; s++) read_scales(scales[s], n, w[s], 0, count / SCALED);
  for (int64_t from = 0; from < count; from += CODES<KIND>)
    UNROLL for (int s = 0; s < S; s++) {
      const char* codes = w[s].codes + from / 2;
      float* to = (float*)lines[s] + (KIND == Floats::PAIRS ? from / 2 : from);
      fetch(codes);
      auto keep = [&](int at, vf one) __attribute__((always_inline)) { store(to + at, one); };
      each_weight<KIND>(codes, n.values, scales[s][from / SCALED], keep);
    }
}

}  // namespace
