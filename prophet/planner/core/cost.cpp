#include "cost.h"

#include <algorithm>

namespace prophet {

double link_seconds(double units, double n_bytes, Link link) {
    if (units <= 0.0) return 0.0;
    return link.latency_s + units * n_bytes / link.bytes_per_s;
}

double exchange_seconds(double near_units, double far_units, double n_bytes, const Figures& figures) {
    return std::max(link_seconds(near_units, n_bytes, figures.intra), link_seconds(far_units, n_bytes, figures.inter));
}

namespace {

double cheaper_form_seconds(const Busiest& busiest, double n_bytes, const Figures& figures) {
    const double* units = busiest.units;
    double direct_s = exchange_seconds(units[DIRECT_NEAR], units[DIRECT_FAR], n_bytes, figures);
    double scatter_s = exchange_seconds(units[SCATTER_NEAR], units[SCATTER_FAR], n_bytes, figures);
    return std::min(direct_s, scatter_s + exchange_seconds(units[GATHER_NEAR], units[GATHER_FAR], n_bytes, figures));
}

double felt_seconds(double transfer_s, double window_s, double overlap_cost) {
    return std::max(0.0, transfer_s - window_s) + overlap_cost * std::min(transfer_s, window_s);
}

}  // namespace

Transfers windows(double forward_s, const Figures& figures) {
    double beside_s = figures.windows_have_experts * forward_s;
    return {beside_s + figures.fnec_s, 2.0 * beside_s + figures.bnec_s};
}

Transfers transfer_seconds(const Busiest& busiest, const Figures& figures) {
    return {cheaper_form_seconds(busiest, figures.param_bytes, figures),
            cheaper_form_seconds(busiest, figures.grad_bytes, figures)};
}

Transfers felt(Transfers moved, double forward_s, const Figures& figures) {
    Transfers window = windows(forward_s, figures);
    return {felt_seconds(moved.trans_s, window.trans_s, figures.overlap_cost),
            felt_seconds(moved.agg_s, window.agg_s, figures.overlap_cost)};
}

Transfers exposed_seconds(const Busiest& busiest, double forward_s, const Figures& figures) {
    return felt(transfer_seconds(busiest, figures), forward_s, figures);
}

double hiding(Transfers moved, double forward_s, const Figures& figures) {
    Transfers window = windows(forward_s, figures);
    double seconds = 0.0;
    if (moved.trans_s > window.trans_s) seconds += 1.0;
    if (moved.agg_s > window.agg_s) seconds += 2.0;
    return seconds * figures.windows_have_experts * (1.0 - figures.overlap_cost);
}

void count_copies(const Flow& flow, Int j, const CopiesMoved& moved, double sign) {
    if (!flow.replicated(j)) return;
    ConstInts node_R = flow.node_R, rank_A = flow.rank_A, next_A = flow.next_A;
    FloatGrid sent = moved.sent, received = moved.received;
    Ints in_node = flow.scratch;  // replicas by node
    Int home = rank_A[j], first = next_A[j], n = 0;
    for (Int a = first; a >= 0; a = next_A[a]) in_node[node_R[rank_A[a]]] = 0;
    for (Int a = first; a >= 0; a = next_A[a]) {
        n++;
        in_node[node_R[rank_A[a]]]++;
    }
    double part = sign / static_cast<double>(n);
    for (Int a = first; a >= 0; a = next_A[a]) {
        Int d = rank_A[a];
        Int level = node_R[d] == node_R[home] ? 0 : 1;
        sent[DIRECT_NEAR + level][home] += sign;
        received[DIRECT_NEAR + level][d] += sign;
        sent[SCATTER_NEAR + level][home] += part;
        received[SCATTER_NEAR + level][d] += part;
        Int near = in_node[node_R[d]];
        for (FloatGrid side : {sent, received}) {
            side[GATHER_NEAR][d] += static_cast<double>(near - 1) * part;
            side[GATHER_FAR][d] += static_cast<double>(n - near) * part;
        }
    }
}

Busiest busiest_of(const CopiesMoved& moved) {
    Busiest busiest{};
    for (Int i = 0; i < COPIES; i++) {
        ConstFloats sent = moved.sent[i], received = moved.received[i];
        double most = 0.0;
        for (Int r = 0; r < sent.size; r++) most = std::max({most, sent[r], received[r]});
        busiest.units[i] = most;
    }
    return busiest;
}

CopiesMoved copies_moved(const Flow& flow, Workspace& room) {
    CopiesMoved moved{room.floats(COPIES, flow.ranks()), room.floats(COPIES, flow.ranks())};
    moved.sent.flat().fill(0.0);
    moved.received.flat().fill(0.0);
    for (Int j = 0; j < flow.experts; j++) count_copies(flow, j, moved, 1.0);
    return moved;
}

Cost cost_of_busy(const Flow& flow, ConstInts groups_R, const Busiest& busiest, const Figures& figures) {
    double forward_s = 0.0, near = 0.0, far = 0.0;
    ConstFloats products = flow.busy[PRODUCTS], rate = flow.rate[PRODUCTS];
    for (Int r = 0; r < groups_R.size; r++) {
        double seconds = products[r] * rate[r] + static_cast<double>(groups_R[r]) * figures.overhead_s;
        forward_s = std::max(forward_s, seconds);
        near = std::max({near, flow.busy[OUT_NEAR][r], flow.busy[IN_NEAR][r]});
        far = std::max({far, flow.busy[OUT_FAR][r], flow.busy[IN_FAR][r]});
    }
    double a2a_s = A2A_PER_STEP * exchange_seconds(near, far, figures.token_bytes, figures);
    double expert_s = FORWARD_AND_BACKWARD * forward_s;
    Transfers exposed = exposed_seconds(busiest, forward_s, figures);
    return {a2a_s + expert_s + exposed.trans_s + exposed.agg_s, a2a_s, expert_s, exposed.trans_s, exposed.agg_s};
}

Cost cost_of(const Flow& flow, const Problem& problem, ConstInts chosen_J, const Busiest& busiest, Workspace& room) {
    Scope scope(room);
    Ints groups_R = room.ints(flow.ranks());
    groups_R.copy_from(problem.home_groups);
    for (Int j = 0; j < flow.experts; j++) {
        if (problem.total_E[chosen_J[j]] > 0) groups_R[flow.rank_A[j]]--;
    }
    for (Int a = 0; a < flow.arcs; a++) {
        ConstInts tokens_R = flow.tokens_AR[a];
        bool any = std::any_of(tokens_R.begin(), tokens_R.end(), [](Int n) { return n > 0; });
        if (any) groups_R[flow.rank_A[a]]++;
    }
    return cost_of_busy(flow, groups_R, busiest, problem.figures);
}

Cost home_cost(const Problem& problem) {
    const Figures& figures = problem.figures;
    double forward_s = 0.0;
    Int near = 0, far = 0;
    for (Int r = 0; r < problem.ranks(); r++) {
        double load = static_cast<double>(problem.home_load[r]), groups = static_cast<double>(problem.home_groups[r]);
        forward_s = std::max(forward_s, load * problem.seconds_per_token_R[r] + groups * figures.overhead_s);
        near = std::max({near, problem.home_moved[SENT_NEAR][r], problem.home_moved[RECEIVED_NEAR][r]});
        far = std::max({far, problem.home_moved[SENT_FAR][r], problem.home_moved[RECEIVED_FAR][r]});
    }
    double exchange_s =
        exchange_seconds(static_cast<double>(near), static_cast<double>(far), figures.token_bytes, figures);
    double a2a_s = A2A_PER_STEP * exchange_s, expert_s = FORWARD_AND_BACKWARD * forward_s;
    return {a2a_s + expert_s, a2a_s, expert_s, 0.0, 0.0};
}

namespace {

// Tokens on the way at each level.
struct OnTheWay {
    Int near;
    Int far;
};

bool holds(const Flow& flow, Int j, Int rank) {
    for (Int a = flow.next_A[j]; a >= 0; a = flow.next_A[a]) {
        if (flow.rank_A[a] == rank) return true;
    }
    return false;
}

// Expert j's replicas keep what their own ranks route, and are nearer than the home for the ranks of their nodes.
void shorten_ways(const Flow& flow, Int j, ConstIntGrid load_RE, Int expert, Ints reached, OnTheWay& moved) {
    ConstInts node_R = flow.node_R, rank_A = flow.rank_A, next_A = flow.next_A;
    Int home = rank_A[j];
    for (Int a = next_A[j]; a >= 0; a = next_A[a]) {
        Int d = rank_A[a];
        reached[node_R[d]] = 1;
        (node_R[d] == node_R[home] ? moved.near : moved.far) -= load_RE[d][expert];
    }
    reached[node_R[home]] = 0;
    for (Int r = 0; r < node_R.size; r++) {
        if (reached[node_R[r]] > 0 && !holds(flow, j, r)) {
            moved.far -= load_RE[r][expert];
            moved.near += load_RE[r][expert];
        }
    }
    for (Int a = next_A[j]; a >= 0; a = next_A[a]) reached[node_R[rank_A[a]]] = 0;
}

}  // namespace

double exchange_floor(const Flow& flow, const Problem& problem, ConstInts chosen_J) {
    Int ranks = problem.ranks();
    OnTheWay moved{0, 0};
    for (Int r = 0; r < ranks; r++) {
        moved.near += problem.home_moved[SENT_NEAR][r];
        moved.far += problem.home_moved[SENT_FAR][r];
    }
    Ints reached = flow.scratch.part(0, problem.nodes());
    reached.fill(0);
    for (Int j = 0; j < chosen_J.size; j++) shorten_ways(flow, j, problem.load_RE, chosen_J[j], reached, moved);
    double seconds = 0.0, n = static_cast<double>(ranks);
    if (moved.near > 0) {
        seconds = flow.base[OUT_NEAR][0] + static_cast<double>(moved.near) / n * flow.rate[OUT_NEAR][0];
    }
    if (moved.far > 0) {
        double far_s = flow.base[OUT_FAR][0] + static_cast<double>(moved.far) / n * flow.rate[OUT_FAR][0];
        seconds = std::max(seconds, far_s);
    }
    return seconds;
}

}  // namespace prophet
