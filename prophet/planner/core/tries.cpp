#include "tries.h"

#include <algorithm>
#include <limits>

namespace prophet {

constexpr Int SMOOTH = 2;       // q of the prices that growth goes by, doubled up to twice
constexpr Int TAKEN = 3;        // replicas that a try takes away at most
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

// A drawn replica's arc.
Int one_replica(const Growth& growth, Draws& draws) { return growth.flow.experts + draws.one_of(growth.replicas()); }

// Takes up to three drawn replicas away.
void take_some(Growth& growth, Draws& draws) {
    const Int many = std::min(1 + (draws.seed() >> 20) % TAKEN, growth.replicas());
    for (Int n = 0; n < many; n++) {
        const Int a = one_replica(growth, draws);
        detach(growth.flow, a, growth.overhead_s());
    }
}

// Gives the heavier of two drawn experts a holder on every rank: in two phases, many copies can cost less than a few.
void put_everywhere(Growth& growth, Int q, Draws draws) {
    Int j = draws.one_of(growth.flow.experts);
    Int other = draws.one_of(growth.flow.experts);
    if (growth.total(other) > growth.total(j)) j = other;
    for (Int r = 0; r < growth.flow.ranks(); r++) {
        if (growth.slots_R[r] > 0 && !growth.has(j, r)) attach(growth.flow, j, r, growth.overhead_s());
    }
    settle_expert(growth.flow, j, q);
    settle_expert(growth.flow, j, q);
}

// Puts a drawn expert on the first rank with a free slot from a drawn one on.
void add_one(Growth& growth, Int q, Draws draws) {
    Int ranks = growth.flow.ranks(), d = draws.one_of(ranks), j = draws.one_of(growth.flow.experts);
    growth.count_free();
    for (Int n = 0; n < ranks && growth.free_R[d] <= 0; n++) d = (d + 1) % ranks;
    if (growth.free_R[d] <= 0 || growth.total(j) == 0 || growth.has(j, d)) return;
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
    if (kind == Change::FRESH || kind == Change::EVERYWHERE) {
        while (growth.replicas() > 0) detach(growth.flow, growth.flow.arcs - 1, growth.overhead_s());
    } else {
        take_some(growth, draws);
    }
    if (kind == Change::EVERYWHERE) put_everywhere(growth, q, draws);
    if (kind == Change::OTHERS) add_one(growth, q, draws);
    growth.grow(q);
}

// The experts that a try is about: all, or of many those drawn, the heavier of two each time.
Ints choose_experts(const Problem& problem, Draws& draws, Workspace& room) {
    Int experts = problem.experts(), many = std::min(experts, CHOSEN);
    Ints chosen_J = room.ints(many);
    Span<bool> drawn = room.array<bool>(experts);
    drawn.fill(many == experts);
    for (Int n = 0; many < experts && n < many;) {
        Int e = draws.one_of(experts), other = draws.one_of(experts);
        if (drawn[e] || (!drawn[other] && problem.total_E[other] > problem.total_E[e])) e = other;
        while (drawn[e]) e = (e + 1) % experts;
        drawn[e] = true;
        n++;
    }
    Int j = 0;
    for (Int e = 0; e < experts; e++) {
        if (drawn[e]) chosen_J[j++] = e;
    }
    return chosen_J;
}

}  // namespace

bool try_once(const Problem& problem, ConstInts limit_R, Replicas& replicas, double most_s, double split_effort,
              Change kind, Draws draws, Workspace& room) {
    Scope scope(room);
    Ints chosen_J = choose_experts(problem, draws, room);
    Growth growth(problem, limit_R, chosen_J, replicas, room);
    if (problem.ranks() > TARGETS) {
        growth.first_rank = draws.one_of(problem.ranks() - TARGETS + 1);
        growth.last_rank = growth.first_rank + TARGETS;
    }
    double before_s = kind == Change::FRESH ? std::numeric_limits<double>::infinity() : settled_s(growth);
    change(growth, kind, draws);
    if (settled_s(growth) > before_s * (1.0 + MAYBE)) return false;
    Replicas now = make_replicas(replicas.most(), room);
    Span<bool> grown = room.array<bool>(problem.experts());
    grown.fill(false);
    for (Int e : chosen_J) grown[e] = true;
    for (Int i = 0; i < replicas.used; i++) {
        if (!grown[replicas.expert[i]]) now.append(replicas.expert[i], replicas.rank[i]);
    }
    for (Int a = growth.flow.experts; a < growth.flow.arcs; a++) {
        now.append(chosen_J[growth.flow.expert_A[a]], growth.flow.rank_A[a]);
    }
    double kept_s = split_cost(problem, replicas, split_effort, false, room).total;
    double now_s = split_cost(problem, now, split_effort, false, room).total;
    if (now_s >= kept_s || (now.used > 0 && now_s > most_s)) return false;
    replicas.copy_from(now);
    return true;
}

}  // namespace prophet
