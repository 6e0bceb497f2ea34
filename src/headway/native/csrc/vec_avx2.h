// AVX2, FMA and F16C: 16 registers of 8 lanes.
#pragma once
#include <immintrin.h>
constexpr int W = 8, ROWS = 6, WIDE = 1, TALL = 2;
#include "vec_plain.h"

namespace {
namespace avx2 {
using namespace plain;

INLINE uint32_t bits_of(vi mask) { return (uint32_t)_mm256_movemask_ps((__m256)mask); }
INLINE uint32_t greater(vf a, vf b) { return bits_of(a > b); }

// In assembly, so that each sum stays in its register: compilers move them between registers, and spill one.
INLINE vf add_product(vf acc, vf a, vf b) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
}

INLINE vf widened(vh x) { return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)x), 16); }
INLINE vf read_halves(const char* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
template <bool SIGNED>
INLINE vi read_bytes(const void* p) {
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
  return (vi)(SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
}
INLINE vi nearest(vf x) { return (vi)_mm256_cvtps_epi32((__m256)x); }

INLINE vi add_four(vi acc, vi w, const int32_t* x) {
  vi even = w & 0x00FF00FF, odd = (vi)((w >> 8) & 0x00FF00FF);
  return acc + (vi)_mm256_madd_epi16((__m256i)even, _mm256_set1_epi32(x[0])) +
         (vi)_mm256_madd_epi16((__m256i)odd, _mm256_set1_epi32(x[1]));
}

constexpr bool HAS_SHORTS = true;
INLINE vi add_two(vi acc, vi w, int32_t x) {
  vi both;  // in place, as in add_product
  asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(both) : "x"(w), "x"(_mm256_set1_epi32(x)));
  return acc;
}

INLINE vf low_lanes(vf x, vf y) { return (vf)_mm256_unpacklo_ps((__m256)x, (__m256)y); }
INLINE vf high_lanes(vf x, vf y) { return (vf)_mm256_unpackhi_ps((__m256)x, (__m256)y); }
INLINE vf low_pairs(vf x, vf y) { return (vf)_mm256_unpacklo_pd((__m256d)x, (__m256d)y); }
INLINE vf high_pairs(vf x, vf y) { return (vf)_mm256_unpackhi_pd((__m256d)x, (__m256d)y); }
INLINE vf even_fours(vf x, vf y) { return (vf)_mm256_permute2f128_ps((__m256)x, (__m256)y, 0x20); }
INLINE vf odd_fours(vf x, vf y) { return (vf)_mm256_permute2f128_ps((__m256)x, (__m256)y, 0x31); }

template <class F>
INLINE void look_up(const vf (&table)[N], const char* p, F f) {
  const vu codes = (vu)load_int((const int32_t*)p);
  UNROLL for (int c = 0; c < 8; c++) {
    const __m256i at = (__m256i)(codes >> shift_of(c));
    const __m256 low = _mm256_permutevar8x32_ps((__m256)table[0], at);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)table[1], at);
    f(c * W, (vf)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(at, 28)));
  }
}

}  // namespace avx2
}  // namespace
