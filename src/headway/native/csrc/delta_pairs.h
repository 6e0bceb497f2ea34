// Products of the gated delta rule: general matrices, triangular ones, and sums over pairs of slots with decays.
#pragma once
#include "microkernel.h"

namespace {

constexpr int CHUNK = 64;  // slots that are computed together

// A matrix as the left factor of a product: element (r, s) is at[r * row + s * step], so `turned` is its transpose.
struct Left {
  const float* at;
  int64_t row, step;
  Left turned() const { return {at, step, row}; }
  Left from(int64_t r, int64_t s) const { return {at + r * row + s * step, row, step}; }
};

// out [rows][wide] = A B, or out += A B if ADD; A [rows][steps], B [steps][wide].
template <bool ADD>
__attribute__((noinline)) void multiply(float* out, int64_t out_row, Left a, const float* b, int64_t b_row, int rows,
                                        int wide, int steps) {
  each_columns(wide, [&](auto units, int at) __attribute__((always_inline)) {
    each_group(rows, [&](auto some, int row) __attribute__((always_inline)) {
      constexpr int R = decltype(some)::value, U = decltype(units)::value;
      vf acc[R][U * N] = {};
      float* to = out + row * out_row + at;
      if (ADD) UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < U * N; i++) acc[r][i] = load(to + r * out_row + i * W);
      const float* columns[U];
      UNROLL for (int i = 0; i < U; i++) columns[i] = b + at + i * UNIT;
      product<false, R, U>(acc, a.at + row * a.row, a.row, a.step, columns, b_row, steps);
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < U * N; i++) store(to + r * out_row + i * W, acc[r][i]);
    });
  });
}

// out [n][wide] += A B, where A [n][n] is 0 above its diagonal (LOWER), or below it.
template <bool LOWER>
void add_triangle(float* out, Left a, const float* b, int n, int wide) {
  for (int i = 0; i < n; i += UNIT) {
    const int from = LOWER ? 0 : i, to = LOWER ? i + UNIT : n;
    multiply<true>(out + i * wide, wide, a.from(i, from), b + from * wide, wide, UNIT, wide, to - from);
  }
}

// Solves y - A y = x in place: x [n][wide] becomes y. A [n][n] is 0 on and above its diagonal (LOWER), or on and below it.
template <bool LOWER>
void solve(float* x, Left a, int n, int wide) {
  for (int done = 0; done < n; done += UNIT) {
    const int i = LOWER ? done : n - UNIT - done, from = LOWER ? 0 : i + UNIT;
    float* block = x + i * wide;
    if (done) multiply<true>(block, wide, a.from(i, from), x + from * wide, wide, UNIT, wide, done);
    const Left own = a.from(i, i);
    for (int at = 0; at < wide; at += W) {
      vf rows[UNIT];
      UNROLL for (int r = 0; r < UNIT; r++) rows[r] = load(block + r * wide + at);
      UNROLL for (int r = 1; r < UNIT; r++)
        UNROLL for (int s = 0; s < r; s++) {
          const int to = LOWER ? r : UNIT - 1 - r, of = LOWER ? s : UNIT - 1 - s;
          rows[to] += splat(own.at[to * own.row + of * own.step]) * rows[of];
        }
      UNROLL for (int r = 0; r < UNIT; r++) store(block + r * wide + at, rows[r]);
    }
  }
}

// out = x^T for x [rows][wide], whose sizes are multiples of 16.
INLINE void transpose(float* out, int64_t out_row, const float* x, int64_t x_row, int rows, int wide) {
  alignas(64) float tile[UNIT * LINE];
  for (int i = 0; i < rows; i += UNIT)
    for (int j = 0; j < wide; j += UNIT) {
      transpose16(x + i * x_row + j, x_row, tile);
      for (int r = 0; r < UNIT; r++) copy_words(out + (j + r) * out_row + i, tile + r * LINE, UNIT);
    }
}

INLINE float dot(const float* x, const float* y, int wide) {
  vf sum = {};
  for (int i = 0; i < wide; i += W) sum += load(x + i) * load(y + i);
  return sum_of(sum);
}

// Sums over pairs of slots of a chunk: queries and keys q, k [n][d], cumulative log decays c, [n] or [n][d] (CHANNELS), and
// for channels the decays of single slots a = e^(log decay). With decay(i, j) = e^(c_i - c_j):
//
//   of_keys[i][j]    = sum_d k_id k_jd decay(i, j)_d,  j < i        [n][CHUNK], 0 elsewhere
//   of_queries[i][j] = sum_d q_id k_jd decay(i, j)_d,  j <= i
//
// Either may be null, and is then not computed.
template <bool CHANNELS>
struct Pairs {
  int n, d;
  const float *q, *k, *c, *a;
  float *turned, *decay;                // scratch: [d][CHUNK], and [CHUNK][CHUNK]
  float *near_q, *near_k, *far;         // scratch for channels: [16][d], [16][d], [CHUNK][d]

  void forward(float* of_keys, float* of_queries) const {
    if (!CHANNELS) {
      transpose(turned, CHUNK, k, d, n, d);
      decays();
    }
    for (int i = 0; i < n; i += UNIT) {
      const int wide = CHANNELS ? i : i + UNIT;
      if (CHANNELS) approach(i);
      if (CHANNELS && i) transpose(turned, CHUNK, far, d, i, d);
      const float *x = CHANNELS ? near_k : k + i * d, *y = CHANNELS ? near_q : q + i * d;
      if (wide) {
        if (of_keys) multiply<false>(of_keys + i * CHUNK, CHUNK, {x, d, 1}, turned, CHUNK, UNIT, wide, d);
        if (of_queries) multiply<false>(of_queries + i * CHUNK, CHUNK, {y, d, 1}, turned, CHUNK, UNIT, wide, d);
      }
      if (CHANNELS) meet(i, of_keys, of_queries);
      for (int r = i; r < i + UNIT; r++) {
        float *keys = of_keys ? of_keys + r * CHUNK : nullptr, *queries = of_queries ? of_queries + r * CHUNK : nullptr;
        if (!CHANNELS && keys) weigh(keys, r, r - 1, i + UNIT);
        if (!CHANNELS && queries) weigh(queries, r, r, i + UNIT);
        for (int j = r; keys && j < n; j++) keys[j] = 0;
        for (int j = r + 1; queries && j < n; j++) queries[j] = 0;
      }
    }
  }

  // Adds to the gradients of q, of k where it reads (slot i) and of k where it is written (slot j), from the gradients of both
  // matrices, which are overwritten; only pairs with j < i.
  void backward(float* d_keys, float* d_queries, float* dq, float* reads, float* writes) const {
    if (!CHANNELS) {
      for (int r = 0; r < n; r++) weigh(d_keys + r * CHUNK, r, r - 1, n), weigh(d_queries + r * CHUNK, r, r - 1, n);
      add_triangle<true>(dq, {d_queries, CHUNK, 1}, k, n, d);
      add_triangle<true>(reads, {d_keys, CHUNK, 1}, k, n, d);
      add_triangle<false>(writes, {d_queries, 1, CHUNK}, q, n, d);
      add_triangle<false>(writes, {d_keys, 1, CHUNK}, k, n, d);
      return;
    }
    for (int i = 0; i < n; i += UNIT) {
      part(i, d_keys, d_queries, dq, reads, writes);
      if (!i) continue;
      approach(i);
      const Left keys = {d_keys + i * CHUNK, CHUNK, 1}, queries = {d_queries + i * CHUNK, CHUNK, 1};
      // gradients of the results of approach(); those of `far` are stored in `turned`, which has room for them
      multiply<false>(turned, d, keys.turned(), near_k, d, i, d, UNIT);
      multiply<true>(turned, d, queries.turned(), near_q, d, i, d, UNIT);
      const float* edge = c + (i - 1) * d;
      for (int j = 0; j < i; j++)
        for (int x = 0; x < d; x += W)
          add_to(writes + j * d + x, load(turned + j * d + x) * exp_below_0(load(edge + x) - load(c + j * d + x)));
      multiply<false>(near_k, d, keys, far, d, UNIT, d, i);
      multiply<false>(near_q, d, queries, far, d, UNIT, d, i);
      for (int r = 0; r < UNIT; r++)
        for (int x = 0; x < d; x += W) {
          const vf into = exp_below_0(load(c + (i + r) * d + x) - load(edge + x));
          add_to(reads + (i + r) * d + x, load(near_k + r * d + x) * into);
          add_to(dq + (i + r) * d + x, load(near_q + r * d + x) * into);
        }
    }
  }

 private:
  void decays() const {
    for (int i = 0; i < n; i++)
      for (int j = 0; j <= i; j += W) store(decay + i * CHUNK + j, exp_below_0(splat(c[i]) - load(c + j)));
  }
  // Multiplies row r of a matrix by its decays up to column `last`; columns after that become 0.
  void weigh(float* row, int r, int last, int wide) const {
    for (int j = 0; j < wide; j += W) {
      const int left = last + 1 - j;
      const uint32_t seen = left <= 0 ? 0 : left >= W ? (uint32_t)((1ull << W) - 1) : (1u << left) - 1;
      store(row + j, only(seen, load(row + j) * load(decay + r * CHUNK + j)));
    }
  }

  // Factors the decays between slots i .. i + 15 and all slots before them at slot i - 1, the edge: near rows get
  // e^(c - c_edge), far rows e^(c_edge - c). Both exponents are <= 0, where e^(c_i) e^(-c_j) could overflow.
  void approach(int i) const {
    if (!i) return;
    const float* edge = c + (i - 1) * d;
    for (int r = 0; r < UNIT; r++)
      for (int x = 0; x < d; x += W) {
        const int64_t at = (i + r) * d + x;
        const vf into = exp_below_0(load(c + at) - load(edge + x));
        store(near_q + r * d + x, load(q + at) * into);
        store(near_k + r * d + x, load(k + at) * into);
      }
    for (int j = 0; j < i; j++)
      for (int x = 0; x < d; x += W)
        store(far + j * d + x, load(k + j * d + x) * exp_below_0(load(edge + x) - load(c + j * d + x)));
  }

  // Pairs within slots i .. i + 15: a key is decayed slot by slot.
  void meet(int i, float* of_keys, float* of_queries) const {
    float* key = near_k;
    for (int j = i; j < i + UNIT; j++) {
      copy_words(key, k + j * d, d);
      for (int r = j; r < i + UNIT; r++) {
        vf keys = {}, queries = {};
        for (int x = 0; x < d; x += W) {
          vf y = load(key + x);
          if (r > j) store(key + x, y *= load(a + r * d + x));
          keys += y * load(k + r * d + x), queries += y * load(q + r * d + x);
        }
        if (of_keys) of_keys[r * CHUNK + j] = sum_of(keys);
        if (of_queries) of_queries[r * CHUNK + j] = sum_of(queries);
      }
    }
  }
  // The gradients of `meet`: adds those of pairs within slots i .. i + 15.
  void part(int i, const float* d_keys, const float* d_queries, float* dq, float* reads, float* writes) const {
    float* by = near_k;
    for (int j = i; j < i + UNIT; j++) {
      for (int x = 0; x < d; x += W) store(by + x, splat(1));
      for (int r = j + 1; r < i + UNIT; r++) {
        const vf of_key = splat(d_keys[r * CHUNK + j]), of_query = splat(d_queries[r * CHUNK + j]);
        for (int x = 0; x < d; x += W) {
          const vf decayed = load(by + x) * load(a + r * d + x);
          store(by + x, decayed);
          const vf key = decayed * load(k + j * d + x);
          add_to(dq + r * d + x, of_query * key);
          add_to(reads + r * d + x, of_key * key);
          add_to(writes + j * d + x, decayed * (of_query * load(q + r * d + x) + of_key * load(k + r * d + x)));
        }
      }
    }
  }
};

}  // namespace
