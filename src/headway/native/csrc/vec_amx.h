// AMX with AVX-512 BF16: products of whole tiles of bytes.
#pragma once
#include "vec_avx512bf16.h"

namespace {
namespace amx {
using namespace avx512bf16;

constexpr bool HAS_TILES = true;

// The tile registers of this thread, for the lifetime of the object: four of sums, two of rows [16][4 QUADS bytes] and two of
// weights [QUADS][16][4]. In assembly, which declares what memory is read: not all compilers' intrinsics do, and stores
// before them were lost.
template <int QUADS>
struct Tiles {
  Tiles() {
    struct {
      uint8_t palette, start, none[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } shapes = {};
    static_assert(sizeof shapes == 64, "as ldtilecfg reads it");
    shapes.palette = 1;
    for (int i = 0; i < 8; i++) {
      shapes.bytes[i] = (uint16_t)(i / 2 == 2 ? 4 * QUADS : 64);
      shapes.rows[i] = i < 6 ? 16 : QUADS;
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;

  // start: sum I, of four, = rows, 32 bytes apart, times weights, both signed. finish: stores it to sums [16][16].
  template <int I>
  INLINE void start(const int8_t* rows, const int8_t* weights) {
    asm volatile(
        "tilezero %%tmm%c[sum]\n\t"
        "tileloadd (%[rows],%[apart],1), %%tmm%c[of_rows]\n\t"
        "tileloadd (%[weights],%[line],1), %%tmm%c[of_weights]\n\t"
        "tdpbssd %%tmm%c[of_weights], %%tmm%c[of_rows], %%tmm%c[sum]"
        :
        : [rows] "r"(rows), [weights] "r"(weights), [apart] "r"(32L), [line] "r"(64L), [sum] "i"(I),
          [of_rows] "i"(4 + I % 2), [of_weights] "i"(6 + I % 2)
        : "memory");
  }
  template <int I>
  INLINE void finish(int32_t* sums) {
    asm volatile("tilestored %%tmm%c[sum], (%[to],%[line],1)"
                 :
                 : [to] "r"(sums), [line] "r"(64L), [sum] "i"(I)
                 : "memory");
  }
};

}  // namespace amx
}  // namespace
