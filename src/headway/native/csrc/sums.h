// How the backward is cut into pieces of work, and where each sums the gradients of its keys and values.
#pragma once
#include "blocks.h"

namespace {

// Pieces of work aimed at, when tiles are many enough: as many where pieces share few keys, and where they share many,
// since each sums the gradients of all its keys.
constexpr int64_t ITEMS = 32, SHARING_ITEMS = 16;

// What packed keys and sums of gradients may take, so that they stay in a cache while tiles pass by.
constexpr int64_t CACHED = 1 << 20;

// What a split reads of the keys, in blocks: those before `pinned`, which tiles go back to again and again (sinks), and
// those from `first` to `last`. Of the latter no other split reads those from `own_first` to `own_last`; `live` of
// these are summed at a time.
struct Part {
  int64_t pinned, first, last, own_first, own_last, live;

  int64_t owned() const { return own_last - own_first; }
  bool owns(int64_t n) const { return n >= own_first && n < own_last; }
  bool reads(int64_t n) const { return n < pinned || (n >= first && n < last); }
  // Sums are kept of the blocks that are read but not owned: how many, and which of them is block n.
  int64_t kept() const { return pinned + last - first - owned(); }
  int64_t place(int64_t n) const {
    return n < pinned ? n : pinned + n - first - (n >= own_last ? owned() : 0);
  }
};

struct Work {
  const headway_call& c;
  Sizes z;
  int64_t splits, items;
  int64_t packed;   // blocks of keys that are kept packed
  int64_t stretch;  // blocks of keys that all tiles read before the next ones
  Part* parts;      // [row of the plan][split]

  Work(const headway_call& call, bool half) : c(call), z(Sizes::of(call, half)) {
    int64_t words = half ? BLOCK / 2 : BLOCK;
    int64_t room = CACHED / ((words * (2 * z.wide_d + z.wide_dv) + BLOCK * row_size()) * 4);
    packed = most_blocks(c.plan), stretch = z.blocks;
    if (packed > 2 * room) packed = room + 2, stretch = room;
    parts = (Part*)malloc((size_t)(c.plan.rows * (ITEMS + 1)) * sizeof(Part));
    if (!parts) return;
    split_into(ITEMS);
    int64_t blocks = 0;
    for (int64_t s = 0; s < splits; s++) blocks += parts[s].last - parts[s].first;
    if (2 * blocks > 3 * z.blocks) split_into(SHARING_ITEMS);
  }
  ~Work() { free(parts); }

  int64_t tile_of(int64_t split) const { return c.plan.tiles * split / splits; }
  int64_t row_size() const { return z.wide_d + z.wide_dv; }
  int64_t block_size() const { return BLOCK * row_size(); }
  const Part& part(int64_t b, int64_t split) const { return parts[(c.plan.rows > 1 ? b * splits : 0) + split]; }

  // The first block from `from` on that a tile reads; the number of blocks if there is none.
  int64_t first_from(int64_t from, int64_t tile) const {
    const headway_plan& p = c.plan;
    for (int32_t r = p.first[tile]; r < p.first[tile + 1]; r++)
      if ((p.end[r] + BLOCK - 1) / BLOCK > from) return p.begin[r] / BLOCK > from ? p.begin[r] / BLOCK : from;
    return z.blocks;
  }

 private:
  void split_into(int64_t aim) {
    int64_t heads = c.batch * c.kv_heads;
    splits = (aim + heads - 1) / heads;
    if (splits > c.plan.tiles / 10) splits = c.plan.tiles / 10;
    if (splits < 1) splits = 1;
    items = heads * splits;
    for (int64_t row = 0; row < c.plan.rows; row++) {
      Part* of = parts + row * splits;
      int64_t pinned = pinned_of(row);
      for (int64_t s = 0; s < splits; s++) of[s] = read_by(row, s, pinned);
      for (int64_t s = 0; s < splits; s++) own(of, s);
    }
  }

  // How many blocks the last tile reads from the first one on, before it leaves some out.
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

  Part read_by(int64_t row, int64_t split, int64_t pinned) const {
    const headway_plan& p = c.plan;
    Part x = {pinned, z.blocks, pinned, 0, 0, 0};
    int64_t lowest = 0;
    bool onward = stretch == z.blocks;
    for (int64_t t = row * p.tiles + tile_of(split), end = row * p.tiles + tile_of(split + 1); t < end; t++) {
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

  void own(Part* of, int64_t split) const {
    Part& x = of[split];
    x.own_first = x.first, x.own_last = x.last;
    for (int64_t s = 0; s < splits; s++) {
      if (of[s].first == of[s].last) continue;
      if (s < split && of[s].last > x.own_first) x.own_first = of[s].last;
      if (s > split && of[s].first < x.own_last) x.own_last = of[s].first;
    }
    if (x.own_first >= x.own_last) x.own_first = x.own_last = x.last;
    if (x.live > x.owned()) x.live = x.owned();
  }
};

// Where the sums that are kept of each item lie, and the gradients of score values for each (row of the batch, split).
struct Sums {
  const Work& w;
  float* data;
  int64_t *at, tables;
  float* table;

  explicit Sums(const Work& work) : w(work), data(nullptr), at(nullptr), tables(0), table(nullptr) {
    at = (int64_t*)malloc((size_t)(w.items + 1) * 8);
    int64_t size = 0;
    for (int64_t i = 0; at && i < w.items; i++) {
      at[i] = size;
      size += w.part(i / w.splits / w.c.kv_heads, i % w.splits).kept() * w.block_size();
    }
    if (size) data = floats(size);
    for (int64_t n = 0; n < w.c.score_count; n++)
      if (w.c.scores[n].gradient) tables += w.c.heads * (2 * w.c.scores[n].reach + 1);
    if (tables) table = (float*)calloc((size_t)(tables * w.c.batch * w.splits), 4);
    if (size && !data) free(at), at = nullptr;
    if (tables && !table) free(at), at = nullptr;
  }
  ~Sums() {
    free(at);
    free(data);
    free(table);
  }
  float* kept(int64_t head, int64_t split) const { return data + at[head * w.splits + split]; }
  void gradients(int64_t b, int64_t split, float** to) const {
    float* next = table ? table + (b * w.splits + split) * tables : nullptr;
    for (int64_t n = 0; n < w.c.score_count; n++) {
      to[n] = w.c.scores[n].gradient ? next : nullptr;
      if (to[n]) next += w.c.heads * (2 * w.c.scores[n].reach + 1);
    }
  }
  void add_tables() const {
    for (int64_t i = 0; i < w.c.batch * w.splits; i++) {
      float* from[8];
      gradients(i / w.splits, i % w.splits, from);
      for (int64_t n = 0; n < w.c.score_count; n++)
        for (int64_t j = 0; from[n] && j < w.c.heads * (2 * w.c.scores[n].reach + 1); j++)
          w.c.scores[n].gradient[j] += from[n][j];
    }
  }
};

}  // namespace
