// What a vector is at every level, and the operations on vectors in plain C++. A level's file sets W, ROWS and WIDE, and
// has, in a namespace of its name, what its instructions do better; vec.h takes the rest from here. Operations that are
// only declared here are those of pairs of bf16: a level without HAS_PAIRS never asks for them.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

namespace {

constexpr int UNIT = 16;   // keys per panel, floats per unit
constexpr int BLOCK = 64;  // keys per block
constexpr int N = UNIT / W;

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef float vf_any __attribute__((vector_size(4 * W), aligned(2), may_alias));
typedef int32_t vi_any __attribute__((vector_size(4 * W), aligned(2), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(2 * W), aligned(2), may_alias));

INLINE vf load(const float* p) { return *(const vf_any*)p; }
INLINE void store(float* p, vf x) { *(vf_any*)p = x; }
INLINE vi load_int(const int32_t* p) { return *(const vi_any*)p; }
INLINE vf splat(float x) { return x - vf{}; }  // also of -0.0
INLINE vi splat_int(int32_t x) { return vi{} + x; }

// Lane bits: bit i of a word speaks of lane i.
INLINE vi lanes(uint32_t bits) {
  vi bit;
  for (int i = 0; i < W; i++) bit[i] = 1 << i;
  return (bit & (int32_t)bits) != 0;
}

// Panels whose exponentials are computed together.
template <bool HALF>
constexpr int AT_ONCE = WIDE < 4 ? 1 : HALF ? 2 : 4;

constexpr int PLACES = 64, OTHER = 7;  // of a block of compressed.h

INLINE int input_of(int place) {
  int lane = place / 16, at = place % 16;
  return at < 8 ? lane * 8 + at : 32 + lane * 8 + at - 8;
}

// Of the codes in four bytes (nf4.h): the first of two in a byte is in its high bits.
constexpr int shift_of(int code) { return code / 2 * 8 + (code % 2 ? 0 : 4); }

namespace plain {

constexpr bool HAS_PAIRS = false;  // products of pairs of bf16
constexpr bool HAS_TILES = false;  // products of whole tiles of bytes, by a Tiles
template <int QUADS>
struct Tiles;
constexpr bool HAS_SHORTS = false;  // two products of 16 bits in one instruction, and not four of bytes

INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE float sum_of(vf x) {
  float s = 0;
  for (int i = 0; i < W; i++) s += x[i];
  return s;
}
INLINE int32_t largest_of(vi x) {
  int32_t most = x[0];
  for (int i = 1; i < W; i++) most = x[i] > most ? x[i] : most;
  return most;
}
INLINE int32_t sum_of_ints(vi x) {
  int32_t sum = 0;
  for (int i = 0; i < W; i++) sum += x[i];
  return sum;
}

INLINE vf only(uint32_t bits, vf x) { return (vf)((vi)x & lanes(bits)); }
INLINE vf where(uint32_t bits, vf x, vf y) { return lanes(bits) ? x : y; }
INLINE uint32_t bits_of(vi mask) {
  uint32_t bits = 0;
  for (int i = 0; i < W; i++) bits |= (uint32_t)(mask[i] & 1) << i;
  return bits;
}

INLINE uint32_t greater(vf a, vf b) { return bits_of(a > b); }

// acc + a b; the same of words that are pairs of bf16, both products of a word added.
INLINE vf add_product(vf acc, vf a, vf b) { return a * b + acc; }
vf add_pairs(vf acc, vf a, vf b);

// 2^f for f in [-1/2, 1/2]: a polynomial, highest coefficient first, relative error 1e-7; exact at 0.
const float EXP2[6] = {1.3269519e-3f, 9.671291e-3f, 5.550711e-2f, 2.4022247e-1f, 6.93147e-1f, 1.0f};
const float NEAREST = 0x1.8p23f + 127;  // x + this has the exponent of 2^x, rounded, in its last bits

// 2^x for x < 128; exactly 0 from -127 on downwards.
INLINE vf exp2_of(vf x) {
  vf y = vmax(splat(-127.0f), x), whole = y + splat(NEAREST), f = y - (whole - splat(NEAREST)), sum = splat(EXP2[0]);
  UNROLL for (int i = 1; i < 6; i++) sum = sum * f + splat(EXP2[i]);
  return sum * (vf)((vi)whole << 23);
}
// The same where the bit is set, else exactly 0, of AT_ONCE panels at x; as weights of attention have it; and for
// -127 < x < 127 to a relative error of 1.2e-7.
template <bool HALF>
INLINE void exp2_only(vf (&p)[AT_ONCE<HALF> * N], const uint16_t* bits, const float* x) {
  UNROLL for (int i = 0; i < AT_ONCE<HALF> * N; i++)
    p[i] = only((uint32_t)(bits[i / N] >> (i % N * W)), exp2_of(load(x + i * W)));
}
// The same of a panel of each of two rows, `step` apart.
INLINE void exp2_of_rows(vf (&p)[2 * N], const uint16_t* bits, const float* x, int64_t step) {
  UNROLL for (int i = 0; i < 2 * N; i++)
    p[i] = only((uint32_t)(bits[i / N] >> (i % N * W)), exp2_of(load(x + i / N * step + i % N * W)));
}
INLINE vf exp2_of_each(vf x) { return exp2_of(x); }
INLINE vf power_of_2(vf x) { return exp2_of(x); }

// bf16 of each lane, rounded to nearest even; what is no number stays none.
INLINE vh halves_of(vf x) {
  vi bits = (vi)x, up = bits + 0x7FFF + (bits >> 16 & 1);
  return __builtin_convertvector((x == x ? up : bits | 0x400000) >> 16, vh);
}
INLINE vf widened(vh x) { return (vf)(__builtin_convertvector(x, vi) << 16); }
// As words: the numbers of x and then those of y; pairs of a lane of x and the same of y; and of 32 bf16, pairs of one of
// x and one of y, of each eight the first four or the last four. Then pairs of one of a and one of b, `whole` of each.
vf joined(vf x, vf y);
vf row_pairs(vf x, vf y);
vf low_halves(vf x, vf y);
vf high_halves(vf x, vf y);
void interleave(float* to, const uint16_t* a, const uint16_t* b, int whole);

// Numbers of IEEE's 16 bits.
INLINE float from_half(uint16_t h) {
  uint32_t sign = (uint32_t)(h >> 15) << 31, rest = h & 0x7FFF, bits;
  float f;
  if (rest < 0x400) {
    f = (float)rest * 0x1p-24f;
    memcpy(&bits, &f, 4);
  } else {
    bits = (rest << 13) + (rest >= 0x7C00 ? 0x70000000 : 0x38000000);
  }
  bits |= sign;
  memcpy(&f, &bits, 4);
  return f;
}
INLINE vf read_halves(const char* p) {
  vf x;
  uint16_t h[W];
  memcpy(h, p, sizeof h);
  for (int i = 0; i < W; i++) x[i] = from_half(h[i]);
  return x;
}

// The numbers of W bytes, signed or not, and back.
template <bool SIGNED>
INLINE vi read_bytes(const void* p) {
  vi x;
  for (int i = 0; i < W; i++) x[i] = SIGNED ? ((const int8_t*)p)[i] : ((const uint8_t*)p)[i];
  return x;
}
INLINE void write_bytes(int8_t* to, vi x) {
  for (int i = 0; i < W; i++) to[i] = (int8_t)x[i];
}
// Whole numbers, halves to the even one.
INLINE vi nearest(vf x) {
  for (int i = 0; i < W; i++) x[i] = __builtin_rintf(x[i]);
  return __builtin_convertvector(x, vi);
}

// Four inputs of a row in WORDS words: in one where an instruction takes them at once, else two and two as 16 bits.
constexpr int WORDS = 2;
INLINE void pack_four(int32_t* to, const int8_t* q) {
  to[0] = (int32_t)((uint16_t)(int16_t)q[0] | (uint32_t)(uint16_t)(int16_t)q[2] << 16);
  to[1] = (int32_t)((uint16_t)(int16_t)q[1] | (uint32_t)(uint16_t)(int16_t)q[3] << 16);
}
// Codes of 8 bits as add_four takes them, LESS below what they are: some instructions know signed bytes alone.
constexpr int LESS = 0;
INLINE vi signed_codes(vi w) { return w; }
// acc[output] += the products of four unsigned weights and four inputs; signed weights where LESS is 128.
INLINE vi add_four(vi acc, vi w, const int32_t* x) {
  vi even = w & 0x00FF00FF, odd = (vi)((w >> 8) & 0x00FF00FF);
  return acc + (even & 0xFFFF) * (int32_t)(int16_t)x[0] + ((even >> 16) & 0xFFFF) * (x[0] >> 16) +
         (odd & 0xFFFF) * (int32_t)(int16_t)x[1] + ((odd >> 16) & 0xFFFF) * (x[1] >> 16);
}
// acc[output] += the products of two weights of 16 bits and two inputs.
vi add_two(vi acc, vi w, int32_t x);

// Lanes of x and y in turn, of each four the first two or the last two; the same of pairs of lanes; and fours of lanes, the
// even ones of x and then those of y, or the odd ones.
template <int EACH, int FROM>
INLINE vf in_turn(vf x, vf y) {
  vf out;
  for (int i = 0; i < W; i++) {
    const int at = i / 4 * 4 + FROM + (EACH == 1 ? i % 4 / 2 : i % 2);
    out[i] = (EACH == 1 ? i % 2 : i % 4 / 2) ? y[at] : x[at];
  }
  return out;
}
template <int FIRST>
INLINE vf every_other_four(vf x, vf y) {
  vf out;
  for (int i = 0; i < W; i++) {
    const int at = (2 * (i / 4) + FIRST) * 4 + i % 4;
    out[i] = at < W ? x[at] : y[at - W];
  }
  return out;
}
INLINE vf low_lanes(vf x, vf y) { return in_turn<1, 0>(x, y); }
INLINE vf high_lanes(vf x, vf y) { return in_turn<1, 2>(x, y); }
INLINE vf low_pairs(vf x, vf y) { return in_turn<2, 0>(x, y); }
INLINE vf high_pairs(vf x, vf y) { return in_turn<2, 2>(x, y); }
INLINE vf even_fours(vf x, vf y) { return every_other_four<0>(x, y); }
INLINE vf odd_fours(vf x, vf y) { return every_other_four<1>(x, y); }

// The 64 weights of a block of compressed.h: bits of the codes, signs and mantissas, exponents of the `others`.
INLINE void unpack_places(uint16_t* w, uint64_t low_bits, uint64_t mid_bits, uint64_t high_bits, const char* rest,
                          const char* other, uint64_t table) {
  for (int j = 0; j < PLACES; j++) {
    const int code = (int)((low_bits >> j & 1) | (mid_bits >> j & 1) << 1 | (high_bits >> j & 1) << 2);
    const uint8_t exponent = code == OTHER ? (uint8_t)*other++ : (uint8_t)(table >> 8 * code), own = (uint8_t)rest[j];
    w[input_of(j)] = (uint16_t)((own & 0x80) << 8 | exponent << 7 | (own & 0x7F));
  }
}

// Calls f(at, W words) with what 4-bit codes at p (nf4.h) stand for in a table of 16 numbers: floats, or pairs of bf16.
template <class F>
INLINE void look_up(const vf (&table)[N], const char* p, F f) {
  const vu codes = (vu)load_int((const int32_t*)p);
  float scaled[16];
  memcpy(scaled, table, sizeof scaled);
  UNROLL for (int c = 0; c < 8; c++) {
    vf w;
    for (int i = 0; i < W; i++) w[i] = scaled[codes[i] >> shift_of(c) & 15];
    f(c * W, w);
  }
}
template <class F>
void look_up_pairs(const vf (&table)[N], const char* p, F f);

}  // namespace plain
}  // namespace
