// Groups of a panel that are unpacked once for all rows of a call: codes minus zeros, and the scales of each output.
#pragma once
#include "panel_tile.h"

namespace {

// Codes minus zeros as bytes (for codes of eight bits minus 128 instead, see `offset`), or as 16-bit integers.
template <class F, class CODE>
struct Codes {
  static constexpr bool SHORT = sizeof(CODE) == 2;
  static constexpr int DEPTH = SHORT ? DEEP / 2 : DEEP;  // groups at a time: they stay in the L1 cache while all rows pass
  alignas(64) CODE codes[DEPTH][GROUP / 4][UNIT][4];     // SHORT: first and third input of each quad, then the others
  alignas(64) float scale[DEPTH][F::PARTS][UNIT];
  alignas(64) float low[F::LOWS ? DEPTH : 1][UNIT];
  alignas(64) int32_t offset[F::WHOLE && !SHORT ? DEPTH : 1][UNIT];  // 8-bit codes: the zero minus 128

  // Unpacks `count` groups, starting with the first of eight.
  void take(const Panel& p, int64_t count) {
    vf d[1][2][N];
    const char* at = p.at;
    for (int64_t g = 0; g < count; g++, at += p.step) {
      const char* const head[1] = {at};
      if (F::BLOCKS && g % 8 == 0) read_head<F>(d, head), at += F::HEAD;
      UNROLL for (int i = 0; i < N; i++) take_codes(at, g, p, i), take_scales(at + F::BYTES, g, p, d[0], i);
    }
  }

 private:
  typedef CODE lanes_of __attribute__((vector_size(4 * W)));

  // Stores codes minus zeros of a quad.
  void put(int64_t g, int quad, int i, vi code, vi zero) {
    auto less = [&](vi w) __attribute__((always_inline)) { return (vi)((lanes_of)w - (lanes_of)zero); };
    int32_t* to = (int32_t*)codes[g][quad] + i * W;
    if constexpr (SHORT) {
      *(vi_any*)to = less(code & 0x00FF00FF);
      *(vi_any*)(to + UNIT) = less((vi)((vu)code >> 8) & 0x00FF00FF);
    } else {
      *(vi_any*)to = less(code);
    }
  }

  void take_codes(const char* at, int64_t g, const Panel& p, int i) {
    constexpr int32_t EACH = SHORT ? 0x00010001 : 0x01010101;
    vi zero = splat_int(F::LOWS ? 0 : (int32_t)((128u >> F::MIDDLE) * (uint32_t)EACH));
    if (!F::BLOCKS && p.has_zeros) {
      const vi own = read_bytes<false>(at + F::BYTES + (p.has_scales ? 2 * UNIT : 0) + i * W);
      if constexpr (F::WHOLE && !SHORT)
        *(vi_any*)(offset[g] + i * W) = own - 128;
      else
        zero = own * EACH;
    }
    UNROLL for (int l = 0; l < F::LOADS; l++) {
      const int quad = F::quad(l);
      const vi w = load_int((const int32_t*)(at + l * 64) + i * W);
      vi low = F::WHOLE ? w : w & 0x0F0F0F0F, high = (w >> 4) & 0x0F0F0F0F;
      if (F::HIGH) low |= high_bits<F>(at, quad, i), high |= high_bits<F>(at, quad + 2, i);
      put(g, quad, i, low, zero);
      if (!F::WHOLE) put(g, quad + 2, i, high, zero);
    }
  }

  void take_scales(const char* own, int64_t g, const Panel& p, const vf (&d)[2][N], int i) {
    if (F::BLOCKS) {
      UNROLL for (int part = 0; part < F::PARTS; part++) {
        const char* at = own + part * UNIT + i * W;
        const vi whole = F::LOWS ? read_bytes<false>(at) : read_bytes<true>(at);
        store(scale[g][part] + i * W, d[0][i] * __builtin_convertvector(whole, vf));
      }
      if (F::LOWS)
        store(low[g] + i * W, d[1][i] * __builtin_convertvector(read_bytes<false>(own + UNIT + i * W), vf));
    } else if (p.has_scales) {
      store(scale[g][0] + i * W, read_halves(own + i * 2 * W));
    }
  }
};

}  // namespace
