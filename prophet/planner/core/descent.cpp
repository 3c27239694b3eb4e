#include "descent.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace prophet {

namespace {

constexpr double LEVEL_PRICES = 0.01;    // a token does not move for less; at high q this is next to nothing in seconds
constexpr double LEVELLED = 1e-3;        // a level is left when a sweep lowers its norm by less
constexpr double SETTLE_S = 3e-8;        // assumed seconds to settle a rank and expert once; fixes what an effort buys
constexpr Int MOST_SWEEPS = 4 * LEVELS;  // further ones gain next to nothing
constexpr double INFINITE = std::numeric_limits<double>::infinity();

// `value` to the power q, a power of two.
double power(double value, Int q) {
    for (; q > 1; q >>= 1) value *= value;
    return value;
}

// The q-th root of `value`, q a power of two.
double root(double value, Int q) {
    for (; q > 1; q >>= 1) value = std::sqrt(value);
    return value;
}

// Leave in `flow.work` every resource's seconds over the largest of its kind, to the power q.
void raise_work(const Flow& flow, Int q, double longest_s, double forward_s) {
    for (Int k = 0; k < RESOURCES; k++) {
        ConstFloats busy = flow.busy[k], rate = flow.rate[k], base = flow.base[k];
        Floats work = flow.work[k];
        double reference_s = std::max(k == PRODUCTS ? forward_s : longest_s, LEAST_S);
        for (Int r = 0; r < work.size; r++) work[r] = (busy[r] * rate[r] + base[r]) / reference_s;
    }
    Floats all = flow.work.flat();
    for (Int n = q; n > 1; n >>= 1) {  // as in `power`, all at once
        for (Int i = 0; i < all.size; i++) all[i] *= all[i];
    }
}

}  // namespace

Norms norms(const Flow& flow, Int q) {
    double forward_s = 0.0, longest_s = 0.0;
    for (Int r = 0; r < flow.ranks(); r++) {
        forward_s = std::max(forward_s, flow.busy[PRODUCTS][r] * flow.rate[PRODUCTS][r] + flow.base[PRODUCTS][r]);
    }
    for (Int k = OUT_NEAR; k < RESOURCES; k++) {
        ConstFloats busy = flow.busy[k], rate = flow.rate[k], base = flow.base[k];
        for (Int r = 0; r < busy.size; r++) {
            if (busy[r] > 0.0) longest_s = std::max(longest_s, busy[r] * rate[r] + base[r]);
        }
    }
    if (q == 0) return {longest_s, longest_s, forward_s, forward_s};
    raise_work(flow, q, longest_s, forward_s);
    Norms found{longest_s, 0.0, forward_s, 0.0};
    if (forward_s > 0.0) {
        double total = 0.0;
        for (double work : flow.work[PRODUCTS]) total += work;
        found.forward_q = forward_s * root(total, q);
    }
    if (longest_s > 0.0) {
        double total = 0.0;
        for (Int k = OUT_NEAR; k < RESOURCES; k++) {
            ConstFloats busy = flow.busy[k], work = flow.work[k];
            for (Int r = 0; r < busy.size; r++) {
                if (busy[r] > 0.0) total += work[r];
            }
        }
        found.exchange_q = longest_s * root(total, q);
    }
    return found;
}

void set_prices(Flow& flow, Int q, double exchange_weight, double forward_weight, const Norms& norms) {
    Scale& scale = flow.scale;
    scale = {{std::max(norms.forward_s, LEAST_S), std::max(norms.exchange_s, LEAST_S)},
             {forward_weight, exchange_weight}};
    if (norms.forward_s > 0.0) scale.weight[0] = forward_weight / power(norms.forward_q / norms.forward_s, q);
    if (norms.exchange_s > 0.0) scale.weight[1] = exchange_weight / power(norms.exchange_q / norms.exchange_s, q);
    for (Int k = 0; k < RESOURCES; k++) {
        ConstFloats rate = flow.rate[k], work = flow.work[k];
        Floats price = flow.price[k];
        double weight = scale.weight[k == PRODUCTS ? 0 : 1];
        for (Int r = 0; r < price.size; r++) price[r] = weight * rate[r] * work[r];
    }
}

namespace {

// Longer products hide more of an exposed transfer, and weigh less for it.
double forward_weight(Transfers moved, double forward_s, const Figures& figures) {
    return std::max(FORWARD_AND_BACKWARD - hiding(moved, forward_s, figures), 0.1);
}

}  // namespace

namespace {

// A flow's arrays, each with a name, so that the compiler keeps them in registers while tokens are written.
struct Settling {
    explicit Settling(Flow& flow, Int q)
        : q(q),
          node_R(flow.node_R),
          rate(flow.rate),
          base(flow.base),
          busy(flow.busy),
          price(flow.price),
          scale(flow.scale),
          next_A(flow.next_A),
          rank_A(flow.rank_A),
          tokens_AR(flow.tokens_AR),
          arc(flow.scratch) {}

    Int settle_expert(Int j);

   private:
    // The resources that a move of tokens changes: 0..2 of the giver's side, 3..5 of the taker's, -1 for none.
    struct Touched {
        Int kind[6];
        Int rank[6];
    };
    struct Pair {
        Int dear;
        Int cheap;
    };
    struct Gap {
        double gap;
        double bend;  // how fast the two prices near each other, per token
    };

    Pair dearest_and_cheapest(Int holders, Int r) const;
    Touched touched(Int r, Int giver, Int taker) const;
    Gap gap_of(const Touched& t) const;
    double price_at(Int k, Int r, double tokens) const;
    bool still_apart(const Touched& t, Int step, double gap) const;
    void move(const Touched& t, Int step) const;
    bool settle_rank(Int holders, Int r) const;

    Int q;
    ConstInts node_R;
    ConstFloatGrid rate, base;
    FloatGrid busy, price;
    Scale scale;
    ConstInts next_A, rank_A;
    IntGrid tokens_AR;
    Ints arc;  // the present expert's
};

inline Settling::Pair Settling::dearest_and_cheapest(Int holders, Int r) const {
    ConstFloats own = price[PRODUCTS], in_near = price[IN_NEAR], in_far = price[IN_FAR];
    double out_near = price[OUT_NEAR][r], out_far = price[OUT_FAR][r];
    Int node = node_R[r];
    Int dear = -1, cheap = -1;
    double high = -1.0, low = INFINITE;
    for (Int i = 0; i < holders; i++) {
        Int a = arc[i], d = rank_A[a];
        double p = token_price(d == r, node_R[d] == node, own[d], out_near + in_near[d], out_far + in_far[d]);
        double paid = tokens_AR[a][r] > 0 ? p : -1.0;
        dear = paid > high ? a : dear;  // no branches: which holder it is cannot be guessed
        high = std::max(high, paid);
        cheap = p < low ? a : cheap;
        low = std::min(low, p);
    }
    if (cheap < 0 || dear == cheap || high <= low * (1.0 + LEVEL_PRICES)) dear = -1;
    return {dear, cheap};
}

inline Settling::Touched Settling::touched(Int r, Int giver, Int taker) const {
    Touched t;
    for (Int side = 0; side < 6; side += 3) {
        Int d = side == 0 ? giver : taker;
        Int level = -1;
        if (d != r) level = node_R[d] == node_R[r] ? Int{OUT_NEAR} : Int{OUT_FAR};
        t.kind[side] = PRODUCTS;
        t.kind[side + 1] = level;
        t.kind[side + 2] = level > 0 ? level + 1 : -1;
        t.rank[side] = d;
        t.rank[side + 1] = r;
        t.rank[side + 2] = d;
    }
    if (t.kind[1] == t.kind[4]) t.kind[1] = t.kind[4] = -1;  // what r sends does not change
    return t;
}

inline Settling::Gap Settling::gap_of(const Touched& t) const {
    double bend = 0.0, side[2] = {0.0, 0.0};
    for (Int i = 0; i < 6; i++) {
        Int k = t.kind[i], n = t.rank[i];
        if (k < 0) continue;
        double c = rate[k][n];
        bend += static_cast<double>(q) * price[k][n] * c / (std::max(busy[k][n], 1.0) * c + base[k][n]);
        side[i / 3] += price[k][n];
    }
    return {side[0] - side[1], bend};
}

inline double Settling::price_at(Int k, Int n, double tokens) const {
    Int group = k == PRODUCTS ? 0 : 1;
    double c = rate[k][n];
    return scale.weight[group] * c * power((tokens * c + base[k][n]) / scale.reference_s[group], q);
}

// Whether the prices would still not have passed half of the gap the other way after so many tokens.
inline bool Settling::still_apart(const Touched& t, Int step, double gap) const {
    double above = 0.0;
    for (Int i = 0; i < 6; i++) {
        Int k = t.kind[i], n = t.rank[i];
        if (k < 0) continue;
        double p = price_at(k, n, busy[k][n] + static_cast<double>(i < 3 ? -step : step));
        above += i < 3 ? -p : p;
    }
    return above < 0.5 * gap;
}

inline void Settling::move(const Touched& t, Int step) const {
    for (Int i = 0; i < 6; i++) {
        Int k = t.kind[i], n = t.rank[i];
        if (k < 0) continue;
        busy[k][n] += static_cast<double>(i < 3 ? -step : step);
        price[k][n] = price_at(k, n, busy[k][n]);
    }
}

inline bool Settling::settle_rank(Int holders, Int r) const {
    auto [dear, cheap] = dearest_and_cheapest(holders, r);
    if (dear < 0) return false;
    Touched t = touched(r, rank_A[dear], rank_A[cheap]);
    auto [gap, bend] = gap_of(t);
    Int step = tokens_AR[dear][r];
    if (bend * static_cast<double>(step) > gap) step = std::max(Int{1}, static_cast<Int>(gap / bend));
    while (step > 0 && !still_apart(t, step, gap)) step >>= 1;
    if (step == 0) return false;
    tokens_AR[dear][r] -= step;
    tokens_AR[cheap][r] += step;
    move(t, step);
    return true;
}

Int Settling::settle_expert(Int j) {
    Int holders = 0, moves = 0;
    for (Int a = j; a >= 0; a = next_A[a]) arc[holders++] = a;
    for (Int r = 0; r < node_R.size; r++) moves += settle_rank(holders, r);
    return moves;
}

}  // namespace

Int settle(Flow& flow, Int first, Int last, Int q) {
    Settling settling(flow, q);
    Int moves = 0;
    for (Int j = first; j < last; j++) {
        if (flow.replicated(j)) moves += settling.settle_expert(j);
    }
    return moves;
}

namespace {

// The best that a descent has seen.
struct Best {
    double guide_s;
    Span<Int> tokens;
    Floats busy;

    void keep(const Flow& flow, double seconds) {
        guide_s = seconds;
        tokens.copy_from(flow.tokens_AR.flat().part(0, tokens.size));
        busy.copy_from(flow.busy.flat());
    }
    void put_back(Flow& flow) const {
        flow.tokens_AR.flat().part(0, tokens.size).copy_from(tokens);
        flow.busy.flat().copy_from(busy);
    }
};

// Descend at one q for at most `sweeps` sweeps.
void descend(Flow& flow, const Figures& figures, Transfers moved, Int q, Int sweeps, Best& best) {
    double smooth = INFINITE;
    if (sweeps <= 0) return;
    Norms found = norms(flow, q);
    for (Int made = 1;; made++) {
        set_prices(flow, q, A2A_PER_STEP, forward_weight(moved, found.forward_s, figures), found);
        Int moves = sweep(flow, q);
        found = norms(flow, q);
        Transfers exposed = felt(moved, found.forward_s, figures);
        double now =
            A2A_PER_STEP * found.exchange_s + FORWARD_AND_BACKWARD * found.forward_s + exposed.trans_s + exposed.agg_s;
        if (now < best.guide_s) best.keep(flow, now);
        double before = smooth;
        smooth =
            A2A_PER_STEP * found.exchange_q + FORWARD_AND_BACKWARD * found.forward_q + exposed.trans_s + exposed.agg_s;
        if (made == sweeps || moves == 0 || smooth > before * (1.0 - LEVELLED)) return;
    }
}

}  // namespace

void shorten(Flow& flow, const Figures& figures, const Busiest& busiest, Int sweeps, bool far, Workspace& room) {
    Scope scope(room);
    Transfers moved = transfer_seconds(busiest, figures);
    Best best{0.0, room.ints(flow.arcs * flow.ranks()), room.floats(RESOURCES * flow.ranks())};
    Norms start = norms(flow, 0);
    Transfers shown = felt(moved, start.forward_s, figures);
    best.keep(flow,
              A2A_PER_STEP * start.exchange_s + FORWARD_AND_BACKWARD * start.forward_s + shown.trans_s + shown.agg_s);
    Int done = 0, early = far ? LEVELS - 1 : 0;
    for (Int i = 0; i < LEVELS; i++) {
        Int share = (sweeps * (i + 1) + early) / LEVELS;
        descend(flow, figures, moved, Int{2} << i, share - done, best);
        done = std::max(done, share);
    }
    best.put_back(flow);
}

Int affordable(double above_s, double effort, Int pairs) {
    if (pairs <= 0) return 0;
    double sweeps = effort * above_s / (SETTLE_S * static_cast<double>(pairs));
    return sweeps < static_cast<double>(MOST_SWEEPS) ? static_cast<Int>(sweeps) : MOST_SWEEPS;
}

}  // namespace prophet
