// The C interface of the native kernels, as C++ has it. One shared object per CPU level exports these names.
// Strides are in elements; the last dimension of every tensor is contiguous.
#pragma once
#include <stdint.h>

extern "C" {

#define HEADWAY_EXPORT __attribute__((visibility("default")))

enum {
  HEADWAY_FLOAT32 = 0,
  HEADWAY_BFLOAT16 = 1,
  HEADWAY_INT8 = 2,
  HEADWAY_INT4 = 3,
  HEADWAY_Q4_K = 4,
  HEADWAY_Q5_K = 5,
  HEADWAY_Q6_K = 6,
  HEADWAY_COMPRESSED = 7,
  HEADWAY_NF4 = 8
};

// Patterns as a program for a stack machine, in postfix order; each instruction is four int32.
enum {
  HEADWAY_FULL = 0,
  HEADWAY_CAUSAL = 1,
  HEADWAY_WINDOW = 2,  // first distance, last distance, step
  HEADWAY_SINK = 3,    // count
  HEADWAY_GLOBAL_KEYS = 4,
  HEADWAY_GLOBAL_QUERIES = 5,
  HEADWAY_CHUNK = 6,  // length
  HEADWAY_AND = 7,
  HEADWAY_OR = 8,
};

// Steps on the scaled scores, in order.
enum {
  HEADWAY_SOFT_CAP = 0,  // values[0]: cap
  HEADWAY_DISTANCE = 1,  // values[H][2 * reach + 1]: a bias by clamp(key - query, -reach, reach)
  HEADWAY_SLOPE = 2,     // values[H]: - slope * |key - query|
};

typedef struct {
  void* data;
  int64_t batch, head, slot;
} headway_tensor;

// One side of the call, in block order. `order` says which slot of the tensors stands at a place.
typedef struct {
  const int32_t* index;     // [rows][count], -1 for an empty slot
  const int32_t* document;  // [rows][count] or null
  const uint8_t* global;    // [rows][count] or null
  const int32_t* order;     // [rows][count] or null
  int64_t rows, count;
} headway_side;

// Runs of key blocks per tile of queries; row b of the batch has tiles first[b * tiles] .. (rows = 1 serves all).
typedef struct {
  const int32_t* first;  // [rows * tiles + 1]
  const int32_t* begin;  // multiples of the block width
  const int32_t* end;
  const uint8_t* full;
  int64_t rows, tiles, tile;
  const int32_t* alike;  // [rows of the batch]: leading keys that lie in the slots of those of the row before, or null
} headway_plan;

enum { HEADWAY_MOST_SCORES = 8 };  // that the backward takes

typedef struct {
  int64_t kind, reach;
  const float* values;
  float* gradient;  // as values, or null; backward adds to it
} headway_score;

typedef struct {
  int64_t threads;
  int64_t batch, heads, kv_heads, dim, dim_v;
  int64_t type;     // of q, out and the gradients
  int64_t kv_type;  // of k and v: as `type`, or INT8 with one scale per slot and head
  headway_tensor q, k, v, out;
  const float *k_scale, *v_scale;  // for INT8: of row b, kv head h and slot s at b scale_batch + h scale_head + s
  int64_t scale_batch, scale_head;
  float* lse;                      // [B][H][T], natural logarithm
  double scale;
  headway_side queries, keys;
  headway_plan plan;
  const int32_t* program;
  int64_t instructions;
  const headway_score* scores;
  int64_t score_count;
  double dropout;
  int64_t seed, first_key;        // place of key 0 among all sets of keys of the call
  const int64_t* head_ids;        // [H] numbers of the heads for dropout, or null for 0..H-1
  headway_tensor d_out, dq, dk, dv;
  const float* d_lse;  // [B][H][T]
} headway_call;

// 0, or what is wrong: 2 no memory, 3 a type, tile or width that this library does not know.
HEADWAY_EXPORT int headway_forward(const headway_call* call);
HEADWAY_EXPORT int headway_backward(const headway_call* call);

// The plan of rows of one query each, whose keys are in order: key i is token i of the row. `index` [rows] are the
// queries' tokens; first [rows + 1] is filled, and begin, end and full up to `room`. Answers how many runs there are.
HEADWAY_EXPORT int64_t headway_plan_rows(const int32_t* program, int64_t instructions, const int32_t* index, int64_t rows,
                                         int32_t* first, int32_t* begin, int32_t* end, uint8_t* full, int64_t room);

// What codes of NF4 stand for: values[code] * scale, with scale = map[code of its block] * largest + offset. A block is 64
// inputs of an output, and each 256 blocks of the whole matrix, output by output, have a largest.
typedef struct {
  const float* values;         // [16]
  const uint8_t* scales;       // [outputs][inputs / 64]
  const float *map, *largest;  // [256], and one for each 256 blocks
  float offset;
  int64_t first, row;  // of a part of a matrix: the number of its first block in the whole, and blocks of a row of that
} headway_nf4;

// A matrix of weights [outputs][inputs]. FLOAT32 and BFLOAT16 lie row by row, COMPRESSED as compressed.h has them; others
// in panels of 16 outputs, group of 32 inputs by group. Of a group come first its codes, unsigned: [8][16][4] bytes, or
// [4][16][4] with the four low bits of quads 0 1 4 5 (of four inputs) in low halves and those of 2 3 6 7 in high ones.
// INT8, INT4: then 16 scales in float16 where `scales`, then 16 zeros where `zeros` (else 128, or 8).
// Q4_K, Q5_K, Q6_K, of multiples of 256 inputs: before each eight groups 16 d in float16, and 16 dmin but for Q6_K; in a
// group the bits above the first four, [1][16][4] or [2][16][4] bytes in which those of the first quad are lowest, then 16
// bytes s and 16 bytes t (w = d s code - dmin t), of Q6_K s, signed, of the first 16 inputs and the others
// (w = d s (code - 32)).
// NF4, of multiples of 64 inputs, lies row by row, two codes in a byte, the first in its high bits.
typedef struct {
  int64_t type, outputs;
  const void* weights;
  int64_t step;  // bytes from one row or panel to the next
  int64_t scales, zeros;
  const float *factor, *bias;  // [outputs] or null: out = factor * sum + bias
  void* out;                   // [rows][outputs] in the type of x
  int64_t out_row;
  int64_t add;  // whether to what `out` holds
  const int64_t* starts;  // [outputs] where rows of COMPRESSED begin, bytes behind `weights`
  uint64_t table;         // of its codes: a byte each
  const headway_nf4* nf4;
} headway_matrix;

// RMS norms are rounded in front of their gain, and behind it; wide ones behind it alone.
enum { HEADWAY_NO_NORM = 0, HEADWAY_RMS_NORM = 1, HEADWAY_LAYER_NORM = 2, HEADWAY_WIDE_RMS_NORM = 3 };
enum { HEADWAY_NO_ACT = 0, HEADWAY_SILU = 1, HEADWAY_GELU = 2, HEADWAY_GELU_TANH = 3, HEADWAY_RELU = 4, HEADWAY_SIGMOID = 5 };

// Rows of x, or of act(norm(x)) * gate, times each of the matrices; what lies between is rounded to the type of x.
// Against INT8 and INT4, rows are rounded to 8 bits in groups of 32.
typedef struct {
  int64_t threads, rows, inputs;
  int64_t type;  // of x: FLOAT32 or BFLOAT16
  const void* x;
  int64_t x_row;
  const headway_matrix* matrices;
  int64_t count;
  int64_t norm;
  const float *gain, *shift;  // [inputs] or null
  double eps;
  int64_t act;
  const void* gate;  // [rows][inputs] as x, or null
} headway_products;

HEADWAY_EXPORT int headway_linear(const headway_products* call);

// Adds to counts[exponent] how many bf16 weights have it; w [rows][inputs], `row` weights from one row to the next.
HEADWAY_EXPORT void headway_exponents(const uint16_t* w, int64_t rows, int64_t inputs, int64_t row, int64_t* counts);
// The bytes of these rows as COMPRESSED; writes them to `out` and where each begins to `starts`, unless null.
HEADWAY_EXPORT int64_t headway_compress(const uint16_t* w, int64_t rows, int64_t inputs, int64_t row, uint64_t table,
                                        char* out, int64_t* starts);
// The same rows again, whole; reads up to 63 bytes behind the last.
HEADWAY_EXPORT void headway_decompress(uint16_t* w, int64_t rows, int64_t inputs, const char* data, const int64_t* starts,
                                       uint64_t table);

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

// -- rows of a model beside products: [rows][width] of `type`, contiguous unless a row's step is given ----------------

// y = norm(x + residual) gain + shift, or its gradients where dy is given: dx (of x and of residual alike) with d_sum, what
// arrives at the sum from elsewhere, added; x is then that sum. `mean` is null for an RMS norm.
typedef struct {
  int64_t threads, rows, width, type, kind;
  double eps;
  const void *x, *residual, *gain, *shift;
  void *sum, *y;
  float *mean, *by;  // [rows], written forward and read backward
  const void *dy, *d_sum;
  void* dx;
  float *d_gain, *d_shift;  // [width] or null
} headway_norm;

// y = act(gate) up, or act(gate) where up is null; with dy the gradients, and y once more where it is not null.
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

// Tensors [batch][heads][slots][dim] rotated by the same positions; back: by the transpose.
typedef struct {
  int64_t threads, batch, slots, dim, type;
  headway_tensor x[HEADWAY_MOST_ROTATED], y[HEADWAY_MOST_ROTATED];
  int64_t heads[HEADWAY_MOST_ROTATED], count;
  const float *cos, *sin;  // [slots][rotated], table_batch from one row to the next
  int64_t table_batch, rotated, pairing, back;
  const int64_t* partner;  // [rotated], of PAIRS
} headway_rotation;

// losses[row] = -ln softmax(logits + bias)[target], 0 for a target below 0; with `gradient`, logits become softmax - onehot.
typedef struct {
  int64_t threads, rows, width, type;
  void* logits;
  const void* bias;  // [width] or null
  const int64_t* targets;
  float* losses;
  uint8_t* hits;  // whether the target is the largest, the first of equals; or null
  int64_t gradient;
} headway_entropy;

// Channel by channel, y_t = act(sum over w < window of weight[w] x_(t - w) + bias), within the document of t. With dy the
// gradients, and no y. y, dy and the gradients are contiguous.
typedef struct {
  int64_t threads, batch, slots, channels, window, type, act;  // act: NO_ACT or SILU
  const void* x;                                               // [batch][slots][channels]
  int64_t x_batch, x_row;
  const float *weight, *bias;  // [window][channels], [channels] or null
  const uint8_t* begins;       // [batch or 1][slots]: where a document begins, behind nothing; or null
  int64_t begins_batch;
  const void* past;  // [batch][window - 1][channels] before the first slot, or null: zeros
  void* y;
  const void* dy;
  void *dx, *d_past;           // d_past may be null
  float *d_weight, *d_bias;    // d_bias may be null
} headway_convolution;

// The gated delta rule. Of each head, S_t = diag(a_t) S_(t-1) + b_t k_t (v_t - k_t^T diag(a_t) S_(t-1)), o_t = scale S_t^T q_t;
// q and k are divided by sqrt(x.x + eps) unless eps < 0; nothing is subtracted from v_t unless it `erases`. With d_out or
// d_state the gradients, and no results. A key head serves heads / key_heads heads; gradients of q and k are of each head.
// Strides of q, k, v, out and their gradients may be any; others are contiguous.
typedef struct {
  int64_t threads, batch, heads, key_heads, slots, dim, dim_v, type;
  int64_t channels;  // of a decay: 1 or dim
  int64_t erases;
  double scale, eps;
  headway_tensor q, k, v, out;
  const float *log_decay, *beta;  // [batch][heads][slots][channels], [batch][heads][slots]
  const uint8_t* begins;          // [batch or 1][slots]: where a document begins, from no state; or null
  int64_t begins_batch;
  const float* past;  // [batch][heads][dim][dim_v] before the first slot, or null
  float* state;       // behind the last; may be `past`
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
