// A step of decoding: operations one after the other, beside products (headway.h).
#pragma once
#include "headway.h"

extern "C" {

// Heads of rows behind their projections, `tokens` rows of each sequence: normed where there are gains, rotated where
// there are cosines (y = x cos + x[partner] sin on the first `rotated` numbers); keys and values go to slots[row] of
// their sequence in a cache, or nowhere where that is negative.
typedef struct {
  int64_t rows, tokens, heads, kv_heads, dim, dim_v;
  int64_t type;  // of q, k, v and of the cache
  void* q;
  const void *k, *v;
  int64_t q_row, k_row, v_row;
  const float *q_gain, *k_gain;  // [dim] or null
  int64_t norm;                  // RMS_NORM or WIDE_RMS_NORM
  double eps;
  const float *cos, *sin;  // [rows][rotated] or null
  int64_t rotation_row;
  const int32_t* partner;  // [rotated]
  int64_t rotated, rotates_values;
  headway_tensor k_cache, v_cache;
  const int64_t* slots;
  float *k_scale, *v_scale;  // of a cache in INT8: of kv head h and slot s at h scale_head + s; or null
  int64_t scale_head;
} headway_heads;

// Whose rows they are, in a step: [rows] each, the rows of a text side by side.
typedef struct {
  const int64_t* pages;   // of the states of its text
  const uint8_t* begins;  // whether the text begins, without a state
} headway_texts;

// Linear attention: the rows of a text in their order, of query and key features f and, before rotation (unless
// rotates_both), g: kv += f(k) v^T, z += g(k), out = f(q) kv / max(g(q) z, eps). Where a text begins, its sums do.
enum { HEADWAY_ELU1 = 0, HEADWAY_RELU_FEATURE, HEADWAY_SQUARE, HEADWAY_EXP, HEADWAY_SOFTMAX, HEADWAY_COSINE };
typedef struct {
  int64_t rows, heads, kv_heads, dim, dim_v, type, feature, key_feature;
  double eps;  // -INFINITY: the denominator is as it is
  const void *q, *k, *v;
  int64_t q_row, k_row, v_row;
  const float *cos, *sin;  // [rows][rotated] or null
  int64_t rotation_row;
  const int32_t* partner;  // [rotated]
  int64_t rotated, rotates_both;
  float *kv, *z;  // [page][kv head][features][dim_v], [page][kv head][features]
  headway_texts texts;
  void* out;
  int64_t out_row;
} headway_sums;

// Heads of rows behind attention, each times sigmoid(lse - sink), then times sigmoid(gate), where these are given.
typedef struct {
  int64_t rows, heads, dim;
  int64_t type;  // of out and gate
  void* out;     // [rows][heads][dim]
  int64_t out_row;
  const float *lse, *sink;  // [rows][heads] and [heads], or null
  int64_t lse_row;
  const void* gate;  // [rows][heads] or null
  int64_t gate_row;
} headway_factors;

// x += scale * y, in rows of y.inputs numbers that `y` reads as it would for its matrices, of which it has none.
typedef struct {
  int64_t rows;
  double scale;
  void* x;
  headway_products y;
} headway_added;

// A mixture of experts of rows h, which `in` reads as it would for its matrices, of which it has none: each row goes to
// the `top` experts with the largest s + choice, s = softmax or sigmoid of h router^T + router_bias in float32, of the
// `top_groups` groups whose best two add up to most. out = sum of w down(act(gate(h)) up(h)) of the chosen, w = scale s or
// scale s / (sum of s + sum_eps), + shared sigmoid(shared_gate). Matrices write where they are told.
typedef struct {
  int64_t rows, count, top, groups, top_groups, sigmoid, normalized;
  double scale, sum_eps;
  headway_products in;
  const float *router, *router_bias, *choice;  // [count][inputs], [count] or null, [count] or null
  int64_t hidden, act;
  const headway_matrix *gate, *up, *down;  // [count]; gate may be null: act(up(h))
  const void *shared, *shared_gate;        // [rows][inputs] and [rows], or null
  void* out;                               // [rows][inputs]
} headway_experts;

// Short convolutions of rows x, or of x times: out = act(sum over w of weight[w] x_(t - w) + bias), times `by`.
typedef struct {
  int64_t rows, channels, window, type, act;  // act: NO_ACT or SILU
  const void *x, *times, *by;                 // [rows][channels], all x_row apart; times and by may be null
  int64_t x_row;
  const float *weight, *bias;  // [window][channels], [channels] or null
  float* tail;                 // [page][window - 1][channels]
  headway_texts texts;
  void* out;
  int64_t out_row;
} headway_taps;

// The gated delta rule (`headway_delta`) of rows, with queries and keys of length 1, betas and decays from what a layer
// has for them, ln a = rate softplus(decay + decay_bias); behind it the norm of each head times act(gate).
typedef struct {
  int64_t rows, heads, key_heads, dim, dim_v, type, channels;  // channels: of a decay, 1 or dim; dim_v: of whole 16
  double scale, beta_scale, unit_eps, norm_eps;
  int64_t gate_act;  // SILU or SIGMOID
  const void *q, *k, *v, *beta, *decay, *gate;
  int64_t x_row, beta_row, decay_row, gate_row;
  const float *rate, *decay_bias, *gain;  // [heads], [heads][channels], [dim_v]
  float* state;                           // [page][heads][dim][dim_v]
  headway_texts texts;
  void* out;
  int64_t out_row;
} headway_delta_step;

enum {
  HEADWAY_PRODUCTS = 0,
  HEADWAY_HEADS = 1,
  HEADWAY_ATTENTION = 2,
  HEADWAY_NORM = 3,
  HEADWAY_SUMS = 4,
  HEADWAY_FACTORS = 5,
  HEADWAY_ADDED = 6,
  HEADWAY_EXPERTS = 7,
  HEADWAY_TAPS = 8,
  HEADWAY_DELTA = 9
};
typedef struct {
  int64_t kind;
  const void* of;  // headway_products, _heads, _call, _norm (y may be x), _sums, _factors, _added, _experts, _taps,
                   // _delta_step
  void *k, *v;     // where the keys and values of a headway_call lie, which layers share but for these
  const float *k_scale, *v_scale;
} headway_op;

// The operations one after the other, each when the one before is done, by one team of threads.
HEADWAY_EXPORT int headway_step(const headway_op* ops, int64_t count, int64_t threads);

}
