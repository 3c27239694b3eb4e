// A placement for a predicted load: the first plan, and what follows from the placement in force.
#pragma once

#include "tries.h"

namespace prophet {

struct Options {
    double keep_margin;   // what is in force is kept while its step is within this fraction of a new plan's
    double gain_margin;   // replicas are used where they save at least this fraction of the step
    double spare;         // copies per rank that a first plan has beside those that level products
    double spare_margin;  // share of the step that they may cost
    double effort;        // share of the step that tries may take in the mean
    double least_s;       // seconds that they may take however short the step
    double split_effort;

    static constexpr Int COUNT = 7;
    static Options from(ConstFloats array) {
        return {array[0], array[1], array[2], array[3], array[4], array[5], array[6]};
    }
};

// Writes the holders. `previous_ER` are those in force, of no rows where there are none.
void plan(const Problem& problem, ConstInts limit_R, ConstBoolGrid previous_ER, const Options& options,
          Grid<bool> holds_ER, Workspace& room);

}  // namespace prophet
