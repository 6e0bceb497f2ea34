// No instructions beyond the architecture's own.
#pragma once
constexpr int W = 4, ROWS = 2, WIDE = 1;  // lanes; rows of a group, panels at a time, in registers
#include "vec_plain.h"

namespace {
namespace portable {
using namespace plain;
}
}  // namespace
