// What is done to rows as they are read for a product: nothing, a norm, an activation, a gate.
#pragma once
#include "words.h"

namespace {

// y = act(x) of 16 numbers.
INLINE void activate_16(int64_t act, float* y, const float* x) {
  if (act == HEADWAY_GELU) {
    for (int i = 0; i < UNIT; i++) y[i] = 0.5f * x[i] * (1 + erff(x[i] * 0.70710678f));
    return;
  }
  UNROLL for (int i = 0; i < UNIT; i += W) {
    vf v = load(x + i), gate = v;  // (1 + tanh z) / 2 = sigmoid(2 z)
    if (act == HEADWAY_GELU_TANH) gate = 1.5957691216f * (v + 0.044715f * v * v * v);
    if (act == HEADWAY_SILU || act == HEADWAY_GELU_TANH || act == HEADWAY_SIGMOID) {
      const vf open = 1.0f / (1.0f + exp2_of_each(vmin(splat(80), vmax(splat(-80), gate)) * -1.44269504f));
      v = act == HEADWAY_SIGMOID ? open : v * open;
    }
    store(y + i, act == HEADWAY_RELU ? v < 0.0f ? splat(0) : v : v);
  }
}

// Reads rows of a call. The norm's mean and scale are kept for the row that was read last, since groups come row by row.
struct Prologue {
  const headway_products& c;
  bool half;
  int64_t row = -1;
  float mean = 0, by = 1;

  explicit Prologue(const headway_products& call) : c(call), half(call.type == HEADWAY_BFLOAT16) {}

  // Reads `count` elements of row r from `first` on into y, which has room for 32.
  void read(float* y, int64_t r, int64_t first, int count) {
    int64_t at = r * c.x_row + first;
    read_words(y, c.x, half, at, count);
    if (c.norm) {
      if (r != row) look(r);
      norm(y, first, count);
    }
    if (c.act == HEADWAY_NO_ACT && !c.gate) return;
    for (int i = count; i < 2 * UNIT; i++) y[i] = 0;
    for (int i = 0; i < count; i += UNIT) activate_16(c.act, y + i, y + i);
    if (!c.gate) return round_words(y, half, count);
    round_words(y, half, count);
    alignas(64) float g[2 * UNIT];
    read_words(g, c.gate, half, at, count);
    for (int i = 0; i < count; i++) y[i] *= g[i];
    round_words(y, half, count);
  }

 private:
  // Computes mean and scale of row r.
  void look(int64_t r) {
    row = r, mean = 0;
    if (c.norm == HEADWAY_LAYER_NORM) mean = (float)average([](float x) { return x; });
    by = (float)(1 / sqrt(average([this](float x) { return (x - mean) * (x - mean); }) + c.eps));
  }

  // Returns the mean of f(x) over the row.
  template <class F>
  double average(F f) const {
    double sum = 0;
    alignas(64) float x[2 * UNIT];
    for (int64_t first = 0; first < c.inputs; first += 2 * UNIT) {
      int count = (int)(c.inputs - first < 2 * UNIT ? c.inputs - first : 2 * UNIT);
      read_words(x, c.x, half, row * c.x_row + first, count);
      float part = 0;
      for (int i = 0; i < count; i++) part += f(x[i]);
      sum += part;
    }
    return sum / (double)c.inputs;
  }

  // An RMS norm rounds before its gain, and after it; layer norms and wide RMS norms round once, at the end.
  void norm(float* y, int64_t first, int count) const {
    for (int i = 0; i < count; i++) y[i] = (y[i] - mean) * by;
    if (c.norm == HEADWAY_RMS_NORM) round_words(y, half, count);
    if (c.gain)
      for (int i = 0; i < count; i++) y[i] *= c.gain[first + i];
    if (c.norm == HEADWAY_RMS_NORM && c.shift) round_words(y, half, count);
    if (c.shift)
      for (int i = 0; i < count; i++) y[i] += c.shift[first + i];
    round_words(y, half, count);
  }
};

}  // namespace
