// Numbers that lie in memory as float32, bf16 or 8 bits and are computed in float32, and functions of them.
#pragma once
#include "headway.h"
#include "vec.h"

namespace {

// acc + a b of words: floats, or pairs of bf16 that a dot product takes at once.
template <bool HALF>
INLINE vf multiply_add(vf acc, vf a, vf b) {
#if HEADWAY_LEVEL >= 3
  if (HALF) return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512)a, (__m512bh)(__m512)b);
#endif
#if HEADWAY_LEVEL == 1
  // Sums stay where they are: left to themselves, compilers have them change registers, and spill one for lack of room.
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
#endif
  return a * b + acc;
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
INLINE vf widened(vh x) {
#if HEADWAY_LEVEL >= 2
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#elif HEADWAY_LEVEL == 1
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)x), 16);
#else
  return (vf)(__builtin_convertvector(x, vi) << 16);
#endif
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

// The numbers of W bytes, signed or not.
template <bool SIGNED>
INLINE vi read_bytes(const void* p) {
#if HEADWAY_LEVEL >= 2
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return (vi)(SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif HEADWAY_LEVEL == 1
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
  return (vi)(SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  vi x;
  for (int i = 0; i < W; i++) x[i] = SIGNED ? ((const int8_t*)p)[i] : ((const uint8_t*)p)[i];
  return x;
#endif
}

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
