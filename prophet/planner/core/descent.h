// Descent: tokens move from dear resources to cheap ones, which makes a step short.
//
// A step ends when its busiest resources do. The largest of many is replaced by their q-norm, whose derivative is a
// price for every resource: next to nothing where there is room, high where the step waits. A token of rank r computed
// on rank d pays for d's products, and for r's sending and d's receiving unless r is d. Each pair of a rank and an
// expert moves tokens from the holder that is dearest for it to the one that is cheapest, as many as level the two
// prices; with growing q the norm becomes the maximum itself. q is a power of two, so that only products and square
// roots are needed, which round alike on every machine.
#pragma once

#include "cost.h"
#include "flow.h"

namespace prophet {

inline constexpr double LEAST_S = 1e-30;  // seconds that stand for none where they divide
inline constexpr Int LEVELS = 9;          // of q, from 2 on

// Largest and q-norm seconds of the exchanges and of the products; q = 0 stands for the largest themselves.
struct Norms {
    double exchange_s;
    double exchange_q;
    double forward_s;
    double forward_q;
};

// Leaves in `flow.work` the powers that the norms are made of.
Norms norms(const Flow& flow, Int q);

// Prices of all resources: what one more token on them adds to the weighted norms, which are as `norms` has just left
// them for this q.
void set_prices(Flow& flow, Int q, double exchange_weight, double forward_weight, const Norms& norms);

// Let every rank move tokens of experts first .. last - 1, each from its dearest holder to its cheapest; returns the
// number of moves.
Int settle(Flow& flow, Int first, Int last, Int q);
inline Int settle_expert(Flow& flow, Int j, Int q) { return settle(flow, j, j + 1, q); }
inline Int sweep(Flow& flow, Int q) { return settle(flow, 0, flow.experts, q); }

// What a token pays on a holder that is its own rank (`here`), in its node (`near`) or elsewhere: `own` for the
// holder's products, `near_s` or `far_s` for the way there.
inline double token_price(bool here, bool near, double own, double near_s, double far_s) {
    if (here) return own;
    return own + (near ? near_s : far_s);
}

// Descend with growing q for at most `sweeps` sweeps; the best found stays in place. Fewer sweeps than levels are
// spread over them: from the first level on where there is `far` to go, because low q moves most, else up to the last.
void shorten(Flow& flow, const Figures& figures, const Busiest& busiest, Int sweeps, bool far, Workspace& room);

// How many sweeps over `pairs` of a rank and an expert fit into this share of what they could save at best.
Int affordable(double above_s, double effort, Int pairs);

}  // namespace prophet
