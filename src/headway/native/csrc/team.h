// How many threads share a call.
#pragma once
#include <stdint.h>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

// As many as are given, and no more than there are parts of the work; one at least. Never more than MOST: OpenMP keeps a
// record of each new thread on the caller's stack, which ends at some ten thousand.
inline int team_of(int64_t threads, int64_t parts) {
  constexpr int64_t MOST = 1024;
  threads = threads < parts ? threads : parts;
  threads = threads < MOST ? threads : MOST;
  return threads < 1 ? 1 : (int)threads;
}

// Part `number` of `parts` of [0, count).
struct Share {
  int64_t from, to;
  Share(int64_t count, int64_t number, int64_t parts) : from(count * number / parts), to(count * (number + 1) / parts) {}
};

// While one lives, what is too small for a normal number counts as 0 in this thread, and results that are so small become 0.
// States that decay are full of such numbers, each of which takes some hundred cycles on Intel's processors.
struct NoSubnormals {
#if defined(__SSE__)
  const unsigned before = _mm_getcsr();
  NoSubnormals() { _mm_setcsr(before | 0x8040); }  // flush to zero, denormals are zeros
  ~NoSubnormals() { _mm_setcsr(before); }
  NoSubnormals(const NoSubnormals&) = delete;
#endif
};
