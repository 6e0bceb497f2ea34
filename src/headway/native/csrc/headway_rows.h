// Operations on rows other than matrix products: [rows][width] of `type`, contiguous unless the struct has a row stride.
#pragma once
#include "headway.h"

extern "C" {

// y = norm(x + residual) gain + shift. With dy the gradients instead: x is then that sum, and dx, the gradient of x and of
// residual alike, includes d_sum, the gradient that reaches the sum from elsewhere. `mean` is null for an RMS norm.
typedef struct {
  int64_t threads, rows, width, type, kind;
  double eps;
  const void *x, *residual, *gain, *shift;
  void *sum, *y;  // sum = x + residual
  // mean and 1 / standard deviation (or 1 / root mean square) of each row
  float *mean, *by;  // [rows], written forward and read backward
  const void *dy, *d_sum;
  void* dx;
  float *d_gain, *d_shift;  // [width] or null
} headway_norm;

// y = act(gate) up, or act(gate) if up is null. With dy the gradients, and y as well unless it is null.
typedef struct {
  int64_t threads, rows, width, type, act;
  const void *gate, *up;
  int64_t gate_row, up_row;
  void* y;
  const void* dy;
  void *d_gate, *d_up;
  int64_t d_gate_row, d_up_row;
} headway_gate;

enum { HEADWAY_HALVES = 0, HEADWAY_ADJACENT = 1, HEADWAY_PAIRS = 2 };
enum { HEADWAY_MOST_ROTATED = 3 };

// Rotary positions: tensors [batch][heads][slots][dim] rotated by the same positions; `back`: by the transpose.
typedef struct {
  int64_t threads, batch, slots, dim, type;
  headway_tensor x[HEADWAY_MOST_ROTATED], y[HEADWAY_MOST_ROTATED];
  int64_t heads[HEADWAY_MOST_ROTATED], count;
  const float *cos, *sin;  // [slots][rotated]; table_batch: stride from one batch row to the next
  int64_t table_batch, rotated, pairing, back;
  const int64_t* partner;  // [rotated] index that each is paired with, for PAIRS
} headway_rotation;

// Cross-entropy: losses[row] = -ln softmax(logits + bias)[target], 0 for a negative target; with `gradient`, logits are
// overwritten by softmax - onehot.
typedef struct {
  int64_t threads, rows, width, type;
  void* logits;
  const void* bias;  // [width] or null
  const int64_t* targets;
  float* losses;
  uint8_t* hits;  // whether the target is the argmax, the first of equal ones; or null
  int64_t gradient;
} headway_entropy;

// A causal depthwise convolution: y_t = act(sum over w < window of weight[w] x_(t - w) + bias) for each channel, within the
// document of t. With dy the gradients instead of y. y, dy and the gradients are contiguous.
typedef struct {
  int64_t threads, batch, slots, channels, window, type, act;  // act: NO_ACT or SILU
  const void* x;                                               // [batch][slots][channels]
  int64_t x_batch, x_row;
  const float *weight, *bias;  // [window][channels], [channels] or null
  const uint8_t* begins;       // [batch or 1][slots] whether a document begins there, without history; or null
  int64_t begins_batch;
  const void* past;  // [batch][window - 1][channels] the slots before the first, or null for zeros
  void* y;
  const void* dy;
  void *dx, *d_past;           // d_past may be null
  float *d_weight, *d_bias;    // d_bias may be null
} headway_convolution;

// The gated delta rule. For each head S_t = diag(a_t) S_(t-1) + b_t k_t (v_t - k_t^T diag(a_t) S_(t-1)), o_t = scale S_t^T q_t;
// q and k are divided by sqrt(x.x + eps) unless eps < 0; if not `erases`, nothing is subtracted from v_t. With d_out or
// d_state the gradients instead. Each key head serves heads / key_heads heads; gradients of q and k are per head.
// q, k, v, out and their gradients may have any strides; the others are contiguous.
typedef struct {
  int64_t threads, batch, heads, key_heads, slots, dim, dim_v, type;
  int64_t channels;  // of a decay: 1 (one per head) or dim
  int64_t erases;
  double scale, eps;
  headway_tensor q, k, v, out;
  const float *log_decay, *beta;  // [batch][heads][slots][channels], [batch][heads][slots]
  const uint8_t* begins;          // [batch or 1][slots] whether a document begins there, with a zero state; or null
  int64_t begins_batch;
  const float* past;  // [batch][heads][dim][dim_v] the state before the first slot, or null for zeros
  float* state;       // the state after the last slot; may be `past`
  headway_tensor d_out, dq, dk, dv;
  const float* d_state;  // or null
  float *d_log_decay, *d_beta, *d_past;
} headway_delta;

HEADWAY_EXPORT int headway_convolve_rows(const headway_convolution* call);
HEADWAY_EXPORT int headway_delta_rule(const headway_delta* call);
HEADWAY_EXPORT int headway_norm_rows(const headway_norm* call);
HEADWAY_EXPORT int headway_gate_rows(const headway_gate* call);
HEADWAY_EXPORT int headway_rotate_rows(const headway_rotation* call);
HEADWAY_EXPORT int headway_entropy_rows(const headway_entropy* call);

}
