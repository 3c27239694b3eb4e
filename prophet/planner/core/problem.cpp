#include "problem.h"

#include <algorithm>

namespace prophet {

void gather_columns(ConstIntGrid load_RE, ConstInts experts, IntGrid into) {
    constexpr Int TOGETHER = 8;  // rows, whose tokens of one expert fill a cache line
    for (Int first = 0; first < load_RE.rows; first += TOGETHER) {
        Int last = std::min(first + TOGETHER, load_RE.rows);
        for (Int i = 0; i < experts.size; i++) {
            Ints column = into[i];
            for (Int r = first; r < last; r++) column[r] = load_RE[r][experts[i]];
        }
    }
}

Problem make_problem(ConstIntGrid load_RE, ConstInts home_E, ConstInts node_R, ConstFloats speed_R,
                     ConstFloats seconds_per_token_R, ConstFloats figures, Workspace& room) {
    Int ranks = load_RE.rows, experts = load_RE.columns, nodes = node_R[ranks - 1] + 1, signs = 0;
    Ints total_E = room.ints(experts), home_groups = room.ints(ranks), node_first = room.ints(nodes + 1);
    IntGrid busy = room.ints(RESOURCES, ranks);
    total_E.fill(0);
    busy.flat().fill(0);
    home_groups.fill(0);
    for (Int r = 0; r < ranks; r++) {
        ConstInts load_E = load_RE[r];
        Int every = 0, near = 0;
        for (Int e = 0; e < experts; e++) {
            total_E[e] += load_E[e];
            every += load_E[e];
            signs |= load_E[e];
        }
        for (Int e = 0; e < experts && nodes > 1; e++) {
            Int home = home_E[e];
            if (node_R[home] != node_R[r] || home == r) continue;
            near += load_E[e];
            busy[IN_NEAR][home] += load_E[e];
        }
        busy[OUT_NEAR][r] = near;
        busy[OUT_FAR][r] = every - near;  // with the local ones, until those are counted
    }
    require(signs >= 0, "load must not be negative");
    for (Int e = 0; e < experts; e++) {
        Int home = home_E[e], local = load_RE[home][e];
        busy[PRODUCTS][home] += total_E[e];
        busy[OUT_FAR][home] -= local;
        busy[IN_FAR][home] += total_E[e] - local;
        home_groups[home] += total_E[e] > 0;
    }
    for (Int r = 0; r < ranks; r++) {
        busy[IN_FAR][r] -= busy[IN_NEAR][r];
        if (nodes == 1) std::swap(busy[OUT_NEAR][r], busy[OUT_FAR][r]);
        if (nodes == 1) std::swap(busy[IN_NEAR][r], busy[IN_FAR][r]);
    }
    for (Int r = ranks - 1; r >= 0; r--) node_first[node_R[r]] = r;
    node_first[nodes] = ranks;
    return {load_RE,     total_E, home_E,      node_R, speed_R, seconds_per_token_R, Figures::from(figures), busy,
            home_groups, node_first};
}

}  // namespace prophet
