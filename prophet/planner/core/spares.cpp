#include "spares.h"

#include "exact.h"

namespace prophet {

constexpr Int LOOKED_AT = 8;  // links, the largest first; a few may have no rank left to go to
constexpr Int ALL = Int{1} << 60;

namespace {

// One item for every holder of an expert, in a list by rank and in a list by expert; new replicas are items, too.
struct Items {
    Ints expert, rank, tokens, next_of_rank, next_of_expert, first_of_rank, first_of_expert;
    Ints queue;
    Span<bool> met;
    Int count = 0;

    Items(Int most, Int ranks, Int experts, Workspace& room)
        : expert(room.ints(most)),
          rank(room.ints(most)),
          tokens(room.ints(most)),
          next_of_rank(room.ints(most)),
          next_of_expert(room.ints(most)),
          first_of_rank(room.ints(ranks)),
          first_of_expert(room.ints(experts)),
          queue(room.ints(ranks)),
          met(room.array<bool>(experts)) {
        first_of_rank.fill(-1);
        first_of_expert.fill(-1);
    }

    void list_by_expert(Int e, Int r, Int n) {
        expert[count] = e;
        rank[count] = r;
        tokens[count] = n;
        next_of_expert[count] = first_of_expert[e];
        first_of_expert[e] = count;
        count++;
    }

    void list_by_rank(Int i) {
        next_of_rank[i] = first_of_rank[rank[i]];
        first_of_rank[rank[i]] = i;
    }

    void mark(Int e, Span<bool> holds, bool value) const {
        for (Int k = first_of_expert[e]; k >= 0; k = next_of_expert[k]) holds[rank[k]] = value;
    }

    // Adds `origin` to `seen`, and all ranks that it can drain to (`forward`) or that can drain to it.
    void spread(Span<bool> seen, Int origin, bool forward, Int floor) const {
        met.fill(false);
        seen[origin] = true;
        queue[0] = origin;
        Int head = 0, tail = 1;
        while (head < tail) {
            for (Int i = first_of_rank[queue[head++]]; i >= 0; i = next_of_rank[i]) {
                const Int e = expert[i];
                if (met[e] || (forward && tokens[i] < floor)) continue;
                met[e] = true;
                for (Int k = first_of_expert[e]; k >= 0; k = next_of_expert[k]) {
                    const Int r = rank[k];
                    if (!seen[r] && (forward || tokens[k] >= floor)) {
                        seen[r] = true;
                        queue[tail++] = r;
                    }
                }
            }
        }
    }
};

// The allowed rank with most free slots, then in the giver's node, then with most local tokens; -1: none.
Int choose_target(
    const Problem& problem, Span<bool> holds, Int giver, Span<bool> allowed, Ints free_R, Int expert) {
    const ConstInts node_R = problem.node_R;
    Int target = -1;
    for (Int r = 0; r < free_R.size; r++) {
        if (!allowed[r] || free_R[r] <= 0 || holds[r]) continue;
        bool better = true;
        if (target >= 0) {
            const bool near = node_R[r] == node_R[giver], target_near = node_R[target] == node_R[giver];
            if (free_R[r] != free_R[target]) {
                better = free_R[r] > free_R[target];
            } else if (near != target_near) {
                better = near;
            } else {
                better = problem.load_RE[r][expert] > problem.load_RE[target][expert];
            }
        }
        if (better) target = r;
    }
    return target;
}

// Tokens on every arc of `holders`.
Ints arc_tokens(const Problem& problem, const Holders& holders, const Replicas& replicas, bool known, Workspace& room) {
    if (!known) return level_out(problem, holders, room).tokens_A;
    Ints x = room.ints(holders.arcs());
    Ints row_E = room.ints(problem.experts());
    x.fill(0);
    const auto arc_at = [&](Int expert, Int rank) {
        Int k = holders.start[row_E[expert]];
        while (holders.rank_A[k] != rank) k++;
        return k;
    };
    for (Int j = 0; j < holders.experts(); j++) {
        const Int e = holders.expert_M[j];
        row_E[e] = j;
        x[arc_at(e, problem.home_E[e])] = problem.total_E[e];
    }
    for (Int i = 0; i < replicas.used; i++) {
        const Int e = replicas.expert[i];
        x[arc_at(e, replicas.rank[i])] += replicas.tokens[i];
        x[arc_at(e, problem.home_E[e])] -= replicas.tokens[i];
    }
    return x;
}

Items list_items(
    const Problem& problem, const Holders& holders, const Replicas& replicas, bool known, Workspace& room) {
    Items items(
        problem.experts() + holders.arcs() + replicas.most() - replicas.used, problem.ranks(), problem.experts(),
        room);
    const Ints x = arc_tokens(problem, holders, replicas, known, room);
    for (Int j = 0; j < holders.experts(); j++) {
        for (Int k = holders.start[j]; k < holders.start[j + 1]; k++) {
            items.list_by_expert(holders.expert_M[j], holders.rank_A[k], x[k]);
        }
    }
    for (Int e = 0; e < problem.experts(); e++) {
        if (items.first_of_expert[e] < 0) items.list_by_expert(e, problem.home_E[e], problem.total_E[e]);
    }
    for (Int i = 0; i < items.count; i++) items.list_by_rank(i);
    return items;
}

struct Outlet {
    Int giver = -1, target = -1, expert = -1;
};

// A link from `givers` to one of `takers`, over a new replica of an expert that a giver computes most tokens of.
Outlet find_outlet(
    const Problem& problem, const Items& items, Span<bool> givers, Span<bool> takers, Int floor, Ints free_R,
    Span<bool> holds) {
    Outlet found;
    Int below = ALL;
    for (Int n = 0; n < LOOKED_AT && found.target < 0; n++) {
        Int largest = -1;
        for (Int i = 0; i < items.count; i++) {
            const Int tokens = items.tokens[i];
            if (floor <= tokens && tokens < below && givers[items.rank[i]] &&
                (largest < 0 || tokens > items.tokens[largest])) {
                largest = i;
            }
        }
        if (largest < 0) break;
        below = items.tokens[largest];
        found.expert = items.expert[largest];
        found.giver = items.rank[largest];
        items.mark(found.expert, holds, true);
        found.target = choose_target(problem, holds, found.giver, takers, free_R, found.expert);
        items.mark(found.expert, holds, false);
    }
    return found;
}

}  // namespace

void add_spares(
    const Problem& problem, ConstInts limit_R, Int floor, bool known, Replicas& replicas, Workspace& room) {
    Scope scope(room);
    const Int ranks = problem.ranks();
    const Holders holders = index_replicas(replicas, problem.home_E, room);
    if (holders.experts() == 0) return;
    Items items = list_items(problem, holders, replicas, known, room);
    Ints free_R = room.ints(ranks);
    free_R.copy_from(limit_R);
    for (Int i = 0; i < replicas.used; i++) free_R[replicas.rank[i]]--;
    Int hottest = holders.expert_M[0];
    for (const Int e : holders.expert_M) {
        if (problem.total_E[e] > problem.total_E[hottest]) hottest = e;
    }
    const Int root = problem.home_E[hottest];
    Span<bool> holds = room.array<bool>(ranks);
    Span<bool> core = room.array<bool>(ranks);
    Span<bool> region = room.array<bool>(ranks);
    holds.fill(false);
    for (const bool inward : {false, true}) {  // first every rank must drain to the root, then the root to every rank
        core.fill(false);
        items.spread(core, root, inward, floor);
        for (Int lost = 0; lost < ranks; lost++) {
            if (core[lost] || replicas.used == replicas.most()) continue;
            region.fill(false);
            items.spread(region, lost, !inward, floor);
            const Outlet outlet =
                find_outlet(problem, items, inward ? core : region, inward ? region : core, floor, free_R, holds);
            if (outlet.target < 0) continue;
            items.list_by_expert(outlet.expert, outlet.target, 0);
            items.list_by_rank(items.count - 1);
            free_R[outlet.target]--;
            replicas.append(outlet.expert, outlet.target);
            items.spread(core, inward ? outlet.target : outlet.giver, inward, floor);
        }
    }
}

}  // namespace prophet
