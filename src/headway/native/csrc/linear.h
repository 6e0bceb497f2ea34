// Products of a few rows with weight matrices, as in decoding: y[r][o] = sum over i of x[r][i] w[o][i]. Each weight is read
// once, and the speed of memory decides: a thread reads several streams of its part side by side, each sequentially, which
// keeps more of a core's reads in flight than one stream does. Here: weights as in a checkpoint, row by row, float32 or bf16;
// panels.h has the quantized ones.
#pragma once
#include "words.h"

namespace {

constexpr int FETCH = 1024;  // distance in bytes of prefetches into the L2 cache

INLINE void fetch(const void* p, int64_t ahead = FETCH) { __builtin_prefetch((const char*)p + ahead, 0, 2); }
// Returns n rounded up to a multiple of `to`.
INLINE int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Calls f(number of rows, first row) with 8 (if that is MOST), 4, 2 or 1 rows, known to the compiler; rows beyond the last are
// zeros. For MOST 4: 7 rows are 4 and 4, 6 rows are 4 and 2.
template <int MOST, class F>
INLINE void each_rows(int64_t rows, F f) {
  int64_t at = 0;
  for (; at + MOST / 2 < rows; at += MOST) f(Count<MOST>(), at);
  if (MOST > 4 && at + 2 < rows) return f(Count<4>(), at);
  if (at + 1 < rows) return f(Count<2>(), at);
  if (at < rows) return f(Count<1>(), at);
}

// Rows that are processed at a time; sides_of.. is the number of streams read side by side: their sums stay in registers. With
// more than four rows of floats, reading is slower than taking the same weights from the cache for the next four rows, or
// there are no registers for the sums.
constexpr int FLOAT_ROWS = 4, PANEL_ROWS = 4;

enum class Floats { SINGLE, WIDENED, PAIRS };  // float32; bf16 times float32; bf16 times bf16, two at once

// Number of vectors of a sum. With 16 registers, a sum of bf16 weights is one vector, so that eight sums fit, of two streams
// and four rows; a sum of float32 weights is two, which has a smaller rounding error.
constexpr int sums_of(Floats kind) { return N == 2 && kind == Floats::WIDENED ? 1 : N; }
constexpr int sides_of_floats(int64_t rows, Floats kind) {
  return W >= 16 ? 4 : sums_of(kind) == 1 ? (rows > 2 ? 2 : 4) : rows > 2 ? 1 : rows > 1 ? 2 : 4;
}
constexpr int sides_of_panels(int64_t rows) { return W < 16 ? (rows > 1 ? 1 : 2) : rows > 2 ? 2 : 4; }

// Number of inputs in one unit: 16, or 32 as pairs.
constexpr int step_of(Floats kind) { return kind == Floats::PAIRS ? 2 * UNIT : UNIT; }

// acc[s][r] += a unit of S rows of weights times one unit of R rows of inputs.
template <Floats KIND, int R, int S>
INLINE void add_unit(vf (&acc)[S][R][sums_of(KIND)], const char* const (&w)[S], const float* x, int64_t x_row) {
  vf v[S][N];
  UNROLL for (int s = 0; s < S; s++)
    UNROLL for (int i = 0; i < N; i++) v[s][i] = get<KIND == Floats::WIDENED>(w[s], i * W);
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int i = 0; i < N; i++) {
      const vf one = load(x + r * x_row + i * W);
      UNROLL for (int s = 0; s < S; s++) {
        vf& sum = acc[s][r][i % sums_of(KIND)];
        sum = multiply_add<KIND == Floats::PAIRS>(sum, one, v[s][i]);
      }
    }
}

// y[s * y_side + r * UNIT] = sum of the lanes of acc[s][r].
template <int R, int S, int SUMS>
INLINE void write_sums(float* y, int64_t y_side, const vf (&acc)[S][R][SUMS]) {
  UNROLL for (int s = 0; s < S; s++)
    UNROLL for (int r = 0; r < R; r++) {
      vf sum = {};
      UNROLL for (int i = 0; i < SUMS; i++) sum += acc[s][r][i];
      y[s * y_side + r * UNIT] = sum_of(sum);
    }
}

// Products of R rows with S rows of `count` weights each, which are read side by side; writes y[s * y_side + r * UNIT]. Each
// output is one sum in the order of the inputs, whatever R and S. x holds words (floats, or pairs of bf16), rows x_row apart,
// with zeros after their end; weights `ahead` bytes after those in use are prefetched.
template <Floats KIND, int R, int S>
INLINE void dots(float* y, int64_t y_side, const float* x, int64_t x_row, const char* const (&w)[S], int64_t count,
                 int64_t ahead = FETCH) {
  constexpr int STEP = step_of(KIND), BYTES = STEP * (KIND == Floats::SINGLE ? 4 : 2);
  vf acc[S][R][sums_of(KIND)] = {};
  const int64_t whole = count / STEP;
  const char* at[S];
  for (int64_t u = 0; u < whole; u++) {
    UNROLL for (int s = 0; s < S; s++) at[s] = w[s] + u * BYTES, fetch(at[s], ahead);
    add_unit<KIND>(acc, at, x + u * UNIT, x_row);
  }
  if (int64_t left = count - whole * STEP) {
    alignas(64) char rest[S][BYTES] = {};
    for (int s = 0; s < S; s++) memcpy(rest[s], w[s] + whole * BYTES, (size_t)(left * (BYTES / STEP))), at[s] = rest[s];
    add_unit<KIND>(acc, at, x + whole * UNIT, x_row);
  }
  write_sums(y, y_side, acc);
}

}  // namespace
