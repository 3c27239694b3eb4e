// A placement for a predicted load: the first plan, and what follows from the placement in force.
#pragma once

#include "split.h"

namespace prophet {

// Brings loads down to the even level: the most overloaded rank gives its heaviest expert to one rank that can take all
// of its excess (nearest first, then most local tokens), or else to the roomiest one. Linear in ranks for every
// replica. `found` has none before.
void level_loads(const Problem& problem, Placement& found, Workspace& room);

// Adds copies of the experts with most tokens per holder, `per_rank` on every rank with slots, each on the rank that
// then computes least: what an exact split can turn to when routing drifts.
void add_spares(const Problem& problem, Int per_rank, Placement& found, Workspace& room);

// A flow of some experts that grows, and room to work in. The tokens of all others stay where the exact split has them.
struct Growth {
    Growth(const Problem& problem, const Placement& from, ConstInts chosen_J, Workspace& room);

    Flow flow;
    Int first_rank, last_rank;  // those of first_rank .. last_rank - 1 get new replicas
    Ints free_R;

    Int replicas() const { return flow.arcs - flow.experts(); }
    // Gives an expert a replica, and lets its tokens settle.
    void add(Int j, Int rank, Int q);
    void remove(Int arc);
    // Lets all tokens settle for a few sweeps.
    void settle_all();
    // Adds replicas while slots last, until `PATIENCE` of them bring nothing; those are taken away again.
    void grow(Int q);
    // Gives every rank all experts that it routes tokens to, so that none is sent; returns whether slots suffice. No
    // price sees an exchange's latency, which ends with its last token.
    bool close(Int q);
    // Writes the replicas of the experts that take part.
    void write(Placement& to) const;

   private:
    struct Choice {
        Int expert = -1, rank = -1;
        double value = 0.0;
    };
    void count_anew();
    void promise_all();
    void gains_of(Int expert);
    // Changes `best` to a replica of this expert where one is worth more.
    void best_of(Int expert, const Seconds& now, Choice& best);
    Choice most_valuable(const Seconds& now);

    FloatGrid others_sent, others_received;  // copies of other experts
    Floats promise_J;
    Floats gain_R, near_R, far_R;
};

// Writes the holders. `previous_ER` are those in force, of no rows where there are none. `effort` is the share of the
// step that tries may take in the mean.
void plan(const Problem& problem, ConstInts limit_R, ConstBoolGrid previous_ER, double effort, double split_effort,
          Grid<bool> holds_ER, Workspace& room);

}  // namespace prophet
