// Operations on scores (steps on the scaled scores) and on weights (dropout) between the two products.
#pragma once
#include "blocks.h"

namespace {

// A hash of 32 bits to 32 bits, for dropout.
INLINE uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// The steps of a call for the queries of a tile and the keys of one block.
struct Extra {
  const headway_call* c;
  Tokens queries, keys;
  int64_t b, begin;  // row of the batch, first place of the block
  BlockKeys at;

  bool drops() const { return c->dropout > 0; }
  bool steps() const { return c->score_count > 0 || drops(); }

  // Returns whether all queries of a tile see all keys of the block at key k of run r.
  bool whole(int32_t r, int64_t k) const { return c->plan.full[r] && c->plan.end[r] - k >= BLOCK; }

  // Moves to the block at key k of run r of the plan. Returns `seen`, for each of the n queries from `place` on the bits of the
  // keys that it sees, or null if all see all.
  const uint64_t* look(int32_t r, int64_t k, int64_t place, int64_t n, uint64_t* seen) {
    if (steps() || !whole(r, k)) at.read(keys, k), begin = k;
    if (whole(r, k)) return nullptr;
    uint64_t inside = first_bits(c->plan.end[r] - k);
    for (int64_t i = 0; i < n; i++) seen[i] = inside;
    if (!c->plan.full[r])
      Program{c->program, c->instructions}.visible<TILE>(at, queries, place, n, queries.document || keys.document, seen);
    return seen;
  }

  // s [panels * 16]: raw scores become the scores after all steps, in natural units (not base 2).
  void apply(int head, int place, int first, int panels, float* s) const {
    int32_t q = queries.index[place];
    for (int p = 0; p < panels; p++) {
      const int32_t* k = at.index + (first + p) * UNIT;
      float* x = s + p * UNIT;
      for (int j = 0; j < UNIT; j++) x[j] *= (float)c->scale;
      for (int64_t n = 0; n < c->score_count; n++) one(c->scores[n], head, q, k, x);
    }
  }

  // Gradients of the steps. ds [panels * 16]: gradients by the final scores become those by the scaled scores; the gradients of
  // a step's values are added to gradients[step]. `raw` are the scores before `apply`.
  void pull_back(int head, int place, int first, int panels, const float* raw, float* ds, float* const* gradients) const {
    constexpr int MOST = 8;
    int32_t q = queries.index[place];
    for (int p = 0; p < panels; p++) {
      const int32_t* k = at.index + (first + p) * UNIT;
      float x[UNIT], tape[MOST][UNIT], *g = ds + p * UNIT;
      for (int j = 0; j < UNIT; j++) x[j] = raw[p * UNIT + j] * (float)c->scale;
      for (int64_t n = 0; n < c->score_count; n++) {
        one(c->scores[n], head, q, k, x);
        memcpy(tape[n], x, sizeof x);
      }
      for (int64_t n = c->score_count - 1; n >= 0; n--) {
        const headway_score& step = c->scores[n];
        if (step.kind == HEADWAY_SOFT_CAP) {
          for (int j = 0; j < UNIT; j++) {
            float y = tape[n][j] / step.values[0];
            g[j] *= 1.0f - y * y;
          }
        } else if (step.kind == HEADWAY_DISTANCE && gradients[n]) {
          float* row = gradients[n] + head * (2 * step.reach + 1) + step.reach;
          for (int j = 0; j < UNIT; j++)
            if (g[j] != 0) row[clamp(k[j] - q, (int32_t)step.reach)] += g[j];
        }
      }
    }
  }

  // Applies one step to the scores of query q and 16 keys.
  static void one(const headway_score& step, int head, int32_t q, const int32_t* k, float* x) {
    if (step.kind == HEADWAY_SOFT_CAP) {
      for (int j = 0; j < UNIT; j++) x[j] = step.values[0] * tanhf(x[j] / step.values[0]);
    } else if (step.kind == HEADWAY_SLOPE) {
      for (int j = 0; j < UNIT; j++) x[j] -= step.values[head] * fabsf((float)(k[j] - q));
    } else {
      const float* row = step.values + head * (2 * step.reach + 1) + step.reach;
      for (int j = 0; j < UNIT; j++) x[j] += row[clamp(k[j] - q, (int32_t)step.reach)];
    }
  }
  static int32_t clamp(int32_t x, int32_t most) { return x < -most ? -most : x > most ? most : x; }

  // Returns the hash of (batch row, head, query) for dropout; `keeps` returns whether a (query, key) is kept.
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

  // Writes the factors [panels * 16] of the weights: 1 / (1 - p) if kept, 0 if dropped.
  void keep(int head, int place, int first, int panels, float* factors) const {
    uint32_t row = word(head, place);
    float more = (float)(1.0 / (1.0 - c->dropout));
    for (int i = 0; i < panels * UNIT; i++) factors[i] = keeps(row, begin + first * UNIT + i) ? more : 0.0f;
  }
};

}  // namespace
