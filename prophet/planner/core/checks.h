// What the arguments of several entries have in common, and the checks that keep every index inside its array.
#pragma once

#include "arguments.h"
#include "problem.h"

namespace prophet {

struct MachineArguments {
    ConstIntGrid load_RE;
    ConstInts home_E;
    ConstInts node_R;
    ConstFloats speed_R;
    ConstFloats seconds_per_token_R;
    ConstFloats figures;

    // Raises ValueError in Python where sizes contradict one another or an index is none.
    static MachineArguments checked(const IntArray2D& load_RE, const IntArray& home_E, const IntArray& node_R,
                                    const FloatArray& speed_R, const FloatArray& seconds_per_token_R,
                                    const FloatArray& figures);

    Problem problem(Workspace& room) const {
        return make_problem(load_RE, home_E, node_R, speed_R, seconds_per_token_R, figures, room);
    }
};

void check_homes(ConstInts home_E, Int ranks);
void check_nodes(ConstInts node_R);

// `holds_ER` has to be for these experts and ranks, and every home has to hold its expert.
void check_holders(const MachineArguments& given, const BoolArray2D& holds_ER);

void check_tokens(const MachineArguments& given, const OutInts3D& tokens_RED);

}  // namespace prophet
