#include "split.h"

namespace prophet {

namespace {

constexpr double FAR_ABOVE = 0.1;  // share of the step by which an exchange exceeds its floor where few sweeps are best
                                   // made at low q
constexpr double WORTH_IT = 0.01;  // share of the step that an exchange must be above its floor for descent to be tried

// What sources send to the holders of one expert after another: local tokens stay, then sources meet holders of their
// own node in rank order, then all others do.
class Matching {
   public:
    Matching(const Problem& problem, const Holders& holders, const Exact& exact, Workspace& room)
        : problem_(problem),
          holders_(holders),
          exact_(exact),
          columns_(room.ints(TOGETHER, problem.ranks())),
          want_(room.ints(problem.ranks())) {}

    // Tokens of expert j by rank; they may be written, for one use.
    Ints routed(Int j) {
        if (j < first_ || j >= first_ + TOGETHER) {
            first_ = j;
            Int many = std::min(TOGETHER, holders_.experts() - j);
            gather_columns(problem_.load_RE, holders_.expert_M.part(j, many), columns_);
        }
        return columns_[j - first_];
    }

    // Calls `sink(arc, source, tokens)`, where tokens may be 0; without `far` only for what stays in its node.
    template <typename Sink>
    void run(Int j, bool far, Sink sink) {
        ConstInts rank_K = holders_.of(j), node_first = problem_.node_first;
        Int begin = holders_.start[j];
        Ints left = routed(j);
        for (Int k = 0; k < rank_K.size; k++) {
            Int local = exact_.local(begin + k);
            left[rank_K[k]] -= local;
            want_[k] = exact_.tokens_A[begin + k] - local;
            sink(begin + k, rank_K[k], local);
        }
        // The ranks r .. last_r - 1 fill the holders k .. last_k - 1, one after the other.
        const auto meet = [&](Int r, Int last_r, Int k, Int last_k) {
            for (; k < last_k; k++) {
                Int want = want_[k];
                for (; want > 0 && r < last_r; r++) {
                    Int part = left[r];
                    if (part > want) break;
                    left[r] = 0;
                    want -= part;
                    sink(begin + k, r, part);
                }
                want_[k] = r < last_r ? 0 : want;
                if (want == 0 || r == last_r) continue;
                left[r] -= want;
                sink(begin + k, r, want);
            }
        };
        for (Int k = 0, next = 0; k < rank_K.size; k = next) {
            Int node = problem_.node_R[rank_K[k]];
            while (next < rank_K.size && problem_.node_R[rank_K[next]] == node) next++;
            meet(node_first[node], node_first[node + 1], k, next);
        }
        if (far) meet(0, problem_.ranks(), 0, rank_K.size);
    }

   private:
    static constexpr Int TOGETHER = 64;  // columns gathered at once: one alone reads a cache line for every token
    const Problem& problem_;
    const Holders& holders_;
    const Exact& exact_;
    IntGrid columns_;
    Ints want_;
    Int first_ = -TOGETHER;
};

// Changes what is busy from all tokens at home to the exact split, for every expert j that `counts(j)` names.
template <typename Counts>
void count_exact(const Problem& problem, const Holders& holders, const Exact& exact, FloatGrid busy, Workspace& room,
                 Counts counts) {
    Scope scope(room);
    const bool one_node = problem.nodes() == 1;
    IntGrid more = room.ints(RESOURCES, problem.ranks());
    Matching matching(problem, holders, exact, room);
    more.flat().fill(0);
    for (Int j = 0; j < holders.experts(); j++) {
        if (!counts(j)) continue;
        Int home = problem.home_E[holders.expert_M[j]], node = problem.node_R[home];
        more[PRODUCTS][home] -= problem.total_E[holders.expert_M[j]];
        for (Int k = holders.start[j]; k < holders.start[j + 1]; k++) {
            Int d = holders.rank_A[k];
            more[PRODUCTS][d] += exact.tokens_A[k];
            more[OUT_FAR][d] -= exact.local(k) - (d == home ? exact.have_A[k] : 0);
        }
        if (one_node) continue;
        Ints routed = matching.routed(j);
        for (Int r = problem.node_first[node]; r < problem.node_first[node + 1]; r++) {
            if (r == home) continue;
            more[OUT_NEAR][r] -= routed[r];
            more[IN_NEAR][home] -= routed[r];
        }
        matching.run(j, false, [&](Int k, Int source, Int n) {
            if (source == holders.rank_A[k]) return;
            more[OUT_NEAR][source] += n;
            more[IN_NEAR][holders.rank_A[k]] += n;
        });
    }
    for (Int r = 0; r < problem.ranks(); r++) more[IN_FAR][r] = more[PRODUCTS][r] + more[OUT_FAR][r];
    part_levels(more, one_node);
    for (Int i = 0; i < more.flat().size; i++) busy.data[i] += static_cast<double>(more.data[i]);
}

// Write the exact split to the tokens of all arcs.
void fill(const Problem& problem, const Holders& holders, const BestSplit& split, Workspace& room) {
    Scope scope(room);
    IntGrid tokens_AR = split.flow.tokens_AR;
    tokens_AR.flat().fill(0);
    Matching matching(problem, holders, split.exact, room);
    for (Int j = 0; j < holders.experts(); j++) {
        matching.run(j, true, [&](Int k, Int r, Int n) { tokens_AR[split.arc_A[k]][r] += n; });
    }
}

// Descend from the exact split, for as long as that is worth of what it could save at most; keep what is better.
void descend(const Problem& problem, const Holders& holders, BestSplit& split, double effort, Workspace& room) {
    const Cost& cost = split.cost;
    Flow& flow = split.flow;
    if (cost.a2a <= WORTH_IT * cost.total) return;
    double above_s = cost.a2a - a2a_floor(flow);
    if (above_s <= WORTH_IT * cost.total) return;
    Int sweeps = affordable(effort * above_s, flow.experts() * flow.ranks());
    if (sweeps == 0) return;
    Floats busy = room.floats(flow.busy.flat().size);
    busy.copy_from(flow.busy.flat());
    fill(problem, holders, split, room);
    shorten(flow, sweeps, above_s > FAR_ABOVE * cost.total, room);
    Cost found = cost_of(flow, room);
    if (found.total < cost.total) {
        split.cost = found;
        split.by_arcs = true;
    } else {
        flow.busy.flat().copy_from(busy);
    }
}

}  // namespace

BestSplit best_split(const Problem& problem, const Holders& holders, double effort, bool quick, Workspace& room) {
    BestSplit split{make_flow(problem, holders.expert_M, holders.replicas(), room), exact_split(problem, holders, room),
                    room.ints(holders.arcs()), Cost{}, false};
    Flow& flow = split.flow;
    const Exact& exact = split.exact;
    Ints groups_R = room.ints(problem.ranks());  // experts with tokens
    groups_R.copy_from(problem.home_groups);
    for (Int j = 0; j < holders.experts(); j++) {
        Int home = flow.rank_A[j];
        groups_R[home] -= problem.total_E[holders.expert_M[j]] > 0;
        for (Int k = holders.start[j]; k < holders.start[j + 1]; k++) {
            Int d = holders.rank_A[k];
            groups_R[d] += exact.tokens_A[k] > 0;
            split.arc_A[k] = d == home ? j : link(flow, j, d);
        }
        count_copies(flow, home, holders.of(j), 1.0);
    }
    count_busiest(flow);
    const Cost at_home = cost_of(flow, problem.home_groups);
    count_exact(problem, holders, exact, flow.busy, room, [](Int) { return true; });
    split.cost = cost_of(flow, groups_R);
    if (!quick && effort > 0.0) descend(problem, holders, split, effort, room);
    if (effort > 0.0 && at_home.total < split.cost.total) {  // planned for other routing, replicas can be in the way
        split.cost = at_home;
        split.flow = make_flow(problem, holders.expert_M, 0, room);
        split.by_arcs = true;
        if (!quick) fill_homes(split.flow);
    }
    return split;
}

Int most_rows(const BestSplit& split) {
    const Flow& flow = split.flow;
    if (!split.by_arcs) {  // every row uses up a source or a holder, but for the local ones
        return flow.experts() * flow.ranks() + 2 * split.arc_A.size + 1;
    }
    Int used = 1;
    for (Int n : flow.tokens_AR.flat().part(0, flow.arcs * flow.ranks())) used += n > 0;
    return used;
}

Int write_rows(const Problem& problem, const Holders& holders, const BestSplit& split, Span<Row> rows,
               Workspace& room) {
    Scope scope(room);
    const Flow& flow = split.flow;
    Int used = 0;
    const auto write = [&](Int source, Int expert, Int rank, Int tokens) {
        rows[used] = {source, expert, rank, tokens};
        used += tokens > 0;
    };
    if (split.by_arcs) {
        for (Int a = 0; a < flow.arcs; a++) {
            Ints tokens_R = flow.tokens_AR[a];
            Int expert = flow.chosen_J[flow.expert_A[a]];
            for (Int r = 0; r < tokens_R.size; r++) write(r, expert, flow.rank_A[a], tokens_R[r]);
        }
        return used;
    }
    Matching matching(problem, holders, split.exact, room);
    for (Int j = 0; j < holders.experts(); j++) {
        Int expert = holders.expert_M[j];
        matching.run(j, true, [&](Int k, Int r, Int n) { write(r, expert, holders.rank_A[k], n); });
    }
    return used;
}

void write_tokens(const Problem& problem, ConstInts shared_M, Span<Row> rows, IntGrid tokens, Workspace& room) {
    Int experts = problem.experts();
    Span<bool> is_shared = room.array<bool>(experts);
    is_shared.fill(false);
    for (Int e : shared_M) is_shared[e] = true;
    tokens.flat().fill(0);
    for (Int r = 0; r < problem.ranks(); r++) {
        for (Int e = 0; e < experts; e++) {
            if (!is_shared[e]) tokens[r * experts + e][problem.home_E[e]] = problem.load_RE[r][e];
        }
    }
    for (const Row& row : rows) tokens[row.source * experts + row.expert][row.rank] += row.tokens;
}

double step_seconds(const Problem& problem, ConstBoolGrid holds_ER, double effort, bool quick, Workspace& room) {
    Scope scope(room);
    return best_split(problem, index_holders(holds_ER, room), effort, quick, room).cost.total;
}

void place_others(Flow& flow, const Holders& holders, Span<bool> takes_part, Workspace& room) {
    Scope scope(room);
    const Problem& problem = *flow.problem;
    Exact exact = exact_split(problem, holders, room);
    const auto is_other = [&](Int j) { return !takes_part[holders.expert_M[j]]; };
    count_exact(problem, holders, exact, flow.busy, room, is_other);
    for (Int j = 0; j < holders.experts(); j++) {
        if (!is_other(j)) continue;
        Int home = problem.home_E[holders.expert_M[j]];
        for (Int d : holders.of(j)) count_expert(flow, d, d == home ? 0.0 : 1.0);
        count_copies(flow, home, holders.of(j), 1.0);
    }
}

}  // namespace prophet
