// Numbers that lie in memory as float32, bf16 or 8 bits and are computed in float32, and functions of them.
#pragma once
#include "headway.h"
#include "vec.h"

namespace {

// acc + a b of words: floats, or pairs of bf16 that a dot product takes at once.
template <bool HALF>
INLINE vf multiply_add(vf acc, vf a, vf b) {
  if constexpr (HALF) return add_pairs(acc, a, b);
  return add_product(acc, a, b);
}

INLINE float from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
INLINE uint16_t to_bf16(float f) {
  uint32_t x;
  memcpy(&x, &f, 4);
  if ((x & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(x >> 16 | 0x40);
  return (uint16_t)((x + 0x7FFF + (x >> 16 & 1)) >> 16);
}

// `count` numbers from place `at`; lanes behind them are 0.
template <bool HALF>
INLINE vf get(const void* p, int64_t at, int count = W) {
  if (count == W) return HALF ? widened(*(const vh_any*)((const uint16_t*)p + at)) : load((const float*)p + at);
  vf x = splat(0);
  for (int i = 0; i < count; i++) x[i] = HALF ? from_bf16(((const uint16_t*)p)[at + i]) : ((const float*)p)[at + i];
  return x;
}
template <bool HALF>
INLINE void put(void* p, int64_t at, vf x, int count = W) {
  if (count == W && HALF) {
    *(vh_any*)((uint16_t*)p + at) = halves_of(x);
  } else if (count == W) {
    store((float*)p + at, x);
  } else {
    vh half = halves_of(x);
    for (int i = 0; i < count; i++) {
      if (HALF)
        ((uint16_t*)p)[at + i] = half[i];
      else
        ((float*)p)[at + i] = x[i];
    }
  }
}
// What `put` would keep of it.
template <bool HALF>
INLINE vf kept(vf x) {
  return HALF ? widened(halves_of(x)) : x;
}

// Calls f(place, count, k) for vectors of `width` numbers; k counts to 4, for as many sums side by side.
template <class F>
INLINE void each_words(int64_t width, F f) {
  int64_t i = 0;
  for (; i + 4 * W <= width; i += 4 * W) f(i, W, 0), f(i + W, W, 1), f(i + 2 * W, W, 2), f(i + 3 * W, W, 3);
  for (; i + W <= width; i += W) f(i, W, 0);
  if (i < width) f(i, (int)(width - i), 1);
}

struct Sum {
  vf parts[4] = {splat(0), splat(0), splat(0), splat(0)};
  float total() const { return sum_of(parts[0] + parts[1] + (parts[2] + parts[3])); }
};

// Calls f(Count<whether it is bf16>) for a type of rows; 3 where it is none.
template <class F>
INLINE int by_type(int64_t type, F f) {
  if (type == HEADWAY_FLOAT32) return f(Count<false>());
  return type == HEADWAY_BFLOAT16 ? f(Count<true>()) : 3;
}

// count floats, times a factor, as float or bf16.
INLINE void write_as(void* to, bool half, const float* from, int count, float factor) {
  int i = 0;
  for (; i + W <= count; i += W)
    half ? put<true>(to, i, load(from + i) * factor) : put<false>(to, i, load(from + i) * factor);
  for (; i < count; i++)
    if (half)
      ((uint16_t*)to)[i] = to_bf16(from[i] * factor);
    else
      ((float*)to)[i] = from[i] * factor;
}
INLINE void read_words(float* y, const void* x, bool half, int64_t at, int count) {
  if (half)
    for (int i = 0; i < count; i++) y[i] = from_bf16(((const uint16_t*)x)[at + i]);
  else
    memcpy(y, (const float*)x + at, (size_t)count * 4);
}
INLINE void copy_words(float* to, const float* from, int count) {
  for (int i = 0; i < count; i += W) store(to + i, load(from + i));
}
// Numbers as the type of a call would keep them.
INLINE void round_words(float* x, bool half, int count) {
  if (half)
    for (int i = 0; i < count; i++) x[i] = from_bf16(to_bf16(x[i]));
}

INLINE vf vmin(vf a, vf b) { return -vmax(-a, -b); }

// e^x for x <= 0; below -87 it is e^-87, 1.6e-38. What is no number stays none.
INLINE vf exp_below_0(vf x) { return power_of_2(vmax(splat(-126.0f), x * 1.44269504f)); }

INLINE vf sigmoid(vf x) {
  vf t = power_of_2(vmin(splat(126.0f), vmax(splat(-126.0f), x * -1.44269504f)));
  return 1.0f / (1.0f + t);
}

}  // namespace
