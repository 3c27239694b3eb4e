#include "holders.h"

#include <algorithm>

namespace prophet {

Holders index_holders(ConstBoolGrid holds_ER, Workspace& room) {
    Int many = 0, arcs = 0;
    Ints count_E = room.ints(holds_ER.rows);
    for (Int e = 0; e < holds_ER.rows; e++) {
        Int n = 0;
        for (bool held : holds_ER[e]) n += held;
        count_E[e] = n;
        if (n > 1) {
            many++;
            arcs += n;
        }
    }
    Holders holders{room.ints(many), room.ints(many + 1), room.ints(arcs)};
    Int j = 0, a = 0;
    for (Int e = 0; e < holds_ER.rows; e++) {
        if (count_E[e] < 2) continue;
        holders.expert_M[j] = e;
        holders.start[j++] = a;
        Span<const bool> held = holds_ER[e];
        for (Int r = 0; r < held.size; r++) {
            if (held[r]) holders.rank_A[a++] = r;
        }
    }
    holders.start[many] = a;
    return holders;
}

Holders index_replicas(ConstInts replica_expert, ConstInts replica_rank, ConstInts home_E, Workspace& room) {
    Int used = replica_expert.size;
    Ints place_E = room.ints(home_E.size);  // replicas of every expert, then where the next one is written
    place_E.fill(0);
    for (Int e : replica_expert) place_E[e]++;
    Int many = 0;
    for (Int n : place_E) many += n > 0;
    Holders holders{room.ints(many), room.ints(many + 1), room.ints(used + many)};
    Int j = 0, a = 0;
    for (Int e = 0; e < home_E.size; e++) {
        Int n = place_E[e];
        if (n == 0) continue;
        holders.expert_M[j] = e;
        holders.start[j++] = a;
        holders.rank_A[a] = home_E[e];
        place_E[e] = a + 1;
        a += n + 1;
    }
    holders.start[many] = a;
    for (Int i = 0; i < used; i++) holders.rank_A[place_E[replica_expert[i]]++] = replica_rank[i];
    for (j = 0; j < many; j++) {
        std::sort(holders.rank_A.data + holders.start[j], holders.rank_A.data + holders.start[j + 1]);
    }
    return holders;
}

void list_by_rank(const Holders& holders, Int ranks, Ints first, Ints row) {
    first.fill(0);
    for (Int r : holders.rank_A) first[r + 2]++;
    for (Int r = 2; r < ranks + 2; r++) first[r] += first[r - 1];
    for (Int j = 0; j < holders.experts(); j++) {
        for (Int k = holders.start[j]; k < holders.start[j + 1]; k++) row[first[holders.rank_A[k] + 1]++] = j;
    }
}

void fewest_first(ConstInts first, Int segments, Ints order, Workspace& room) {
    Scope scope(room);
    Int longest = 0;
    for (Int i = 0; i < segments; i++) longest = std::max(longest, first[i + 1] - first[i]);
    Ints place = room.ints(longest + 2);  // a counting sort, which keeps equals in their order
    place.fill(0);
    for (Int i = 0; i < segments; i++) place[first[i + 1] - first[i] + 1]++;
    for (Int n = 1; n < place.size; n++) place[n] += place[n - 1];
    for (Int i = 0; i < segments; i++) order[place[first[i + 1] - first[i]]++] = i;
}

}  // namespace prophet
