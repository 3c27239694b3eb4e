// Spare replicas that let any rank's unforeseen load drain to any other: what makes a stale placement good.
//
// Under a split, rank a can hand load to rank b if an expert of which a computes tokens is held by b, too. If these
// links connect all ranks both ways, an exact split levels every drift that is smaller than the tokens on the links.
// The point optimum of a prediction leaves ranks that cannot drain, and pairs of ranks closed in themselves; a replica
// for each of them is enough.
#pragma once

#include "replicas.h"
#include "problem.h"

namespace prophet {

// Appends the replicas that connect all ranks by links of at least `floor` tokens. The tokens on every replica given
// are its own where they are `known`; else those of the exact split.
void add_spares(
    const Problem& problem, ConstInts limit_R, Int floor, bool known, Replicas& replicas, Workspace& room);

}  // namespace prophet
