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
    double above_s;     // what the descent that the effort buys could save at most
    double bottleneck;  // T
    Span<Row> rows;     // the exact split's; none where it was not the best
    Int sweeps;         // made
};

// For an `exact` split no descent is made, neither rows nor tokens are written, and the bottleneck is its own even
// where the cost is that of replicas left alone. Everything is taken from `room`.
BestSplit best_split(const Problem& problem, const Holders& holders, double effort, bool exact, Workspace& room);

// Count in `flow.busy`, which has all tokens at home, the exact split's ways, without making its rows.
void count_exact(Flow& flow, const Problem& problem, const Holders& holders, const Exact& exact, Workspace& room);

}  // namespace prophet
