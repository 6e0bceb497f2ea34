// How the forward is shared out: items, each of some tiles of one (row, kv head), which threads take in turn.
#pragma once
#include "blocks.h"

namespace {

// Tiles first .. last - 1 of a (row, kv head), against part `part` of their blocks: the first of them is item `begin`.
struct Item {
  int64_t head, first, last, part, parts, begin;
};

// Tiles of an item share packed blocks, so items are long; the last ones are short, so that all threads end together.
// Within a head the last tiles come first: when causal, the longest. Few queries against many keys are shared out by
// parts of PART blocks instead, which are merged. What a tile adds in which order does not depend on its item, and the
// parts of a row not on other rows: its result is the same bits whatever is computed beside it.
struct Work {
  static constexpr int64_t LONG = 1024, SHORT = 4;  // at least: queries of an item; tiles of one of the last
  static constexpr int64_t ONCE = 16;               // packed blocks that stay where a tile far beyond others passes once
  static constexpr int64_t PART = 32;               // blocks; parts of a few are slower by the time that each begins with

  const headway_call& c;
  Sizes z;
  int64_t count = 0, usual;
  bool has_parts = false;
  Owned<Item> items;
  Owned<float> partial;  // [item][row of the tile]: top, total, whole, out[wide_dv]; only where there are parts

  int64_t partial_row() const { return 3 + z.wide_dv; }
  int64_t partial_rows() const { return (c.queries.count < TILE ? c.queries.count : TILE) * z.group; }

  Work(const headway_call& call, bool half) : c(call), z(Sizes::of(call, half)), usual(usual_blocks(call.plan)) {
    int64_t heads = c.batch * c.kv_heads, most = 0;
    const bool by_parts = few() && !c.score_count && !(c.dropout > 0);
    for (int64_t h = 0; h < heads; h++) most += by_parts ? parts_of(h) : c.plan.tiles;
    items = (Item*)malloc((size_t)most * sizeof(Item));
    if (!items) return;
    by_parts ? share_out_parts(heads) : share_out(heads);
    has_parts = by_parts && count > heads;
    if (has_parts) partial = floats(count * partial_rows() * partial_row());
  }
  bool ready() const { return items && (!has_parts || partial); }
  // For the store of packed blocks; where each is read once, two are enough.
  int64_t blocks_kept() const { return few() ? 2 : most_blocks(c.plan); }
  // How many of them stay while a tile passes; fewer are sooner found in the cache.
  int64_t blocks_kept(int64_t b, int64_t tile) const { return far(b, tile) ? ONCE : read_by(b, tile) + 2; }

 private:
  bool few() const { return c.plan.tiles == 1 && c.queries.count * z.group <= TILE; }

  int64_t read_by(int64_t b, int64_t tile) const { return blocks_of(c.plan, tile_of(c.plan, b, tile)); }
  bool far(int64_t b, int64_t tile) const { return read_by(b, tile) > usual; }
  int64_t parts_of(int64_t h) const {
    const int64_t blocks = read_by(h / c.kv_heads, 0);
    return blocks > PART ? (blocks + PART - 1) / PART : 1;
  }

  void share_out_parts(int64_t heads) {
    for (int64_t h = 0; h < heads; h++)
      for (int64_t part = 0, parts = parts_of(h), begin = count; part < parts; part++)
        items[count++] = {h, 0, 1, part, parts, begin};
  }

  void share_out(int64_t heads) {
    const headway_plan& p = c.plan;
    int64_t left = 0;
    auto cost = [&](int64_t h, int64_t tile) { return read_by(h / c.kv_heads, tile) + 1; };
    for (int64_t h = 0; h < heads; h++)
      for (int64_t t = 0; t < p.tiles; t++) left += cost(h, t);
    int64_t fair = left / (c.threads * 16), least = (LONG - 1 + p.tile) / p.tile;
    for (int64_t h = 0; h < heads; h++)
      for (int64_t t = p.tiles, first; t > 0; t = first) {
        int64_t end = left / (c.threads * 2), goal = end < fair ? end : fair, tiles = end < fair ? SHORT : least;
        int64_t sum = 0, b = h / c.kv_heads;
        for (first = t; first > 0 && (sum < goal || t - first < tiles); first--) {
          if (far(b, first - 1) != far(b, t - 1)) break;
          sum += cost(h, first - 1);
        }
        items[count] = {h, first, t, 0, 1, count}, count++;
        left -= sum;
      }
  }
};

}  // namespace
