// What a step costs: tokens on their way over holders, how busy that makes the machine, and the prices of its
// resources.
//
// All arithmetic of cost in the core is here: the twin of `prophet.planner.model.cost.step_cost`, and what a change is
// worth. Split, search and first plan ask for it.
//
// A step ends when its busiest resources do. The largest of many is replaced by their q-norm, whose derivative is a
// price for every resource: next to nothing where there is room, high where the step waits. A token of rank r computed
// on rank d pays for d's products, and for r's sending and d's receiving unless r is d. With growing q the norm becomes
// the maximum itself. q is a power of two, so that only products and square roots are needed, which round alike on
// every machine.
//
// Shape legend: R ranks, J experts that take part, A arcs (one per expert and holder).
#pragma once

#include <algorithm>

#include "problem.h"

namespace prophet {

// Dispatch and combine, forward and backward.
inline constexpr double A2A_PER_STEP = 4.0;
// The backward product of an expert takes twice its forward product (Pro-Prophet, Eq. 3).
inline constexpr double FORWARD_AND_BACKWARD = 3.0;

inline constexpr Int NOWHERE = -1;

// Copies that a rank moves for Trans, or for Agg, which mirrors it: direct, scatter, gather, each within and between
// nodes. In two phases all replicas of an expert are a group, whose parts are scattered and gathered. In the node-once
// form those of every node are, where an expert gains by it; it is counted where nodes have several ranks. In the spread
// form the ranks of the home's node scatter, where an expert gains by that. The home first spreads parts over them. It
// is counted where one rank does not fill its node's port.
enum Copies : Int {
    DIRECT_NEAR,
    DIRECT_FAR,
    SCATTER_NEAR,
    SCATTER_FAR,
    GATHER_NEAR,
    GATHER_FAR,
    COPIES,
    ONCE_SCATTER_NEAR = COPIES,
    ONCE_SCATTER_FAR,
    ONCE_GATHER_NEAR,
    ONCE_GATHER_FAR,
    COPIES_WITH_ONCE,
    RELAYED_SCATTER_NEAR = COPIES_WITH_ONCE,
    RELAYED_SCATTER_FAR,
    RELAYED_GATHER_NEAR,
    RELAYED_GATHER_FAR,
    SPREAD_NEAR,
    SPREAD_FAR,  // none
    COPIES_WITH_SPREAD
};
struct Busiest {
    double units[COPIES_WITH_SPREAD];
    bool once;    // whether the node-once form is counted
    bool spread;  // whether the spread form is, and an expert gains by it
};

// Seconds.
struct Cost {
    double total;
    double a2a;
    double expert;
    double exposed_trans;
    double exposed_agg;
};

// Seconds of a step with its busiest resources, and with their q-norms; products and exposed transfers alone.
struct Seconds {
    double step;
    double smooth;
    double forward;
    double exposed;
};

inline Int group_of(Int resource) { return resource == PRODUCTS ? 0 : 1; }

// `value` to the power q, a power of two.
inline double power(double value, Int q) {
    for (; q > 1; q >>= 1) value *= value;
    return value;
}

// The units of the q-norms, and the weight of a second of each: products, then exchanges.
struct Scale {
    double reference_s[2];
    double weight[2];
};

// The arcs of expert j are a linked list that begins with its home, arc j, and ends with -1.
//
// Grids by resource have K rows: `RESOURCES`, or `WITH_PORTS` where nodes have ports. A port's row has a column per node
// and further ones that count nothing.
struct Flow {
    const Problem* problem;
    ConstInts chosen_J;  // the experts that take part; the others' tokens are at home
    ConstInts node_R;
    FloatGrid rate;            // [K, R] seconds per token
    FloatGrid base;            // [K, R] seconds in any case: latency, fixed costs of experts
    FloatGrid busy;            // [K, R] tokens, whole numbers; `count_ports` sums up those of ports
    FloatGrid price;           // [K, R] what one more token adds to the step
    FloatGrid work;            // [K, R] the powers that the norms are made of
    Floats far_out, far_in;    // [R] the price of OUT_FAR and IN_FAR with that of the node's port; without ports the same
    FloatGrid sent, received;  // [COPIES, COPIES_WITH_ONCE or COPIES_WITH_SPREAD, R]
    FloatGrid port_sent, port_received;  // the same [.., nodes], where nodes have ports
    Busiest busiest;           // of all ranks
    Scale scale;
    Ints next_A, rank_A, expert_A;
    IntGrid tokens_AR;
    Int arcs;      // in use; the arrays may have room for more
    Ints in_node;  // [R] zeros, for one use: replicas of an expert by node
    Ints listed;   // [R] for one use

    Int ranks() const { return node_R.size; }
    Int experts() const { return chosen_J.size; }
    bool ports() const { return busy.rows > RESOURCES; }
    bool counts_once() const { return sent.rows > COPIES; }
    bool counts_spread() const { return sent.rows > COPIES_WITH_ONCE; }
    bool replicated(Int j) const { return next_A[j] >= 0; }
    Int level(Int from, Int to) const { return node_R[from] == node_R[to] ? Int{OUT_NEAR} : Int{OUT_FAR}; }
    // The resource of `rank` that sends to the holder; NOWHERE for what stays on the rank.
    Int out_resource(Int rank, Int holder) const { return rank == holder ? NOWHERE : level(rank, holder); }
    // Whether expert j is on this rank.
    bool has(Int j, Int rank) const;
};

// A flow without replicas, with room for `spare_arcs`. What is busy counts all tokens at home; those of the arcs are
// still to be written, by `fill_homes`. Without `once` transfers take the direct or the two-phase form.
Flow make_flow(const Problem& problem, ConstInts chosen_J, Int spare_arcs, Workspace& room, bool once = true);
void fill_homes(Flow& flow);

// A rank computes one expert more, or less where `sign` is negative.
void count_expert(const Flow& flow, Int rank, double sign);

// Give expert j a further holder; returns its arc, whose tokens are still to be written.
Int link(Flow& flow, Int j, Int rank);

// Take the replica of arc `a` away: its tokens go to the holder that is cheapest for them at the present prices. The
// last arc moves into its place.
void detach(Flow& flow, Int a);

// The resources that a move of tokens of `source` changes: 0..2 of the giver's side, 3..5 of the taker's, or NOWHERE;
// 6 and 7 are ports of the giver's side, 8 and 9 of the taker's.
template <bool PORTS>
struct Touched {
    Int kind[PORTS ? 10 : 6];
    Int rank[PORTS ? 10 : 6];
};
template <bool PORTS>
inline Touched<PORTS> touched(const Flow& flow, Int source, Int giver, Int taker) {
    Int back = flow.out_resource(source, giver), to = flow.out_resource(source, taker);
    Touched<PORTS> t{{PRODUCTS, back, back < 0 ? NOWHERE : back + 1, PRODUCTS, to, to < 0 ? NOWHERE : to + 1},
              {giver, source, giver, taker, source, taker}};
    if constexpr (PORTS) {
        const Int from = flow.node_R[source], given = flow.node_R[giver], taken = flow.node_R[taker];
        for (Int i = 6; i < 10; i++) t.kind[i] = NOWHERE;
        const auto at = [&](Int i, Int kind, Int node) {
            t.kind[i] = kind;
            t.rank[i] = node;
        };
        if (back == OUT_FAR && to != OUT_FAR) at(6, OUT_PORT, from);
        if (to == OUT_FAR && back != OUT_FAR) at(8, OUT_PORT, from);
        if (back == OUT_FAR && !(to == OUT_FAR && given == taken)) at(7, IN_PORT, given);
        if (to == OUT_FAR && !(back == OUT_FAR && given == taken)) at(9, IN_PORT, taken);
    }
    if (back == to) t.kind[1] = t.kind[4] = NOWHERE;  // what the source sends does not change
    return t;
}

// Calls `use(sign, kind, rank)` for each of them; the giver's side has the negative sign.
template <bool PORTS, typename Use>
inline void each(const Touched<PORTS>& t, Use use) {
    for (Int i = 0; i < 6; i++) {
        if (t.kind[i] != NOWHERE) use(i < 3 ? -1 : 1, t.kind[i], t.rank[i]);
    }
    if constexpr (PORTS) {
        for (Int i = 6; i < 10; i++) {
            if (t.kind[i] != NOWHERE) use(i < 8 ? -1 : 1, t.kind[i], t.rank[i]);
        }
    }
}

// Tokens of `source` go to `taker` instead of `giver`, in what is busy.
inline void redirect(const Flow& flow, Int source, Int giver, Int taker, Int tokens) {
    const auto count = [&](Int sign, Int k, Int r) { flow.busy[k][r] += static_cast<double>(sign * tokens); };
    if (flow.ports()) {
        each<true>(touched<true>(flow, source, giver, taker), count);
    } else {
        each<false>(touched<false>(flow, source, giver, taker), count);
    }
}

// Sums up what the ranks of every node send to other nodes, and receive.
void count_ports(const Flow& flow);
// Sets what tokens of a node's ranks pay on their way out, and in, from the prices of links and port.
void price_port(const Flow& flow, Int node);

// Add `sign` times what Trans moves from a home to the replicas on these ranks, which may include the home; or to those
// of expert j. `count_busiest` follows once all are counted.
void count_copies(Flow& flow, Int home, ConstInts ranks, double sign);
void count_copies(Flow& flow, Int j, double sign);
void count_busiest(Flow& flow);

// The seconds of a step, which set all prices.
Seconds reprice(Flow& flow, Int q);

// What one more token of rank r pays on a holder.
inline double token_price(const Flow& flow, Int r, Int holder) {
    double own = flow.price[PRODUCTS][holder];
    if (holder == r) return own;
    if (flow.level(r, holder) == OUT_FAR) return own + (flow.far_out[r] + flow.far_in[holder]);
    return own + (flow.price[OUT_NEAR][r] + flow.price[IN_NEAR][holder]);
}

// The price of resource k of rank r once it has so many tokens.
inline double price_at(const Flow& flow, Int k, Int r, double tokens, Int q) {
    Int group = group_of(k);
    double c = flow.rate[k][r];
    return flow.scale.weight[group] * c * power((tokens * c + flow.base[k][r]) / flow.scale.reference_s[group], q);
}

// How fast that price rises, per token.
inline double bend_of(const Flow& flow, Int k, Int r, Int q) {
    double c = flow.rate[k][r];
    return static_cast<double>(q) * flow.price[k][r] * c / (std::max(flow.busy[k][r], 1.0) * c + flow.base[k][r]);
}

// Seconds of Trans and Agg that show with a further copy of expert j, beside products of so many seconds. `in_node` has
// its present replicas by node.
double exposed_with(const Flow& flow, Int j, Int rank, double forward_s);

// The cost of what is busy, where rank r computes groups_R[r] experts.
Cost cost_of(const Flow& flow, ConstInts groups_R);

// The same where the tokens of all arcs say what is computed.
Cost cost_of(const Flow& flow, Workspace& room);

// Seconds of a step's all-to-alls in which every token goes no farther than it must and all ranks send alike.
double a2a_floor(const Flow& flow);

// Seconds of products on ranks that all take equally long.
double even_products(const Problem& problem);

}  // namespace prophet
