// The one product: acc[R rows][C units of 16] += sum over steps of A[row][step] * B[step][unit].
#pragma once
#include "groups.h"
#include "pack.h"

namespace {

// Words of A lie at a[row * row_step + step * step_step]; unit c of step s of B at b[c][s * b_step].
template <bool HALF, int R, int C>
INLINE void product_step(vf (&acc)[R][C * N], const float* a, int64_t row_step, const float* const* b, int64_t at) {
  vf v[C * N];
  UNROLL for (int i = 0; i < C * N; i++) v[i] = load(b[i / N] + at + i % N * W);
  UNROLL for (int r = 0; r < R; r++) {
    vf x = splat(a[r * row_step]);
    UNROLL for (int i = 0; i < C * N; i++) acc[r][i] = multiply_add<HALF>(acc[r][i], x, v[i]);
  }
}

template <bool HALF, int R, int C>
INLINE void product(vf (&acc)[R][C * N], const float* a, int64_t row_step, int64_t step_step, const float* const* b,
                    int64_t b_step, int steps) {
  int s = 0;
  for (; s + 4 <= steps; s += 4)
    UNROLL for (int i = 0; i < 4; i++)
      product_step<HALF, R, C>(acc, a + (s + i) * step_step, row_step, b, (s + i) * b_step);
  for (; s < steps; s++) product_step<HALF, R, C>(acc, a + s * step_step, row_step, b, s * b_step);
}

// One step of the product on a row of sums where B may hold what is no number: only the parts of B's words in `take`.
template <bool HALF>
INLINE void add_part(float* out, float a, const float* b, int wide, uint32_t take) {
  vi some = splat_int((int32_t)take);
  for (int i = 0; i < wide; i += W)
    store(out + i, multiply_add<HALF>(load(out + i), splat(a), (vf)((vi)load(b + i) & some)));
}
INLINE uint32_t parts(bool low, bool high) { return (low ? 0xFFFFu : 0) | (high ? 0xFFFF0000u : 0); }

// Products of weights and values where a masked key may hold NaN: what is not seen is not touched. Panel n of the
// values lies at v[n].
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

// Rows of A [R][pieces * steps] times rows of B [piece][steps][wide], added to out [R][wide]: C units of columns.
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

template <bool HALF, int R>
INLINE void add_rows(float* out, const float* a, int64_t row_step, int64_t step_step, const float* const* b, int wide,
                     int pieces, int steps) {
  each_columns(wide, [&](auto units, int at) __attribute__((always_inline)) {
    add_units<HALF, R, units.value>(out, a, row_step, step_step, b, at, wide, pieces, steps);
  });
}

// out [keys][wide] += A^T [keys][steps] B [steps][wide] where B may hold what is no number: weights of 0 touch nothing.
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

// The same by products, 6 keys at a time; some columns of B for all keys, then the next ones.
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
