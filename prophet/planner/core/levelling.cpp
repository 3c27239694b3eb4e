#include "levelling.h"

#include <algorithm>
#include <cmath>

namespace prophet {

constexpr Int TAKES_ALL = Int{1} << 62;  // above any number of tokens
constexpr Int NEAR = Int{1} << 61;

namespace {

// A placement under construction: slots, and who holds what.
struct Holding {
    Ints free_R;
    Grid<bool> holds_ER;

    Holding(const Problem& problem, ConstInts limit_R, const Replicas& found, Workspace& room)
        : free_R(room.ints(problem.ranks())),
          holds_ER(room.array<bool>(problem.experts() * problem.ranks()).data, problem.experts(), problem.ranks()) {
        free_R.copy_from(limit_R);
        holds_ER.flat().fill(false);
        for (Int e = 0; e < problem.experts(); e++) holds_ER[e][problem.home_E[e]] = true;
        for (Int i = 0; i < found.used; i++) mark(found.expert[i], found.rank[i]);
    }
    void mark(Int e, Int r) const {
        free_R[r]--;
        holds_ER[e][r] = true;
    }
};

// The rank to take `ask` tokens of `expert`: one that can take all of it (in the giver's node first, then with most
// local tokens), or else the roomiest; -1: none.
Int pick_taker(const Problem& problem, ConstInts space, Int ask, Int giver, Int expert, const Holding& holding) {
    Int taker = -1, most = 0;
    for (Int r = 0; r < space.size; r++) {
        if (space[r] <= 0 || holding.free_R[r] <= 0 || holding.holds_ER[expert][r]) continue;
        Int worth = space[r];
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

}  // namespace

void level_loads(const Problem& problem, ConstInts limit_R, Replicas& found, Workspace& room) {
    Scope scope(room);
    Int ranks = problem.ranks(), experts = problem.experts();
    found.used = 0;
    Holding holding(problem, limit_R, found, room);
    Ints space = room.ints(ranks);  // tokens up to the level; negative above it
    Ints left_E = room.ints(experts), first_R = room.ints(ranks), next_E = room.ints(experts);
    left_E.copy_from(problem.total_E);
    first_R.fill(-1);
    for (Int e = experts - 1; e >= 0; e--) {  // the experts of every home, as linked lists
        next_E[e] = first_R[problem.home_E[e]];
        first_R[problem.home_E[e]] = e;
    }
    double load = 0.0, speed = 0.0;
    for (Int r = 0; r < ranks; r++) {
        load += static_cast<double>(problem.home_load[r]);
        speed += problem.speed_R[r];
    }
    for (Int r = 0; r < ranks; r++) {
        space[r] = static_cast<Int>(std::floor(load / speed * problem.speed_R[r] + 1e-6)) - problem.home_load[r];
    }
    while (found.used < found.most()) {
        Int giver = -1, heaviest = -1;
        for (Int r = 0; r < ranks; r++) {
            if (space[r] < 0 && (giver < 0 || space[r] < space[giver])) giver = r;
        }
        if (giver < 0) break;
        for (Int e = first_R[giver]; e >= 0; e = next_E[e]) {
            if (left_E[e] > 0 && (heaviest < 0 || left_E[e] > left_E[heaviest])) heaviest = e;
        }
        Int ask = heaviest < 0 ? 0 : std::min(-space[giver], left_E[heaviest]);
        Int taker = heaviest < 0 ? -1 : pick_taker(problem, space, ask, giver, heaviest, holding);
        if (taker < 0) {
            space[giver] = 0;  // no more can be done for it
            continue;
        }
        Int part = std::min(ask, space[taker]);
        left_E[heaviest] -= part;
        space[giver] += part;
        space[taker] -= part;
        holding.mark(heaviest, taker);
        found.append(heaviest, taker);
    }
}

void add_spares(const Problem& problem, ConstInts limit_R, Int per_rank, Replicas& found, Workspace& room) {
    Scope scope(room);
    Int ranks = problem.ranks(), experts = problem.experts();
    Holding holding(problem, limit_R, found, room);
    Floats share_E = room.floats(experts), load_R = room.floats(ranks);
    Ints copies_E = room.ints(experts);
    load_R.fill(0.0);
    copies_E.fill(1);
    for (Int i = 0; i < found.used; i++) copies_E[found.expert[i]]++;
    for (Int e = 0; e < experts; e++) share_E[e] = static_cast<double>(problem.total_E[e] / copies_E[e]);
    for (Int e = 0; e < experts; e++) load_R[problem.home_E[e]] += share_E[e];
    for (Int i = 0; i < found.used; i++) load_R[found.rank[i]] += share_E[found.expert[i]];
    for (Int n = std::min(per_rank * ranks, found.most() - found.used); n > 0; n--) {
        Int e = 0;
        for (Int other = 1; other < experts; other++) {
            if (share_E[other] > share_E[e]) e = other;
        }
        if (share_E[e] <= 0.0) break;
        Int target = -1;
        for (Int r = 0; r < ranks; r++) {
            bool may = holding.free_R[r] > 0 && !holding.holds_ER[e][r];
            if (may && (target < 0 || load_R[r] < load_R[target])) target = r;
        }
        share_E[e] *= static_cast<double>(copies_E[e]) / static_cast<double>(copies_E[e] + 1);
        copies_E[e]++;
        if (target < 0) {
            share_E[e] = 0.0;
            continue;
        }
        load_R[target] += share_E[e];
        holding.mark(e, target);
        found.append(e, target);
    }
}

Cost split_cost(const Problem& problem, const Replicas& replicas, double effort, bool quick, Workspace& room) {
    Scope scope(room);
    return best_split(problem, index_replicas(replicas, problem.home_E, room), effort, quick, room).cost;
}

}  // namespace prophet
