// Vectors of numbers that are float32, bf16 or int8 in memory and float32 in registers, and functions of them.
#pragma once
#include "headway.h"
#include "vec.h"

namespace {

// Returns acc + a b of vectors of words: floats, or pairs of bf16 whose two products are added by one dot product.
template <bool HALF>
INLINE vf multiply_add(vf acc, vf a, vf b) {
  if constexpr (HALF) return add_pairs(acc, a, b);
  return add_product(acc, a, b);
}

// Returns a bf16 number as float32.
INLINE float from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
// Returns f rounded to bf16, ties to even; NaN stays NaN.
INLINE uint16_t to_bf16(float f) {
  uint32_t x;
  memcpy(&x, &f, 4);
  if ((x & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(x >> 16 | 0x40);
  return (uint16_t)((x + 0x7FFF + (x >> 16 & 1)) >> 16);
}

// Returns `count` elements from index `at` on as float32; the lanes beyond are 0. HALF: p is bf16, else float32.
template <bool HALF>
INLINE vf get(const void* p, int64_t at, int count = W) {
  if (count == W) return HALF ? widened(*(const vh_any*)((const uint16_t*)p + at)) : load((const float*)p + at);
  vf x = splat(0);
  for (int i = 0; i < count; i++) x[i] = HALF ? from_bf16(((const uint16_t*)p)[at + i]) : ((const float*)p)[at + i];
  return x;
}
// Writes the first `count` lanes of x to p from index `at` on, as bf16 (HALF) or float32.
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
// Returns x rounded as `put` stores it.
template <bool HALF>
INLINE vf kept(vf x) {
  return HALF ? widened(halves_of(x)) : x;
}

// Calls f(index, count, k) for the vectors of a row of `width` numbers. k in 0..3 selects one of four accumulators, which
// are independent of each other. For W = 8 and width 45: (0, 8, 0), (8, 8, 1), (16, 8, 2), (24, 8, 3), (32, 8, 0), (40, 5, 1).
template <class F>
INLINE void each_words(int64_t width, F f) {
  int64_t i = 0;
  for (; i + 4 * W <= width; i += 4 * W) f(i, W, 0), f(i + W, W, 1), f(i + 2 * W, W, 2), f(i + 3 * W, W, 3);
  for (; i + W <= width; i += W) f(i, W, 0);
  if (i < width) f(i, (int)(width - i), 1);
}

// Four partial sums, as each_words fills them.
struct Sum {
  vf parts[4] = {splat(0), splat(0), splat(0), splat(0)};
  float total() const { return sum_of(parts[0] + parts[1] + (parts[2] + parts[3])); }
};

// Calls f(Count<whether the type is bf16>) for rows of a type; returns 3 (unknown type) unless it is float32 or bf16.
template <class F>
INLINE int by_type(int64_t type, F f) {
  if (type == HEADWAY_FLOAT32) return f(Count<false>());
  return type == HEADWAY_BFLOAT16 ? f(Count<true>()) : 3;
}

// Writes `count` floats, each times `factor`, as bf16 (half) or float32.
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
// Reads `count` elements of x from index `at` on, bf16 (half) or float32, into floats.
INLINE void read_words(float* y, const void* x, bool half, int64_t at, int count) {
  if (half)
    for (int i = 0; i < count; i++) y[i] = from_bf16(((const uint16_t*)x)[at + i]);
  else
    memcpy(y, (const float*)x + at, (size_t)count * 4);
}
// Copies `count` floats, in whole vectors: up to W - 1 floats beyond the last are copied, too.
INLINE void copy_words(float* to, const float* from, int count) {
  for (int i = 0; i < count; i += W) store(to + i, load(from + i));
}
// Rounds x in place to bf16 if `half`, as storing it in the type of the call would.
INLINE void round_words(float* x, bool half, int count) {
  if (half)
    for (int i = 0; i < count; i++) x[i] = from_bf16(to_bf16(x[i]));
}

INLINE vf vmin(vf a, vf b) { return -vmax(-a, -b); }

// Returns e^x for x <= 0; below -87.3 it is 2^-126, 1.2e-38. NaN stays NaN.
INLINE vf exp_below_0(vf x) { return power_of_2(vmax(splat(-126.0f), x * 1.44269504f)); }

// Returns 1 / (1 + e^-x).
INLINE vf sigmoid(vf x) {
  vf t = power_of_2(vmin(splat(126.0f), vmax(splat(-126.0f), x * -1.44269504f)));
  return 1.0f / (1.0f + t);
}

}  // namespace
