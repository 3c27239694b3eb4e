// What overloaded ranks hand over to others, in few and large pieces; and copies of hot experts against drift.
#pragma once

#include "replicas.h"
#include "split.h"

namespace prophet {

// Brings loads down to the even level: the most overloaded rank gives its heaviest expert to one rank that can take all
// of its excess (nearest first, then most local tokens), or else to the roomiest one. Linear in ranks for every
// replica.
void level_loads(const Problem& problem, ConstInts limit_R, Replicas& found, Workspace& room);

// Adds copies of the experts with most tokens per holder, `per_rank` on every rank with slots, each on the rank that
// then computes least: what an exact split can turn to when routing drifts.
void add_spares(const Problem& problem, ConstInts limit_R, Int per_rank, Replicas& found, Workspace& room);

// Cost of these replicas under the exact split, or (not `quick`) under the split that they will get.
Cost split_cost(const Problem& problem, const Replicas& replicas, double effort, bool quick, Workspace& room);

}  // namespace prophet
