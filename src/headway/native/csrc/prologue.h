// What is done to rows on their way into a product: nothing, a norm, an activation, a gate.
#pragma once
#include "headway.h"
#include "vec.h"

namespace {

// 2^x of 16 numbers.
INLINE void exp2_16(float* y, const float* x) {
#if HEADWAY_LEVEL >= 2
  const uint16_t bits[4] = {0xFFFF, 0, 0, 0};
  alignas(64) float all[4 * UNIT] = {};
  memcpy(all, x, UNIT * 4);
  vf p[4];
  exp2_of(p, bits, all);
  store(y, p[0]);
#else
  for (int i = 0; i < UNIT; i += W) store(y + i, exp2_of(load(x + i)));
#endif
}

// 1 / (1 + e^-x) of 16 numbers; of numbers beyond +-80, what it is at 80.
INLINE void sigmoid_16(float* y, const float* x) {
  alignas(64) float t[UNIT];
  for (int i = 0; i < UNIT; i++) t[i] = (x[i] > 80 ? -80 : x[i] < -80 ? 80 : -x[i]) * 1.44269504f;
  exp2_16(t, t);
  for (int i = 0; i < UNIT; i++) y[i] = x[i] == x[i] ? 1 / (1 + t[i]) : x[i];
}

INLINE void activate_16(int64_t act, float* y, const float* x) {
  alignas(64) float t[UNIT];
  switch (act) {
    case HEADWAY_SILU:
      sigmoid_16(t, x);
      for (int i = 0; i < UNIT; i++) y[i] = x[i] * t[i];
      return;
    case HEADWAY_GELU_TANH:  // (1 + tanh z) / 2 = sigmoid(2 z)
      for (int i = 0; i < UNIT; i++) t[i] = 1.5957691216f * (x[i] + 0.044715f * x[i] * x[i] * x[i]);
      sigmoid_16(t, t);
      for (int i = 0; i < UNIT; i++) y[i] = x[i] * t[i];
      return;
    case HEADWAY_GELU:
      for (int i = 0; i < UNIT; i++) y[i] = 0.5f * x[i] * (1 + erff(x[i] * 0.70710678f));
      return;
    case HEADWAY_RELU:
      for (int i = 0; i < UNIT; i++) y[i] = x[i] < 0 ? 0 : x[i];
      return;
    default:
      for (int i = 0; i < UNIT; i++) y[i] = x[i];
  }
}

INLINE void read_words(float* y, const void* x, bool half, int64_t at, int count) {
  if (half)
    for (int i = 0; i < count; i++) y[i] = from_bf16(((const uint16_t*)x)[at + i]);
  else
    memcpy(y, (const float*)x + at, (size_t)count * 4);
}
// Numbers as the type of a call would keep them.
INLINE void round_words(float* x, bool half, int count) {
  if (half)
    for (int i = 0; i < count; i++) x[i] = from_bf16(to_bf16(x[i]));
}

// Reads rows of a call. A norm's mean and scale belong to the row that was read last: groups come row by row.
struct Prologue {
  const headway_products& c;
  bool half;
  int64_t row = -1;
  float mean = 0, by = 1;

  explicit Prologue(const headway_products& call) : c(call), half(call.type == HEADWAY_BFLOAT16) {}

  // `count` numbers of a row from `first`, into room for 32.
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
  void look(int64_t r) {
    row = r, mean = 0;
    double sum = 0, squares = 0;
    alignas(64) float x[2 * UNIT];
    for (int64_t first = 0; first < c.inputs; first += 2 * UNIT) {
      int count = (int)(c.inputs - first < 2 * UNIT ? c.inputs - first : 2 * UNIT);
      read_words(x, c.x, half, r * c.x_row + first, count);
      float s = 0, q = 0;
      for (int i = 0; i < count; i++) s += x[i], q += x[i] * x[i];
      sum += s, squares += q;
    }
    double n = (double)c.inputs;
    if (c.norm == HEADWAY_LAYER_NORM) {
      mean = (float)(sum / n);
      double deviations = 0;
      for (int64_t first = 0; first < c.inputs; first += 2 * UNIT) {
        int count = (int)(c.inputs - first < 2 * UNIT ? c.inputs - first : 2 * UNIT);
        read_words(x, c.x, half, r * c.x_row + first, count);
        float q = 0;
        for (int i = 0; i < count; i++) q += (x[i] - mean) * (x[i] - mean);
        deviations += q;
      }
      by = (float)(1 / sqrt(deviations / n + c.eps));
    } else {
      by = (float)(1 / sqrt(squares / n + c.eps));
    }
  }

  // The gain of an RMS norm multiplies what is rounded; a layer norm is rounded once.
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
