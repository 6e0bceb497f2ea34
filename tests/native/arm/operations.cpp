// Every operation of a level (vec.h) beside the plain C++ of vec_plain.h, on numbers of every kind: the same, to the bit.
// Compiled with HEADWAY_LEVEL, HEADWAY_VEC and the level's flags; prints what differs, answers how many operations do.
#include <stdio.h>
#include <stdlib.h>

#include "vec.h"
#include "words.h"

namespace {

int wrong;
uint32_t state = 1;
uint32_t random_bits() { return state = state * 1664525u + 1013904223u, state ^ state >> 15; }

// Normal numbers, and among them infinities, NaN, zeros and what is not normal.
vf drawn() {
  vf x;
  for (int i = 0; i < W; i++) {
    const uint32_t bits = random_bits();
    float f = (float)(int32_t)random_bits() * 0x1p-24f;
    if (bits % 16 == 0) {
      const uint32_t any = random_bits();
      memcpy(&f, &any, 4);
    }
    if (bits % 16 == 1) f = bits % 32 == 1 ? INFINITY : -0.0f;
    x[i] = f;
  }
  return x;
}
vf finite() {
  vf x;
  for (int i = 0; i < W; i++) x[i] = (float)(int32_t)random_bits() * 0x1p-24f;
  return x;
}
vi words() {
  vi x;
  for (int i = 0; i < W; i++) x[i] = (int32_t)random_bits();
  return x;
}

void same(const char* what, const void* a, const void* b, size_t size) {
  if (!memcmp(a, b, size)) return;
  printf("%s differs:", what);
  for (size_t i = 0; i < size; i++) printf(" %02x/%02x", ((const uint8_t*)a)[i], ((const uint8_t*)b)[i]);
  puts("");
  wrong++;
}
template <class T>
void same(const char* what, const T& a, const T& b) {
  same(what, &a, &b, sizeof a);
}
// A NaN is as good as another; of bf16 too.
vf calm(vf x) { return x == x ? x : splat(0); }

void check() {
  const vf x = drawn(), y = drawn(), f = finite(), g = finite();
  const vi a = words(), b = words();
  const uint32_t bits = random_bits() & ((1u << W) - 1);
  same("vmax", calm(level::vmax(x, y)), calm(plain::vmax(x, y)));
  const vi whole = nearest(f);
  same("sum_of", level::sum_of(__builtin_convertvector(whole, vf)), plain::sum_of(__builtin_convertvector(whole, vf)));
  same("largest_of", level::largest_of(a), plain::largest_of(a));
  same("sum_of_ints", level::sum_of_ints(a >> 4), plain::sum_of_ints(a >> 4));
  same("only", level::only(bits, x), plain::only(bits, x));
  same("where", level::where(bits, x, y), plain::where(bits, x, y));
  same("bits_of", level::bits_of(a > b), plain::bits_of(a > b));
  same("greater", level::greater(x, y), plain::greater(x, y));
  same("widened", level::widened(level::halves_of(x)), plain::widened(level::halves_of(x)));
  const vh half = level::halves_of(x), of_plain = plain::halves_of(x);
  for (int i = 0; i < W; i++)
    if (x[i] == x[i] || (half[i] & 0x7FFF) <= 0x7F80) same("halves_of", half[i], of_plain[i]);
  char sixteens[2 * W], bytes[W];
  for (int i = 0; i < W; i++) {
    const uint32_t r = random_bits();
    memcpy(sixteens + 2 * i, &r, 2), memcpy(bytes + i, (const char*)&r + 2, 1);
  }
  same("read_halves", calm(level::read_halves(sixteens)), calm(plain::read_halves(sixteens)));
  same("read_bytes", level::read_bytes<false>(bytes), plain::read_bytes<false>(bytes));
  same("read_bytes, signed", level::read_bytes<true>(bytes), plain::read_bytes<true>(bytes));
  alignas(64) int8_t to[2][W];
  level::write_bytes(to[0], level::read_bytes<true>(bytes)), plain::write_bytes(to[1], plain::read_bytes<true>(bytes));
  same("write_bytes", to[0], to[1], W);
  const vf halves = __builtin_convertvector(a >> 24, vf) * 0.5f;  // between whole numbers, too
  same("nearest", level::nearest(halves), plain::nearest(halves));

  // inputs are at least -127
  int8_t q[4];
  for (int i = 0; i < 4; i++) q[i] = (int8_t)((int)(random_bits() >> 8) % 255 - 127);
  if (random_bits() % 8 == 0) memset(q, -127, 4);
  const vi codes = random_bits() % 8 == 0 ? splat_int(random_bits() % 2 ? -1 : 0) : b;
  int32_t packed[2][2] = {};
  level::pack_four(packed[0], q), plain::pack_four(packed[1], q);
  const int32_t sum = (q[0] + q[1]) + (q[2] + q[3]);
  same("add_four", level::add_four(a, level::signed_codes(codes), packed[0]) + level::LESS * sum,
       plain::add_four(a, codes, packed[1]));
  same("add_four of few bits", level::add_four(a, codes & 0x3F3F3F3F, packed[0]),
       plain::add_four(a, codes & 0x3F3F3F3F, packed[1]));

  same("low_lanes", level::low_lanes(f, g), plain::low_lanes(f, g));
  same("high_lanes", level::high_lanes(f, g), plain::high_lanes(f, g));
  same("low_pairs", level::low_pairs(f, g), plain::low_pairs(f, g));
  same("high_pairs", level::high_pairs(f, g), plain::high_pairs(f, g));
  same("even_fours", level::even_fours(f, g), plain::even_fours(f, g));
  same("odd_fours", level::odd_fours(f, g), plain::odd_fours(f, g));

  alignas(64) uint16_t places[2][PLACES];
  char rest[PLACES], other[2 * PLACES];
  for (int i = 0; i < PLACES; i++) rest[i] = (char)(random_bits() >> 9), other[i] = (char)(random_bits() >> 9);
  const uint64_t table = (uint64_t)random_bits() << 32 | random_bits();
  uint64_t planes[3];
  for (uint64_t& plane : planes) plane = (uint64_t)random_bits() << 32 | random_bits();
  level::unpack_places(places[0], planes[0], planes[1], planes[2], rest, other, table);
  plain::unpack_places(places[1], planes[0], planes[1], planes[2], rest, other, table);
  same("unpack_places", places[0], places[1], sizeof places[0]);

  vf values[N];
  for (vf& one : values) one = finite();
  float found[2][8 * W];
  level::look_up(values, rest, [&](int at, vf w) { store(found[0] + at, w); });
  plain::look_up(values, rest, [&](int at, vf w) { store(found[1] + at, w); });
  same("look_up", found[0], found[1], sizeof found[0]);
}

// Of pairs of bf16 there is no plain form: what words.h and nf4.h say of them.
void check_pairs() {
  if constexpr (HAS_PAIRS) {
    const vf x = finite(), y = finite();
    uint16_t both[2 * W], rows[2 * W], right[2][2 * W];
    store((float*)both, joined(x, y)), store((float*)rows, row_pairs(x, y));
    for (int i = 0; i < W; i++) {
      right[0][i] = right[1][2 * i] = to_bf16(x[i]);
      right[0][W + i] = right[1][2 * i + 1] = to_bf16(y[i]);
    }
    same("joined", both, right[0], sizeof both);
    same("row_pairs", rows, right[1], sizeof rows);

    uint16_t a[32], b[32], mixed[64];
    for (int i = 0; i < 32; i++) a[i] = (uint16_t)random_bits(), b[i] = (uint16_t)(random_bits() >> 7);
    interleave((float*)mixed, a, b, 32);
    for (int i = 0; i < 64; i++) same("interleave", mixed[i], (i % 2 ? b : a)[i / 2]);

    // whole numbers: their products are exact
    vf sums = splat(3), one, other;
    for (int i = 0; i < 2 * W; i++) {
      a[i] = to_bf16((float)((int)(random_bits() >> 8) % 32)), b[i] = to_bf16((float)((int)(random_bits() >> 8) % 32));
    }
    memcpy(&one, a, sizeof one), memcpy(&other, b, sizeof other);
    const vf added = add_pairs(sums, one, other);
    for (int i = 0; i < W; i++)
      sums[i] += from_bf16(a[2 * i]) * from_bf16(b[2 * i]) + from_bf16(a[2 * i + 1]) * from_bf16(b[2 * i + 1]);
    same("add_pairs", added, sums);

    vf values[N];
    for (vf& value : values) value = finite();
    uint8_t codes[32];
    for (uint8_t& code : codes) code = (uint8_t)(random_bits() >> 9);
    uint16_t found[64];
    look_up_pairs(values, (const char*)codes, [&](int at, vf w) { store((float*)found + at, w); });
    for (int i = 0; i < 64; i++) {  // input i lies as nf4.h has it: lane i / 4, code i % 4
      const int code = codes[i / 2] >> (i % 2 ? 0 : 4) & 15;
      same("look_up_pairs", found[i % 4 * 16 + i / 4], to_bf16(values[code / W][code % W]));
    }
  }
}

}  // namespace

int main() {
  for (int i = 0; i < 3000 && wrong < 20; i++) check(), check_pairs();
  printf("%d of the operations differ\n", wrong);
  return wrong != 0;
}
