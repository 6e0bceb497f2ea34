// Products of rows with weight matrices, shared by a team of threads: see linear.h, panels.h and panel_tile.h.
#pragma once
#include <stdlib.h>

#include <array>

#include "nf4.h"
#include "panel_matrix.h"
#include "prologue.h"
#include "team.h"

namespace {

// Memory of a calling thread that is reused by its next call.
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

constexpr int MOST_ROWS = 192;  // rows that are processed at a time

INLINE bool is_packed(int64_t type) { return type >= HEADWAY_INT8 && type < HEADWAY_COMPRESSED; }

// Up to MOST_ROWS rows of a call. All threads of a team call `prepare`, then, after a barrier, `multiply`.
struct Products {
  const headway_products& c;
  int64_t first, count;  // rows of the call
  int64_t rows = 0;      // padded with zero rows to the number that the kernels process
  int64_t groups, tasks = 0;
  bool pairs = false, plain = false, packed = false, coded = false, halves = false;  // halves: sums of 16 inputs (Q6_K)
  const bool many;  // more rows than panel_dots takes: they are multiplied by tiles
  float *words = nullptr, *floats = nullptr;  // rows as bf16 pairs [rows][groups * 16], as float32 [rows][groups * 32]
  float* spread = nullptr;  // rows as either, in the input order of nf4.h: [rows][spread_row() floats]
  Rounded rounded{};

  explicit Products(const headway_products& call) : Products(call, 0, call.rows) {}
  Products(const headway_products& call, int64_t from, int64_t some)
      : c(call), first(from), count(some), groups((call.inputs + GROUP - 1) / GROUP), many(some > PANEL_ROWS) {
    for (int64_t i = 0; i < c.count; i++) {
      int64_t type = c.matrices[i].type;
      (is_packed(type) ? packed : type == HEADWAY_NF4 ? coded : takes_pairs(type) ? pairs : plain) = true;
      halves |= type == HEADWAY_Q6_K;
    }
    each_rows<FLOAT_ROWS>(count, [&](auto part, int64_t) { rows += part.value; });
    if (packed && many) rows = ::rounded(rows, tall_of(count));
    for (int64_t i = 0; i < c.count; i++) tasks += panels_of(c.matrices[i]);
  }

  static int unknown(const headway_products& c, int64_t most = MOST_ROWS) {
    if ((c.type != HEADWAY_FLOAT32 && c.type != HEADWAY_BFLOAT16) || c.rows > most) return 3;
    for (int64_t i = 0; i < c.count; i++) {
      const int64_t type = c.matrices[i].type;
      if (type < HEADWAY_FLOAT32 || type > HEADWAY_NF4 || (head_of(type) && c.inputs % 256) ||
          (type == HEADWAY_NF4 && c.inputs % SCALED))
        return 3;
    }
    return 0;
  }

  // Returns the bytes that `prepare` writes; `place` divides memory at a multiple of 64 for them.
  int64_t room() const {
    int64_t sum = 0;
    for (int64_t size : sizes()) sum += ::rounded(size, 64);
    return sum;
  }
  void place(char* next) {
    char* at[8];
    const auto bytes = sizes();
    for (int i = 0; i < 8; i++) at[i] = next, next += ::rounded(bytes[i], 64);
    words = (float*)at[0], floats = (float*)at[1], spread = (float*)at[7];
    rounded = Rounded{(int32_t*)at[2], (float*)at[3], (int32_t*)at[4], halves ? (int32_t*)at[6] : nullptr,
                      (float*)at[5],   groups,         many ? tall_of(count) : 1, many && by_squares(count)};
  }
  bool ready(Scratch& scratch) { return scratch.grow(room()) && (place(scratch.at), true); }

  // Writes the rows in the layouts of the kernels, with zeros after their end.
  void prepare(int64_t me, int64_t team) {
    Share mine(rows * groups, me, team);
    Prologue prologue(c);
    alignas(64) float x[GROUP];
    for (int64_t at = mine.from; at < mine.to; at++) {
      int64_t row = at / groups, from = at % groups * GROUP, left = row < count ? c.inputs - from : 0;
      int some = (int)(left < 0 ? 0 : left < GROUP ? left : GROUP);
      if (some) prologue.read(x, first + row, from, some);
      for (int i = some; i < GROUP; i++) x[i] = 0;
      if (pairs) write_as(words + at * UNIT, true, x, GROUP, 1);
      if (plain) memcpy(floats + at * GROUP, x, sizeof x);
      if (packed) rounded.round(row, at % groups, x);
      if (coded) spread_group(row, from, x);
    }
  }

  void multiply(int64_t me, int64_t team) const {
    Share mine(tasks, me, team);
    int64_t before = 0;
    for (int64_t i = 0; i < c.count; i++) {
      const headway_matrix& m = c.matrices[i];
      const int64_t own = panels_of(m), from = mine.from - before, to = mine.to - before;
      run(m, from < 0 ? 0 : from, to < own ? to : own);
      before += own;
    }
  }

 private:
  std::array<int64_t, 8> sizes() const {
    const int64_t all = rows * groups, each = packed ? all * 4 : 0;
    return {pairs ? all * 64 : 0, plain ? all * 128 : 0, each * GROUP / 4 * WORDS, each, each, each,
            halves ? each : 0, coded ? rows * spread_row() * 4 : 0};
  }
  static int64_t panels_of(const headway_matrix& m) { return (m.outputs + UNIT - 1) / UNIT; }
  bool takes_pairs(int64_t type) const { return HAS_PAIRS && type != HEADWAY_FLOAT32 && c.type == HEADWAY_BFLOAT16; }

  static constexpr Floats HALVES = HAS_PAIRS ? Floats::PAIRS : Floats::WIDENED;  // kind of weights for bf16 inputs
  Floats kind_of(const headway_matrix& m) const {
    if (m.type == HEADWAY_NF4) return c.type == HEADWAY_BFLOAT16 ? HALVES : Floats::SINGLE;
    return takes_pairs(m.type) ? Floats::PAIRS : m.type == HEADWAY_FLOAT32 ? Floats::SINGLE : Floats::WIDENED;
  }
  int64_t spread_row() const { return takes_pairs(HEADWAY_NF4) ? c.inputs / 2 : c.inputs; }

  // Writes 32 inputs of a row from `from` on in the order of nf4.h.
  void spread_group(int64_t row, int64_t from, const float* x) {
    float* to = spread + row * spread_row();
    for (int64_t i = from; i < from + GROUP; i++)
      if (takes_pairs(HEADWAY_NF4))
        ((uint16_t*)to)[spread_place<Floats::PAIRS>(i)] = to_bf16(x[i - from]);
      else
        to[spread_place<Floats::SINGLE>(i)] = x[i - from];
  }

  static int64_t head_of(int64_t type) {
    int64_t head = 0;
    with_form(type, [&](auto form) { head = decltype(form)::HEAD; });
    return head;
  }
  Panel panel(const headway_matrix& m, int64_t number) const {
    const int64_t head = head_of(m.type);
    return {(const char*)m.weights + number * m.step, m.step / groups - head / 8, head, m.scales != 0, m.zeros != 0};
  }

  // Computes panels [from, to) of a matrix.
  void run(const headway_matrix& m, int64_t from, int64_t to) const {
    alignas(64) float y[MOST_ROWS * 4 * UNIT];
    if (many && is_packed(m.type))
      return by_squares(count)   ? tiles<SQUARE, 1>(m, from, to, y)
             : count > FEW_TILED ? tiles<MANY_TALL, MANY_WIDE>(m, from, to, y)
                                 : tiles<FEW_TALL, FEW_WIDE>(m, from, to, y);
    const int sides = is_packed(m.type) ? sides_of_panels(count) : sides_of_floats(count, kind_of(m));
    sides == 4   ? side_by_side<4>(m, from, to, y)
    : sides == 2 ? side_by_side<2>(m, from, to, y)
                 : side_by_side<1>(m, from, to, y);
  }

  // Computes P panels at a time, then the remaining ones singly.
  template <int TALL, int P>
  void tiles(const headway_matrix& m, int64_t from, int64_t to, float* y) const {
    for (; from + P <= to; from += P) {
      Panel panels[P];
      for (int s = 0; s < P; s++) panels[s] = panel(m, from + s);
      with_form(m.type, [&](auto form) { many_rows<decltype(form), TALL>(y, rows * UNIT, rounded, count, panels); });
      for (int s = 0; s < P; s++) write(m, (from + s) * UNIT, y + s * rows * UNIT);
    }
    if constexpr (P > 1) tiles<TALL, 1>(m, from, to, y);
  }

  // Computes panels of 16 outputs: S equal parts of [from, to) side by side, then the remaining panels.
  template <int S>
  void side_by_side(const headway_matrix& m, int64_t from, int64_t to, float* y) const {
    if (from >= to) return;
    const int64_t each = (to - from) / S;
    for (int64_t i = 0; i < each; i++) {
      int64_t at[S];
      for (int s = 0; s < S; s++) at[s] = from + s * each + i;
      sums(m, at, y);
      for (int s = 0; s < S; s++) write(m, at[s] * UNIT, y + s * rows * UNIT);
    }
    for (int64_t last = from + S * each; last < to; last++) {
      const int64_t at[1] = {last};
      sums(m, at, y);
      write(m, last * UNIT, y);
    }
  }

  // Computes the sums of S panels of 16 outputs for all rows: y [S][rows][16].
  template <int S>
  void sums(const headway_matrix& m, const int64_t (&at)[S], float* y) const {
    const Floats kind = kind_of(m);
    if (is_packed(m.type)) return panel_sums(m, at, y);
    if (m.type == HEADWAY_NF4)
      return kind == HALVES ? coded_sums<HALVES>(m, at, y) : coded_sums<Floats::SINGLE>(m, at, y);
    if (kind == Floats::PAIRS) return float_sums<HALVES>(m, at, y, words, groups * UNIT);
    kind == Floats::SINGLE ? float_sums<Floats::SINGLE>(m, at, y, floats, groups * GROUP)
                           : float_sums<Floats::WIDENED>(m, at, y, floats, groups * GROUP);
  }

  template <int S>
  void panel_sums(const headway_matrix& m, const int64_t (&at)[S], float* y) const {
    Panel panels[S];
    for (int s = 0; s < S; s++) panels[s] = panel(m, at[s]);
    each_rows<PANEL_ROWS>(count, [&](auto some, int64_t row) {
      constexpr int R = some.value;
      if constexpr (S <= sides_of_panels(R))
        with_form(m.type, [&](auto form) {
          with_parts<decltype(form)>(panels[0], [&](auto scales, auto zeros) {
            panel_dots<decltype(form), R, S, scales.value, zeros.value>(
                y + row * UNIT, rows * UNIT, rounded, row, panels);
          });
        });
    });
  }

  template <Floats KIND, int S>
  void float_sums(const headway_matrix& m, const int64_t (&at)[S], float* y, const float* x, int64_t x_row) const {
    // for more than a few rows a compressed stream is decompressed once into lines that stay in the cache
    alignas(64) uint16_t lines[S][LONGEST_LINE + PLACES];
    const bool compressed = m.type == HEADWAY_COMPRESSED;
    const bool streams = compressed && (count <= FEW_STREAMED || c.inputs > LONGEST_LINE);
    for (int o = 0; o < UNIT; o++) {
      const char* w[S];
      for (int s = 0; s < S; s++) {
        const int64_t last = m.outputs - 1, output = at[s] * UNIT + o < last ? at[s] * UNIT + o : last;
        w[s] = (const char*)m.weights + (compressed ? m.starts[output] : output * m.step);
      }
      if (compressed && !streams) unpack_rows(lines, w, m.table, c.inputs);
      each_rows<FLOAT_ROWS>(count, [&](auto some, int64_t row) {
        constexpr int R = some.value;
        // the last rows prefetch the weights of the next output, which its first rows then find in the cache
        const int64_t ahead = compressed ? 0 : count > FLOAT_ROWS && row + R >= count ? m.step : R > 2 ? 4 * FETCH : FETCH;
        if constexpr (S <= sides_of_floats(R, KIND)) {
          if (streams)
            compressed_dots<KIND, R>(y + row * UNIT + o, rows * UNIT, x + row * x_row, x_row, w, m.table, c.inputs);
          else
            dots<KIND, R>(y + row * UNIT + o, rows * UNIT, x + row * x_row, x_row, w, c.inputs, ahead);
        }
      });
    }
  }

  template <Floats KIND, int S>
  void coded_sums(const headway_matrix& m, const int64_t (&at)[S], float* y) const {
    constexpr Floats LINE = KIND == Floats::PAIRS ? KIND : Floats::SINGLE;
    const int64_t row_size = spread_row();
    const bool lines = count > FLOAT_ROWS && c.inputs <= LONGEST_LINE;
    alignas(64) char plain[S][(KIND == Floats::PAIRS ? 2 : 4) * LONGEST_LINE];
    for (int o = 0; o < UNIT; o++) {
      Coded w[S];
      char* line[S];
      for (int s = 0; s < S; s++) {
        const int64_t last = m.outputs - 1, output = at[s] * UNIT + o;
        w[s] = coded_row(m, output < last ? output : last, c.inputs), line[s] = plain[s];
      }
      if (lines) plain_lines<KIND>(line, w, *m.nf4, c.inputs);
      each_rows<FLOAT_ROWS>(count, [&](auto some, int64_t row) {
        constexpr int R = some.value;
        const float* x = spread + row * row_size;
        float* to = y + row * UNIT + o;
        if constexpr (S <= sides_of_floats(R, KIND)) {
          if (lines)
            dots<LINE, R>(to, rows * UNIT, x, row_size, line, c.inputs, 0);
          else
            coded_dots<KIND, R>(to, rows * UNIT, x, row_size, w, *m.nf4, c.inputs);
        }
      });
    }
  }

  // Writes outputs from .. from + 15 of all rows, y [rows][16]: factor * sum + bias, or added to what `out` holds.
  void write(const headway_matrix& m, int64_t from, const float* y) const {
    const int some = (int)(m.outputs - from < UNIT ? m.outputs - from : UNIT);
    const bool half = c.type == HEADWAY_BFLOAT16;
    alignas(64) float factor[UNIT], bias[UNIT], sum[UNIT], old[UNIT];
    for (int o = 0; o < UNIT; o++) {
      factor[o] = m.factor && o < some ? m.factor[from + o] : 1;
      bias[o] = m.bias && o < some ? m.bias[from + o] : 0;
    }
    for (int64_t r = 0; r < count; r++, y += UNIT) {
      UNROLL for (int i = 0; i < UNIT; i += W) store(sum + i, load(y + i) * load(factor + i) + load(bias + i));
      int64_t at = (first + r) * m.out_row + from;
      char* to = (char*)m.out + at * (half ? 2 : 4);
      if (m.add) {
        round_words(sum, half, some);
        read_words(old, m.out, half, at, some);
        for (int o = 0; o < some; o++) sum[o] += old[o];
      }
      some == UNIT ? write_as(to, half, sum, UNIT, 1) : write_as(to, half, sum, some, 1);
    }
  }
};

}  // namespace
