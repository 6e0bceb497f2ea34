// Scheduling of the backward: work items, and where each accumulates the gradients of its keys and values.
#pragma once
#include "blocks.h"

namespace {

// Number of work items to aim at if there are enough tiles: ITEMS if items share few keys, SHARING_ITEMS if they share many,
// since each item accumulates the gradients of all its keys.
constexpr int64_t ITEMS = 32, SHARING_ITEMS = 16;

// Maximum number of tiles at the front of a row that may read far more keys than others (global queries), and number of
// blocks that are collected for them.
constexpr int64_t FRONT = 2, WAITING_BLOCKS = 4;

// Bytes that packed keys and gradient sums may take, so that they stay in a cache while tiles pass.
constexpr int64_t CACHED = 1 << 20;

// The key blocks that a split reads: those before `pinned`, which tiles return to again and again (sinks), and those from
// `first` to `last`. Of the latter no other split reads blocks own_first .. own_last - 1; `live` of these are accumulated
// at a time. The keys of the tiles at the front are divided among the splits: this one has share_first .. share_last - 1.
// Example: splits that read 2-9 and 7-15 own 2-6 and 10-15.
struct Part {
  int64_t pinned, first, last, own_first, own_last, live, share_first, share_last;

  int64_t owned() const { return own_last - own_first; }
  bool owns(int64_t n) const { return n >= own_first && n < own_last; }
  bool reads(int64_t n) const { return n < pinned || (n >= first && n < last); }
  // Blocks that are read but not owned have sums that are kept for `gather`: their number, and the index of block n among
  // them. With pinned 1, first 4, last 10, own_first 6, own_last 8: block 0 is 0, blocks 4, 5 are 1, 2, and blocks 8, 9 are 3, 4.
  int64_t kept() const { return pinned + last - first - owned(); }
  int64_t place(int64_t n) const {
    return n < pinned ? n : pinned + n - first - (n >= own_last ? owned() : 0);
  }
};

// How the tiles of each (batch row, kv head) are split into items.
struct Work {
  const headway_call& c;
  Sizes z;
  int64_t splits, items;
  int64_t front;    // tiles at the front of every row, which all splits process, each with its share of the keys
  int64_t packed;   // blocks of keys that are kept packed
  int64_t stretch;  // blocks of keys that all tiles read before the next ones
  Owned<Part> parts;  // [row of the plan][split]

  Work(const headway_call& call, bool half) : c(call), z(Sizes::of(call, half)) {
    parts = (Part*)malloc((size_t)(c.plan.rows * (ITEMS + 1)) * sizeof(Part));
    if (parts && !cut(half, far_tiles())) cut(half, 0);
  }

  int64_t first_tile(int64_t split) const { return front + (c.plan.tiles - front) * split / splits; }
  int64_t row_size() const { return z.wide_d + z.wide_dv; }
  int64_t block_size() const { return BLOCK * row_size(); }
  const Part& part(int64_t b, int64_t split) const { return parts[(c.plan.rows > 1 ? b * splits : 0) + split]; }

  // Returns the first block from `from` on that a tile reads, or the number of blocks if there is none.
  int64_t first_from(int64_t from, int64_t tile) const {
    const headway_plan& p = c.plan;
    for (int32_t r = p.first[tile]; r < p.first[tile + 1]; r++)
      if ((p.end[r] + BLOCK - 1) / BLOCK > from) return p.begin[r] / BLOCK > from ? p.begin[r] / BLOCK : from;
    return z.blocks;
  }

 private:
  // Returns the number of tiles at the front of some row that read far more than others, or 0 if they are more than FRONT.
  int64_t far_tiles() const {
    const headway_plan& p = c.plan;
    int64_t n = 0, usual = usual_blocks(p);
    auto far = [&](int64_t tile) {
      for (int64_t row = 0; row < p.rows; row++)
        if (blocks_of(p, row * p.tiles + tile) > usual) return true;
      return false;
    };
    while (n < p.tiles && n <= FRONT && far(n)) n++;
    return n > FRONT ? 0 : n;
  }

  // Chooses stretch and splits; returns false if the keys of the tiles at the front cannot be divided among the splits.
  bool cut(bool half, int64_t tiles_at_front) {
    int64_t words = half ? BLOCK / 2 : BLOCK;
    int64_t room = CACHED / ((words * (2 * z.wide_d + z.wide_dv) + BLOCK * row_size()) * 4);
    front = tiles_at_front;
    packed = most_blocks(c.plan, front), stretch = z.blocks;
    if (packed > 2 * room) packed = room + 2, stretch = room;
    if (front && stretch < z.blocks) return false;
    if (!split_into(ITEMS)) return false;
    int64_t blocks = 0;
    for (int64_t s = 0; s < splits; s++) blocks += parts[s].last - parts[s].first;
    return 2 * blocks <= 3 * z.blocks || split_into(SHARING_ITEMS);
  }

  bool split_into(int64_t aim) {
    int64_t heads = c.batch * c.kv_heads;
    splits = (aim + heads - 1) / heads;
    if (splits > c.plan.tiles / 10) splits = c.plan.tiles / 10;
    if (splits < 1) splits = 1;
    items = heads * splits;
    for (int64_t row = 0; row < c.plan.rows; row++) {
      Part* of = parts + row * splits;
      int64_t pinned = pinned_of(row);
      for (int64_t s = 0; s < splits; s++) of[s] = read_by(row, s, pinned);
      if (front && !share(of)) return false;
      for (int64_t s = 0; s < splits; s++) own(of, s);
    }
    return true;
  }

  // Divides the blocks of the tiles at the front: each block goes to the last split that begins with it or before it.
  bool share(Part* of) const {
    of[0].first = of[0].pinned;
    for (int64_t s = 0; s < splits; s++) {
      Part& x = of[s];
      x.share_first = s ? x.first : 0, x.share_last = s + 1 < splits ? of[s + 1].first : z.blocks;
      if (x.first >= x.last || x.share_last < x.first) return false;
      if (x.last < x.share_last) x.last = x.share_last;
    }
    return true;
  }

  // Returns the number of leading blocks that the last tile reads before a gap: the sinks of a sliding window.
  int64_t pinned_of(int64_t row) const {
    const headway_plan& p = c.plan;
    if (!p.tiles) return 0;
    int64_t tile = row * p.tiles + p.tiles - 1, reached = 0;
    for (int32_t r = p.first[tile]; r < p.first[tile + 1]; r++) {
      if (p.begin[r] > reached) return reached / BLOCK;
      reached = (p.end[r] + BLOCK - 1) / BLOCK * BLOCK;
    }
    return 0;
  }

  // Returns the blocks that a split reads, and how many it needs at a time.
  Part read_by(int64_t row, int64_t split, int64_t pinned) const {
    const headway_plan& p = c.plan;
    Part x = {pinned, z.blocks, pinned, 0, 0, 0, 0, 0};
    int64_t lowest = 0;
    bool onward = stretch == z.blocks;
    for (int64_t t = row * p.tiles + first_tile(split), end = row * p.tiles + first_tile(split + 1); t < end; t++) {
      int64_t first = first_from(pinned, t), last = (reached(p, t) + BLOCK - 1) / BLOCK;
      if (first >= last) continue;
      onward &= first >= lowest;
      lowest = first;
      x.first = first < x.first ? first : x.first, x.last = last > x.last ? last : x.last;
      x.live = last - first > x.live ? last - first : x.live;
    }
    if (x.first > x.last) x.first = x.last;
    if (!onward) x.live = stretch;
    return x;
  }

  // Sets the blocks that only this split reads.
  void own(Part* of, int64_t split) const {
    Part& x = of[split];
    x.own_first = x.first, x.own_last = x.last;
    for (int64_t s = 0; s < splits; s++) {
      if (of[s].first == of[s].last) continue;
      if (s < split && of[s].last > x.own_first) x.own_first = of[s].last;
      if (s > split && of[s].first < x.own_last) x.own_last = of[s].first;
    }
    if (x.own_first >= x.own_last) x.own_first = x.own_last = x.last;
    if (front) x.live += WAITING_BLOCKS;
    if (x.live > x.owned()) x.live = x.owned();
  }
};

// Memory for the sums that items keep, of gradients of keys and values and of the queries at the front, and for the
// gradients of score values of each (batch row, split).
struct Sums {
  const Work& w;
  Owned<float> data, table;
  Owned<int64_t> at;
  int64_t tables = 0;
  bool ready;

  explicit Sums(const Work& work) : w(work) {
    at = (int64_t*)malloc((size_t)(w.items + 1) * 8);
    int64_t sizes = 0;
    for (int64_t i = 0; at && i < w.items; i++) {
      at[i] = sizes;
      sizes += size(i / w.splits, i % w.splits);
    }
    if (sizes) data = floats(sizes);
    for (int64_t n = 0; n < w.c.score_count; n++)
      if (w.c.scores[n].gradient) tables += w.c.heads * (2 * w.c.scores[n].reach + 1);
    if (tables) table = (float*)calloc((size_t)(tables * w.c.batch * w.splits), 4);
    ready = at && (data || !sizes) && (table || !tables);
  }
  int64_t size(int64_t head, int64_t split) const {
    return front_size() + w.part(head / w.c.kv_heads, split).kept() * w.block_size();
  }
  int64_t front_size() const { return w.z.group * w.front * TILE * w.z.wide_d; }
  // [group][tile at the front][row][columns of keys] gradients of the queries at the front
  float* front(int64_t head, int64_t split) const { return data + at[head * w.splits + split]; }
  float* kept(int64_t head, int64_t split) const { return front(head, split) + front_size(); }
  void gradients(int64_t b, int64_t split, float** to) const {
    float* next = table ? table + (b * w.splits + split) * tables : nullptr;
    for (int64_t n = 0; n < w.c.score_count; n++) {
      to[n] = w.c.scores[n].gradient ? next : nullptr;
      if (to[n]) next += w.c.heads * (2 * w.c.scores[n].reach + 1);
    }
  }
  // Adds the gradients of score values of all splits, in order.
  void add_tables() const {
    for (int64_t i = 0; i < w.c.batch * w.splits; i++) {
      float* from[HEADWAY_MOST_SCORES];
      gradients(i / w.splits, i % w.splits, from);
      for (int64_t n = 0; n < w.c.score_count; n++)
        for (int64_t j = 0; from[n] && j < w.c.heads * (2 * w.c.scores[n].reach + 1); j++)
          w.c.scores[n].gradient[j] += from[n][j];
    }
  }
};

}  // namespace
