// How many threads share a call.
#pragma once
#include <stdint.h>

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
