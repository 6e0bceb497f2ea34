// The matrix product of all kernels: acc[R rows][C units of 16] += sum over steps of A[row][step] * B[step][unit].
#pragma once
#include "groups.h"
#include "pack.h"

namespace {

// One step: A's word of row r is at a[r * row_step], B's unit c at b[c][at].
template <bool HALF, int R, int C>
INLINE void product_step(vf (&acc)[R][C * N], const float* a, int64_t row_step, const float* const* b, int64_t at) {
  vf v[C * N];
  UNROLL for (int i = 0; i < C * N; i++) v[i] = load(b[i / N] + at + i % N * W);
  UNROLL for (int r = 0; r < R; r++) {
    vf x = splat(a[r * row_step]);
    UNROLL for (int i = 0; i < C * N; i++) acc[r][i] = multiply_add<HALF>(acc[r][i], x, v[i]);
  }
}

// `steps` steps. A's word of (row, step) is at a[row * row_step + step * step_step], unit c of step s of B at
// b[c][s * b_step].
template <bool HALF, int R, int C>
INLINE void product(vf (&acc)[R][C * N], const float* a, int64_t row_step, int64_t step_step, const float* const* b,
                    int64_t b_step, int steps) {
  int s = 0;
  for (; s + 4 <= steps; s += 4)
    UNROLL for (int i = 0; i < 4; i++)
      product_step<HALF, R, C>(acc, a + (s + i) * step_step, row_step, b, (s + i) * b_step);
  for (; s < steps; s++) product_step<HALF, R, C>(acc, a + s * step_step, row_step, b, s * b_step);
}

// Adds a * b to a row of `wide` sums, where B may hold NaN or infinities: `take` masks the parts of B's words that count.
template <bool HALF>
INLINE void add_part(float* out, float a, const float* b, int wide, uint32_t take) {
  vi some = splat_int((int32_t)take);
  for (int i = 0; i < wide; i += W)
    store(out + i, multiply_add<HALF>(load(out + i), splat(a), (vf)((vi)load(b + i) & some)));
}
// Returns the mask of a word of which the low half, the high half or both count.
INLINE uint32_t parts(bool low, bool high) { return (low ? 0xFFFFu : 0) | (high ? 0xFFFF0000u : 0); }

// Adds weights times values to out [rows][wide], where a masked key may hold NaN (0 * NaN would be NaN): values of keys whose
// bit is not set are masked to 0. p [row][4 panels][STEPS] are the weights, v[n] is panel n of the values. A bf16 step is a
// pair of keys: of bits 0110 (keys 1 and 2), step 0 takes the high half of its words and step 1 the low half.
template <bool HALF>
__attribute__((noinline, cold)) void seen_only(float* out, const float* p, int rows, int panels,
                                               const uint16_t (*bits)[4], const float* const* v, int wide) {
  constexpr int STEPS = HALF ? UNIT / 2 : UNIT;
  for (int r = 0; r < rows; r++) {
    float sums[WIDEST] = {};
    for (int n = 0; n < panels; n++)
      for (int s = 0; s < STEPS; s++) {
        uint32_t b = bits[r][n], take = HALF ? parts(b >> 2 * s & 1, b >> 2 * s & 2) : parts(b >> s & 1, b >> s & 1);
        if (take) add_part<HALF>(sums, p[(r * 4 + n) * STEPS + s], v[n] + s * wide, wide, take);
      }
    for (int i = 0; i < wide; i++) out[r * wide + i] += sums[i];
  }
}

// Adds A [R][pieces * steps] times B, [steps][wide] for each piece, to out [R][wide], for C units of columns from `at` on.
template <bool HALF, int R, int C>
INLINE void add_units(float* out, const float* a, int64_t row_step, int64_t step_step, const float* const* b, int at,
                      int wide, int pieces, int steps) {
  vf acc[R][C * N] = {};
  for (int p = 0; p < pieces; p++, a += steps * step_step) {
    const float* units[C];
    UNROLL for (int i = 0; i < C; i++) units[i] = b[p] + at + i * UNIT;
    product<HALF, R, C>(acc, a, row_step, step_step, units, wide, steps);
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int i = 0; i < C * N; i++) {
      float* to = out + r * wide + at + i * W;
      store(to, load(to) + acc[r][i]);
    }
}

// The same for all `wide` columns.
template <bool HALF, int R>
INLINE void add_rows(float* out, const float* a, int64_t row_step, int64_t step_step, const float* const* b, int wide,
                     int pieces, int steps) {
  each_columns(wide, [&](auto units, int at) __attribute__((always_inline)) {
    add_units<HALF, R, units.value>(out, a, row_step, step_step, b, at, wide, pieces, steps);
  });
}

// out [keys][wide] += A^T B, for A [steps][keys], B [steps][wide], where B may hold NaN or infinities: a weight of 0 adds 0.
template <bool HALF>
__attribute__((noinline, cold)) void add_transposed_careful(float* out, const float* a, const float* b, int wide,
                                                            int keys, int steps) {
  for (int k = 0; k < keys; k++) {
    float sums[WIDEST] = {};
    for (int s = 0; s < steps; s++) {
      uint32_t word;
      memcpy(&word, a + s * BLOCK + k, 4);
      word &= HALF ? 0x7FFF7FFF : 0x7FFFFFFF;
      uint32_t take = HALF ? parts(word & 0xFFFF, word >> 16) : parts(word, word);
      if (take) add_part<HALF>(sums, a[s * BLOCK + k], b + s * wide, wide, take);
    }
    for (int i = 0; i < wide; i++) out[k * wide + i] += sums[i];
  }
}

// The same with the matrix product, ROWS keys at a time: for some columns of B all keys, then for the next columns.
template <bool HALF>
__attribute__((noinline)) void add_transposed(float* out, const float* a, const float* b, int wide, int keys,
                                              int steps) {
  each_columns(wide, [&](auto units, int at) __attribute__((always_inline)) {
    auto some = [&](auto rows, int k) __attribute__((always_inline)) {
      add_units<HALF, rows.value, units.value>(out + k * wide, a + k, 1, BLOCK, &b, at, wide, 1, steps);
    };
    int k = 0;
    for (; ROWS == 6 && k + 6 <= keys; k += 6) some(Count<ROWS>(), k);
    in_halves<ROWS == 6 ? 4 : 2, 2>(keys, some, k);
  });
}

}  // namespace
