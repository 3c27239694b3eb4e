#include "checks.h"

namespace prophet {

void check_homes(ConstInts home_E, Int ranks) {
    for (Int home : home_E) require(home >= 0 && home < ranks, "home_E must name ranks of 0 .. R - 1");
}

void check_nodes(ConstInts node_R) {
    require(node_R.size > 0 && node_R[0] == 0, "node_R must be [R] and begin with node 0");
    for (Int r = 1; r < node_R.size; r++) {
        Int step = node_R[r] - node_R[r - 1];
        require(step == 0 || step == 1, "node_R must number the nodes in rank order");
    }
}

GroupArguments GroupArguments::checked(const IntArray2D& load_RE, const IntArray& home_E, const IntArray& node_R,
                                       const FloatArray& speed_R) {
    GroupArguments given{view(load_RE), view(home_E), view(node_R), view(speed_R)};
    Int ranks = given.load_RE.rows;
    require(given.node_R.size == ranks, "node_R must be [R], with load_RE [R, E]");
    require(given.home_E.size == given.load_RE.columns, "home_E must be [E], with load_RE [R, E]");
    require(given.speed_R.size == ranks, "speed_R must be [R], with load_RE [R, E]");
    check_nodes(given.node_R);
    check_homes(given.home_E, ranks);
    for (double speed : given.speed_R) require(speed > 0.0, "speed_R must be positive");
    require(!any_negative(given.load_RE), "load must not be negative");
    return given;
}

MachineArguments MachineArguments::checked(const IntArray2D& load_RE, const IntArray& home_E, const IntArray& node_R,
                                           const FloatArray& speed_R, const FloatArray& seconds_per_token_R,
                                           const FloatArray& figures) {
    MachineArguments given{GroupArguments::checked(load_RE, home_E, node_R, speed_R), view(seconds_per_token_R),
                           view(figures)};
    require(given.seconds_per_token_R.size == given.node_R.size,
            "seconds_per_token_R must be [R], with load_RE [R, E]");
    require(given.figures.size == Figures::COUNT, "figures must have one entry per figure of a machine");
    return given;
}

void check_holders(const GroupArguments& given, const BoolArray2D& holds_ER) {
    ConstBoolGrid holds = view(holds_ER);
    require(holds.rows == given.home_E.size && holds.columns == given.node_R.size,
            "holds_ER must be [E, R], with load_RE [R, E]");
    for (Int e = 0; e < holds.rows; e++) require(holds[e][given.home_E[e]], "every home must hold its expert");
}

void check_tokens(const GroupArguments& given, const OutInts3D& tokens_RED) {
    auto is = [&](int axis, Int size) { return static_cast<Int>(tokens_RED.shape(axis)) == size; };
    require(is(0, given.load_RE.rows) && is(1, given.load_RE.columns) && is(2, given.load_RE.rows),
            "out_tokens_RED must be [R, E, R], with load_RE [R, E]");
}

}  // namespace prophet
