// Advanced SIMD of ARMv8: 32 registers of 4 lanes. Six rows by a unit of columns are 24 sums; the unit's 4 vectors and the
// word of a row take the others.
#pragma once
#include <arm_neon.h>
constexpr int W = 4, ROWS = 6, WIDE = 1, TALL = 4;
#include "vec_plain.h"

namespace {
namespace neon {
using namespace plain;

INLINE float sum_of(vf x) { return vaddvq_f32((float32x4_t)x); }
INLINE int32_t largest_of(vi x) { return vmaxvq_s32((int32x4_t)x); }
INLINE int32_t sum_of_ints(vi x) { return vaddvq_s32((int32x4_t)x); }

INLINE vf where(uint32_t bits, vf x, vf y) {
  return (vf)vbslq_f32((uint32x4_t)lanes(bits), (float32x4_t)x, (float32x4_t)y);
}
INLINE uint32_t bits_of(vi mask) {
  const vi bit = {1, 2, 4, 8};
  return (uint32_t)vaddvq_s32((int32x4_t)(mask & bit));
}
INLINE uint32_t greater(vf a, vf b) { return bits_of(a > b); }
INLINE vf add_product(vf acc, vf a, vf b) { return (vf)vfmaq_f32((float32x4_t)acc, (float32x4_t)a, (float32x4_t)b); }

INLINE vh halves_of(vf x) {
  const vi bits = (vi)x, up = bits + 0x7FFF + (vi)((vu)bits << 15 >> 31);
  return (vh)vshrn_n_u32((uint32x4_t)(x == x ? up : bits | 0x400000), 16);
}
INLINE vf widened(vh x) { return (vf)vshll_n_u16((uint16x4_t)x, 16); }
INLINE vf read_halves(const char* p) {
  float16x4_t x;
  memcpy(&x, p, sizeof x);
  return (vf)vcvt_f32_f16(x);
}
template <bool SIGNED>
INLINE vi read_bytes(const void* p) {
  uint32_t four;
  memcpy(&four, p, sizeof four);
  const uint8x8_t x = vcreate_u8(four);
  if (SIGNED) return (vi)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(x))));
  return (vi)vmovl_u16(vget_low_u16(vmovl_u8(x)));
}
INLINE void write_bytes(int8_t* to, vi x) {
  const int16x4_t half = vmovn_s32((int32x4_t)x);
  const int32x2_t four = vreinterpret_s32_s8(vmovn_s16(vcombine_s16(half, half)));
  const int32_t word = vget_lane_s32(four, 0);
  memcpy(to, &word, sizeof word);
}
INLINE vi nearest(vf x) { return (vi)vcvtnq_s32_f32((float32x4_t)x); }

// Codes less 128 are signed bytes; sums of two products fit into 16 bits, since inputs are at least -127.
constexpr int LESS = 128, WORDS = 1;
INLINE vi signed_codes(vi w) { return w ^ (vi)vdupq_n_u8(0x80); }
INLINE void pack_four(int32_t* to, const int8_t* q) { memcpy(to, q, 4); }
INLINE vi add_four(vi acc, vi w, const int32_t* x) {
  const int8x16_t a = (int8x16_t)w, b = (int8x16_t)vdupq_n_s32(*x);
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
  return (vi)vpadalq_s16((int32x4_t)acc, vpaddq_s16(low, high));
}

INLINE vf low_lanes(vf x, vf y) { return (vf)vzip1q_f32((float32x4_t)x, (float32x4_t)y); }
INLINE vf high_lanes(vf x, vf y) { return (vf)vzip2q_f32((float32x4_t)x, (float32x4_t)y); }
INLINE vf low_pairs(vf x, vf y) { return (vf)vzip1q_f64((float64x2_t)x, (float64x2_t)y); }
INLINE vf high_pairs(vf x, vf y) { return (vf)vzip2q_f64((float64x2_t)x, (float64x2_t)y); }
INLINE vf even_fours(vf x, vf) { return x; }
INLINE vf odd_fours(vf, vf y) { return y; }

// Returns 16 bytes, one for each bit of `plane` from bit `from` on: 255 if it is set, else 0.
INLINE uint8x16_t spread_bits(uint64_t plane, int from) {
  const uint8x16_t bit = (uint8x16_t)vdupq_n_u64(0x8040201008040201);
  const uint8x8_t low = vdup_n_u8((uint8_t)(plane >> from)), high = vdup_n_u8((uint8_t)(plane >> (from + 8)));
  return vtstq_u8(vcombine_u8(low, high), bit);
}

INLINE void unpack_places(uint16_t* w, uint64_t low_bits, uint64_t mid_bits, uint64_t high_bits, const char* rest,
                          const char* other, uint64_t table) {
  alignas(16) uint8_t exponent[PLACES];
  const uint8x16_t of_codes = vcombine_u8(vcreate_u8(table), vdup_n_u8(0)), one = vdupq_n_u8(1);
  for (int j = 0; j < PLACES; j += 16) {
    const uint8x16_t low = vandq_u8(spread_bits(low_bits, j), one);
    const uint8x16_t mid = vandq_u8(spread_bits(mid_bits, j), vdupq_n_u8(2));
    const uint8x16_t high = vandq_u8(spread_bits(high_bits, j), vdupq_n_u8(4));
    vst1q_u8(exponent + j, vqtbl1q_u8(of_codes, vorrq_u8(vorrq_u8(low, mid), high)));
  }
  for (uint64_t others = low_bits & mid_bits & high_bits; others; others &= others - 1)
    exponent[__builtin_ctzll(others)] = (uint8_t)*other++;
  // places 16 i .. 16 i + 7 are inputs 8 i .. 8 i + 7, the next eight inputs 32 + 8 i ..: see input_of
  for (int j = 0; j < PLACES; j += 16) {
    const uint8x16_t e = vld1q_u8(exponent + j), own = vld1q_u8((const uint8_t*)rest + j), sign = vdupq_n_u8(0x80);
    const uint8x16_t high = vbslq_u8(sign, own, vshrq_n_u8(e, 1)), low = vbslq_u8(sign, vshlq_n_u8(e, 7), own);
    vst1q_u8((uint8_t*)(w + j / 2), vzip1q_u8(low, high));
    vst1q_u8((uint8_t*)(w + 32 + j / 2), vzip2q_u8(low, high));
  }
}

// The table index of each lane is its bytes 4 code .. 4 code + 3.
template <class F>
INLINE void look_up(const vf (&table)[N], const char* p, F f) {
  const uint8x16x4_t all = {{(uint8x16_t)table[0], (uint8x16_t)table[1], (uint8x16_t)table[2], (uint8x16_t)table[3]}};
  const vu codes = (vu)load_int((const int32_t*)p);
  UNROLL for (int c = 0; c < 8; c++) {
    const vu at = (codes >> shift_of(c) & 15) * 0x04040404u + 0x03020100u;
    f(c * W, (vf)vqtbl4q_u8(all, (uint8x16_t)at));
  }
}

}  // namespace neon
}  // namespace
