// Advanced SIMD with products of unsigned and signed bytes, and of pairs of bf16.
#pragma once
#include "vec_dotprod.h"

namespace {
namespace i8mm {
using namespace dotprod;

constexpr int LESS = 0;
INLINE vi signed_codes(vi w) { return w; }
INLINE vi add_four(vi acc, vi w, const int32_t* x) {
  return (vi)vusdotq_s32((int32x4_t)acc, (uint8x16_t)w, (int8x16_t)vdupq_n_s32(*x));
}

constexpr bool HAS_PAIRS = true;
// In assembly: g++ 12 turns a constant 1 in bf16 into the 1 of float16.
INLINE vf add_pairs(vf acc, vf a, vf b) {
  asm("bfdot %0.4s, %1.8h, %2.8h" : "+w"(acc) : "w"(a), "w"(b));
  return acc;
}

INLINE vh halves_of(vf x) { return (vh)vcvt_bf16_f32((float32x4_t)x); }
INLINE vf joined(vf x, vf y) {
  return (vf)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)x), (float32x4_t)y);
}
INLINE vf row_pairs(vf x, vf y) {
  const uint16x8_t both = (uint16x8_t)joined(x, y);
  return (vf)vzip1q_u16(both, vextq_u16(both, both, 4));
}

INLINE void interleave(float* to, const uint16_t* a, const uint16_t* b, int whole) {
  for (int at = 0; at < whole; at += 8) {
    const uint16x8_t x = vld1q_u16(a + at), y = vld1q_u16(b + at);
    vst1q_u16((uint16_t*)(to + at), vzip1q_u16(x, y));
    vst1q_u16((uint16_t*)(to + at + 4), vzip2q_u16(x, y));
  }
}

// The table index of each 16-bit lane is its bytes 2 code and 2 code + 1.
template <class F>
INLINE void look_up_pairs(const vf (&table)[N], const char* p, F f) {
  const uint8x16x2_t all = {{(uint8x16_t)joined(table[0], table[1]), (uint8x16_t)joined(table[2], table[3])}};
  const uint16x8_t codes[2] = {(uint16x8_t)load_int((const int32_t*)p), (uint16x8_t)load_int((const int32_t*)p + W)};
  UNROLL for (int c = 0; c < 4; c++)
    UNROLL for (int half = 0; half < 2; half++) {
      const uint16x8_t at = (codes[half] >> shift_of(c) & 15) * 0x0202 + 0x0100;
      f((2 * c + half) * W, (vf)vqtbl2q_u8(all, (uint8x16_t)at));
    }
}

}  // namespace i8mm
}  // namespace
