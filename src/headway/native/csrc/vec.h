// Vectors of the CPU level that this file is compiled for. A unit is 16 floats: N vectors of W lanes.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if HEADWAY_LEVEL >= 1
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

namespace {

constexpr int UNIT = 16;   // keys per panel, floats per unit
constexpr int BLOCK = 64;  // keys per block

#if HEADWAY_LEVEL >= 2
constexpr int W = 16, ROWS = 6, WIDE = 4;
#elif HEADWAY_LEVEL == 1
constexpr int W = 8, ROWS = 6, WIDE = 1;
#else
constexpr int W = 4, ROWS = 2, WIDE = 1;
#endif
constexpr int N = UNIT / W;

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef float vf_any __attribute__((vector_size(4 * W), aligned(2), may_alias));
typedef int32_t vi_any __attribute__((vector_size(4 * W), aligned(2), may_alias));

INLINE vf load(const float* p) { return *(const vf_any*)p; }
INLINE void store(float* p, vf x) { *(vf_any*)p = x; }
INLINE vi load_int(const int32_t* p) { return *(const vi_any*)p; }
INLINE vf splat(float x) {
#if HEADWAY_LEVEL >= 2
  return (vf)_mm512_set1_ps(x);
#elif HEADWAY_LEVEL == 1
  return (vf)_mm256_set1_ps(x);
#else
  return vf{x, x, x, x};
#endif
}
INLINE vi splat_int(int32_t x) { return (vi){} + x; }

INLINE vf vmax(vf a, vf b) {
#if HEADWAY_LEVEL >= 2
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif HEADWAY_LEVEL == 1
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

INLINE float sum_of(vf x) {
#if HEADWAY_LEVEL >= 2
  return _mm512_reduce_add_ps((__m512)x);
#endif
  float s = 0;
  for (int i = 0; i < W; i++) s += x[i];
  return s;
}
INLINE float max_of(vf x) {
#if HEADWAY_LEVEL >= 2
  return _mm512_reduce_max_ps((__m512)x);
#endif
  float s = x[0];
  for (int i = 1; i < W; i++) s = x[i] > s ? x[i] : s;
  return s;
}

// Lane bits: bit i of a word speaks of lane i.
INLINE vi lanes(uint32_t bits) {
  vi bit;
  for (int i = 0; i < W; i++) bit[i] = 1 << i;
  return (bit & (int32_t)bits) != 0;
}
INLINE vf only(uint32_t bits, vf x) {
#if HEADWAY_LEVEL >= 2
  return (vf)_mm512_maskz_mov_ps((__mmask16)bits, (__m512)x);
#else
  return (vf)((vi)x & lanes(bits));
#endif
}
INLINE vf where(uint32_t bits, vf x, vf y) {
#if HEADWAY_LEVEL >= 2
  return (vf)_mm512_mask_mov_ps((__m512)y, (__mmask16)bits, (__m512)x);
#else
  vi m = lanes(bits);
  return (vf)(((vi)x & m) | ((vi)y & ~m));
#endif
}
INLINE uint32_t bits_of(vi mask) {
#if HEADWAY_LEVEL >= 2
  return _mm512_movepi32_mask((__m512i)mask);
#elif HEADWAY_LEVEL == 1
  return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
  uint32_t bits = 0;
  for (int i = 0; i < W; i++) bits |= (uint32_t)(mask[i] & 1) << i;
  return bits;
#endif
}
INLINE uint32_t greater(vf a, vf b) {
#if HEADWAY_LEVEL >= 2
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#else
  return bits_of(a > b);
#endif
}

// Coefficients of 2^f for f in [0, 1), highest first: relative error 1.2e-7, and 4e-6 for what is rounded to bf16.
alignas(64) const float EXP2_FULL[6] = {1.8775767e-3f, 8.9893397e-3f, 5.5826318e-2f,
                                        2.4015361e-1f, 6.9315308e-1f, 9.9999994e-1f};
alignas(64) const float EXP2_HALF[5] = {1.3534167e-2f, 5.2011464e-2f, 2.4144275e-1f, 6.9300383e-1f, 1.0000026f};

#if HEADWAY_LEVEL >= 2
// Four of them step by step together, so that what waits for a result never stands before what could be computed.
// The coefficients stay in memory on purpose (hence the assembly): around this code the registers hold sums of
// products, and compilers would rather spill those.
#define EACH_OF_4(op) op(0) op(1) op(2) op(3)
#define EXP2_LOAD(i) "vmovups %[x" #i "], %[f" #i "]\n\t"
#define EXP2_FRACTION(i) "vreduceps $9, %[f" #i "], %[f" #i "]\n\t"
#define EXP2_FIRST(i) "vbroadcastss %[k0], %[p" #i "]\n\t"
#define EXP2_NEXT(k, i) "vfmadd213ps %[" #k "]%{1to16%}, %[f" #i "], %[p" #i "]\n\t"
#define EXP2_STEP(k) EXP2_NEXT(k, 0) EXP2_NEXT(k, 1) EXP2_NEXT(k, 2) EXP2_NEXT(k, 3)
#define EXP2_SCALE(i) "vscalefps %[x" #i "], %[p" #i "], %[p" #i "]%{%[m" #i "]%}%{z%}\n\t"
#define EXP2_OUT(i) [f##i] "=&v"(f##i), [p##i] "=&v"(p##i)
#define EXP2_IN(i) [x##i] "m"(*(const __m512_u*)(x + i * 16)), [m##i] "Yk"((__mmask16)bits[i])
#endif

// 2^x of the C panels at x where the bit is set, else exactly 0.
template <bool HALF, int C>
INLINE void exp2_only(vf (&p)[C * N], const uint16_t* bits, const float* x) {
#if HEADWAY_LEVEL >= 2
  static_assert(C == 4, "four at a time");
  __m512 f0, f1, f2, f3, p0, p1, p2, p3;
  if (HALF)
    asm(EACH_OF_4(EXP2_LOAD) EACH_OF_4(EXP2_FRACTION) EACH_OF_4(EXP2_FIRST) EXP2_STEP(k1) EXP2_STEP(k2) EXP2_STEP(k3)
            EXP2_STEP(k4) EACH_OF_4(EXP2_SCALE)
        : EXP2_OUT(0), EXP2_OUT(1), EXP2_OUT(2), EXP2_OUT(3)
        : EXP2_IN(0), EXP2_IN(1), EXP2_IN(2), EXP2_IN(3), [k0] "m"(EXP2_HALF[0]), [k1] "m"(EXP2_HALF[1]),
          [k2] "m"(EXP2_HALF[2]), [k3] "m"(EXP2_HALF[3]), [k4] "m"(EXP2_HALF[4]));
  else
    asm(EACH_OF_4(EXP2_LOAD) EACH_OF_4(EXP2_FRACTION) EACH_OF_4(EXP2_FIRST) EXP2_STEP(k1) EXP2_STEP(k2) EXP2_STEP(k3)
            EXP2_STEP(k4) EXP2_STEP(k5) EACH_OF_4(EXP2_SCALE)
        : EXP2_OUT(0), EXP2_OUT(1), EXP2_OUT(2), EXP2_OUT(3)
        : EXP2_IN(0), EXP2_IN(1), EXP2_IN(2), EXP2_IN(3), [k0] "m"(EXP2_FULL[0]), [k1] "m"(EXP2_FULL[1]),
          [k2] "m"(EXP2_FULL[2]), [k3] "m"(EXP2_FULL[3]), [k4] "m"(EXP2_FULL[4]), [k5] "m"(EXP2_FULL[5]));
  p[0] = (vf)p0, p[1] = (vf)p1, p[2] = (vf)p2, p[3] = (vf)p3;
#else
  UNROLL for (int i = 0; i < C * N; i++) {
    vf y = load(x + i * W);
    y = y < splat(-127.0f) ? splat(-127.0f) : y;
#if HEADWAY_LEVEL == 1
    vf down = (vf)_mm256_floor_ps((__m256)y);
#else
    vf down;
    for (int j = 0; j < W; j++) down[j] = floorf(y[j]);
#endif
    vf f = y - down, sum = splat(EXP2_FULL[0]);
    UNROLL for (int j = 1; j < 6; j++) sum = sum * f + splat(EXP2_FULL[j]);
    vi power = (__builtin_convertvector(down, vi) + 127) << 23;
    p[i] = only((uint32_t)(bits[i / N] >> (i % N * W)), sum * (vf)power);
  }
#endif
}

// -- words: a float, or a pair of bf16 that a dot product takes at once ------------------------------------

template <bool HALF>
INLINE vf multiply_add(vf acc, vf a, vf b) {
#if HEADWAY_LEVEL >= 3
  if (HALF) return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512)a, (__m512bh)(__m512)b);
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

// count floats, times a factor, as float or bf16.
INLINE void write_as(void* to, bool half, const float* from, int count, float factor) {
  int i = 0;
  vf by = splat(factor);
#if HEADWAY_LEVEL >= 3
  if (half)
    for (; i + 16 <= count; i += 16)
      _mm256_storeu_si256((__m256i*)((uint16_t*)to + i), (__m256i)_mm512_cvtneps_pbh((__m512)(load(from + i) * by)));
#endif
  if (!half)
    for (; i + W <= count; i += W) store((float*)to + i, load(from + i) * by);
  for (; i < count; i++) {
    if (half)
      ((uint16_t*)to)[i] = to_bf16(from[i] * factor);
    else
      ((float*)to)[i] = from[i] * factor;
  }
}

INLINE void copy_words(float* to, const float* from, int count) {
  for (int i = 0; i < count; i += W) store(to + i, load(from + i));
}

}  // namespace
