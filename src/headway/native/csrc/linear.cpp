// A few rows times matrices of weights: see linear.h.
#include "linear.h"

#include <omp.h>
#include <stdlib.h>

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

bool is_packed(int64_t type) { return type == HEADWAY_INT8 || type == HEADWAY_INT4; }
bool takes_pairs(const headway_products& c, int64_t type) {
  return HEADWAY_LEVEL >= 3 && type == HEADWAY_BFLOAT16 && c.type == HEADWAY_BFLOAT16;
}

// The rows of a call as the kernels take them, zeros behind their end: words as they are, float32, and 8 bits.
struct Inputs {
  const headway_products& c;
  int64_t rows, groups;
  bool pairs = false, wide = false, packed = false;
  float *words = nullptr, *floats = nullptr;  // [rows][groups * 16], [rows][groups * 32]
  Rounded rounded{};

  explicit Inputs(const headway_products& call) : c(call), rows(0), groups((call.inputs + GROUP - 1) / GROUP) {
    each_rows(c.rows, [&](auto some, int64_t) { rows += decltype(some)::value; });
    for (int64_t i = 0; i < c.count; i++) {
      int64_t type = c.matrices[i].type;
      (is_packed(type) ? packed : takes_pairs(c, type) ? pairs : wide) = true;
    }
  }

  bool ready(Scratch& scratch) {
    int64_t all = rows * groups, bytes[] = {pairs ? all * 64 : 0, wide || packed ? all * 128 : 0,
                                            packed ? all * GROUP * WORDS : 0, packed ? all * 4 : 0, packed ? all * 4 : 0};
    int64_t sum = 0;
    for (int64_t some : bytes) sum += ::rounded(some, 64);
    if (!scratch.grow(sum)) return false;
    char *next = scratch.at, *at[5];
    for (int i = 0; i < 5; i++) at[i] = next, next += ::rounded(bytes[i], 64);
    words = (float*)at[0], floats = (float*)at[1];
    rounded = Rounded{(int32_t*)at[2], (float*)at[3], (int32_t*)at[4], groups};
    return true;
  }

  // Groups of 32 inputs, all rows one after the other.
  void prepare(int64_t from, int64_t to) {
    for (int64_t at = from; at < to; at++) {
      int64_t row = at / groups, first = at % groups * GROUP, left = row < c.rows ? c.inputs - first : 0;
      int count = (int)(left < GROUP ? left : GROUP);
      if (c.type == HEADWAY_FLOAT32) {
        float* x = floats + at * GROUP;
        memset(x, 0, GROUP * 4);
        memcpy(x, (const float*)c.x + row * c.x_row + first, (size_t)count * 4);
      } else {
        alignas(64) uint16_t x[GROUP] = {};
        memcpy(x, (const uint16_t*)c.x + row * c.x_row + first, (size_t)count * 2);
        if (pairs) memcpy(words + at * UNIT, x, sizeof x);
        if (wide || packed)
          for (int i = 0; i < GROUP; i++) floats[at * GROUP + i] = from_bf16(x[i]);
      }
      if (packed) rounded.round(at, floats + at * GROUP);
    }
  }
};

// The sums of 16 outputs from `first`, for all rows: y [rows][16].
void sums_of_16(const Inputs& x, const headway_matrix& m, int64_t first, float* y) {
  const int64_t left = m.outputs - first, inputs = x.c.inputs;
  const int count = (int)(left < UNIT ? left : UNIT);
  if (is_packed(m.type)) {
    Panel panel{(const char*)m.weights + first / UNIT * m.step, m.step / x.groups, m.scales != 0, m.zeros != 0};
    each_rows(x.c.rows, [&](auto some, int64_t row) {
      constexpr int R = decltype(some)::value;
      float(&to)[R][UNIT] = *(float(*)[R][UNIT])(y + row * UNIT);
      if (m.type == HEADWAY_INT4)
        panel_dots<4>(to, x.rounded, row, panel);
      else
        panel_dots<8>(to, x.rounded, row, panel);
    });
    return;
  }
  for (int o = 0; o < count; o++) {
    const char* w = (const char*)m.weights + (first + o) * m.step;
    each_rows(x.c.rows, [&](auto some, int64_t row) {
      constexpr int R = decltype(some)::value;
      float sums[R];
      if (takes_pairs(x.c, m.type))
        dots<Floats::PAIRS>(sums, x.words + row * x.groups * UNIT, x.groups * UNIT, w, inputs);
      else if (m.type == HEADWAY_BFLOAT16)
        dots<Floats::WIDENED>(sums, x.floats + row * x.groups * GROUP, x.groups * GROUP, w, inputs);
      else
        dots<Floats::SINGLE>(sums, x.floats + row * x.groups * GROUP, x.groups * GROUP, w, inputs);
      for (int r = 0; r < R; r++) y[(row + r) * UNIT + o] = sums[r];
    });
  }
}

void write_16(const Inputs& x, const headway_matrix& m, int64_t first, const float* y) {
  const int64_t left = m.outputs - first;
  const int count = (int)(left < UNIT ? left : UNIT);
  for (int64_t r = 0; r < x.c.rows; r++) {
    int64_t at = r * m.out_row + first;
    for (int o = 0; o < count; o++) {
      float sum = y[r * UNIT + o] * (m.factor ? m.factor[first + o] : 1) + (m.bias ? m.bias[first + o] : 0);
      if (x.c.type == HEADWAY_FLOAT32) {
        float& to = ((float*)m.out)[at + o];
        to = m.add ? to + sum : sum;
      } else {
        uint16_t& to = ((uint16_t*)m.out)[at + o];
        to = to_bf16(m.add ? from_bf16(to) + from_bf16(to_bf16(sum)) : sum);
      }
    }
  }
}

int unknown(const headway_products& c) {
  if (c.abi != HEADWAY_ABI) return 1;
  if ((c.type != HEADWAY_FLOAT32 && c.type != HEADWAY_BFLOAT16) || c.rows > MOST_ROWS) return 3;
  for (int64_t i = 0; i < c.count; i++)
    if (c.matrices[i].type < HEADWAY_FLOAT32 || c.matrices[i].type > HEADWAY_INT4) return 3;
  return 0;
}

// Part `number` of `parts` of [0, count).
struct Share {
  int64_t from, to;
  Share(int64_t count, int64_t number, int64_t parts) : from(count * number / parts), to(count * (number + 1) / parts) {}
};

}  // namespace

extern "C" int headway_linear(const headway_products* call) {
  const headway_products& c = *call;
  if (int wrong = unknown(c)) return wrong;
  static thread_local Scratch scratch;
  Inputs x(c);
  if (!x.ready(scratch)) return 2;
  int64_t panels = 0;
  for (int64_t i = 0; i < c.count; i++) panels += (c.matrices[i].outputs + UNIT - 1) / UNIT;
  int64_t threads = c.threads < panels ? c.threads : panels;
  if (threads < 1) threads = 1;
#pragma omp parallel num_threads((int)threads)
  {
    int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
    Share mine(x.rows * x.groups, me, all), outputs(panels, me, all);
    x.prepare(mine.from, mine.to);
#pragma omp barrier
    alignas(64) float y[MOST_ROWS * UNIT];
    int64_t before = 0;
    for (int64_t i = 0; i < c.count; i++) {
      const headway_matrix& m = c.matrices[i];
      int64_t own = (m.outputs + UNIT - 1) / UNIT;
      int64_t from = outputs.from - before, to = outputs.to - before;
      for (int64_t p = from < 0 ? 0 : from; p < (to < own ? to : own); p++) {
        sums_of_16(x, m, p * UNIT, y);
        write_16(x, m, p * UNIT, y);
      }
      before += own;
    }
  }
  return 0;
}
