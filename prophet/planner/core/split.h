// The split that makes a step shortest, for given holders.
//
// First the exact split (`exact.cpp`). Where exchanges are a part of the step that matters, descent (`descent.cpp`)
// goes on from there, because the busiest sender or receiver counts and not the sum, and because a slightly higher
// bottleneck can be worth a shorter exchange. The better split is taken.
#pragma once

#include "cost.h"
#include "holders.h"

namespace prophet {

struct Exact {
    Ints tokens_A;      // by arc
    Ints have_A;        // tokens that every arc's own rank routes
    double bottleneck;  // the lowest there is, roughly: the T of the caps

    Int local(Int arc) const { return std::min(tokens_A[arc], have_A[arc]); }
};

Exact exact_split(const Problem& problem, const Holders& holders, Workspace& room);

// Let every rank move tokens of experts first .. last - 1, each from its dearest holder to its cheapest; returns the
// number of moves.
Int settle(Flow& flow, Int first, Int last, Int q);
inline Int sweep(Flow& flow, Int q) { return settle(flow, 0, flow.experts(), q); }

// Descend with growing q for at most `sweeps` sweeps; the best found stays in place. Fewer sweeps than levels are
// spread over them: from the first level on where there is `far` to go, because low q moves most, else up to the last.
void shorten(Flow& flow, Int sweeps, bool far, Workspace& room);

// How many sweeps over `pairs` of a rank and an expert fit into so many seconds.
Int affordable(double seconds, Int pairs);

// Tokens that go from `source` to `rank`.
struct Row {
    Int source;
    Int expert;
    Int rank;
    Int tokens;
};

struct BestSplit {
    Flow flow;  // what is busy
    Exact exact;
    Ints arc_A;  // the arc of `flow` for every one of the holders'
    Cost cost;
    bool by_arcs;  // whether the tokens of `flow` are the split; else it is the exact one
};

// No descent is made for a `quick` split. Everything is taken from `room`.
BestSplit best_split(const Problem& problem, const Holders& holders, double effort, bool quick, Workspace& room);

// Write the tokens of the experts with several holders to `rows`, of which there are `most_rows`; returns how many.
Int most_rows(const BestSplit& split);
Int write_rows(const Problem& problem, const Holders& holders, const BestSplit& split, Span<Row> rows, Workspace& room);

// Write all tokens out, [R * E, R], where those of the `shared_M` are in `rows`.
void write_tokens(const Problem& problem, ConstInts shared_M, Span<Row> rows, IntGrid tokens, Workspace& room);

// The seconds of a step with these holders.
double step_seconds(const Problem& problem, ConstBoolGrid holds_ER, double effort, bool quick, Workspace& room);

// The exact split of the other experts in what is busy and in the copies moved, for a flow of those that `takes_part`.
void place_others(Flow& flow, const Holders& holders, Span<bool> takes_part, Workspace& room);

}  // namespace prophet
