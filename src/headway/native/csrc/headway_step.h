// A decoding step of a model: a list of operations that run one after the other.
#pragma once
#include "headway.h"

extern "C" {

// Query, key and value heads after their projections, `tokens` rows of each sequence: normed if there are gains, rotated if
// there are cosines (y = x cos + x[partner] sin on the first `rotated` elements). Keys and values are written to
// slots[row] of their sequence's KV cache, or nowhere if that is negative.
typedef struct {
  int64_t rows, tokens, heads, kv_heads, dim, dim_v;
  int64_t type;  // of q, k, v and of a cache without scales
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
  // [rows] slot of the cache
  const int64_t* slots;
  float *k_scale, *v_scale;  // of an INT8 cache: the scale of kv head h, slot s is at h scale_head + s; or null
  int64_t scale_head;
} headway_heads;

// The sequence of each row of a step, [rows] each; the rows of a sequence are adjacent.
typedef struct {
  const int64_t* pages;   // page of the states of its sequence
  const uint8_t* begins;  // whether the sequence begins with this row, with a zero state
} headway_texts;

// Linear attention. The rows of a sequence are processed in order, with query and key features f, and g, the same before
// the rotation (after it, if rotates_both): kv += f(k) v^T, z += g(k), out = f(q) kv / max(g(q) z, eps). The sums start at 0
// where a sequence begins.
enum { HEADWAY_ELU1 = 0, HEADWAY_RELU_FEATURE, HEADWAY_SQUARE, HEADWAY_EXP, HEADWAY_SOFTMAX, HEADWAY_COSINE };
typedef struct {
  int64_t rows, heads, kv_heads, dim, dim_v, type, feature, key_feature;
  double eps;  // -INFINITY: the denominator is used as it is
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

// Multiplies each head of attention's output by sigmoid(lse - sink), then by sigmoid(gate), if these are given.
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

// x += scale * y, where the rows of y, y.inputs wide, are read as for a product (norm, act, gate); y has no matrices.
typedef struct {
  int64_t rows;
  double scale;
  void* x;
  headway_products y;
} headway_added;

// A mixture of experts. Rows h are read as for the product `in` (norm, act, gate), which has no matrices. Each row goes to
// the `top` experts with the largest s + choice, with s = softmax or sigmoid of h router^T + router_bias in float32, among
// the `top_groups` groups with the largest sum of their best two. out = sum over the chosen experts of
// w down(act(gate(h)) up(h)), w = scale s or scale s / (sum of s + sum_eps), + shared sigmoid(shared_gate). The matrices'
// own `out` is not used.
typedef struct {
  int64_t rows, count, top, groups, top_groups, sigmoid, normalized;
  double scale, sum_eps;
  headway_products in;
  const float *router, *router_bias, *choice;  // [count][inputs], [count] or null, [count] or null
  int64_t hidden, act;
  const headway_matrix *gate, *up, *down;  // [count] matrices; gate may be null: act(up(h))
  const void *shared, *shared_gate;        // [rows][inputs] and [rows], or null
  void* out;                               // [rows][inputs]
} headway_experts;

// Causal depthwise convolutions of rows x, or x times: out = act(sum over w of weight[w] x_(t - w) + bias), times `by`.
typedef struct {
  int64_t rows, channels, window, type, act;  // act: NO_ACT or SILU
  const void *x, *times, *by;                 // [rows][channels], each with row stride x_row; times and by may be null
  int64_t x_row;
  const float *weight, *bias;  // [window][channels], [channels] or null
  float* tail;                 // [page][window - 1][channels] the previous rows of each sequence, the latest last
  headway_texts texts;
  void* out;
  int64_t out_row;
} headway_taps;

// The gated delta rule (`headway_delta`) of rows, with queries and keys normalized to length 1, and beta and decay computed
// from a layer's projections: beta = beta_scale sigmoid(beta), ln a = rate softplus(decay + decay_bias); then the norm of
// each head times act(gate).
typedef struct {
  int64_t rows, heads, key_heads, dim, dim_v, type, channels;  // channels: of a decay, 1 or dim; dim_v: a multiple of 16
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
  // The argument struct of the kind:
  const void* of;  // headway_products, _heads, _call, _norm (y may be x), _sums, _factors, _added, _experts, _taps,
                   // _delta_step
  void *k, *v;     // keys and values of a headway_call, and their scales: layers share a call except for these
  const float *k_scale, *v_scale;
} headway_op;

// Runs the operations in order, each after the one before is complete, by one team of threads. Returns 0 or an error.
HEADWAY_EXPORT int headway_step(const headway_op* ops, int64_t count, int64_t threads);

}
