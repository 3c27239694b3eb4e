#include "flow.h"

#include <algorithm>

#include "descent.h"

namespace prophet {

Flow make_frame(const Problem& problem, ConstInts chosen_J, Int spare_arcs, Workspace& room) {
    Int ranks = problem.ranks(), chosen = chosen_J.size, arcs = chosen + spare_arcs;
    const Figures& figures = problem.figures;
    Flow flow{};
    flow.node_R = problem.node_R;
    for (FloatGrid* grid : {&flow.rate, &flow.base, &flow.busy, &flow.price, &flow.work}) {
        *grid = room.floats(RESOURCES, ranks);
    }
    for (Int r = 0; r < ranks; r++) {
        flow.rate[PRODUCTS][r] = problem.seconds_per_token_R[r];
        flow.base[PRODUCTS][r] = static_cast<double>(problem.home_groups[r]) * figures.overhead_s;
        flow.busy[PRODUCTS][r] = static_cast<double>(problem.home_load[r]);
    }
    for (Int k = OUT_NEAR; k < RESOURCES; k++) {
        const Link& level = k < OUT_FAR ? figures.intra : figures.inter;
        flow.rate[k].fill(figures.token_bytes / level.bytes_per_s);
        flow.base[k].fill(level.latency_s);
        for (Int r = 0; r < ranks; r++) flow.busy[k][r] = static_cast<double>(problem.home_moved[k - OUT_NEAR][r]);
    }
    flow.next_A = room.ints(arcs);
    flow.rank_A = room.ints(arcs);
    flow.expert_A = room.ints(arcs);
    flow.tokens_AR = room.ints(arcs, ranks);
    flow.arcs = flow.experts = chosen;
    flow.scratch = room.ints(ranks + 1);
    for (Int j = 0; j < chosen; j++) {
        flow.next_A[j] = -1;
        flow.expert_A[j] = j;
        flow.rank_A[j] = problem.home_E[chosen_J[j]];
    }
    return flow;
}

void fill_homes(Flow& flow, const Problem& problem, ConstInts chosen_J) {
    for (Int a = chosen_J.size; a < flow.arcs; a++) flow.tokens_AR[a].fill(0);
    for (Int r = 0; r < flow.ranks(); r++) {
        ConstInts load_E = problem.load_RE[r];
        for (Int j = 0; j < chosen_J.size; j++) flow.tokens_AR[j][r] = load_E[chosen_J[j]];
    }
}

Flow make_flow(const Problem& problem, ConstInts chosen_J, Int spare_arcs, Workspace& room) {
    Flow flow = make_frame(problem, chosen_J, spare_arcs, room);
    fill_homes(flow, problem, chosen_J);
    return flow;
}

Int link(Flow& flow, Int j, Int rank, double overhead_s) {
    Int a = flow.arcs++;
    flow.rank_A[a] = rank;
    flow.expert_A[a] = j;
    flow.next_A[a] = flow.next_A[j];
    flow.next_A[j] = a;
    flow.base[PRODUCTS][rank] += overhead_s;
    return a;
}

Int attach(Flow& flow, Int j, Int rank, double overhead_s) {
    Int a = link(flow, j, rank, overhead_s);
    flow.tokens_AR[a].fill(0);
    return a;
}

namespace {

// The holder of expert j that is cheapest for rank r, the first in the list on ties.
Int cheapest_arc(const Flow& flow, Int j, Int r) {
    const FloatGrid& price = flow.price;
    Int best = -1;
    double low = 0.0;
    for (Int k = j; k >= 0; k = flow.next_A[k]) {
        Int d = flow.rank_A[k];
        double near_s = price[OUT_NEAR][r] + price[IN_NEAR][d], far_s = price[OUT_FAR][r] + price[IN_FAR][d];
        double p = token_price(d == r, flow.node_R[d] == flow.node_R[r], price[PRODUCTS][d], near_s, far_s);
        if (best < 0 || p < low) {
            best = k;
            low = p;
        }
    }
    return best;
}

// The link of the list that leads to arc `a` leads to `target` from now on.
void relink(Flow& flow, Int a, Int target) {
    Int k = flow.expert_A[a];
    while (flow.next_A[k] != a) k = flow.next_A[k];
    flow.next_A[k] = target;
}

}  // namespace

void detach(Flow& flow, Int a, double overhead_s) {
    Int j = flow.expert_A[a], rank = flow.rank_A[a];
    relink(flow, a, flow.next_A[a]);
    for (Int r = 0; r < flow.ranks(); r++) {
        Int n = flow.tokens_AR[a][r];
        if (n == 0) continue;
        Int best = cheapest_arc(flow, j, r);
        double tokens = static_cast<double>(n);
        flow.busy[PRODUCTS][rank] -= tokens;
        flow.busy[PRODUCTS][flow.rank_A[best]] += tokens;
        redirect(flow, r, rank, flow.rank_A[best], tokens);
        flow.tokens_AR[best][r] += n;
    }
    flow.base[PRODUCTS][rank] -= overhead_s;
    Int last = --flow.arcs;
    if (last == a) return;
    relink(flow, last, a);
    flow.next_A[a] = flow.next_A[last];
    flow.rank_A[a] = flow.rank_A[last];
    flow.expert_A[a] = flow.expert_A[last];
    flow.tokens_AR[a].copy_from(flow.tokens_AR[last]);
}

double send_home(Flow& flow, const Problem& problem) {
    double level = 0.0;
    for (Int r = 0; r < flow.ranks(); r++) {
        flow.busy[PRODUCTS][r] = static_cast<double>(problem.home_load[r]);
        for (Int k = 0; k < TRAFFIC; k++) {
            flow.busy[OUT_NEAR + k][r] = static_cast<double>(problem.home_moved[k][r]);
        }
        level = std::max(level, static_cast<double>(problem.home_load[r]) / problem.speed_R[r]);
    }
    return level;
}

}  // namespace prophet
