// Fetching ahead of the kernels.
#pragma once
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "pack.h"

namespace {

// Does the first-level cache wait for enough lines at once to be filled from memory? From Zen 5 on AMD's does; with
// Zen 4's, memory comes at half the speed at which the second level has it.
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

// Of memory that is read once, what lies two or three pages further on: prefetchers of the machine stop at each.
template <bool FIRST>
INLINE void fetch_onward(const void* x) {
  if (FIRST)
    __builtin_prefetch((const char*)x + 8192, 0, 3);
  else
    __builtin_prefetch((const char*)x + 12288, 0, 2);
}
// (Inlined by force: compilers take a function that only prefetches for empty.)
INLINE void fetch_onward(const char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    if (FIRST_LEVEL)
      fetch_onward<true>(row + i);
    else
      fetch_onward<false>(row + i);
}

// What will be read next, and where the result will go, brought into the second-level cache bit by bit while groups of
// rows are computed: of the tile, rows of its result and rows that the next tile reads first; of a block, the one that
// follows, packed or as rows of tensors, and its sums.
struct Ahead {
  struct Run {
    const char* base;
    const int32_t* order;
    int64_t stride, bytes, place, end, each;  // each: rows per group
    bool written;
  } runs[5];
  int count, lasting;  // the first are of the tile

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
  // `each` bytes per group.
  void in_a_row(const char* from, int64_t bytes, int64_t each, bool written) {
    runs[count++] = {from, nullptr, each, each, 0, (bytes + each - 1) / each, 1, written};
  }
};

}  // namespace
