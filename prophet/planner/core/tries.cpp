#include "tries.h"

#include <algorithm>
#include <limits>

namespace prophet {

constexpr Int SMOOTH = 2;      // q of the prices that growth goes by, doubled up to twice
constexpr double MAYBE = 0.02;  // a try whose step is longer by more than this after a few sweeps gets no split

Draws draws_of(const Problem& problem) {
    Draws draws(1);
    for (const Int tokens : problem.total_E) draws.mix(tokens);
    for (Int r = 0; r < problem.ranks(); r++) {
        for (Int k = 0; k < TRAFFIC; k++) draws.mix(problem.home_moved[k][r]);
    }
    return draws;
}

namespace {

// Lets tokens settle for a few sweeps; returns the seconds of the step.
double settled_s(Growth& growth) {
    growth.count_copies_anew();
    for (const Int q : {8, 32}) {
        for (Int n = 0; n < 2; n++) {
            growth.set_prices(q);
            if (sweep(growth.flow, q) == 0) break;
        }
    }
    return growth.set_prices(32).step;
}

void strip(Growth& growth) {
    while (growth.replicas() > 0) detach(growth.flow, growth.flow.arcs - 1, growth.overhead_s());
}

// A drawn replica's arc.
Int one_replica(const Growth& growth, Draws& draws) {
    return growth.flow.experts + draws.one_of(growth.replicas());
}

// Gives the heavier of two drawn experts a holder on every rank, half of the time with no other replicas beside: sent
// in two phases, many copies of one expert can cost less than a few.
void put_everywhere(Growth& growth, Draws draws) {
    const Problem& problem = growth.problem;
    if ((draws.seed() >> 20) % 2 == 0) strip(growth);
    Int j = draws.one_of(problem.experts());
    const Int i = draws.one_of(problem.experts());
    if (problem.total_E[i] > problem.total_E[j]) j = i;
    growth.count_free();
    for (Int r = 0; r < problem.ranks(); r++) {
        if (growth.limit_R[r] <= 0 || growth.has(j, r)) continue;
        if (growth.free_R[r] <= 0) detach(growth.flow, growth.least_missed(r), growth.overhead_s());
        attach(growth.flow, j, r, growth.overhead_s());
    }
}

// Takes about half of the replicas away, and fills all slots with drawn ones.
void redraw(Growth& growth, Draws draws) {
    const Problem& problem = growth.problem;
    for (Int a = growth.flow.arcs - 1; a >= growth.flow.experts; a--) {
        if (draws.one_of(2) == 0) detach(growth.flow, a, growth.overhead_s());
    }
    growth.count_free();
    for (Int r = 0; r < problem.ranks(); r++) {
        const Int tries = std::min(growth.free_R[r], problem.experts());
        for (Int n = 0; n < tries; n++) {
            const Int j = draws.one_of(problem.experts());
            if (problem.total_E[j] > 0 && !growth.has(j, r)) attach(growth.flow, j, r, growth.overhead_s());
        }
    }
}

// Lets two drawn replicas exchange their ranks, or only takes the first away.
void exchange(Growth& growth, Int q, Draws draws) {
    Flow& flow = growth.flow;
    if (growth.replicas() < 2) return;
    Int a = one_replica(growth, draws);
    const Int j = flow.expert_A[a], d = flow.rank_A[a];
    detach(flow, a, growth.overhead_s());
    a = one_replica(growth, draws);
    const Int i = flow.expert_A[a], r = flow.rank_A[a];
    if (i == j || r == d || growth.has(j, r) || growth.has(i, d)) return;
    detach(flow, a, growth.overhead_s());
    attach(flow, j, r, growth.overhead_s());
    attach(flow, i, d, growth.overhead_s());
    for (Int n = 0; n < 2; n++) {
        settle_expert(flow, j, q);
        settle_expert(flow, i, q);
    }
}

// Takes up to three drawn replicas away and bars them.
void take_some(Growth& growth, Draws& draws) {
    const Int many = std::min(1 + (draws.seed() >> 20) % BARRED, growth.replicas());
    for (Int n = 0; n < many; n++) {
        const Int a = one_replica(growth, draws);
        growth.barred_expert[n] = growth.flow.expert_A[a];
        growth.barred_rank[n] = growth.flow.rank_A[a];
        detach(growth.flow, a, growth.overhead_s());
    }
}

// Puts a drawn expert on the first rank with a free slot from a drawn one on.
void add_one(Growth& growth, Int q, Draws draws) {
    const Problem& problem = growth.problem;
    growth.count_free();
    Int d = draws.one_of(problem.ranks());
    for (Int n = 0; n < problem.ranks() && growth.free_R[d] <= 0; n++) d = (d + 1) % problem.ranks();
    const Int j = draws.one_of(problem.experts());
    if (growth.free_R[d] <= 0 || problem.total_E[j] == 0 || growth.has(j, d)) return;
    attach(growth.flow, j, d, growth.overhead_s());
    settle_expert(growth.flow, j, q);
    settle_expert(growth.flow, j, q);
}

// Changes the placement in this way, and lets it grow.
void change(Growth& growth, Change kind, Draws draws) {
    draws.advance();
    const Int q = SMOOTH << ((draws.seed() >> 16) % 3);
    growth.count_copies_anew();
    growth.set_prices(q);
    switch (kind) {
        case Change::FRESH:
            strip(growth);
            break;
        case Change::EVERYWHERE:
        case Change::REDRAWN:
            if (kind == Change::EVERYWHERE) {
                put_everywhere(growth, draws);
            } else {
                redraw(growth, draws);
            }
            growth.settle_all(q);
            growth.shrink(q);
            break;
        case Change::EXCHANGED:
            exchange(growth, q, draws);
            break;
        default:
            take_some(growth, draws);
            if (kind >= Change::OTHERS) add_one(growth, q, draws);
            growth.grow(q);
            growth.barred_expert.fill(-1);
    }
    growth.grow(q);
}

bool same(const Growth& growth, const Replicas& replicas) {
    if (growth.replicas() != replicas.used) return false;
    for (Int i = 0; i < replicas.used; i++) {
        if (!growth.has(replicas.expert[i], replicas.rank[i])) return false;
    }
    return true;
}

}  // namespace

bool try_once(
    const Problem& problem, ConstInts limit_R, Replicas& replicas, double most_s, double split_effort, Change kind,
    Draws draws, Workspace& room) {
    Scope scope(room);
    Growth growth(problem, limit_R, replicas.most(), room);
    for (Int i = 0; i < replicas.used; i++) {
        attach(growth.flow, replicas.expert[i], replicas.rank[i], growth.overhead_s());
    }
    const double before_s = kind == Change::FRESH ? std::numeric_limits<double>::infinity() : settled_s(growth);
    change(growth, kind, draws);
    if (same(growth, replicas) || settled_s(growth) > before_s * (1.0 + MAYBE)) return false;
    Replicas now = make_replicas(replicas.most(), room);
    for (Int a = growth.flow.experts; a < growth.flow.arcs; a++) {
        now.append(growth.flow.expert_A[a], growth.flow.rank_A[a]);
    }
    const double kept_s = split_cost(problem, replicas, split_effort, room).total;
    const double now_s = split_cost(problem, now, split_effort, room).total;
    if (now_s >= kept_s || (now.used > 0 && now_s > most_s)) return false;
    replicas.copy_from(now);
    return true;
}

}  // namespace prophet
