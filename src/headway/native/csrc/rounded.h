// Rows of inputs quantized to 8 bits, for products with panels of codes.
#pragma once
#include "linear.h"

namespace {

constexpr int GROUP = 32;  // inputs that share a scale

// Quantized rows: the largest absolute value of each group of 32 becomes 127. `tall` rows that are multiplied together are
// stored together.
struct Rounded {
  int32_t* q;      // [R / tall][groups][8][tall][WORDS]
  float* scale;    // [R / tall][groups][tall]
  int32_t* below;  // [R / tall][groups][tall]: -128 times the sum of q
  int32_t* early;  // the same for the first 16 of a group; or null
  float* mass;     // [R / tall][groups][tall]: -scale times the sum of q
  int64_t groups, tall;
  bool side_by_side;  // the words of a row's group are adjacent, not those of a column of rows: q [R / tall][groups][tall][8]

  int64_t at(int64_t row, int64_t group) const { return (row / tall * groups + group) * tall + row % tall; }

  // Quantizes one group of 32 inputs of a row.
  void round(int64_t row, int64_t group, const float* x) {
    vi most = {}, total = {};
    UNROLL for (int i = 0; i < GROUP; i += W) {
      vi size = (vi)load(x + i) & 0x7FFFFFFF;
      most = size > most ? size : most;
    }
    int32_t bits = largest_of(most);
    float largest;
    memcpy(&largest, &bits, 4);
    int32_t first = 0;
    float by = largest > 0x1p-100f ? 127 / largest : 0;  // tiny inputs count as 0; for infinity or NaN all codes are 0
    alignas(64) int8_t to[GROUP] = {};
    if (by > 0)
      UNROLL for (int i = 0; i < GROUP; i += W) {
        vi near = nearest(load(x + i) * by);
        total += near;
        write_bytes(to + i, near);
        if (early && i + W == GROUP / 2) first = sum_of_ints(total);
      }
    scale[at(row, group)] = largest / 127;  // infinite or NaN if an input is: then so are its products with 0
    const int32_t sum = sum_of_ints(total);
    below[at(row, group)] = -128 * sum;
    mass[at(row, group)] = -scale[at(row, group)] * (float)sum;
    if (early) early[at(row, group)] = -128 * first;
    const int64_t of_rows = side_by_side ? GROUP / 4 : 1, next = side_by_side ? 1 : tall;
    int32_t* words = q + ((row / tall * groups + group) * (GROUP / 4) * tall + row % tall * of_rows) * WORDS;
    for (int j = 0; j < GROUP / 4; j++) pack_four(words + j * next * WORDS, to + 4 * j);
  }
};

}  // namespace
