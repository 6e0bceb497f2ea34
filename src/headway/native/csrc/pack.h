// Packing: rows of a tensor into the two forms that products read.
//
//   panels  [word of the row][64 rows]:        contraction over the row (scores); a panel is 16 of the rows. Levels
//                                              that take one panel at a time: [panel][word of the row][16 rows]
//   rows    [step][unit of 16 columns][16]:    contraction over the slots (values); a step is one slot in float,
//                                              two in bf16, whose elements are interleaved
//
// What is read is in words: a float, or two bf16. A level without bf16 products packs floats.
#pragma once
#include "words.h"

namespace {

INLINE int64_t bytes_of(int type) { return type == HEADWAY_FLOAT32 ? 4 : type == HEADWAY_BFLOAT16 ? 2 : 1; }

// Rows of one (batch, head): where they are and how to read them.
struct Rows {
  const char* base;
  const int32_t* order;  // slot of a place, or null
  const float* scale;    // of int8 slots, or null
  int64_t stride;        // in bytes
  int type, width;       // elements per row

  static Rows of(const headway_tensor& t, int type, int64_t b, int64_t h, int width, const int32_t* order,
                 const float* scale = nullptr) {
    int64_t size = bytes_of(type);
    return {(const char*)t.data + (b * t.batch + h * t.head) * size, order, scale, t.slot * size, type, width};
  }
  int64_t slot(int64_t place) const { return order ? order[place] : place; }
  const char* at(int64_t place) const { return base + slot(place) * stride; }
  // Whole units of words, where words may lie, as they are computed with, row after row without a gap?
  template <bool HALF>
  bool side_by_side() const {
    return !order && type == (HALF ? HEADWAY_BFLOAT16 : HEADWAY_FLOAT32) && stride == width * bytes_of(type) &&
           stride % (4 * UNIT) == 0 && (uintptr_t)base % 4 == 0;
  }
};

INLINE int words_of(bool half, int width) { return half ? (width + 1) / 2 : width; }
INLINE int whole_units(int n) { return (n + UNIT - 1) / UNIT * UNIT; }

// The row at `place` as words, the last unit filled up with 0. Rows are copied before they are packed: that reads
// memory in its own order, as prefetchers like it.
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

// Is a NaN or an infinity among `count` words (a multiple of 16)?
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

// 16 by 16 numbers.
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
    // a[4 i + c]: column c of each four for rows 4 i .. 4 i + 3
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

// The sum of each of 16 rows of W lanes.
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

// Panel of 16 word rows, `step` words apart: out [count][LINE]; count words are written, whole units are read.
INLINE void pack_panel(const float* rows, int64_t step, int count, float* out) {
  int at = 0;
  for (; at + 16 <= count; at += 16) transpose16(rows + at, step, out + at * LINE);
  if (at < count) {
    alignas(64) float last[16 * LINE];
    transpose16(rows + at, step, last);
    for (int i = 0; i < count - at; i++) memcpy(out + (at + i) * LINE, last + i * LINE, 4 * UNIT);
  }
}

// 16 slots in the form for contraction over slots: out [16 or 8 steps][whole columns].
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
