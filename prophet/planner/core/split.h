// The split that makes a step shortest, for given holders.
//
// First the exact split (`exact.h`). Where exchanges are a part of the step that matters, descent (`descent.h`) goes on
// from there, because the busiest sender or receiver counts and not the sum, and because a slightly higher bottleneck
// can be worth a shorter exchange. The better split is taken.
#pragma once

#include "cost.h"
#include "descent.h"
#include "exact.h"
#include "rows.h"

namespace prophet {

struct BestSplit {
    Flow flow;  // what is busy; has the tokens where there are no rows
    Cost cost;
    double bottleneck;  // T
    Span<Row> rows;     // the exact split's, where it is the best and not quick
};

// For a `quick` split no descent is made, and neither rows nor tokens are written. Everything is taken from `room`.
BestSplit best_split(const Problem& problem, const Holders& holders, double effort, bool quick, Workspace& room);

// Its rows, the same for all ranks.
Span<Row> rows_of(const BestSplit& split, const Holders& holders, Workspace& room);
Span<Row> exact_rows_of(ConstInts tokens_A, ConstIntGrid load_RE, const Holders& holders, ConstInts node_R,
                        Workspace& room);

}  // namespace prophet
