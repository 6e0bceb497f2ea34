// AVX2 with AVX-VNNI: four products of bytes in one instruction.
#pragma once
#include "vec_avx2.h"

namespace {
namespace avxvnni {
using namespace avx2;

constexpr bool HAS_SHORTS = false;
constexpr int WORDS = 1;
INLINE void pack_four(int32_t* to, const int8_t* q) { memcpy(to, q, 4); }
INLINE vi add_four(vi acc, vi w, const int32_t* x) {
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(*x));
}

}  // namespace avxvnni
}  // namespace
