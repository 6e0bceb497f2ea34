// The C interface of the native kernels, in C++: attention and matrix products here, other operations on rows in
// headway_rows.h, decoding steps in headway_step.h. There is one shared object per CPU level, and each exports these names.
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

// An attention pattern is a program for a stack machine in postfix order; each instruction is four int32: code, arguments.
// A causal sliding window with sinks: WINDOW -127 0 1, SINK 4, OR, CAUSAL, AND.
enum {
  HEADWAY_FULL = 0,
  HEADWAY_CAUSAL = 1,
  HEADWAY_WINDOW = 2,  // first and last of key - query, step: every step-th key
  HEADWAY_SINK = 3,    // number of first tokens
  HEADWAY_GLOBAL_KEYS = 4,
  HEADWAY_GLOBAL_QUERIES = 5,
  HEADWAY_CHUNK = 6,  // length: queries see the keys of their own chunk
  HEADWAY_AND = 7,
  HEADWAY_OR = 8,
};

// Steps on the scaled scores, applied in order.
enum {
  HEADWAY_SOFT_CAP = 0,  // values[0]: cap
  HEADWAY_DISTANCE = 1,  // values[H][2 * reach + 1]: adds a bias by clamp(key - query, -reach, reach)
  HEADWAY_SLOPE = 2,     // values[H]: subtracts slope * |key - query|
};

// A tensor [batch][heads][slots][width]: its address, and its strides in elements.
typedef struct {
  void* data;
  int64_t batch, head, slot;
} headway_tensor;

// The tokens of the queries or of the keys of a call, in the order of blocks. order[place] is the slot of the tensors that
// holds the token at a place.
typedef struct {
  const int32_t* index;     // [rows][count] position of each token, -1 for an empty slot
  const int32_t* document;  // [rows][count] document of each token, or null
  const uint8_t* global;    // [rows][count] whether a token is global, or null
  const int32_t* order;     // [rows][count] slot of each place, or null if they are the same
  int64_t rows, count;
} headway_side;

// For each tile of queries, the runs of key blocks that it reads. The runs of tile t of batch row b are those from
// first[b * tiles + t] up to first[b * tiles + t + 1]; rows = 1: all batch rows share them.
typedef struct {
  const int32_t* first;  // [rows * tiles + 1]
  const int32_t* begin;  // [runs] first key of each, a multiple of the block width
  // [runs] key after the last of each; `full`: whether every query of the tile sees every key of the run
  const int32_t* end;
  const uint8_t* full;
  int64_t rows, tiles, tile;
  const int32_t* alike;  // [rows of the batch] number of leading keys in the same slots as those of the row before, or null
} headway_plan;

enum { HEADWAY_MOST_SCORES = 8 };  // for which the backward has room

typedef struct {
  int64_t kind, reach;
  const float* values;
  float* gradient;  // of the same shape as values, or null; the backward adds to it
} headway_score;

typedef struct {
  int64_t threads;
  int64_t batch, heads, kv_heads, dim, dim_v;
  int64_t type;     // of q, out and the gradients: FLOAT32 or BFLOAT16
  int64_t kv_type;  // of k and v: equal to `type`, or INT8 with one scale per slot and head
  headway_tensor q, k, v, out;
  const float *k_scale, *v_scale;  // of INT8: the scale of batch row b, kv head h, slot s is at b scale_batch + h scale_head + s
  int64_t scale_batch, scale_head;
  float* lse;                      // [B][H][T] logsumexp of the scores, natural logarithm
  double scale;
  headway_side queries, keys;
  headway_plan plan;
  const int32_t* program;
  int64_t instructions;
  const headway_score* scores;
  int64_t score_count;
  double dropout;
  int64_t seed, first_key;        // first_key: place of key 0 among the keys of all parts of the call
  const int64_t* head_ids;        // [H] numbers of the heads for dropout, or null for 0..H-1
  headway_tensor d_out, dq, dk, dv;
  const float* d_lse;  // [B][H][T] gradient of lse
} headway_call;

// Both return 0, or an error: 2 out of memory, 3 a type, tile or width that this library does not support.
HEADWAY_EXPORT int headway_forward(const headway_call* call);
HEADWAY_EXPORT int headway_backward(const headway_call* call);

// Makes the plan of rows of one query each, whose keys are in order: key i is token i of the row. `index` [rows] are the
// positions of the queries. Fills first [rows + 1], and begin, end and full up to `room` runs. Returns the number of runs, or
// -1 if there are more than `room`.
HEADWAY_EXPORT int64_t headway_plan_rows(const int32_t* program, int64_t instructions, const int32_t* index, int64_t rows,
                                         int32_t* first, int32_t* begin, int32_t* end, uint8_t* full, int64_t room);

// The tables that dequantize NF4: a weight is values[code] * scale, with scale = map[code of its block] * largest + offset. A
// block is 64 inputs of an output; each 256 blocks of the whole matrix, counted output by output, share one `largest`.
typedef struct {
  const float* values;         // [16]
  const uint8_t* scales;       // [outputs][inputs / 64] code of each block's scale
  const float *map, *largest;  // map [256]; largest: one for each 256 blocks
  float offset;
  int64_t first, row;  // of a shard: number of its first block in the whole matrix, and blocks per row of the whole matrix
} headway_nf4;

// A weight matrix [outputs][inputs]. FLOAT32 and BFLOAT16 are stored row by row, COMPRESSED as compressed.h describes; the
// integer types in panels of 16 outputs, one group of 32 inputs after the other. A group begins with its codes, unsigned:
// [8][16][4] bytes, or for 4 bits [4][16][4], whose low halves are the four low bits of quads 0 1 4 5 (a quad is four inputs)
// and whose high halves those of quads 2 3 6 7. Then follow
// INT8, INT4: 16 scales in float16 if `scales`, then 16 zeros if `zeros` (else the zero is 128, or 8).
// Q4_K, Q5_K, Q6_K, for multiples of 256 inputs: before each eight groups 16 d in float16, and 16 dmin except for Q6_K; in a
// group the bits above the low four, [1][16][4] or [2][16][4] bytes with those of the first quad lowest, then 16 bytes s and
// 16 bytes t (w = d s code - dmin t); for Q6_K s is signed, 16 of the first 16 inputs and 16 of the others
// (w = d s (code - 32)).
// NF4, for multiples of 64 inputs, is stored row by row, two codes in a byte, the first in its high bits.
typedef struct {
  int64_t type, outputs;
  const void* weights;
  int64_t step;  // bytes from one row or panel to the next
  int64_t scales, zeros;  // whether panels have scales, and zeros
  const float *factor, *bias;  // [outputs] or null: out = factor * sum + bias
  void* out;                   // [rows][outputs] in the type of x
  int64_t out_row;
  int64_t add;  // whether to add to what `out` holds
  const int64_t* starts;  // COMPRESSED: [outputs] offset of each row in bytes from `weights`
  uint64_t table;         // COMPRESSED: the exponents of codes 0..6, a byte each
  const headway_nf4* nf4;
} headway_matrix;

// RMS norms round before and after the gain; wide RMS norms round after it only.
enum { HEADWAY_NO_NORM = 0, HEADWAY_RMS_NORM = 1, HEADWAY_LAYER_NORM = 2, HEADWAY_WIDE_RMS_NORM = 3 };
enum { HEADWAY_NO_ACT = 0, HEADWAY_SILU = 1, HEADWAY_GELU = 2, HEADWAY_GELU_TANH = 3, HEADWAY_RELU = 4, HEADWAY_SIGMOID = 5 };

// Multiplies rows of x, or of act(norm(x)) * gate, by each of the matrices; intermediate results are rounded to the type of
// x. For INT8, INT4 and the K types rows are quantized to 8 bits in groups of 32.
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
  const void* gate;  // [rows][inputs] of the type of x, or null
} headway_products;

HEADWAY_EXPORT int headway_linear(const headway_products* call);

// Counts exponents: adds to counts[exponent] the number of bf16 weights with it; w [rows][inputs] with row stride `row`.
HEADWAY_EXPORT void headway_exponents(const uint16_t* w, int64_t rows, int64_t inputs, int64_t row, int64_t* counts);
// Compresses rows of bf16 weights to COMPRESSED: writes the bytes to `out` and the offset of each row to `starts`, unless
// they are null. Returns the number of bytes.
HEADWAY_EXPORT int64_t headway_compress(const uint16_t* w, int64_t rows, int64_t inputs, int64_t row, uint64_t table,
                                        char* out, int64_t* starts);
// Decompresses such rows to w [rows][inputs]; reads up to 63 bytes beyond the last.
HEADWAY_EXPORT void headway_decompress(uint16_t* w, int64_t rows, int64_t inputs, const char* data, const int64_t* starts,
                                       uint64_t table);

}

#include "headway_rows.h"
#include "headway_step.h"
