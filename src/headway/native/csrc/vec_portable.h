// The portable level: no instructions beyond the base architecture.
#pragma once
// lanes of a vector; rows of a group, panels at a time, and rows of a tile of bytes (panel_tile.h), as registers allow
constexpr int W = 4, ROWS = 2, WIDE = 1, TALL = 1;
#include "vec_plain.h"

namespace {
namespace portable {
using namespace plain;
}
}  // namespace
