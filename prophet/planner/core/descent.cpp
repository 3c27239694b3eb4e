// Descent: tokens move from dear resources to cheap ones, which makes a step short.
//
// Each pair of a rank and an expert moves tokens from the holder that is dearest for it to the one that is cheapest, as
// many as level the two prices; prices come from `cost.h`.
#include <limits>

#include "split.h"

namespace prophet {

namespace {

constexpr Int LEVELS = 9;                // of q, from 2 on
constexpr double LEVEL_PRICES = 0.01;    // a token does not move for less; at high q this is next to nothing in seconds
constexpr double LEVELLED = 1e-3;        // a level is left when a sweep lowers its norm by less
constexpr double SETTLE_S = 3e-8;        // assumed seconds to settle a rank and expert once; fixes what an effort buys
constexpr Int MOST_SWEEPS = 4 * LEVELS;  // further ones gain next to nothing
constexpr double INFINITE = std::numeric_limits<double>::infinity();

// The holders that are dearest for tokens of rank r there, and cheapest; no first one where no token has to move.
struct Pair {
    Int dear;
    Int cheap;
};

inline Pair dearest_and_cheapest(const Flow& flow, ConstInts arcs, Int r) {
    ConstFloats own = flow.price[PRODUCTS], in_near = flow.price[IN_NEAR], in_far = flow.far_in;
    double out_near = flow.price[OUT_NEAR][r], out_far = flow.far_out[r];
    Int node = flow.node_R[r], dear = -1, cheap = -1;
    double high = -1.0, low = INFINITE;
    for (Int a : arcs) {
        Int d = flow.rank_A[a];
        // `token_price`, without branches: which holder it is cannot be guessed
        double near_s = out_near + in_near[d], far_s = out_far + in_far[d];
        double p = d == r ? own[d] : own[d] + (flow.node_R[d] == node ? near_s : far_s);
        double paid = flow.tokens_AR[a][r] > 0 ? p : -1.0;
        dear = paid > high ? a : dear;
        high = std::max(high, paid);
        cheap = p < low ? a : cheap;
        low = std::min(low, p);
    }
    if (cheap < 0 || dear == cheap || high <= low * (1.0 + LEVEL_PRICES)) dear = -1;
    return {dear, cheap};
}

// As many of `most` tokens as level the prices; the prices may pass half of the gap the other way.
template <bool PORTS>
inline Int levelling_step(const Flow& flow, const Touched<PORTS>& t, Int most, Int q) {
    double bend = 0.0, side[2] = {0.0, 0.0};
    each<PORTS>(t, [&](Int sign, Int k, Int n) {
        bend += bend_of(flow, k, n, q);
        side[sign > 0] += flow.price[k][n];
    });
    double gap = side[0] - side[1];
    Int step = most;
    if (bend * static_cast<double>(step) > gap) step = std::max(Int{1}, static_cast<Int>(gap / bend));
    for (; step > 0; step >>= 1) {
        double above = 0.0;
        each<PORTS>(t, [&](Int sign, Int k, Int n) {
            double p = price_at(flow, k, n, flow.busy[k][n] + static_cast<double>(sign * step), q);
            above += sign > 0 ? p : -p;
        });
        if (above < 0.5 * gap) break;
    }
    return step;
}

template <bool PORTS>
inline bool settle_rank(const Flow& flow, ConstInts arcs, Int r, Int q) {
    auto [dear, cheap] = dearest_and_cheapest(flow, arcs, r);
    if (dear < 0) return false;
    Touched<PORTS> t = touched<PORTS>(flow, r, flow.rank_A[dear], flow.rank_A[cheap]);
    Int step = levelling_step<PORTS>(flow, t, flow.tokens_AR[dear][r], q);
    if (step == 0) return false;
    flow.tokens_AR[dear][r] -= step;
    flow.tokens_AR[cheap][r] += step;
    each<PORTS>(t, [&](Int sign, Int k, Int n) {
        flow.busy[k][n] += static_cast<double>(sign * step);
        flow.price[k][n] = price_at(flow, k, n, flow.busy[k][n], q);
    });
    if constexpr (PORTS) {
        for (Int rank : {r, flow.rank_A[dear], flow.rank_A[cheap]}) price_port(flow, flow.node_R[rank]);
    }
    return true;
}

// The best that a descent has seen.
struct Best {
    double step_s;
    Ints tokens;
    Floats busy;

    void keep(const Flow& flow, double seconds) {
        step_s = seconds;
        tokens.copy_from(flow.tokens_AR.flat().part(0, tokens.size));
        busy.copy_from(flow.busy.flat());
    }
};

// Descend at one q for at most `sweeps` sweeps.
void descend(Flow& flow, Int q, Int sweeps, Best& best) {
    if (sweeps <= 0) return;
    double smooth_s = INFINITE;
    reprice(flow, q);
    for (Int made = 1;; made++) {
        Int moves = sweep(flow, q);
        Seconds now = reprice(flow, q);
        if (now.step < best.step_s) best.keep(flow, now.step);
        if (made == sweeps || moves == 0 || now.smooth > smooth_s * (1.0 - LEVELLED)) return;
        smooth_s = now.smooth;
    }
}

template <bool PORTS>
Int settle_experts(const Flow& given, Int first, Int last, Int q) {
    const Flow flow = given;  // a copy, which the compiler can keep in registers while tokens are written
    Int moves = 0;
    for (Int j = first; j < last; j++) {
        if (!flow.replicated(j)) continue;
        Int holders = 0;
        for (Int a = j; a >= 0; a = flow.next_A[a]) flow.listed[holders++] = a;
        ConstInts arcs = flow.listed.part(0, holders);
        for (Int r = 0; r < flow.ranks(); r++) moves += settle_rank<PORTS>(flow, arcs, r, q);
    }
    return moves;
}

}  // namespace

Int settle(Flow& flow, Int first, Int last, Int q) {
    return flow.ports() ? settle_experts<true>(flow, first, last, q) : settle_experts<false>(flow, first, last, q);
}

void shorten(Flow& flow, Int sweeps, bool far, Workspace& room) {
    Scope scope(room);
    Best best{0.0, room.ints(flow.arcs * flow.ranks()), room.floats(flow.busy.flat().size)};
    best.keep(flow, reprice(flow, 1).step);
    Int done = 0, early = far ? LEVELS - 1 : 0;
    for (Int i = 0; i < LEVELS; i++) {
        Int share = (sweeps * (i + 1) + early) / LEVELS;
        descend(flow, Int{2} << i, share - done, best);
        done = std::max(done, share);
    }
    flow.tokens_AR.flat().part(0, best.tokens.size).copy_from(best.tokens);
    flow.busy.flat().copy_from(best.busy);
}

Int affordable(double seconds, Int pairs) {
    if (pairs <= 0) return 0;
    double sweeps = seconds / (SETTLE_S * static_cast<double>(pairs));
    return sweeps < static_cast<double>(MOST_SWEEPS) ? static_cast<Int>(sweeps) : MOST_SWEEPS;
}

}  // namespace prophet
