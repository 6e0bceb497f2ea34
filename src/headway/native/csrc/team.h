// Number of threads of a call, and how work is divided among them.
#pragma once
#include <stdint.h>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

// Returns the number of threads: as given, but no more than there are parts of the work, and at least one. Never more than
// MOST: OpenMP keeps a record of each new thread on the caller's stack, which overflows at some ten thousand.
inline int team_of(int64_t threads, int64_t parts) {
  constexpr int64_t MOST = 1024;
  threads = threads < parts ? threads : parts;
  threads = threads < MOST ? threads : MOST;
  return threads < 1 ? 1 : (int)threads;
}

// Part `number` of `parts` equal parts of [0, count).
struct Share {
  int64_t from, to;
  Share(int64_t count, int64_t number, int64_t parts) : from(count * number / parts), to(count * (number + 1) / parts) {}
};

// While an object lives, subnormal inputs count as 0 in this thread, and subnormal results become 0. Decaying states are full
// of subnormal numbers, each of which takes some hundred cycles on Intel's processors.
struct NoSubnormals {
#if defined(__SSE__)
  const unsigned before = _mm_getcsr();
  NoSubnormals() { _mm_setcsr(before | 0x8040); }  // flush-to-zero and denormals-are-zero
  ~NoSubnormals() { _mm_setcsr(before); }
  NoSubnormals(const NoSubnormals&) = delete;
#endif
};
