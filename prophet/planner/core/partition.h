// Contiguous partitions of layers over pipeline stages: exact min-max under memory, speed and activation limits.
//
// Shape legend: L layers, P stages (stage k on rank k).
//
// Stage k that runs layers i .. j - 1 takes (units[j] - units[i]) / speed[k] + links[k] and needs (state[j] - state[i])
// + held[k] * (active[j] - active[i]) bytes; `units`, `state` and `active` are prefix sums [L + 1] of integers, so equal layers
// give exactly equal stage times and nothing depends on a tolerance.
//
// With unequal speeds, or with memory that shrinks towards the first stage, filling every stage as far as possible is
// not exact when no stage may be empty: a later stage may need a layer that the greedy start took away from a rank able
// to hold it. The probe therefore follows the set of reachable boundaries, stage by stage, in O(P L).
#pragma once

#include "views.h"
#include "workspace.h"

namespace prophet {

struct Pipeline {
    ConstInts units;
    ConstInts state;
    ConstInts active;
    ConstInts held;      // [P] microbatches whose activations a stage keeps
    ConstFloats speed;   // [P]
    ConstInts capacity;  // [P] bytes
    ConstFloats links;   // [P] units that a stage takes for messages besides

    Int stages() const { return speed.size; }
    Int layers() const { return units.size - 1; }
    double load(Int k, Int i, Int j) const {
        return static_cast<double>(units[j] - units[i]) / speed[k] + links[k];
    }
    bool fits(Int k, Int i, Int j) const {
        return (state[j] - state[i]) + held[k] * (active[j] - active[i]) <= capacity[k];
    }
};

inline constexpr double NO_PARTITION = -1.0;

// The least possible bottleneck in units, or NO_PARTITION.
double minimal_bottleneck(const Pipeline& pipeline, Workspace& room);

// Write boundaries [P + 1] with bottleneck at most `beta` that minimise an additive cost; returns whether there are
// any. The cost of stage k over layers i .. j - 1 is penalty[k][j] - penalty[k][i] plus `square_weight` times its
// squared time; `penalty` [P, L + 1] holds prefix sums. Ties go to the earlier boundary.
bool best_boundaries(double beta, const Pipeline& pipeline, double square_weight, ConstFloatGrid penalty,
                     Ints boundaries, Workspace& room);

}  // namespace prophet
