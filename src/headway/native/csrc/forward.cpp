// headway_forward: one attention call with its own team of threads; headway_plan_rows: plans of rows of one query.
#include "attention.h"
#include "team.h"

extern "C" int64_t headway_plan_rows(const int32_t* program, int64_t instructions, const int32_t* index, int64_t rows,
                                     int32_t* first, int32_t* begin, int32_t* end, uint8_t* full, int64_t room) {
  const Program code = {program, instructions};
  int64_t count = 0;
  for (int64_t r = 0; r < rows; r++) {
    first[r] = (int32_t)count;
    const Tokens query = {index + r, nullptr, nullptr, nullptr, 1};
    for (int32_t block = 0; block <= index[r]; block += BLOCK) {
      int32_t numbers[BLOCK];
      for (int32_t i = 0; i < BLOCK; i++) numbers[i] = block + i;
      BlockKeys keys;
      keys.read({numbers, nullptr, nullptr, nullptr, BLOCK}, 0);
      uint64_t seen = ALL;
      code.visible<1>(keys, query, 0, 1, false, &seen);
      if (!seen) continue;
      bool whole = seen == ALL;
      if (count > first[r] && end[count - 1] == block && full[count - 1] == whole) {
        end[count - 1] = block + BLOCK;
        continue;
      }
      if (count == room) return -1;
      begin[count] = block, end[count] = block + BLOCK, full[count++] = whole;
    }
  }
  first[rows] = (int32_t)count;
  return count;
}

extern "C" int headway_forward(const headway_call* call) {
  const headway_call& c = *call;
  if (int wrong = unknown(c)) return wrong;
  return by_words(c, [&](auto half) {
    Forward<half.value> forward(c);
#pragma omp parallel num_threads(team_of(c.threads, forward.w.count))
    forward.compute();
    return forward.failed;
  });
}
