// What this library is, and the roofs that its kernels are measured against: the rate of multiply-adds that
// never leave the registers, and the time of one pass over memory.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <omp.h>

#include "headway.h"
#include "team.h"
#if HEADWAY_LEVEL > 0
#include <immintrin.h>
#endif

#define EXPORT extern "C" HEADWAY_EXPORT

namespace {

// The stamp is also found by searching the file, without opening it as a library.
const char stamp[] = "headway-source-hash:" HEADWAY_SOURCE_HASH;

#if HEADWAY_LEVEL >= 2
constexpr int width = 64;
#elif HEADWAY_LEVEL == 1
constexpr int width = 32;
#else
constexpr int width = 16;
#endif
#if HEADWAY_LEVEL >= 2 || defined(__aarch64__)
constexpr int chains = 24;  // of 32 registers; at least units x latency of any known core
#else
constexpr int chains = 12;  // of 16 registers
#endif

typedef float floats __attribute__((vector_size(width)));
typedef uint64_t words __attribute__((vector_size(width)));

constexpr int lanes = width / sizeof(float);
constexpr int64_t steps = 1 << 16;  // some 200 us: long beside a barrier, short beside a time slice

double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

floats all(float value) {
  floats x;
  for (int i = 0; i < lanes; ++i) x[i] = value;
  return x;
}

// Makes the compiler believe that `value` is needed.
template <class T>
void keep(T value) {
  asm volatile("" : : "r"(&value) : "memory");
}

// `steps` rounds of one multiply-add in each of `chains` independent registers. The empty statements keep the
// compiler from folding the rounds or spilling the registers; they are no instructions.
float multiply_add_rounds() {
  floats sum[chains], scale = all(0.5f), add = all(0.25f);
  for (int i = 0; i < chains; ++i) sum[i] = all(float(i));
#if defined(__x86_64__)
  asm volatile("" : "+x"(scale), "+x"(add));
#else
  asm volatile("" : "+w"(scale), "+w"(add));
#endif
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 24
    for (int i = 0; i < chains; ++i) sum[i] = sum[i] * scale + add;
  }
  floats total = all(0.0f);
  for (int i = 0; i < chains; ++i) total += sum[i];
  float result = 0.0f;
  for (int i = 0; i < lanes; ++i) result += total[i];
  return result;
}

#if HEADWAY_LEVEL == 3
// The same for bfloat16: each step adds the dot products of 32 pairs to 16 floats.
float dot_product_rounds() {
  __m512 sum[chains];
  __m512i ones = _mm512_set1_epi32(0x3f803f80);
  asm volatile("" : "+x"(ones));
  for (int i = 0; i < chains; ++i) sum[i] = _mm512_set1_ps(float(i));
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 24
    for (int i = 0; i < chains; ++i) sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)ones, (__m512bh)ones);
  }
  float result = 0.0f;
  for (int i = 0; i < chains; ++i) {
    for (int j = 0; j < lanes; ++j) result += sum[i][j];
  }
  return result;
}
#endif

// The shortest time in which `threads` threads do `rounds()` once each, side by side, over `seconds`.
double best_time(float (*rounds)(), int threads, double seconds) {
  double best = 1e30;
  const double end = now() + seconds;
  bool more = true;
#pragma omp parallel num_threads(threads)
  {
    while (more) {
#pragma omp barrier
      const double start = now();
      keep(rounds());
#pragma omp barrier
#pragma omp master
      {
        const double took = now() - start;
        if (took < best) best = took;
        more = now() < end;
      }
#pragma omp barrier
    }
  }
  return best;
}

// Reads a span once, by as many streams side by side as the prefetchers of a core follow, each asked for ahead of time:
// what products of few rows do with weights (linear.h). Answers the exclusive or of its words, 0 behind the last.
uint64_t read_span(const char* from, const char* to) {
  constexpr int streams = 4, ahead = 1024, line = 64;
  const int64_t part = (to - from) / streams / line * line;
  words sum[streams] = {};
  for (int64_t at = 0; at < part; at += line)
#pragma GCC unroll 4
    for (int i = 0; i < streams; ++i) {
      const char* of = from + i * part + at;
      __builtin_prefetch(of + ahead, 0, 2);
      for (int j = 0; j < line; j += width) {
        words x;
        std::memcpy(&x, of + j, width);
        sum[i] ^= x;
      }
    }
  uint64_t result = 0;
  for (int i = 0; i < streams; ++i)
    for (int j = 0; j < width / 8; ++j) result ^= sum[i][j];
  for (from += streams * part; from < to; from += 8) {
    uint64_t word = 0;
    std::memcpy(&word, from, to - from < 8 ? size_t(to - from) : 8);
    result ^= word;
  }
  return result;
}

}  // namespace

EXPORT const char* headway_level(void) { return HEADWAY_LEVEL_NAME; }

EXPORT const char* headway_source_hash(void) { return std::strchr(stamp, ':') + 1; }

EXPORT int64_t headway_abi(void) { return HEADWAY_ABI; }

// FLOP/s that `threads` threads reach together without touching memory, the best of what fits into `seconds`:
// float32 multiply-adds (2 each), or with `bf16` products of bfloat16 pairs added in float32; 0 where this level
// has no instruction for them.
EXPORT double headway_peak(int bf16, int threads, double seconds) {
  threads = team_of(threads, INT64_MAX);
  const double floating = 2.0 * double(steps) * chains * lanes * threads;
  if (!bf16) return floating / best_time(multiply_add_rounds, threads, seconds);
#if HEADWAY_LEVEL == 3
  return 2.0 * floating / best_time(dot_product_rounds, threads, seconds);
#else
  return 0.0;
#endif
}

// Seconds that `threads` threads need to read `bytes` bytes once, each its own part; `folded` becomes the exclusive
// or of their words, 0 behind the last.
EXPORT double headway_read(const void* data, int64_t bytes, int threads, uint64_t* folded) {
  threads = team_of(threads, INT64_MAX);
  const char* from = static_cast<const char*>(data);
  double seconds = 0.0;
  *folded = 0;
#pragma omp parallel num_threads(threads)
  {
    const Share lines((bytes + 63) / 64, omp_get_thread_num(), threads);
    const int64_t end = lines.to * 64;
#pragma omp barrier
    const double start = now();
    const uint64_t words = read_span(from + lines.from * 64, from + (end < bytes ? end : bytes));
#pragma omp atomic
    *folded ^= words;
#pragma omp barrier
#pragma omp master
    seconds = now() - start;
  }
  return seconds;
}
