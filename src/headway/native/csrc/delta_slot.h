// Rows of the gated delta rule, and a slot by itself: the recurrence.
#pragma once
#include "delta_pairs.h"

namespace {

// Numbers of a row, times a factor; what is behind them is 0 up to a whole vector.
template <bool HALF>
INLINE void read_row(float* to, const char* from, int64_t width, float by = 1) {
  each_words(width, [&](int64_t i, int some, int) __attribute__((always_inline)) {
    store(to + i, get<HALF>(from, i, some) * by);
  });
}
template <bool HALF>
INLINE void write_row(char* to, const float* from, int64_t width, float by = 1) {
  each_words(width, [&](int64_t i, int some, int) __attribute__((always_inline)) {
    put<HALF>(to, i, load(from + i) * by, some);
  });
}

// Rows of a state from where others have another distance, or zeros from nowhere.
INLINE void copy_rows(float* to, int64_t to_row, const float* from, int64_t from_row, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; i++)
    from ? memcpy(to + i * to_row, from + i * from_row, (size_t)width * 4)
         : memset(to + i * to_row, 0, (size_t)width * 4);
}
// Rows that lie side by side, each times a factor of its own.
INLINE void scale_rows(float* x, const float* by, int rows, int width) {
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < width; j += W) store(x + i * width + j, load(x + i * width + j) * by[i]);
}

// x / sqrt(x.x + eps), in place; answers 1 / sqrt(x.x + eps). And the gradient of x from that of the result, in place.
INLINE float unit(float* x, int width, double eps) {
  const float by = 1 / sqrtf(dot(x, x, width) + (float)eps);
  for (int i = 0; i < width; i += W) store(x + i, load(x + i) * by);
  return by;
}
INLINE void unit_gradient(float* dx, const float* x, float by, int width) {
  const vf along = splat(dot(dx, x, width));
  for (int i = 0; i < width; i += W) store(dx + i, (load(dx + i) - load(x + i) * along) * by);
}

struct Slot {
  const float *q, *k, *v;
  float* out;
  const float* decays;  // of channels, or null where there is one `decay`
  float decay, beta;
  bool erases;
};

// Pieces of a state's columns whose sums fit into registers, at best whole rows of 128, so that memory is read in a line.
template <class F>
INLINE void each_slot_columns(int wide, F f) {
  in_halves<N == 1 ? 8 : WIDE>(wide / UNIT, [&](auto units, int at) __attribute__((always_inline)) { f(units, at * UNIT); });
}

// U units of columns from `at` of a state, whose rows are e apart.
template <int U>
INLINE void slot_columns(const Slot& slot, const float* from, float* to, int at, int e, int rows) {
  auto factor = [&](int x) __attribute__((always_inline)) { return slot.decays ? slot.decays[x] : slot.decay; };
  vf sum[U * N] = {}, wrong[U * N], out[U * N] = {};
  for (int x = 0; slot.erases && x < rows; x++) {
    const vf by = splat(slot.k[x] * factor(x));
    // two pages ahead, where the next head's state may begin: prefetchers of the machine stop at each
    UNROLL for (int j = 0; j < U; j++) __builtin_prefetch(from + x * e + j * UNIT + 2048, 1, 2);
    UNROLL for (int j = 0; j < U * N; j++) sum[j] += by * load(from + x * e + j * W);
  }
  UNROLL for (int j = 0; j < U * N; j++) wrong[j] = (load(slot.v + at + j * W) - sum[j]) * slot.beta;
  for (int x = 0; x < rows; x++) {
    const vf by = splat(factor(x)), more = splat(slot.k[x]), reading = splat(slot.q[x]);
    UNROLL for (int j = 0; j < U * N; j++) {
      const vf now = load(from + x * e + j * W) * by + more * wrong[j];
      store(to + x * e + j * W, now);
      out[j] += reading * now;
    }
  }
  UNROLL for (int j = 0; j < U * N; j++) store(slot.out + at + j * W, out[j]);
}

}  // namespace
