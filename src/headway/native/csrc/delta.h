// One head of the gated delta rule, in chunks, forward and backward. With c_i the sum of log decays up to slot i of a chunk,
// S the state before the chunk and A_ij = b_i of_keys[i][j] (delta_pairs.h):
//   (I + A) u = b (v - (k e^c) S) = b r,   o = (q e^c) S + of_queries u,   S' = diag(e^(c_n)) S + (k e^(c_n - c))^T u
// Backward, with dS the gradient of S': (I + A)^T y = of_queries^T do + (k e^(c_n - c)) dS, dv = b y, d of_keys = - b y u^T,
// db = y.r - sum_j (y.u_j) of_keys[.][j]. Each use of q_i, and of k_i where it reads, has a factor e^(c_i), each use of k_j
// where it is written e^(-c_j): so dc = q dq + k (dk where it reads - dk where it is written), without the terms of a slot
// with itself (`alone`, and `ending` of the last slot and c_n), which cancel.
// A rule that does not erase has A = 0 and r = v, in both directions.
#pragma once
#include "delta_pairs.h"
#include "delta_slot.h"
#include "memory.h"

namespace {

constexpr int FEW = 6;  // chunks of up to so many slots are computed slot by slot

template <bool HALF, bool CHANNELS>
struct Delta {
  const headway_delta& c;
  const int d, e;  // dim and dim_v in whole units
  const bool back, erases;
  int64_t b = 0, head = 0, begin = 0;
  int count = 0, n = 0;  // slots of the chunk, and the same in whole units
  bool fresh = false;    // the state before it is 0

  explicit Delta(const headway_delta& x)
      : c(x), d(whole_units((int)x.dim)), e(whole_units((int)x.dim_v)), back(x.d_out.data || x.d_state), erases(x.erases) {}

  // Allocates memory for a chunk, and in the backward for what is kept of each chunk. Arrays whose padding must be 0 come first.
  bool ready() {
    float* base = nullptr;
    for (int pass = 0; pass < 2; pass++) {
      int64_t size = 0;
      auto take = [&](int64_t some, auto&... to) {
        ((to = base ? base + size : nullptr, size += some), ...);
      };
      const int64_t most = c.slots < CHUNK ? whole_units((int)c.slots) : CHUNK, square = (int64_t)d * e;
      take(most * d, q, k), take(most * e, v), take(CHANNELS ? most * d : CHUNK, sums, steps);
      if (!decodes()) take(square, state);
      if (back) take(square, d_state);
      const int64_t zeros = size;
      take(CHUNK, beta, q_by, k_by, alone), take(d, through), take(most * e, r);
      if (!decodes()) {
        take(most * d, into, minus, onwards), take(most * e, u), take(CHUNK * (d > e ? d : e), turned);
        take(CHUNK * CHUNK, of_keys, of_queries, system, decay);
        if (CHANNELS) take(most * d, far), take(UNIT * d, near_q, near_k);
      }
      if (back) {
        take(most * d, dq, reads, writes), take(most * e, d_out, y), take(CHUNK * CHUNK, d_keys, d_queries);
        take(square, turned_state), take(d, last, ending), take((c.slots / CHUNK + 1) * square, states);
        take(c.slots * e, rs, us), take(c.slots, counts);
      }
      if (base) {
        memset(base, 0, (size_t)zeros * 4);
      } else {
        memory = base = floats(size);
        if (!base) return false;
      }
    }
    return true;
  }

  void run(int64_t row, int64_t of) {
    b = row, head = of;
    const float* past = c.past ? c.past + (row * c.heads + of) * c.dim * c.dim_v : nullptr;
    float* after = c.state + (row * c.heads + of) * c.dim * c.dim_v;
    if (decodes()) {
      at(0);
      for (int i = 0; i < count; i++) step(i, i ? after : past, after, (int)c.dim);
      return write_out();
    }
    copy_state(state, e, past, c.dim_v);
    int64_t chunks = 0, kept = 0;
    for (int64_t from = 0; from < c.slots; from += count, chunks++) {
      at(from);
      if (back) {
        counts[chunks] = (float)count;
        if (!fresh) memcpy(states + kept++ * d * e, state, (size_t)(d * e) * 4);
      }
      if (fresh) memset(state, 0, (size_t)(d * e) * 4);
      if (count <= FEW && !back) {
        for (int i = 0; i < count; i++) step(i, state, state, d);
      } else {
        forward();
      }
      if (!back) write_out();
    }
    if (!back) return copy_state(after, c.dim_v, state, e);
    backward(chunks, kept);
  }

 private:
  Owned<float> memory;
  float *q, *k, *v, *into, *minus, *onwards;  // q e^c, -k e^c, k e^(c_n - c)
  float *r, *u, *of_keys, *of_queries, *system, *decay, *turned, *state, *beta, *q_by, *k_by, *alone;
  float *sums, *steps, *through, *far = nullptr, *near_q = nullptr, *near_k = nullptr;
  float *dq, *reads, *writes, *d_out, *y, *d_keys, *d_queries, *d_state, *turned_state, *last, *ending;
  float *states, *rs, *us, *counts;  // per chunk: the states before it, r and u, number of slots

  static constexpr int SIZE = HALF ? 2 : 4;
  // Returns whether the call is a few slots after a given state, which is then updated in place.
  bool decodes() const { return c.slots && c.slots <= FEW && e == c.dim_v && c.past && !c.begins && !back; }
  int64_t place(int64_t slot) const { return (b * c.heads + head) * c.slots + slot; }
  static char* row_of(const headway_tensor& t, int64_t row, int64_t of, int64_t slot) {
    return (char*)t.data + (row * t.batch + of * t.head + slot * t.slot) * SIZE;
  }
  Pairs<CHANNELS> pairs() const { return {n, d, q, k, sums, steps, turned, decay, near_q, near_k, far}; }

  void copy_state(float* to, int64_t to_row, const float* from, int64_t from_row) const {
    copy_rows(to, to_row, from, from_row, c.dim, c.dim_v);
  }

  // Reads the chunk that begins at slot `from`; it ends before the next document.
  void at(int64_t from) {
    begin = from;
    const uint8_t* begins = c.begins ? c.begins + b * c.begins_batch : nullptr;
    fresh = begins && begins[from] ? true : !from && !c.past;
    int64_t end = from + CHUNK < c.slots ? from + CHUNK : c.slots;
    for (int64_t i = from + 1; begins && i < end; i++)
      if (begins[i]) end = i;
    read((int)(end - from));
  }
  void read(int some) {
    count = some, n = whole_units(some);
    const int64_t of = head / (c.heads / c.key_heads), first = place(begin);
    for (int i = 0; i < n; i++) {
      if (i >= count) {
        memset(q + i * d, 0, (size_t)d * 4), memset(k + i * d, 0, (size_t)d * 4), memset(v + i * e, 0, (size_t)e * 4);
        beta[i] = 0;
      } else {
        read_row<HALF>(q + i * d, row_of(c.q, b, of, begin + i), c.dim);
        read_row<HALF>(k + i * d, row_of(c.k, b, of, begin + i), c.dim);
        read_row<HALF>(v + i * e, row_of(c.v, b, head, begin + i), c.dim_v);
        beta[i] = c.beta[first + i];
        if (c.eps >= 0) q_by[i] = unit(q + i * d, d, c.eps), k_by[i] = unit(k + i * d, d, c.eps);
      }
      const float* g = c.log_decay + (first + i) * c.channels;
      if (!CHANNELS) {
        sums[i] = (i ? sums[i - 1] : 0) + (i < count ? *g : 0);
        continue;
      }
      each_words(c.dim, [&](int64_t x, int lanes, int) __attribute__((always_inline)) {
        const vf step = i < count ? get<false>(g, x, lanes) : splat(0);
        store(sums + i * d + x, (i ? load(sums + (i - 1) * d + x) : splat(0)) + step);
        store(steps + i * d + x, exp_below_0(step));
      });
    }
  }
  // Computes one slot, from state `from` to state `to` (or in place); `rows` of their rows, whole units of columns.
  void step(int i, const float* from, float* to, int rows) {
    const float g = CHANNELS ? 0 : i ? sums[i] - sums[i - 1] : sums[0];
    const float* decays = CHANNELS ? steps + i * d : nullptr;
    const Slot slot = {q + i * d, k + i * d, v + i * e, r + i * e, decays, expf(g), beta[i], erases};
    each_slot_columns(e, [&](auto units, int at) __attribute__((always_inline)) {
      slot_columns<decltype(units)::value>(slot, from + at, to + at, at, e, rows);
    });
  }
  void write_out() const {  // the outputs are in r
    for (int i = 0; i < count; i++)
      write_row<HALF>(row_of(c.out, b, head, begin + i), r + i * e, c.dim_v, (float)c.scale);
  }

  // Computes the decays, and the sums over pairs of slots of the chunk.
  void prepare(bool queries) {
    pairs().forward(erases ? of_keys : nullptr, queries ? of_queries : nullptr);
    const float* end = sums + (CHANNELS ? (n - 1) * d : n - 1);
    for (int i = 0; i < n; i++) {
      const float first = CHANNELS ? 0 : expf(sums[i]), rest = CHANNELS ? 0 : expf(*end - sums[i]);
      for (int x = 0; x < d; x += W) {
        const vf before = CHANNELS ? exp_below_0(load(sums + i * d + x)) : splat(first);
        const vf after = CHANNELS ? exp_below_0(load(end + x) - load(sums + i * d + x)) : splat(rest);
        const vf key = load(k + i * d + x);
        store(into + i * d + x, load(q + i * d + x) * before);
        store(minus + i * d + x, -key * before);
        store(onwards + i * d + x, key * after);
        if (i == n - 1) store(through + x, before);
      }
      for (int j = 0; erases && j < n; j += W) store(system + i * CHUNK + j, load(of_keys + i * CHUNK + j) * -beta[i]);
    }
  }
  void forward() {
    prepare(!back);
    memcpy(r, v, (size_t)(n * e) * 4);
    if (erases && !fresh) multiply<true>(r, e, {minus, d, 1}, state, e, n, e, d);
    memcpy(u, r, (size_t)(n * e) * 4), scale_rows(u, beta, n, e);
    if (erases) solve<true>(u, {system, CHUNK, 1}, n, e);
    if (back) {
      memcpy(rs + begin * e, r, (size_t)(count * e) * 4), memcpy(us + begin * e, u, (size_t)(count * e) * 4);
    } else {
      fresh ? (void)memset(r, 0, (size_t)(n * e) * 4) : multiply<false>(r, e, {into, d, 1}, state, e, n, e, d);
      add_triangle<true>(r, {of_queries, CHUNK, 1}, u, n, e);
    }
    if (!fresh) scale_rows(state, through, d, e);
    multiply<true>(state, e, Left{onwards, d, 1}.turned(), u, e, d, e, n);
  }

  void backward(int64_t chunks, int64_t kept) {
    const int64_t first = (b * c.heads + head) * c.dim * c.dim_v;
    copy_state(d_state, e, c.d_state ? c.d_state + first : nullptr, c.dim_v);
    for (int64_t end = c.slots; chunks-- > 0; end = begin) {
      at(end - (int64_t)counts[chunks]);
      back_chunk(fresh ? nullptr : states + --kept * d * e);
    }
    copy_state(c.d_past + first, c.dim_v, d_state, e);
  }

  void back_chunk(const float* before) {
    prepare(true);
    const size_t rest = (size_t)((n - count) * e) * 4, rows = (size_t)(n * d) * 4;
    memcpy(r, rs + begin * e, (size_t)(count * e) * 4), memset(r + count * e, 0, rest);
    memcpy(u, us + begin * e, (size_t)(count * e) * 4), memset(u + count * e, 0, rest);
    memset(d_out, 0, (size_t)(n * e) * 4);
    for (int i = 0; c.d_out.data && i < count; i++)
      read_row<HALF>(d_out + i * e, row_of(c.d_out, b, head, begin + i), c.dim_v, (float)c.scale);

    multiply<false>(y, e, {onwards, d, 1}, d_state, e, n, e, d);
    add_triangle<false>(y, {of_queries, 1, CHUNK}, d_out, n, e);
    if (erases) solve<false>(y, {system, 1, CHUNK}, n, e);
    transpose(turned, CHUNK, u, e, n, e);
    for (int i = 0; i < n; i += UNIT) {
      multiply<false>(d_queries + i * CHUNK, CHUNK, {d_out + i * e, e, 1}, turned, CHUNK, UNIT, i + UNIT, e);
      if (erases) multiply<false>(d_keys + i * CHUNK, CHUNK, {y + i * e, e, 1}, turned, CHUNK, UNIT, i + UNIT, e);
    }
    if (!erases) memset(d_keys, 0, (size_t)(n * CHUNK) * 4);
    for (int i = 0; i < n; i++) {
      float* row = d_keys + i * CHUNK;
      alone[i] = d_queries[i * CHUNK + i];
      const int wide = (i / UNIT + 1) * UNIT;
      const float d_beta = dot(y + i * e, r + i * e, e) - (erases ? dot(row, of_keys + i * CHUNK, wide) : 0);
      if (i < count) c.d_beta[place(begin + i)] = d_beta;
      for (int j = 0; j < wide; j += W) store(row + j, load(row + j) * -beta[i]);
      for (int j = 0; j < e; j += W) store(y + i * e + j, load(y + i * e + j) * beta[i]);
      if (i < count) write_row<HALF>(row_of(c.dv, b, head, begin + i), y + i * e, c.dim_v);
    }

    transpose(turned_state, d, d_state, e, d, e);
    multiply<false>(writes, d, {u, e, 1}, turned_state, d, n, d, e);
    if (before) {
      transpose(turned_state, d, before, e, d, e);
      multiply<false>(dq, d, {d_out, e, 1}, turned_state, d, n, d, e);
    } else {
      memset(dq, 0, rows);
    }
    before && erases ? multiply<false>(reads, d, {y, e, 1}, turned_state, d, n, d, e) : (void)memset(reads, 0, rows);
    decay_gradients(before);
    scale_rows(d_state, through, d, e);
    if (before) {
      multiply<true>(d_state, e, Left{into, d, 1}.turned(), d_out, e, d, e, n);
      if (erases) multiply<true>(d_state, e, Left{minus, d, 1}.turned(), y, e, d, e, n);
    } else {
      memset(d_state, 0, (size_t)(d * e) * 4);
    }
    pairs().backward(d_keys, d_queries, dq, reads, writes);
    for (int i = count - 1; i >= 0; i--) write_gradients(i);
  }

  // Turns the gradients of q e^c, -k e^c and k e^(c_n - c) into those of q and k; `last` becomes that of c_n.
  void decay_gradients(const float* before) {
    const float* end = sums + (CHANNELS ? (n - 1) * d : n - 1);
    for (int x = 0; x < d; x++) last[x] = before ? through[x] * dot(before + x * e, d_state + x * e, e) : 0;
    for (int i = 0; i < n; i++) {
      const float first = CHANNELS ? 0 : expf(sums[i]), rest = CHANNELS ? 0 : expf(*end - sums[i]);
      for (int x = 0; x < d; x += W) {
        const vf in = CHANNELS ? exp_below_0(load(sums + i * d + x)) : splat(first);
        const vf on = CHANNELS ? exp_below_0(load(end + x) - load(sums + i * d + x)) : splat(rest);
        store(dq + i * d + x, load(dq + i * d + x) * in);
        store(reads + i * d + x, load(reads + i * d + x) * -in);
        const vf written = load(writes + i * d + x) * on;
        store(writes + i * d + x, i == count - 1 ? splat(0) : written);
        i == count - 1 ? store(ending + x, written) : add_to(last + x, written * load(k + i * d + x));
      }
    }
  }

  // Writes the gradients of slot i; slots are visited from the last: `last` accumulates the gradient of c from the right.
  void write_gradients(int i) {
    float *of_q = dq + i * d, *of_k = reads + i * d;
    const float *query = q + i * d, *key = k + i * d, *written = writes + i * d;
    vf sum = {};
    for (int x = 0; x < d; x += W) {
      const vf y = load(of_k + x), z = load(written + x);
      const vf now = load(last + x) + load(query + x) * load(of_q + x) + load(key + x) * (y - z);
      store(last + x, now);
      store(of_q + x, load(of_q + x) + load(key + x) * alone[i]);
      store(of_k + x, y + z + load(query + x) * alone[i] + (i == count - 1 ? load(ending + x) : splat(0)));
      sum += now;
    }
    float* g = c.d_log_decay + place(begin + i) * c.channels;
    if (CHANNELS)
      memcpy(g, last, (size_t)c.dim * 4);
    else
      *g = sum_of(sum);
    if (c.eps >= 0) unit_gradient(of_q, query, q_by[i], d), unit_gradient(of_k, key, k_by[i], d);
    write_row<HALF>(row_of(c.dq, b, head, begin + i), of_q, c.dim);
    write_row<HALF>(row_of(c.dk, b, head, begin + i), of_k, c.dim);
  }
};

}  // namespace
