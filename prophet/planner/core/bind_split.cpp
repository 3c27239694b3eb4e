// Entries of the split.
#include <algorithm>

#include "arguments.h"
#include "checks.h"
#include "split.h"

namespace prophet {

namespace {

// Rows as a new array [F, 4].
nb::object new_rows(Span<const Row> rows) {
    static_assert(sizeof(Row) == 4 * sizeof(Int));
    const Int* data = reinterpret_cast<const Int*>(rows.data);
    return new_array<Int, nb::ndim<2>>(data, rows.size * 4, {static_cast<std::size_t>(rows.size), 4});
}

// Write a split densely: experts with one holder go home, the others by their rows.
void write_tokens(ConstIntGrid load_RE, ConstInts home_E, ConstInts shared, Span<const Row> rows, Ints tokens,
                  Workspace& room) {
    Scope scope(room);
    Int ranks = load_RE.rows, experts = load_RE.columns;
    Span<bool> is_shared = room.array<bool>(experts);
    is_shared.fill(false);
    for (Int e : shared) is_shared[e] = true;
    tokens.fill(0);
    for (Int r = 0; r < ranks; r++) {
        ConstInts load_E = load_RE[r];
        Ints to = tokens.part(r * experts * ranks, experts * ranks);
        for (Int e = 0; e < experts; e++) {
            if (!is_shared[e]) to[e * ranks + home_E[e]] = load_E[e];
        }
    }
    for (const Row& row : rows) tokens[(row.source * experts + row.expert) * ranks + row.rank] += row.tokens;
}

struct TimedSplit {
    Holders holders;
    BestSplit best;
    Span<Row> rows;
};

TimedSplit timed_split(const MachineArguments& given, ConstBoolGrid holds_ER, double effort, Workspace& room) {
    TimedSplit split;
    Problem problem = given.problem(room);
    split.holders = index_holders(holds_ER, room);
    split.best = best_split(problem, split.holders, effort, false, room);
    split.rows = rows_of(split.best, split.holders, room);
    return split;
}

nb::tuple split_rows(const IntArray2D& load_RE, const BoolArray2D& holds_ER, const IntArray& home_E,
                     const IntArray& node_R, const FloatArray& speed_R, const FloatArray& seconds_per_token_R,
                     const FloatArray& figures, double effort) {
    auto given = MachineArguments::checked(load_RE, home_E, node_R, speed_R, seconds_per_token_R, figures);
    check_holders(given, holds_ER);
    Workspace& room = thread_workspace();
    Scope scope(room);
    TimedSplit split;
    Ints load_R;
    {
        nb::gil_scoped_release unlocked;
        split = timed_split(given, view(holds_ER), effort, room);
        load_R = room.ints(given.node_R.size);
        for (Int r = 0; r < load_R.size; r++) load_R[r] = static_cast<Int>(split.best.flow.busy[PRODUCTS][r]);
    }
    const Cost& cost = split.best.cost;
    return nb::make_tuple(new_array(split.holders.expert_M), new_rows(split.rows), new_array(load_R),
                          split.best.bottleneck,
                          nb::make_tuple(cost.total, cost.a2a, cost.expert, cost.exposed_trans, cost.exposed_agg));
}

nb::tuple exact_rows(const IntArray2D& load_RE, const BoolArray2D& holds_ER, const IntArray& home_E,
                     const IntArray& node_R, const FloatArray& speed_R) {
    auto given = GroupArguments::checked(load_RE, home_E, node_R, speed_R);
    check_holders(given, holds_ER);
    Workspace& room = thread_workspace();
    Scope scope(room);
    Holders holders;
    Exact exact;
    Span<Row> rows;
    {
        nb::gil_scoped_release unlocked;
        holders = index_holders(view(holds_ER), room);
        exact = exact_split(given.load_RE, given.home_E, given.node_R, given.speed_R, holders, room);
        rows = exact_rows_of(exact.tokens_A, given.load_RE, holders, given.node_R, room);
    }
    return nb::make_tuple(new_array(holders.expert_M), new_rows(rows), new_array(exact.load_R), exact.bottleneck);
}

double split_tokens(const IntArray2D& load_RE, const BoolArray2D& holds_ER, const IntArray& home_E,
                    const IntArray& node_R, const FloatArray& speed_R, const FloatArray& seconds_per_token_R,
                    const FloatArray& figures, double effort, const OutInts3D& out_tokens_RED) {
    auto given = MachineArguments::checked(load_RE, home_E, node_R, speed_R, seconds_per_token_R, figures);
    check_holders(given, holds_ER);
    check_tokens(given, out_tokens_RED);
    nb::gil_scoped_release unlocked;
    Workspace& room = thread_workspace();
    Scope scope(room);
    TimedSplit split = timed_split(given, view(holds_ER), effort, room);
    Ints tokens{out_tokens_RED.data(), static_cast<Int>(out_tokens_RED.size())};
    write_tokens(given.load_RE, given.home_E, split.holders.expert_M, split.rows, tokens, room);
    return split.best.cost.total;
}

}  // namespace

void bind_split(nb::module_& module) {
    module.def("split_rows", split_rows, Arg("load_RE"), Arg("holds_ER"), Arg("home_E"), Arg("node_R"), Arg("speed_R"),
               Arg("seconds_per_token_R"), Arg("figures"), nb::arg("effort"));
    module.def("exact_rows", exact_rows, Arg("load_RE"), Arg("holds_ER"), Arg("home_E"), Arg("node_R"), Arg("speed_R"));
    module.def("split_tokens", split_tokens, Arg("load_RE"), Arg("holds_ER"), Arg("home_E"), Arg("node_R"),
               Arg("speed_R"), Arg("seconds_per_token_R"), Arg("figures"), nb::arg("effort"), Arg("out_tokens_RED"));
}

}  // namespace prophet
