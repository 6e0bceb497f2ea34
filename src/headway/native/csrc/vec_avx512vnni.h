// AVX-512 with VNNI: four products of bytes in one instruction.
#pragma once
#include "vec_avx512.h"

namespace {
namespace avx512vnni {
using namespace avx512;

constexpr int WORDS = 1;
INLINE void pack_four(int32_t* to, const int8_t* q) { memcpy(to, q, 4); }
INLINE vi add_four(vi acc, vi w, const int32_t* x) {
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(*x));
}

}  // namespace avx512vnni
}  // namespace
