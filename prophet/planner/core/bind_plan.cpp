// Entries of the plan.
#include "arguments.h"
#include "checks.h"
#include "plan.h"

namespace prophet {

namespace {

void plan_entry(const IntArray2D& load_RE, const IntArray& home_E, const IntArray& node_R, const FloatArray& speed_R,
                const FloatArray& seconds_per_token_R, const FloatArray& figures, const IntArray& limit_R,
                const BoolArray2D& previous_ER, const FloatArray& options, const OutBools2D& out_holds_ER) {
    auto given = MachineArguments::checked(load_RE, home_E, node_R, speed_R, seconds_per_token_R, figures);
    require(limit_R.shape(0) == load_RE.shape(0), "limit_R must be [ranks]");
    for (Int limit : view(limit_R)) require(limit >= 0, "limit_R must not be negative");
    if (previous_ER.shape(0) != 0) check_holders(given, previous_ER);
    require(options.shape(0) == Options::COUNT, "options must be those of a plan");
    require(out_holds_ER.shape(0) == load_RE.shape(1) && out_holds_ER.shape(1) == load_RE.shape(0),
            "out_holds_ER must be [experts, ranks]");
    nb::gil_scoped_release unlocked;
    Workspace& room = thread_workspace();
    Scope scope(room);
    plan(given.problem(room), view(limit_R), view(previous_ER), Options::from(view(options)), view(out_holds_ER), room);
}

// The cost of a placement under the exact split, as plans are compared by.
nb::tuple exact_cost_entry(const IntArray2D& load_RE, const BoolArray2D& holds_ER, const IntArray& home_E,
                           const IntArray& node_R, const FloatArray& speed_R, const FloatArray& seconds_per_token_R,
                           const FloatArray& figures) {
    auto given = MachineArguments::checked(load_RE, home_E, node_R, speed_R, seconds_per_token_R, figures);
    check_holders(given, holds_ER);
    Workspace& room = thread_workspace();
    Scope scope(room);
    const Problem problem = given.problem(room);
    const Cost cost = best_split(problem, index_holders(view(holds_ER), room), 0.0, true, room).cost;
    return nb::make_tuple(cost.total, cost.a2a, cost.expert, cost.exposed_trans, cost.exposed_agg);
}

}  // namespace

void bind_plan(nb::module_& module) {
    module.def("exact_cost", exact_cost_entry, Arg("load_RE"), Arg("holds_ER"), Arg("home_E"), Arg("node_R"),
               Arg("speed_R"), Arg("seconds_per_token_R"), Arg("figures"));
    module.def("plan", plan_entry, Arg("load_RE"), Arg("home_E"), Arg("node_R"), Arg("speed_R"),
               Arg("seconds_per_token_R"), Arg("figures"), Arg("limit_R"), Arg("previous_ER"), Arg("options"),
               Arg("out_holds_ER"));
}

}  // namespace prophet
