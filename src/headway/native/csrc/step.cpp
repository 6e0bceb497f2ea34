// headway_step: the operations of a model for its next tokens, run by one team of threads from the first product to the last.
#include <new>

#include "attention.h"
#include "experts.h"
#include "norm.h"
#include "products.h"
#include "prologue.h"
#include "states.h"
#include "team.h"

#include <omp.h>

namespace {

// One query, key or value head of a row, read from the output of its projection: norm, rotation, and the write to the cache.
struct HeadRow {
  const headway_heads& h;
  bool half;
  alignas(64) float x[WIDEST], y[WIDEST];

  explicit HeadRow(const headway_heads& heads) : h(heads), half(heads.type == HEADWAY_BFLOAT16) {}

  void read(const void* from, int64_t at, int width) { read_words(x, from, half, at, width); }

  void norm(const float* gain, int width) {
    if (!gain) return;
    double squares = 0;
    for (int i = 0; i < width; i++) squares += (double)x[i] * x[i];
    float by = (float)(1 / sqrt(squares / width + h.eps));
    for (int i = 0; i < width; i++) x[i] *= by;
    if (h.norm != HEADWAY_WIDE_RMS_NORM) round_words(x, half, width);
    for (int i = 0; i < width; i++) x[i] *= gain[i];
    round_words(x, half, width);
  }

  void rotate(int64_t row) {
    if (!h.cos) return;
    const float *cos = h.cos + row * h.rotation_row, *sin = h.sin + row * h.rotation_row;
    for (int i = 0; i < (int)h.rotated; i++) y[i] = x[i] * cos[i] + x[h.partner[i]] * sin[i];
    memcpy(x, y, (size_t)h.rotated * 4);
  }

  void write(void* to, int64_t at, int width) const {
    write_as((char*)to + at * (half ? 2 : 4), half, x, width, 1);
  }

  // Rounds as `write` does, then quantizes to 8 bits: the largest absolute value becomes 127. If it is infinite or NaN, so is
  // the scale, and codes that are not finite become 0.
  void write_codes(int8_t* to, float* scale, int width) {
    round_words(x, half, width);
    float top = 0;
    for (int i = 0; i < width; i++) top = fabsf(x[i]) > top || x[i] != x[i] ? fabsf(x[i]) : top;
    *scale = top / 127;
    for (int i = 0; i < width; i++) {
      const float code = rintf(x[i] / *scale);
      to[i] = fabsf(code) < INFINITY ? (int8_t)(code > 127 ? 127 : code < -127 ? -127 : code) : 0;
    }
  }
};

// Processes every head of every row: queries are written in place, keys and values to their slots of the cache.
void take_heads(const headway_heads& h, int64_t me, int64_t team) {
  HeadRow row(h);
  int64_t each = h.heads + 2 * h.kv_heads;
  Share mine(h.rows * each, me, team);
  for (int64_t i = mine.from; i < mine.to; i++) {
    int64_t r = i / each, head = i % each;
    if (head < h.heads) {
      row.read(h.q, r * h.q_row + head * h.dim, (int)h.dim);
      row.norm(h.q_gain, (int)h.dim);
      row.rotate(r);
      row.write(h.q, r * h.q_row + head * h.dim, (int)h.dim);
      continue;
    }
    head -= h.heads;
    bool is_key = head < h.kv_heads;
    head = is_key ? head : head - h.kv_heads;
    int width = (int)(is_key ? h.dim : h.dim_v);
    const headway_tensor& to = is_key ? h.k_cache : h.v_cache;
    row.read(is_key ? h.k : h.v, r * (is_key ? h.k_row : h.v_row) + head * width, width);
    if (is_key) row.norm(h.k_gain, width);
    if (is_key || h.rotates_values) row.rotate(r);
    if (h.slots[r] < 0) continue;
    const int64_t at = r / h.tokens * to.batch + head * to.head + h.slots[r] * to.slot;
    float* scale = is_key ? h.k_scale : h.v_scale;
    if (scale)
      row.write_codes((int8_t*)to.data + at, scale + head * h.scale_head + h.slots[r], width);
    else
      row.write(to.data, at, width);
  }
}

template <bool HALF, bool RMS>
int norm_rows(const headway_norm& c, int64_t me, int64_t team) {
  Norm<HALF, RMS> norm(c);
  Share mine(c.rows, me, team);
  for (int64_t row = mine.from; row < mine.to; row++) norm.forward(row);
  return 0;
}

int take_norm(const headway_norm& c, int64_t me, int64_t team) {
  return by_type(c.type, [&](auto half) {
    return c.kind == HEADWAY_RMS_NORM ? norm_rows<half.value, true>(c, me, team) : norm_rows<half.value, false>(c, me, team);
  });
}

// Multiplies every head of every row in place by its factors.
void take_factors(const headway_factors& c, int64_t me, int64_t team) {
  const bool half = c.type == HEADWAY_BFLOAT16;
  const int width = (int)c.dim;
  alignas(64) float x[WIDEST];
  auto sigmoid = [](float z) { return 1 / (1 + expf(-z)); };
  Share mine(c.rows * c.heads, me, team);
  for (int64_t i = mine.from; i < mine.to; i++) {
    const int64_t r = i / c.heads, head = i % c.heads, at = r * c.out_row + head * c.dim;
    auto times = [&](float factor) {
      for (int j = 0; j < width; j++) x[j] *= factor;
      round_words(x, half, width);
    };
    read_words(x, c.out, half, at, width);
    if (c.sink) times(sigmoid(c.lse[r * c.lse_row + head] - c.sink[head]));
    if (c.gate) {
      float gate;
      read_words(&gate, c.gate, half, r * c.gate_row + head, 1);
      gate = sigmoid(gate);
      round_words(&gate, half, 1);
      times(gate);
    }
    write_as((char*)c.out + at * (half ? 2 : 4), half, x, width, 1);
  }
}

// x += scale * y for every row; rows are independent, so each is one thread's.
void take_added(const headway_added& c, int64_t me, int64_t team) {
  const bool half = c.y.type == HEADWAY_BFLOAT16;
  Prologue prologue(c.y);
  alignas(64) float x[2 * UNIT], y[2 * UNIT];
  Share mine(c.rows, me, team);
  for (int64_t r = mine.from; r < mine.to; r++)
    for (int64_t first = 0; first < c.y.inputs; first += 2 * UNIT) {
      const int count = (int)(c.y.inputs - first < 2 * UNIT ? c.y.inputs - first : 2 * UNIT);
      const int64_t at = r * c.y.inputs + first;
      prologue.read(y, r, first, count);
      read_words(x, c.x, half, at, count);
      for (int i = 0; i < count; i++) y[i] *= (float)c.scale;
      round_words(y, half, count);
      for (int i = 0; i < count; i++) x[i] += y[i];
      write_as((char*)c.x + at * (half ? 2 : 4), half, x, count, 1);
    }
}

// A step: a list of operations, checked when it is constructed, then run by a team.
struct Step {
  const headway_op* ops;
  int64_t count;
  Scratch& scratch;
  Mixture& mixture;
  int failed = 0;
  headway_call call;
  alignas(64) char room[sizeof(Forward<false>) + sizeof(Forward<true>)];

  Step(const headway_op* all, int64_t n, Scratch& memory, Mixture& experts)
      : ops(all), count(n), scratch(memory), mixture(experts) {
    look();
  }

 private:
  // Checks the operations, and allocates memory for the largest product, so that none grows it while other threads read.
  void look() {
    for (int64_t i = 0; i < count && !failed; i++) failed = wrong(ops[i]);
  }
  int wrong(const headway_op& op) {
    auto known = [](bool known) { return known ? 0 : 3; };
    switch (op.kind) {
      case HEADWAY_PRODUCTS: {
        const auto& c = *(const headway_products*)op.of;
        const int code = Products::unknown(c);
        return code || Products(c).ready(scratch) ? code : 2;
      }
      case HEADWAY_HEADS: {
        const auto& h = *(const headway_heads*)op.of;
        return known(h.dim <= WIDEST && h.dim_v <= WIDEST);
      }
      case HEADWAY_ATTENTION: return unknown(*(const headway_call*)op.of);
      case HEADWAY_NORM: return by_type(((const headway_norm*)op.of)->type, [](auto) { return 0; });
      case HEADWAY_SUMS: {
        const auto& c = *(const headway_sums*)op.of;
        return known(c.dim <= WIDEST && c.dim_v <= WIDEST && c.feature <= HEADWAY_COSINE && c.key_feature <= HEADWAY_COSINE);
      }
      case HEADWAY_FACTORS: return known(((const headway_factors*)op.of)->dim <= WIDEST);
      case HEADWAY_ADDED: return by_type(((const headway_added*)op.of)->y.type, [](auto) { return 0; });
      case HEADWAY_EXPERTS: return Mixture::unknown(*(const headway_experts*)op.of);
      case HEADWAY_TAPS: {
        const auto& c = *(const headway_taps*)op.of;
        return known(c.act == HEADWAY_NO_ACT || c.act == HEADWAY_SILU) | by_type(c.type, [](auto) { return 0; });
      }
      case HEADWAY_DELTA: {
        const auto& c = *(const headway_delta_step*)op.of;
        const bool gated = c.gate_act == HEADWAY_SILU || c.gate_act == HEADWAY_SIGMOID;
        return known(gated && c.dim <= WIDEST && c.dim_v <= WIDEST && c.dim_v % UNIT == 0) |
               by_type(c.type, [](auto) { return 0; });
      }
      default: return 3;
    }
  }

  // Attention: one thread constructs the call from the operation's KV cache, all compute it.
  template <bool HALF>
  int attend(const headway_op& op) {
    Forward<HALF>* forward = (Forward<HALF>*)room;
#pragma omp single
    {
      call = *(const headway_call*)op.of;
      call.k.data = op.k, call.v.data = op.v, call.k_scale = op.k_scale, call.v_scale = op.v_scale;
      new (room) Forward<HALF>(call);
    }
    forward->compute();
#pragma omp barrier
#pragma omp single
    {
      failed |= forward->failed;
      forward->~Forward<HALF>();
    }
    return 0;
  }

  static void taps(const headway_taps& c, int64_t me, int64_t team) {
    by_type(c.type, [&](auto half) {
      constexpr bool HALF = decltype(half)::value;
      return c.act == HEADWAY_SILU ? take_taps<HALF, true>(c, me, team) : take_taps<HALF, false>(c, me, team);
    });
  }
  void mix(const headway_experts& c, int64_t me, int64_t team) {
#pragma omp single
    failed |= mixture.begin(c);
    if (!failed) mixture.run(me, team, failed);
  }

 public:
  void run() {
    int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
    for (int64_t i = 0; i < count; i++) {
      const void* of = ops[i].of;
      switch (ops[i].kind) {
        case HEADWAY_PRODUCTS: {
          Products products(*(const headway_products*)of);
          products.ready(scratch);
          products.prepare(me, team);
#pragma omp barrier
          products.multiply(me, team);
          break;
        }
        case HEADWAY_HEADS: take_heads(*(const headway_heads*)of, me, team); break;
        case HEADWAY_NORM: take_norm(*(const headway_norm*)of, me, team); break;
        case HEADWAY_SUMS: Sums(*(const headway_sums*)of).run(me, team); break;
        case HEADWAY_FACTORS: take_factors(*(const headway_factors*)of, me, team); break;
        case HEADWAY_ADDED: take_added(*(const headway_added*)of, me, team); break;
        case HEADWAY_EXPERTS: mix(*(const headway_experts*)of, me, team); break;
        case HEADWAY_TAPS: taps(*(const headway_taps*)of, me, team); break;
        case HEADWAY_DELTA: {
          const auto& c = *(const headway_delta_step*)of;
          NoSubnormals while_it_runs;
          by_type(c.type, [&](auto half) { return DeltaStep<half.value>(c).run(me, team), 0; });
          break;
        }
        default: by_words(*(const headway_call*)of, [&](auto half) { return attend<half.value>(ops[i]); });
      }
#pragma omp barrier
    }
  }
};

}  // namespace

extern "C" int headway_step(const headway_op* ops, int64_t count, int64_t threads) {
  static thread_local Scratch scratch;
  static thread_local Mixture mixture;
  Step step(ops, count, scratch, mixture);
  if (step.failed) return step.failed;
#pragma omp parallel num_threads(team_of(threads, INT64_MAX))
  step.run();
  return step.failed;
}
