// The cost of a step: the twin of `prophet.planner.model.cost.step_cost`, in parts.
#pragma once

#include "flow.h"
#include "problem.h"

namespace prophet {

inline constexpr double A2A_PER_STEP = 4.0;
inline constexpr double FORWARD_AND_BACKWARD = 3.0;

// Seconds.
struct Cost {
    double total;
    double a2a;
    double expert;
    double exposed_trans;
    double exposed_agg;
};

// Seconds of Trans and of Agg, or by how much they lengthen a step.
struct Transfers {
    double trans_s;
    double agg_s;
};

// Copies that the busiest rank moves: direct, scatter, gather, each within and between nodes.
enum Copies : Int { DIRECT_NEAR, DIRECT_FAR, SCATTER_NEAR, SCATTER_FAR, GATHER_NEAR, GATHER_FAR, COPIES };
struct Busiest {
    double units[COPIES];
};

// Copies that every rank sends and receives, both [COPIES, R].
struct CopiesMoved {
    FloatGrid sent;
    FloatGrid received;
};

// Seconds to move `units` pieces of `n_bytes` over a link; nothing to move takes no time.
double link_seconds(double units, double n_bytes, Link link);

// Seconds of an exchange whose busiest rank moves so many pieces over each level; levels work at once.
double exchange_seconds(double near_units, double far_units, double n_bytes, const Figures& figures);

// Seconds of Trans and Agg, each in its cheaper form.
Transfers transfer_seconds(const Busiest& busiest, const Figures& figures);

// By how much Trans and Agg lengthen a step beside so many seconds of products.
Transfers felt(Transfers moved, double forward_s, const Figures& figures);
Transfers exposed_seconds(const Busiest& busiest, double forward_s, const Figures& figures);

// Seconds of compute beside Trans and beside Agg.
Transfers windows(double forward_s, const Figures& figures);

// Seconds of Trans and Agg that one more second of forward products would hide.
double hiding(Transfers moved, double forward_s, const Figures& figures);

// Add `sign` times what Trans moves for expert j to `moved`.
void count_copies(const Flow& flow, Int j, const CopiesMoved& moved, double sign);
Busiest busiest_of(const CopiesMoved& moved);
CopiesMoved copies_moved(const Flow& flow, Workspace& room);

// The cost of what is counted in `flow.busy`, where rank r computes groups_R[r] experts.
Cost cost_of_busy(const Flow& flow, ConstInts groups_R, const Busiest& busiest, const Figures& figures);

// The cost of the tokens' present ways.
Cost cost_of(const Flow& flow, const Problem& problem, ConstInts chosen_J, const Busiest& busiest, Workspace& room);

// The cost without replicas.
Cost home_cost(const Problem& problem);

// Seconds of an exchange in which every token goes no farther than it must and all ranks send alike.
double exchange_floor(const Flow& flow, const Problem& problem, ConstInts chosen_J);

}  // namespace prophet
