// Layers with a recurrent state in a step: short convolutions and the gated delta rule. The rows of a sequence are adjacent and
// processed in order, so states have the same bits however a sequence is divided into steps.
#pragma once
#include "convolution.h"
#include "delta_slot.h"
#include "sums.h"

namespace {

// Threads share the channels. The tail holds the previous rows of the window, the latest last.
template <bool HALF, bool SILU>
int take_taps(const headway_taps& c, int64_t me, int64_t team) {
  const int64_t before = c.window - 1;
  Share mine((c.channels + UNIT - 1) / UNIT, me, team);
  const int64_t end = mine.to * UNIT < c.channels ? mine.to * UNIT : c.channels;
  each_text(c.texts, c.rows, [&](int64_t first, int64_t last, int64_t page) {
    float* tail = c.tail + page * before * c.channels;
    for (int64_t r = first; r < last; r++) {
      if (c.texts.begins[r])
        for (int64_t w = 0; w < before; w++) memset(tail + w * c.channels + mine.from * UNIT, 0, (size_t)(end - mine.from * UNIT) * 4);
      for (int64_t at = mine.from * UNIT; at < end; at += W) {
        const int some = (int)(end - at < W ? end - at : W);
        vf x = get<HALF>(c.x, r * c.x_row + at, some);
        if (c.times) x = kept<HALF>(x * get<HALF>(c.times, r * c.x_row + at, some));
        vf sum = (c.bias ? get<false>(c.bias, at, some) : splat(0)) + get<false>(c.weight, at, some) * x;
        for (int64_t w = 1; w <= before; w++)
          sum += get<false>(c.weight, w * c.channels + at, some) * get<false>(tail, (before - w) * c.channels + at, some);
        sum = kept<HALF>(sum);
        if (SILU) sum = activated<HEADWAY_SILU>(sum).value;
        if (c.by) sum = kept<HALF>(sum) * get<HALF>(c.by, r * c.x_row + at, some);
        put<HALF>(c.out, r * c.out_row + at, sum, some);
        for (int64_t w = 1; w < before; w++)
          put<false>(tail, (w - 1) * c.channels + at, get<false>(tail, w * c.channels + at, some), some);
        if (before) put<false>(tail, (before - 1) * c.channels + at, x, some);
      }
    }
  });
  return 0;
}

// Threads share the heads of the sequences.
template <bool HALF>
struct DeltaStep {
  const headway_delta_step& c;
  const int d, e;  // dim and dim_v in whole units
  alignas(64) float q[WIDEST], k[WIDEST], v[WIDEST], y[WIDEST], decays[WIDEST], gate[WIDEST];

  explicit DeltaStep(const headway_delta_step& call) : c(call), d(whole_units((int)c.dim)), e((int)c.dim_v) {}

  void run(int64_t me, int64_t team) {
    int64_t number = 0;
    each_text(c.texts, c.rows, [&](int64_t first, int64_t last, int64_t page) {
      for (int64_t head = 0; head < c.heads; head++)
        if (number++ % team == me)
          for (int64_t r = first; r < last; r++) row(r, head, c.state + (page * c.heads + head) * c.dim * c.dim_v);
    });
  }

 private:
  static float sigmoid_of(float x) { return 1 / (1 + expf(-x)); }
  float number(const void* p, int64_t at) const { return get<HALF>(p, at, 1)[0]; }
  const char* from(const void* p, int64_t at) const { return (const char*)p + at * (HALF ? 2 : 4); }

  // Returns the decay a of a head or of a channel of its keys: ln a = rate softplus(raw + bias).
  float decay(int64_t r, int64_t head, int64_t channel) const {
    const int64_t at = head * c.channels + channel;
    const float x = number(c.decay, r * c.decay_row + at) + c.decay_bias[at];
    return expf(c.rate[head] * (x > 20 ? x : log1pf(expf(x))));
  }

  void row(int64_t r, int64_t head, float* state) {
    const int64_t of = head / (c.heads / c.key_heads);
    if (c.texts.begins[r]) memset(state, 0, (size_t)(c.dim * c.dim_v) * 4);
    for (int i = (int)c.dim; i < d; i++) q[i] = k[i] = 0;
    read_row<HALF>(q, from(c.q, r * c.x_row + of * c.dim), c.dim);
    read_row<HALF>(k, from(c.k, r * c.x_row + of * c.dim), c.dim);
    read_row<HALF>(v, from(c.v, r * c.x_row + head * e), e);
    unit(q, d, c.unit_eps), unit(k, d, c.unit_eps);
    for (int x = 0; c.channels > 1 && x < c.dim; x++) decays[x] = decay(r, head, x);
    float beta = sigmoid_of(number(c.beta, r * c.beta_row + head));
    round_words(&beta, HALF, 1);
    beta *= (float)c.beta_scale;
    round_words(&beta, HALF, 1);
    const Slot slot = {q, k, v, y, c.channels > 1 ? decays : nullptr, c.channels > 1 ? 0 : decay(r, head, 0), beta, true};
    each_slot_columns(e, [&](auto units, int at) __attribute__((always_inline)) {
      slot_columns<decltype(units)::value>(slot, state + at, state + at, at, e, (int)c.dim);
    });
    // the norm of the output, and its gate
    double squares = 0;
    for (int i = 0; i < e; i++) y[i] *= (float)c.scale;
    round_words(y, HALF, e);
    for (int i = 0; i < e; i++) squares += (double)y[i] * y[i];
    const float by = (float)(1 / sqrt(squares / e + c.norm_eps));
    for (int i = 0; i < e; i++) y[i] *= by;
    round_words(y, HALF, e);
    for (int i = 0; i < e; i++) y[i] *= c.gain[i];
    round_words(y, HALF, e);
    read_row<HALF>(gate, from(c.gate, r * c.gate_row + head * e), e);
    for (int i = 0; i < e; i += W) {
      const vf x = load(gate + i), open = c.gate_act == HEADWAY_SILU ? activated<HEADWAY_SILU>(x).value : sigmoid(x);
      store(y + i, load(y + i) * kept<HALF>(open));
    }
    write_row<HALF>((char*)c.out + (r * c.out_row + head * e) * (HALF ? 2 : 4), y, e);
  }
};

}  // namespace
