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
    Int many = 0, arcs = 0;
    Ints count_E = room.ints(holds_ER.rows);
    for (Int e = 0; e < holds_ER.rows; e++) {
        Int n = 0;
        each_holder(holds_ER[e], [&](Int) { n++; });
        count_E[e] = n;
        many += n > 1;
        arcs += n > 1 ? n : 0;
    }
    Holders holders{room.ints(many), room.ints(many + 1), room.ints(arcs)};
    Int j = 0, a = 0;
    for (Int e = 0; e < holds_ER.rows; e++) {
        if (count_E[e] < 2) continue;
        holders.expert_M[j] = e;
        holders.start[j++] = a;
        each_holder(holds_ER[e], [&](Int r) { holders.rank_A[a++] = r; });
    }
    holders.start[many] = a;
    return holders;
}

}  // namespace prophet
