// Masks: which of the 64 keys of a block a query sees, one bit per key, from the pattern's program and the tokens.
#pragma once
#include "headway.h"
#include "vec.h"

namespace {

constexpr uint64_t ALL = ~0ull;
constexpr int DEEPEST = 16;

// Returns a mask of the n lowest bits.
INLINE uint64_t first_bits(int64_t n) { return n >= 64 ? ALL : n <= 0 ? 0 : (1ull << n) - 1; }

// The panels of a block from the first to the last key that some of R rows sees; bits [R][panels] are the masks of each row.
struct Span {
  int first, count;  // count 0: nothing is seen
  bool all;          // every row sees every key of the block
};
INLINE Span span_of(const uint64_t* rows, int count, uint16_t (*bits)[4]) {
  uint64_t some = 0, all = ALL;
  for (int r = 0; r < count; r++) some |= rows[r], all &= rows[r];
  if (!some) return {0, 0, false};
  int first = __builtin_ctzll(some) / UNIT, last = (63 - __builtin_clzll(some)) / UNIT;
  for (int r = 0; r < count; r++) {
    uint64_t x = rows[r] >> first * UNIT;
    memcpy(bits[r], &x, 8);
  }
  return {first, last - first + 1, all == ALL};
}

// Returns a bit for each key of a block: test(key).
template <class Test>
INLINE uint64_t each_key(const int32_t* keys, Test test) {
  uint64_t bits = 0;
  UNROLL for (int i = 0; i < BLOCK / W; i++) bits |= (uint64_t)bits_of(test(load_int(keys + i * W))) << (i * W);
  return bits;
}

// Returns floor(x / by) for |x| < 2^40. x + 1/2 is never so close to a multiple of `by` that rounding crosses it.
INLINE int64_t floor_of(int64_t x, double inverse_of_by) { return (int64_t)floor(((double)x + 0.5) * inverse_of_by); }

// The query or key tokens of one batch row.
struct Tokens {
  const int32_t *index, *document;
  const uint8_t* global;
  const int32_t* order;
  int64_t count;

  static Tokens of(const headway_side& s, int64_t b) {
    int64_t at = s.rows > 1 ? b * s.count : 0;
    return {s.index + at, s.document ? s.document + at : nullptr, s.global ? s.global + at : nullptr,
            s.order ? s.order + at : nullptr, s.count};
  }
  int64_t slot(int64_t place) const { return order ? order[place] : place; }
};

// The keys of one block, padded with empty slots. Most blocks are regular: index i is first + i * step.
struct BlockKeys {
  alignas(64) int32_t index[BLOCK], document[BLOCK];
  uint64_t global, valid;
  int32_t first, step;  // step 0: the block is not regular
  bool one_document;

  void read(const Tokens& t, int64_t begin) {
    int64_t have = t.count - begin < BLOCK ? t.count - begin : BLOCK;
    memcpy(index, t.index + begin, (size_t)have * 4);
    for (int64_t i = have; i < BLOCK; i++) index[i] = -1;
    valid = each_key(index, [](vi k) { return k >= 0; });
    one_document = true;
    if (t.document) {
      memcpy(document, t.document + begin, (size_t)have * 4);
      for (int64_t i = have; i < BLOCK; i++) document[i] = 0;
      int32_t d = document[0];
      one_document = (each_key(document, [=](vi x) { return x == d; }) | ~valid) == ALL;
    } else {
      document[0] = 0;
    }
    global = 0;
    if (t.global)
      for (int64_t i = 0; i < have; i++) global |= (uint64_t)(t.global[begin + i] != 0) << i;
    first = index[0], step = have > 1 ? index[1] - index[0] : 1;
    vi way;
    for (int i = 0; i < W; i++) way[i] = i;
    uint64_t even = 0;
    if (step > 0)
      for (int i = 0; i < BLOCK / W; i++)
        even |= (uint64_t)bits_of(load_int(index + i * W) == (way + i * W) * step + first) << (i * W);
    if (step <= 0 || (even & valid) != valid || valid == 0 || (valid & (valid + 1))) step = 0;
    inverse = 1.0 / (step ? step : 1);
  }

  // Returns the keys with low <= index <= high. Regular blocks need no comparison per key: for first 10, step 2 and
  // between(13, 20), keys from ceil(3 / 2) = 2 up to floor(10 / 2) = 5, bits 2 .. 5.
  uint64_t between(int64_t low, int64_t high) const {
    if (step == 1) return first_bits(high - first + 1) & ~first_bits(low - first);
    if (step > 1) return first_bits(floor_of(high - first, inverse) + 1) & ~first_bits(-floor_of(first - low, inverse));
    int32_t l = low < INT32_MIN ? INT32_MIN : (int32_t)low, h = high > INT32_MAX ? INT32_MAX : (int32_t)high;
    return each_key(index, [=](vi x) { return (x >= l) & (x <= h); });
  }

  // Returns the keys with (index - query) % by == 0.
  uint64_t aligned(int32_t query, int32_t by) const {
    if (step && step % by == 0) {
      int64_t away = (int64_t)query - first;
      return floor_of(away, 1.0 / by) * by == away ? ALL : 0;
    }
    uint64_t bits = 0;
    for (int j = 0; j < BLOCK; j++) bits |= (uint64_t)((index[j] - query) % by == 0) << j;
    return bits;
  }

 private:
  double inverse;  // 1 / step
};

// Evaluates a pattern's program for the queries of a tile and one block of keys.
struct Program {
  const int32_t* code;
  int64_t count;

  // seen [n] &= the keys that the queries at places begin .. begin + n - 1 see. The stack holds a mask per query.
  template <int MOST>
  void visible(const BlockKeys& k, const Tokens& queries, int64_t begin, int64_t n, bool documents,
               uint64_t* seen) const {
    uint64_t stack[DEEPEST][MOST];
    const int32_t* q = queries.index + begin;
    int top = -1;
    for (int64_t i = 0; i < count; i++) {
      const int32_t* c = code + 4 * i;
      if (c[0] < HEADWAY_AND) top++;
      uint64_t *x = c[0] < HEADWAY_AND ? stack[top] : stack[top - 1], *y = stack[top];
      auto set = [=](auto f) __attribute__((always_inline)) { for (int64_t j = 0; j < n; j++) x[j] = f(j); };
      switch (c[0]) {
        case HEADWAY_FULL: set([](int64_t) { return ALL; }); break;
        case HEADWAY_CAUSAL: set([&](int64_t j) { return k.between(0, q[j]); }); break;
        case HEADWAY_WINDOW:
          set([&](int64_t j) { return k.between((int64_t)q[j] + c[1], (int64_t)q[j] + c[2]); });
          if (c[3] > 1) set([&](int64_t j) { return x[j] ? x[j] & k.aligned(q[j], c[3]) : 0; });
          break;
        case HEADWAY_SINK: set([sinks = k.between(0, (int64_t)c[1] - 1)](int64_t) { return sinks; }); break;
        case HEADWAY_CHUNK:
          set([&](int64_t j) {
            const int64_t first = q[j] / c[1] * (int64_t)c[1];
            return k.between(first, first + c[1] - 1);
          });
          break;
        case HEADWAY_GLOBAL_KEYS: set([&](int64_t) { return k.global; }); break;
        case HEADWAY_GLOBAL_QUERIES:
          set([&](int64_t j) { return queries.global && queries.global[begin + j] ? ALL : 0; });
          break;
        case HEADWAY_AND: set([=](int64_t j) { return x[j] & y[j]; }), top--; break;
        case HEADWAY_OR: set([=](int64_t j) { return x[j] | y[j]; }), top--; break;
      }
    }
    for (int64_t j = 0; j < n; j++) seen[j] &= q[j] < 0 ? 0 : stack[0][j] & k.valid;
    if (!documents) return;
    for (int64_t j = 0; j < n; j++) {
      int32_t d = queries.document ? queries.document[begin + j] : 0;
      if (k.one_document)
        seen[j] &= d == k.document[0] ? ALL : 0;
      else
        seen[j] &= each_key(k.document, [=](vi x) { return x == d; });
    }
  }
};

}  // namespace
