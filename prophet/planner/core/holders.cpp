#include "holders.h"

namespace prophet {

Placement::Placement(const Problem& problem, ConstInts limit_R, Workspace& room)
    : holds_ER(room.array<bool>(problem.experts() * problem.ranks()).data, problem.experts(), problem.ranks()),
      free_R(room.ints(problem.ranks())) {
    holds_ER.flat().fill(false);
    for (Int e = 0; e < problem.experts(); e++) holds_ER[e][problem.home_E[e]] = true;
    free_R.copy_from(limit_R);
}

void Placement::copy_from(const Placement& other) {
    holds_ER.flat().copy_from(other.holds_ER.flat());
    free_R.copy_from(other.free_R);
    replicas = other.replicas;
}

void Placement::add(Int expert, Int rank) {
    holds_ER[expert][rank] = true;
    free_R[rank]--;
    replicas++;
}

void Placement::remove(Int expert, Int rank) {
    holds_ER[expert][rank] = false;
    free_R[rank]++;
    replicas--;
}

Holders index_holders(ConstBoolGrid holds_ER, Workspace& room) {
    Int most = 0, many = 0, arcs = 0;
    for (Int e = 0; e < holds_ER.rows; e++) each_holder(holds_ER[e], [&](Int) { most++; });
    Holders all{room.ints(holds_ER.rows), room.ints(holds_ER.rows + 1), room.ints(most)};
    for (Int e = 0; e < holds_ER.rows; e++) {
        const Int first = arcs;
        each_holder(holds_ER[e], [&](Int r) { all.rank_A[arcs++] = r; });
        if (arcs - first < 2) {
            arcs = first;
            continue;
        }
        all.expert_M[many] = e;
        all.start[many++] = first;
    }
    all.start[many] = arcs;
    return {all.expert_M.part(0, many), all.start.part(0, many + 1), all.rank_A.part(0, arcs)};
}

}  // namespace prophet
