#include "split.h"

#include <algorithm>

namespace prophet {

namespace {

constexpr double FAR_ABOVE = 0.1;  // share of the step by which an exchange exceeds its floor where few sweeps are best
                                   // made at low q
constexpr double WORTH_IT = 0.01;  // share of the step that an exchange must be above its floor for descent to be tried

// Calls `sink(j, k, source, tokens)` for all experts.
template <typename Sink>
void match_all(ConstIntGrid load_RE, const Holders& holders, ConstInts node_R, ConstInts tokens_A, Workspace& room,
               Sink sink) {
    Scope scope(room);
    Columns columns(load_RE, holders.expert_M, room);
    Ints want = room.ints(node_R.size);
    for (Int j = 0; j < holders.experts(); j++) {
        match(holders, j, node_R, tokens_A, columns.take(j), want,
              [&](Int k, Int source, Int tokens) { sink(j, k, source, tokens); });
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

// How many sweeps the effort buys of what descent could save at most; `far` where that is much.
Int worth_of_descent(const BestSplit& split, const Problem& problem, const Holders& holders, double effort, bool& far) {
    const Cost& cost = split.cost;
    if (effort <= 0.0 || cost.a2a <= WORTH_IT * cost.total) return 0;
    double above_s = cost.a2a - A2A_PER_STEP * exchange_floor(split.flow, problem, holders.expert_M);
    far = above_s > FAR_ABOVE * cost.total;
    if (above_s <= WORTH_IT * cost.total) return 0;
    return affordable(above_s, effort, holders.experts() * problem.ranks());
}

double bottleneck_of(const Flow& flow, ConstFloats speed_R) {
    double level = 0.0;
    for (Int r = 0; r < speed_R.size; r++) level = std::max(level, flow.busy[PRODUCTS][r] / speed_R[r]);
    return level;
}

// Descend from the exact split, and keep what is better.
void descend_from(BestSplit& split, const Problem& problem, const Holders& holders, const Busiest& busiest, Int sweeps,
                  bool far, Workspace& room) {
    Scope scope(room);
    Flow& flow = split.flow;
    fill_homes(flow, problem, holders.expert_M);
    Ints arc_R = room.ints(flow.ranks());  // of the present expert
    Int i = 0;
    for (Int j = 0; j < holders.experts(); j++) {
        for (Int a = j; a >= 0; a = flow.next_A[a]) arc_R[flow.rank_A[a]] = a;
        for (; i < split.rows.size && split.rows[i].expert == holders.expert_M[j]; i++) {
            const Row& row = split.rows[i];
            flow.tokens_AR[j][row.source] -= row.tokens;
            flow.tokens_AR[arc_R[row.rank]][row.source] += row.tokens;
        }
    }
    Floats busy = room.floats(flow.busy.flat().size);
    busy.copy_from(flow.busy.flat());
    shorten(flow, problem.figures, busiest, sweeps, far, room);
    Cost found = cost_of(flow, problem, holders.expert_M, busiest, room);
    if (found.total < split.cost.total) {
        split.cost = found;
        split.bottleneck = bottleneck_of(flow, problem.speed_R);
        split.rows = {};
    } else {
        flow.busy.flat().copy_from(busy);
    }
}

}  // namespace

BestSplit best_split(const Problem& problem, const Holders& holders, double effort, bool quick, Workspace& room) {
    Exact level = level_out(problem, holders, room);
    BestSplit split{make_frame(problem, holders.expert_M, holders.replicas(), room), {}, level.bottleneck, {}};
    Flow& flow = split.flow;
    Ints groups_R = link_replicas(flow, problem, holders, level.tokens_A, room);
    Busiest busiest = busiest_of(copies_moved(flow, room));
    Cost unused = cost_of_busy(flow, problem.home_groups, busiest, problem.figures);
    if (quick) {
        match_all(problem.load_RE, holders, problem.node_R, level.tokens_A, room, [&](Int j, Int k, Int source, Int n) {
            redirect(flow, source, flow.rank_A[j], holders.rank_A[k], static_cast<double>(n));
        });
    } else {
        split.rows = exact_rows_of(level.tokens_A, problem.load_RE, holders, problem.node_R, room);
        for (const Row& row : split.rows) {
            Int home = problem.home_E[row.expert];
            if (row.rank != home) redirect(flow, row.source, home, row.rank, static_cast<double>(row.tokens));
        }
    }
    for (Int r = 0; r < flow.ranks(); r++) flow.busy[PRODUCTS][r] = static_cast<double>(level.load_R[r]);
    split.cost = cost_of_busy(flow, groups_R, busiest, problem.figures);
    bool far = false;
    Int sweeps = quick ? 0 : worth_of_descent(split, problem, holders, effort, far);
    if (sweeps > 0) descend_from(split, problem, holders, busiest, sweeps, far, room);
    if (split.rows.size == 0 && sweeps == 0 && !quick)
        fill_homes(flow, problem, holders.expert_M);        // nothing is routed
    if (effort > 0.0 && unused.total < split.cost.total) {  // planned for other routing, replicas can be in the way
        split.cost = unused;
        split.bottleneck = send_home(flow, problem);
        split.rows = {};
        if (!quick) fill_homes(flow, problem, holders.expert_M);
    }
    return split;
}

Span<Row> rows_of(const BestSplit& split, const Holders& holders, Workspace& room) {
    const Flow& flow = split.flow;
    if (split.rows.size > 0) return split.rows;
    Int used = 0;
    for (Int n : flow.tokens_AR.flat().part(0, flow.arcs * flow.ranks())) used += n > 0;
    Span<Row> rows = room.array<Row>(used);
    Int i = 0;
    for (Int a = 0; a < flow.arcs; a++) {
        ConstInts tokens_R = flow.tokens_AR[a];
        Int e = holders.expert_M[flow.expert_A[a]];
        for (Int r = 0; r < tokens_R.size; r++) {
            if (tokens_R[r] > 0) rows[i++] = {r, e, flow.rank_A[a], tokens_R[r]};
        }
    }
    return rows;
}

Span<Row> exact_rows_of(ConstInts tokens_A, ConstIntGrid load_RE, const Holders& holders, ConstInts node_R,
                        Workspace& room) {
    // Every row uses up a source or a holder, but for the local ones.
    Span<Row> rows = room.array<Row>(holders.experts() * load_RE.rows + 2 * holders.arcs());
    Int used = 0;
    match_all(load_RE, holders, node_R, tokens_A, room, [&](Int j, Int k, Int source, Int n) {
        rows[used++] = {source, holders.expert_M[j], holders.rank_A[k], n};
    });
    return {rows.data, used};
}

}  // namespace prophet
