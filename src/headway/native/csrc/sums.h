// Linear attention of a few rows, as in decoding: sums over the keys of a sequence instead of a softmax. The rows of a sequence
// are processed one by one, so its sums have the same bits however it is divided into steps.
#pragma once
#include <math.h>

#include "prologue.h"

namespace {

// Calls f(first, end, page) for the rows of each sequence.
template <class F>
INLINE void each_text(const headway_texts& texts, int64_t rows, F f) {
  for (int64_t first = 0, end; first < rows; first = end) {
    for (end = first + 1; end < rows && texts.pages[end] == texts.pages[first];) end++;
    f(first, end, texts.pages[first]);
  }
}

struct Sums {
  static constexpr int MOST = WIDEST + 1;  // maximum features: "cosine" has one more than the elements of a head

  const headway_sums& c;
  const int64_t features;
  const bool half;
  alignas(64) float v[WIDEST], num[WIDEST];
  // features of a key or a query: in the numerator (turned), and in the denominator (plain)
  alignas(64) float turned[MOST], plain[MOST];

  explicit Sums(const headway_sums& call)
      : c(call), features(call.dim + (call.feature == HEADWAY_COSINE)), half(call.type == HEADWAY_BFLOAT16) {}

  // Each kv head of each sequence is one thread's.
  void run(int64_t me, int64_t team) {
    int64_t number = 0;
    each_text(c.texts, c.rows, [&](int64_t first, int64_t end, int64_t) {
      for (int64_t kv = 0; kv < c.kv_heads; kv++)
        if (number++ % team == me)
          for (int64_t row = first; row < end; row++) step(row, kv);
    });
  }

 private:
  void step(int64_t row, int64_t kv) {
    const int64_t at = c.texts.pages[row] * c.kv_heads + kv, group = c.heads / c.kv_heads, e = c.dim_v;
    float *sums = c.kv + at * features * e, *total = c.z + at * features;
    if (c.texts.begins[row]) {
      memset(sums, 0, (size_t)(features * e) * sizeof(float));
      memset(total, 0, (size_t)features * sizeof(float));
    }
    take(c.k, row * c.k_row + kv * c.dim, c.key_feature, row);
    read_words(v, c.v, half, row * c.v_row + kv * e, (int)e);
    for (int64_t f = 0; f < features; f++) {
      total[f] += plain[f];
      for (int64_t i = 0; i < e; i++) sums[f * e + i] += turned[f] * v[i];
    }
    for (int64_t head = kv * group; head < (kv + 1) * group; head++) {
      take(c.q, row * c.q_row + head * c.dim, c.feature, row);
      float den = 0;
      memset(num, 0, (size_t)e * sizeof(float));
      for (int64_t f = 0; f < features; f++) {
        den += plain[f] * total[f];
        for (int64_t i = 0; i < e; i++) num[i] += turned[f] * sums[f * e + i];
      }
      if (den < c.eps) den = (float)c.eps;
      for (int64_t i = 0; i < e; i++) num[i] /= den;
      write_as((char*)c.out + (row * c.out_row + head * e) * (half ? 2 : 4), half, num, (int)e, 1);
    }
  }

  // Computes the features of one head of a row.
  void take(const void* from, int64_t at, int64_t feature, int64_t row) {
    const int64_t d = c.dim, ones = feature == HEADWAY_COSINE;
    float* x = plain + ones;
    read_words(x, from, half, at, (int)d);
    auto set = [&](auto f) { for (int64_t i = 0; i < d; i++) x[i] = f(x[i]); };
    switch (feature) {
      case HEADWAY_ELU1: set([](float x) { return x > 0 ? x + 1 : expf(x); }); break;
      case HEADWAY_RELU_FEATURE: set([](float x) { return x > 0 ? x : 0; }); break;
      case HEADWAY_SQUARE: set([](float x) { return x * x; }); break;
      case HEADWAY_EXP: set([](float x) { return expf(x); }); break;
      case HEADWAY_SOFTMAX: {
        float top = -INFINITY, sum = 0;
        for (int64_t i = 0; i < d; i++) top = x[i] > top ? x[i] : top;
        for (int64_t i = 0; i < d; i++) sum += x[i] = expf(x[i] - top);
        set([=](float x) { return x / sum; });
        break;
      }
      default: {  // "cosine": 1, and the vector divided by its length
        double squares = 0;
        for (int64_t i = 0; i < d; i++) squares += (double)x[i] * x[i];
        const float length = (float)sqrt(squares), by = length > 1e-12f ? length : 1e-12f;
        set([=](float x) { return x / by; });
        plain[0] = 1;
      }
    }
    memcpy(turned, plain, (size_t)features * sizeof(float));
    if (!c.cos) return;
    const float *cos = c.cos + row * c.rotation_row, *sin = c.sin + row * c.rotation_row;
    for (int64_t i = 0; i < c.rotated; i++) turned[ones + i] = x[i] * cos[i] + x[c.partner[i]] * sin[i];
    if (c.rotates_both) memcpy(plain, turned, (size_t)features * sizeof(float));
  }
};

}  // namespace
