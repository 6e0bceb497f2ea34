// Prefetching ahead of the kernels.
#pragma once
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "pack.h"

namespace {

// Returns whether the L1 cache can have enough lines in flight to be filled from memory at full speed. AMD's can from Zen 5
// on; with Zen 4's, memory is read at half the speed that the L2 cache reaches.
INLINE bool first_level_waits() {
#if defined(__x86_64__)
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ecx != signature_AMD_ecx) return false;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (eax >> 8 & 15) + (eax >> 20 & 255) >= 0x1A;
#else
  return false;
#endif
}
const bool FIRST_LEVEL = first_level_waits();

// Prefetches, from memory that is read once, the line two or three pages ahead: hardware prefetchers stop at page boundaries.
template <bool FIRST>
INLINE void fetch_onward(const void* x) {
  if (FIRST)
    __builtin_prefetch((const char*)x + 8192, 0, 3);
  else
    __builtin_prefetch((const char*)x + 12288, 0, 2);
}
// always_inline is needed: compilers treat a function that only prefetches as empty.
INLINE void fetch_onward(const char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    if (FIRST_LEVEL)
      fetch_onward<true>(row + i);
    else
      fetch_onward<false>(row + i);
}

// Brings what will be read next, and where the result will be written, into the L2 cache, piece by piece while groups of rows
// are computed. Of the tile: the rows of its result, and the rows that the next tile reads first. Of a block: the next block,
// packed or as rows of tensors, and its sums.
struct Ahead {
  struct Run {
    const char* base;
    const int32_t* order;
    int64_t stride, bytes, place, end, each;  // place: next row to fetch; each: rows per group
    bool written;
  } runs[5];
  int count, lasting;  // the first `lasting` runs are of the tile, the others of the block

  // tile() and block() forget what was registered for the tile, or for the block; the functions below register more.
  void tile() { count = lasting = 0; }
  void block() { count = lasting; }
  void rows(const Rows& r, int64_t begin, int64_t end, int64_t groups, bool written = false) {
    int64_t bytes = (int64_t)r.width * bytes_of(r.type), each = (end - begin) / groups + 1;
    if (begin >= end) return;
    if (!r.order && r.stride == bytes)
      in_a_row(r.base + begin * bytes, (end - begin) * bytes, each * bytes, written);
    else
      runs[count++] = {r.base, r.order, r.stride, bytes, begin, end, each, written};
  }
  void rows_of_tile(const Rows& r, int64_t begin, int64_t end, int64_t groups, bool written = false) {
    rows(r, begin, end, groups, written);
    lasting = count;
  }
  void words(const float* from, int64_t size, int64_t groups) {
    in_a_row((const char*)from, size * 4, (size * 4 / groups + 63) / 64 * 64, false);
  }

  // Prefetches the next piece of every run.
  __attribute__((noinline)) void some() {
    for (int i = 0; i < count; i++) {
      Run r = runs[i];
      int64_t stop = r.end - r.place < r.each ? r.end : r.place + r.each;
      if (r.written)
        fetch<1>(r, stop);
      else
        fetch<0>(r, stop);
      runs[i].place = stop;
    }
  }

 private:
  template <int WRITE>
  __attribute__((always_inline)) static void fetch(const Run& r, int64_t stop) {
    for (int64_t n = r.place; n < stop; n++) {
      const char* row = r.base + (r.order ? r.order[n] : n) * r.stride;
      for (int64_t i = 0; i < r.bytes; i += 64) __builtin_prefetch(row + i, WRITE, 2);
    }
  }
  // Registers contiguous memory, `each` bytes per group.
  void in_a_row(const char* from, int64_t bytes, int64_t each, bool written) {
    runs[count++] = {from, nullptr, each, each, 0, (bytes + each - 1) / each, 1, written};
  }
};

}  // namespace
