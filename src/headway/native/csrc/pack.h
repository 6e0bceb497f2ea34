// Packing: copies rows of a tensor into the two layouts that the products read.
//
//   panels  [word of the row][64 rows]:        for contractions over the row (scores); a panel is 16 of the rows. Levels
//                                              that take one panel at a time: [panel][word of the row][16 rows]
//   rows    [step][unit of 16 columns][16]:    for contractions over the slots (values); a step is one slot in float,
//                                              two in bf16, whose elements are interleaved
//
// A word is 32 bits: a float, or two bf16. Levels without bf16 products pack floats.
#pragma once
#include "words.h"

namespace {

// Returns the size of an element in bytes.
INLINE int64_t bytes_of(int type) { return type == HEADWAY_FLOAT32 ? 4 : type == HEADWAY_BFLOAT16 ? 2 : 1; }

// Rows of one (batch, head) of a tensor: address, stride and type.
struct Rows {
  const char* base;
  const int32_t* order;  // [place] slot of each place in block order, or null if they are the same
  const float* scale;    // [slot] scales of int8 rows, or null
  int64_t stride;        // from one slot to the next, in bytes
  int type, width;       // width: elements per row

  static Rows of(const headway_tensor& t, int type, int64_t b, int64_t h, int width, const int32_t* order,
                 const float* scale = nullptr) {
    int64_t size = bytes_of(type);
    return {(const char*)t.data + (b * t.batch + h * t.head) * size, order, scale, t.slot * size, type, width};
  }
  int64_t slot(int64_t place) const { return order ? order[place] : place; }
  const char* at(int64_t place) const { return base + slot(place) * stride; }
  // Returns whether the rows can be used as packed words without a copy: in the type of the products, without gaps, in whole
  // units, and aligned to words.
  template <bool HALF>
  bool side_by_side() const {
    return !order && type == (HALF ? HEADWAY_BFLOAT16 : HEADWAY_FLOAT32) && stride == width * bytes_of(type) &&
           stride % (4 * UNIT) == 0 && (uintptr_t)base % 4 == 0;
  }
};

// Number of words of a row of `width` elements.
INLINE int words_of(bool half, int width) { return half ? (width + 1) / 2 : width; }
// Returns n rounded up to a multiple of 16.
INLINE int whole_units(int n) { return (n + UNIT - 1) / UNIT * UNIT; }

// Copies the row at `place` as words; the last unit is filled up with zeros, int8 rows are dequantized. Rows are copied
// before they are packed, so that memory is read in order, as the hardware prefetchers expect.
template <bool HALF>
INLINE void read_words(const Rows& r, int64_t place, float* to) {
  const char* from = r.at(place);
  int width = r.width, whole = whole_units(words_of(HALF, width));
  if (r.type == (HALF ? HEADWAY_BFLOAT16 : HEADWAY_FLOAT32)) {
    int size = HALF ? 2 : 4;
    if (width * size == whole * 4) {
      copy_words(to, (const float*)from, whole);
    } else {
      memset(to, 0, (size_t)whole * 4);
      memcpy(to, from, (size_t)(width * size));
    }
    return;
  }
  float scale = r.scale ? r.scale[r.slot(place)] : 1.0f;
  memset(to + whole - UNIT, 0, 4 * UNIT);
  int i = 0;
  if (r.type == HEADWAY_INT8)
    for (; i + W <= width; i += W)
      put<HALF>(to, i, __builtin_convertvector(read_bytes<true>(from + i), vf) * scale);
  for (; i < width; i++) {
    float x = r.type == HEADWAY_FLOAT32    ? ((const float*)from)[i]
              : r.type == HEADWAY_BFLOAT16 ? from_bf16(((const uint16_t*)from)[i])
                                           : scale * ((const int8_t*)from)[i];
    if (HALF)
      ((uint16_t*)to)[i] = to_bf16(x);
    else
      to[i] = x;
  }
}

// Returns a mask with a nonzero lane if some of `count` words (a multiple of 16) holds a NaN or an infinity: an exponent
// field of all ones.
template <bool HALF>
INLINE vi not_numbers(const float* w, int count) {
  vi found = {};
  for (int i = 0; i < count; i += W) {
    vi x = load_int((const int32_t*)w + i);
    found |= (x & 0x7F800000) == 0x7F800000;
    if (HALF) found |= (x & 0x7F80) == 0x7F80;
  }
  return found;
}

// Transposes 16 by 16 words: out[c * LINE + r] = rows[r * step + c].
INLINE void transpose16(const float* rows, int64_t step, float* out) {
  for (int from = 0; from < UNIT * UNIT / W; from += W) {
    const float* corner = rows + from / UNIT * W * step + from % UNIT;
    vf a[W], b[W];
    UNROLL for (int i = 0; i < W; i++) a[i] = load(corner + i * step);
    UNROLL for (int i = 0; i < W; i += 2) b[i] = low_lanes(a[i], a[i + 1]), b[i + 1] = high_lanes(a[i], a[i + 1]);
    UNROLL for (int i = 0; i < W; i++) {
      const vf &x = b[i / 4 * 4 + i % 4 / 2], &y = b[i / 4 * 4 + i % 4 / 2 + 2];
      a[i] = i % 2 ? high_pairs(x, y) : low_pairs(x, y);
    }
    // now lanes 4 m .. 4 m + 3 of a[4 i + c] are column 4 m + c of rows 4 i .. 4 i + 3
    auto regroup = [&]() __attribute__((always_inline)) {
      UNROLL for (int i = 0; i < W / 2; i++) {
        const vf &x = a[i / 4 * 8 + i % 4], &y = a[i / 4 * 8 + i % 4 + 4];
        b[i] = even_fours(x, y), b[i + W / 2] = odd_fours(x, y);
      }
      UNROLL for (int i = 0; i < W; i++) a[i] = b[i];
    };
    for (int fours = 1; fours < W / 4; fours *= 2) regroup();
    UNROLL for (int i = 0; i < W; i++) store(out + (from % UNIT + i) * LINE + from / UNIT * W, a[i]);
  }
}

// Writes the sum of the W lanes of each of 16 rows to out.
INLINE void sums_of(const float (*rows)[W], float* out) {
  if (W < 16) {
    for (int i = 0; i < 16; i++) out[i] = sum_of(load(rows[i]));
    return;
  }
  alignas(64) float columns[16 * LINE];
  transpose16(rows[0], W, columns);
  vf total = load(columns);
  UNROLL for (int i = 1; i < 16; i++) total += load(columns + i * LINE);
  store(out, total);
}

// Packs 16 rows of words, `step` words apart, as a panel: out [count][LINE]. It writes `count` words of each row, and reads
// whole units.
INLINE void pack_panel(const float* rows, int64_t step, int count, float* out) {
  int at = 0;
  for (; at + 16 <= count; at += 16) transpose16(rows + at, step, out + at * LINE);
  if (at < count) {
    alignas(64) float last[16 * LINE];
    transpose16(rows + at, step, last);
    for (int i = 0; i < count - at; i++) memcpy(out + (at + i) * LINE, last + i * LINE, 4 * UNIT);
  }
}

// Packs 16 slots for a contraction over slots: out [16 steps][whole columns], or in bf16 [8 steps][whole columns], where
// each word is a pair: the element of slot 2 i and that of slot 2 i + 1.
template <bool HALF>
INLINE void pack_rows(const float* rows, int64_t step, int columns, float* out) {
  int whole = whole_units(columns);
  if (!HALF) {
    for (int i = 0; i < 16; i++) copy_words(out + i * whole, rows + i * step, whole);
    return;
  }
  if constexpr (HALF)
    for (int i = 0; i < 8; i++) {
      const uint16_t* pair = (const uint16_t*)(rows + 2 * i * step);
      interleave(out + i * whole, pair, pair + 2 * step, whole);
    }
}

}  // namespace
