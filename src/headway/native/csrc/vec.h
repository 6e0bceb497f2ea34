// Vectors at the CPU level for which this file is compiled. A unit is 16 floats: N vectors of W lanes. Kernels never ask for a
// level: what differs is in the level's file, HEADWAY_VEC, and is listed below; a new level is such a file and a row of
// levels.py.
#pragma once
#include HEADWAY_VEC

namespace {

// Each operation is the level's own, or that of the level on which it builds, or that of vec_plain.h.
namespace level = HEADWAY_LEVEL;
using level::HAS_PAIRS, level::HAS_TILES, level::HAS_SHORTS, level::WORDS, level::Tiles;
using level::vmax, level::sum_of, level::largest_of, level::sum_of_ints;
using level::only, level::where, level::bits_of, level::greater;
using level::add_product, level::add_pairs, level::add_four, level::add_two, level::pack_four, level::LESS, level::signed_codes;
using level::exp2_of, level::exp2_only, level::exp2_of_rows, level::exp2_of_each, level::power_of_2;
using level::halves_of, level::widened, level::joined, level::row_pairs, level::low_halves, level::high_halves;
using level::read_halves, level::read_bytes, level::write_bytes, level::nearest;
using level::low_lanes, level::high_lanes, level::low_pairs, level::high_pairs, level::even_fours, level::odd_fours;
using level::interleave, level::unpack_places, level::look_up, level::look_up_pairs;

constexpr int WIDEST = 512;  // maximum columns of a head
constexpr int LINE = WIDE < 4 ? UNIT : BLOCK;  // floats between words of a panel: UNIT if panels are read singly

INLINE int panel_size(int words) { return WIDE < 4 ? words * UNIT : UNIT; }  // floats between the panels of a block

INLINE void add_to(float* p, vf x) { store(p, load(p) + x); }

// An integer that is a compile-time constant.
template <int X>
struct Count {
  static constexpr int value = X;
};

// Returns log2 of normal numbers; zeros, infinities and NaN are returned unchanged. With m = x / 2^e in [2/3, 4/3) and
// s = (m - 1) / (m + 1): log2 x = e + 2 / ln 2 * (s + s^3 / 3 + s^5 / 5 + ..), to 1e-8. 0x3F2AAAAB is 2/3: x = 6 has e = 3 and
// m = 3/4.
INLINE vf log2_of(vf x) {
  vi bits = (vi)x, e = (bits - 0x3F2AAAAB) >> 23;
  vf m = (vf)(bits - (e << 23)), s = (m - 1.0f) / (m + 1.0f), t = s * s;
  vf sum = (((t / 9 + 1.0f / 7) * t + 1.0f / 5) * t + 1.0f / 3) * t + 1.0f;
  vf result = __builtin_convertvector(e, vf) + s * sum * 2.88539008f;
  vi usual = (x > 0.0f) & (x < INFINITY);
  return (vf)(((vi)result & usual) | (bits & ~usual));
}

}  // namespace
