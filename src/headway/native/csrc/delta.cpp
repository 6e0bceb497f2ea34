// headway_delta_rule: each head is computed by one thread of a team.
#include "delta.h"
#include "team.h"

#include <omp.h>

extern "C" int headway_delta_rule(const headway_delta* call) {
  const headway_delta& c = *call;
  if (c.dim > WIDEST || c.dim_v > WIDEST || (c.channels != 1 && c.channels != c.dim)) return 3;
  return by_type(c.type, [&](auto half) {
    auto by_channels = [&](auto channels) {
      int failed = 0;
      const int64_t heads = c.batch * c.heads;
#pragma omp parallel num_threads(team_of(c.threads, heads)) reduction(max : failed)
      {
        NoSubnormals while_it_runs;
        Delta<decltype(half)::value, decltype(channels)::value> delta(c);
        failed = delta.ready() ? 0 : 2;
        Share mine(heads, omp_get_thread_num(), omp_get_num_threads());
        for (int64_t i = mine.from; i < mine.to && !failed; i++) delta.run(i / c.heads, i % c.heads);
      }
      return failed;
    };
    return c.channels == 1 ? by_channels(Count<false>()) : by_channels(Count<true>());
  });
}
