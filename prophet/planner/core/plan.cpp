#include "plan.h"

namespace prophet {

constexpr double FROM = 0.1;     // share of the step that the all-to-alls must have, else levelling is as good
constexpr double JUMPED = 0.02;  // share by which a first plan beats what is in force where routing has jumped
constexpr double UNEVEN = 0.03;  // share of the step that products must be above the even level for a look at it
constexpr double GAINED = 0.01;  // share of the step that replicas must save: no prediction is truer than that
constexpr double KEPT = 0.002;   // share by which a new plan must be better than what is in force: counts are noisy
constexpr Int SPARES = 8;        // copies per rank that a first plan has at most beside those that level products
constexpr double SPARES_COST = 0.02;  // share of the step that they may cost: they make a stale plan good

// Assumed seconds of one slow core; they only fix how often there is a try. A call that tries nothing takes CALL_S.
constexpr double TRY_S = 2e-5, TRY_PAIR_S = 2e-7, TRY_WORK_S = 3e-9, TRY_SPLIT_S = 2e-8;
constexpr double LONG_S = 1e-3;  // a try of many ranks and experts takes longer, so that a mean call affords none
constexpr double FIRST = 0.1;    // share of the step for which a first plan may try then, BURST times at most
constexpr double CALL_S = 2e-5, CALL_PAIR_S = 1e-8, BURST = 8.0;  // a first plan may try for so many mean calls

constexpr Int CHOSEN = 64;   // experts that a try is about
constexpr Int TARGETS = 64;  // ranks that may get a replica in a try
constexpr Int SMOOTH = 2;    // q of the prices that growth goes by, doubled up to twice
constexpr Int TAKEN = 3;     // replicas that a try takes away at most

namespace {

constexpr double UNKNOWN = -1.0;  // seconds not yet predicted

// Draws, the same on every machine; the upper bits are the better ones.
class Draws {
   public:
    // Draws that differ where the counts do.
    explicit Draws(const Problem& problem) {
        for (Int tokens : problem.total_E) mix(tokens);
        for (Int r = 0; r < problem.ranks(); r++) {
            for (Int k = OUT_NEAR; k < RESOURCES; k++) mix(problem.home_busy[k][r]);
        }
    }

    Int seed() const { return seed_; }
    void mix(Int number) { seed_ = following(seed_ ^ number); }
    void advance() { seed_ = following(seed_); }
    // One of `many`, after advancing.
    Int one_of(Int many) {
        advance();
        return (seed_ >> 16) % many;
    }
    // Whether something happens that takes `cost` and may take `budget` in the mean.
    bool affords(double cost, double budget) {
        advance();
        return static_cast<double>(seed_ >> 8) * cost < budget * static_cast<double>(1 << 23);
    }

   private:
    static Int following(Int seed) {  // modulo 2^31; unsigned, since signed products must not overflow
        return static_cast<Int>((static_cast<std::uint64_t>(seed) * 1103515245u + 12345u) & 0x7FFFFFFFu);
    }
    Int seed_ = 1;
};

// Takes up to three drawn replicas away.
void take_some(Growth& growth, Draws& draws) {
    const Int many = std::min(1 + (draws.seed() >> 20) % TAKEN, growth.replicas());
    for (Int n = 0; n < many; n++) growth.remove(growth.flow.experts() + draws.one_of(growth.replicas()));
}

// Puts a drawn expert on the first rank with a free slot from a drawn one on.
void add_one(Growth& growth, Int q, Draws draws) {
    Int ranks = growth.flow.ranks(), d = draws.one_of(ranks), j = draws.one_of(growth.flow.experts());
    for (Int n = 0; n < ranks && growth.free_R[d] <= 0; n++) d = (d + 1) % ranks;
    bool routed = growth.flow.problem->total_E[growth.flow.chosen_J[j]] > 0;
    if (growth.free_R[d] > 0 && routed && !growth.flow.has(j, d)) growth.add(j, d, q);
}

// The experts that a try is about: all, or of many those drawn, the heavier of two each time.
Ints choose_experts(const Problem& problem, Draws& draws, Workspace& room) {
    Int experts = problem.experts(), many = std::min(experts, CHOSEN);
    Ints chosen_J = room.ints(many);
    Span<bool> drawn = room.array<bool>(experts);
    drawn.fill(many == experts);
    for (Int n = 0; many < experts && n < many; n++) {
        Int e = draws.one_of(experts), other = draws.one_of(experts);
        if (drawn[e] || (!drawn[other] && problem.total_E[other] > problem.total_E[e])) e = other;
        while (drawn[e]) e = (e + 1) % experts;
        drawn[e] = true;
    }
    Int j = 0;
    for (Int e = 0; e < experts; e++) {
        if (drawn[e]) chosen_J[j++] = e;
    }
    return chosen_J;
}

class Planning {
   public:
    Planning(const Problem& problem, ConstInts limit_R, double effort, double split_effort, Workspace& room)
        : problem_(problem),
          limit_R_(limit_R),
          split_effort_(split_effort),
          room_(room),
          base_(cost_of(make_flow(problem, {}, 0, room), problem.home_groups)),
          draws_(problem),
          most_s_(base_.total * (1.0 - GAINED)),
          budget_s_(effort * base_.total),
          growing_(base_.a2a > FROM * base_.total) {
        Int ranks = problem.ranks(), experts = problem.experts(), slots = 0;
        for (Int limit : limit_R) slots += limit;
        double pairs = static_cast<double>(experts * ranks);
        double share = static_cast<double>(std::min(experts, CHOSEN)) / static_cast<double>(experts);
        double work = static_cast<double>(std::min(slots, experts * ranks) * ranks * std::min(ranks, TARGETS));
        try_s_ = TRY_S + share * (TRY_PAIR_S * pairs + TRY_WORK_S * work) + TRY_SPLIT_S * pairs;
        call_s_ = CALL_S + CALL_PAIR_S * pairs;
    }

    // What follows from `now`, in its place.
    void run(Placement& now, bool given) {
        Cost cost = base_;
        if (now.replicas > 0) {
            Scope scope(room_);
            cost = best_split(problem_, index_holders(now.holds_ER, room_), split_effort_, true, room_).cost;
        }
        // Levelling can gain no more than what products are above the even level.
        double margin = growing_ ? JUMPED : KEPT;
        bool keeps = given && cost.total <= most_s_;
        double above_s = cost.expert - even_products(problem_);
        if (keeps && above_s <= (growing_ ? UNEVEN : margin) * cost.total) return go_on(now);
        Placement first(problem_, limit_R_, room_);
        level_loads(problem_, first, room_);
        double first_s = quick_s(first);
        if (keeps && first_s >= cost.total * (1.0 - margin)) return go_on(now);
        first_s = plan_anew(first, first_s, !given || now.replicas > 0);
        if (now.replicas > 0) {
            double now_s = full_s(now);
            if (first_s == UNKNOWN) first_s = full_s(first);
            if (now_s <= std::min(most_s_, first_s * (1.0 + KEPT))) return;
        }
        now.copy_from(first);
    }

   private:
    double quick_s(const Placement& placement) const {
        return step_seconds(problem_, placement.holds_ER, split_effort_, true, room_);
    }
    double full_s(const Placement& placement) const {
        return step_seconds(problem_, placement.holds_ER, split_effort_, false, room_);
    }
    // Changes this placement in one way where a step gets shorter by it: grows replicas from none (`fresh`), or takes
    // up to three away, puts one elsewhere and then lets grow what is worth it. Both placements are compared by the
    // splits that they would get, so that no try lengthens a step by the prediction. `placed_s` are the seconds of a
    // step with the placement, before and after; UNKNOWN before they were needed.
    void attempt(Placement& placement, double& placed_s, bool fresh) const {
        Scope scope(room_);
        Draws draws = draws_;
        Ints chosen_J = choose_experts(problem_, draws, room_);
        Growth growth(problem_, placement, chosen_J, room_);
        if (problem_.ranks() > TARGETS) {
            growth.first_rank = draws.one_of(problem_.ranks() - TARGETS + 1);
            growth.last_rank = growth.first_rank + TARGETS;
        }
        const Int q = SMOOTH << draws.one_of(3);
        if (fresh) {
            while (growth.replicas() > 0) growth.remove(growth.flow.arcs - 1);
        } else {
            growth.settle_all();
            reprice(growth.flow, q);
            take_some(growth, draws);
            add_one(growth, q, draws);
        }
        growth.grow(q);
        take_if_better(growth, placement, placed_s);
        if (growth.close(q)) take_if_better(growth, placement, placed_s);
    }
    void take_if_better(const Growth& growth, Placement& placement, double& placed_s) const {
        Scope scope(room_);
        Placement changed(problem_, limit_R_, room_);
        changed.copy_from(placement);
        growth.write(changed);
        Span<bool> before = placement.holds_ER.flat();
        if (std::equal(before.begin(), before.end(), changed.holds_ER.data)) return;
        if (placed_s == UNKNOWN) placed_s = full_s(placement);
        double now_s = full_s(changed);
        if (now_s >= placed_s || (changed.replicas > 0 && now_s > most_s_)) return;
        placement.copy_from(changed);
        placed_s = now_s;
    }
    void attempt(Placement& placement, double& placed_s) { attempt(placement, placed_s, draws_.one_of(4) == 0); }
    void go_on(Placement& placement) {
        double placed_s = UNKNOWN;
        if (growing_ && draws_.affords(try_s_, budget_s_)) attempt(placement, placed_s);
    }

    // Makes the best first plan of several, from one that levels loads; returns the seconds of its step, or UNKNOWN.
    // `jumped`: there was no plan, or routing has left it; else no plan has paid so far, and long tries are made as if
    // there were one.
    double plan_anew(Placement& first, double first_s, bool jumped) {
        Scope scope(room_);
        Placement spared(problem_, limit_R_, room_);
        for (Int copies = 1; copies <= SPARES; copies *= 2) {
            spared.copy_from(first);
            add_spares(problem_, copies, spared, room_);
            double spared_s = quick_s(spared);
            if (spared.replicas == first.replicas || spared_s >= first_s * (1.0 + SPARES_COST)) break;
            first.copy_from(spared);
            first_s = spared_s;
        }
        if (first_s > most_s_) first.copy_from(Placement(problem_, limit_R_, room_));
        double placed_s = UNKNOWN;
        if (growing_) {
            double left_s = BURST * (call_s_ + std::min(try_s_, budget_s_));
            if (try_s_ > LONG_S && jumped) left_s = std::max(left_s, std::min(FIRST * base_.total, BURST * try_s_));
            if (try_s_ <= LONG_S || left_s >= try_s_ || draws_.affords(try_s_, budget_s_)) {
                attempt(first, placed_s, true);
            }
            for (left_s -= try_s_; left_s >= try_s_; left_s -= try_s_) attempt(first, placed_s);
        }
        return placed_s;
    }

    const Problem& problem_;
    ConstInts limit_R_;
    double split_effort_;
    Workspace& room_;
    Cost base_;  // without replicas
    Draws draws_;
    double most_s_;                                 // what a step with replicas may take
    double budget_s_, try_s_ = 0.0, call_s_ = 0.0;  // a call's share for tries; a try; a call without
    bool growing_;
};

}  // namespace

void plan(const Problem& problem, ConstInts limit_R, ConstBoolGrid previous_ER, double effort, double split_effort,
          Grid<bool> holds_ER, Workspace& room) {
    Scope scope(room);
    Placement now(problem, limit_R, room);
    bool fits = true;  // what is in force, into the limits
    for (Int e = 0; e < previous_ER.rows; e++) {
        each_holder(previous_ER[e], [&](Int r) {
            if (now.holds_ER[e][r]) return;
            fits = fits && now.free_R[r] > 0;
            if (fits) now.add(e, r);
        });
    }
    if (!fits) now.copy_from(Placement(problem, limit_R, room));
    Planning(problem, limit_R, effort, split_effort, room).run(now, previous_ER.rows > 0);
    holds_ER.flat().copy_from(now.holds_ER.flat());
}

}  // namespace prophet
