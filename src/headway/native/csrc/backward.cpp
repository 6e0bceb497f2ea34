// headway_backward: gradients of queries, keys, values and score values.
//
// An item is a split of the tiles of one (batch row, kv head): it owns the gradients of its queries, and those of the keys
// and values that no other item reads, which it writes as soon as its tiles have passed them. For other keys it keeps sums,
// which are added in order at the end. Tiles that read far more keys than others (global queries) belong to all items, each
// of which processes them with its share of the keys. How a kv head is split depends on the shapes only, so the result does
// not depend on the number of threads.
#include "backward.h"
#include "backward_schedule.h"
#include "team.h"

#include <omp.h>

namespace {

template <bool HALF>
struct Worker {
  const Work& w;
  const headway_call& c;
  Blocks<HALF, true> blocks;
  Owned<BackTile<HALF>> tile;
  Owned<float> memory;
  Owned<float> live;  // gradient sums of owned blocks, a ring buffer; 0 between items
  Extra extra;
  float q_sign;

  // The current item: a split of the tiles of kv head `kv` of batch row b.
  int64_t b, kv;
  Tokens queries, keys;
  Part part;
  float *kept, *front;      // gradient sums of the blocks that are not owned, and of the queries at the front
  float* const* gradients;  // of score values
  int64_t done, met;        // owned blocks before `done` are written; the tiles at the front have read those before `met`

  Worker(const Work& work, int64_t most_live) : w(work), c(work.c), blocks(c, work.packed) {
    int64_t q = whole_units(w.z.d), g = whole_units(w.z.dv), d = w.z.wide_d, dv = w.z.wide_dv;
    tile = (BackTile<HALF>*)aligned_alloc(64, (sizeof(BackTile<HALF>) + 63) / 64 * 64);
    memory = floats(TILE * (q + g + 2 * d + dv));
    live = floats(most_live * w.block_size());
    q_sign = c.scale < 0 && !c.score_count ? -1.0f : 1.0f;
    if (!ready()) return;
    memset(live, 0, (size_t)(most_live * w.block_size()) * 4);
    tile->z = w.z;
    tile->dq = memory;
    tile->q = tile->dq + TILE * d;
    tile->g = tile->q + TILE * q;
    tile->q_rows = HALF ? tile->g + TILE * g : tile->q;
    tile->g_rows = HALF ? tile->q_rows + TILE * d : tile->g;
    tile->unit = c.score_count ? LOG2E : (float)fabs(c.scale) * LOG2E;
    extra.c = &c;
  }
  bool ready() const { return blocks.ready() && tile && memory && live; }

  // Returns the gradient sums of block n: [64][columns of keys], then [64][columns of values].
  float* sums_of(int64_t n) const {
    return part.owns(n) ? live + (n - part.own_first) % part.live * w.block_size() : kept + part.place(n) * w.block_size();
  }

  // Completes the blocks before `end`, which no later tile of the item reads: processes the tiles at the front with their
  // share of them, then writes the gradients of those that are owned.
  void finish(int64_t end) {
    while (done < end && done < part.own_last) {
      int64_t to = done + WAITING_BLOCKS < end ? done + WAITING_BLOCKS : end;
      meet(to);
      for (; done < to && done < part.own_last; done++) {
        write_keys(b, kv, done, sums_of(done));
        memset(sums_of(done), 0, (size_t)w.block_size() * 4);
      }
    }
    meet(end);
  }

  // Processes the tiles at the front with the blocks of their share from `met` to `end`.
  void meet(int64_t end) {
    if (end > part.share_last) end = part.share_last;
    if (!w.front || met >= end) return;
    tile->next.tile();
    for (int64_t g = 0; g < w.z.group; g++)
      for (int64_t t = 0; t < w.front; t++) {
        tile->dq = front + (g * w.front + t) * TILE * w.z.wide_d;
        tile->take(c, queries, b, kv * w.z.group + g, t * c.plan.tile, rows_of(t), q_sign < 0);
        read_blocks(t, met, end, false);
      }
    met = end;
  }

  // Runs an item. All tiles read a stretch of the keys before the next stretch; with several stretches, the gradients of all
  // queries are kept until the last. Returns false if out of memory.
  bool run(int64_t head, int64_t split, const Sums& sums, float* const* of_scores) {
    b = head / c.kv_heads, kv = head % c.kv_heads;
    queries = Tokens::of(c.queries, b), keys = Tokens::of(c.keys, b), gradients = of_scores;
    extra.queries = queries, extra.keys = keys, extra.b = b;
    int64_t from = w.first_tile(split), tiles = w.first_tile(split + 1) - from, size = TILE * w.z.wide_d;
    bool whole = w.stretch == w.z.blocks;
    float* all = whole ? nullptr : floats(w.z.group * tiles * size);
    if (!whole && !all) return false;
    if (all) memset(all, 0, (size_t)(w.z.group * tiles * size) * 4);
    part = w.part(b, split), kept = sums.kept(head, split), front = sums.front(head, split);
    done = part.own_first, met = part.share_first;
    if (sums.size(head, split)) memset(front, 0, (size_t)sums.size(head, split) * 4);
    for (int64_t low = 0; low < w.z.blocks; low += w.stretch) {
      for (int64_t t = from; t < from + tiles; t++) {
        if (all && !reads(tile_of(c.plan, b, t), low)) continue;
        int64_t passed = w.first_from(part.pinned, tile_of(c.plan, b, t));
        bool enough = passed - done >= (w.front ? WAITING_BLOCKS : 1);
        if (part.live < part.owned() && whole && enough && passed < w.z.blocks) finish(passed);
        for (int64_t g = 0; g < w.z.group; g++) {
          bool more = g + 1 == w.z.group && t + 1 < from + tiles;
          tile->dq = all ? all + (g * tiles + t - from) * size : memory;
          tile->take(c, queries, b, kv * w.z.group + g, t * c.plan.tile, rows_of(t), q_sign < 0);
          if (!all) memset(tile->dq, 0, (size_t)size * 4);
          int64_t after = (g + 1) % w.z.group, then = after ? t : more ? t + 1 : from;
          look_ahead_rows(kv * w.z.group + after, then, all ? all + (after * tiles + then - from) * size : nullptr,
                          blocks_of(c.plan, tile_of(c.plan, b, t)));
          read_blocks(t, low, low + w.stretch, more);
          if (!all) write_queries(kv * w.z.group + g, t, tile->dq);
        }
      }
      finish(low + w.stretch);
    }
    for (int64_t i = 0; all && i < w.z.group * tiles; i++)
      write_queries(kv * w.z.group + i / tiles, from + i % tiles, all + i * size);
    free(all);
    return true;
  }

  // Returns whether a tile reads some block of the stretch that begins at `low`.
  bool reads(int64_t at, int64_t low) const {
    const headway_plan& p = c.plan;
    for (int32_t r = p.first[at]; r < p.first[at + 1]; r++)
      if (p.begin[r] < (low + w.stretch) * BLOCK && p.end[r] > low * BLOCK) return true;
    return false;
  }

  // Tile t against its blocks from `low` up to `high`; `more`: another tile follows, so its keys are prefetched.
  void read_blocks(int64_t t, int64_t low, int64_t high, bool more) {
    const headway_plan& p = c.plan;
    int64_t at = tile_of(c.plan, b, t), begin = t * p.tile, n = rows_of(t), lowest = low * BLOCK, end = high * BLOCK;
    auto inside = [=](int64_t key) { return key < end ? key : end; };
    tile->ahead.tile();
    if (more)
      blocks.look_ahead_rows(tile->ahead, b, kv, keys, inside(reached(p, at)), inside(reached(p, at + 1)),
                             blocks_of(p, at) * ((n + ROWS - 1) / ROWS) + 1);
    for (int32_t r = p.first[at]; r < p.first[at + 1]; r++)
      for (int64_t k = p.begin[r] > lowest ? p.begin[r] : lowest; k < p.end[r] && k < end; k += BLOCK) {
        Block block = blocks.get(b, kv, k / BLOCK, keys);
        int64_t next = next_of(p, r, p.first[at + 1], k);
        look_ahead(next < end ? next / BLOCK : w.z.blocks);
        uint64_t room[TILE];
        const uint64_t* seen = extra.look(r, k, begin, n, room);
        float *dk_at = sums_of(k / BLOCK), *dv_at = dk_at + BLOCK * w.z.wide_d;
        if (extra.steps())
          block_of<HALF, true>(*tile, block, seen, &extra, gradients, dk_at, dv_at);
        else
          block_of<HALF, false>(*tile, block, seen, nullptr, nullptr, dk_at, dv_at);
      }
  }

  int64_t rows_of(int64_t t) const {
    int64_t left = queries.count - t * c.plan.tile;
    return left < c.plan.tile ? left : c.plan.tile;
  }

  void write_queries(int64_t head, int64_t t, const float* dq) const {
    for (int64_t i = 0; i < rows_of(t); i++)
      write_words(c.dq, c.type, b, head, queries.slot(t * c.plan.tile + i), dq + i * w.z.wide_d, (int)c.dim, (float)c.scale);
  }

  // Prefetches the next block, and the sums to which it adds.
  void look_ahead(int64_t n) const {
    int64_t groups = (tile->count + ROWS - 1) / ROWS;
    bool there = n < w.z.blocks && part.reads(n);
    blocks.look_ahead(tile->ahead, b, kv, n, keys, groups);
    if (there) tile->ahead.words(sums_of(n), w.block_size(), groups);
  }

  // Prefetches the rows of the next tile, and its gradient sums if they are kept.
  void look_ahead_rows(int64_t head, int64_t t, const float* dq, int64_t blocks) {
    int64_t begin = t * c.plan.tile, end = begin + rows_of(t);
    int64_t groups = (blocks < w.stretch ? blocks : w.stretch) * ((tile->count + ROWS - 1) / ROWS) + 1;
    Ahead& x = tile->next;
    x.tile();
    x.rows(Rows::of(c.q, (int)c.type, b, head, (int)c.dim, queries.order), begin, end, groups);
    x.rows(Rows::of(c.d_out, (int)c.type, b, head, (int)c.dim_v, queries.order), begin, end, groups);
    x.rows(Rows::of(c.out, (int)c.type, b, head, (int)c.dim_v, queries.order), begin, end, groups);
    if (dq) x.words(dq, TILE * w.z.wide_d, groups);
  }

  // Writes the gradients of the keys and values of block n from their sums.
  void write_keys(int64_t b, int64_t kv, int64_t n, const float* sums) const {
    Tokens keys = Tokens::of(c.keys, b);
    const float* of_values = sums + BLOCK * w.z.wide_d;
    for (int64_t i = 0; i < BLOCK && n * BLOCK + i < keys.count; i++) {
      int64_t slot = keys.slot(n * BLOCK + i);
      write_words(c.dk, c.type, b, kv, slot, sums + i * w.z.wide_d, (int)c.dim, (float)c.scale * q_sign);
      write_words(c.dv, c.type, b, kv, slot, of_values + i * w.z.wide_dv, (int)c.dim_v, 1.0f);
    }
  }
};

// Adds, in order, what items kept of the gradients of front tile n for all heads of a kv head, and writes the result.
template <bool HALF>
void gather_front(Worker<HALF>& worker, const Work& w, const Sums& sums, int64_t head, int64_t n) {
  int64_t size = TILE * w.z.wide_d;
  worker.b = head / w.c.kv_heads, worker.queries = Tokens::of(w.c.queries, worker.b);
  for (int64_t g = 0; g < w.z.group; g++) {
    float* total = sums.front(head, 0) + (g * w.front + n) * size;
    for (int64_t s = 1; s < w.splits; s++) {
      const float* x = sums.front(head, s) + (g * w.front + n) * size;
      for (int64_t i = 0; i < size; i += W) add_to(total + i, load(x + i));
    }
    worker.write_queries(head % w.c.kv_heads * w.z.group + g, n, total);
  }
}

// Adds, in order, what items kept of a block of keys that no item owns, and writes the result.
template <bool HALF>
void gather(const Worker<HALF>& worker, const Work& w, const Sums& sums, int64_t head, int64_t n, float* total) {
  int64_t b = head / w.c.kv_heads, size = w.block_size();
  for (int64_t s = 0; s < w.splits; s++)
    if (w.part(b, s).owns(n)) return;
  memset(total, 0, (size_t)size * 4);
  for (int64_t s = 0; s < w.splits; s++) {
    const Part& part = w.part(b, s);
    if (!part.reads(n)) continue;
    const float* x = sums.kept(head, s) + part.place(n) * size;
    for (int64_t i = 0; i < size; i += W) add_to(total + i, load(x + i));
  }
  worker.write_keys(b, head % w.c.kv_heads, n, total);
}

template <bool HALF>
int run(const headway_call& c) {
  Work w(c, HALF);
  int64_t size = c.batch * bytes_of((int)c.type);
  large_pages(c.dq, size * c.heads * c.queries.count * c.dim);
  large_pages(c.dk, size * c.kv_heads * c.keys.count * c.dim);
  large_pages(c.dv, size * c.kv_heads * c.keys.count * c.dim_v);
  if (!w.parts) return 2;
  Sums sums(w);
  if (!sums.ready) return 2;
  int64_t next = 0, most_live = 1;
  for (int64_t i = 0; i < c.plan.rows * w.splits; i++) most_live = w.parts[i].live > most_live ? w.parts[i].live : most_live;
  int failed = 0;
#pragma omp parallel num_threads(team_of(c.threads, w.items))
  {
    Worker<HALF> worker(w, most_live);
    if (!worker.ready())
      __atomic_store_n(&failed, 2, __ATOMIC_RELAXED);
    else
      for (int64_t n; (n = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < w.items;) {
        int64_t heads = w.items / w.splits, split = w.splits - 1 - n / heads, head = n % heads;  // the longest first
        float* gradients[HEADWAY_MOST_SCORES];
        sums.gradients(head / c.kv_heads, split, gradients);
        if (!worker.run(head, split, sums, gradients)) __atomic_store_n(&failed, 2, __ATOMIC_RELAXED);
      }
#pragma omp barrier
    int64_t each = w.front + w.z.blocks, all = c.batch * c.kv_heads * each;
    if (!__atomic_load_n(&failed, __ATOMIC_RELAXED))
#pragma omp for
      for (int64_t i = 0; i < all; i++)
        if (i % each < w.front)
          gather_front<HALF>(worker, w, sums, i / each, i % each);
        else
          gather<HALF>(worker, w, sums, i / each, i % each - w.front, worker.live);
  }
  if (!failed) sums.add_tables();
  return failed;
}

}  // namespace

extern "C" int headway_backward(const headway_call* call) {
  const headway_call& c = *call;
  if (int wrong = unknown(c)) return wrong;
  if (c.kv_type != c.type || c.score_count > HEADWAY_MOST_SCORES) return 3;
  return by_words(c, [&](auto half) { return run<half.value>(c); });
}
