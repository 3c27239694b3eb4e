// What overloaded ranks hand over to others, in few and large pieces; and copies of hot experts against drift.
#include <algorithm>
#include <cmath>

#include "plan.h"

namespace prophet {

constexpr Int TAKES_ALL = Int{1} << 62;  // above any number of tokens
constexpr Int NEAR = Int{1} << 61;

// The rank to take `ask` tokens of `expert`: one that can take all of it (in the giver's node first, then with most
// local tokens), or else the roomiest; -1: none.
static Int pick_taker(const Problem& problem, ConstInts space_R, Int ask, Int giver, Int expert,
                      const Placement& found) {
    Int taker = -1, most = 0;
    for (Int r = 0; r < space_R.size; r++) {
        if (space_R[r] <= 0 || !found.takes(expert, r)) continue;
        Int worth = space_R[r];
        if (worth >= ask) {
            worth = TAKES_ALL + problem.load_RE[r][expert];
            if (problem.node_R[r] == problem.node_R[giver]) worth += NEAR;
        }
        if (worth > most) {
            taker = r;
            most = worth;
        }
    }
    return taker;
}

void level_loads(const Problem& problem, Placement& found, Workspace& room) {
    Scope scope(room);
    Int ranks = problem.ranks(), experts = problem.experts();
    Ints space_R = room.ints(ranks);  // tokens up to the level; negative above it
    Ints left_E = room.ints(experts);
    left_E.copy_from(problem.total_E);
    double load = 0.0, speed = 0.0;
    for (Int r = 0; r < ranks; r++) {
        load += static_cast<double>(problem.home_busy[PRODUCTS][r]);
        speed += problem.speed_R[r];
    }
    for (Int r = 0; r < ranks; r++) {
        space_R[r] =
            static_cast<Int>(std::floor(load / speed * problem.speed_R[r] + 1e-6)) - problem.home_busy[PRODUCTS][r];
    }
    while (true) {
        Int giver = -1, heaviest = -1;
        for (Int r = 0; r < ranks; r++) {
            if (space_R[r] < 0 && (giver < 0 || space_R[r] < space_R[giver])) giver = r;
        }
        if (giver < 0) return;
        for (Int e = 0; e < experts; e++) {
            if (problem.home_E[e] != giver || left_E[e] == 0) continue;
            if (heaviest < 0 || left_E[e] > left_E[heaviest]) heaviest = e;
        }
        Int ask = heaviest < 0 ? 0 : std::min(-space_R[giver], left_E[heaviest]);
        Int taker = heaviest < 0 ? -1 : pick_taker(problem, space_R, ask, giver, heaviest, found);
        if (taker < 0) {
            space_R[giver] = 0;  // no more can be done for it
            continue;
        }
        Int part = std::min(ask, space_R[taker]);
        left_E[heaviest] -= part;
        space_R[giver] += part;
        space_R[taker] -= part;
        found.add(heaviest, taker);
    }
}

void add_spares(const Problem& problem, Int per_rank, Placement& found, Workspace& room) {
    Scope scope(room);
    Int ranks = problem.ranks(), experts = problem.experts();
    Floats share_E = room.floats(experts), load_R = room.floats(ranks);
    Ints copies_E = room.ints(experts);
    load_R.fill(0.0);
    copies_E.fill(0);
    for (Int e = 0; e < experts; e++) {
        each_holder(found.holds_ER[e], [&](Int) { copies_E[e]++; });
        share_E[e] = static_cast<double>(problem.total_E[e] / copies_E[e]);
        each_holder(found.holds_ER[e], [&](Int r) { load_R[r] += share_E[e]; });
    }
    for (Int n = per_rank * ranks; n > 0; n--) {
        Int e = 0;
        for (Int other = 1; other < experts; other++) {
            if (share_E[other] > share_E[e]) e = other;
        }
        if (share_E[e] <= 0.0) return;
        Int target = -1;
        for (Int r = 0; r < ranks; r++) {
            if (found.takes(e, r) && (target < 0 || load_R[r] < load_R[target])) target = r;
        }
        share_E[e] *= static_cast<double>(copies_E[e]) / static_cast<double>(copies_E[e] + 1);
        copies_E[e]++;
        if (target < 0) {
            share_E[e] = 0.0;
            continue;
        }
        load_R[target] += share_E[e];
        found.add(e, target);
    }
}

}  // namespace prophet
