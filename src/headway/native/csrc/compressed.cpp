// headway_exponents, headway_compress, headway_decompress: see compressed.h.
#include "compressed.h"

extern "C" void headway_exponents(const uint16_t* w, int64_t rows, int64_t inputs, int64_t row, int64_t* counts) {
  for (int64_t o = 0; o < rows; o++)
    for (int64_t i = 0; i < inputs; i++) counts[w[o * row + i] >> 7 & 0xFF]++;
}

extern "C" int64_t headway_compress(const uint16_t* w, int64_t rows, int64_t inputs, int64_t row, uint64_t table,
                                    char* out, int64_t* starts) {
  uint8_t code[256];
  memset(code, OTHER, sizeof code);
  for (int c = OTHER - 1; c >= 0; c--) code[table >> 8 * c & 0xFF] = (uint8_t)c;
  int64_t at = 0;
  for (int64_t o = 0; o < rows; o++) {
    if (starts) starts[o] = at;
    for (int64_t from = 0; from < inputs; from += PLACES) {
      uint64_t bits[3] = {};
      char rest[PLACES];
      int64_t next = at + FIXED;
      for (int j = 0; j < PLACES; j++) {
        const int64_t i = from + input_of(j);
        const uint16_t one = i < inputs ? w[o * row + i] : 0;
        const uint8_t exponent = (uint8_t)(one >> 7);
        rest[j] = (char)((one & 0x7F) | (one >> 8 & 0x80));
        for (int b = 0; b < 3; b++) bits[b] |= (uint64_t)(code[exponent] >> b & 1) << j;
        if (code[exponent] != OTHER) continue;
        if (out) out[next] = (char)exponent;
        next++;
      }
      if (out) memcpy(out + at, bits, PLANES), memcpy(out + at + PLANES, rest, PLACES);
      at = next;
    }
  }
  return at;
}

extern "C" void headway_decompress(uint16_t* w, int64_t rows, int64_t inputs, const char* data, const int64_t* starts,
                                   uint64_t table) {
  constexpr int SIDES = 4;  // rows are read side by side, since the address of a block depends on the one before
  for (int64_t o = 0; o < rows; o += SIDES) {
    const int some = (int)(rows - o < SIDES ? rows - o : SIDES);
    const char* at[SIDES];
    for (int s = 0; s < some; s++) at[s] = data + starts[o + s];
    for (int64_t from = 0; from < inputs; from += PLACES)
      for (int s = 0; s < some; s++) {
        alignas(64) uint16_t block[PLACES];
        fetch_block(at[s]);
        at[s] = unpack(block, at[s], table);
        uint16_t* to = w + (o + s) * inputs + from;
        if (inputs - from >= PLACES)
          memcpy(to, block, sizeof block);
        else
          memcpy(to, block, (size_t)(inputs - from) * 2);
      }
  }
}
