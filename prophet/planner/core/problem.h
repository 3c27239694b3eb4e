// What stays fixed during one search: the load, the machine, and what holds when all tokens go home.
//
// Shape legend: R ranks, E experts.
#pragma once

#include "views.h"
#include "workspace.h"

namespace prophet {

// One level of the network.
struct Link {
    double bytes_per_s;
    double latency_s;
};

// The machine and the layer. Python passes them as one float array, in the order of `prophet.planner.model.machine`.
struct Figures {
    double token_bytes;
    Link intra;
    Link inter;
    double param_bytes;
    double grad_bytes;
    double sum_bytes;             // of a sum of gradients, which goes home
    double fnec_s;
    double bnec_s;
    double overhead_s;            // of every expert that a rank computes
    double overlap_cost;          // share of a hidden transfer that lengthens the step all the same
    double windows_have_experts;  // 1, or 0 where no experts compute in the windows
    double port_share;            // seconds of a byte at its node's port over those at its rank's link; 0 without ports

    static constexpr Int COUNT = 14;
    static Figures from(ConstFloats array) {
        return {array[0],  {array[1], array[2]}, {array[3], array[4]}, array[5], array[6], array[7], array[8], array[9],
                array[10], array[11], 1.0 - array[12], array[13]};
    }
    bool has_ports() const { return port_share > 0.0; }
};

// Resources of a rank: its products; what it sends and receives within its node; the same between nodes.
enum Resource : Int { PRODUCTS, OUT_NEAR, IN_NEAR, OUT_FAR, IN_FAR, RESOURCES };
// Resources of a node, where it has a port; a port's index stands in for a rank's.
enum PortResource : Int { OUT_PORT = RESOURCES, IN_PORT, WITH_PORTS };

// A load and the machine that computes it.
struct Given {
    ConstIntGrid load_RE;
    ConstInts home_E;
    ConstInts node_R;
    ConstFloats speed_R;
    ConstFloats seconds_per_token_R;
    Figures figures;

    Int ranks() const { return load_RE.rows; }
    Int experts() const { return load_RE.columns; }
    Int nodes() const { return node_R[ranks() - 1] + 1; }
};

// The same with what follows from it, taken from `room`. Refuses a negative load.
struct Problem : Given {
    Problem(const Given& given, Workspace& room, bool counts_spread = true);

    bool counts_spread;  // whether transfers may take the spread form
    Ints total_E;
    IntGrid home_busy;  // [RESOURCES, R] tokens
    Ints home_groups;   // [R] experts with tokens
    Ints node_first;    // [nodes + 1] the first rank of every node
};

// Takes what is sent and received near from what is sent and received at all, which is counted as far. In one node all
// is near, and need not have been counted.
void part_levels(IntGrid busy, bool one_node);

// Columns of a load: into[i][r] = load_RE[r][experts[i]].
void gather_columns(ConstIntGrid load_RE, ConstInts experts, IntGrid into);

}  // namespace prophet
