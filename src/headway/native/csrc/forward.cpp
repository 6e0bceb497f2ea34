// headway_forward: one call, by a team of its own.
#include "attention.h"

namespace {

template <bool HALF>
int run(const headway_call& c) {
  Forward<HALF> forward(c);
  int threads = (int)(c.threads < forward.all_items ? c.threads : forward.all_items);
#pragma omp parallel num_threads(threads < 1 ? 1 : threads)
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
