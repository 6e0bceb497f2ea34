// The keys and values of a call in blocks of 64, packed when they are first needed and kept while there is room.
#pragma once
#include <stdlib.h>

#include "mask.h"
#include "pack.h"

namespace {

INLINE float* floats(int64_t count) { return (float*)aligned_alloc(64, (size_t)(count * 4 + 63) / 64 * 64); }

constexpr int TILE = 96;       // rows of a tile: a row is one query of one head
constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;

// What a row of a tile is: query `place` (in block order) of head `head`.
struct Row {
  int32_t place, head, query;  // query: which of the tile's queries, whose mask bits it shares
};

// The sizes that follow from a call and from whether products are of bf16 pairs.
struct Sizes {
  int d, dv;          // words of a row of q or k, of d_out or v: steps of a contraction
  int wide_d, wide_dv;  // columns in whole units
  int steps;          // steps in which a panel of 16 slots is contracted
  int64_t blocks, group;

  static Sizes of(const headway_call& c, bool half) {
    return {words_of(half, (int)c.dim),
            words_of(half, (int)c.dim_v),
            whole_units((int)c.dim),
            whole_units((int)c.dim_v),
            half ? 8 : 16,
            (c.keys.count + BLOCK - 1) / BLOCK,
            c.heads / c.kv_heads};
  }
};

struct Block {
  const float *k_panels, *v_rows, *v_panels, *k_rows;
  bool k_finite, v_finite;
};

// A direct-mapped store of packed blocks: block n of a kv head lies in place n modulo the capacity.
template <bool HALF, bool BACKWARD>
struct Blocks {
  const headway_call& c;
  Sizes z;
  int64_t capacity, piece_k, piece_v;
  float *data, *zero, *rows;
  int64_t* tags;
  uint8_t* finite;

  Blocks(const headway_call& call, int64_t most) : c(call), z(Sizes::of(call, HALF)) {
    capacity = 1;
    while (capacity < most && capacity < z.blocks) capacity *= 2;
    piece_k = (int64_t)4 * z.steps * z.wide_d;
    if ((int64_t)BLOCK * z.d > piece_k) piece_k = (int64_t)BLOCK * z.d;
    piece_v = (int64_t)4 * z.steps * z.wide_dv;
    if ((int64_t)BLOCK * z.dv > piece_v) piece_v = (int64_t)BLOCK * z.dv;
    int64_t widest = (z.wide_d > z.wide_dv ? z.wide_d : z.wide_dv) + UNIT;
    data = floats(capacity * size());
    zero = floats(17 * widest);
    rows = zero ? zero + widest : nullptr;
    tags = (int64_t*)calloc((size_t)capacity, 8);
    finite = (uint8_t*)calloc((size_t)capacity, 1);
    if (zero) memset(zero, 0, (size_t)widest * 4);
  }
  ~Blocks() {
    free(data);
    free(zero);
    free(tags);
    free(finite);
  }
  bool ready() const { return data && zero && tags && finite; }
  int64_t size() const { return (BACKWARD ? 2 : 1) * (piece_k + piece_v); }

  // Will `get` pack, and so overwrite what lies in the place of this block?
  bool misses(int64_t b, int64_t kv, int64_t n) const { return tags[n & (capacity - 1)] != tag_of(b, kv, n); }

  Block get(int64_t b, int64_t kv, int64_t n, const Tokens& keys) {
    int64_t at = n & (capacity - 1), tag = tag_of(b, kv, n);
    float* to = data + at * size();
    if (tags[at] != tag) {
      tags[at] = tag;
      finite[at] = pack(b, kv, n, keys, to);
    }
    float* v = to + piece_k;
    return {to, v, v + piece_v, v + 2 * piece_v, (finite[at] & 1) != 0, (finite[at] & 2) != 0};
  }

 private:
  int64_t tag_of(int64_t b, int64_t kv, int64_t n) const { return ((b * c.kv_heads + kv) * z.blocks + n) + 1; }

  uint8_t pack(int64_t b, int64_t kv, int64_t n, const Tokens& keys, float* to) {
    const float* scales[2] = {c.k_scale, c.v_scale};
    int64_t at = (b * c.kv_heads + kv) * c.keys.count;
    Rows k = Rows::of(c.k, (int)c.kv_type, b, kv, (int)c.dim, keys.order, scales[0] ? scales[0] + at : nullptr);
    Rows v = Rows::of(c.v, (int)c.kv_type, b, kv, (int)c.dim_v, keys.order, scales[1] ? scales[1] + at : nullptr);
    float* v_to = to + piece_k;
    vi bad_k = {}, bad_v = {};
    for (int p = 0; p < BLOCK / UNIT; p++) {
      int64_t begin = n * BLOCK + p * UNIT;
      if (begin >= keys.count) break;
      fetch_ahead(k, v, begin + BLOCK, keys);
      const float* from[UNIT];
      take(k, begin, keys, from, &bad_k);
      pack_panel(from, z.d, to + p * UNIT);
      if (BACKWARD) pack_rows<HALF>(from, (int)c.dim, v_to + 2 * piece_v + (int64_t)p * z.steps * z.wide_d);
      take(v, begin, keys, from, &bad_v);
      pack_rows<HALF>(from, (int)c.dim_v, v_to + (int64_t)p * z.steps * z.wide_dv);
      if (BACKWARD) pack_panel(from, z.dv, v_to + piece_v + p * UNIT);
    }
    return (bits_of(bad_k) ? 0 : 1) | (bits_of(bad_v) ? 0 : 2);
  }

  void take(const Rows& r, int64_t begin, const Tokens& keys, const float** from, vi* bad) {
    int width = whole_units(words_of(HALF, r.width));
    for (int i = 0; i < UNIT; i++) {
      int64_t place = begin + i;
      bool there = place < keys.count && keys.index[place] >= 0;
      from[i] = there ? words<HALF>(r, place, rows + (int64_t)i * (width + 0)) : zero;
      if (there) *bad |= not_numbers<HALF>(from[i], width);
    }
  }

  void fetch_ahead(const Rows& k, const Rows& v, int64_t begin, const Tokens& keys) const {
    int64_t bytes = c.kv_type == HEADWAY_FLOAT32 ? 4 : c.kv_type == HEADWAY_BFLOAT16 ? 2 : 1;
    for (int i = 0; i < UNIT && begin + i < keys.count; i++) {
      const char *x = k.at(begin + i), *y = v.at(begin + i);
      for (int64_t at = 0; at < c.dim * bytes; at += 64) __builtin_prefetch(x + at);
      for (int64_t at = 0; at < c.dim_v * bytes; at += 64) __builtin_prefetch(y + at);
    }
  }
};

// One row of a result, times a factor.
INLINE void write_words(const headway_tensor& t, int64_t type, int64_t b, int64_t head, int64_t slot,
                        const float* from, int count, float factor) {
  bool half = type == HEADWAY_BFLOAT16;
  int64_t at = b * t.batch + head * t.head + slot * t.slot;
  write_as((char*)t.data + at * (half ? 2 : 4), half, from, count, factor);
}

// A row of queries (or of the gradient of the result) as whole units of words; 0 for an empty slot.
template <bool HALF>
INLINE void take_query(const Rows& r, int64_t place, bool there, bool negate, float* to) {
  int width = whole_units(words_of(HALF, r.width));
  if (!there) {
    memset(to, 0, (size_t)width * 4);
    return;
  }
  const float* from = words<HALF>(r, place, to);
  if (from != to) copy_words(to, from, width);
  if (negate)
    for (int i = 0; i < width; i++) {
      uint32_t bits;
      memcpy(&bits, to + i, 4);
      bits ^= HALF ? 0x80008000u : 0x80000000u;
      memcpy(to + i, &bits, 4);
    }
}

}  // namespace
