// A few rows times matrices of weights, shared out among a team of threads: see linear.h.
#pragma once
#include <stdlib.h>

#include "linear.h"
#include "prologue.h"

namespace {

// Memory of a thread that calls, kept for its next call.
struct Scratch {
  char* at = nullptr;
  int64_t size = 0;
  ~Scratch() { free(at); }

  bool grow(int64_t bytes) {
    if (bytes <= size) return true;
    free(at);
    size = rounded(bytes, 4096);
    at = (char*)aligned_alloc(64, (size_t)size);
    if (!at) size = 0;
    return at != nullptr;
  }
};

// Part `number` of `parts` of [0, count).
struct Share {
  int64_t from, to;
  Share(int64_t count, int64_t number, int64_t parts) : from(count * number / parts), to(count * (number + 1) / parts) {}
};

INLINE bool is_packed(int64_t type) { return type == HEADWAY_INT8 || type == HEADWAY_INT4; }

// One call: `prepare` by all of a team, then, behind a barrier, `multiply` by all of it.
struct Products {
  const headway_products& c;
  int64_t rows = 0, groups, panels = 0;
  bool pairs = false, plain = false, packed = false;
  float *words = nullptr, *floats = nullptr;  // rows as bf16 pairs [rows][groups * 16], as float32 [rows][groups * 32]
  Rounded rounded{};

  explicit Products(const headway_products& call) : c(call), groups((call.inputs + GROUP - 1) / GROUP) {
    each_rows(c.rows, [&](auto some, int64_t) { rows += decltype(some)::value; });
    for (int64_t i = 0; i < c.count; i++) {
      int64_t type = c.matrices[i].type;
      (is_packed(type) ? packed : takes_pairs(type) ? pairs : plain) = true;
      panels += panels_of(c.matrices[i]);
    }
  }

  static int unknown(const headway_products& c) {
    if (c.abi != HEADWAY_ABI) return 1;
    if ((c.type != HEADWAY_FLOAT32 && c.type != HEADWAY_BFLOAT16) || c.rows > MOST_ROWS) return 3;
    for (int64_t i = 0; i < c.count; i++)
      if (c.matrices[i].type < HEADWAY_FLOAT32 || c.matrices[i].type > HEADWAY_INT4) return 3;
    return 0;
  }

  bool ready(Scratch& scratch) {
    int64_t all = rows * groups, sizes[] = {pairs ? all * 64 : 0, plain ? all * 128 : 0, packed ? all * GROUP * WORDS : 0,
                                            packed ? all * 4 : 0, packed ? all * 4 : 0};
    int64_t sum = 0;
    for (int64_t size : sizes) sum += ::rounded(size, 64);
    if (!scratch.grow(sum)) return false;
    char *next = scratch.at, *at[5];
    for (int i = 0; i < 5; i++) at[i] = next, next += ::rounded(sizes[i], 64);
    words = (float*)at[0], floats = (float*)at[1];
    rounded = Rounded{(int32_t*)at[2], (float*)at[3], (int32_t*)at[4], groups};
    return true;
  }

  // The rows as the kernels take them, zeros behind their end.
  void prepare(int64_t me, int64_t team) {
    Share mine(rows * groups, me, team);
    Prologue prologue(c);
    alignas(64) float x[GROUP];
    for (int64_t at = mine.from; at < mine.to; at++) {
      int64_t row = at / groups, first = at % groups * GROUP, left = row < c.rows ? c.inputs - first : 0;
      int count = (int)(left < 0 ? 0 : left < GROUP ? left : GROUP);
      if (count) prologue.read(x, row, first, count);
      for (int i = count; i < GROUP; i++) x[i] = 0;
      if (pairs) write_as(words + at * UNIT, true, x, GROUP, 1);
      if (plain) memcpy(floats + at * GROUP, x, sizeof x);
      if (packed) rounded.round(at, x);
    }
  }

  void multiply(int64_t me, int64_t team) const {
    Share mine(panels, me, team);
    alignas(64) float y[MOST_ROWS * UNIT];
    int64_t before = 0;
    for (int64_t i = 0; i < c.count; i++) {
      const headway_matrix& m = c.matrices[i];
      int64_t own = panels_of(m), from = mine.from - before, to = mine.to - before;
      for (int64_t p = from < 0 ? 0 : from; p < (to < own ? to : own); p++) {
        sums(m, p * UNIT, y);
        write(m, p * UNIT, y);
      }
      before += own;
    }
  }

 private:
  static int64_t panels_of(const headway_matrix& m) { return (m.outputs + UNIT - 1) / UNIT; }
  static int outputs_from(const headway_matrix& m, int64_t first) {
    return (int)(m.outputs - first < UNIT ? m.outputs - first : UNIT);
  }
  bool takes_pairs(int64_t type) const {
    return HEADWAY_LEVEL >= 3 && type == HEADWAY_BFLOAT16 && c.type == HEADWAY_BFLOAT16;
  }

  // The sums of 16 outputs from `first`, for all rows: y [rows][16].
  void sums(const headway_matrix& m, int64_t first, float* y) const {
    if (is_packed(m.type)) {
      Panel panel{(const char*)m.weights + first / UNIT * m.step, m.step / groups, m.scales != 0, m.zeros != 0};
      each_rows(c.rows, [&](auto some, int64_t row) {
        constexpr int R = decltype(some)::value;
        float(&to)[R][UNIT] = *(float(*)[R][UNIT])(y + row * UNIT);
        if (m.type == HEADWAY_INT4)
          panel_dots<4>(to, rounded, row, panel);
        else
          panel_dots<8>(to, rounded, row, panel);
      });
      return;
    }
    for (int o = 0; o < outputs_from(m, first); o++) {
      const char* w = (const char*)m.weights + (first + o) * m.step;
      each_rows(c.rows, [&](auto some, int64_t row) {
        constexpr int R = decltype(some)::value;
        float sum[R];
        if (takes_pairs(m.type))
          dots<Floats::PAIRS>(sum, words + row * groups * UNIT, groups * UNIT, w, c.inputs);
        else if (m.type == HEADWAY_BFLOAT16)
          dots<Floats::WIDENED>(sum, floats + row * groups * GROUP, groups * GROUP, w, c.inputs);
        else
          dots<Floats::SINGLE>(sum, floats + row * groups * GROUP, groups * GROUP, w, c.inputs);
        for (int r = 0; r < R; r++) y[(row + r) * UNIT + o] = sum[r];
      });
    }
  }

  void write(const headway_matrix& m, int64_t first, const float* y) const {
    const int count = outputs_from(m, first);
    for (int64_t r = 0; r < c.rows; r++) {
      int64_t at = r * m.out_row + first;
      for (int o = 0; o < count; o++) {
        float sum = y[r * UNIT + o] * (m.factor ? m.factor[first + o] : 1) + (m.bias ? m.bias[first + o] : 0);
        if (c.type == HEADWAY_FLOAT32) {
          float& to = ((float*)m.out)[at + o];
          to = m.add ? to + sum : sum;
        } else {
          uint16_t& to = ((uint16_t*)m.out)[at + o];
          to = to_bf16(m.add ? from_bf16(to) + from_bf16(to_bf16(sum)) : sum);
        }
      }
    }
  }
};

}  // namespace
