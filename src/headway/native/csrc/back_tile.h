// A tile of queries in the backward: its rows in the layouts of the products, and what each pass over a block leaves to the
// next.
#pragma once
#include "blocks.h"
#include "groups.h"

namespace {

// Returns the dot product of row (b, h, slot) of x and that of y.
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
struct BackTile {
  Sizes z;
  int count;
  float unit;       // base-2 exponent per unit of raw score
  bool q_finite, g_finite;
  Ahead ahead, next;  // prefetches: of the next block, of the next tile
  Row rows[TILE];
  // per row: - logsumexp in base 2, and delta = sum(d_out * out) - d_lse
  float down[TILE], delta[TILE];
  float *q, *g;            // [rows][words]: queries and d_out, for products over their columns
  float *q_rows, *g_rows;  // [steps][columns]: the same for products over rows (pairs of rows in bf16)
  float* dq;               // [rows][columns]
  int low[4], high[4];     // per panel of the block: the rows low .. high - 1 see it
  int groups_now;
  Group groups[TILE / ROWS + 3];
  alignas(64) float x[(TILE + 1) * BLOCK];  // [row][64]: exponents, then weights
  alignas(64) float raw[TILE * BLOCK];    // [row][64]: raw scores, if there are steps on scores
  alignas(64) float of_row[TILE * BLOCK / 2];  // [row][32]: dS as pairs along keys (bf16)
  alignas(64) float p[TILE * BLOCK];    // weights: pairs of rows [row / 2][64] in bf16, else [row][64] (if EXTRA)
  alignas(64) float ds[TILE * BLOCK];   // dS in the same layout

  // Reads the n queries of a head from `begin` on: rows, logsumexp and delta. `negate`: the scale is negative.
  void take(const headway_call& c, const Tokens& queries, int64_t b, int64_t head, int64_t begin, int64_t n,
            bool negate) {
    Rows q_from = Rows::of(c.q, (int)c.type, b, head, (int)c.dim, queries.order);
    Rows g_from = Rows::of(c.d_out, (int)c.type, b, head, (int)c.dim_v, queries.order);
    int64_t qw = whole_units(z.d), gw = whole_units(z.dv);
    count = (int)n;
    vi bad_q = {}, bad_g = {};
    for (int64_t i = 0; i < n; i++) {
      int64_t slot = queries.slot(begin + i), at = (b * c.heads + head) * c.queries.count + slot;
      float lse = c.lse[at];
      bool there = queries.index[begin + i] >= 0 && lse != -INFINITY;
      rows[i] = {(int32_t)(begin + i), (int32_t)head, (int32_t)i};
      take_query<HALF>(q_from, begin + i, there, negate, q + i * qw);
      take_query<HALF>(g_from, begin + i, there, false, g + i * gw);
      bad_q |= not_numbers<HALF>(q + i * qw, (int)qw);
      bad_g |= not_numbers<HALF>(g + i * gw, (int)gw);
      down[i] = there ? -lse * LOG2E : 0;
      delta[i] = there ? dot_rows(c.out, c.d_out, c.type, b, head, slot, c.dim_v) - c.d_lse[at] : 0;
    }
    q_finite = !bits_of(bad_q), g_finite = !bits_of(bad_g);
    if (HALF) {
      pair_up(q, qw, n, q_rows, (int)c.dim);
      pair_up(g, gw, n, g_rows, (int)c.dim_v);
    }
  }

 private:
  // Packs n rows of words as pairs of rows; the tile is padded with zeros to a multiple of 16 rows.
  static void pair_up(float* from, int64_t step, int64_t n, float* to, int columns) {
    int64_t filled = whole_units((int)n);
    memset(from + n * step, 0, (size_t)((filled - n) * step) * 4);
    for (int64_t i = 0; i < filled; i += UNIT)
      pack_rows<HALF>(from + i * step, step, columns, to + i / 2 * whole_units(columns));
  }
};

}  // namespace
