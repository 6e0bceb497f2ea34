// headway_linear: one call with its own team of threads.
#include "products.h"
#include "team.h"

#include <omp.h>

namespace {

// Few rows: the team shares the outputs. Each weight is read once, and every thread reads all rows.
int by_outputs(const headway_products& c) {
  static thread_local Scratch scratch;
  Products products(c);
  if (!products.ready(scratch)) return 2;
#pragma omp parallel num_threads(team_of(c.threads, products.tasks))
  {
    products.prepare(omp_get_thread_num(), omp_get_num_threads());
#pragma omp barrier
    products.multiply(omp_get_thread_num(), omp_get_num_threads());
  }
  return 0;
}

// Many rows: threads take parts of the rows in turn, as many rows as stay in a thread's L2 cache while all weights pass.
// Parts are multiples of 24 or 48 rows, whole groups for all kernels, so sums do not depend on the number of threads.
int by_rows(const headway_products& c) {
  constexpr int64_t UNITS = HAS_TILES ? 48 : 24, MOST = 96;
  const int64_t units = (c.rows + UNITS - 1) / UNITS;
  const int threads = team_of(c.threads, units);
  int64_t parts = threads * ((c.rows + threads * MOST - 1) / (threads * MOST));
  if (parts > units) parts = units;
  int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t part = 0; part < parts; part++) {
    static thread_local Scratch scratch;
    Share mine(units, part, parts);
    int64_t first = mine.from * UNITS, end = mine.to * UNITS;
    Products products(c, first, (end < c.rows ? end : c.rows) - first);
    if (products.ready(scratch)) {
      products.prepare(0, 1);
      products.multiply(0, 1);
    } else {
#pragma omp atomic write
      failed = 2;
    }
  }
  return failed;
}

}  // namespace

extern "C" int headway_linear(const headway_products* call) {
  if (int wrong = Products::unknown(*call, call->rows)) return wrong;
  return call->rows > MOST_ROWS ? by_rows(*call) : by_outputs(*call);
}
