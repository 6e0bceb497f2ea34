// AVX-512 with VNNI, VBMI2 and BF16: products of pairs of bf16.
#pragma once
#include "vec_avx512vnni.h"

namespace {
namespace avx512bf16 {
using namespace avx512vnni;

constexpr bool HAS_PAIRS = true;

INLINE vf add_pairs(vf acc, vf a, vf b) {
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512)a, (__m512bh)(__m512)b);
}

INLINE vh halves_of(vf x) { return (vh)_mm512_cvtneps_pbh((__m512)x); }
INLINE vf joined(vf x, vf y) { return (vf)(__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x); }
INLINE vf row_pairs(vf x, vf y) {
  const __m512i way = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                       5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (vf)_mm512_permutexvar_epi16(way, (__m512i)joined(x, y));
}
INLINE vf low_halves(vf x, vf y) { return (vf)_mm512_unpacklo_epi16((__m512i)x, (__m512i)y); }
INLINE vf high_halves(vf x, vf y) { return (vf)_mm512_unpackhi_epi16((__m512i)x, (__m512i)y); }

// Writes pairs of one bf16 of a and one of b, `whole` of each.
INLINE void interleave(float* to, const uint16_t* a, const uint16_t* b, int whole) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                       37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  int at = 0;
  for (; at + 32 <= whole; at += 32) {
    __m512i x = _mm512_loadu_si512(a + at), y = _mm512_loadu_si512(b + at);
    _mm512_storeu_si512(to + at, _mm512_permutex2var_epi16(x, low, y));
    _mm512_storeu_si512(to + at + 16, _mm512_permutex2var_epi16(x, high, y));
  }
  if (at < whole) {
    __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(a + at)));
    __m512i y = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(b + at)));
    _mm512_storeu_si512(to + at, _mm512_permutex2var_epi16(x, low, y));
  }
}

INLINE void unpack_places(uint16_t* w, uint64_t low_bits, uint64_t mid_bits, uint64_t high_bits, const char* rest,
                          const char* other, uint64_t table) {
  __m512i code = _mm512_maskz_set1_epi8(low_bits, 1);
  code = _mm512_or_si512(code, _mm512_maskz_set1_epi8(mid_bits, 2));
  code = _mm512_or_si512(code, _mm512_maskz_set1_epi8(high_bits, 4));
  __m512i exponent = _mm512_shuffle_epi8(_mm512_set1_epi64((long long)table), code);
  exponent = _mm512_mask_expand_epi8(exponent, low_bits & mid_bits & high_bits, _mm512_loadu_si512(other));
  const __m512i own = _mm512_loadu_si512(rest), sign = _mm512_set1_epi8((char)0x80);
  const __m512i high = _mm512_ternarylogic_epi64(sign, own, _mm512_srli_epi16(exponent, 1), 0xCA);
  const __m512i low = _mm512_ternarylogic_epi64(sign, _mm512_slli_epi16(exponent, 7), own, 0xCA);
  _mm512_store_si512(w, _mm512_unpacklo_epi8(low, high));
  _mm512_store_si512(w + 32, _mm512_unpackhi_epi8(low, high));
}

template <class F>
INLINE void look_up_pairs(const vf (&table)[N], const char* p, F f) {
  const __m512i codes = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p));
  const __m512i pairs = (__m512i)joined(table[0], table[0]);  // twice, so that the fifth bit of an index is ignored
  UNROLL for (int c = 0; c < 4; c += 2) {
    const __m512i shift = _mm512_inserti64x4(_mm512_set1_epi16(shift_of(c)), _mm256_set1_epi16(shift_of(c + 1)), 1);
    f(c / 2 * W, (vf)_mm512_permutexvar_epi16(_mm512_srlv_epi16(codes, shift), pairs));
  }
}

}  // namespace avx512bf16
}  // namespace
