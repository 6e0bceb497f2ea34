// The C interface of the native kernels, as C++ has it: attention and products here, rows of a model beside products in
// headway_rows.h, steps of decoding in headway_step.h. One shared object per CPU level exports these names. Strides are in
// elements; the last dimension of every tensor is contiguous.
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

}

#include "headway_rows.h"
#include "headway_step.h"
