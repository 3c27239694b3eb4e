// The exact split: the lowest bottleneck, then the fewest tokens between nodes, then between ranks.
//
// Shape legend: R ranks, E experts, M experts held by more than one rank, A arcs (one per holder of those experts).
//
// An expert with one holder leaves no choice. The others form a transport problem: arcs (expert, holder) carry integer
// tokens, rank d takes at most cap[d] = floor(T * speed[d]). Start from the cheapest assignment without caps (local
// tokens stay; the rest stays in the node; the rest goes where there is room), then move excess along shortest
// augmenting paths, where a token that must leave its node costs far more than one that must leave its rank. Shortest
// paths keep the flow cheapest for the loads it has. If the excess cannot leave the set of ranks it reaches, no
// assignment at this T exists, the set itself says how far T must rise (Newton's method on the cut), and the answer at
// the final T is exact.
#pragma once

#include "holders.h"
#include "problem.h"

namespace prophet {

struct Exact {
    Ints tokens_A;  // by arc
    Ints load_R;
    double bottleneck;  // the largest load_R / speed_R, roughly: the T of the caps
};

// Minimises the bottleneck, but not below `at_least`.
Exact solve_exact(ConstIntGrid load_RE, ConstInts total_E, ConstInts fixed_R, const Holders& holders, ConstInts node_R,
                  ConstFloats speed_R, double at_least, Workspace& room);

// The same at no least bottleneck.
Exact exact_split(ConstIntGrid load_RE, ConstInts home_E, ConstInts node_R, ConstFloats speed_R, const Holders& holders,
                  Workspace& room);
Exact level_out(const Problem& problem, const Holders& holders, Workspace& room);

}  // namespace prophet
