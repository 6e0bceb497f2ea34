// Advanced SIMD with dot products: four products of signed bytes in one instruction.
#pragma once
#include "vec_neon.h"

namespace {
namespace dotprod {
using namespace neon;

INLINE vi add_four(vi acc, vi w, const int32_t* x) {
  return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)vdupq_n_s32(*x));
}

}  // namespace dotprod
}  // namespace
