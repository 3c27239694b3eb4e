// Replicas that are worth most, one after the other.
//
// A replica is worth what its tokens save at present prices, to second order (prices meet where tokens move), less what
// it adds to the exposed transfers. Prices are smooth (a low q): the first replicas must relieve many ranks, not just
// the busiest.
#pragma once

#include "descent.h"
#include "replicas.h"
#include "split.h"

namespace prophet {

// A flow of some experts that grows, and room to work in. The tokens of all others stay where the exact split has them.
struct Growth {
    const Problem& problem;
    ConstInts chosen_J;         // the experts that grow
    Ints slots_R;               // for their replicas
    Int first_rank, last_rank;  // those of first_rank .. last_rank - 1 get new ones
    Flow flow;
    CopiesMoved moved, others;  // by all replicas; by those of other experts
    Busiest busiest;
    Floats promise_J;
    Floats gain_R, tokens_R, near_R, far_R;
    Span<bool> held_R;
    Ints free_R;
    Ints node_first;  // [nodes + 1] the first rank of every node
    double forward_s = 0.0;
    Transfers shown{};  // of the transfers, by the present replicas

    Growth(const Problem& problem, ConstInts limit_R, ConstInts chosen_J, const Replicas& replicas, Workspace& room);

    double overhead_s() const { return problem.figures.overhead_s; }
    Int replicas() const { return flow.arcs - flow.experts; }
    bool has(Int expert, Int rank) const;
    Int total(Int j) const { return problem.total_E[chosen_J[j]]; }

    // Seconds of the step, with q-norms for the largest exchange and product and with the largest themselves.
    struct Seconds {
        double smooth, step;
    };
    Seconds set_prices(Int q);
    void count_copies_anew();
    void count_free();

    // Adds replicas while slots last, until `PATIENCE` of them bring nothing; those are taken away again.
    void grow(Int q);

   private:
    void hold_others(const Replicas& replicas, ConstInts index_E, Workspace& room);
    struct Choice {
        Int expert = -1, rank = -1;
        double value = 0.0;
    };
    void promise_all();
    void gains_of(Int expert);
    // The best replica of an expert that is worth more than `least`; else none (-1).
    Choice best_of(Int expert, Int q, double least);
    Choice most_valuable(Int q);
    void prices_at_holders();
    Transfers transfers_with(Int expert, Int rank, Int copies, bool together) const;
};

}  // namespace prophet
