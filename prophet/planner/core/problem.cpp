#include "problem.h"

namespace prophet {

Problem make_problem(ConstIntGrid load_RE, ConstInts home_E, ConstInts node_R, ConstFloats speed_R,
                     ConstFloats seconds_per_token_R, ConstFloats figures, Workspace& room) {
    Int ranks = load_RE.rows, experts = load_RE.columns;
    bool one_node = node_R[ranks - 1] == 0;
    Ints total_E = room.ints(experts), home_groups = room.ints(ranks);
    IntGrid busy = room.ints(RESOURCES, ranks);
    total_E.fill(0);
    for (Int r = 0; r < ranks; r++) {
        ConstInts load_E = load_RE[r];
        for (Int e = 0; e < experts; e++) total_E[e] += load_E[e];
    }
    busy.flat().fill(0);
    home_groups.fill(0);
    for (Int e = 0; e < experts; e++) {
        busy[PRODUCTS][home_E[e]] += total_E[e];
        home_groups[home_E[e]] += total_E[e] > 0;
    }
    Ints received = busy[IN_NEAR];
    for (Int r = 0; r < ranks; r++) {
        ConstInts load_E = load_RE[r];
        Int local = 0, near = 0, every = 0;
        for (Int e = 0; e < experts; e++) {
            Int n = load_E[e], home = home_E[e];
            every += n;
            if (home == r) {
                local += n;
            } else if (!one_node && node_R[home] == node_R[r]) {
                near += n;
                received[home] += n;
            }
        }
        busy[OUT_NEAR][r] = one_node ? every - local : near;
        busy[OUT_FAR][r] = every - local - busy[OUT_NEAR][r];
        busy[IN_FAR][r] = busy[PRODUCTS][r] - local;  // from all nodes, until all are counted
    }
    for (Int r = 0; r < ranks; r++) {
        if (one_node) received[r] = busy[IN_FAR][r];
        busy[IN_FAR][r] -= received[r];
    }
    return {load_RE, total_E, home_E, node_R, speed_R, seconds_per_token_R, Figures::from(figures), busy, home_groups};
}

}  // namespace prophet
