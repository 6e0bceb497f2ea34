// The one product: acc[R rows][C units of 16] += sum over steps of A[row][step] * B[step][unit].
#pragma once
#include "vec.h"

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

}  // namespace
