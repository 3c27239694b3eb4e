#include "growth.h"

#include <algorithm>

namespace prophet {

constexpr Int VALUED = 8;    // experts looked at for every replica
constexpr Int PATIENCE = 2;  // replicas in a row that bring nothing: the first copy costs a Trans, others share it
constexpr double BETTER = 1.0 - 1e-6;

Growth::Growth(const Problem& problem, ConstInts limit_R, ConstInts chosen_J, const Replicas& replicas, Workspace& room)
    : problem(problem),
      chosen_J(chosen_J),
      slots_R(room.ints(problem.ranks())),
      first_rank(0),
      last_rank(problem.ranks()),
      flow(make_flow(problem, chosen_J, replicas.most(), room)),
      moved{room.floats(COPIES, problem.ranks()), room.floats(COPIES, problem.ranks())},
      others{room.floats(COPIES, problem.ranks()), room.floats(COPIES, problem.ranks())},
      busiest{},
      promise_J(room.floats(chosen_J.size)),
      gain_R(room.floats(problem.ranks())),
      tokens_R(room.floats(problem.ranks())),
      near_R(room.floats(problem.ranks())),
      far_R(room.floats(problem.ranks())),
      held_R(room.array<bool>(problem.ranks())),
      free_R(room.ints(problem.ranks())),
      node_first(room.ints(problem.nodes() + 1)) {
    for (Int r = problem.ranks() - 1; r >= 0; r--) node_first[problem.node_R[r]] = r;
    node_first[problem.nodes()] = problem.ranks();
    held_R.fill(false);
    slots_R.copy_from(limit_R);
    others.sent.flat().fill(0.0);
    others.received.flat().fill(0.0);
    Ints index_E = room.ints(problem.experts());
    index_E.fill(-1);
    for (Int j = 0; j < chosen_J.size; j++) index_E[chosen_J[j]] = j;
    if (chosen_J.size < problem.experts()) hold_others(replicas, index_E, room);
    for (Int i = 0; i < replicas.used; i++) {
        Int j = index_E[replicas.expert[i]];
        if (j >= 0) {
            attach(flow, j, replicas.rank[i], overhead_s());
        } else {
            slots_R[replicas.rank[i]]--;
        }
    }
}

// Count what experts that do not grow move, under the exact split of all.
void Growth::hold_others(const Replicas& replicas, ConstInts index_E, Workspace& room) {
    Scope scope(room);
    Holders holders = index_replicas(replicas, problem.home_E, room);
    Exact level = level_out(problem, holders, room);
    Flow links = make_frame(problem, holders.expert_M, holders.replicas(), room);
    Columns columns(problem.load_RE, holders.expert_M, room);
    Ints want = room.ints(problem.ranks());
    for (Int m = 0; m < holders.experts(); m++) {
        Int e = holders.expert_M[m], home = problem.home_E[e];
        if (index_E[e] >= 0) continue;
        flow.busy[PRODUCTS][home] -= static_cast<double>(problem.total_E[e]);
        for (Int k = holders.start[m]; k < holders.start[m + 1]; k++) {
            Int d = holders.rank_A[k];
            flow.busy[PRODUCTS][d] += static_cast<double>(level.tokens_A[k]);
            if (d == home) continue;
            flow.base[PRODUCTS][d] += overhead_s();
            link(links, m, d, 0.0);
        }
        match(holders, m, problem.node_R, level.tokens_A, columns.take(m), want, [&](Int k, Int source, Int tokens) {
            redirect(flow, source, home, holders.rank_A[k], static_cast<double>(tokens));
        });
        count_copies(links, m, others, 1.0);
    }
}

bool Growth::has(Int expert, Int rank) const {
    for (Int a = expert; a >= 0; a = flow.next_A[a]) {
        if (flow.rank_A[a] == rank) return true;
    }
    return false;
}

Growth::Seconds Growth::set_prices(Int q) {
    const Figures& figures = problem.figures;
    const Norms norm = norms(flow, q);
    const double weight =
        std::max(FORWARD_AND_BACKWARD - hiding(transfer_seconds(busiest, figures), norm.forward_s, figures), 0.1);
    prophet::set_prices(flow, q, A2A_PER_STEP, weight, norm);
    const Transfers shown = exposed_seconds(busiest, norm.forward_s, figures);
    const double shown_s = shown.trans_s + shown.agg_s;
    return {A2A_PER_STEP * norm.exchange_q + FORWARD_AND_BACKWARD * norm.forward_q + shown_s,
            A2A_PER_STEP * norm.exchange_s + FORWARD_AND_BACKWARD * norm.forward_s + shown_s};
}

void Growth::count_copies_anew() {
    moved.sent.flat().copy_from(others.sent.flat());
    moved.received.flat().copy_from(others.received.flat());
    for (Int j = 0; j < flow.experts; j++) count_copies(flow, j, moved, 1.0);
    busiest = busiest_of(moved);
}

void Growth::count_free() {
    free_R.copy_from(slots_R);
    for (Int a = flow.experts; a < flow.arcs; a++) free_R[flow.rank_A[a]]--;
}

void Growth::grow(Int q) {
    count_free();
    count_copies_anew();
    double low = set_prices(q).smooth;
    Int kept = flow.arcs;
    while (flow.arcs - kept < PATIENCE) {
        auto [j, d, value] = most_valuable(q);
        if (j < 0) break;
        count_copies(flow, j, moved, -1.0);
        attach(flow, j, d, overhead_s());
        count_copies(flow, j, moved, 1.0);
        busiest = busiest_of(moved);
        free_R[d]--;
        settle_expert(flow, j, q);
        settle_expert(flow, j, q);
        double now = set_prices(q).smooth;
        if (now < low * BETTER) {
            low = now;
            kept = flow.arcs;
        }
    }
    while (flow.arcs > kept) detach(flow, flow.arcs - 1, overhead_s());
}

// What all tokens of every expert pay above the cheapest products: no replica of it can be worth more.
void Growth::promise_all() {
    const ConstInts node_R = flow.node_R;
    const Floats own = flow.price[PRODUCTS], out_near = flow.price[OUT_NEAR], in_near = flow.price[IN_NEAR];
    const Floats out_far = flow.price[OUT_FAR], in_far = flow.price[IN_FAR];
    const Int ranks = node_R.size;
    double floor = own[0];
    for (Int r = 0; r < ranks; r++) floor = std::min(floor, own[r]);
    for (Int j = 0; j < promise_J.size; j++) {
        double paid = 0.0;
        for (Int a = j; a >= 0; a = flow.next_A[a]) {
            const Int d = flow.rank_A[a];
            const Int node = node_R[d];
            const double above = own[d] - floor;
            const double near_s = above + in_near[d], far_s = above + in_far[d];
            const Ints tokens_R = flow.tokens_AR[a];
            for (Int r = 0; r < ranks; r++) {
                const double n = static_cast<double>(tokens_R[r]);
                if (tokens_R[r] <= 0) continue;
                paid += n * (r == d ? above : (node_R[r] == node ? near_s + out_near[r] : far_s + out_far[r]));
            }
        }
        promise_J[j] = paid;
    }
}

// `gain` and `tokens` of the ranks first .. last - 1, for `n` tokens that pay `now`, less than which is to be paid.
static void add_gains(double* __restrict gain, double* __restrict tokens, const double* __restrict price, Int first,
                      Int last, double now, double n) {
    for (Int d = first; d < last; d++) {
        const double saved = now - price[d];
        gain[d] += saved > 0.0 ? n * saved : 0.0;
        tokens[d] += saved > 0.0 ? n : 0.0;
    }
}

// What the tokens of an expert would save on every rank, and how many of them: `gain_R` and `tokens_R`.
void Growth::gains_of(Int expert) {
    const ConstInts node_R = flow.node_R;
    const Floats own = flow.price[PRODUCTS], out_near = flow.price[OUT_NEAR], out_far = flow.price[OUT_FAR];
    const Int ranks = node_R.size;
    gain_R.fill(0.0);
    tokens_R.fill(0.0);
    for (Int a = expert; a >= 0; a = flow.next_A[a]) {
        const Int h = flow.rank_A[a];
        const Ints held_tokens_R = flow.tokens_AR[a];
        for (Int r = 0; r < ranks; r++) {
            const double n = static_cast<double>(held_tokens_R[r]);
            if (n <= 0.0) continue;
            const Int node = node_R[r];
            const double now = h == r ? own[h] : (node_R[h] == node ? out_near[r] + near_R[h] : out_far[r] + far_R[h]);
            const double gain = gain_R[r], tokens = tokens_R[r];
            const Int first = node_first[node], last = node_first[node + 1];
            const auto add = [&](ConstFloats price_R, Int from, Int to, double paid) {
                from = std::max(from, first_rank);
                to = std::min(to, last_rank);
                add_gains(gain_R.data, tokens_R.data, price_R.data, from, to, paid, n);
            };
            add(far_R, 0, first, now - out_far[r]);
            add(near_R, first, last, now - out_near[r]);
            add(far_R, last, ranks, now - out_far[r]);
            const double saved = now - own[r];  // its own rank need not send them
            gain_R[r] = saved > 0.0 ? gain + n * saved : gain;
            tokens_R[r] = saved > 0.0 ? tokens + n : tokens;
        }
    }
}

// What shows of the transfers with a further copy, whose fellows are `together` where all are in the home's node.
Transfers Growth::transfers_with(Int expert, Int rank, Int copies, bool together) const {
    const Int home = flow.rank_A[expert];
    Busiest with = busiest;
    double* units = with.units;
    const bool near = flow.node_R[rank] == flow.node_R[home];
    Int kind = near ? DIRECT_NEAR : DIRECT_FAR;
    units[kind] = std::max(units[kind], std::max(moved.sent[kind][home] + 1.0, moved.received[kind][rank] + 1.0));
    const double share = 1.0 / static_cast<double>(copies + 1);
    kind = near ? SCATTER_NEAR : SCATTER_FAR;
    units[kind] = std::max(units[kind], moved.received[kind][rank] + share);
    if (copies == 0) {
        units[kind] = std::max(units[kind], moved.sent[kind][home] + 1.0);
    } else {
        kind = together && near ? GATHER_NEAR : GATHER_FAR;
        units[kind] = std::max(units[kind], moved.sent[kind][rank] + static_cast<double>(copies) * share);
    }
    return exposed_seconds(with, forward_s, problem.figures);
}

void Growth::prices_at_holders() {
    const Floats busy = flow.busy[PRODUCTS], rate = flow.rate[PRODUCTS], base = flow.base[PRODUCTS];
    forward_s = 0.0;
    for (Int r = 0; r < busy.size; r++) {
        forward_s = std::max(forward_s, busy[r] * rate[r] + base[r]);
        near_R[r] = flow.price[PRODUCTS][r] + flow.price[IN_NEAR][r];
        far_R[r] = flow.price[PRODUCTS][r] + flow.price[IN_FAR][r];
    }
    shown = exposed_seconds(busiest, forward_s, problem.figures);
}

Growth::Choice Growth::best_of(Int j, Int q, double least) {
    const ConstInts node_R = flow.node_R;
    const Floats busy = flow.busy[PRODUCTS], rate = flow.rate[PRODUCTS], base = flow.base[PRODUCTS];
    const Floats own = flow.price[PRODUCTS];
    const auto bend_of = [&](Int r) {
        return static_cast<double>(q) * own[r] * rate[r] / (std::max(busy[r], 1.0) * rate[r] + base[r]);
    };
    Int copies = -1;
    bool together = true;  // all in the home's node
    double steepest = 0.0;
    for (Int a = j; a >= 0; a = flow.next_A[a]) {
        const Int d = flow.rank_A[a];
        held_R[d] = true;
        copies++;
        together = together && node_R[d] == node_R[flow.rank_A[j]];
        steepest = std::max(steepest, bend_of(d));
    }
    gains_of(j);
    Choice best{-1, -1, least};
    for (Int d = first_rank; d < last_rank; d++) {
        double gain = gain_R[d];
        if (held_R[d] || free_R[d] <= 0 || gain <= best.value) continue;
        const double bend = (steepest + bend_of(d)) * (tokens_R[d] * tokens_R[d]);
        const double part = bend > 0.0 ? std::min(1.0, gain / bend) : 1.0;
        gain = part * gain - 0.5 * part * part * bend;
        if (gain <= best.value) continue;
        const Transfers with = transfers_with(j, d, copies, together);
        const double value = gain - (with.trans_s - shown.trans_s + with.agg_s - shown.agg_s);
        if (value > best.value) best = {j, d, value};
    }
    for (Int a = j; a >= 0; a = flow.next_A[a]) held_R[flow.rank_A[a]] = false;
    return best;
}

Growth::Choice Growth::most_valuable(Int q) {
    prices_at_holders();
    promise_all();
    Choice best;
    for (Int n = 0; n < VALUED; n++) {
        Int j = 0;
        for (Int e = 1; e < promise_J.size; e++) {
            if (promise_J[e] > promise_J[j]) j = e;
        }
        if (promise_J[j] <= best.value) break;
        promise_J[j] = 0.0;
        Choice chosen = best_of(j, q, best.value);
        if (chosen.expert >= 0) best = chosen;
    }
    return best;
}

}  // namespace prophet
