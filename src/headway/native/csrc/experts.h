// A mixture of experts for a few rows: rows are sorted by expert, and each chosen expert is read once.
#pragma once
#include <math.h>

#include <algorithm>
#include <vector>

#include "products.h"

namespace {

// The state of a mixture, kept by the calling thread from one to the next; a team shares it.
struct Mixture {
  headway_experts c;
  int64_t width, hidden, pairs, size;  // pairs: number of (row, expert) pairs; size: bytes of an element
  bool half;
  Scratch memory, products_memory;
  float *floats, *logits;  // rows h in float32 [rows][width], and their logits and then scores [rows][count]
  char *h, *sorted, *first, *second, *made;

  // The rows of one expert.
  struct Part {
    int64_t expert, from, count;  // from, count: its rows among the sorted ones
    char* room;                   // memory of its products
  };
  std::vector<Part> parts;
  std::vector<int64_t> chosen, place;  // of each pair, the row's best expert first: the expert, and the row among the sorted
  std::vector<float> weights;

  static int unknown(const headway_experts& c) {
    const headway_matrix* every[] = {c.up, c.down, c.gate};
    for (const headway_matrix* matrices : every) {
      headway_products p = c.in;
      p.inputs = matrices == c.down ? c.hidden : c.in.inputs, p.matrices = matrices, p.count = matrices ? c.count : 0;
      if (int code = Products::unknown(p)) return code;
    }
    return c.top > c.count ? 3 : 0;
  }

  // Called by one thread before the team runs; returns 2 if out of memory.
  int begin(const headway_experts& call) {
    c = call, width = c.in.inputs, hidden = c.hidden, pairs = c.rows * c.top;
    half = c.in.type == HEADWAY_BFLOAT16, size = half ? 2 : 4;
    chosen.resize(pairs), place.resize(pairs), weights.resize(pairs);
    const int64_t sizes[] = {c.rows * width * 4, c.rows * c.count * 4, c.rows * width * size, pairs * width * size,
                             pairs * hidden * size, pairs * hidden * size, pairs * width * size};
    int64_t sum = 0;
    for (int64_t bytes : sizes) sum += ::rounded(bytes, 64);
    if (!memory.grow(sum)) return 2;
    char *next = memory.at, **to[] = {(char**)&floats, (char**)&logits, &h, &sorted, &first, &second, &made};
    for (int i = 0; i < 7; i++) *to[i] = next, next += ::rounded(sizes[i], 64);
    return 0;
  }

  // Called by each thread of the team; see headway_experts.
  void run(int64_t me, int64_t team, int& failed) {
    Share rows(c.rows, me, team);
    Prologue prologue(c.in);
    for (int64_t r = rows.from; r < rows.to; r++)
      for (int64_t i = 0; i < width; i += 2 * UNIT) {
        const int some = (int)(width - i < 2 * UNIT ? width - i : 2 * UNIT);
        prologue.read(floats + r * width + i, r, i, some);
        write_as(h + (r * width + i) * size, half, floats + r * width + i, some, 1);
      }
#pragma omp barrier
    Share scores(c.rows * c.count, me, team);
    for (int64_t i = scores.from; i < scores.to; i++) logits[i] = score(i / c.count, i % c.count);
#pragma omp barrier
#pragma omp single
    if (!route()) failed = 2;
    if (failed) return;
    Share sorting(pairs, me, team);
    for (int64_t i = sorting.from; i < sorting.to; i++)
      memcpy(sorted + place[i] * width * size, h + i / c.top * width * size, (size_t)(width * size));
#pragma omp barrier
    multiply(me, team, false);
    multiply(me, team, true);
    for (int64_t r = rows.from; r < rows.to; r++) add_up(r);
  }

 private:
  // Returns the logit of an expert for a row.
  float score(int64_t row, int64_t expert) const {
    const float *x = floats + row * width, *w = c.router + expert * width;
    Sum sum;
    each_words(width, [&](int64_t i, int some, int k) __attribute__((always_inline)) {
      sum.parts[k] += get<false>(x, i, some) * get<false>(w, i, some);
    });
    return sum.total() + (c.router_bias ? c.router_bias[expert] : 0);
  }

  // Chooses the experts of each row and their weights, then sorts the rows by expert, and allocates memory for the products. Top
  // 1 of three rows, experts 2 0 2: counts are 1 0 2, experts begin at 0 1 1, and the rows are placed at 1 0 2.
  bool route() {
    for (int64_t r = 0; r < c.rows; r++) choose(r);
    parts.clear();
    std::vector<int64_t> begins(c.count + 1);
    for (int64_t e : chosen) begins[e + 1]++;
    int64_t bytes = 0;
    for (int64_t e = 0; e < c.count; e++) {
      const int64_t count = begins[e + 1];
      begins[e + 1] += begins[e];
      if (!count) continue;
      parts.push_back({e, begins[e], count, nullptr});
      bytes += room_of(parts.back());
    }
    for (int64_t i = 0; i < pairs; i++) place[i] = begins[chosen[i]]++;
    if (!products_memory.grow(bytes)) return false;
    char* next = products_memory.at;
    for (Part& part : parts) part.room = next, next += room_of(part);
    return true;
  }

  // Computes the scores of row r and chooses its experts.
  void choose(int64_t r) {
    float* s = logits + r * c.count;
    if (c.sigmoid) {
      for (int64_t e = 0; e < c.count; e++) s[e] = 1 / (1 + expf(-s[e]));
    } else {
      const float top = *std::max_element(s, s + c.count);
      float sum = 0;
      for (int64_t e = 0; e < c.count; e++) sum += s[e] = expf(s[e] - top);
      for (int64_t e = 0; e < c.count; e++) s[e] /= sum;
    }
    std::vector<float> by(s, s + c.count);
    for (int64_t e = 0; c.choice && e < c.count; e++) by[e] += c.choice[e];
    for (float& one : by)
      if (isnan(one)) one = INFINITY;  // as torch.topk: NaN is the largest, and makes the output NaN; sorting needs an order
    if (c.groups > 1) leave_groups(by);
    std::vector<int64_t> order(c.count);
    for (int64_t e = 0; e < c.count; e++) order[e] = e;
    auto larger = [&](int64_t a, int64_t b) { return by[a] > by[b] || (by[a] == by[b] && a < b); };
    std::partial_sort(order.begin(), order.begin() + c.top, order.end(), larger);
    float sum = 0;
    for (int64_t k = 0; k < c.top; k++) sum += s[order[k]];
    sum += (float)c.sum_eps;
    const float least = 1e-20f, by_sum = c.normalized ? 1 / (sum > least ? sum : least) : 1;
    for (int64_t k = 0; k < c.top; k++) {
      chosen[r * c.top + k] = order[k];
      weights[r * c.top + k] = s[order[k]] * by_sum * (float)c.scale;
      round_words(&weights[r * c.top + k], half, 1);
    }
  }
  // Excludes the experts of all groups but the `top_groups` whose two best scores have the largest sums.
  void leave_groups(std::vector<float>& by) const {
    const int64_t each = c.count / c.groups;
    std::vector<std::pair<float, int64_t>> best;
    for (int64_t g = 0; g < c.groups; g++) {
      std::vector<float> some(by.begin() + g * each, by.begin() + (g + 1) * each);
      std::partial_sort(some.begin(), some.begin() + 2, some.end(), std::greater<float>());
      best.push_back({-(some[0] + some[1]), g});
    }
    std::partial_sort(best.begin(), best.begin() + c.top_groups, best.end());
    for (int64_t i = c.top_groups; i < c.groups; i++)
      std::fill_n(by.begin() + best[i].second * each, each, -INFINITY);
  }

  // The products of an expert's rows: with gate and up into the hidden layer, or (behind) with down.
  struct Call {
    headway_matrix matrices[2];
    headway_products p = {};

    Call(const Mixture& m, const Part& part, bool behind) {
      const int64_t inputs = behind ? m.hidden : m.width, outputs = behind ? m.width : m.hidden;
      const headway_matrix* of[] = {behind ? m.c.down : m.c.gate ? m.c.gate : m.c.up, behind || !m.c.gate ? nullptr : m.c.up};
      char* to[] = {behind ? m.made : m.first, m.second};
      for (; p.count < 2 && of[p.count]; p.count++) {
        headway_matrix& matrix = matrices[p.count] = of[p.count][part.expert];
        matrix.out = to[p.count] + part.from * outputs * m.size, matrix.out_row = outputs;
      }
      p.rows = part.count, p.inputs = p.x_row = inputs, p.type = m.c.in.type, p.matrices = matrices;
      p.x = (behind ? m.first : m.sorted) + part.from * inputs * m.size;
      if (!behind) return;
      p.act = m.c.act;
      if (m.c.gate) p.gate = m.second + part.from * inputs * m.size;
    }
  };
  int64_t room_of(const Part& part) const {
    return std::max(Products(Call(*this, part, false).p).room(), Products(Call(*this, part, true).p).room());
  }

  void multiply(int64_t me, int64_t team, bool behind) {
    for (int pass = 0; pass < 2; pass++) {
      for (const Part& part : parts) {
        const Call call(*this, part, behind);
        Products products(call.p);
        products.place(part.room);
        pass ? products.multiply(me, team) : products.prepare(me, team);
      }
#pragma omp barrier
    }
  }

  // Adds up the weighted outputs of the experts of row r, and the shared expert.
  void add_up(int64_t r) const {
    alignas(64) float y[2 * UNIT], x[2 * UNIT];
    float open = 1;
    if (c.shared_gate) {
      read_words(&open, c.shared_gate, half, r, 1);
      open = 1 / (1 + expf(-open));
      round_words(&open, half, 1);
    }
    for (int64_t i = 0; i < width; i += 2 * UNIT) {
      const int some = (int)(width - i < 2 * UNIT ? width - i : 2 * UNIT);
      memset(y, 0, sizeof y);
      for (int64_t k = 0; k < c.top; k++) {
        read_words(x, made, half, place[r * c.top + k] * width + i, some);
        for (int j = 0; j < some; j++) y[j] += weights[r * c.top + k] * x[j];
      }
      if (c.shared) {
        round_words(y, half, some);
        read_words(x, c.shared, half, r * width + i, some);
        for (int j = 0; j < some; j++) x[j] *= open;
        round_words(x, half, some);
        for (int j = 0; j < some; j++) y[j] += x[j];
      }
      write_as((char*)c.out + (r * width + i) * size, half, y, some, 1);
    }
  }
};

}  // namespace
