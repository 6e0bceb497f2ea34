// Rows of the gated delta rule, and its recurrence for a single slot.
#pragma once
#include "delta_pairs.h"

namespace {

// read_row reads a row times a factor as floats, with zeros up to a whole vector; write_row writes one.
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

// Copies rows of a state between arrays with different row strides; zeros if `from` is null.
INLINE void copy_rows(float* to, int64_t to_row, const float* from, int64_t from_row, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; i++)
    from ? memcpy(to + i * to_row, from + i * from_row, (size_t)width * 4)
         : memset(to + i * to_row, 0, (size_t)width * 4);
}
// Multiplies each of some contiguous rows by its own factor.
INLINE void scale_rows(float* x, const float* by, int rows, int width) {
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < width; j += W) store(x + i * width + j, load(x + i * width + j) * by[i]);
}

// unit: x /= sqrt(x.x + eps); returns 1 / sqrt(x.x + eps). unit_gradient: the gradient of the result dx becomes that of
// the input, given the result x and `by` = what unit returned.
INLINE float unit(float* x, int width, double eps) {
  const float by = 1 / sqrtf(dot(x, x, width) + (float)eps);
  for (int i = 0; i < width; i += W) store(x + i, load(x + i) * by);
  return by;
}
INLINE void unit_gradient(float* dx, const float* x, float by, int width) {
  const vf along = splat(dot(dx, x, width));
  for (int i = 0; i < width; i += W) store(dx + i, (load(dx + i) - load(x + i) * along) * by);
}

// The inputs of one slot of a head.
struct Slot {
  const float *q, *k, *v;
  float* out;
  const float* decays;  // decay of each channel, or null if there is one `decay`
  float decay, beta;
  bool erases;
};

// Calls f(units, first column) for pieces of a state's columns whose sums fit into registers; whole rows of 128 if possible,
// so that memory is read sequentially.
template <class F>
INLINE void each_slot_columns(int wide, F f) {
  in_halves<N == 1 ? 8 : WIDE>(wide / UNIT, [&](auto units, int at) __attribute__((always_inline)) { f(units, at * UNIT); });
}

// Updates U units of columns from `at` on of a state with rows of e columns, and writes their outputs:
// wrong = beta (v - k^T diag(a) S), S' = diag(a) S + k wrong^T, out = q^T S'.
template <int U>
INLINE void slot_columns(const Slot& slot, const float* from, float* to, int at, int e, int rows) {
  auto factor = [&](int x) __attribute__((always_inline)) { return slot.decays ? slot.decays[x] : slot.decay; };
  vf sum[U * N] = {}, wrong[U * N], out[U * N] = {};
  for (int x = 0; slot.erases && x < rows; x++) {
    const vf by = splat(slot.k[x] * factor(x));
    // two pages ahead, where the next head's state may begin: hardware prefetchers stop at page boundaries
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
