// Tokens on their way: over which holder every rank's tokens of every expert go, and how busy that makes the machine.
//
// Shape legend: R ranks, J experts that take part, A arcs (one per expert and holder).
#pragma once

#include "holders.h"
#include "problem.h"

namespace prophet {

// Resources of a rank: its products; what it sends and receives within its node; the same between nodes.
enum Resource : Int { PRODUCTS, OUT_NEAR, IN_NEAR, OUT_FAR, IN_FAR, RESOURCES };

// What the norms of `descent.h` are measured in, and what a second of them is worth: products, then exchanges.
struct Scale {
    double reference_s[2];
    double weight[2];
};

// The arcs of expert j are a linked list that begins with its home, arc j, and ends with -1.
struct Flow {
    ConstInts node_R;
    FloatGrid rate;   // [RESOURCES, R] seconds per token
    FloatGrid base;   // [RESOURCES, R] seconds in any case: latency, fixed costs of experts
    FloatGrid busy;   // [RESOURCES, R] tokens, whole numbers
    FloatGrid price;  // [RESOURCES, R]
    FloatGrid work;   // [RESOURCES, R] powers that `norms` leaves for `set_prices`
    Scale scale;
    Ints next_A;
    Ints rank_A;
    Ints expert_A;
    IntGrid tokens_AR;
    Int arcs;  // in use; the arrays may have room for more
    Int experts;
    Ints scratch;  // [R + 1]

    Int ranks() const { return node_R.size; }
    bool replicated(Int j) const { return next_A[j] >= 0; }
};

// A flow over the experts `chosen_J` whose tokens are still to be written; what is busy counts all of them at home.
// There is room for `spare_arcs` replicas.
Flow make_frame(const Problem& problem, ConstInts chosen_J, Int spare_arcs, Workspace& room);

// Write the tokens of all arcs: those of an expert are at its home.
void fill_homes(Flow& flow, const Problem& problem, ConstInts chosen_J);

// `make_frame` and `fill_homes`.
Flow make_flow(const Problem& problem, ConstInts chosen_J, Int spare_arcs, Workspace& room);

// Give expert j a further holder; returns its arc. `link` leaves its tokens to be written, `attach` writes none.
Int link(Flow& flow, Int j, Int rank, double overhead_s);
Int attach(Flow& flow, Int j, Int rank, double overhead_s);

// Take the replica of arc `a` away: its tokens go to the holder that is cheapest for them at the present prices. The
// last arc moves into its place.
void detach(Flow& flow, Int a, double overhead_s);

// Tokens of `source` go to `taker` instead of `giver`: the exchanges in `busy`, the products not.
inline void redirect(const Flow& flow, Int source, Int giver, Int taker, double tokens) {
    constexpr Int NOWHERE = -1;
    const auto way = [&](Int rank) {
        if (rank == source) return NOWHERE;
        return flow.node_R[rank] == flow.node_R[source] ? Int{OUT_NEAR} : Int{OUT_FAR};
    };
    Int back = way(giver), to = way(taker);
    if (back != NOWHERE) flow.busy[back + 1][giver] -= tokens;
    if (to != NOWHERE) flow.busy[to + 1][taker] += tokens;
    if (back == to) return;  // what the source sends does not change
    if (back != NOWHERE) flow.busy[back][source] -= tokens;
    if (to != NOWHERE) flow.busy[to][source] += tokens;
}

// Count all tokens at home in `busy`; returns the bottleneck.
double send_home(Flow& flow, const Problem& problem);

}  // namespace prophet
