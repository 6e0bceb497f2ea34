// Products of a few rows with matrices of weights, as in decoding: y[r][o] = sum over i of x[r][i] w[o][i]. Every weight
// is read once, in the order in which it lies in memory; what counts is how fast that is. Here: weights as they lie in a
// checkpoint, row by row, float32 or bf16; panels.h has those of 8 and 4 bits.
#pragma once
#include "groups.h"
#include "headway.h"

namespace {

constexpr int FETCH = 4096;  // bytes ahead of what is read

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

}  // namespace
