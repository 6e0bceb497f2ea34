// Rows of inputs in 8 bits, as panels of codes are multiplied with them.
#pragma once
#include "linear.h"

namespace {

constexpr int GROUP = 32;  // inputs that share a scale

// Four inputs of a row, as one instruction takes them; a level without it takes them two by two, as 16 bits.
#if HEADWAY_LEVEL >= 3
constexpr int WORDS = 1;
#else
constexpr int WORDS = 2;
#endif

INLINE void pack_four(int32_t* to, const int8_t* q) {
#if HEADWAY_LEVEL >= 3
  memcpy(to, q, 4);
#else
  to[0] = (int32_t)((uint16_t)(int16_t)q[0] | (uint32_t)(uint16_t)(int16_t)q[2] << 16);
  to[1] = (int32_t)((uint16_t)(int16_t)q[1] | (uint32_t)(uint16_t)(int16_t)q[3] << 16);
#endif
}

INLINE int32_t largest_of(vi x) {
#if HEADWAY_LEVEL >= 2
  return _mm512_reduce_max_epi32((__m512i)x);
#endif
  int32_t most = x[0];
  for (int i = 1; i < W; i++) most = x[i] > most ? x[i] : most;
  return most;
}
INLINE int32_t sum_of_ints(vi x) {
#if HEADWAY_LEVEL >= 2
  return _mm512_reduce_add_epi32((__m512i)x);
#endif
  int32_t sum = 0;
  for (int i = 0; i < W; i++) sum += x[i];
  return sum;
}
// Whole numbers, halves to the even one.
INLINE vi nearest(vf x) {
#if HEADWAY_LEVEL >= 2
  return (vi)_mm512_cvtps_epi32((__m512)x);
#elif HEADWAY_LEVEL == 1
  return (vi)_mm256_cvtps_epi32((__m256)x);
#else
  for (int i = 0; i < W; i++) x[i] = __builtin_rintf(x[i]);
  return __builtin_convertvector(x, vi);
#endif
}
INLINE void write_bytes(int8_t* to, vi x) {
#if HEADWAY_LEVEL >= 2
  _mm_store_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x));
#else
  for (int i = 0; i < W; i++) to[i] = (int8_t)x[i];
#endif
}

// Rows of inputs in 8 bits: the largest of each group of 32 is 127. Rows that are multiplied together lie together.
struct Rounded {
  int32_t* q;      // [R / tall][groups][8][tall][WORDS]
  float* scale;    // [R / tall][groups][tall]
  int32_t* below;  // [R / tall][groups][tall]: - 128 times the sum of q
  int32_t* early;  // likewise of the first 16 of a group; or null
  float* mass;     // - scale times the sum of q
  int64_t groups, tall;

  int64_t at(int64_t row, int64_t group) const { return (row / tall * groups + group) * tall + row % tall; }

  void round(int64_t row, int64_t group, const float* x) {
    vi most = {}, total = {};
    UNROLL for (int i = 0; i < GROUP; i += W) {
      vi size = (vi)load(x + i) & 0x7FFFFFFF;
      most = size > most ? size : most;
    }
    int32_t bits = largest_of(most);
    float largest;
    memcpy(&largest, &bits, 4);
    int32_t first = 0;
    float by = largest > 0x1p-100f ? 127 / largest : 0;  // what is smaller counts as nothing, and what is no number
    alignas(64) int8_t to[GROUP] = {};
    if (by > 0)
      UNROLL for (int i = 0; i < GROUP; i += W) {
        vi near = nearest(load(x + i) * by);
        total += near;
        write_bytes(to + i, near);
        if (early && i + W == GROUP / 2) first = sum_of_ints(total);
      }
    scale[at(row, group)] = largest / 127;  // infinite or NaN: so are its products with 0
    const int32_t sum = sum_of_ints(total);
    below[at(row, group)] = -128 * sum;
    mass[at(row, group)] = -scale[at(row, group)] * (float)sum;
    if (early) early[at(row, group)] = -128 * first;
    int32_t* words = q + (at(row, group) + (GROUP / 4 - 1) * (row / tall * groups + group) * tall) * WORDS;
    for (int j = 0; j < GROUP / 4; j++) pack_four(words + j * tall * WORDS, to + 4 * j);
  }
};

}  // namespace
