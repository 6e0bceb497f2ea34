// No instructions beyond the architecture's own.
#pragma once
// lanes; rows of a group, panels at a time, and rows of a tile of bytes (panel_tile.h), in registers
constexpr int W = 4, ROWS = 2, WIDE = 1, TALL = 1;
#include "vec_plain.h"

namespace {
namespace portable {
using namespace plain;
}
}  // namespace
