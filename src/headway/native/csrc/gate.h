// Activations and gates, elementwise: y = act(gate) up, forward and backward.
#pragma once
#include "words.h"

namespace {

// act(x) and its derivative.
struct Activated {
  vf value, slope;
};

template <int ACT>
INLINE Activated activated(vf x) {
  if (ACT == HEADWAY_SILU) {
    vf s = sigmoid(x), y = x * s;
    return {y, s + y * (1.0f - s)};
  }
  if (ACT == HEADWAY_SIGMOID) {
    vf y = sigmoid(x);
    return {y, y * (1.0f - y)};
  }
  if (ACT == HEADWAY_GELU_TANH) {  // (1 + tanh z) / 2 = sigmoid(2 z)
    vf square = x * x, s = sigmoid(x * (square * 0.0713548163f + 1.5957691216f)), y = x * s;
    return {y, s + y * (1.0f - s) * (square * 0.214064449f + 1.5957691216f)};
  }
  if (ACT == HEADWAY_GELU) {  // the normal distribution function by Abramowitz and Stegun 7.1.26, error below 8e-8
    vf size = vmax(x, -x), e = exp_below_0(x * x * -0.5f), t = 1.0f / (size * 0.231641888f + 1.0f);
    vf sum = ((((t * 1.061405429f - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    vf tail = sum * e * 0.5f, below = x > 0.0f ? 1.0f - tail : tail;
    return {x * below, below + x * e * 0.398942280f};
  }
  return {x < 0.0f ? splat(0) : x, x > 0.0f ? splat(1) : splat(0)};  // RELU
}

template <bool HALF, int ACT>
struct Gate {
  const headway_gate& c;

  void forward(int64_t row) const {
    each_words(c.width, [&](int64_t i, int n, int) __attribute__((always_inline)) {
      vf y = kept<HALF>(activated<ACT>(get<HALF>(c.gate, row * c.gate_row + i, n)).value);
      if (c.up) y *= get<HALF>(c.up, row * c.up_row + i, n);
      put<HALF>(c.y, row * c.width + i, y, n);
    });
  }

  // Writes the gradients, and y as well if it is given.
  void backward(int64_t row) const {
    each_words(c.width, [&](int64_t i, int n, int) __attribute__((always_inline)) {
      Activated a = activated<ACT>(get<HALF>(c.gate, row * c.gate_row + i, n));
      vf dy = get<HALF>(c.dy, row * c.width + i, n), value = kept<HALF>(a.value);
      if (c.up) {
        vf up = get<HALF>(c.up, row * c.up_row + i, n);
        put<HALF>(c.d_up, row * c.d_up_row + i, dy * value, n);
        dy *= up, value *= up;
      }
      put<HALF>(c.d_gate, row * c.d_gate_row + i, dy * a.slope, n);
      if (c.y) put<HALF>(c.y, row * c.width + i, value, n);
    });
  }
};

}  // namespace
