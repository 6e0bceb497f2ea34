// The keys and values of a call in blocks of 64, packed when first needed and kept while there is room.
#pragma once
#include "mask.h"
#include "memory.h"
#include "prefetch.h"

namespace {

constexpr int TILE = 96;       // rows of a tile; a row is one query of one head
constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;

// A row of a tile: the query at `place` (in block order) of head `head`.
struct Row {
  int32_t place, head, query;  // query: index among the tile's queries; rows of several heads share its mask bits
};

// Sizes that follow from a call and from whether products are of bf16 pairs.
struct Sizes {
  int d, dv;          // words of a row of q or k, and of d_out or v: steps of a contraction
  int wide_d, wide_dv;  // columns rounded up to whole units
  int steps;          // steps of a contraction over the 16 slots of a panel
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

// A packed block. The forward reads keys as panels and values as rows; the backward reads keys as both, values as panels.
struct Block {
  const float *k_panels, *v_rows, *v_panels, *k_rows;
  // whether all keys, and all values, are finite
  bool k_finite, v_finite;
};

// Calls f(Count<whether products are of bf16 pairs>).
template <class F>
INLINE int by_words(const headway_call& c, F f) {
  if constexpr (HAS_PAIRS)
    if (c.type == HEADWAY_BFLOAT16) return f(Count<true>());
  return f(Count<false>());
}

// Returns the error code of a call that this library does not support, else 0.
INLINE int unknown(const headway_call& c) {
  return c.plan.tile > TILE || c.dim > WIDEST || c.dim_v > WIDEST || c.type > HEADWAY_BFLOAT16 ? 3 : 0;
}

// Returns the index in the plan of tile t of batch row b.
INLINE int64_t tile_of(const headway_plan& p, int64_t b, int64_t t) { return (p.rows > 1 ? b * p.tiles : 0) + t; }

// Returns the number of blocks that a tile reads.
INLINE int64_t blocks_of(const headway_plan& p, int64_t tile) {
  int64_t blocks = 0;
  for (int32_t r = p.first[tile]; r < p.first[tile + 1]; r++) blocks += (p.end[r] - p.begin[r] + BLOCK - 1) / BLOCK;
  return blocks;
}

// Calls f(run, first key) for blocks first .. last - 1 of those that a tile reads.
template <class F>
INLINE void each_block(const headway_plan& p, int64_t tile, int64_t first, int64_t last, F f) {
  int64_t before = 0;
  for (int32_t r = p.first[tile]; r < p.first[tile + 1] && before < last; r++) {
    const int64_t blocks = (p.end[r] - p.begin[r] + BLOCK - 1) / BLOCK;
    for (int64_t i = before < first ? first - before : 0; i < blocks && before + i < last; i++)
      f(r, p.begin[r] + i * BLOCK);
    before += blocks;
  }
}

// Returns the largest number of blocks that a tile reads, without the first `front` tiles of each row, and two more: with
// room for so many, packed blocks stay while neighbouring tiles share them.
INLINE int64_t most_blocks(const headway_plan& p, int64_t front = 0) {
  int64_t most = 1;
  for (int64_t t = 0; t < p.rows * p.tiles; t++) {
    int64_t blocks = t % p.tiles < front ? 0 : blocks_of(p, t);
    most = blocks > most ? blocks : most;
  }
  return most + 2;
}

// Returns a number of blocks above which a tile counts as reading far more than the others (global queries): four times the
// mean, at least 32.
INLINE int64_t usual_blocks(const headway_plan& p) {
  int64_t tiles = p.rows * p.tiles, all = 0;
  for (int64_t t = 0; t < tiles; t++) all += blocks_of(p, t);
  return tiles && 4 * all > 32 * tiles ? 4 * all / tiles : 32;
}

// Returns the end of the last run of a tile: its keys before that have been read once the tile is done.
INLINE int64_t reached(const headway_plan& p, int64_t tile) {
  return p.first[tile + 1] > p.first[tile] ? p.end[p.first[tile + 1] - 1] : 0;
}

// Returns the first key of the block after the one at k, in run r or the next; past all keys if there is none.
INLINE int64_t next_of(const headway_plan& p, int32_t r, int32_t end, int64_t k) {
  return k + BLOCK < p.end[r] ? k + BLOCK : r + 1 < end ? p.begin[r + 1] : INT64_MAX / 2;
}

// A direct-mapped cache of packed blocks: block n of a kv head is stored at n modulo the capacity.
template <bool HALF, bool BACKWARD>
struct Blocks {
  const headway_call& c;
  Sizes z;
  int64_t capacity, places, piece_k, piece_v;
  Owned<float> data, rows;
  Owned<int64_t> tags;
  Owned<uint32_t> used;  // [capacity] value of `now` when the place was last handed out
  uint32_t now = 0;
  Owned<uint8_t> finite;
  bool streams;  // few queries: the speed of reading keys and values decides

  Blocks(const headway_call& call, int64_t most) : c(call), z(Sizes::of(call, HALF)) {
    capacity = 1;
    while (capacity < most && capacity < z.blocks) capacity *= 2;
    places = capacity;
    piece_k = (int64_t)4 * z.steps * z.wide_d;
    if ((int64_t)BLOCK * z.d > piece_k) piece_k = (int64_t)BLOCK * z.d;
    piece_v = (int64_t)4 * z.steps * z.wide_dv;
    if ((int64_t)BLOCK * z.dv > piece_v) piece_v = (int64_t)BLOCK * z.dv;
    int64_t widest = (z.wide_d > z.wide_dv ? z.wide_d : z.wide_dv) + UNIT;
    streams = c.queries.count * z.group < 32;
    data = floats(capacity * size());
    rows = floats(UNIT * widest);
    tags = (int64_t*)calloc((size_t)capacity, 8);
    used = (uint32_t*)calloc((size_t)capacity, 4);
    finite = (uint8_t*)calloc((size_t)capacity, 1);
  }
  // Returns room for the words of a block: the cache's first place, whose block is evicted.
  float* scratch() {
    tags[0] = 0;
    return data;
  }
  bool ready() const { return data && rows && tags && used && finite; }
  int64_t size() const { return (BACKWARD ? 2 : 1) * piece_k + piece_v; }

  // Prefetches block n while `groups` groups of rows are computed.
  void look_ahead(Ahead& to, int64_t b, int64_t kv, int64_t n, const Tokens& keys, int64_t groups) const {
    bool there = n < z.blocks, packed = there && !misses(b, kv, n), raw = there && !packed && !streams;
    int64_t begin = raw ? n * BLOCK : 0, end = raw ? begin + BLOCK : 0;
    if (end > keys.count) end = keys.count;
    to.block();
    if (packed && BACKWARD) to.words(data + (n & (places - 1)) * size(), size(), groups);
    to.rows(key_rows(b, kv, keys), begin, end, groups);
    to.rows(value_rows(b, kv, keys), begin, end, groups);
  }
  // Prefetches rows of keys and values before they are packed.
  void look_ahead_rows(Ahead& to, int64_t b, int64_t kv, const Tokens& keys, int64_t begin, int64_t end,
                       int64_t groups) const {
    if (end > keys.count) end = keys.count;
    to.rows_of_tile(key_rows(b, kv, keys), begin, end, groups);
    to.rows_of_tile(value_rows(b, kv, keys), begin, end, groups);
  }

  // Limits the cache to `most` blocks, rounded up to a power of two, from now on: fewer blocks stay in a nearer cache.
  void keep(int64_t most) {
    for (places = 1; places < most && places < capacity;) places *= 2;
  }
  // Blocks that are handed out from now on must stay, until the next start().
  void start() { now++; }
  // Returns whether `get` would overwrite a block that must stay.
  bool collides(int64_t b, int64_t kv, int64_t n) const { return used[n & (places - 1)] == now && misses(b, kv, n); }

  // Returns block n, packed now unless it is cached.
  Block get(int64_t b, int64_t kv, int64_t n, const Tokens& keys) {
    int64_t at = n & (places - 1), tag = tag_of(b, kv, n);
    float* to = data + at * size();
    used[at] = now;
    if (tags[at] != tag) tags[at] = tag, finite[at] = pack(b, kv, n, keys, to);
    const float* v = to + piece_k;
    return {to, BACKWARD ? nullptr : v, v, v + piece_v, (finite[at] & 1) != 0, (finite[at] & 2) != 0};
  }

  Rows key_rows(int64_t b, int64_t kv, const Tokens& keys) const {
    return rows_of(c.k, c.k_scale, c.dim, b, kv, keys);
  }
  Rows value_rows(int64_t b, int64_t kv, const Tokens& keys) const {
    return rows_of(c.v, c.v_scale, c.dim_v, b, kv, keys);
  }

 private:
  Rows rows_of(const headway_tensor& t, const float* scales, int64_t width, int64_t b, int64_t kv, const Tokens& keys) const {
    const float* scale = scales ? scales + b * c.scale_batch + kv * c.scale_head : nullptr;
    return Rows::of(t, (int)c.kv_type, b, kv, (int)width, keys.order, scale);
  }
  bool misses(int64_t b, int64_t kv, int64_t n) const { return tags[n & (places - 1)] != tag_of(b, kv, n); }

  int64_t tag_of(int64_t b, int64_t kv, int64_t n) const { return ((b * c.kv_heads + kv) * z.blocks + n) + 1; }

  // Packs a block. Returns in bit 0 whether its keys are finite (checked for the backward only), in bit 1 its values.
  uint8_t pack(int64_t b, int64_t kv, int64_t n, const Tokens& keys, float* to) {
    Rows k = key_rows(b, kv, keys), v = value_rows(b, kv, keys);
    float* v_to = to + piece_k;
    vi bad_k = {}, bad_v = {};
    for (int p = 0; p < BLOCK / UNIT; p++) {
      int64_t begin = n * BLOCK + p * UNIT;
      if (begin >= keys.count) break;
      Sixteen x = take(k, begin, keys);
      pack_panel(x.at, x.step, z.d, to + p * panel_size(z.d));
      if (BACKWARD) {
        pack_rows<HALF>(x.at, x.step, (int)c.dim, v_to + piece_v + (int64_t)p * z.steps * z.wide_d);
        bad_k |= x.template not_numbers_of<HALF>();
      }
      x = take(v, begin, keys);
      bad_v |= x.template not_numbers_of<HALF>();
      if (BACKWARD)
        pack_panel(x.at, x.step, z.dv, v_to + p * panel_size(z.dv));
      else
        pack_rows<HALF>(x.at, x.step, (int)c.dim_v, v_to + (int64_t)p * z.steps * z.wide_dv);
    }
    return (uint8_t)(!bits_of(bad_k) | !bits_of(bad_v) << 1);
  }

  // 16 rows of words, `step` words apart, `width` words each.
  struct Sixteen {
    const float* at;
    int64_t step, width;

    template <bool H>
    vi not_numbers_of() const {
      vi bad = {};
      for (int i = 0; i < UNIT; i++) bad |= not_numbers<H>(at + i * step, (int)width);
      return bad;
    }
  };

  // Returns the 16 rows from `begin` on: in place, if they can be read there, else copied to `rows`, 0 for empty slots.
  Sixteen take(const Rows& r, int64_t begin, const Tokens& keys) const {
    int64_t width = whole_units(words_of(HALF, r.width));
    bool as_is = !streams && begin + UNIT <= keys.count && r.stride % 4 == 0 &&
                 r.type == (HALF ? HEADWAY_BFLOAT16 : HEADWAY_FLOAT32) && r.width * bytes_of(r.type) == width * 4;
    int64_t apart = as_is ? r.slot(begin + 1) - r.slot(begin) : 0;
    for (int i = 0; as_is && i < UNIT; i++)
      as_is = keys.index[begin + i] >= 0 && r.slot(begin + i) - r.slot(begin) == i * apart;
    if (as_is) return {(const float*)r.at(begin), apart * r.stride / 4, width};
    for (int i = 0; i < UNIT; i++) {
      int64_t place = begin + i;
      float* to = rows + i * width;
      if (place < keys.count && keys.index[place] >= 0) {
        read_words<HALF>(r, place, to);
        if (streams) fetch_onward(r.at(place), r.width * bytes_of(r.type));
      } else {
        memset(to, 0, (size_t)width * 4);
      }
    }
    return {rows, width, width};
  }
};

// Writes one row of a result, times a factor.
INLINE void write_words(const headway_tensor& t, int64_t type, int64_t b, int64_t head, int64_t slot,
                        const float* from, int count, float factor) {
  bool half = type == HEADWAY_BFLOAT16;
  int64_t at = b * t.batch + head * t.head + slot * t.slot;
  write_as((char*)t.data + at * (half ? 2 : 4), half, from, count, factor);
}

// Reads a row of queries (or of the gradient of the output) as whole units of words; 0 for an empty slot. `negate` flips the
// sign bits: a negative scale is used as its absolute value with negated queries.
template <bool HALF>
INLINE void take_query(const Rows& r, int64_t place, bool there, bool negate, float* to) {
  int width = whole_units(words_of(HALF, r.width));
  if (!there) {
    memset(to, 0, (size_t)width * 4);
    return;
  }
  read_words<HALF>(r, place, to);
  if (negate)
    for (int i = 0; i < width; i++) {
      uint32_t bits;
      memcpy(&bits, to + i, 4);
      bits ^= HALF ? 0x80008000u : 0x80000000u;
      memcpy(to + i, &bits, 4);
    }
}

}  // namespace
