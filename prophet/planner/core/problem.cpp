#include "problem.h"

#include <algorithm>
#include <utility>

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

Problem::Problem(const Given& given, Workspace& room, bool counts_spread)
    : Given(given),
      counts_spread(counts_spread),
      total_E(room.ints(experts())),
      home_busy(room.ints(RESOURCES, ranks())),
      home_groups(room.ints(ranks())),
      node_first(room.ints(nodes() + 1)) {
    const bool one_node = nodes() == 1;
    const IntGrid busy = home_busy;
    const Ints total = total_E;
    Int signs = 0;
    total.fill(0);
    busy.flat().fill(0);
    home_groups.fill(0);
    for (Int r = 0; r < ranks(); r++) {
        const ConstInts load_E = load_RE[r];
        Int every = 0;
        for (Int e = 0; e < load_E.size; e++) {
            total[e] += load_E[e];
            every += load_E[e];
            signs |= load_E[e];
        }
        for (Int e = 0; e < load_E.size && !one_node; e++) {
            Int home = home_E[e];
            if (node_R[home] != node_R[r] || home == r) continue;
            busy[OUT_NEAR][r] += load_E[e];
            busy[IN_NEAR][home] += load_E[e];
        }
        busy[OUT_FAR][r] = every;
    }
    require(signs >= 0, "load must not be negative");
    for (Int e = 0; e < experts(); e++) {
        Int home = home_E[e], local = load_RE[home][e];
        busy[PRODUCTS][home] += total[e];
        busy[OUT_FAR][home] -= local;
        busy[IN_FAR][home] += total[e] - local;
        home_groups[home] += total[e] > 0;
    }
    part_levels(busy, one_node);
    for (Int r = ranks() - 1; r >= 0; r--) node_first[node_R[r]] = r;
    node_first[nodes()] = ranks();
}

void part_levels(IntGrid busy, bool one_node) {
    for (auto [near, far] : {std::pair{OUT_NEAR, OUT_FAR}, std::pair{IN_NEAR, IN_FAR}}) {
        for (Int r = 0; r < busy.columns; r++) {
            if (one_node) busy[near][r] = busy[far][r];
            busy[far][r] -= busy[near][r];
        }
    }
}

}  // namespace prophet
