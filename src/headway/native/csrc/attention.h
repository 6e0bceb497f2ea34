// The attention forward: tiles of queries over the key blocks of their plan, run by a team of threads that share the work
// items (batch row, kv head, tiles).
#pragma once
#include "decode.h"
#include "forward_schedule.h"

namespace {

// One thread: its packed blocks, its tile, and the memory of the tile's queries and output.
template <bool HALF>
struct Worker {
  const Work& w;
  const headway_call& c;
  Blocks<HALF, false> blocks;
  Owned<Tile<HALF>> tile;
  Extra extra;
  Owned<float> store_of_tile;

  explicit Worker(const Work& work, int64_t most) : w(work), c(work.c), blocks(c, most) {
    int64_t q = whole_units(w.z.d), v = w.z.wide_dv;
    tile = (Tile<HALF>*)aligned_alloc(64, (sizeof(Tile<HALF>) + 63) / 64 * 64);
    store_of_tile = floats(TILE * (q + v));
    if (!ready()) return;
    tile->z = w.z;
    tile->out = store_of_tile;
    tile->unit = c.score_count ? LOG2E : (float)fabs(c.scale) * LOG2E;
    extra.c = &c;
  }
  bool ready() const { return blocks.ready() && tile && store_of_tile; }

  // Runs the tiles of an item; a tile takes the queries of as many heads as fit into its rows.
  void run(int64_t item) {
    const Item& tiles = w.items[item];
    int64_t b = tiles.head / c.kv_heads, kv = tiles.head % c.kv_heads;
    Tokens queries = Tokens::of(c.queries, b), keys = Tokens::of(c.keys, b);
    extra.queries = queries, extra.keys = keys, extra.b = b;
    for (int64_t t = tiles.first; t < tiles.last; t++) {
      blocks.keep(w.blocks_kept(b, t));
      int64_t begin = t * c.plan.tile, end = begin + c.plan.tile;
      if (end > queries.count) end = queries.count;
      int64_t at_once = TILE / (end - begin);  // heads whose rows fit into one tile
      if (at_once < 1) at_once = 1;
      for (int64_t g = 0; g < w.z.group; g += at_once) {
        int64_t heads = w.z.group - g < at_once ? w.z.group - g : at_once;
        run_tile(b, kv, t, begin, end, kv * w.z.group + g, heads, queries, keys, tiles);
      }
    }
  }

  // Runs `heads` heads of queries [begin, end) of tile t, for item.rows rows of the batch: reads the queries, then the blocks,
  // and writes the result. Rows whose reference maximum was too high (tile.h) are computed a second time, exactly.
  void run_tile(int64_t b, int64_t kv, int64_t t, int64_t begin, int64_t end, int64_t head, int64_t heads,
                const Tokens& queries, const Tokens& keys, const Item& item) {
    Tile<HALF>& x = *tile;
    int64_t width = whole_units(w.z.d), n = end - begin;
    bool negate = c.scale < 0 && !c.score_count;
    x.q = store_of_tile + TILE * w.z.wide_dv;
    const int64_t count = item.rows * heads * n;
    for (int64_t j = 0; j < item.rows; j++)
      for (int64_t h = 0; h < heads; h++) {
        const Tokens of = Tokens::of(c.queries, b + j);
        Rows q = Rows::of(c.q, (int)c.type, b + j, head + h, (int)c.dim, of.order);
        const int64_t row = (j * heads + h) * n;
        for (int64_t i = 0; i < n; i++) x.rows[row + i] = {(int32_t)(begin + i), (int32_t)(head + h), (int32_t)i};
        if (heads == 1 && item.rows == 1 && !negate && q.side_by_side<HALF>())
          x.q = (float*)q.at(begin);
        else
          for (int64_t i = 0; i < n; i++)
            take_query<HALF>(q, begin + i, of.index[begin + i] >= 0, negate, x.q + (row + i) * width);
      }
    x.ahead.tile();
    const bool is_part = w.parts_of(item.head) > 0;
    if (!is_part) look_ahead(b, t, begin, end, head, (heads * n + ROWS - 1) / ROWS, queries);
    bool again = false, due[TILE];
    for (int r = 0; r < count; r++) due[r] = true;
    for (int exact = 0; exact <= again; exact++) {
      x.reset((int)count, exact);
      read_blocks(b, kv, t, begin, n, keys, item);
      x.add_up();
      bool now[TILE];
      for (int r = 0; r < count; r++) {
        now[r] = due[r] && (exact || !x.lost(r));
        due[r] &= !now[r], again |= due[r];
      }
      if (is_part)
        keep(item, now);
      else
        write(b, queries, now);
    }
  }

  // Prefetches the rows of the result, and of the queries that the next tile reads.
  void look_ahead(int64_t b, int64_t t, int64_t begin, int64_t end, int64_t head, int64_t groups,
                  const Tokens& queries) {
    const headway_plan& p = c.plan;
    groups = blocks_of(p, tile_of(p, b, t)) * groups + 1;
    Rows out = Rows::of(c.out, (int)c.type, b, head, (int)c.dim_v, queries.order);
    tile->ahead.rows_of_tile(out, begin, end, groups, true);
    if (t + 1 == p.tiles) return;
    int64_t stop = end + p.tile < queries.count ? end + p.tile : queries.count;
    tile->ahead.rows_of_tile(Rows::of(c.q, (int)c.type, b, head, (int)c.dim, queries.order), end, stop, groups);
  }

  // Reads the blocks of the item's part.
  void read_blocks(int64_t b, int64_t kv, int64_t t, int64_t begin, int64_t n, const Tokens& keys, const Item& item) {
    Tile<HALF>& x = *tile;
    const headway_plan& p = c.plan;
    const int64_t at = tile_of(p, b, t);
    bool direct = read_directly(b, kv, at, item.from, item.to, keys);
    blocks.start();
    each_block(p, at, item.from, item.to, [&](int32_t r, int64_t k) __attribute__((always_inline)) {
      if (direct && extra.whole(r, k)) return;
      if (blocks.collides(b, kv, k / BLOCK)) flush(x), blocks.start();
      Block block = blocks.get(b, kv, k / BLOCK, keys);
      blocks.look_ahead(x.ahead, b, kv, next_of(p, r, p.first[at + 1], k) / BLOCK, keys, (x.count + ROWS - 1) / ROWS);
      uint64_t room[TILE];
      const uint64_t* seen = extra.look(r, k, begin, n, room);
      if (!extra.steps()) return block_of<HALF, false>(x, block, seen, nullptr);
      block_of<HALF, true>(x, block, seen, &extra);
      finish(x, &extra);
    });
    flush(x);
  }

  // Processes blocks first .. last - 1 of a tile in place, as far as the queries see them whole; returns false if this call
  // cannot be read in place.
  bool read_directly(int64_t b, int64_t kv, int64_t at, int64_t first, int64_t last, const Tokens& keys) {
    if constexpr (W == 16) {
      Tile<HALF>& x = *tile;
      if (!is_direct<HALF>(c, x.count)) return false;
      const headway_plan& p = c.plan;
      Rows k_rows = blocks.key_rows(b, kv, keys), v_rows = blocks.value_rows(b, kv, keys);
      float* words = blocks.scratch();
      bool any = false;
      each_block(p, at, first, last, [&](int32_t r, int64_t k) __attribute__((always_inline)) {
        if (extra.whole(r, k)) direct_block(x, k_rows, v_rows, k, words), any = true;
      });
      if (any) arrange(x);
      return true;
    }
    return false;
  }

  // Writes the rows marked in `now`: out / total, and lse = (maximum + log2 of the total) ln 2; -inf where nothing is seen.
  void write(int64_t b, const Tokens& queries, const bool* now) const {
    const Tile<HALF>& x = *tile;
    alignas(64) float lse[TILE], inverse[TILE];
    for (int r = 0; r < x.count; r += W) {
      vf total = load(x.total + r), whole = load(x.whole + r);
      vi none = total == 0.0f;
      vf value = (load(x.top + r) * x.unit + log2_of(total)) * LN2;
      store(lse + r, (vf)(((vi)value & ~none) | ((vi)splat(-INFINITY) & none)));
      store(inverse + r, (vf)((vi)(1.0f / whole) & (whole != 0.0f)));
    }
    for (int r = 0; r < x.count; r++)
      if (now[r]) write_row(c, b, x.rows[r].head, queries.slot(x.rows[r].place), lse[r], inverse[r],
                x.out + (int64_t)r * w.z.wide_dv);
  }

  static void write_row(const headway_call& c, int64_t b, int64_t head, int64_t slot, float lse, float inverse,
                        const float* out) {
    c.lse[(b * c.heads + head) * c.queries.count + slot] = lse;
    write_words(c.out, c.type, b, head, slot, out, (int)c.dim_v, inverse);
  }

  // Stores the rows marked in `now` as the item's partial result, which is merged later.
  void keep(const Item& item, const bool* now) const {
    const Tile<HALF>& x = *tile;
    const int64_t rows = w.partial_rows();
    for (int r = 0; r < x.count; r++) {
      if (!now[r]) continue;
      const int64_t number = w.begins[item.head + r / rows * c.kv_heads] + item.part;
      float* to = w.partial + (number * rows + r % rows) * w.partial_row();
      to[0] = x.top[r] * x.unit;
      to[1] = x.total[r];
      to[2] = x.whole[r];
      memcpy(to + 3, x.out + (int64_t)r * w.z.wide_dv, (size_t)w.z.wide_dv * 4);
    }
  }
};

// Merges the partial results of row r of a head in the order of the keys, and writes the row. With partial results
// (top_p, total_p, out_p): out = sum of out_p 2^(top_p - top) / sum of whole_p 2^(top_p - top), top the largest top_p.
template <bool HALF>
void merge(const Work& w, int64_t head, int64_t r, float* out) {
  float top = -INFINITY, total = 0, whole = 0;
  int64_t step = w.partial_rows() * w.partial_row();
  const float* from = w.partial + w.begins[head] * step + r * w.partial_row();
  const int64_t parts = w.parts_of(head);
  for (int64_t p = 0; p < parts; p++)
    if (from[p * step + 1] != 0) top = from[p * step] > top ? from[p * step] : top;
  memset(out, 0, (size_t)w.z.wide_dv * 4);
  for (int64_t p = 0; p < parts; p++) {
    const float* x = from + p * step;
    if (x[1] == 0) continue;
    float by = exp2f(x[0] - top);
    total += x[1] * by, whole += x[2] * by;
    for (int i = 0; i < w.z.wide_dv; i++) out[i] += x[3 + i] * by;
  }
  int64_t b = head / w.c.kv_heads, n = w.c.queries.count;
  Tokens queries = Tokens::of(w.c.queries, b);
  Worker<HALF>::write_row(w.c, b, head % w.c.kv_heads * w.z.group + r / n, queries.slot(r % n),
                          total == 0 ? -INFINITY : (top + log2f(total)) * LN2, whole == 0 ? 0 : 1 / whole, out);
}

// A call that is computed by a team of threads.
template <bool HALF>
struct Forward {
  Work w;
  int64_t next = 0;
  int failed = 0;

  explicit Forward(const headway_call& c) : w(c, HALF) {
    large_pages(c.out, c.batch * c.heads * c.queries.count * c.dim_v * bytes_of((int)c.type));
    if (!w.ready()) failed = 2;
  }

  // Runs in every thread of the team: takes items until none is left, then merges partial results.
  void compute() {
    if (!w.ready()) return;
    Worker<HALF> worker(w, w.blocks_kept());
    if (!worker.ready())
      __atomic_store_n(&failed, 2, __ATOMIC_RELAXED);
    else
      for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < w.count;) worker.run(i);
    if (w.partials) {
#pragma omp barrier
      const int64_t rows = w.partial_rows(), all = w.heads() * rows;
      if (!__atomic_load_n(&failed, __ATOMIC_RELAXED))
#pragma omp for
        for (int64_t i = 0; i < all; i++)
          if (w.parts_of(i / rows)) merge<HALF>(w, i / rows, i % rows, worker.store_of_tile);
    }
  }
};

}  // namespace
