// Cross-entropy of rows of logits, and its gradient, which overwrites them.
#pragma once
#include "words.h"

namespace {

template <bool HALF>
struct Entropy {
  const headway_entropy& c;

  // Returns n logits from i on of the row at `at`, with the bias.
  __attribute__((always_inline)) vf logits(int64_t at, int64_t i, int n) const {
    vf x = get<HALF>(c.logits, at + i, n);
    return c.bias ? x + get<HALF>(c.bias, i, n) : x;
  }
  float logit(int64_t at, int64_t i) const { return logits(at, i, 1)[0]; }

  void run(int64_t row) const {
    int64_t at = row * c.width, target = c.targets[row];
    if (target < 0) {  // ignored target
      c.losses[row] = 0;
      if (c.hits) c.hits[row] = 0;
      if (c.gradient) memset((char*)c.logits + at * (HALF ? 2 : 4), 0, (size_t)c.width * (HALF ? 2 : 4));
      return;
    }
    vf tops[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    each_words(c.width, [&](int64_t i, int n, int k) __attribute__((always_inline)) {
      vf x = logits(at, i, n);
      tops[k] = vmax(tops[k], n == W ? x : where((1u << n) - 1, x, splat(-INFINITY)));
    });
    vf all = vmax(vmax(tops[0], tops[1]), vmax(tops[2], tops[3]));
    float top = all[0];
    for (int i = 1; i < W; i++) top = all[i] > top ? all[i] : top;
    Sum sum;
    each_words(c.width, [&](int64_t i, int n, int k) __attribute__((always_inline)) {
      vf e = exp_below_0(logits(at, i, n) - splat(top));
      sum.parts[k] += n == W ? e : only((1u << n) - 1, e);
    });
    float total = sum.total(), picked = logit(at, target);
    c.losses[row] = logf(total) + (top - picked);
    if (c.hits) c.hits[row] = picked == top && !before(at, target, top);
    if (!c.gradient) return;
    float by = 1 / total, share = expf(picked - top) * by - 1;
    each_words(c.width, [&](int64_t i, int n, int) __attribute__((always_inline)) {
      put<HALF>(c.logits, at + i, exp_below_0(logits(at, i, n) - splat(top)) * by, n);
    });
    if (HALF)
      ((uint16_t*)c.logits)[at + target] = to_bf16(share);
    else
      ((float*)c.logits)[at + target] = share;
  }

 private:
  // Returns whether a smaller token id has the same logit.
  bool before(int64_t at, int64_t target, float top) const {
    for (int64_t i = 0; i < target; i++)
      if (logit(at, i) == top) return true;
    return false;
  }
};

}  // namespace
