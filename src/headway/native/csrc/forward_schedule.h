// How the forward is shared out: items, each of some tiles of one (row, kv head), which threads take in turn.
#pragma once
#include "blocks.h"

namespace {

// Tiles first .. last - 1 of a (row, kv head).
struct Item {
  int64_t head, first, last;
};

// Tiles of an item share packed blocks, so items are long; the last ones are short, so that all threads end together.
// Within a head the last tiles come first: when causal, the longest. Few queries against many keys are shared out by
// parts of their blocks instead, which are merged. What a tile adds in which order does not depend on its item.
struct Work {
  static constexpr int64_t LONG = 1024, SHORT = 4;  // at least: queries of an item; tiles of one of the last
  static constexpr int64_t ONCE = 16;               // packed blocks that stay where a tile far beyond others passes once

  const headway_call& c;
  Sizes z;
  int64_t count = 0, parts = 1, usual;
  Owned<Item> items;
  Owned<float> partial;  // [item][row of the tile]: top, total, whole, out[wide_dv]; only when parts > 1

  int64_t partial_row() const { return 3 + z.wide_dv; }
  int64_t partial_rows() const { return (c.queries.count < TILE ? c.queries.count : TILE) * z.group; }

  Work(const headway_call& call, bool half) : c(call), z(Sizes::of(call, half)), usual(usual_blocks(call.plan)) {
    const headway_plan& p = c.plan;
    int64_t heads = c.batch * c.kv_heads;
    items = (Item*)malloc((size_t)(heads * p.tiles) * sizeof(Item));
    if (!items) return;
    share_out(heads);
    if (few() && heads < 32 && !c.score_count && !(c.dropout > 0))
      while (parts * heads < 32 && z.blocks / (parts * 2) >= 8) parts *= 2;
    if (parts > 1) partial = floats(heads * parts * partial_rows() * partial_row());
  }
  bool ready() const { return items && (parts == 1 || partial); }
  // For the store of packed blocks; where each is read once, two are enough.
  int64_t blocks_kept() const { return few() ? 2 : most_blocks(c.plan); }
  // How many of them stay while a tile passes; fewer are sooner found in the cache.
  int64_t blocks_kept(int64_t b, int64_t tile) const { return far(b, tile) ? ONCE : read_by(b, tile) + 2; }

 private:
  bool few() const { return c.plan.tiles == 1 && c.queries.count * z.group <= TILE; }

  int64_t read_by(int64_t b, int64_t tile) const { return blocks_of(c.plan, tile_of(c.plan, b, tile)); }
  bool far(int64_t b, int64_t tile) const { return read_by(b, tile) > usual; }

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
        items[count++] = {h, first, t};
        left -= sum;
      }
  }
};

}  // namespace
