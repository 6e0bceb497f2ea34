// What happens to scores between the products (steps on the scaled scores) and to weights (dropout).
#pragma once
#include "blocks.h"

namespace {

INLINE uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// The steps of a call for the keys of one block.
struct Extra {
  const headway_call* c;
  Tokens queries, keys;
  int64_t b, begin;  // row of the batch, first place of the block
  BlockKeys at;

  bool drops() const { return c->dropout > 0; }

  // raw [panels * 16] -> scaled scores after all steps, natural units. `slope`: their derivative by the scaled
  // score, and by what step n has added, after[n] (each [panels * 16] or null).
  void apply(int head, int place, int first, int count, float* s, float* slope) const {
    int32_t q = queries.index[place];
    for (int p = 0; p < count; p++) {
      const int32_t* k = at.index + (first + p) * UNIT;
      float *x = s + p * UNIT, *d = slope ? slope + p * UNIT : nullptr;
      for (int j = 0; j < UNIT; j++) x[j] *= (float)c->scale;
      if (d)
        for (int j = 0; j < UNIT; j++) d[j] = 1.0f;
      for (int64_t n = 0; n < c->score_count; n++) one(c->scores[n], head, q, k, x, d);
    }
  }

  static void one(const headway_score& step, int head, int32_t q, const int32_t* k, float* x, float* d) {
    if (step.kind == HEADWAY_SOFT_CAP) {
      float cap = step.values[0];
      for (int j = 0; j < UNIT; j++) {
        float y = tanhf(x[j] / cap);
        x[j] = cap * y;
        if (d) d[j] *= 1.0f - y * y;
      }
    } else if (step.kind == HEADWAY_SLOPE) {
      float slope = step.values[head];
      for (int j = 0; j < UNIT; j++) x[j] -= slope * fabsf((float)(k[j] - q));
    } else {
      const float* row = step.values + head * (2 * step.reach + 1) + step.reach;
      for (int j = 0; j < UNIT; j++) x[j] += row[clamp(k[j] - q, (int32_t)step.reach)];
    }
  }
  static int32_t clamp(int32_t x, int32_t most) { return x < -most ? -most : x > most ? most : x; }

  // Adds ds [panels * 16] (derivative by the final scores) to the gradients of the steps' values.
  void collect(int head, int place, int first, int count, const float* ds, const float* raw) const;

  uint32_t word(int head, int place) const {
    uint32_t low = (uint32_t)c->seed, high = (uint32_t)((uint64_t)c->seed >> 32);
    uint32_t id = (uint32_t)(c->head_ids ? c->head_ids[head] : head);
    uint32_t x = mix((mix((uint32_t)b ^ low) ^ id) + high);
    return mix(x + (uint32_t)queries.slot(place) * 0x9E3779B1u);
  }
  bool keeps(uint32_t row, int64_t place) const {
    uint32_t key = place < keys.count ? (uint32_t)(keys.slot(place) + c->first_key) : 0;
    return mix(row ^ mix(key)) >= (uint32_t)(c->dropout * 4294967296.0);
  }

  // Weights [panels * 16] times 1 / (1 - p) where kept and 0 where dropped.
  void drop(int head, int place, int first, int count, bool half, void* weights) const {
    uint32_t row = word(head, place);
    float more = (float)(1.0 / (1.0 - c->dropout));
    for (int i = 0; i < count * UNIT; i++) {
      float keep = keeps(row, begin + first * UNIT + i) ? more : 0.0f;
      if (half)
        ((uint16_t*)weights)[i] = to_bf16(from_bf16(((uint16_t*)weights)[i]) * keep);
      else
        ((float*)weights)[i] *= keep;
    }
  }
};

}  // namespace
