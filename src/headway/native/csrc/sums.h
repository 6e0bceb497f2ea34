// How the backward is cut into pieces of work, and where each sums the gradients of its keys and values.
#pragma once
#include "blocks.h"

namespace {

// Pieces of work aimed at, when tiles are many enough: as many where pieces share few keys, and where they share many,
// since each sums the gradients of all its keys.
constexpr int64_t ITEMS = 32, SHARING_ITEMS = 16;

// What packed keys and sums of gradients may take, so that they stay in a cache while tiles pass by.
constexpr int64_t CACHED = 1 << 20;

struct Range {
  int64_t first, last;  // blocks of keys
};

struct Work {
  const headway_call& c;
  Sizes z;
  int64_t splits, items;

  Work(const headway_call& call, bool half) : c(call), z(Sizes::of(call, half)) {
    split_into(ITEMS);
    int64_t blocks = 0;
    for (int64_t s = 0; s < splits; s++) blocks += range(0, s).last - range(0, s).first;
    if (2 * blocks > 3 * z.blocks) split_into(SHARING_ITEMS);
  }
  void split_into(int64_t aim) {
    int64_t heads = c.batch * c.kv_heads;
    splits = (aim + heads - 1) / heads;
    if (splits > c.plan.tiles / 10) splits = c.plan.tiles / 10;
    if (splits < 1) splits = 1;
    items = heads * splits;
  }

  int64_t tile_of(int64_t split) const { return c.plan.tiles * split / splits; }
  int64_t row_size() const { return z.wide_d + z.wide_dv; }

  // The blocks that the tiles of a split read.
  Range range(int64_t b, int64_t split) const {
    const headway_plan& p = c.plan;
    int64_t at = p.rows > 1 ? b * p.tiles : 0, first = INT64_MAX, last = 0;
    for (int32_t r = p.first[at + tile_of(split)]; r < p.first[at + tile_of(split + 1)]; r++) {
      first = p.begin[r] / BLOCK < first ? p.begin[r] / BLOCK : first;
      int64_t end = (p.end[r] + BLOCK - 1) / BLOCK;
      last = end > last ? end : last;
    }
    return {first > last ? last : first, last};
  }
};

// Where the sums of each item lie, and the gradients of score values for each (row of the batch, split).
struct Sums {
  const Work& w;
  float* data;
  int64_t *at, tables;
  float* table;

  explicit Sums(const Work& work, bool all) : w(work), data(nullptr), at(nullptr), tables(0), table(nullptr) {
    at = (int64_t*)malloc((size_t)(w.items + 1) * 8);
    int64_t size = 0;
    for (int64_t i = 0; at && i < w.items; i++) {
      at[i] = size;
      Range r = w.range(i / w.splits / w.c.kv_heads, i % w.splits);
      if (all) size += (r.last - r.first) * BLOCK * w.row_size();
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
