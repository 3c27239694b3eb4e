// A split as a list: whose tokens go where. Sparse, for groups so large that [R, E, R] integers would be too many.
#pragma once

#include "holders.h"

namespace prophet {

// Tokens that go from `source` to `rank`.
struct Row {
    Int source;
    Int expert;
    Int rank;
    Int tokens;
};

// Turn tokens by arc into rows. Within an expert local tokens stay, then sources meet holders of their own node in rank
// order, then all others do.
Span<Row> expand(ConstIntGrid load_RE, const Holders& holders, ConstInts node_R, ConstInts tokens_A, Workspace& room);

}  // namespace prophet
