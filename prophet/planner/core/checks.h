// What the arguments of several entries have in common, and the checks that keep every index inside its array.
#pragma once

#include "arguments.h"
#include "problem.h"

namespace prophet {

// A load and the ranks that compute it. `checked` raises ValueError in Python where sizes contradict one another or an
// index points outside.
struct GroupArguments {
    ConstIntGrid load_RE;
    ConstInts home_E;
    ConstInts node_R;
    ConstFloats speed_R;

    static GroupArguments checked(const IntArray2D& load_RE, const IntArray& home_E, const IntArray& node_R,
                                  const FloatArray& speed_R);
};

// The same and the machine.
struct MachineArguments : GroupArguments {
    ConstFloats seconds_per_token_R;
    ConstFloats figures;

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
void check_holders(const GroupArguments& given, const BoolArray2D& holds_ER);

void check_tokens(const GroupArguments& given, const OutInts3D& tokens_RED);

}  // namespace prophet
