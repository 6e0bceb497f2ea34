// Rotary positions: y = x cos + x[partner] sin on the first `rotated` elements of each head; the others are copied.
#pragma once
#include "words.h"

namespace {

template <bool HALF>
struct Rotate {
  const headway_rotation& c;

  // Rotates every head of token t of batch row b.
  void run(int64_t b, int64_t t) const {
    int64_t place = b * c.table_batch + t * c.rotated;
    const float *cos = c.cos + place, *sin = c.sin + place;
    for (int64_t which = 0; which < c.count; which++) {
      const headway_tensor &x = c.x[which], &y = c.y[which];
      for (int64_t h = 0; h < c.heads[which]; h++)
        head(x.data, b * x.batch + h * x.head + t * x.slot, y.data, b * y.batch + h * y.head + t * y.slot, cos, sin);
    }
  }

 private:
  __attribute__((always_inline)) void head(const void* x, int64_t at, void* y, int64_t to, const float* cos, const float* sin) const {
    alignas(64) float own[WIDEST + W], other[WIDEST + W];
    int width = (int)c.rotated, half = width / 2;
    each_words(c.dim, [&](int64_t i, int n, int) __attribute__((always_inline)) { store(own + i, get<HALF>(x, at + i, n)); });
    if (c.pairing == HEADWAY_HALVES) {
      memcpy(other, own + half, (size_t)half * 4), memcpy(other + half, own, (size_t)half * 4);
    } else if (c.pairing == HEADWAY_ADJACENT) {
      for (int i = 0; i < half; i++) other[2 * i] = own[2 * i + 1], other[2 * i + 1] = own[2 * i];
    } else {
      for (int i = 0; i < width; i++) other[i] = own[c.partner[i]];
    }
    float way = c.back ? -1.0f : 1.0f;  // the transpose rotates back
    each_words(width, [&](int64_t i, int n, int) __attribute__((always_inline)) {
      vf x = load(own + i), y = x * get<false>(cos, i, n) + load(other + i) * get<false>(sin, i, n) * way;
      store(own + i, n == W ? y : where((1u << n) - 1, y, x));
    });
    each_words(c.dim, [&](int64_t i, int n, int) __attribute__((always_inline)) { put<HALF>(y, to + i, load(own + i), n); });
  }
};

}  // namespace
