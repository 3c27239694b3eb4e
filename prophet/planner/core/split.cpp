#include "split.h"

#include <algorithm>

namespace prophet {

namespace {

constexpr double FAR_ABOVE = 0.1;  // share of the step by which an exchange exceeds its floor where few sweeps are best
                                   // made at low q
constexpr double WORTH_IT = 0.01;  // share of the step that an exchange must be above its floor for descent to be tried

// Add tokens to what `source` sends and `rank` receives; fewer than none take back.
void count_way(const Flow& flow, Int source, Int rank, Int tokens) {
    if (source == rank) return;
    Int out = flow.node_R[source] == flow.node_R[rank] ? OUT_NEAR : OUT_FAR;
    flow.busy[out][source] += static_cast<double>(tokens);
    flow.busy[out + 1][rank] += static_cast<double>(tokens);
}

void count_products(Flow& flow, ConstInts load_R) {
    for (Int r = 0; r < load_R.size; r++) flow.busy[PRODUCTS][r] = static_cast<double>(load_R[r]);
}

// Count the exact split's rows in `flow.busy`, which has all tokens at home.
void count_rows(Flow& flow, const Problem& problem, Span<const Row> rows, ConstInts load_R) {
    for (const Row& row : rows) {
        Int home = problem.home_E[row.expert];
        if (row.rank == home) continue;
        count_way(flow, row.source, home, -row.tokens);
        count_way(flow, row.source, row.rank, row.tokens);
    }
    count_products(flow, load_R);
}

// One expert's exact split, counted without its rows where all ranks are in one node: what does not stay is sent.
void count_within_node(Flow& flow, const Problem& problem, const Holders& holders, Int j, ConstInts tokens_A) {
    Int e = holders.expert_M[j], home = problem.home_E[e];
    for (Int k = holders.start[j]; k < holders.start[j + 1]; k++) {
        Int d = holders.rank_A[k], load = problem.load_RE[d][e], local = std::min(load, tokens_A[k]);
        Int sent = d == home ? load - local : -local;
        Int received = tokens_A[k] - local - (d == home ? problem.total_E[e] - load : 0);
        flow.busy[OUT_NEAR][d] += static_cast<double>(sent);
        flow.busy[IN_NEAR][d] += static_cast<double>(received);
    }
}

// The same for one node of several: ranks first .. last - 1, and their holders, arcs from .. to - 1. What sources and
// holders of the node have in common stays there, in rank order.
void count_node(Flow& flow, Int first, Int last, Int from, Int to, ConstInts rank_A, ConstInts left, ConstInts want) {
    Int there = 0, wanted = 0;
    for (Int r = first; r < last; r++) there += left[r];
    for (Int k = from; k < to; k++) wanted += want[rank_A[k]];
    Int inside = std::min(there, wanted), rest = inside;
    for (Int r = first; r < last; r++) {
        Int part = std::min(left[r], rest);
        rest -= part;
        flow.busy[OUT_NEAR][r] += static_cast<double>(part);
        flow.busy[OUT_FAR][r] += static_cast<double>(left[r] - part);
    }
    for (Int k = from; k < to; k++) {
        Int d = rank_A[k], part = std::min(want[d], inside);
        inside -= part;
        flow.busy[IN_NEAR][d] += static_cast<double>(part);
        flow.busy[IN_FAR][d] += static_cast<double>(want[d] - part);
    }
}

// The same for all nodes; `left` and `want` [R] are room.
void count_across_nodes(Flow& flow, const Problem& problem, const Holders& holders, Int j, ConstInts tokens_A,
                        Ints left, Ints want) {
    Int e = holders.expert_M[j], home = problem.home_E[e], ranks = problem.ranks();
    for (Int r = 0; r < ranks; r++) {
        left[r] = problem.load_RE[r][e];
        count_way(flow, r, home, -left[r]);
    }
    for (Int k = holders.start[j]; k < holders.start[j + 1]; k++) {
        Int d = holders.rank_A[k], part = std::min(left[d], tokens_A[k]);
        left[d] -= part;
        want[d] = tokens_A[k] - part;
    }
    Int k = holders.start[j];
    for (Int r = 0; r < ranks;) {
        Int first = r, from = k;
        while (r < ranks && problem.node_R[r] == problem.node_R[first]) r++;
        while (k < holders.start[j + 1] && holders.rank_A[k] < r) k++;
        count_node(flow, first, r, from, k, holders.rank_A, left, want);
    }
}

// Write the tokens of the exact split's rows.
void lay_out(Flow& flow, const Problem& problem, const Holders& holders, Span<const Row> rows, Workspace& room) {
    Scope scope(room);
    fill_homes(flow, problem, holders.expert_M);
    Ints arc_R = room.ints(flow.ranks());  // of the present expert
    Int i = 0;
    for (Int j = 0; j < holders.experts(); j++) {
        for (Int a = j; a >= 0; a = flow.next_A[a]) arc_R[flow.rank_A[a]] = a;
        for (; i < rows.size && rows[i].expert == holders.expert_M[j]; i++) {
            flow.tokens_AR[j][rows[i].source] -= rows[i].tokens;
            flow.tokens_AR[arc_R[rows[i].rank]][rows[i].source] += rows[i].tokens;
        }
    }
}

// Link all replicas; returns the experts with tokens on every rank under the exact split.
Ints link_replicas(Flow& flow, const Problem& problem, const Holders& holders, ConstInts tokens_A, Workspace& room) {
    Ints groups_R = room.ints(problem.ranks());
    groups_R.copy_from(problem.home_groups);
    for (Int j = 0; j < holders.experts(); j++) {
        if (problem.total_E[holders.expert_M[j]] > 0) groups_R[flow.rank_A[j]]--;
        for (Int k = holders.start[j]; k < holders.start[j + 1]; k++) {
            Int d = holders.rank_A[k];
            if (tokens_A[k] > 0) groups_R[d]++;
            if (d != flow.rank_A[j]) link(flow, j, d, problem.figures.overhead_s);
        }
    }
    return groups_R;
}

// Sets what the descent could save at most; returns the sweeps that the effort buys of it.
Int worth_of_descent(const Problem& problem, const Holders& holders, double effort, BestSplit& split) {
    split.above_s = 0.0;
    const Cost& cost = split.cost;
    if (effort <= 0.0 || cost.a2a <= WORTH_IT * cost.total) return 0;
    double above_s = cost.a2a - A2A_PER_STEP * exchange_floor(split.flow, problem, holders.expert_M);
    if (above_s <= WORTH_IT * cost.total) return 0;
    Int sweeps = affordable(above_s, effort, holders.experts() * problem.ranks());
    if (sweeps > 0) split.above_s = above_s;
    return sweeps;
}

double bottleneck_of(const Flow& flow, ConstFloats speed_R) {
    double level = 0.0;
    for (Int r = 0; r < speed_R.size; r++) level = std::max(level, flow.busy[PRODUCTS][r] / speed_R[r]);
    return level;
}

// Descend from the exact split, and keep what is better.
void descend_from(BestSplit& split, const Problem& problem, const Holders& holders, const Busiest& busiest, Int sweeps,
                  Workspace& room) {
    Scope scope(room);
    Flow& flow = split.flow;
    lay_out(flow, problem, holders, split.rows, room);
    Ints tokens = room.ints(flow.tokens_AR.flat().size);
    Floats busy = room.floats(flow.busy.flat().size);
    tokens.copy_from(flow.tokens_AR.flat());
    busy.copy_from(flow.busy.flat());
    bool far = split.above_s > FAR_ABOVE * split.cost.total;
    split.sweeps = shorten(flow, problem.figures, busiest, sweeps, far, room).sweeps;
    Cost found = cost_of(flow, problem, holders.expert_M, busiest, room);
    if (found.total < split.cost.total) {
        split.cost = found;
        split.rows = {};
        split.bottleneck = bottleneck_of(flow, problem.speed_R);
    } else {
        flow.tokens_AR.flat().copy_from(tokens);
        flow.busy.flat().copy_from(busy);
    }
}

}  // namespace

void count_exact(Flow& flow, const Problem& problem, const Holders& holders, const Exact& exact, Workspace& room) {
    Scope scope(room);
    Ints left = room.ints(problem.ranks()), want = room.ints(problem.ranks());
    for (Int j = 0; j < holders.experts(); j++) {
        if (problem.nodes() == 1) {
            count_within_node(flow, problem, holders, j, exact.tokens_A);
        } else {
            count_across_nodes(flow, problem, holders, j, exact.tokens_A, left, want);
        }
    }
    count_products(flow, exact.load_R);
}

BestSplit best_split(const Problem& problem, const Holders& holders, double effort, bool exact, Workspace& room) {
    Exact level = level_out(problem, holders, room);
    BestSplit split{};
    split.bottleneck = level.bottleneck;
    split.flow = make_frame(problem, holders.expert_M, holders.replicas(), room);
    Flow& flow = split.flow;
    Ints groups_R = link_replicas(flow, problem, holders, level.tokens_A, room);
    Busiest busiest = busiest_of(copies_moved(flow, room));
    Cost unused = cost_of_busy(flow, problem.home_groups, busiest, problem.figures);
    if (exact) {
        count_exact(flow, problem, holders, level, room);
    } else {
        split.rows = expand(problem.load_RE, holders, problem.node_R, level.tokens_A, room);
        count_rows(flow, problem, split.rows, level.load_R);
    }
    split.cost = cost_of_busy(flow, groups_R, busiest, problem.figures);
    Int sweeps = worth_of_descent(problem, holders, effort, split);
    if (split.rows.size == 0 && !exact) fill_homes(flow, problem, holders.expert_M);  // nothing was routed to them
    if (sweeps > 0 && !exact) descend_from(split, problem, holders, busiest, sweeps, room);
    if (effort > 0.0 && unused.total < split.cost.total) {  // planned for other routing, replicas can be in the way
        split.cost = unused;
        split.rows = {};
        if (!exact) {
            split.bottleneck = send_home(flow, problem);
            fill_homes(flow, problem, holders.expert_M);
        }
    }
    return split;
}

}  // namespace prophet
