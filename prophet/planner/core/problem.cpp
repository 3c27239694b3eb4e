#include "problem.h"

namespace prophet {

Figures Figures::from(ConstFloats array) {
    return {array[0],  {array[1], array[2]}, {array[3], array[4]}, array[5], array[6], array[7], array[8], array[9],
            array[10], 1.0 - array[11]};
}

void count_totals(ConstIntGrid load_RE, Ints total_E) {
    total_E.fill(0);
    for (Int r = 0; r < load_RE.rows; r++) {
        ConstInts load = load_RE[r];
        for (Int e = 0; e < total_E.size; e++) total_E[e] += load[e];
    }
}

bool any_negative(ConstIntGrid load_RE) {
    Int signs = 0;
    for (Int n : load_RE.flat()) signs |= n;
    return signs < 0;
}

namespace {

// What rank r sends and what others receive of it: into the rows of `moved`, whose last one holds, until all ranks were
// counted, what stays on each rank.
void count_source(ConstInts load_E, Int r, ConstInts home_E, ConstInts node_R, bool one_node, IntGrid moved) {
    Int local = 0, near = 0, every = 0;
    for (Int e = 0; e < home_E.size; e++) {
        Int n = load_E[e], home = home_E[e];
        every += n;
        if (home == r) {
            local += n;
        } else if (!one_node && node_R[home] == node_R[r]) {
            near += n;
            moved[RECEIVED_NEAR][home] += n;
        }
    }
    moved[RECEIVED_FAR][r] = local;
    moved[SENT_NEAR][r] = one_node ? every - local : near;
    moved[SENT_FAR][r] = one_node ? 0 : every - local - near;
}

// Fill what holds when all tokens go home.
void count_home(ConstIntGrid load_RE, ConstInts total_E, ConstInts home_E, ConstInts node_R, Ints home_load,
                Ints home_groups, IntGrid moved) {
    home_load.fill(0);
    home_groups.fill(0);
    moved.flat().fill(0);
    for (Int e = 0; e < home_E.size; e++) {
        home_load[home_E[e]] += total_E[e];
        if (total_E[e] > 0) home_groups[home_E[e]]++;
    }
    Int ranks = node_R.size;
    bool one_node = node_R[ranks - 1] == 0;
    for (Int r = 0; r < ranks; r++) count_source(load_RE[r], r, home_E, node_R, one_node, moved);
    for (Int d = 0; d < ranks; d++) {
        Int remote = home_load[d] - moved[RECEIVED_FAR][d];
        if (one_node) moved[RECEIVED_NEAR][d] = remote;
        moved[RECEIVED_FAR][d] = remote - moved[RECEIVED_NEAR][d];
    }
}

}  // namespace

Problem make_problem(ConstIntGrid load_RE, ConstInts home_E, ConstInts node_R, ConstFloats speed_R,
                     ConstFloats seconds_per_token_R, ConstFloats figures, Workspace& room) {
    Int ranks = load_RE.rows, experts = load_RE.columns;
    Ints total_E = room.ints(experts), home_load = room.ints(ranks), home_groups = room.ints(ranks);
    IntGrid home_moved = room.ints(TRAFFIC, ranks);
    count_totals(load_RE, total_E);
    count_home(load_RE, total_E, home_E, node_R, home_load, home_groups, home_moved);
    return {load_RE,   total_E,     home_E,    node_R, speed_R, seconds_per_token_R, Figures::from(figures),
            home_load, home_groups, home_moved};
}

}  // namespace prophet
