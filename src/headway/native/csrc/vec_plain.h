// Vector types that are the same at every CPU level, and vector operations in plain C++, the fallback of all levels. The
// file of a level (vec_avx2.h, ...) sets W, ROWS and WIDE, and defines in a namespace of its own name the operations for
// which its instructions are faster; vec.h takes the others from here. Operations that are only declared here work on pairs
// of bf16: a level without HAS_PAIRS never calls them.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

namespace {

constexpr int UNIT = 16;   // keys of a panel; floats of a unit
constexpr int BLOCK = 64;  // keys of a block
// Vectors of a unit, of W lanes each.
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
INLINE vf splat(float x) { return x - vf{}; }  // x - 0 and not x + 0: it keeps the sign of -0.0
INLINE vi splat_int(int32_t x) { return vi{} + x; }

// Returns a mask: lane i is all ones if bit i of `bits` is set, else 0.
INLINE vi lanes(uint32_t bits) {
  vi bit;
  for (int i = 0; i < W; i++) bit[i] = 1 << i;
  return (bit & (int32_t)bits) != 0;
}

// Number of panels whose exponentials are computed in one call.
template <bool HALF>
constexpr int AT_ONCE = WIDE < 4 ? 1 : HALF ? 2 : 4;

constexpr int PLACES = 64, OTHER = 7;  // weights of a block of compressed.h; the code of an exponent outside its table

// Returns the input, 0..63, whose weight is stored at `place` of a block of compressed.h. Each run of 16 places holds eight
// inputs of the first half and eight of the second: places 0..7 are inputs 0..7, 8..15 are 32..39, 16..23 are 8..15, ...,
// so that unpacklo and unpackhi of 128-bit lanes give inputs 0..31 and 32..63 in order.
INLINE int input_of(int place) {
  int lane = place / 16, at = place % 16;
  return at < 8 ? lane * 8 + at : 32 + lane * 8 + at - 8;
}

// Returns the shift to a 4-bit code of a 32-bit word (nf4.h): the first of the two codes of a byte is in its high bits, so
// codes 0, 1, 2, 3 are at bits 4, 0, 12, 8.
constexpr int shift_of(int code) { return code / 2 * 8 + (code % 2 ? 0 : 4); }

namespace plain {

constexpr bool HAS_PAIRS = false;  // whether the level has dot products of pairs of bf16
constexpr bool HAS_TILES = false;  // whether it multiplies whole tiles of bytes, with Tiles
template <int QUADS>
struct Tiles;
constexpr bool HAS_SHORTS = false;  // whether it has two 16-bit products in one instruction, but not four 8-bit ones

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

// Returns x in the lanes whose bit is set, else 0.
INLINE vf only(uint32_t bits, vf x) { return (vf)((vi)x & lanes(bits)); }
// Returns x in the lanes whose bit is set, else y.
INLINE vf where(uint32_t bits, vf x, vf y) { return lanes(bits) ? x : y; }
// Returns a bit per lane: bit i is set if lane i of the mask is all ones.
INLINE uint32_t bits_of(vi mask) {
  uint32_t bits = 0;
  for (int i = 0; i < W; i++) bits |= (uint32_t)(mask[i] & 1) << i;
  return bits;
}

INLINE uint32_t greater(vf a, vf b) { return bits_of(a > b); }

// Returns acc + a b. add_pairs: each lane of a and b is a pair of bf16, and both products are added to the lane of acc.
INLINE vf add_product(vf acc, vf a, vf b) { return a * b + acc; }
vf add_pairs(vf acc, vf a, vf b);

// Coefficients of a polynomial for 2^f, f in [-1/2, 1/2], highest power first: relative error 1e-7; exact at 0.
const float EXP2[6] = {1.3269519e-3f, 9.671291e-3f, 5.550711e-2f, 2.4022247e-1f, 6.93147e-1f, 1.0f};
const float NEAREST = 0x1.8p23f + 127;  // the last bits of x + NEAREST are round(x) + 127, the exponent field of 2^round(x)

// Returns 2^x for x < 128; exactly 0 for x <= -127. Example: for x = 3.2, `whole` has the bits of 0x1.8p23f plus 130; << 23
// leaves 130 as exponent field, which is 2^3, and the polynomial gives 2^f for f = 0.2.
INLINE vf exp2_of(vf x) {
  vf y = vmax(splat(-127.0f), x), whole = y + splat(NEAREST), f = y - (whole - splat(NEAREST)), sum = splat(EXP2[0]);
  UNROLL for (int i = 1; i < 6; i++) sum = sum * f + splat(EXP2[i]);
  return sum * (vf)((vi)whole << 23);
}
// Writes to p the weights of attention 2^x of AT_ONCE panels at x, exactly 0 for keys whose bit is not set; bits[i] are
// those of panel i. The relative error is 1.2e-7 for -127 < x < 127 (a level may be less exact for weights in bf16).
template <bool HALF>
INLINE void exp2_only(vf (&p)[AT_ONCE<HALF> * N], const uint16_t* bits, const float* x) {
  UNROLL for (int i = 0; i < AT_ONCE<HALF> * N; i++)
    p[i] = only((uint32_t)(bits[i / N] >> (i % N * W)), exp2_of(load(x + i * W)));
}
// The same for one panel of each of two rows, which lie `step` floats apart.
INLINE void exp2_of_rows(vf (&p)[2 * N], const uint16_t* bits, const float* x, int64_t step) {
  UNROLL for (int i = 0; i < 2 * N; i++)
    p[i] = only((uint32_t)(bits[i / N] >> (i % N * W)), exp2_of(load(x + i / N * step + i % N * W)));
}
// Returns 2^x of each lane, with the error of exp2_only.
INLINE vf exp2_of_each(vf x) { return exp2_of(x); }
// Returns 2^x of each lane for -127 < x < 127.
INLINE vf power_of_2(vf x) { return exp2_of(x); }

// Returns each lane rounded to bf16, ties to even; NaN stays NaN.
INLINE vh halves_of(vf x) {
  vi bits = (vi)x, up = bits + 0x7FFF + (bits >> 16 & 1);
  return __builtin_convertvector((x == x ? up : bits | 0x400000) >> 16, vh);
}
// Returns 16 bits of each lane as the upper half of a float32.
INLINE vf widened(vh x) { return (vf)(__builtin_convertvector(x, vi) << 16); }
// Vectors of words, each of which is a pair of bf16, the first of a pair in the low bits:
//   joined(x, y)                x and y rounded to bf16, x0 x1 .. then y0 y1 ..
//   row_pairs(x, y)             x and y rounded to bf16, interleaved: x0 y0 x1 y1 ..
//   low_halves, high_halves     bf16 x and y interleaved; of each eight (128 bits) the first four, or the last four:
//                               x0 y0 .. x3 y3, or x4 y4 .. x7 y7
//   interleave                  writes a0 b0 a1 b1 .., `whole` elements of each of a and b
vf joined(vf x, vf y);
vf row_pairs(vf x, vf y);
vf low_halves(vf x, vf y);
vf high_halves(vf x, vf y);
void interleave(float* to, const uint16_t* a, const uint16_t* b, int whole);

// Returns an IEEE float16 as float32.
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
// Returns W float16 numbers at p as float32.
INLINE vf read_halves(const char* p) {
  vf x;
  uint16_t h[W];
  memcpy(h, p, sizeof h);
  for (int i = 0; i < W; i++) x[i] = from_half(h[i]);
  return x;
}

// read_bytes returns W bytes at p as integers; write_bytes writes integers as bytes.
template <bool SIGNED>
INLINE vi read_bytes(const void* p) {
  vi x;
  for (int i = 0; i < W; i++) x[i] = SIGNED ? ((const int8_t*)p)[i] : ((const uint8_t*)p)[i];
  return x;
}
INLINE void write_bytes(int8_t* to, vi x) {
  for (int i = 0; i < W; i++) to[i] = (int8_t)x[i];
}
// Returns x rounded to integers, ties to even.
INLINE vi nearest(vf x) {
  for (int i = 0; i < W; i++) x[i] = __builtin_rintf(x[i]);
  return __builtin_convertvector(x, vi);
}

// Packs four 8-bit inputs of a row into WORDS 32-bit words: into one if the level has an instruction for four products of
// bytes, else into two of 16-bit halves, q0 q2 and q1 q3, as add_four splits the weights.
constexpr int WORDS = 2;
INLINE void pack_four(int32_t* to, const int8_t* q) {
  to[0] = (int32_t)((uint16_t)(int16_t)q[0] | (uint32_t)(uint16_t)(int16_t)q[2] << 16);
  to[1] = (int32_t)((uint16_t)(int16_t)q[1] | (uint32_t)(uint16_t)(int16_t)q[3] << 16);
}
// add_four takes unsigned 8-bit codes less LESS: 0, or 128 at levels whose instruction multiplies signed bytes only.
// signed_codes subtracts it.
constexpr int LESS = 0;
INLINE vi signed_codes(vi w) { return w; }
// Adds to each lane (an output) the products of its four weights, the bytes of w, with the four inputs in x. Weights are
// unsigned bytes, or signed if LESS is 128.
INLINE vi add_four(vi acc, vi w, const int32_t* x) {
  vi even = w & 0x00FF00FF, odd = (vi)((w >> 8) & 0x00FF00FF);
  return acc + (even & 0xFFFF) * (int32_t)(int16_t)x[0] + ((even >> 16) & 0xFFFF) * (x[0] >> 16) +
         (odd & 0xFFFF) * (int32_t)(int16_t)x[1] + ((odd >> 16) & 0xFFFF) * (x[1] >> 16);
}
// Adds to each lane the products of its two 16-bit weights with the two 16-bit inputs in x.
vi add_two(vi acc, vi w, int32_t x);

// in_turn interleaves lanes of x and y (EACH = 1) or pairs of lanes (EACH = 2), taking two lanes from FROM on of each four:
//   <1, 0>: x0 y0 x1 y1    <1, 2>: x2 y2 x3 y3    <2, 0>: x0 x1 y0 y1    <2, 2>: x2 x3 y2 y3    and so for each four.
// every_other_four returns the even (FIRST = 0) or odd fours of lanes of x followed by those of y; for 16 lanes, with Xi the
// lanes 4 i .. 4 i + 3 of x: X0 X2 Y0 Y2, or X1 X3 Y1 Y3.
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

// Writes the 64 weights of a block of compressed.h to w, in the order of inputs. low_bits, mid_bits and high_bits hold the
// three bits of the codes; `rest` holds signs and mantissas, `other` the exponents of codes OTHER, `table` those of codes 0-6.
INLINE void unpack_places(uint16_t* w, uint64_t low_bits, uint64_t mid_bits, uint64_t high_bits, const char* rest,
                          const char* other, uint64_t table) {
  for (int j = 0; j < PLACES; j++) {
    const int code = (int)((low_bits >> j & 1) | (mid_bits >> j & 1) << 1 | (high_bits >> j & 1) << 2);
    const uint8_t exponent = code == OTHER ? (uint8_t)*other++ : (uint8_t)(table >> 8 * code), own = (uint8_t)rest[j];
    w[input_of(j)] = (uint16_t)((own & 0x80) << 8 | exponent << 7 | (own & 0x7F));
  }
}

// Calls f(at, W words) with the dequantized values of the W * 8 4-bit codes at p (nf4.h), from a table of 16 numbers: code c
// of each of W 32-bit words at c * W. look_up_pairs gives pairs of bf16 instead of floats.
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
