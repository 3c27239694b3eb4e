#include "split.h"

namespace prophet {

namespace {

constexpr double FAR_ABOVE = 0.1;  // share of the step by which an exchange exceeds its floor where few sweeps are best
                                   // made at low q
constexpr double WORTH_IT = 0.01;  // share of the step that an exchange must be above its floor for descent to be tried

// Columns of a load, gathered for a few experts at a time: a column by itself reads a cache line for every token.
class Columns {
   public:
    Columns(ConstIntGrid load_RE, ConstInts expert_M, Workspace& room)
        : load_RE_(load_RE), expert_M_(expert_M), column_(room.ints(TOGETHER, load_RE.rows)) {}

    // Tokens of expert j by rank; they may be written, for one use.
    Ints take(Int j) {
        if (j < first_ || j >= first_ + TOGETHER) {
            first_ = j;
            Int many = std::min(TOGETHER, expert_M_.size - j);
            for (Int r = 0; r < load_RE_.rows; r++) {
                ConstInts load_E = load_RE_[r];
                for (Int i = 0; i < many; i++) column_[i][r] = load_E[expert_M_[j + i]];
            }
        }
        return column_[j - first_];
    }

   private:
    static constexpr Int TOGETHER = 8;
    ConstIntGrid load_RE_;
    ConstInts expert_M_;
    IntGrid column_;
    Int first_ = -TOGETHER;
};

// Calls `sink(j, rank, source, tokens)` for what every source sends to the holders of every expert: local tokens stay,
// then sources meet holders of their own node in rank order, then all others do.
template <typename Sink>
void match(const Problem& problem, const Holders& holders, ConstInts tokens_A, Workspace& room, Sink sink) {
    Scope scope(room);
    Columns columns(problem.load_RE, holders.expert_M, room);
    ConstInts node_R = problem.node_R;
    Ints want = room.ints(node_R.size);
    for (Int j = 0; j < holders.experts(); j++) {
        ConstInts rank_K = holders.of(j);
        Ints left = columns.take(j);
        Int rest = 0;
        for (Int k = 0; k < rank_K.size; k++) {
            Int d = rank_K[k], tokens = tokens_A[holders.start[j] + k], local = std::min(left[d], tokens);
            left[d] -= local;
            want[k] = tokens - local;
            rest += want[k];
            if (local > 0) sink(j, d, d, local);
        }
        for (bool anywhere : {false, true}) {
            Int r = 0;
            for (Int k = 0; rest > 0 && k < rank_K.size;) {
                Int node = node_R[rank_K[k]];
                while (r < node_R.size && (left[r] == 0 || (!anywhere && node_R[r] < node))) r++;
                if (want[k] == 0 || r == node_R.size || (!anywhere && node_R[r] > node)) {
                    k++;
                    continue;
                }
                Int part = std::min(left[r], want[k]);
                left[r] -= part;
                want[k] -= part;
                rest -= part;
                sink(j, rank_K[k], r, part);
            }
        }
    }
}

// The tokens of all arcs as rows.
Span<Row> rows_of(const Flow& flow, Workspace& room) {
    Int used = 0;
    for (Int n : flow.tokens_AR.flat().part(0, flow.arcs * flow.ranks())) used += n > 0;
    Span<Row> rows = room.array<Row>(used);
    Int i = 0;
    for (Int a = 0; a < flow.arcs; a++) {
        ConstInts tokens_R = flow.tokens_AR[a];
        for (Int r = 0; r < tokens_R.size; r++) {
            if (tokens_R[r] > 0) rows[i++] = {r, flow.chosen_J[flow.expert_A[a]], flow.rank_A[a], tokens_R[r]};
        }
    }
    return rows;
}

// Write the rows to the tokens of all arcs.
void fill(Flow& flow, Span<Row> rows, Workspace& room) {
    Scope scope(room);
    Ints arc_R = room.ints(flow.ranks());  // of the present expert
    fill_homes(flow);
    Int i = 0;
    for (Int j = 0; j < flow.experts(); j++) {
        for (Int a = j; a >= 0; a = flow.next_A[a]) arc_R[flow.rank_A[a]] = a;
        for (; i < rows.size && rows[i].expert == flow.chosen_J[j]; i++) {
            flow.tokens_AR[j][rows[i].source] -= rows[i].tokens;
            flow.tokens_AR[arc_R[rows[i].rank]][rows[i].source] += rows[i].tokens;
        }
    }
}

// Descend from the exact split, for as long as that is worth of what it could save at most; keep what is better.
void descend(BestSplit& split, double effort, Workspace& room) {
    const Cost& cost = split.cost;
    Flow& flow = split.flow;
    if (cost.a2a <= WORTH_IT * cost.total) return;
    double above_s = cost.a2a - a2a_floor(flow);
    if (above_s <= WORTH_IT * cost.total) return;
    Int sweeps = affordable(effort * above_s, flow.experts() * flow.ranks());
    if (sweeps == 0) return;
    Floats busy = room.floats(flow.busy.flat().size);
    busy.copy_from(flow.busy.flat());
    fill(flow, split.rows, room);
    shorten(flow, sweeps, above_s > FAR_ABOVE * cost.total, room);
    Cost found = cost_of(flow, room);
    if (found.total < cost.total) {
        split.cost = found;
        split.bottleneck = bottleneck_of(flow);
        split.rows = rows_of(flow, room);
    } else {
        flow.busy.flat().copy_from(busy);
    }
}

}  // namespace

BestSplit best_split(const Problem& problem, const Holders& holders, double effort, bool quick, Workspace& room) {
    Exact exact = exact_split(problem, holders, room);
    BestSplit split{make_flow(problem, holders.expert_M, holders.replicas(), room), {}, exact.bottleneck, {}};
    Flow& flow = split.flow;
    Ints groups_R = room.ints(problem.ranks());  // experts with tokens
    groups_R.copy_from(problem.home_groups);
    for (Int j = 0; j < holders.experts(); j++) {
        Int home = flow.rank_A[j];
        groups_R[home] -= problem.total_E[holders.expert_M[j]] > 0;
        for (Int k = holders.start[j]; k < holders.start[j + 1]; k++) {
            groups_R[holders.rank_A[k]] += exact.tokens_A[k] > 0;
            if (holders.rank_A[k] != home) link(flow, j, holders.rank_A[k]);
        }
        count_copies(flow, home, holders.of(j), 1.0);
    }
    count_busiest(flow);
    const Cost at_home = cost_of(flow, problem.home_groups);
    // Every row uses up a source or a holder, but for the local ones.
    Span<Row> rows = room.array<Row>(quick ? 0 : holders.experts() * problem.ranks() + 2 * holders.arcs());
    Int used = 0;
    match(problem, holders, exact.tokens_A, room, [&](Int j, Int rank, Int source, Int n) {
        if (rank != flow.rank_A[j]) redirect(flow, source, flow.rank_A[j], rank, n);
        if (!quick) rows[used++] = {source, holders.expert_M[j], rank, n};
    });
    split.cost = cost_of(flow, groups_R);
    split.rows = rows.part(0, used);
    if (!quick && effort > 0.0) descend(split, effort, room);
    if (effort > 0.0 && at_home.total < split.cost.total) {  // planned for other routing, replicas can be in the way
        split.cost = at_home;
        for (Int r = 0; r < flow.ranks(); r++)
            flow.busy[PRODUCTS][r] = static_cast<double>(problem.home_busy[PRODUCTS][r]);
        split.bottleneck = bottleneck_of(flow);
        if (!quick) fill_homes(flow);
        if (!quick) split.rows = rows_of(flow, room);
    }
    return split;
}

void write_tokens(const Problem& problem, const BestSplit& split, IntGrid tokens, Workspace& room) {
    Int experts = problem.experts();
    Span<bool> is_shared = room.array<bool>(experts);
    is_shared.fill(false);
    for (Int e : split.flow.chosen_J) is_shared[e] = true;
    tokens.flat().fill(0);
    for (Int r = 0; r < problem.ranks(); r++) {
        for (Int e = 0; e < experts; e++) {
            if (!is_shared[e]) tokens[r * experts + e][problem.home_E[e]] = problem.load_RE[r][e];
        }
    }
    for (const Row& row : split.rows) tokens[row.source * experts + row.expert][row.rank] += row.tokens;
}

double step_seconds(const Problem& problem, ConstBoolGrid holds_ER, double effort, bool quick, Workspace& room) {
    Scope scope(room);
    return best_split(problem, index_holders(holds_ER, room), effort, quick, room).cost.total;
}

void place_others(Flow& flow, const Holders& holders, Span<bool> takes_part, Workspace& room) {
    Scope scope(room);
    const Problem& problem = *flow.problem;
    Exact exact = exact_split(problem, holders, room);
    const auto home = [&](Int j) { return problem.home_E[holders.expert_M[j]]; };
    match(problem, holders, exact.tokens_A, room, [&](Int j, Int rank, Int source, Int n) {
        if (!takes_part[holders.expert_M[j]]) redirect(flow, source, home(j), rank, n);
    });
    for (Int j = 0; j < holders.experts(); j++) {
        if (takes_part[holders.expert_M[j]]) continue;
        for (Int d : holders.of(j)) count_expert(flow, d, d == home(j) ? 0.0 : 1.0);
        count_copies(flow, home(j), holders.of(j), 1.0);
    }
}

}  // namespace prophet
