// The one product: acc[R rows][C units of 16] += sum over steps of A[row][step] * B[step][unit].
#pragma once
#include "pack.h"

namespace {

// Words of A lie at a[row * row_step + step * step_step]; unit c of step s of B at b[s * b_step + 16 c].
template <bool HALF, int R, int C>
INLINE void product_step(vf (&acc)[R][C * N], const float* a, int64_t row_step, const float* b) {
  vf v[C * N];
  UNROLL for (int i = 0; i < C * N; i++) v[i] = load(b + i * W);
  UNROLL for (int r = 0; r < R; r++) {
    vf x = splat(a[r * row_step]);
    UNROLL for (int i = 0; i < C * N; i++) acc[r][i] = multiply_add<HALF>(acc[r][i], x, v[i]);
  }
}

template <bool HALF, int R, int C>
INLINE void product(vf (&acc)[R][C * N], const float* a, int64_t row_step, int64_t step_step, const float* b,
                    int64_t b_step, int steps) {
#pragma GCC unroll 4
  for (int s = 0; s < steps; s++) product_step<HALF, R, C>(acc, a + s * step_step, row_step, b + s * b_step);
}

// Products of weights and values where a masked key may hold NaN: what is not seen is not touched.
template <bool HALF>
__attribute__((noinline, cold)) void seen_only(float* out, int64_t out_step, const float* p, int p_step, int rows, int panels,
                                               const uint16_t (*bits)[4], const float* v, int wide) {
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < panels * UNIT; j++) {
      if (!(bits[r][j / UNIT] >> j % UNIT & 1)) continue;
      float w = HALF ? from_bf16(((const uint16_t*)p)[r * BLOCK + j]) : p[r * BLOCK + j];
      for (int i = 0; i < wide; i++) {
        float x = HALF ? from_bf16(((const uint16_t*)(v + j / 2 * wide + i))[j & 1]) : v[j * wide + i];
        out[r * out_step + i] += w * x;
      }
    }
}

// Rows of A [R][steps] times rows of B [steps][wide], added to out: C units of columns.
template <bool HALF, int R, int C>
INLINE void add_units(float* out, int64_t out_step, const float* a, int64_t row_step, int64_t step_step,
                      const float* b, int wide, int steps) {
  vf acc[R][C * N];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int i = 0; i < C * N; i++) acc[r][i] = load(out + r * out_step + i * W);
  product<HALF, R, C>(acc, a, row_step, step_step, b, wide, steps);
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int i = 0; i < C * N; i++) store(out + r * out_step + i * W, acc[r][i]);
}

template <bool HALF, int R>
INLINE void add_rows(float* out, int64_t out_step, const float* a, int64_t row_step, int64_t step_step, const float* b,
                     int wide, int steps) {
  int at = 0;
  if (WIDE == 4) {
    for (; at + 64 <= wide; at += 64)
      add_units<HALF, R, WIDE>(out + at, out_step, a, row_step, step_step, b + at, wide, steps);
    if (at + 32 <= wide) {
      add_units<HALF, R, WIDE == 4 ? 2 : 1>(out + at, out_step, a, row_step, step_step, b + at, wide, steps);
      at += 32;
    }
  }
  for (; at < wide; at += UNIT)
    add_units<HALF, R, 1>(out + at, out_step, a, row_step, step_step, b + at, wide, steps);
}

// out [keys][wide] += A^T [keys][rows] B [rows][wide] where a row of B may hold NaN: weights of 0 touch nothing.
template <bool HALF>
__attribute__((noinline, cold)) void add_transposed_careful(float* out, const float* a, const float* b, int wide,
                                                            int keys, int rows) {
  for (int r = 0; r < rows; r++)
    for (int k = 0; k < keys; k++) {
      float w = HALF ? from_bf16(((const uint16_t*)(a + r / 2 * BLOCK + k))[r & 1]) : a[r * BLOCK + k];
      if (w == 0) continue;
      for (int i = 0; i < wide; i++)
        out[k * wide + i] +=
            w * (HALF ? from_bf16(((const uint16_t*)(b + r / 2 * wide + i))[r & 1]) : b[r * wide + i]);
    }
}

// The same by products: 6 keys at a time.
template <bool HALF>
__attribute__((noinline)) void add_transposed(float* out, const float* a, const float* b, int wide, int keys,
                                              int steps) {
  int k = 0;
  if (ROWS == 6)
    for (; k + 6 <= keys; k += 6) add_rows<HALF, ROWS>(out + k * wide, wide, a + k, 1, BLOCK, b, wide, steps);
  if (ROWS >= 4)
    for (; k + 4 <= keys; k += 4)
      add_rows<HALF, ROWS >= 4 ? 4 : 1>(out + k * wide, wide, a + k, 1, BLOCK, b, wide, steps);
  for (; k + 2 <= keys; k += 2) add_rows<HALF, 2>(out + k * wide, wide, a + k, 1, BLOCK, b, wide, steps);
}

}  // namespace
