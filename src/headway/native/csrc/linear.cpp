// headway_linear: one call, by a team of its own.
#include "products.h"

#include <omp.h>

extern "C" int headway_linear(const headway_products* call) {
  if (int wrong = Products::unknown(*call)) return wrong;
  static thread_local Scratch scratch;
  Products products(*call);
  if (!products.ready(scratch)) return 2;
  int64_t threads = call->threads < products.panels ? call->threads : products.panels;
#pragma omp parallel num_threads((int)(threads < 1 ? 1 : threads))
  {
    products.prepare(omp_get_thread_num(), omp_get_num_threads());
#pragma omp barrier
    products.multiply(omp_get_thread_num(), omp_get_num_threads());
  }
  return 0;
}
