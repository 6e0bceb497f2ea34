// Products of rows with weights of 8 or 4 bits: panels of 16 outputs; of each 32 inputs the weights [8][16][4], then
// scales, then zeros. Rows are rounded to 8 bits. Sums of 32 products are integers; they are added up in float32 from
// the first group of 32 to the last: a row's results are the same bits however many rows there are (panel_tile.h).
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

// acc[output] += the products of four unsigned weights and four inputs.
INLINE vi add_four(vi acc, vi w, const int32_t* x) {
#if HEADWAY_LEVEL >= 3
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(*x));
#else
  vi even = w & 0x00FF00FF, odd = (vi)((w >> 8) & 0x00FF00FF);
#if HEADWAY_LEVEL == 2
  return acc + (vi)_mm512_madd_epi16((__m512i)even, _mm512_set1_epi32(x[0])) +
         (vi)_mm512_madd_epi16((__m512i)odd, _mm512_set1_epi32(x[1]));
#elif HEADWAY_LEVEL == 1
  return acc + (vi)_mm256_madd_epi16((__m256i)even, _mm256_set1_epi32(x[0])) +
         (vi)_mm256_madd_epi16((__m256i)odd, _mm256_set1_epi32(x[1]));
#else
  return acc + (even & 0xFFFF) * (int32_t)(int16_t)x[0] + ((even >> 16) & 0xFFFF) * (x[0] >> 16) +
         (odd & 0xFFFF) * (int32_t)(int16_t)x[1] + ((odd >> 16) & 0xFFFF) * (x[1] >> 16);
#endif
#endif
}

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
INLINE void read_halves(vf (&s)[N], const char* p) {
  UNROLL for (int i = 0; i < N; i++) {
#if HEADWAY_LEVEL >= 2
    s[i] = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif HEADWAY_LEVEL == 1
    s[i] = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + i * 2 * W)));
#else
    uint16_t h[W];
    memcpy(h, p + i * 2 * W, sizeof h);
    for (int j = 0; j < W; j++) s[i][j] = from_half(h[j]);
#endif
  }
}
INLINE void read_bytes(vi (&z)[N], const char* p) {
  UNROLL for (int i = 0; i < N; i++)
    UNROLL for (int j = 0; j < W; j++) z[i][j] = (uint8_t)p[i * W + j];
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
  int64_t groups, tall;

  int64_t at(int64_t row, int64_t group) const { return (row / tall * groups + group) * tall + row % tall; }

  void round(int64_t row, int64_t group, const float* x) {
    vi most = {}, total = {};
    UNROLL for (int i = 0; i < GROUP; i += W) {
      vi size = (vi)load(x + i) & 0x7FFFFFFF;
      most = size > most ? size : most;
    }
    int32_t bits = largest_of(most);
    bool whole = bits < 0x7F800000;
    float largest;
    memcpy(&largest, &bits, 4);
    float by = whole && largest > 0x1p-100f ? 127 / largest : 0;  // what is smaller counts as nothing
    alignas(64) int8_t to[GROUP] = {};
    if (by > 0)
      UNROLL for (int i = 0; i < GROUP; i += W) {
        vi near = nearest(load(x + i) * by);
        total += near;
        write_bytes(to + i, near);
      }
    scale[at(row, group)] = whole ? largest / 127 : NAN;
    below[at(row, group)] = -128 * sum_of_ints(total);
    int32_t* words = q + (at(row, group) + (GROUP / 4 - 1) * (row / tall * groups + group) * tall) * WORDS;
    for (int j = 0; j < GROUP / 4; j++) pack_four(words + j * tall * WORDS, to + 4 * j);
  }
};

struct Panel {
  const char* at;
  int64_t step;  // bytes from one group to the next
  bool has_scales, has_zeros;
};

// A few rows, R, that lie alone, against S panels of a matrix, which are read once, side by side: their 16 outputs in
// y [s * y_side + r * 16]. Weights are unsigned: what they are above their zero is taken from the sum, zero times the sum
// of the inputs.
template <int BITS, int R, int S>
INLINE void panel_dots(float* y, int64_t y_side, const Rounded& x, int64_t row, const Panel (&p)[S]) {
  constexpr int LOADS = BITS == 4 ? 4 : 8, BYTES = LOADS * 64, SHIFT = BITS == 4 ? 4 : 0;
  const bool has_scales = p[0].has_scales, has_zeros = p[0].has_zeros;
  vf acc[S][R][N] = {};
  for (int64_t g = 0; g < x.groups; g++) {
    const int64_t at = g * p[0].step;
    vi sums[S][R][N];
    UNROLL for (int s = 0; s < S; s++) {
      vi zero[N] = {};
      if (has_zeros) read_bytes(zero, p[s].at + at + BYTES + (has_scales ? 2 * UNIT : 0));
      UNROLL for (int r = 0; r < R; r++) {
        const int32_t below = x.below[(row + r) * x.groups + g];
        UNROLL for (int i = 0; i < N; i++)
          sums[s][r][i] = has_zeros ? zero[i] * (below >> 7) : splat_int(below >> SHIFT);
      }
    }
    const int32_t* q = x.q + (row * x.groups + g) * (GROUP / 4) * WORDS;
    const int64_t q_row = x.groups * (GROUP / 4) * WORDS;
    UNROLL for (int j = 0; j < LOADS; j++)
      UNROLL for (int i = 0; i < N; i++) {
        vi low[S], high[S];
        UNROLL for (int s = 0; s < S; s++) {
          const char* from = p[s].at + at + j * 64;
          if (i == 0) fetch(from);
          vi w = load_int((const int32_t*)from + i * W);
          low[s] = BITS == 4 ? w & 0x0F0F0F0F : w, high[s] = (w >> 4) & 0x0F0F0F0F;
        }
        UNROLL for (int r = 0; r < R; r++) {
          const int32_t* x_r = q + r * q_row + j * WORDS;
          UNROLL for (int s = 0; s < S; s++) sums[s][r][i] = add_four(sums[s][r][i], low[s], x_r);
          if (BITS == 4)
            UNROLL for (int s = 0; s < S; s++) sums[s][r][i] = add_four(sums[s][r][i], high[s], x_r + 4 * WORDS);
        }
      }
    UNROLL for (int s = 0; s < S; s++) {
      vf scale[N] = {};
      if (has_scales) read_halves(scale, p[s].at + at + BYTES);
      UNROLL for (int r = 0; r < R; r++) {
        vf by = splat(x.scale[(row + r) * x.groups + g]);
        UNROLL for (int i = 0; i < N; i++)
          acc[s][r][i] += __builtin_convertvector(sums[s][r][i], vf) * (has_scales ? by * scale[i] : by);
      }
    }
  }
  UNROLL for (int s = 0; s < S; s++)
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int i = 0; i < N; i++) store(y + s * y_side + r * UNIT + i * W, acc[s][r][i]);
}

}  // namespace
