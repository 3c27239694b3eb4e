// The module `prophet.planner.core._core`: entries of the plan and the split. Its types are in _core.pyi.
#include "arguments.h"
#include "plan.h"
#include "split.h"

namespace prophet {

void bind_partition(nb::module_& module);

namespace {

void plan_entry(const IntArray2D& load_RE, const IntArray& home_E, const IntArray& node_R, const FloatArray& speed_R,
                const FloatArray& seconds_per_token_R, const FloatArray& figures, const IntArray& limit_R,
                const BoolArray2D& previous_ER, double effort, double split_effort, const OutBools2D& out_holds_ER) {
    Given given = checked(load_RE, home_E, node_R, speed_R, seconds_per_token_R, figures);
    require(limit_R.shape(0) == load_RE.shape(0), "limit_R must be [ranks]");
    for (Int limit : view(limit_R)) require(limit >= 0, "limit_R must not be negative");
    if (previous_ER.shape(0) != 0) check_holders(previous_ER, given);
    require(out_holds_ER.shape(0) == load_RE.shape(1) && out_holds_ER.shape(1) == load_RE.shape(0),
            "out_holds_ER must be [experts, ranks]");
    nb::gil_scoped_release unlocked;
    Workspace& room = thread_workspace();
    Scope scope(room);
    // Growth does not know the spread form. Tries would be compared by it and grow by others: some got stuck with few
    // copies, and steps were up to 46 % longer. So steps with a plan may be shorter than it says, never longer.
    const Problem problem(given, room, false);
    plan(problem, view(limit_R), view(previous_ER), effort, split_effort, view(out_holds_ER), room);
}

// Returns the split in sparse form, the lowest bottleneck, and the cost. Where `out_tokens_RED` has rows, it is written
// out there, too.
nb::tuple split_entry(const IntArray2D& load_RE, const BoolArray2D& holds_ER, const IntArray& home_E,
                      const IntArray& node_R, const FloatArray& speed_R, const FloatArray& seconds_per_token_R,
                      const FloatArray& figures, double effort, const OutInts3D& out_tokens_RED) {
    Given given = checked(load_RE, home_E, node_R, speed_R, seconds_per_token_R, figures);
    check_holders(holds_ER, given);
    Int ranks = given.ranks(), experts = given.experts();
    const auto is = [&](int axis, Int size) { return static_cast<Int>(out_tokens_RED.shape(axis)) == size; };
    require(is(0, 0) || (is(0, ranks) && is(1, experts) && is(2, ranks)),
            "out_tokens_RED must be [R, E, R], with load_RE [R, E], or have no rows");
    Workspace& room = thread_workspace();
    Scope scope(room);
    Holders holders;
    BestSplit split;
    Ints load_R = room.ints(ranks);
    static_assert(sizeof(Row) == 4 * sizeof(Int));
    std::unique_ptr<Row[]> rows;
    Int many = 0;
    {
        nb::gil_scoped_release unlocked;
        const Problem problem(given, room);
        holders = index_holders(view(holds_ER), room);
        split = best_split(problem, holders, effort, false, room);
        for (Int r = 0; r < ranks; r++) load_R[r] = static_cast<Int>(split.flow.busy[PRODUCTS][r]);
        Int most = most_rows(split);
        rows.reset(new Row[static_cast<std::size_t>(most)]);
        many = write_rows(problem, holders, split, {rows.get(), most}, room);
        Span<Row> written{rows.get(), many};
        IntGrid tokens{out_tokens_RED.data(), ranks * experts, ranks};
        if (!is(0, 0)) write_tokens(problem, holders.expert_M, written, tokens, room);
    }
    const Cost& cost = split.cost;
    return nb::make_tuple(new_array(holders.expert_M), new_array(std::move(rows), {static_cast<std::size_t>(many), 4}),
                          new_array(load_R), split.exact.bottleneck,
                          nb::make_tuple(cost.total, cost.a2a, cost.expert, cost.exposed_trans, cost.exposed_agg));
}

void raise_spec_error(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const Refused& refused) {
        nb::object error = nb::module_::import_("prophet.errors").attr("SpecError");
        PyErr_SetString(error.ptr(), refused.what());
    }
}

}  // namespace

NB_MODULE(_core, module) {
    nb::register_exception_translator(raise_spec_error);
    nb::set_leak_warnings(false);  // a program that ends while a thread plans is no leak
    module.attr("SOURCES") = PROPHET_SOURCES;
    module.def("held_bytes", [] { return thread_workspace().held_bytes(); });
    bind_partition(module);
    module.def("plan", plan_entry, Arg("load_RE"), Arg("home_E"), Arg("node_R"), Arg("speed_R"),
               Arg("seconds_per_token_R"), Arg("figures"), Arg("limit_R"), Arg("previous_ER"), nb::arg("effort"),
               nb::arg("split_effort"), Arg("out_holds_ER"));
    module.def("split", split_entry, Arg("load_RE"), Arg("holds_ER"), Arg("home_E"), Arg("node_R"), Arg("speed_R"),
               Arg("seconds_per_token_R"), Arg("figures"), nb::arg("effort"), Arg("out_tokens_RED"));
}

}  // namespace prophet
