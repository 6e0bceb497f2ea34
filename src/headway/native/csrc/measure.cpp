// The stamp of this library, and the hardware limits that its kernels are measured against: the rate of multiply-adds within
// registers, and the time of one pass over memory.
#include <omp.h>

#include "team.h"
#include "words.h"

namespace {

// Found by searching the file, without loading it as a library.
__attribute__((used)) const char STAMP[] = "headway-source-hash:" HEADWAY_SOURCE_HASH;

#if defined(__aarch64__)
constexpr bool MANY_REGISTERS = true;
#else
constexpr bool MANY_REGISTERS = W == 16;
#endif
constexpr int CHAINS = MANY_REGISTERS ? 24 : 12;  // of 32 or 16 registers; at least units x latency of any known core
constexpr int64_t STEPS = 1 << 16;  // some 200 us: long compared with a barrier, short compared with a time slice

// STEPS rounds of one multiply-add in each of CHAINS independent registers; HALF: of bf16 pairs. The empty asm statements keep
// the compiler from folding the rounds or spilling the registers; they emit no instructions.
template <bool HALF>
float multiply_add_rounds() {
  vf sum[CHAINS], scale = HALF ? (vf)splat_int(0x3F803F80) : splat(0.5f), add = splat(0.25f);
  UNROLL for (int i = 0; i < CHAINS; i++) sum[i] = splat((float)i);
#if defined(__x86_64__)
  asm volatile("" : "+x"(scale), "+x"(add));
#else
  asm volatile("" : "+w"(scale), "+w"(add));
#endif
  for (int64_t step = 0; step < STEPS; step++)
    UNROLL for (int i = 0; i < CHAINS; i++)
      sum[i] = HALF ? multiply_add<true>(sum[i], scale, scale) : sum[i] * scale + add;
  vf total = splat(0);
  UNROLL for (int i = 0; i < CHAINS; i++) total += sum[i];
  return sum_of(total);
}

// Returns the shortest time in which `threads` threads run `rounds()` once each, in parallel, of all tries within `seconds`.
double best_time(float (*rounds)(), int threads, double seconds) {
  double best = 1e30;
  const double end = omp_get_wtime() + seconds;
  bool more = true;
#pragma omp parallel num_threads(threads)
  {
    while (more) {
#pragma omp barrier
      const double start = omp_get_wtime();
      volatile float needed = rounds();
      (void)needed;
#pragma omp barrier
#pragma omp master
      {
        const double took = omp_get_wtime() - start;
        if (took < best) best = took;
        more = omp_get_wtime() < end;
      }
#pragma omp barrier
    }
  }
  return best;
}

// Reads a span of memory once, in as many parallel streams as the prefetchers of a core follow, with software prefetches, as
// products of few rows read weights (linear.h). Returns the exclusive or of its 8-byte words, padded with zeros.
uint64_t read_span(const char* from, const char* to) {
  constexpr int STREAMS = 4, AHEAD = 1024, LINE_BYTES = 64;
  const int64_t part = (to - from) / STREAMS / LINE_BYTES * LINE_BYTES;
  vi sum[STREAMS] = {};
  for (int64_t at = 0; at < part; at += LINE_BYTES)
    UNROLL for (int i = 0; i < STREAMS; i++) {
      const char* of = from + i * part + at;
      __builtin_prefetch(of + AHEAD, 0, 2);
      UNROLL for (int j = 0; j < LINE_BYTES; j += 4 * W) sum[i] ^= load_int((const int32_t*)(of + j));
    }
  uint64_t words[STREAMS * W / 2], result = 0;
  memcpy(words, sum, sizeof words);
  for (uint64_t word : words) result ^= word;
  for (from += STREAMS * part; from < to; from += 8) {
    uint64_t word = 0;
    memcpy(&word, from, to - from < 8 ? (size_t)(to - from) : 8);
    result ^= word;
  }
  return result;
}

}  // namespace

// Returns the FLOP/s that `threads` threads reach together without touching memory, the best of all tries within `seconds`:
// of float32 multiply-adds (2 each), or with `bf16` of dot products of bfloat16 pairs, summed in float32; 0 if this level
// has no instruction for them.
extern "C" HEADWAY_EXPORT double headway_peak(int bf16, int threads, double seconds) {
  threads = team_of(threads, INT64_MAX);
  if (bf16 && !HAS_PAIRS) return 0;
  const double products = (bf16 ? 4.0 : 2.0) * STEPS * CHAINS * W * threads;
  return products / best_time(bf16 ? multiply_add_rounds<HAS_PAIRS> : multiply_add_rounds<false>, threads, seconds);
}

// Returns the seconds that `threads` threads need to read `bytes` bytes once, each its own part; `folded` becomes the
// exclusive or of their 8-byte words, padded with zeros.
extern "C" HEADWAY_EXPORT double headway_read(const void* data, int64_t bytes, int threads, uint64_t* folded) {
  threads = team_of(threads, INT64_MAX);
  const char* from = (const char*)data;
  double seconds = 0;
  *folded = 0;
#pragma omp parallel num_threads(threads)
  {
    const Share lines((bytes + 63) / 64, omp_get_thread_num(), threads);
    const int64_t end = lines.to * 64;
#pragma omp barrier
    const double start = omp_get_wtime();
    const uint64_t words = read_span(from + lines.from * 64, from + (end < bytes ? end : bytes));
#pragma omp atomic
    *folded ^= words;
#pragma omp barrier
#pragma omp master
    seconds = omp_get_wtime() - start;
  }
  return seconds;
}
