// Replicas that are worth most, one after the other.
//
// A replica is worth what its tokens save at present prices, less what it adds to the exposed transfers. Prices are
// smooth (a low q): the first replicas must relieve many ranks, not just the busiest.
#include "plan.h"

namespace prophet {

constexpr Int VALUED = 8;    // experts looked at for every replica
constexpr Int PATIENCE = 2;  // replicas in a row that bring nothing: the first copy costs a Trans, others share it
constexpr double BETTER = 1.0 - 1e-6;

Growth::Growth(const Problem& problem, const Placement& from, ConstInts chosen_J, Workspace& room)
    : first_rank(0), last_rank(problem.ranks()), free_R(room.ints(problem.ranks())) {
    Int ranks = problem.ranks(), most = 0;
    for (Int slots : from.free_R) most += slots;
    // Where one rank does not fill its node's port, it alone carries an expert that crosses once. The first few copies
    // then take little time and the next one much, so that growth would stop there.
    const bool once = problem.figures.port_share >= 1.0;
    flow = make_flow(problem, chosen_J, std::min(from.replicas + most, problem.experts() * ranks), room, once);
    fill_homes(flow);
    others_sent = room.floats(flow.sent.rows, ranks);
    others_received = room.floats(flow.sent.rows, ranks);
    promise_J = room.floats(chosen_J.size);
    for (Floats* by_rank : {&gain_R, &near_R, &far_R}) *by_rank = room.floats(ranks);
    if (chosen_J.size < problem.experts()) {
        Scope scope(room);
        Span<bool> takes_part = room.array<bool>(problem.experts());
        takes_part.fill(false);
        for (Int e : chosen_J) takes_part[e] = true;
        place_others(flow, index_holders(from.holds_ER, room), takes_part, room);
    }
    others_sent.flat().copy_from(flow.sent.flat());
    others_received.flat().copy_from(flow.received.flat());
    free_R.copy_from(from.free_R);
    for (Int j = 0; j < chosen_J.size; j++) {
        each_holder(from.holds_ER[chosen_J[j]], [&](Int r) {
            if (r != flow.rank_A[j]) flow.tokens_AR[link(flow, j, r)].fill(0);
        });
    }
}

void Growth::add(Int j, Int rank, Int q) {
    count_copies(flow, j, -1.0);
    flow.tokens_AR[link(flow, j, rank)].fill(0);
    count_copies(flow, j, 1.0);
    count_busiest(flow);
    free_R[rank]--;
    settle(flow, j, j + 1, q);
    settle(flow, j, j + 1, q);
}

void Growth::remove(Int arc) {
    free_R[flow.rank_A[arc]]++;
    detach(flow, arc);
}

// Sums of many parts are made anew where rounding could have left something of copies that are gone.
void Growth::count_anew() {
    flow.sent.flat().copy_from(others_sent.flat());
    flow.received.flat().copy_from(others_received.flat());
    for (Int j = 0; j < flow.experts(); j++) count_copies(flow, j, 1.0);
    count_busiest(flow);
}

void Growth::settle_all() {
    count_anew();
    for (const Int q : {8, 32}) {
        for (Int n = 0; n < 2; n++) {
            reprice(flow, q);
            if (sweep(flow, q) == 0) break;
        }
    }
}

void Growth::grow(Int q) {
    count_anew();
    Seconds now = reprice(flow, q);
    double low = now.smooth;
    Int kept = flow.arcs;
    while (flow.arcs - kept < PATIENCE) {
        Choice chosen = most_valuable(now);
        if (chosen.expert < 0) break;
        add(chosen.expert, chosen.rank, q);
        now = reprice(flow, q);
        if (now.smooth < low * BETTER) {
            low = now.smooth;
            kept = flow.arcs;
        }
    }
    while (flow.arcs > kept) remove(flow.arcs - 1);
}

bool Growth::close(Int q) {
    const Problem& problem = *flow.problem;
    if (flow.experts() < problem.experts()) return false;
    for (Int r = 0; r < flow.ranks(); r++) {
        for (Int e = 0; e < problem.experts(); e++) {
            if (problem.load_RE[r][e] == 0 || flow.has(e, r)) continue;
            if (free_R[r] <= 0) return false;
            add(e, r, q);
        }
    }
    return true;
}

void Growth::write(Placement& to) const {
    for (Int j = 0; j < flow.experts(); j++) {
        each_holder(to.holds_ER[flow.chosen_J[j]], [&](Int r) {
            if (r != flow.rank_A[j]) to.remove(flow.chosen_J[j], r);
        });
    }
    for (Int a = flow.experts(); a < flow.arcs; a++) to.add(flow.chosen_J[flow.expert_A[a]], flow.rank_A[a]);
}

// What all tokens of every expert pay above the cheapest products: no replica of it can be worth more.
void Growth::promise_all() {
    const ConstInts node_R = flow.node_R;
    const Floats own = flow.price[PRODUCTS], out_near = flow.price[OUT_NEAR], out_far = flow.far_out;
    const Int ranks = node_R.size;
    double floor = own[0];
    for (Int r = 0; r < ranks; r++) floor = std::min(floor, own[r]);
    for (Int j = 0; j < promise_J.size; j++) {
        double paid = 0.0;
        for (Int a = j; a >= 0; a = flow.next_A[a]) {
            const Int d = flow.rank_A[a];
            const double above = own[d] - floor, near_s = near_R[d] - floor, far_s = far_R[d] - floor;
            const Ints held_R = flow.tokens_AR[a];
            for (Int r = 0; r < ranks; r++) {
                if (held_R[r] <= 0) continue;
                const bool near = node_R[r] == node_R[d];
                paid += static_cast<double>(held_R[r]) *
                        (r == d ? above : (near ? near_s + out_near[r] : far_s + out_far[r]));
            }
        }
        promise_J[j] = paid;
    }
}

// Adds what `n` tokens save on the ranks first .. last - 1 that pay `now`, less than which is to be paid.
static void add_gains(double* __restrict gain, const double* __restrict price, Int first, Int last, double now,
                      double n) {
    for (Int d = first; d < last; d++) gain[d] += n * std::max(0.0, now - price[d]);
}

// What the tokens of an expert would save on every rank: `gain_R`.
void Growth::gains_of(Int expert) {
    const ConstInts node_R = flow.node_R, node_first = flow.problem->node_first;
    const Floats own = flow.price[PRODUCTS], out_near = flow.price[OUT_NEAR], out_far = flow.far_out;
    const Int ranks = node_R.size;
    gain_R.fill(0.0);
    for (Int a = expert; a >= 0; a = flow.next_A[a]) {
        const Int h = flow.rank_A[a];
        const Ints held_R = flow.tokens_AR[a];
        for (Int r = 0; r < ranks; r++) {
            const double n = static_cast<double>(held_R[r]);
            if (n <= 0.0) continue;
            const Int node = node_R[r];
            const double now = h == r ? own[h] : (node_R[h] == node ? out_near[r] + near_R[h] : out_far[r] + far_R[h]);
            const double gain = gain_R[r];
            const auto add = [&](ConstFloats price_R, Int first, Int last, double paid) {
                add_gains(gain_R.data, price_R.data, std::max(first, first_rank), std::min(last, last_rank), paid, n);
            };
            add(far_R, 0, node_first[node], now - out_far[r]);
            add(near_R, node_first[node], node_first[node + 1], now - out_near[r]);
            add(far_R, node_first[node + 1], ranks, now - out_far[r]);
            gain_R[r] = gain + n * std::max(0.0, now - own[r]);  // its own rank need not send them
        }
    }
}

void Growth::best_of(Int j, const Seconds& now, Choice& best) {
    for (Int a = flow.next_A[j]; a >= 0; a = flow.next_A[a]) flow.in_node[flow.node_R[flow.rank_A[a]]]++;
    gains_of(j);
    for (Int d = first_rank; d < last_rank; d++) {
        if (free_R[d] <= 0 || gain_R[d] <= best.value || flow.has(j, d)) continue;
        const double value = gain_R[d] - (exposed_with(flow, j, d, now.forward) - now.exposed);
        if (value > best.value) best = {j, d, value};
    }
    for (Int a = flow.next_A[j]; a >= 0; a = flow.next_A[a]) flow.in_node[flow.node_R[flow.rank_A[a]]] = 0;
}

Growth::Choice Growth::most_valuable(const Seconds& now) {
    for (Int r = 0; r < flow.ranks(); r++) {
        near_R[r] = flow.price[PRODUCTS][r] + flow.price[IN_NEAR][r];
        far_R[r] = flow.price[PRODUCTS][r] + flow.far_in[r];
    }
    promise_all();
    Choice best;
    for (Int n = 0; n < VALUED; n++) {
        Int j = 0;
        for (Int e = 1; e < promise_J.size; e++) {
            if (promise_J[e] > promise_J[j]) j = e;
        }
        if (promise_J[j] <= best.value) break;
        promise_J[j] = 0.0;
        best_of(j, now, best);
    }
    return best;
}

}  // namespace prophet
