// Operations on rows other than products, each with its own team of threads, which share the rows.
#include "convolution.h"
#include "entropy.h"
#include "gate.h"
#include "norm.h"
#include "rotate.h"
#include "team.h"

#include <omp.h>
#include <stdlib.h>

namespace {

constexpr int64_t GRAIN = 1 << 13;  // elements per thread below which another thread does not pay

int team(int64_t threads, int64_t rows, int64_t width) {
  int64_t most = rows * width / GRAIN;
  return team_of(threads, most < rows ? most : rows);
}

template <class F>
int each_row(int threads, int64_t rows, F f) {
#pragma omp parallel num_threads(threads)
  {
    Share mine(rows, omp_get_thread_num(), omp_get_num_threads());
    for (int64_t row = mine.from; row < mine.to; row++) f(row);
  }
  return 0;
}

// Each thread sums the gradients of gain and shift over its rows; then the sums are added in the order of the threads.
template <bool HALF, bool RMS>
int norm_backward(const headway_norm& c) {
  int threads = team(c.threads, c.rows, c.width);
  int64_t sums = (c.width + 15) / 16 * 16;
  float* room = (float*)calloc((size_t)(2 * threads * sums), sizeof(float));
  if (!room) return 2;
#pragma omp parallel num_threads(threads)
  {
    int64_t me = omp_get_thread_num();
    Share mine(c.rows, me, omp_get_num_threads());
    Norm<HALF, RMS> norm(c);
    if (c.d_gain) norm.d_gain = room + 2 * me * sums;
    if (c.d_shift) norm.d_shift = room + (2 * me + 1) * sums;
    for (int64_t row = mine.from; row < mine.to; row++) norm.backward(row);
  }
  for (int64_t i = 0; i < c.width; i++) {
    float gain = 0, shift = 0;
    for (int64_t t = 0; t < threads; t++) gain += room[2 * t * sums + i], shift += room[(2 * t + 1) * sums + i];
    if (c.d_gain) c.d_gain[i] = gain;
    if (c.d_shift) c.d_shift[i] = shift;
  }
  free(room);
  return 0;
}

template <bool HALF, bool RMS>
int norm_rows(const headway_norm& c) {
  if (c.dy) return norm_backward<HALF, RMS>(c);
  Norm<HALF, RMS> norm(c);
  return each_row(team(c.threads, c.rows, c.width), c.rows, [&](int64_t row) { norm.forward(row); });
}

template <bool HALF, int ACT>
int gate_by(const headway_gate& c) {
  Gate<HALF, ACT> gate{c};
  return each_row(team(c.threads, c.rows, c.width), c.rows,
                  [&](int64_t row) { c.dy ? gate.backward(row) : gate.forward(row); });
}

// A part of the work is a block of channels of one batch row; in the backward of all batch rows, since they share d_weight.
template <bool HALF, bool SILU>
int convolve(const headway_convolution& c) {
  Convolution<HALF, SILU> convolution{c};
  const int64_t blocks = (c.channels + CHANNELS - 1) / CHANNELS, parts = c.dy ? blocks : blocks * c.batch;
  return each_row(team(c.threads, parts, c.slots * CHANNELS), parts, [&](int64_t part) {
    const int64_t first = part % blocks * CHANNELS, left = c.channels - first;
    const int count = (int)(left < CHANNELS ? left : CHANNELS);
    c.dy ? convolution.backward(first, count) : convolution.forward(part / blocks, first, count);
  });
}

}  // namespace

extern "C" int headway_convolve_rows(const headway_convolution* c) {
  if (c->window < 1 || c->window > MOST_WINDOW || (c->act != HEADWAY_NO_ACT && c->act != HEADWAY_SILU)) return 3;
  return by_type(c->type, [&](auto half) {
    return c->act == HEADWAY_SILU ? convolve<half.value, true>(*c) : convolve<half.value, false>(*c);
  });
}

extern "C" int headway_norm_rows(const headway_norm* c) {
  return by_type(c->type, [&](auto half) {
    return c->kind == HEADWAY_RMS_NORM ? norm_rows<half.value, true>(*c) : norm_rows<half.value, false>(*c);
  });
}

extern "C" int headway_gate_rows(const headway_gate* c) {
  return by_type(c->type, [&](auto half) {
    switch (c->act) {
      case HEADWAY_SILU: return gate_by<half.value, HEADWAY_SILU>(*c);
      case HEADWAY_GELU: return gate_by<half.value, HEADWAY_GELU>(*c);
      case HEADWAY_GELU_TANH: return gate_by<half.value, HEADWAY_GELU_TANH>(*c);
      case HEADWAY_RELU: return gate_by<half.value, HEADWAY_RELU>(*c);
      case HEADWAY_SIGMOID: return gate_by<half.value, HEADWAY_SIGMOID>(*c);
      default: return 3;
    }
  });
}

extern "C" int headway_rotate_rows(const headway_rotation* c) {
  if (c->dim > WIDEST || c->count > HEADWAY_MOST_ROTATED) return 3;
  int64_t rows = c->batch * c->slots, numbers = 0;
  for (int64_t i = 0; i < c->count; i++) numbers += c->heads[i] * c->dim;
  return by_type(c->type, [&](auto half) {
    Rotate<half.value> rotate{*c};
    return each_row(team(c->threads, rows, numbers), rows,
                    [&](int64_t row) { rotate.run(row / c->slots, row % c->slots); });
  });
}

extern "C" int headway_entropy_rows(const headway_entropy* c) {
  return by_type(c->type, [&](auto half) {
    Entropy<half.value> entropy{*c};
    return each_row(team(c->threads, c->rows, c->width), c->rows, [&](int64_t row) { entropy.run(row); });
  });
}
