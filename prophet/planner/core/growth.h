// Replicas that are worth most, one after the other.
//
// A replica is worth what its tokens save at present prices, to second order (prices meet where tokens move), less what
// it adds to the exposed transfers. Prices are smooth (a low q): the first replicas must relieve many ranks, not just
// the busiest.
#pragma once

#include "descent.h"
#include "replicas.h"

namespace prophet {

constexpr Int BARRED = 3;  // replicas that growth can be told to leave out

// A flow that grows, and room to work in.
struct Growth {
    const Problem& problem;
    ConstInts limit_R;  // slots
    Flow flow;
    CopiesMoved moved;
    Busiest busiest;
    Floats promise_J;
    Floats gain_R, tokens_R, near_R, far_R;
    Span<bool> held_R;
    Ints free_R;
    Ints barred_expert, barred_rank;  // [BARRED]; -1: none
    Ints node_first;                  // [nodes + 1] the first rank of every node
    double forward_s = 0.0;
    Transfers shown{};  // of the transfers, by the present replicas

    Growth(const Problem& problem, ConstInts limit_R, Int most_replicas, Workspace& room);

    double overhead_s() const { return problem.figures.overhead_s; }
    Int replicas() const { return flow.arcs - flow.experts; }
    bool has(Int expert, Int rank) const;

    // Seconds of the step, with q-norms for the largest exchange and product and with the largest themselves.
    struct Seconds {
        double smooth, step;
    };
    Seconds set_prices(Int q);
    void count_copies_anew();
    void count_free();

    // Lets tokens settle after many replicas have changed.
    void settle_all(Int q);
    // Takes replicas away, the least missed first, while the step gets no longer.
    void shrink(Int q);
    // Adds replicas while slots last, until `PATIENCE` of them bring nothing; those are taken away again.
    void grow(Int q);
    // The replica, on `rank` or anywhere (-1), whose tokens would pay least to go elsewhere; -1: there is none.
    Int least_missed(Int rank) const;

   private:
    struct Choice {
        Int expert = -1, rank = -1;
    };
    void promise_all();
    void gains_of(Int expert);
    // The best replica of an expert, where it is worth more than `most`, which becomes its value; else none (-1).
    Choice best_of(Int expert, Int q, double& most);
    Choice most_valuable(Int q);
    void prices_at_holders();
    Transfers transfers_with(Int expert, Int rank, Int copies, bool together) const;
};

}  // namespace prophet
