// AVX-512 F, BW, DQ and VL: 32 registers of 16 lanes.
#pragma once
#include <immintrin.h>
constexpr int W = 16, ROWS = 6, WIDE = 4, TALL = 8;
#include "vec_plain.h"

namespace {
namespace avx512 {
using namespace plain;

INLINE float sum_of(vf x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE int32_t largest_of(vi x) { return _mm512_reduce_max_epi32((__m512i)x); }
INLINE int32_t sum_of_ints(vi x) { return _mm512_reduce_add_epi32((__m512i)x); }

INLINE vf only(uint32_t bits, vf x) { return (vf)_mm512_maskz_mov_ps((__mmask16)bits, (__m512)x); }
INLINE vf where(uint32_t bits, vf x, vf y) { return (vf)_mm512_mask_mov_ps((__m512)y, (__mmask16)bits, (__m512)x); }
INLINE uint32_t bits_of(vi mask) { return _mm512_movepi32_mask((__m512i)mask); }
INLINE uint32_t greater(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }

// Coefficients of a polynomial for 2^f, f in [0, 1), highest power first: relative error 1.2e-7. For weights that are rounded
// to bf16: a straight line on each sixteenth, relative error 1.2e-4, which leaves more of the multiply units to the products.
alignas(64) const float EXP2[6] = {1.8775767e-3f, 8.9893397e-3f, 5.5826318e-2f,
                                   2.4015361e-1f, 6.9315308e-1f, 9.9999994e-1f};
alignas(64) const float EXP2_AT[16] = {0.9998801f, 1.0441486f, 1.0903770f, 1.1386521f, 1.1890646f, 1.2417089f, 1.2966841f, 1.3540932f,
                                       1.4140440f, 1.4766491f, 1.5420260f, 1.6102973f, 1.6815912f, 1.7560416f, 1.8337882f, 1.9149770f};
alignas(64) const float EXP2_SLOPE[16] = {0.7083805f, 0.7397432f, 0.7724944f, 0.8066957f, 0.8424112f, 0.8797079f, 0.9186559f, 0.9593282f,
                                          1.0018013f, 1.0461549f, 1.0924721f, 1.1408400f, 1.1913493f, 1.2440948f, 1.2991756f, 1.3566950f};
alignas(64) const float SIXTEENTHS = 786432.0f;  // the last bits of x + SIXTEENTHS are floor(16 x)

// The steps of several vectors are interleaved, so that independent instructions follow one another. Constants stay in memory
// on purpose (hence the assembly): the surrounding code keeps sums of products in the registers, and compilers would rather
// spill those.
#define EACH_OF_2(op) op(0) op(1)
#define EACH_OF_4(op) op(0) op(1) op(2) op(3)
#define EXP2_LOAD(i) "vmovups %[x" #i "], %[f" #i "]\n\t"
#define EXP2_FRACTION(i) "vreduceps $9, %[f" #i "], %[f" #i "]\n\t"
#define EXP2_FIRST(i) "vbroadcastss %[k0], %[p" #i "]\n\t"
#define EXP2_NEXT(k, i) "vfmadd213ps %[" #k "]%{1to16%}, %[f" #i "], %[p" #i "]\n\t"
#define EXP2_STEP(k) EXP2_NEXT(k, 0) EXP2_NEXT(k, 1) EXP2_NEXT(k, 2) EXP2_NEXT(k, 3)
#define EXP2_SHIFT(i) "vbroadcastss %[shift], %[t" #i "]\n\t"
#define EXP2_PLACE(i) "vaddps %{rd-sae%}, %[f" #i "], %[t" #i "], %[t" #i "]\n\t"
#define EXP2_REST(i) "vreduceps $0x49, %[f" #i "], %[f" #i "]\n\t"
#define EXP2_TAKE(i) "vpermps %[at], %[t" #i "], %[p" #i "]\n\t"
#define EXP2_TAKE_SLOPE(i) "vpermps %[slope], %[t" #i "], %[t" #i "]\n\t"
#define EXP2_LINE(i) "vfmadd231ps %[t" #i "], %[f" #i "], %[p" #i "]\n\t"
#define EXP2_SCALE(i) "vscalefps %[x" #i "], %[p" #i "], %[p" #i "]%{%[m" #i "]%}%{z%}\n\t"
#define EXP2_OUT(i) [f##i] "=&v"(f##i), [p##i] "=&v"(p##i)
#define EXP2_IN(i) [x##i] "m"(*(const __m512_u*)(x + i * step)), [m##i] "Yk"((__mmask16)bits[i])

INLINE void exp2_of(vf (&p)[2], const uint16_t* bits, const float* x, int64_t step = UNIT) {
  __m512 f0, f1, t0, t1, p0, p1;
  asm(EACH_OF_2(EXP2_LOAD) EACH_OF_2(EXP2_SHIFT) EACH_OF_2(EXP2_PLACE) EACH_OF_2(EXP2_REST) EACH_OF_2(EXP2_TAKE)
          EACH_OF_2(EXP2_TAKE_SLOPE) EACH_OF_2(EXP2_LINE) EACH_OF_2(EXP2_SCALE)
      : EXP2_OUT(0), EXP2_OUT(1), [t0] "=&v"(t0), [t1] "=&v"(t1)
      : EXP2_IN(0), EXP2_IN(1), [shift] "m"(SIXTEENTHS), [at] "m"(*(const __m512*)EXP2_AT),
        [slope] "m"(*(const __m512*)EXP2_SLOPE));
  p[0] = (vf)p0, p[1] = (vf)p1;
}
INLINE void exp2_of(vf (&p)[4], const uint16_t* bits, const float* x, int64_t step = UNIT) {
  __m512 f0, f1, f2, f3, p0, p1, p2, p3;
  asm(EACH_OF_4(EXP2_LOAD) EACH_OF_4(EXP2_FRACTION) EACH_OF_4(EXP2_FIRST) EXP2_STEP(k1) EXP2_STEP(k2) EXP2_STEP(k3)
          EXP2_STEP(k4) EXP2_STEP(k5) EACH_OF_4(EXP2_SCALE)
      : EXP2_OUT(0), EXP2_OUT(1), EXP2_OUT(2), EXP2_OUT(3)
      : EXP2_IN(0), EXP2_IN(1), EXP2_IN(2), EXP2_IN(3), [k0] "m"(EXP2[0]), [k1] "m"(EXP2[1]), [k2] "m"(EXP2[2]),
        [k3] "m"(EXP2[3]), [k4] "m"(EXP2[4]), [k5] "m"(EXP2[5]));
  p[0] = (vf)p0, p[1] = (vf)p1, p[2] = (vf)p2, p[3] = (vf)p3;
}

template <bool HALF>
INLINE void exp2_only(vf (&p)[AT_ONCE<HALF> * N], const uint16_t* bits, const float* x) {
  exp2_of(p, bits, x);
}
INLINE void exp2_of_rows(vf (&p)[2], const uint16_t* bits, const float* x, int64_t step) { exp2_of(p, bits, x, step); }
INLINE vf exp2_of_each(vf x) {
  const uint16_t bits[4] = {0xFFFF};
  alignas(64) float all[4 * UNIT] = {};
  store(all, x);
  vf p[4];
  exp2_of(p, bits, all);
  return p[0];
}
INLINE vf power_of_2(vf x) {
  vf whole = (vf)_mm512_roundscale_ps((__m512)x, 9), f = x - whole, sum = splat(EXP2[0]);
  UNROLL for (int i = 1; i < 6; i++) sum = sum * f + splat(EXP2[i]);
  return (vf)_mm512_scalef_ps((__m512)sum, (__m512)whole);
}

INLINE vf widened(vh x) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16); }
INLINE vf read_halves(const char* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
template <bool SIGNED>
INLINE vi read_bytes(const void* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return (vi)(SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}
INLINE void write_bytes(int8_t* to, vi x) { _mm_store_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x)); }
INLINE vi nearest(vf x) { return (vi)_mm512_cvtps_epi32((__m512)x); }

INLINE vi add_four(vi acc, vi w, const int32_t* x) {
  vi even = w & 0x00FF00FF, odd = (vi)((w >> 8) & 0x00FF00FF);
  return acc + (vi)_mm512_madd_epi16((__m512i)even, _mm512_set1_epi32(x[0])) +
         (vi)_mm512_madd_epi16((__m512i)odd, _mm512_set1_epi32(x[1]));
}

INLINE vf low_lanes(vf x, vf y) { return (vf)_mm512_unpacklo_ps((__m512)x, (__m512)y); }
INLINE vf high_lanes(vf x, vf y) { return (vf)_mm512_unpackhi_ps((__m512)x, (__m512)y); }
INLINE vf low_pairs(vf x, vf y) { return (vf)_mm512_unpacklo_pd((__m512d)x, (__m512d)y); }
INLINE vf high_pairs(vf x, vf y) { return (vf)_mm512_unpackhi_pd((__m512d)x, (__m512d)y); }
INLINE vf even_fours(vf x, vf y) { return (vf)_mm512_shuffle_f32x4((__m512)x, (__m512)y, 0x88); }
INLINE vf odd_fours(vf x, vf y) { return (vf)_mm512_shuffle_f32x4((__m512)x, (__m512)y, 0xDD); }

template <class F>
INLINE void look_up(const vf (&table)[N], const char* p, F f) {
  const __m512i codes = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p));
  UNROLL for (int c = 0; c < 8; c += 2) {
    const __m512i shift = _mm512_inserti64x4(_mm512_set1_epi32(shift_of(c)), _mm256_set1_epi32(shift_of(c + 1)), 1);
    f(c / 2 * W, (vf)_mm512_permutexvar_ps(_mm512_srlv_epi32(codes, shift), (__m512)table[0]));
  }
}

}  // namespace avx512
}  // namespace
