// Vectors of numbers that lie in memory as float32 or bf16 and are computed in float32, and functions of them.
#pragma once
#include "vec.h"

namespace {

typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef uint16_t vh_any __attribute__((vector_size(2 * W), aligned(2), may_alias));

// bf16 of each lane, rounded to nearest even; what is no number stays none.
INLINE vh halves_of(vf x) {
#if HEADWAY_LEVEL >= 3
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
  vi bits = (vi)x, up = bits + 0x7FFF + (bits >> 16 & 1);
  return __builtin_convertvector((x == x ? up : bits | 0x400000) >> 16, vh);
#endif
}
INLINE vf widened(vh x) { return (vf)(__builtin_convertvector(x, vi) << 16); }

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

INLINE vf vmin(vf a, vf b) { return -vmax(-a, -b); }

// 2^x for -127 < x < 127, relative error 1.2e-7.
INLINE vf power_of_2(vf x) {
#if HEADWAY_LEVEL >= 2
  vf whole = (vf)_mm512_roundscale_ps((__m512)x, 9), f = x - whole, sum = splat(EXP2[0]);
  UNROLL for (int i = 1; i < 6; i++) sum = sum * f + splat(EXP2[i]);
  return (vf)_mm512_scalef_ps((__m512)sum, (__m512)whole);
#else
  return exp2_of(x);
#endif
}
// e^x for x <= 0; below -87 it is e^-87, 1.6e-38. What is no number stays none.
INLINE vf exp_below_0(vf x) { return power_of_2(vmax(splat(-126.0f), x * 1.44269504f)); }

INLINE vf sigmoid(vf x) {
  vf t = power_of_2(vmin(splat(126.0f), vmax(splat(-126.0f), x * -1.44269504f)));
  return 1.0f / (1.0f + t);
}

}  // namespace
