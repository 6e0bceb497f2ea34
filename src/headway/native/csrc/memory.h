// Memory of a call: arrays that are freed with their owner, and huge pages where the system supports them.
#pragma once
#include <stdlib.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "headway.h"
#include "vec.h"

namespace {

// Allocates floats; large arrays in huge pages, if the system supports them. Returns null if out of memory.
INLINE float* floats(int64_t count) {
  size_t bytes = (size_t)count * 4, page = bytes < (4u << 20) ? 64 : 2u << 20;
  bytes = (bytes + page - 1) / page * page;
  float* at = (float*)aligned_alloc(page, bytes ? bytes : page);
#ifdef MADV_HUGEPAGE
  if (at && page > 64) madvise(at, bytes, MADV_HUGEPAGE);
#endif
  return at;
}

// Owns memory from malloc, which it frees at its end.
template <class T>
struct Owned {
  T* at = nullptr;
  ~Owned() { free(at); }
  void operator=(T* x) { at = x; }
  T* operator->() const { return at; }
  operator T*() const { return at; }
};

// Asks for huge pages for a result: the page faults of small ones can cost as much as computing a sliding window.
INLINE void large_pages(const headway_tensor& t, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t page = 2u << 20;
  uintptr_t at = (uintptr_t)t.data, begin = (at + page - 1) / page * page, end = (at + (uintptr_t)bytes) / page * page;
  if (end > begin) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace
