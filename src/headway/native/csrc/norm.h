// Norms of rows, forward and backward: y = (z - m) r g + b for z = x + residual, with r = 1 / sqrt(mean of (z - m)^2 + eps).
// m is the mean for a layer norm and 0 for an RMS norm, whose (z r) is rounded to the type of x before the gain.
#pragma once
#include "words.h"

namespace {

template <bool HALF, bool RMS>
struct Norm {
  const headway_norm& c;
  int64_t width;
  float *d_gain = 0, *d_shift = 0;  // sums of this thread

  explicit Norm(const headway_norm& call) : c(call), width(call.width) {}

  void forward(int64_t row) const {
    int64_t at = row * width;
    const void* z = c.x;
    Sum sum, squares;
    each_words(width, [&](int64_t i, int n, int k) __attribute__((always_inline)) {
      vf x = get<HALF>(c.x, at + i, n);
      if (c.residual) {
        x = kept<HALF>(x + get<HALF>(c.residual, at + i, n));
        put<HALF>(c.sum, at + i, x, n);
      }
      if (RMS)
        squares.parts[k] += x * x;
      else
        sum.parts[k] += x;
    });
    if (c.residual) z = c.sum;
    float mean = RMS ? 0 : sum.total() / (float)width;
    if (!RMS)
      each_words(width, [&](int64_t i, int n, int k) __attribute__((always_inline)) {
        vf x = get<HALF>(z, at + i, n) - splat(mean);
        squares.parts[k] += n == W ? x * x : only((1u << n) - 1, x * x);
      });
    float by = 1 / sqrtf(squares.total() / (float)width + (float)c.eps);
    each_words(width, [&](int64_t i, int n, int) __attribute__((always_inline)) {
      vf y = (get<HALF>(z, at + i, n) - splat(mean)) * by;
      if (RMS) y = kept<HALF>(y);
      if (c.gain) y *= get<HALF>(c.gain, i, n);
      if (c.shift) y = (RMS ? kept<HALF>(y) : y) + get<HALF>(c.shift, i, n);
      put<HALF>(c.y, at + i, y, n);
    });
    if (c.by) c.by[row] = by;
    if (c.mean) c.mean[row] = mean;
  }

  // With h = (z - m) r and d = dy g: dz = r (d - mean of d - h mean of (d h)), without the mean of d for an RMS norm.
  void backward(int64_t row) const {
    int64_t at = row * width;
    float mean = RMS ? 0 : c.mean[row], by = c.by[row];
    Sum plain, along;
    each_words(width, [&](int64_t i, int n, int k) __attribute__((always_inline)) {
      vf dy = get<HALF>(c.dy, at + i, n), h = (get<HALF>(c.x, at + i, n) - splat(mean)) * by;
      if (d_gain) put<false>(d_gain, i, get<false>(d_gain, i, n) + dy * (RMS ? kept<HALF>(h) : h), n);
      if (d_shift) put<false>(d_shift, i, get<false>(d_shift, i, n) + dy, n);
      if (c.gain) dy *= get<HALF>(c.gain, i, n);
      if (!RMS) plain.parts[k] += dy;
      along.parts[k] += dy * h;  // lanes beyond the end have dy = 0
    });
    float lift = RMS ? 0 : plain.total() / (float)width, pull = along.total() / (float)width;
    each_words(width, [&](int64_t i, int n, int) __attribute__((always_inline)) {
      vf d = get<HALF>(c.dy, at + i, n), h = (get<HALF>(c.x, at + i, n) - splat(mean)) * by;
      if (c.gain) d *= get<HALF>(c.gain, i, n);
      d = (d - splat(lift) - h * pull) * by;
      if (c.d_sum) d += get<HALF>(c.d_sum, at + i, n);
      put<HALF>(c.dx, at + i, d, n);
    });
  }
};

}  // namespace
