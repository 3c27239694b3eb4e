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
    double fnec_s;
    double bnec_s;
    double overhead_s;            // of every expert that a rank computes
    double overlap_cost;          // share of a hidden transfer that is felt all the same
    double windows_have_experts;  // 1, or 0 where no experts compute in the windows

    static constexpr Int COUNT = 12;
    static Figures from(ConstFloats array);
};

// Tokens that ranks send and receive when all go home: the rows of `Problem::home_moved`.
enum Traffic : Int { SENT_NEAR, RECEIVED_NEAR, SENT_FAR, RECEIVED_FAR, TRAFFIC };

struct Problem {
    ConstIntGrid load_RE;
    ConstInts total_E;
    ConstInts home_E;
    ConstInts node_R;
    ConstFloats speed_R;
    ConstFloats seconds_per_token_R;
    Figures figures;
    ConstInts home_load;      // [R] tokens
    ConstInts home_groups;    // [R] experts with tokens
    ConstIntGrid home_moved;  // [TRAFFIC, R] tokens

    Int ranks() const { return node_R.size; }
    Int experts() const { return home_E.size; }
    Int nodes() const { return node_R[node_R.size - 1] + 1; }
};

// The arguments that every entry takes; the figures that follow from them are taken from `room`.
Problem make_problem(ConstIntGrid load_RE, ConstInts home_E, ConstInts node_R, ConstFloats speed_R,
                     ConstFloats seconds_per_token_R, ConstFloats figures, Workspace& room);

// Tokens of every expert.
void count_totals(ConstIntGrid load_RE, Ints total_E);

bool any_negative(ConstIntGrid load_RE);

}  // namespace prophet
