// Who holds what: as a table that is built and copied, and as lists that are read.
//
// Shape legend: R ranks, E experts, M experts held by more than one rank, A arcs (one per holder of those experts).
#pragma once

#include <cstring>

#include "problem.h"

namespace prophet {

// Calls `use(rank)` for the ranks that hold an expert, ascending.
template <typename Use>
void each_holder(Span<const bool> holds_R, Use use) {
    const bool* at = holds_R.begin();
    const auto left = [&] { return static_cast<std::size_t>(holds_R.end() - at); };
    while ((at = static_cast<const bool*>(std::memchr(at, true, left()))) != nullptr) use(at++ - holds_R.begin());
}

// A placement under construction. Every home holds its expert.
struct Placement {
    Grid<bool> holds_ER;
    Ints free_R;  // slots for further replicas
    Int replicas = 0;

    // One without replicas.
    Placement(const Problem& problem, ConstInts limit_R, Workspace& room);

    void copy_from(const Placement& other);
    void add(Int expert, Int rank);
    void remove(Int expert, Int rank);
    bool takes(Int expert, Int rank) const { return free_R[rank] > 0 && !holds_ER[expert][rank]; }
};

// Experts with several holders, ascending, and their holders, ascending in every expert.
struct Holders {
    Ints expert_M;
    Ints start;   // [M + 1] where the arcs of every expert begin
    Ints rank_A;  // the holder of every arc

    Int experts() const { return expert_M.size; }
    Int arcs() const { return rank_A.size; }
    Int replicas() const { return rank_A.size - expert_M.size; }
    ConstInts of(Int j) const { return rank_A.part(start[j], start[j + 1] - start[j]); }
};

Holders index_holders(ConstBoolGrid holds_ER, Workspace& room);

}  // namespace prophet
