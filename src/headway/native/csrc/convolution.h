// Causal depthwise convolutions along rows in order; forward, and backward in one pass.
#pragma once
#include "gate.h"

namespace {

constexpr int MOST_WINDOW = 8;
constexpr int CHANNELS = 256;  // processed together: a row of them is 1 KB, so a window of rows stays in the cache

template <bool HALF, bool SILU>
struct Convolution {
  const headway_convolution& c;
  const int before = (int)c.window - 1;

  // Returns the address of slot t - w of a row, from channel `first` on; negative slots are in `past`.
  const char* source(int64_t b, int64_t t, int w, int64_t first) const {
    const int64_t s = t - w, of_past = (b * before + before + s) * c.channels;
    return (const char*)(s < 0 ? c.past : c.x) + ((s < 0 ? of_past : b * c.x_batch + s * c.x_row) + first) * SIZE;
  }
  // Returns how many slots before t are in its document, at most `before`; `last` is the number for t - 1. With
  // `before` 3 and a past, begins = 0 0 1 0 give 3 3 0 1.
  int reach(int64_t b, int64_t t, int last) const {
    if (c.begins && c.begins[b * c.begins_batch + t]) return 0;
    const int known = t ? last + 1 : c.past ? before : 0;
    return known < before ? known : before;
  }
  // Returns the convolution at slot t, before the activation.
  vf sum(int64_t b, int64_t t, int seen, int64_t at, int some) const {
    vf total = c.bias ? get<false>(c.bias, at, some) : splat(0);
    for (int w = 0; w <= seen; w++)
      total += get<false>(c.weight, w * c.channels + at, some) * get<HALF>(source(b, t, w, at), 0, some);
    return kept<HALF>(total);
  }

  void forward(int64_t b, int64_t first, int count) const {
    for (int64_t t = 0, seen = 0; t < c.slots; t++) {
      seen = reach(b, t, (int)seen);
      each_words(count, [&](int64_t i, int some, int) __attribute__((always_inline)) {
        const vf x = sum(b, t, (int)seen, first + i, some);
        put<HALF>(c.y, (b * c.slots + t) * c.channels + first + i, SILU ? activated<HEADWAY_SILU>(x).value : x, some);
      });
    }
  }

  // The gradient of x_s is complete once slot s + window - 1 has been read: `open` is a ring buffer of the incomplete ones.
  void backward(int64_t first, int count) const {
    alignas(64) float open[MOST_WINDOW][CHANNELS], of_weight[MOST_WINDOW][CHANNELS] = {}, of_bias[CHANNELS] = {};
    for (int64_t b = 0; b < c.batch; b++) {
      memset(open, 0, sizeof open);
      for (int64_t t = 0, seen = 0; t < c.slots; t++) {
        seen = reach(b, t, (int)seen);
        each_words(count, [&](int64_t i, int some, int) __attribute__((always_inline)) {
          vf dy = get<HALF>(c.dy, (b * c.slots + t) * c.channels + first + i, some);
          if (SILU) dy *= activated<HEADWAY_SILU>(sum(b, t, (int)seen, first + i, some)).slope;
          store(of_bias + i, load(of_bias + i) + dy);
          for (int w = 0; w <= seen; w++) {
            float *dw = of_weight[w] + i, *dx = open[(t - w + before) % c.window] + i;
            store(dw, load(dw) + dy * get<HALF>(source(b, t, w, first + i), 0, some));
            store(dx, load(dx) + dy * get<false>(c.weight, w * c.channels + first + i, some));
          }
        });
        close(b, t - before, open, first, count);
      }
      for (int64_t s = c.slots - before; s < c.slots; s++) close(b, s, open, first, count);
    }
    for (int w = 0; w <= before; w++) memcpy(c.d_weight + w * c.channels + first, of_weight[w], (size_t)count * 4);
    if (c.d_bias) memcpy(c.d_bias + first, of_bias, (size_t)count * 4);
  }

 private:
  static constexpr int64_t SIZE = HALF ? 2 : 4;

  // Writes the gradient of x_s, which is complete, and clears its place.
  void close(int64_t b, int64_t s, float (*open)[CHANNELS], int64_t first, int count) const {
    float* x = open[(s + before) % c.window];
    void* to = s < 0 ? c.d_past : c.dx;
    if (to) {
      const int64_t row = s < 0 ? b * before + before + s : b * c.slots + s;
      each_words(count, [&](int64_t i, int some, int) __attribute__((always_inline)) {
        put<HALF>(to, row * c.channels + first + i, load(x + i), some);
      });
    }
    memset(x, 0, CHANNELS * sizeof(float));
  }
};

}  // namespace
