// Products of rows with quantized weights of 8 bits or fewer. A panel is 16 outputs; for each group of 32 inputs it holds the
// codes [8][16][4], then scales, then zeros (headway.h). Rows are quantized to 8 bits. Sums of 32 products (16 for Q6_K) are
// integers; they are added up in float32 from the first group of 32 to the last: a row's results have the same bits however
// many rows there are (panel_tile.h).
#pragma once
#include "rounded.h"

namespace {

// Reads 16 float16 numbers.
INLINE void read_halves(vf (&s)[N], const char* p) {
  UNROLL for (int i = 0; i < N; i++) s[i] = read_halves(p + i * 2 * W);
}
// Reads 16 bytes as integers.
template <bool SIGNED = false>
INLINE void read_bytes(vi (&z)[N], const char* p) {
  UNROLL for (int i = 0; i < N; i++) z[i] = read_bytes<SIGNED>(p + i * W);
}

// A panel of a matrix, or its rest from a group on.
struct Panel {
  const char* at;
  int64_t step;  // bytes of a group, and bytes before each eight groups
  int64_t head;
  bool has_scales, has_zeros;

  int64_t bytes(int64_t count) const { return count * step + (count + 7) / 8 * head; }
};

// The layout of the codes of a group. INT8: 8 loads of 64 bytes, one quad (four inputs) of 16 outputs each. Fewer bits: 4 loads
// that hold the low four bits of two quads each, 0 1 4 5 in the low halves of bytes and 2 3 6 7 in the high halves; then the
// bits above, HIGH of each code.
template <int TYPE>
struct Form {
  static constexpr bool BLOCKS = TYPE >= HEADWAY_Q4_K;  // scales are integers, with a float16 factor for each 256 inputs
  static constexpr int HIGH = TYPE == HEADWAY_Q5_K ? 1 : TYPE == HEADWAY_Q6_K ? 2 : 0;
  static constexpr bool WHOLE = TYPE == HEADWAY_INT8, LOWS = BLOCKS && HIGH < 2;  // LOWS: the type has minima as well as scales
  static constexpr int LOADS = WHOLE ? 8 : 4, BYTES = 64 * (LOADS + HIGH), PARTS = HIGH == 2 ? 2 : 1;
  static constexpr int QUADS = GROUP / 4 / PARTS;  // of a part, which has a scale of its own
  static constexpr int HEAD = !BLOCKS ? 0 : LOWS ? 4 * UNIT : 2 * UNIT;
  static constexpr int MIDDLE = WHOLE ? 0 : HIGH == 2 ? 2 : 4;  // without LOWS the zero is 128 >> MIDDLE

  // Returns the quad in the low halves of a load; quad + 2 is in the high halves.
  static constexpr int quad(int load) { return WHOLE ? load : load / 2 * 4 + load % 2; }
};

// Calls f with the Form of a quantized type.
template <class F>
INLINE void with_form(int64_t type, F f) {
  switch (type) {
    case HEADWAY_INT8: return f(Form<HEADWAY_INT8>());
    case HEADWAY_INT4: return f(Form<HEADWAY_INT4>());
    case HEADWAY_Q4_K: return f(Form<HEADWAY_Q4_K>());
    case HEADWAY_Q5_K: return f(Form<HEADWAY_Q5_K>());
    case HEADWAY_Q6_K: return f(Form<HEADWAY_Q6_K>());
  }
}

// Calls f(has scales, has zeros) with both known to the compiler.
template <class F, class G>
INLINE void with_parts(const Panel& p, G f) {
  if constexpr (F::BLOCKS) return f(Count<1>(), Count<0>());
  else if (p.has_zeros) return p.has_scales ? f(Count<1>(), Count<1>()) : f(Count<0>(), Count<1>());
  else return p.has_scales ? f(Count<1>(), Count<0>()) : f(Count<0>(), Count<0>());
}

// Returns the bits above the low four of the codes of a quad, shifted to bits 4 and 5. For Q5_K (HIGH 1) all eight quads
// share one load, and quad 3 has bit 3 of each byte, which moves left by 1; for Q6_K quads 0-3 share the first of two.
template <class F>
INLINE vi high_bits(const char* group, int quad, int i) {
  constexpr int EACH = F::HIGH ? 8 / F::HIGH : 1;
  const vi bits = load_int((const int32_t*)(group + 64 * (F::LOADS + quad / EACH)) + i * W);
  const int shift = 4 - quad % EACH * F::HIGH;
  return (shift < 0 ? bits >> -shift : bits << shift) & (F::HIGH == 2 ? 0x30303030 : 0x10101010);
}

// A group of the quantized inputs of some rows: the values of row r are r * step after the first row's.
struct Inputs {
  const int32_t* q;
  const float *scale, *mass;
  const int32_t *below, *early;
  int64_t step, quad_step;

  Inputs(const Rounded& x, int64_t place, int64_t group, int64_t step, int64_t tall)
      : q(x.q + (place + group * tall) * (GROUP / 4) * WORDS),
        scale(x.scale + place + group * tall),
        mass(x.mass + place + group * tall),
        below(x.below + place + group * tall),
        early((x.early ? x.early : x.below) + place + group * tall),
        step(step),
        quad_step(tall * WORDS) {}

  // Moves to the next group.
  __attribute__((always_inline)) void next() {
    const int64_t tall = quad_step / WORDS;
    q += GROUP / 4 * quad_step, scale += tall, mass += tall, below += tall, early += tall;
  }
};

// Reads the factors of the scales of eight groups, and of their minima.
template <class F, int S>
INLINE void read_head(vf (&d)[S][2][N], const char* const (&at)[S]) {
  UNROLL for (int s = 0; s < S; s++) {
    read_halves(d[s][0], at[s]);
    if (F::LOWS) read_halves(d[s][1], at[s] + 2 * UNIT);
  }
}

// Adds a group of R rows times S panels to acc. Codes are unsigned, so each integer sum starts from - zero * (sum of the
// inputs): below is - 128 times that sum, and the shift by MIDDLE makes it - 8 (>> 4) or - 32 (>> 2) times.
template <class F, int R, int S>
INLINE void add_group(vf (&acc)[R][S][N], const char* const (&at)[S], const vf (&d)[S][2][N], const Inputs& x,
                      int64_t q_row, bool scales, bool zeros) {
  constexpr int less = F::WHOLE ? LESS : 0;  // 128 if signed_codes subtracts 128 from the codes already
  UNROLL for (int part = 0; part < F::PARTS; part++) {
    vi sums[R][S][N];
    UNROLL for (int s = 0; s < S; s++) {
      vi zero[N] = {};
      if (!F::BLOCKS && zeros) read_bytes(zero, at[s] + F::BYTES + (scales ? 2 * UNIT : 0));
      UNROLL for (int r = 0; r < R; r++) {
        int32_t below = F::LOWS ? 0 : x.below[r * x.step];
        if (F::PARTS == 2) below = part ? below - x.early[r * x.step] : x.early[r * x.step];
        UNROLL for (int i = 0; i < N; i++)
          sums[r][s][i] = !F::BLOCKS && zeros ? (zero[i] - less) * (below >> 7)
                                              : splat_int(less ? 0 : below >> F::MIDDLE);
      }
    }
    UNROLL for (int load = F::LOADS / F::PARTS * part; load < F::LOADS / F::PARTS * (part + 1); load++)
      UNROLL for (int i = 0; i < N; i++) {
        const int quad = F::quad(load);
        vi low[S], high[S];
        UNROLL for (int s = 0; s < S; s++) {
          const vi w = load_int((const int32_t*)(at[s] + load * 64) + i * W);
          low[s] = F::WHOLE ? signed_codes(w) : w & 0x0F0F0F0F, high[s] = (w >> 4) & 0x0F0F0F0F;
          if (F::HIGH) low[s] |= high_bits<F>(at[s], quad, i), high[s] |= high_bits<F>(at[s], quad + 2, i);
        }
        UNROLL for (int r = 0; r < R; r++) {
          const int32_t* x_r = x.q + r * q_row + quad * x.quad_step;
          UNROLL for (int s = 0; s < S; s++) sums[r][s][i] = add_four(sums[r][s][i], low[s], x_r);
          if (!F::WHOLE)
            UNROLL for (int s = 0; s < S; s++)
              sums[r][s][i] = add_four(sums[r][s][i], high[s], x_r + 2 * x.quad_step);
        }
      }
    UNROLL for (int s = 0; s < S; s++) {
      const char* own = at[s] + F::BYTES;
      vf scale[N] = {}, low[N] = {};
      if (F::BLOCKS) {
        vi whole[N];
        F::LOWS ? read_bytes(whole, own) : read_bytes<true>(whole, own + part * UNIT);
        UNROLL for (int i = 0; i < N; i++) scale[i] = d[s][0][i] * __builtin_convertvector(whole[i], vf);
        if (F::LOWS) read_bytes(whole, own + UNIT);
        UNROLL for (int i = 0; i < N; i++) low[i] = d[s][1][i] * __builtin_convertvector(whole[i], vf);
      } else if (scales) {
        read_halves(scale, own);
      }
      UNROLL for (int r = 0; r < R; r++) {
        vf by = splat(x.scale[r * x.step]);
        UNROLL for (int i = 0; i < N; i++) {
          acc[r][s][i] += __builtin_convertvector(sums[r][s][i], vf) * (F::BLOCKS || scales ? by * scale[i] : by);
          if (F::LOWS) acc[r][s][i] += low[i] * splat(x.mass[r * x.step]);
        }
      }
    }
  }
}

// Adds `count` groups of R rows to acc, from the first of eight groups on; before each group calls f(addresses of the S
// panels). Rows of inputs are q_row words apart.
template <class F, int R, int S, class G>
INLINE void add_groups(vf (&acc)[R][S][N], const Panel (&p)[S], Inputs x, int64_t q_row, int64_t count, bool scales,
                       bool zeros, G f) {
  vf d[S][2][N];
  const char* at[S];
  for (int s = 0; s < S; s++) at[s] = p[s].at;
  for (int64_t g = 0; g < count; g++, x.next()) {
    if (F::BLOCKS && g % 8 == 0) {
      read_head<F>(d, at);
      UNROLL for (int s = 0; s < S; s++) at[s] += F::HEAD;
    }
    f(at);
    add_group<F>(acc, at, d, x, q_row, scales, zeros);
    UNROLL for (int s = 0; s < S; s++) at[s] += p[0].step;
  }
}

// Products of R rows (a few) with S panels of a matrix, which are read once, side by side: the 16 outputs of row r and panel
// s go to y[s * y_side + r * 16].
template <class F, int R, int S, bool SCALES, bool ZEROS>
INLINE void panel_dots(float* y, int64_t y_side, const Rounded& x, int64_t row, const Panel (&p)[S]) {
  vf acc[R][S][N] = {};
  const Inputs first(x, row * x.groups, 0, x.groups, 1);
  auto onward = [](const char* const(&at)[S]) __attribute__((always_inline)) {
    UNROLL for (int s = 0; s < S; s++)
      UNROLL for (int i = 0; i < F::BYTES; i += 64) fetch(at[s] + i);
  };
  add_groups<F>(acc, p, first, x.groups * (GROUP / 4) * WORDS, x.groups, SCALES, ZEROS, onward);
  UNROLL for (int s = 0; s < S; s++)
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int i = 0; i < N; i++) store(y + s * y_side + r * UNIT + i * W, acc[r][s][i]);
}

}  // namespace
