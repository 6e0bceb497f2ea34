// Scheduling of the forward: work items, each some tiles of one (batch row, kv head), which threads take in turn.
#pragma once
#include "blocks.h"

namespace {

// Tiles first .. last - 1 of a (batch row, kv head), against blocks from .. to - 1 of those that they read, which are part
// `part` of them. rows > 1: as many batch rows from that one on, which read the same blocks.
struct Item {
  int64_t head, rows, first, last, from, to, part;
};

// Tiles of an item share packed blocks, so items are long; the last ones are short, so that all threads end together.
// Within a head the last tiles come first: with a causal mask, the longest. Few queries against many keys (decoding) are
// divided into parts of PART blocks instead, whose results are merged (split-KV). The order in which a tile adds does not
// depend on its item, and the parts of a row do not depend on other rows unless it shares a prefix with them: its result has
// the same bits whatever else is in the batch. For rows that share a prefix, blocks that all of them see whole are read once.
struct Work {
  static constexpr int64_t LONG = 1024, SHORT = 4;  // minimum queries of an item; minimum tiles of one of the last
  static constexpr int64_t ONCE = 16;               // packed blocks kept while a tile passes that reads far more than others
  static constexpr int64_t PART = 32;               // blocks; with only a few, the start of each part costs too much
  static constexpr int64_t LEAST = 4, ALIKE = 8;    // minimum blocks that are read once for several rows; blocks of such a part

  const headway_call& c;
  Sizes z;
  int64_t count = 0, usual, partials = 0;
  Owned<Item> items;
  Owned<int64_t> begins;  // [heads + 1] number of the first partial result of each head; part p is p after it
  Owned<float> partial;   // [partial result][row of the tile]: top, total, whole, out[wide_dv]

  int64_t partial_row() const { return 3 + z.wide_dv; }
  int64_t partial_rows() const { return (c.queries.count < TILE ? c.queries.count : TILE) * z.group; }
  int64_t heads() const { return c.batch * c.kv_heads; }
  // Number of partial results of a head; 0 if its result is written directly.
  int64_t parts_of(int64_t head) const { return begins[head + 1] - begins[head]; }

  Work(const headway_call& call, bool half) : c(call), z(Sizes::of(call, half)), usual(usual_blocks(call.plan)) {
    begins = (int64_t*)calloc((size_t)heads() + 1, 8);
    if (!begins) return;
    const bool by_parts = few() && !c.score_count && !(c.dropout > 0);
    int64_t most = heads() * c.plan.tiles;
    if (by_parts) each_alike([&](int64_t b, int64_t rows, int64_t alike) {
        for (int64_t i = b; i < b + rows; i++) most += c.kv_heads * (cut(alike, ALIKE) + cut(read_by(i, 0), PART) + 1);
      });
    items = (Item*)malloc((size_t)most * sizeof(Item));
    if (!items) return;
    by_parts ? share_out_parts() : share_out();
    if (partials) partial = floats(partials * partial_rows() * partial_row());
  }
  bool ready() const { return items && (!partials || partial); }
  // Number of packed blocks for which to allocate room; two are enough if each is read once.
  int64_t blocks_kept() const { return few() ? 2 : most_blocks(c.plan); }
  // Number of packed blocks to keep while a tile passes: fewer blocks stay in a nearer cache.
  int64_t blocks_kept(int64_t b, int64_t tile) const { return far(b, tile) ? ONCE : read_by(b, tile) + 2; }

 private:
  bool few() const { return c.plan.tiles == 1 && c.queries.count * z.group <= TILE; }

  int64_t read_by(int64_t b, int64_t tile) const { return blocks_of(c.plan, tile_of(c.plan, b, tile)); }
  bool far(int64_t b, int64_t tile) const { return read_by(b, tile) > usual; }
  static int64_t cut(int64_t blocks, int64_t part) { return (blocks + part - 1) / part; }
  // Whether reading a shared prefix once pays. Up to 8 rows of a tile are read in place; with a few more than 8, the packing
  // costs more than the sharing gains.
  bool pays(int64_t rows) const { return rows * z.group <= 8 || rows * z.group >= 32; }

  // Number of leading blocks that the query of a batch row sees whole.
  int64_t whole_blocks(int64_t b) const {
    const int32_t r = c.plan.first[tile_of(c.plan, b, 0)];
    const bool any = r < c.plan.first[tile_of(c.plan, b, 0) + 1];
    return any && c.plan.begin[r] == 0 && c.plan.full[r] ? c.plan.end[r] / BLOCK : 0;
  }

  // Calls f(first row, rows, blocks) for each run of batch rows with a common prefix, and the number of blocks that all of
  // them see whole. A row that shares less than half of the others' prefix starts a new run.
  template <class F>
  void each_alike(F f) const {
    for (int64_t b = 0, rows; b < c.batch; b += rows) {
      int64_t alike = c.plan.alike ? whole_blocks(b) : 0;
      for (rows = 1; b + rows < c.batch && alike; rows++) {
        int64_t now = c.plan.alike[b + rows] / BLOCK, own = whole_blocks(b + rows);
        now = now < own ? now : own;
        now = now < alike ? now : alike;
        if (now < LEAST || (rows > 1 && now < alike / 2)) break;
        alike = now;
      }
      f(b, rows, rows > 1 && pays(rows) ? alike : 0);
    }
  }

  // Items of decoding: first the shared prefixes, in parts of ALIKE blocks, then the other blocks of each head, in parts of
  // PART. With 20 shared blocks and 70 in all: parts 0-7, 8-15, 16-19, then 20-51, 52-69.
  void share_out_parts() {
    each_alike([&](int64_t b, int64_t rows, int64_t alike) {
      const int64_t at_once = TILE / z.group;
      for (int64_t from = 0; from < alike; from += ALIKE)
        for (int64_t i = 0; i < rows; i += at_once)
          for (int64_t kv = 0; kv < c.kv_heads; kv++)
            items[count++] = {(b + i) * c.kv_heads + kv, rows - i < at_once ? rows - i : at_once, 0, 1, from,
                              from + ALIKE < alike ? from + ALIKE : alike, from / ALIKE};
      for (int64_t h = b * c.kv_heads; h < (b + rows) * c.kv_heads; h++) {
        const int64_t all = read_by(h / c.kv_heads, 0), shared = cut(alike, ALIKE), parts = shared + cut(all - alike, PART);
        begins[h] = partials, partials += alike || parts > 1 ? parts : 0;
        for (int64_t from = alike, part = shared; from < all || (part == 0 && from == 0); from += PART, part++)
          items[count++] = {h, 1, 0, 1, from, from + PART < all ? from + PART : all, part};
      }
    });
    begins[heads()] = partials;
  }

  // Items of many queries. The cost of a tile is its blocks, and one. An item costs 1/16 of a thread's share;
  // at the end less, half of a thread's share of what is left.
  void share_out() {
    const headway_plan& p = c.plan;
    int64_t left = 0;
    auto cost = [&](int64_t h, int64_t tile) { return read_by(h / c.kv_heads, tile) + 1; };
    for (int64_t h = 0; h < heads(); h++)
      for (int64_t t = 0; t < p.tiles; t++) left += cost(h, t);
    int64_t fair = left / (c.threads * 16), least = (LONG - 1 + p.tile) / p.tile;
    for (int64_t h = 0; h < heads(); h++)
      for (int64_t t = p.tiles, first; t > 0; t = first) {
        int64_t end = left / (c.threads * 2), goal = end < fair ? end : fair, tiles = end < fair ? SHORT : least;
        int64_t sum = 0, b = h / c.kv_heads;
        for (first = t; first > 0 && (sum < goal || t - first < tiles); first--) {
          if (far(b, first - 1) != far(b, t - 1)) break;
          sum += cost(h, first - 1);
        }
        items[count++] = {h, 1, first, t, 0, INT64_MAX, 0};
        left -= sum;
      }
  }
};

}  // namespace
