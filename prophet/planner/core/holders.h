// Who holds what: arcs by expert and by rank.
//
// Shape legend: R ranks, E experts, M experts held by more than one rank, A arcs (one per holder of those experts).
#pragma once

#include "views.h"
#include "workspace.h"

namespace prophet {

// Experts with several holders, ascending, and their holders, ascending in every expert.
struct Holders {
    Ints expert_M;
    Ints start;   // [M + 1] where the arcs of every expert begin
    Ints rank_A;  // the holder of every arc

    Int experts() const { return expert_M.size; }
    Int arcs() const { return rank_A.size; }
    Int replicas() const { return rank_A.size - expert_M.size; }
};

Holders index_holders(ConstBoolGrid holds_ER, Workspace& room);

// The same from a list of replicas in any order.
Holders index_replicas(ConstInts replica_expert, ConstInts replica_rank, ConstInts home_E, Workspace& room);

// The experts of every rank: those of rank r are row[first[r]] .. row[first[r + 1] - 1]; `first` has R + 2 places.
void list_by_rank(const Holders& holders, Int ranks, Ints first, Ints row);

// Write the segments first[i] .. first[i + 1] - 1 to `order`, shortest first, lower index first among equals.
void fewest_first(ConstInts first, Int segments, Ints order, Workspace& room);

}  // namespace prophet
