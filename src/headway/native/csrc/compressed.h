// bf16 weights in about 11 bits each, lossless: signs and mantissas are stored as they are, exponents as 3-bit codes. A row is
// a stream of blocks of 64 inputs, padded with zeros:
//
//     codes      8 bytes with their lowest bits, 8 with the middle and 8 with the highest: bit j of each is that of place j
//     rest       64 bytes: sign and mantissa of place j
//     exponents  a byte for each code that is 7, in order
//
// Codes 0 to 6 are the most frequent exponents of the matrix, in a table. The order of places is that from which interleaving
// the bytes of two registers gives the order of inputs: see `input_of`.
#pragma once
#include "linear.h"

namespace {

constexpr int PLANES = 24, FIXED = PLANES + PLACES;

// Returns eight bytes as a word. Words are read singly, since compilers copy an array of them through memory.
INLINE uint64_t word_at(const char* p) {
  uint64_t word;
  memcpy(&word, p, sizeof word);
  return word;
}

// Prefetches all cache lines of the block that is FETCH bytes ahead.
INLINE void fetch_block(const char* block) { fetch(block), fetch(block, FETCH + 64); }

// Writes the 64 weights of a block to w and returns the next block. Reads up to 63 bytes beyond the block.
INLINE const char* unpack(uint16_t* w, const char* block, uint64_t table) {
  const uint64_t low_bits = word_at(block), mid_bits = word_at(block + 8), high_bits = word_at(block + 16);
  const char *rest = block + PLANES, *next = block + FIXED;
  unpack_places(w, low_bits, mid_bits, high_bits, rest, next, table);
  return next + __builtin_popcountll(low_bits & mid_bits & high_bits);
}

// Decompresses S rows of `count` weights (padded to whole blocks) from the streams at w into lines; w then points to the lines.
template <int S, int64_t LINE>
INLINE void unpack_rows(uint16_t (&lines)[S][LINE], const char* (&w)[S], uint64_t table, int64_t count) {
  for (int64_t i = 0; i < count; i += PLACES)
    UNROLL for (int s = 0; s < S; s++) fetch_block(w[s]), w[s] = unpack(lines[s] + i, w[s], table);
  UNROLL for (int s = 0; s < S; s++) w[s] = (const char*)lines[s];
}

// Up to FEW_STREAMED rows are multiplied while the stream is decompressed; for more, it is decompressed into a line first.
constexpr int64_t FEW_STREAMED = 4, LONGEST_LINE = 16384;

// Like `dots`, with the streams at w. The sums are bit for bit those of plain bf16 weights.
template <Floats KIND, int R, int S>
INLINE void compressed_dots(float* y, int64_t y_side, const float* x, int64_t x_row, const char* const (&w)[S],
                            uint64_t table, int64_t count) {
  constexpr int STEP = step_of(KIND);
  vf acc[S][R][sums_of(KIND)] = {};
  const char* at[S];
  UNROLL for (int s = 0; s < S; s++) at[s] = w[s];
  auto units = [&](const uint16_t(&v)[S][PLACES], int64_t from, auto some) __attribute__((always_inline)) {
    UNROLL for (int u = 0; u < some.value; u++) {
      const char* unit[S];
      UNROLL for (int s = 0; s < S; s++) unit[s] = (const char*)(v[s] + u * STEP);
      add_unit<KIND>(acc, unit, x + (from / STEP + u) * UNIT, x_row);
    }
  };
  // a row of x ends with a whole group of 32 inputs
  for (int64_t from = 0; from < count; from += PLACES) {
    alignas(64) uint16_t v[S][PLACES];
    UNROLL for (int s = 0; s < S; s++) fetch_block(at[s]), at[s] = unpack(v[s], at[s], table);
    if (count - from > PLACES / 2)
      units(v, from, Count<PLACES / STEP>());
    else
      units(v, from, Count<PLACES / 2 / STEP>());
  }
  write_sums(y, y_side, acc);
}

}  // namespace
