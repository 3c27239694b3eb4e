#include "arguments.h"

namespace prophet {

Given checked(const IntArray2D& load_RE, const IntArray& home_E, const IntArray& node_R, const FloatArray& speed_R,
              const FloatArray& seconds_per_token_R, const FloatArray& figures) {
    require(figures.shape(0) == Figures::COUNT, "figures must have one entry per figure of a machine");
    Given given{view(load_RE),
                view(home_E),
                view(node_R),
                view(speed_R),
                view(seconds_per_token_R),
                Figures::from(view(figures))};
    Int ranks = given.ranks();
    require(given.node_R.size == ranks, "node_R must be [R], with load_RE [R, E]");
    require(given.home_E.size == given.experts(), "home_E must be [E], with load_RE [R, E]");
    require(given.speed_R.size == ranks, "speed_R must be [R], with load_RE [R, E]");
    require(given.seconds_per_token_R.size == ranks, "seconds_per_token_R must be [R], with load_RE [R, E]");
    require(ranks > 0 && given.node_R[0] == 0, "node_R must be [R] and begin with node 0");
    for (Int r = 1; r < ranks; r++) {
        Int step = given.node_R[r] - given.node_R[r - 1];
        require(step == 0 || step == 1, "node_R must number the nodes in rank order");
    }
    for (Int home : given.home_E) require(home >= 0 && home < ranks, "home_E must name ranks of 0 .. R - 1");
    for (double speed : given.speed_R) require(speed > 0.0, "speed_R must be positive");
    return given;
}

void check_holders(const BoolArray2D& holds_ER, const Given& given) {
    ConstBoolGrid holds = view(holds_ER);
    require(holds.rows == given.experts() && holds.columns == given.ranks(),
            "holds_ER must be [E, R], with load_RE [R, E]");
    for (Int e = 0; e < holds.rows; e++) require(holds[e][given.home_E[e]], "every home must hold its expert");
}

}  // namespace prophet
