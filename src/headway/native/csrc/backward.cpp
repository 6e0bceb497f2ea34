// headway_backward: gradients of queries, keys, values and of the values of scores.
//
// An item is a part of the tiles of one (row, kv head): it owns its queries' gradients, and those of the keys and values
// that no other item reads, which it writes as soon as its tiles have passed them. Of the others it keeps sums, which
// are added in order. How a kv head is split depends on the shapes only, so the result does not depend on the number
// of threads.
#include "backward.h"
#include "sums.h"

#include <omp.h>

namespace {

// One row of a tensor, converted to float.
INLINE float dot_rows(const headway_tensor& x, const headway_tensor& y, int64_t type, int64_t b, int64_t h,
                      int64_t slot, int64_t width) {
  int64_t i = b * x.batch + h * x.head + slot * x.slot, j = b * y.batch + h * y.head + slot * y.slot;
  float sum = 0;
  if (type == HEADWAY_FLOAT32) {
    const float *p = (const float*)x.data + i, *q = (const float*)y.data + j;
    vf total = {};
    int64_t n = 0;
    for (; n + W <= width; n += W) total += load(p + n) * load(q + n);
    for (; n < width; n++) sum += p[n] * q[n];
    return sum + sum_of(total);
  }
  const uint16_t *p = (const uint16_t*)x.data + i, *q = (const uint16_t*)y.data + j;
  float part[16] = {};
  int64_t n = 0;
  for (; n + 16 <= width; n += 16)
    for (int l = 0; l < 16; l++) part[l] += from_bf16(p[n + l]) * from_bf16(q[n + l]);
  for (; n < width; n++) sum += from_bf16(p[n]) * from_bf16(q[n]);
  for (int l = 0; l < 16; l++) sum += part[l];
  return sum;
}

template <bool HALF>
struct Worker {
  const Work& w;
  const headway_call& c;
  Blocks<HALF, true> blocks;
  BackTile<HALF>* tile;
  float* memory;
  float* live;  // sums of blocks that this item alone reads, 0 between items
  Part part;
  float* kept;   // sums of the others
  int64_t done;  // owned blocks before it have been written
  Extra extra;
  bool extra_steps;
  float q_sign;

  Worker(const Work& work, int64_t most_live) : w(work), c(work.c), blocks(c, work.packed) {
    int64_t q = whole_units(w.z.d), g = whole_units(w.z.dv), d = w.z.wide_d, dv = w.z.wide_dv;
    tile = (BackTile<HALF>*)aligned_alloc(64, (sizeof(BackTile<HALF>) + 63) / 64 * 64);
    memory = floats(TILE * (q + g + 2 * d + dv));
    live = floats(most_live * w.block_size());
    extra_steps = c.score_count > 0 || c.dropout > 0;
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
  ~Worker() {
    free(tile);
    free(memory);
    free(live);
  }
  bool ready() const { return blocks.ready() && tile && memory && live; }

  // Sums of block n: [64][columns of keys], then [64][columns of values].
  float* sums_of(int64_t n) const {
    return part.owns(n) ? live + (n - part.own_first) % part.live * w.block_size() : kept + part.place(n) * w.block_size();
  }

  // Writes the gradients of owned blocks before `end`.
  void finish(int64_t b, int64_t kv, int64_t end) {
    for (; done < end && done < part.own_last; done++) {
      write_keys(b, kv, done, sums_of(done));
      memset(sums_of(done), 0, (size_t)w.block_size() * 4);
    }
  }

  // Keys are taken a stretch at a time, by all tiles; where there are several stretches, the gradients of all queries
  // are kept until the last. False where memory is short.
  bool run(int64_t b, int64_t kv, int64_t split, float* sums, float* const* gradients) {
    Tokens queries = Tokens::of(c.queries, b), keys = Tokens::of(c.keys, b);
    extra.queries = queries, extra.keys = keys, extra.b = b;
    const headway_plan& p = c.plan;
    int64_t from = w.tile_of(split), tiles = w.tile_of(split + 1) - from, size = TILE * w.z.wide_d;
    bool whole = w.stretch == w.z.blocks;
    float* all = whole ? nullptr : floats(w.z.group * tiles * size);
    if (!whole && !all) return false;
    if (all) memset(all, 0, (size_t)(w.z.group * tiles * size) * 4);
    part = w.part(b, split), kept = sums, done = part.own_first;
    if (part.kept()) memset(kept, 0, (size_t)(part.kept() * w.block_size()) * 4);
    for (int64_t low = 0; low < w.z.blocks; low += w.stretch) {
      for (int64_t t = from; t < from + tiles; t++) {
        int64_t begin = t * p.tile, n = (begin + p.tile < queries.count ? begin + p.tile : queries.count) - begin;
        int64_t at = (p.rows > 1 ? b * p.tiles : 0) + t;
        if (all && !reads(at, low)) continue;
        int64_t passed = w.first_from(part.pinned, at);
        if (part.live < part.owned() && whole && passed < w.z.blocks) finish(b, kv, passed);
        for (int64_t g = 0; g < w.z.group; g++) {
          bool more = g + 1 == w.z.group && t + 1 < from + tiles;
          tile->dq = all ? all + (g * tiles + t - from) * size : memory;
          take_rows(b, kv * w.z.group + g, begin, n, queries);
          if (!all) memset(tile->dq, 0, (size_t)size * 4);
          int64_t head = (g + 1) % w.z.group, then = head ? t : more ? t + 1 : from;
          look_ahead_rows(b, kv * w.z.group + head, then * p.tile, queries, all ? all + (head * tiles + then - from) * size : nullptr,
                          blocks_of(p, at));
          read_blocks(b, kv, at, low, more, begin, n, queries, keys, gradients);
          if (!all) write_queries(b, kv * w.z.group + g, begin, n, queries, tile->dq);
        }
      }
      finish(b, kv, low + w.stretch);
    }
    for (int64_t i = 0; all && i < w.z.group * tiles; i++) {
      int64_t begin = (from + i % tiles) * p.tile, end = begin + p.tile < queries.count ? begin + p.tile : queries.count;
      write_queries(b, kv * w.z.group + i / tiles, begin, end - begin, queries, all + i * size);
    }
    free(all);
    return true;
  }

  // Does a tile read some block of the stretch that begins at `low`?
  bool reads(int64_t at, int64_t low) const {
    const headway_plan& p = c.plan;
    for (int32_t r = p.first[at]; r < p.first[at + 1]; r++)
      if (p.begin[r] < (low + w.stretch) * BLOCK && p.end[r] > low * BLOCK) return true;
    return false;
  }

  // The tile against its blocks of the stretch that begins at `low`; `more`: another tile of the same kind follows.
  void read_blocks(int64_t b, int64_t kv, int64_t at, int64_t low, bool more, int64_t begin, int64_t n,
                   const Tokens& queries, const Tokens& keys, float* const* gradients) {
    const headway_plan& p = c.plan;
    Program program{c.program, c.instructions};
    int64_t lowest = low * BLOCK, end = (low + w.stretch) * BLOCK;
    auto inside = [=](int64_t key) { return key < end ? key : end; };
    tile->ahead.tile();
    if (more)
      blocks.look_ahead_rows(tile->ahead, b, kv, keys, inside(reached(p, at)), inside(reached(p, at + 1)),
                             blocks_of(p, at) * ((n + ROWS - 1) / ROWS) + 1);
    for (int32_t r = p.first[at]; r < p.first[at + 1]; r++)
      for (int64_t k = p.begin[r] > lowest ? p.begin[r] : lowest; k < p.end[r] && k < end; k += BLOCK) {
        bool whole = p.full[r] && p.end[r] - k >= BLOCK;
        Block block = blocks.get(b, kv, k / BLOCK, keys);
        int64_t next = next_of(p, r, p.first[at + 1], k);
        look_ahead(b, kv, next < end ? next / BLOCK : w.z.blocks, keys);
        uint64_t seen[TILE];
        if (extra_steps || !whole) extra.at.read(keys, k), extra.begin = k;
        if (!whole) {
          uint64_t here = first_bits(p.end[r] - k);
          for (int64_t i = 0; i < n; i++) seen[i] = here;
          if (!p.full[r])
            program.visible<TILE>(extra.at, queries, begin, n, queries.document || keys.document, seen);
        }
        float *dk_at = sums_of(k / BLOCK), *dv_at = dk_at + BLOCK * w.z.wide_d;
        if (extra_steps)
          block_of<HALF, true>(*tile, block, whole ? nullptr : seen, &extra, gradients, dk_at, dv_at);
        else
          block_of<HALF, false>(*tile, block, whole ? nullptr : seen, nullptr, nullptr, dk_at, dv_at);
      }
  }

  void write_queries(int64_t b, int64_t head, int64_t begin, int64_t n, const Tokens& queries, const float* dq) const {
    for (int64_t i = 0; i < n; i++)
      write_words(c.dq, c.type, b, head, queries.slot(begin + i), dq + i * w.z.wide_d, (int)c.dim, (float)c.scale);
  }

  // The block that follows, and the sums that it will be added to.
  void look_ahead(int64_t b, int64_t kv, int64_t n, const Tokens& keys) const {
    int64_t groups = (tile->count + ROWS - 1) / ROWS;
    bool there = n < w.z.blocks && part.reads(n);
    blocks.look_ahead(tile->ahead, b, kv, n, keys, groups);
    if (there) tile->ahead.words(sums_of(n), w.block_size(), groups);
  }

  // The rows of the next tile, and its sums where they are kept.
  void look_ahead_rows(int64_t b, int64_t head, int64_t begin, const Tokens& queries, const float* dq, int64_t blocks) {
    int64_t end = begin + c.plan.tile < queries.count ? begin + c.plan.tile : queries.count;
    int64_t groups = (blocks < w.stretch ? blocks : w.stretch) * ((tile->count + ROWS - 1) / ROWS) + 1;
    Ahead& x = tile->next;
    x.tile();
    x.rows(Rows::of(c.q, (int)c.type, b, head, (int)c.dim, queries.order), begin, end, groups);
    x.rows(Rows::of(c.d_out, (int)c.type, b, head, (int)c.dim_v, queries.order), begin, end, groups);
    x.rows(Rows::of(c.out, (int)c.type, b, head, (int)c.dim_v, queries.order), begin, end, groups);
    if (dq) x.words(dq, TILE * w.z.wide_d, groups);
  }

  void take_rows(int64_t b, int64_t head, int64_t begin, int64_t n, const Tokens& queries) {
    BackTile<HALF>& x = *tile;
    Rows q = Rows::of(c.q, (int)c.type, b, head, (int)c.dim, queries.order);
    Rows g = Rows::of(c.d_out, (int)c.type, b, head, (int)c.dim_v, queries.order);
    int64_t qw = whole_units(w.z.d), gw = whole_units(w.z.dv);
    x.count = (int)n;
    vi bad_q = {}, bad_g = {};
    for (int64_t i = 0; i < n; i++) {
      int64_t slot = queries.slot(begin + i), at = (b * c.heads + head) * c.queries.count + slot;
      float lse = c.lse[at];
      bool there = queries.index[begin + i] >= 0 && lse != -INFINITY;
      x.rows[i] = {(int32_t)(begin + i), (int32_t)head, (int32_t)i};
      take_query<HALF>(q, begin + i, there, q_sign < 0, x.q + i * qw);
      take_query<HALF>(g, begin + i, there, false, x.g + i * gw);
      bad_q |= not_numbers<HALF>(x.q + i * qw, (int)qw);
      bad_g |= not_numbers<HALF>(x.g + i * gw, (int)gw);
      x.down[i] = there ? -lse * LOG2E : 0;
      x.delta[i] = there ? dot_rows(c.out, c.d_out, c.type, b, head, slot, c.dim_v) - c.d_lse[at] : 0;
    }
    x.q_finite = !bits_of(bad_q), x.g_finite = !bits_of(bad_g);
    if (HALF) {
      pair_up(x.q, qw, n, x.q_rows, (int)c.dim);
      pair_up(x.g, gw, n, x.g_rows, (int)c.dim_v);
    }
  }

  // Rows of words (n of them, the tile is filled up with 0) as pairs of rows.
  static void pair_up(float* from, int64_t step, int64_t n, float* to, int columns) {
    int64_t filled = whole_units((int)n);
    memset(from + n * step, 0, (size_t)((filled - n) * step) * 4);
    for (int64_t i = 0; i < filled; i += UNIT)
      pack_rows<HALF>(from + i * step, step, columns, to + i / 2 * whole_units(columns));
  }

  // The gradients of the keys of block n, from their sums.
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

// Adds in order what was kept of a block of keys that nobody owns, and writes it.
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
    for (int64_t i = 0; i < size; i += W) store(total + i, load(total + i) + load(x + i));
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
  if (!sums.at) return 2;
  int64_t next = 0, most_live = 1;
  for (int64_t i = 0; i < c.plan.rows * w.splits; i++) most_live = w.parts[i].live > most_live ? w.parts[i].live : most_live;
  int threads = (int)(c.threads < w.items ? c.threads : w.items), failed = 0;
#pragma omp parallel num_threads(threads < 1 ? 1 : threads)
  {
    Worker<HALF> worker(w, most_live);
    if (!worker.ready())
      __atomic_store_n(&failed, 2, __ATOMIC_RELAXED);
    else
      for (int64_t n; (n = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < w.items;) {
        int64_t heads = w.items / w.splits, split = w.splits - 1 - n / heads, head = n % heads;  // the longest first
        int64_t b = head / c.kv_heads, kv = head % c.kv_heads;
        float* gradients[8];
        sums.gradients(b, split, gradients);
        if (!worker.run(b, kv, split, sums.kept(head, split), gradients)) __atomic_store_n(&failed, 2, __ATOMIC_RELAXED);
      }
#pragma omp barrier
    int64_t all = c.batch * c.kv_heads * w.z.blocks;
    if (!__atomic_load_n(&failed, __ATOMIC_RELAXED))
#pragma omp for
      for (int64_t i = 0; i < all; i++) gather<HALF>(worker, w, sums, i / w.z.blocks, i % w.z.blocks, worker.live);
  }
  if (!failed) sums.add_tables();
  return failed;
}

}  // namespace

extern "C" int headway_backward(const headway_call* call) {
  const headway_call& c = *call;
  if (c.abi != HEADWAY_ABI) return 1;
  if (c.plan.tile > TILE || c.dim > WIDEST || c.dim_v > WIDEST || c.type > HEADWAY_BFLOAT16) return 3;
  if (c.kv_type != c.type || c.score_count > 8) return 3;
#if HEADWAY_LEVEL >= 3
  if (c.type == HEADWAY_BFLOAT16) return run<true>(c);
#endif
  return run<false>(c);
}
