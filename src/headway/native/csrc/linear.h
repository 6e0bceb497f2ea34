// Products of a few rows with matrices of weights, as in decoding: y[r][o] = sum over i of x[r][i] w[o][i]. Every weight
// is read once, in the order in which it lies in memory; what counts is how fast that is.
#pragma once
#include "groups.h"
#include "headway.h"

namespace {

constexpr int FETCH = 4096;  // bytes ahead of what is read
constexpr int GROUP = 32;    // inputs that share a scale
constexpr int MOST_ROWS = 64;

INLINE void fetch(const void* p) { __builtin_prefetch((const char*)p + FETCH, 0, 3); }
INLINE int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Calls f(how many, first) with 8, 4, 2 or 1 rows, known to the compiler; rows beyond the last are zeros.
template <class F>
INLINE void each_rows(int64_t rows, F f) {
  int64_t at = 0;
  for (; at + 5 <= rows; at += 8) f(Count<8>(), at);
  if (at + 3 <= rows) return f(Count<4>(), at);
  if (at + 2 <= rows) return f(Count<2>(), at);
  if (at + 1 <= rows) return f(Count<1>(), at);
}

// -- weights as they lie in a checkpoint: row by row, float32 or bf16 --------------------------------------------------

enum class Floats { SINGLE, WIDENED, PAIRS };  // float32; bf16 times float32; bf16 times bf16, two at once

// One unit of weights: 16, or 32 in pairs.
template <Floats KIND>
INLINE void read_unit(vf (&w)[N], const void* p) {
  UNROLL for (int i = 0; i < N; i++) {
    if (KIND != Floats::WIDENED) {
      w[i] = load((const float*)p + i * W);
      continue;
    }
    const uint16_t* half = (const uint16_t*)p + i * W;
#if HEADWAY_LEVEL >= 2
    w[i] = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)half)), 16);
#elif HEADWAY_LEVEL == 1
    w[i] = (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)half)), 16);
#else
    for (int j = 0; j < W; j++) w[i][j] = from_bf16(half[j]);
#endif
  }
}

// R rows against one row of `count` weights: as many sums side by side as hide the time of a multiply-add. x lies in
// words (floats, or pairs of bf16), x_row from one row to the next, zeros behind its end.
template <Floats KIND, int R>
INLINE void dots(float (&y)[R], const float* x, int64_t x_row, const char* w, int64_t count) {
  constexpr bool PAIRS = KIND == Floats::PAIRS;
  constexpr int CHAINS = R >= 4 || W < 16 ? 2 : 8 / R, STEP = PAIRS ? 2 * UNIT : UNIT;
  constexpr int BYTES = STEP * (KIND == Floats::SINGLE ? 4 : 2);
  vf acc[R][CHAINS][N] = {};
  auto unit = [&](const char* p, const float* at, int chain) __attribute__((always_inline)) {
    vf v[N];
    read_unit<KIND>(v, p);
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int i = 0; i < N; i++)
        acc[r][chain][i] = multiply_add<PAIRS>(acc[r][chain][i], load(at + r * x_row + i * W), v[i]);
  };
  int64_t left = count;
  for (; left >= CHAINS * STEP; left -= CHAINS * STEP, x += CHAINS * UNIT, w += CHAINS * BYTES)
    UNROLL for (int c = 0; c < CHAINS; c++) {
      fetch(w + c * BYTES);
      unit(w + c * BYTES, x + c * UNIT, c);
    }
  for (; left >= STEP; left -= STEP, x += UNIT, w += BYTES) unit(w, x, 0);
  if (left) {
    alignas(64) char rest[BYTES] = {};
    memcpy(rest, w, (size_t)(left * (BYTES / STEP)));
    unit(rest, x, 0);
  }
  UNROLL for (int r = 0; r < R; r++) {
    vf sum = {};
    UNROLL for (int c = 0; c < CHAINS; c++)
      UNROLL for (int i = 0; i < N; i++) sum += acc[r][c][i];
    y[r] = sum_of(sum);
  }
}

// -- weights of 8 or 4 bits: panels of 16 outputs; of each 32 inputs the weights [8][16][4], then scales, then zeros -----

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

// Rows of inputs in 8 bits: the largest of each group of 32 is 127. Words of q, the scale, and the sum of q.
struct Rounded {
  int32_t* q;    // [R][groups][8][WORDS]
  float* scale;  // [R][groups]
  int32_t* sum;  // [R][groups]
  int64_t groups;

  void round(int64_t at, const float* x) {
    vi most = {};
    UNROLL for (int i = 0; i < GROUP; i += W) {
      vi size = (vi)load(x + i) & 0x7FFFFFFF;
      most = size > most ? size : most;
    }
    int32_t bits = 0;
    for (int i = 0; i < W; i++) bits = most[i] > bits ? most[i] : bits;
    bool whole = bits < 0x7F800000;
    float largest;
    memcpy(&largest, &bits, 4);
    float by = whole && largest > 0x1p-100f ? 127 / largest : 0;  // what is smaller counts as nothing
    int8_t to[GROUP];
    int32_t total = 0;
    for (int i = 0; i < GROUP; i++) to[i] = (int8_t)(int32_t)__builtin_rintf(by > 0 ? x[i] * by : 0), total += to[i];
    scale[at] = whole ? largest / 127 : NAN;
    sum[at] = total;
    for (int j = 0; j < GROUP / 4; j++) pack_four(q + (at * (GROUP / 4) + j) * WORDS, to + 4 * j);
  }
};

struct Panel {
  const char* at;
  int64_t step;  // bytes from one group to the next
  bool has_scales, has_zeros;
};

// R rows against a panel: y[r] of its 16 outputs. Weights are unsigned: what they are above their zero is taken from the
// sum, zero times the sum of the inputs.
template <int BITS, int R>
INLINE void panel_dots(float (&y)[R][UNIT], const Rounded& x, int64_t row, const Panel& p) {
  constexpr int LOADS = BITS == 4 ? 4 : 8, BYTES = LOADS * 64, ZERO = BITS == 4 ? 8 : 128;
  vf acc[R][N] = {};
  const char* at = p.at;
  for (int64_t g = 0; g < x.groups; g++, at += p.step) {
    vi sums[R][N];
    if (p.has_zeros) {
      vi zero[N] = {};
      read_bytes(zero, at + BYTES + (p.has_scales ? 2 * UNIT : 0));
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < N; i++) sums[r][i] = zero[i] * -x.sum[(row + r) * x.groups + g];
    } else {
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < N; i++) sums[r][i] = splat_int(-ZERO * x.sum[(row + r) * x.groups + g]);
    }
    const int32_t* q = x.q + (row * x.groups + g) * (GROUP / 4) * WORDS;
    const int64_t q_row = x.groups * (GROUP / 4) * WORDS;
    UNROLL for (int j = 0; j < LOADS; j++) {
      fetch(at + j * 64);
      UNROLL for (int i = 0; i < N; i++) {
        vi w = load_int((const int32_t*)(at + j * 64) + i * W);
        vi low = BITS == 4 ? w & 0x0F0F0F0F : w, high = (w >> 4) & 0x0F0F0F0F;
        UNROLL for (int r = 0; r < R; r++) {
          sums[r][i] = add_four(sums[r][i], low, q + r * q_row + j * WORDS);
          if (BITS == 4) sums[r][i] = add_four(sums[r][i], high, q + r * q_row + (j + 4) * WORDS);
        }
      }
    }
    vf scale[N] = {};
    if (p.has_scales) read_halves(scale, at + BYTES);
    UNROLL for (int r = 0; r < R; r++) {
      vf by = splat(x.scale[(row + r) * x.groups + g]);
      UNROLL for (int i = 0; i < N; i++)
        acc[r][i] += __builtin_convertvector(sums[r][i], vf) * (p.has_scales ? by * scale[i] : by);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int i = 0; i < N; i++) store(y[r] + i * W, acc[r][i]);
}

}  // namespace
