#include "cost.h"

#include <cmath>
#include <utility>

namespace prophet {

namespace {

// Equations are those of Pro-Prophet, as in the Python twin, `prophet/planner/model/cost.py`.

constexpr double LEAST_S = 1e-30;  // seconds that stand for none where they divide
// Longer products may hide as much as they cost. With no price at all the search would not care how long they take.
constexpr double LEAST_WEIGHT = 0.1;

// Seconds of compute under one phase of a transfer, and how many of them a second of forward products adds.
struct Window {
    double seconds;
    double growth;
};

// The windows under the two phases of a transfer; a direct one has both. Twin of `prophet.spec.Cover`.
struct PhaseWindows {
    Window first;
    Window second;
    double seconds() const { return first.seconds + second.seconds; }
    double growth() const { return first.growth + second.growth; }
};

// Seconds of a form's two phases.
struct Phases {
    double first_s;
    double second_s;
};

// Seconds of a Trans or an Agg: directly, and in each phase of its other forms. Twin of the type of this name in
// `prophet.spec`.
struct TransferSeconds {
    double direct_s;
    Phases two_phase;
    Phases once;  // of no meaning where `counts_once` is false
    Phases spread;  // likewise
    bool counts_once;
    bool counts_spread;
};

// Seconds by which one transfer lengthens a step, and how many of them one more second of forward products would hide.
struct Exposed {
    double seconds;
    double hidden;
};

// The same for Trans and Agg of a layer; `hidden` is that of both together.
struct ExposedSeconds {
    double trans_s;
    double agg_s;
    double hidden;
    double both() const { return trans_s + agg_s; }
};

// Seconds to move `units` pieces of `n_bytes` over a link; nothing to move takes no time.
double link_seconds(double units, double n_bytes, const Link& link) {
    if (units <= 0.0) return 0.0;
    return link.latency_s + units * n_bytes / link.bytes_per_s;
}

// Seconds of an exchange whose busiest rank moves so many pieces over each level (Eq. 1 for tokens, with a bandwidth
// and a latency per level). The levels are separate wires and work at the same time.
double exchange_seconds(double near_units, double far_units, double n_bytes, const Figures& figures) {
    return std::max(link_seconds(near_units, n_bytes, figures.intra), link_seconds(far_units, n_bytes, figures.inter));
}

// Copies in one phase of a transfer: the kind that stays near (the next kind crosses nodes), and the bytes of a copy.
struct Phase {
    Copies near;
    double n_bytes;
};

// Seconds of a transfer (Eq. 4 for Trans, Eq. 5 for Agg, with real pieces for the paper's mean). A direct one has the
// first phase's bytes or, of Trans, those of either. In the spread form there are three exchanges, of which the first
// two are the first phase.
TransferSeconds transfer_seconds(const Busiest& busiest, const Phase& first, const Phase& second, bool is_trans,
                                 const Figures& figures) {
    const auto moved_s = [&](Int near, double n_bytes) {
        return exchange_seconds(busiest.units[near], busiest.units[near + 1], n_bytes, figures);
    };
    // The kinds of the other forms follow in the same order.
    constexpr Int ONCE = ONCE_SCATTER_NEAR - SCATTER_NEAR, RELAYED = RELAYED_SCATTER_NEAR - SCATTER_NEAR;
    Phases once{0.0, 0.0}, spread{0.0, 0.0};
    if (busiest.once) once = {moved_s(first.near + ONCE, first.n_bytes), moved_s(second.near + ONCE, second.n_bytes)};
    if (busiest.spread) {
        const double first_s = moved_s(first.near + RELAYED, first.n_bytes);
        const double second_s = moved_s(second.near + RELAYED, second.n_bytes);
        // Trans spreads parts before all else, and Agg hands sums over after all else.
        if (is_trans) spread = {moved_s(SPREAD_NEAR, first.n_bytes) + first_s, second_s};
        else spread = {first_s + second_s, moved_s(SPREAD_NEAR, second.n_bytes)};
    }
    return {moved_s(DIRECT_NEAR, first.n_bytes),
            {moved_s(first.near, first.n_bytes), moved_s(second.near, second.n_bytes)},
            once,
            spread,
            busiest.once,
            busiest.spread};
}

// What hides Trans: the experts of the block before, then the rest of that block. No experts come before those of a
// model's first block, where the rest alone hides the first phase. Twin of `prophet.spec.Windows.over_trans`.
PhaseWindows windows_over_trans(double forward_s, const Figures& figures) {
    const double experts = figures.windows_have_experts;
    const Window rest{figures.fnec_s, 0.0}, products{experts * forward_s, experts}, none{0.0, 0.0};
    if (experts > 0.0) return {products, rest};
    return {rest, none};
}

// What hides Agg: the rest of the block, then its experts, whose backward products take twice the forward ones (Eq. 3).
// Twin of `prophet.spec.Windows.over_agg`.
PhaseWindows windows_over_agg(double forward_s, const Figures& figures) {
    const double experts = figures.windows_have_experts, beside_s = experts * forward_s;
    return {{figures.bnec_s, 0.0}, {2.0 * beside_s, 2.0 * experts}};
}

// Eq. 8 for a direct transfer: what its windows do not cover, and `overlap_cost` times what they do, which is free in
// the paper.
Exposed exposed_direct(const TransferSeconds& transfer, const PhaseWindows& windows, double overlap_cost) {
    const double direct_s = transfer.direct_s, window_s = windows.seconds();
    const double exposed_s = std::max(0.0, direct_s - window_s), covered_s = std::min(direct_s, window_s);
    return {exposed_s + overlap_cost * covered_s, direct_s > window_s ? windows.growth() : 0.0};
}

// The same in two phases, of either form. Each has its own window: the second sends on what the first has brought, so it
// cannot start early where the first one's window has room.
Exposed exposed_in_phases(const Phases& phases, const PhaseWindows& windows, double overlap_cost) {
    const double first_s = phases.first_s, second_s = phases.second_s;
    const Window &under_first = windows.first, &under_second = windows.second;
    const double exposed_s =
        std::max(0.0, first_s - under_first.seconds) + std::max(0.0, second_s - under_second.seconds);
    const double covered_s = std::min(first_s, under_first.seconds) + std::min(second_s, under_second.seconds);
    double hidden = 0.0;
    hidden += first_s > under_first.seconds ? under_first.growth : 0.0;
    hidden += second_s > under_second.seconds ? under_second.growth : 0.0;
    return {exposed_s + overlap_cost * covered_s, hidden};
}

// The form that lengthens the step least, of several alike the first.
Exposed exposed_in_best_form(const TransferSeconds& transfer, const PhaseWindows& windows, double overlap_cost) {
    Exposed best = exposed_direct(transfer, windows, overlap_cost);
    const Exposed two_phase = exposed_in_phases(transfer.two_phase, windows, overlap_cost);
    if (two_phase.seconds < best.seconds) best = two_phase;
    if (transfer.counts_once) {
        const Exposed once = exposed_in_phases(transfer.once, windows, overlap_cost);
        if (once.seconds < best.seconds) best = once;
    }
    if (transfer.counts_spread) {
        const Exposed spread = exposed_in_phases(transfer.spread, windows, overlap_cost);
        if (spread.seconds < best.seconds) best = spread;
    }
    return best;
}

// Seconds by which Trans and Agg lengthen a step beside so many seconds of forward products (the last two terms of
// Eq. 8). Twin of `TransferSeconds.exposed_seconds` in `prophet.spec`.
ExposedSeconds exposed_seconds(const Busiest& busiest, double forward_s, const Figures& figures) {
    const double taken = figures.overlap_cost;
    // Agg mirrors Trans: what was scattered and gathered is gathered, and the sums are brought home.
    const TransferSeconds trans =
        transfer_seconds(busiest, {SCATTER_NEAR, figures.param_bytes}, {GATHER_NEAR, figures.param_bytes}, true, figures);
    const TransferSeconds agg =
        transfer_seconds(busiest, {GATHER_NEAR, figures.grad_bytes}, {SCATTER_NEAR, figures.sum_bytes}, false, figures);
    const Exposed of_trans = exposed_in_best_form(trans, windows_over_trans(forward_s, figures), taken);
    const Exposed of_agg = exposed_in_best_form(agg, windows_over_agg(forward_s, figures), taken);
    // A second that is hidden still costs `taken` of it.
    return {of_trans.seconds, of_agg.seconds, (of_trans.hidden + of_agg.hidden) * (1.0 - taken)};
}

// What takes a link between nodes, or a port, longest, in parts of which a copy has as many as there are replicas: one
// group of all, and groups by node. `in_node` has the replicas.
struct Crossings {
    double together;
    double apart;
    Int copies;
    Int groups;
    Int most;    // replicas in one node
    Int beyond;  // nodes with replicas beside the home's
};

Crossings crossings_of(const Flow& flow, Int home) {
    const double port_share = flow.problem->figures.port_share, alone = std::max(1.0, port_share);
    const Int nodes = flow.problem->nodes(), here = flow.in_node[flow.node_R[home]];
    Crossings found{};
    for (Int v = 0; v < nodes; v++) {
        found.copies += flow.in_node[v];
        found.groups += flow.in_node[v] > 0;
        found.most = std::max(found.most, flow.in_node[v]);
    }
    double gather = 0.0;
    for (Int v = 0; v < nodes; v++) {
        const Int k = flow.in_node[v];
        if (k == 0) continue;
        gather = std::max(gather,
                          static_cast<double>(found.copies - k) * std::max(1.0, static_cast<double>(k) * port_share));
    }
    found.beyond = found.groups - (here > 0);
    found.together = static_cast<double>(found.copies - here) * alone + gather;
    found.apart = static_cast<double>(found.copies * found.beyond) * alone;
    return found;
}

// Whether an expert gains by groups that are the replicas of every node, which `in_node` has: where those take less
// time between nodes than one group of all. Twin of `crosses_once` in `prophet/spec/routes.py`.
bool crosses_once(const Flow& flow, Int home) {
    const Crossings found = crossings_of(flow, home);
    return found.groups >= 2 && found.most >= 2 && found.apart < found.together;
}

Int ranks_of(const Flow& flow, Int node) {
    return flow.problem->node_first[node + 1] - flow.problem->node_first[node];
}

// Whether relays take less time between nodes than the home alone does in any groups. Twin of `crosses_by_relays` in
// `prophet/spec/routes.py`.
bool crosses_by_relays(const Flow& flow, Int home) {
    const Int own = flow.node_R[home], relays = ranks_of(flow, own);
    const Crossings found = crossings_of(flow, home);
    if (relays < 2 || found.beyond == 0) return false;
    Int most = found.beyond;  // parts that one link moves; a smaller node's ranks receive several
    for (Int v = 0; v < flow.problem->nodes(); v++) {
        if (v == own || flow.in_node[v] == 0) continue;
        const Int carriers = ranks_of(flow, v);
        most = std::max(most, (relays + carriers - 1) / carriers);
    }
    const double through_port = static_cast<double>(found.beyond * relays) * flow.problem->figures.port_share;
    const double crossing = std::max(static_cast<double>(most), through_port);
    return static_cast<double>(found.copies) * crossing <
           static_cast<double>(relays) * std::min(found.together, found.apart);
}

// Calls `use(arc, rank)` for the replicas of expert j.
template <typename Use>
void each_replica(const Flow& flow, Int j, Use use) {
    for (Int a = flow.next_A[j]; a >= 0; a = flow.next_A[a]) use(a, flow.rank_A[a]);
}

// The link of the list that leads to arc `a` leads to `target` from now on.
void relink(Flow& flow, Int a, Int target) {
    Int k = flow.expert_A[a];
    while (flow.next_A[k] != a) k = flow.next_A[k];
    flow.next_A[k] = target;
}

// The same in the node-once form, where `in_node` has an expert's `n` replicas, or without relays in the spread form:
// `near_kind` is the first of its kinds.
void count_once(Flow& flow, Int near_kind, Int home, ConstInts ranks, Int n, double sign) {
    const Int gather_kind = near_kind + (GATHER_NEAR - SCATTER_NEAR);
    ConstInts node_R = flow.node_R;
    const bool once = crosses_once(flow, home);
    for (Int d : ranks) {
        if (d == home) continue;
        const Int level = node_R[d] == node_R[home] ? 0 : 1, near = flow.in_node[node_R[d]], group = once ? near : n;
        const double part = sign / static_cast<double>(group);
        if (!once) flow.sent[near_kind + level][home] += part;
        flow.received[near_kind + level][d] += part;
        for (FloatGrid side : {flow.sent, flow.received}) {
            side[gather_kind][d] += static_cast<double>(near - 1) * part;
            side[gather_kind + 1][d] += static_cast<double>(group - near) * part;
        }
    }
    // Whole copies: sums of parts of several sizes would depend on the order of the replicas.
    for (Int v = 0; once && v < flow.problem->nodes(); v++) {
        const Int level = v == node_R[home] ? 0 : 1;
        if (flow.in_node[v] > 0) flow.sent[near_kind + level][home] += sign;
    }
}

// The same with relays, all ranks of the home's node. The order of the replicas plays no part: all terms are alike.
void count_relayed(Flow& flow, Int home, ConstInts ranks, double sign) {
    const Int own = flow.node_R[home], relays = ranks_of(flow, own);
    ConstInts first = flow.problem->node_first;
    const double part = sign / static_cast<double>(relays);
    const auto carrier = [&](Int v, Int j) { return first[v] + j % ranks_of(flow, v); };
    const auto move = [&](Int kind, Int from, Int to) {
        if (from == to) return;
        flow.sent[kind][from] += part;
        flow.received[kind][to] += part;
    };
    for (Int j = 0; j < relays; j++) {
        move(SPREAD_NEAR, home, first[own] + j);
        for (Int v = 0; v < flow.problem->nodes(); v++) {
            if (v != own && flow.in_node[v] > 0) move(RELAYED_SCATTER_FAR, first[own] + j, carrier(v, j));
        }
        for (Int d : ranks) {
            if (d != home) move(RELAYED_GATHER_NEAR, carrier(flow.node_R[d], j), d);
        }
    }
}

}  // namespace

bool Flow::has(Int j, Int rank) const {
    for (Int a = j; a >= 0; a = next_A[a]) {
        if (rank_A[a] == rank) return true;
    }
    return false;
}

Flow make_flow(const Problem& problem, ConstInts chosen_J, Int spare_arcs, Workspace& room, bool once) {
    Int ranks = problem.ranks(), arcs = chosen_J.size + spare_arcs;
    const Figures& figures = problem.figures;
    Flow flow{};
    flow.problem = &problem;
    flow.chosen_J = chosen_J;
    flow.node_R = problem.node_R;
    const bool ports = figures.has_ports();
    for (FloatGrid* grid : {&flow.rate, &flow.base, &flow.busy, &flow.price, &flow.work}) {
        *grid = room.floats(ports ? Int{WITH_PORTS} : Int{RESOURCES}, ranks);
    }
    flow.far_out = ports ? room.floats(ranks) : flow.price[OUT_FAR];
    flow.far_in = ports ? room.floats(ranks) : flow.price[IN_FAR];
    const bool levels = problem.nodes() > 1 && problem.nodes() < ranks;
    Int kinds = COPIES;
    if (once && levels) kinds = COPIES_WITH_ONCE;
    if (once && levels && problem.counts_spread && figures.port_share < 1.0) kinds = COPIES_WITH_SPREAD;
    for (FloatGrid* grid : {&flow.port_sent, &flow.port_received}) {
        if (ports) *grid = room.floats(kinds, problem.nodes());
    }
    for (FloatGrid* grid : {&flow.sent, &flow.received}) {
        *grid = room.floats(kinds, ranks);
        grid->flat().fill(0.0);
    }
    for (Int r = 0; r < ranks; r++) {
        flow.rate[PRODUCTS][r] = problem.seconds_per_token_R[r];
        flow.base[PRODUCTS][r] = static_cast<double>(problem.home_groups[r]) * figures.overhead_s;
    }
    for (Int k = OUT_NEAR; k < RESOURCES; k++) {
        const Link& level = k < OUT_FAR ? figures.intra : figures.inter;
        flow.rate[k].fill(figures.token_bytes / level.bytes_per_s);
        flow.base[k].fill(level.latency_s);
    }
    for (Int i = 0; i < RESOURCES * ranks; i++) {
        flow.busy.data[i] = static_cast<double>(problem.home_busy.data[i]);
    }
    if (ports) {
        for (Int k = OUT_PORT; k < WITH_PORTS; k++) {
            flow.rate[k].fill(flow.rate[OUT_FAR][0] * figures.port_share);
            flow.base[k].fill(figures.inter.latency_s);
        }
        count_ports(flow);
    }
    for (Ints* by_arc : {&flow.next_A, &flow.rank_A, &flow.expert_A}) *by_arc = room.ints(arcs);
    flow.tokens_AR = room.ints(arcs, ranks);
    flow.arcs = chosen_J.size;
    for (Ints* by_rank : {&flow.in_node, &flow.listed}) *by_rank = room.ints(ranks);
    flow.in_node.fill(0);
    for (Int j = 0; j < flow.arcs; j++) {
        flow.next_A[j] = -1;
        flow.expert_A[j] = j;
        flow.rank_A[j] = problem.home_E[chosen_J[j]];
    }
    return flow;
}

void fill_homes(Flow& flow) {
    for (Int a = flow.experts(); a < flow.arcs; a++) flow.tokens_AR[a].fill(0);
    gather_columns(flow.problem->load_RE, flow.chosen_J, flow.tokens_AR);
}

void count_expert(const Flow& flow, Int rank, double sign) {
    flow.base[PRODUCTS][rank] += sign * flow.problem->figures.overhead_s;
}

Int link(Flow& flow, Int j, Int rank) {
    Int a = flow.arcs++;
    flow.rank_A[a] = rank;
    flow.expert_A[a] = j;
    flow.next_A[a] = flow.next_A[j];
    flow.next_A[j] = a;
    count_expert(flow, rank, 1.0);
    return a;
}

void detach(Flow& flow, Int a) {
    Int j = flow.expert_A[a], rank = flow.rank_A[a];
    relink(flow, a, flow.next_A[a]);
    for (Int r = 0; r < flow.ranks(); r++) {
        Int n = flow.tokens_AR[a][r];
        if (n == 0) continue;
        Int best = j;  // the first in the list on ties
        double low = token_price(flow, r, flow.rank_A[j]);
        each_replica(flow, j, [&](Int other, Int d) {
            double p = token_price(flow, r, d);
            if (p < low) {
                best = other;
                low = p;
            }
        });
        redirect(flow, r, rank, flow.rank_A[best], n);
        flow.tokens_AR[best][r] += n;
    }
    count_expert(flow, rank, -1.0);
    Int last = --flow.arcs;
    if (last == a) return;
    relink(flow, last, a);
    flow.next_A[a] = flow.next_A[last];
    flow.rank_A[a] = flow.rank_A[last];
    flow.expert_A[a] = flow.expert_A[last];
    flow.tokens_AR[a].copy_from(flow.tokens_AR[last]);
}

void count_copies(Flow& flow, Int home, ConstInts ranks, double sign) {
    ConstInts node_R = flow.node_R;
    Ints in_node = flow.in_node;
    Int n = 0;
    for (Int d : ranks) {
        if (d == home) continue;
        n++;
        in_node[node_R[d]]++;
    }
    // The home scatters a copy, a part for each replica. In the gather every replica sends its part to all others and
    // receives theirs.
    double part = sign / static_cast<double>(n);
    for (Int d : ranks) {
        if (d == home) continue;
        Int level = node_R[d] == node_R[home] ? 0 : 1, near = in_node[node_R[d]];
        flow.sent[DIRECT_NEAR + level][home] += sign;
        flow.received[DIRECT_NEAR + level][d] += sign;
        flow.sent[SCATTER_NEAR + level][home] += part;
        flow.received[SCATTER_NEAR + level][d] += part;
        for (FloatGrid side : {flow.sent, flow.received}) {
            side[GATHER_NEAR][d] += static_cast<double>(near - 1) * part;
            side[GATHER_FAR][d] += static_cast<double>(n - near) * part;
        }
    }
    if (flow.counts_once()) count_once(flow, ONCE_SCATTER_NEAR, home, ranks, n, sign);
    if (flow.counts_spread() && crosses_by_relays(flow, home)) count_relayed(flow, home, ranks, sign);
    else if (flow.counts_spread()) count_once(flow, RELAYED_SCATTER_NEAR, home, ranks, n, sign);
    for (Int d : ranks) in_node[node_R[d]] = 0;
}

void count_copies(Flow& flow, Int j, double sign) {
    if (!flow.replicated(j)) return;
    Int n = 0;
    each_replica(flow, j, [&](Int, Int d) { flow.listed[n++] = d; });
    count_copies(flow, flow.rank_A[j], flow.listed.part(0, n), sign);
}

void count_ports(const Flow& flow) {
    for (auto [port, link] : {std::pair{OUT_PORT, OUT_FAR}, std::pair{IN_PORT, IN_FAR}}) {
        flow.busy[port].fill(0.0);
        for (Int r = 0; r < flow.ranks(); r++) flow.busy[port][flow.node_R[r]] += flow.busy[link][r];
    }
}

void price_port(const Flow& flow, Int node) {
    const double out = flow.price[OUT_PORT][node], in = flow.price[IN_PORT][node];
    for (Int r = flow.problem->node_first[node]; r < flow.problem->node_first[node + 1]; r++) {
        flow.far_out[r] = flow.price[OUT_FAR][r] + out;
        flow.far_in[r] = flow.price[IN_FAR][r] + in;
    }
}

void count_busiest(Flow& flow) {
    flow.busiest.once = flow.counts_once();
    for (Int i = 0; i < flow.sent.rows; i++) {
        ConstFloats sent = flow.sent[i], received = flow.received[i];
        double most = 0.0;
        for (Int r = 0; r < sent.size; r++) most = std::max({most, sent[r], received[r]});
        flow.busiest.units[i] = most;
    }
    flow.busiest.spread = flow.counts_spread() && flow.busiest.units[SPREAD_NEAR] > 0.0;
    if (!flow.ports()) return;
    const Figures& figures = flow.problem->figures;
    for (Int i = DIRECT_FAR; i < flow.sent.rows; i += 2) {
        Floats out = flow.port_sent[i], in = flow.port_received[i];
        out.fill(0.0);
        in.fill(0.0);
        for (Int r = 0; r < flow.ranks(); r++) {
            out[flow.node_R[r]] += flow.sent[i][r];
            in[flow.node_R[r]] += flow.received[i][r];
        }
        double& most = flow.busiest.units[i];
        for (Int n = 0; n < out.size; n++) most = std::max(most, std::max(out[n], in[n]) * figures.port_share);
    }
}

Seconds reprice(Flow& flow, Int q) {
    const Figures& figures = flow.problem->figures;
    Scale& scale = flow.scale;
    double longest_s[2] = {0.0, 0.0}, norm_s[2] = {0.0, 0.0};  // of products, of exchanges
    // A link that moves nothing costs no latency; products pay their fixed costs in any case.
    const auto counts = [&](Int k, Int r) { return k == PRODUCTS || flow.busy[k][r] > 0.0; };
    const Int resources = flow.busy.rows;
    if (flow.ports()) count_ports(flow);
    for (Int k = 0; k < resources; k++) {
        ConstFloats busy = flow.busy[k], rate = flow.rate[k], base = flow.base[k];
        Floats work = flow.work[k];
        double& longest = longest_s[group_of(k)];
        for (Int r = 0; r < work.size; r++) {
            work[r] = busy[r] * rate[r] + base[r];
            longest = std::max(longest, counts(k, r) ? work[r] : 0.0);
        }
    }
    // Powers of seconds would underflow: they are taken relative to the longest.
    for (Int group = 0; group < 2; group++) scale.reference_s[group] = std::max(longest_s[group], LEAST_S);
    for (Int k = 0; k < resources; k++) {
        Floats work = flow.work[k];
        for (double& w : work) w /= scale.reference_s[group_of(k)];
        for (Int n = q; n > 1; n >>= 1) {  // `power`, of all at once
            for (double& w : work) w *= w;
        }
        for (Int r = 0; r < work.size; r++) norm_s[group_of(k)] += counts(k, r) ? work[r] : 0.0;
    }
    const ExposedSeconds exposed = exposed_seconds(flow.busiest, longest_s[0], figures);
    // Longer products hide more of an exposed transfer, and weigh less for it.
    scale.weight[0] = std::max(FORWARD_AND_BACKWARD - exposed.hidden, LEAST_WEIGHT);
    scale.weight[1] = A2A_PER_STEP;
    for (Int group = 0; group < 2; group++) {
        for (Int n = q; n > 1; n >>= 1) norm_s[group] = std::sqrt(norm_s[group]);
        norm_s[group] *= longest_s[group];
        if (longest_s[group] > 0.0) scale.weight[group] /= power(norm_s[group] / longest_s[group], q);
    }
    for (Int k = 0; k < resources; k++) {
        ConstFloats rate = flow.rate[k], work = flow.work[k];
        Floats price = flow.price[k];
        for (Int r = 0; r < price.size; r++) price[r] = scale.weight[group_of(k)] * rate[r] * work[r];
    }
    for (Int n = 0; flow.ports() && n < flow.problem->nodes(); n++) price_port(flow, n);
    const auto step_s = [&](const double* part_s) {
        return A2A_PER_STEP * part_s[1] + FORWARD_AND_BACKWARD * part_s[0] + exposed.trans_s + exposed.agg_s;
    };
    return {step_s(longest_s), step_s(norm_s), longest_s[0], exposed.both()};
}

double exposed_with(const Flow& flow, Int j, Int rank, double forward_s) {
    const Int home = flow.rank_A[j], from = flow.node_R[home], to = flow.node_R[rank], level = from == to ? 0 : 1;
    Busiest with = flow.busiest;
    // An estimate: the parts of the expert's other replicas get smaller, and are left as they are.
    const auto raise = [&](Int kind, double sent, double received) {
        with.units[kind] = std::max(with.units[kind], std::max(sent, received));
    };
    Int copies = 0;
    for (Int a = flow.next_A[j]; a >= 0; a = flow.next_A[a]) copies++;
    const auto raise_port = [&](Int kind, Int node, double out, double in) {
        if (!flow.ports()) return;
        const double share = flow.problem->figures.port_share;
        raise(kind, (flow.port_sent[kind][node] + out) * share, (flow.port_received[kind][node] + in) * share);
    };
    raise(DIRECT_NEAR + level, flow.sent[DIRECT_NEAR + level][home] + 1.0,
          flow.received[DIRECT_NEAR + level][rank] + 1.0);
    if (level > 0) {
        raise_port(DIRECT_FAR, from, 1.0, 0.0);
        raise_port(DIRECT_FAR, to, 0.0, 1.0);
    }
    // Joins a group of so many `others`, whose scatter begins with the kind `near`; `crosses`: parts of theirs do.
    const auto join = [&](Int near, Int others, bool crosses) {
        const double share = 1.0 / static_cast<double>(others + 1), parts = static_cast<double>(others) * share;
        const double scattered = others == 0 ? flow.sent[near + level][home] + 1.0 : 0.0;
        raise(near + level, scattered, flow.received[near + level][rank] + share);
        const Int gather = near + 2 + (crosses ? 1 : 0);
        if (others > 0) raise(gather, flow.sent[gather][rank] + parts, 0.0);
        if (level > 0) {
            raise_port(near + 1, from, others == 0 ? 1.0 : 0.0, 0.0);
            // A group of the rank's own node has been sent all of its parts through this port.
            raise_port(near + 1, to, 0.0, crosses || others == 0 ? share : 0.0);
        }
        if (others > 0 && crosses) raise_port(gather, to, parts, parts);
    };
    const Int near = flow.in_node[to];
    join(SCATTER_NEAR, copies, level > 0 || near != copies);
    if (with.once) {
        flow.in_node[to]++;
        const bool once = crosses_once(flow, home);
        flow.in_node[to]--;
        join(ONCE_SCATTER_NEAR, once ? near : copies, !once && near != copies);
    }
    return exposed_seconds(with, forward_s, flow.problem->figures).both();
}

Cost cost_of(const Flow& flow, ConstInts groups_R) {
    const Figures& figures = flow.problem->figures;
    double forward_s = 0.0, near = 0.0, far = 0.0;
    ConstFloats products = flow.busy[PRODUCTS], rate = flow.rate[PRODUCTS];
    for (Int r = 0; r < groups_R.size; r++) {
        double seconds = products[r] * rate[r] + static_cast<double>(groups_R[r]) * figures.overhead_s;
        forward_s = std::max(forward_s, seconds);
        near = std::max({near, flow.busy[OUT_NEAR][r], flow.busy[IN_NEAR][r]});
        far = std::max({far, flow.busy[OUT_FAR][r], flow.busy[IN_FAR][r]});
    }
    if (flow.ports()) {
        count_ports(flow);
        for (Int k = OUT_PORT; k < WITH_PORTS; k++) {
            for (double n : flow.busy[k]) far = std::max(far, n * figures.port_share);
        }
    }
    double a2a_s = A2A_PER_STEP * exchange_seconds(near, far, figures.token_bytes, figures);  // Eq. 1, four times
    double expert_s = FORWARD_AND_BACKWARD * forward_s;                                      // Eq. 2 and 3
    const ExposedSeconds exposed = exposed_seconds(flow.busiest, forward_s, figures);
    // Eq. 8: transfers count where nothing hides them.
    return {a2a_s + expert_s + exposed.trans_s + exposed.agg_s, a2a_s, expert_s, exposed.trans_s, exposed.agg_s};
}

Cost cost_of(const Flow& flow, Workspace& room) {
    Scope scope(room);
    const Problem& problem = *flow.problem;
    Ints groups_R = room.ints(flow.ranks());
    groups_R.copy_from(problem.home_groups);
    for (Int j = 0; j < flow.experts(); j++) groups_R[flow.rank_A[j]] -= problem.total_E[flow.chosen_J[j]] > 0;
    for (Int a = 0; a < flow.arcs; a++) {
        ConstInts tokens_R = flow.tokens_AR[a];
        groups_R[flow.rank_A[a]] += std::any_of(tokens_R.begin(), tokens_R.end(), [](Int n) { return n > 0; });
    }
    return cost_of(flow, groups_R);
}

double a2a_floor(const Flow& flow) {
    const Problem& problem = *flow.problem;
    ConstInts node_R = flow.node_R;
    Ints reached = flow.in_node;  // nodes with replicas, but for the home's
    Int near = 0, far = 0;
    for (Int r = 0; r < flow.ranks(); r++) {
        near += problem.home_busy[OUT_NEAR][r];
        far += problem.home_busy[OUT_FAR][r];
    }
    for (Int j = 0; j < flow.experts(); j++) {
        Int e = flow.chosen_J[j], home = node_R[flow.rank_A[j]];
        each_replica(flow, j, [&](Int, Int d) {  // keeps what its own rank routes
            (node_R[d] == home ? near : far) -= problem.load_RE[d][e];
            reached[node_R[d]] = node_R[d] != home;
        });
        for (Int r = 0; r < flow.ranks() && problem.nodes() > 1; r++) {
            if (reached[node_R[r]] == 0 || flow.has(j, r)) continue;
            far -= problem.load_RE[r][e];
            near += problem.load_RE[r][e];
        }
        each_replica(flow, j, [&](Int, Int d) { reached[node_R[d]] = 0; });
    }
    const auto level_s = [&](Int tokens, Int k, Int sharers) {
        if (tokens <= 0) return 0.0;
        return flow.base[k][0] + static_cast<double>(tokens) / static_cast<double>(sharers) * flow.rate[k][0];
    };
    double floor_s = std::max(level_s(near, OUT_NEAR, flow.ranks()), level_s(far, OUT_FAR, flow.ranks()));
    for (Int k = OUT_PORT; k < flow.busy.rows; k++) floor_s = std::max(floor_s, level_s(far, k, problem.nodes()));
    return A2A_PER_STEP * floor_s;
}

double even_products(const Problem& problem) {
    double tokens = 0.0, tokens_per_s = 0.0;
    for (Int r = 0; r < problem.ranks(); r++) {
        tokens += static_cast<double>(problem.home_busy[PRODUCTS][r]);
        tokens_per_s += 1.0 / problem.seconds_per_token_R[r];
    }
    return FORWARD_AND_BACKWARD * tokens / tokens_per_s;
}

}  // namespace prophet
