// headway_forward: one call, by a team of its own.
#include "attention.h"
#include "team.h"

namespace {

template <bool HALF>
int run(const headway_call& c) {
  Forward<HALF> forward(c);
#pragma omp parallel num_threads(team_of(c.threads, forward.all_items))
  forward.compute();
  return forward.failed;
}

}  // namespace

extern "C" int headway_forward(const headway_call* call) {
  const headway_call& c = *call;
  if (int wrong = unknown(c)) return wrong;
#if HEADWAY_LEVEL >= 3
  if (c.type == HEADWAY_BFLOAT16) return run<true>(c);
#endif
  return run<false>(c);
}
