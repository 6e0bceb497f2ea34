// Vectors of the CPU level that this file is compiled for. A unit is 16 floats: N vectors of W lanes.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if HEADWAY_LEVEL >= 1
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

namespace {

constexpr int UNIT = 16;   // keys per panel, floats per unit
constexpr int BLOCK = 64;  // keys per block
constexpr int WIDEST = 512;  // columns of a head, at most

#if HEADWAY_LEVEL >= 2
constexpr int W = 16, ROWS = 6, WIDE = 4;
#elif HEADWAY_LEVEL == 1
constexpr int W = 8, ROWS = 6, WIDE = 1;
#else
constexpr int W = 4, ROWS = 2, WIDE = 1;
#endif
constexpr int N = UNIT / W;
constexpr int LINE = WIDE < 4 ? UNIT : BLOCK;  // floats between words of a panel: panels that are read alone lie alone

INLINE int panel_size(int words) { return WIDE < 4 ? words * UNIT : UNIT; }  // floats between panels of a block

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef float vf_any __attribute__((vector_size(4 * W), aligned(2), may_alias));
typedef int32_t vi_any __attribute__((vector_size(4 * W), aligned(2), may_alias));

INLINE vf load(const float* p) { return *(const vf_any*)p; }
INLINE void store(float* p, vf x) { *(vf_any*)p = x; }
INLINE void add_to(float* p, vf x) { store(p, load(p) + x); }
INLINE vi load_int(const int32_t* p) { return *(const vi_any*)p; }
INLINE vf splat(float x) { return x - vf{}; }  // also of -0.0
INLINE vi splat_int(int32_t x) { return vi{} + x; }

// A number that the compiler knows.
template <int X>
struct Count {
  static constexpr int value = X;
};

INLINE vf vmax(vf a, vf b) {
#if HEADWAY_LEVEL >= 2
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif HEADWAY_LEVEL == 1
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

INLINE float sum_of(vf x) {
#if HEADWAY_LEVEL >= 2
  return _mm512_reduce_add_ps((__m512)x);
#endif
  float s = 0;
  for (int i = 0; i < W; i++) s += x[i];
  return s;
}

// log2 of normal numbers; zeros, infinities and what is no number stay what they are. With m = x / 2^e in [2/3, 4/3) and
// s = (m - 1) / (m + 1): log2 x = e + 2 / ln 2 * (s + s^3 / 3 + s^5 / 5 + ..), to 1e-8.
INLINE vf log2_of(vf x) {
  vi bits = (vi)x, e = (bits - 0x3F2AAAAB) >> 23;
  vf m = (vf)(bits - (e << 23)), s = (m - 1.0f) / (m + 1.0f), t = s * s;
  vf sum = (((t / 9 + 1.0f / 7) * t + 1.0f / 5) * t + 1.0f / 3) * t + 1.0f;
  vf result = __builtin_convertvector(e, vf) + s * sum * 2.88539008f;
  vi usual = (x > 0.0f) & (x < INFINITY);
  return (vf)(((vi)result & usual) | (bits & ~usual));
}

// Lane bits: bit i of a word speaks of lane i.
INLINE vi lanes(uint32_t bits) {
  vi bit;
  for (int i = 0; i < W; i++) bit[i] = 1 << i;
  return (bit & (int32_t)bits) != 0;
}
INLINE vf only(uint32_t bits, vf x) {
#if HEADWAY_LEVEL >= 2
  return (vf)_mm512_maskz_mov_ps((__mmask16)bits, (__m512)x);
#else
  return (vf)((vi)x & lanes(bits));
#endif
}
INLINE vf where(uint32_t bits, vf x, vf y) {
#if HEADWAY_LEVEL >= 2
  return (vf)_mm512_mask_mov_ps((__m512)y, (__mmask16)bits, (__m512)x);
#else
  return lanes(bits) ? x : y;
#endif
}
INLINE uint32_t bits_of(vi mask) {
#if HEADWAY_LEVEL >= 2
  return _mm512_movepi32_mask((__m512i)mask);
#elif HEADWAY_LEVEL == 1
  return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
  uint32_t bits = 0;
  for (int i = 0; i < W; i++) bits |= (uint32_t)(mask[i] & 1) << i;
  return bits;
#endif
}
INLINE uint32_t greater(vf a, vf b) {
#if HEADWAY_LEVEL >= 2
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#else
  return bits_of(a > b);
#endif
}

// Panels whose exponentials are computed together.
template <bool HALF>
constexpr int AT_ONCE = WIDE < 4 ? 1 : HALF ? 2 : 4;

#if HEADWAY_LEVEL >= 2
// 2^f for f in [0, 1): a polynomial, highest coefficient first, relative error 1.2e-7. For weights that are rounded
// to bf16: a line on each sixteenth, relative error 1.2e-4, which spares the units that multiply most of the work.
alignas(64) const float EXP2[6] = {1.8775767e-3f, 8.9893397e-3f, 5.5826318e-2f,
                                   2.4015361e-1f, 6.9315308e-1f, 9.9999994e-1f};
alignas(64) const float EXP2_AT[16] = {0.9998801f, 1.0441486f, 1.0903770f, 1.1386521f, 1.1890646f, 1.2417089f, 1.2966841f, 1.3540932f,
                                       1.4140440f, 1.4766491f, 1.5420260f, 1.6102973f, 1.6815912f, 1.7560416f, 1.8337882f, 1.9149770f};
alignas(64) const float EXP2_SLOPE[16] = {0.7083805f, 0.7397432f, 0.7724944f, 0.8066957f, 0.8424112f, 0.8797079f, 0.9186559f, 0.9593282f,
                                          1.0018013f, 1.0461549f, 1.0924721f, 1.1408400f, 1.1913493f, 1.2440948f, 1.2991756f, 1.3566950f};
alignas(64) const float SIXTEENTHS = 786432.0f;  // x + this has floor(16 x) in its last bits

// Vectors step by step together, so that what waits for a result seldom stands before what could be computed. Constants
// stay in memory on purpose (hence the assembly): around this code the registers hold sums of products, and compilers
// would rather spill those.
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
#else
// 2^f for f in [-1/2, 1/2]: a polynomial, highest coefficient first, relative error 1e-7; exact at 0.
const float EXP2[6] = {1.3269519e-3f, 9.671291e-3f, 5.550711e-2f, 2.4022247e-1f, 6.93147e-1f, 1.0f};
const float NEAREST = 0x1.8p23f + 127;  // x + this has the exponent of 2^x, rounded, in its last bits

// 2^x for x < 128; exactly 0 from -127 on downwards.
INLINE vf exp2_of(vf x) {
  vf y = vmax(splat(-127.0f), x), whole = y + splat(NEAREST), f = y - (whole - splat(NEAREST)), sum = splat(EXP2[0]);
  UNROLL for (int i = 1; i < 6; i++) sum = sum * f + splat(EXP2[i]);
  return sum * (vf)((vi)whole << 23);
}
#endif

// 2^x of AT_ONCE panels at x where the bit is set, else exactly 0.
template <bool HALF>
INLINE void exp2_only(vf (&p)[AT_ONCE<HALF> * N], const uint16_t* bits, const float* x) {
#if HEADWAY_LEVEL >= 2
  exp2_of(p, bits, x);
#else
  UNROLL for (int i = 0; i < AT_ONCE<HALF> * N; i++)
    p[i] = only((uint32_t)(bits[i / N] >> (i % N * W)), exp2_of(load(x + i * W)));
#endif
}

}  // namespace
