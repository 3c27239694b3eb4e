#include "plan.h"

#include <algorithm>

#include "spares.h"

namespace prophet {

constexpr double EVEN = 1.005;           // products this close to the even level count as level
constexpr double SURELY_BETTER = 0.8;    // an estimated step this far below none's needs no exact comparison
constexpr Int COPIES_FROM = 6;           // slots: with fewer own copies on every rank products are not level
constexpr double COPIES_GAIN = 0.05;     // share of the step that they must save by an estimate
constexpr Int SPLIT_GLADLY = 2048;       // ranks x experts up to which every slot limit's plan is split
constexpr double FROM = 0.1;             // share of the step that the all-to-alls must have, else levelling is as good
constexpr double JUMPED = 0.02;             // share by which levelling beats what is in force where routing has jumped
constexpr double STALE = 1.5, HASTE = 8.0;  // products this far above the even level: we try so many times as often
constexpr Int PAIRS = 1 << 15, WORK = 1 << 22;  // ranks x experts, replicas x ranks^2, up to which we try

// Assumed seconds of a try, those of one slow core; they only fix how often there is one.
constexpr double TRY_S = 2e-5, TRY_PAIR_S = 2e-7, TRY_WORK_S = 3e-9;

namespace {

void write_holders(const Problem& problem, const Replicas& replicas, Grid<bool> holds_ER) {
    holds_ER.flat().fill(false);
    for (Int e = 0; e < problem.experts(); e++) holds_ER[e][problem.home_E[e]] = true;
    for (Int i = 0; i < replicas.used; i++) holds_ER[replicas.expert[i]][replicas.rank[i]] = true;
}

// The replicas of the placement in force; none where they no longer fit the limits.
void read_holders(
    const Problem& problem, ConstBoolGrid holds_ER, ConstInts limit_R, Replicas& replicas, Workspace& room) {
    Scope scope(room);
    Ints free_R = room.ints(problem.ranks());
    free_R.copy_from(limit_R);
    replicas.used = 0;
    for (Int e = 0; e < problem.experts(); e++) {
        for (Int r = 0; r < problem.ranks(); r++) {
            if (!holds_ER[e][r] || problem.home_E[e] == r) continue;
            if (free_R[r] <= 0 || replicas.used == replicas.most()) {
                replicas.used = 0;
                return;
            }
            free_R[r]--;
            replicas.append(e, r);
        }
    }
}

class Planning {
   public:
    Planning(const Problem& problem, ConstInts limit_R, const Options& options, Workspace& room)
        : problem_(problem), limit_R_(limit_R), options_(options), room_(room), base_(home_cost(problem)) {
        double rate = 0.0;
        for (Int r = 0; r < problem.ranks(); r++) {
            most_slots_ = std::max(most_slots_, limit_R[r]);
            slots_ += limit_R[r];
            tokens_ += problem.home_load[r];
            rate += 1.0 / problem.seconds_per_token_R[r];
            speed_ += problem.speed_R[r];
        }
        slots_ = std::min(slots_, problem.experts() * problem.ranks());
        even_s_ = 3.0 * static_cast<double>(tokens_) / rate;
        most_s_ = base_.total * (1.0 - options.gain_margin);
        growing_ = base_.a2a > FROM * base_.total &&
                   problem.ranks() * problem.experts() <= PAIRS && cube() <= WORK;
    }

    Int slots() const { return slots_; }

    Replicas run(ConstBoolGrid previous_ER) {
        Replicas previous = make_replicas(slots_, room_);
        const bool given = previous_ER.rows > 0;
        if (given) read_holders(problem_, previous_ER, limit_R_, previous, room_);
        if (given && growing_ && go_on(previous)) return previous;
        Replicas found = make_replicas(slots_, room_);
        double found_s = level(found);
        if (growing_) grow_anew(found);
        if (given && previous.used > 0) {
            double split_effort = 0.0;
            if (growing_) {  // by the splits that both will get: exact ones may be no use to it
                split_effort = options_.split_effort;
                found_s = split_cost(problem_, found, split_effort, room_).total;
                if (found_s > most_s_) {
                    found.used = 0;
                    found_s = base_.total;
                }
            }
            const double previous_s = split_cost(problem_, previous, split_effort, room_).total;
            if (previous_s <= found_s * (1.0 + options_.keep_margin) && previous_s <= most_s_) return previous;
        }
        return found;
    }

   private:
    Int cube() const { return problem_.ranks() * problem_.ranks() * problem_.ranks(); }

    // The slots that are grown in: so many that a try takes little enough.
    Ints grown_limits() {
        Ints grown_R = room_.ints(problem_.ranks());
        for (Int r = 0; r < grown_R.size; r++) grown_R[r] = std::min(limit_R_[r], WORK / cube());
        return grown_R;
    }

    // Compares these replicas with those that grow from none. Slot limits double up to those that are grown in, so
    // that a further slot makes no prediction worse.
    void grow_anew(Replicas& found) {
        const Ints grown_R = grown_limits();
        Ints now_R = room_.ints(grown_R.size);
        Int most = 0;
        for (const Int slots : grown_R) most = std::max(most, slots);
        for (Int slots = 1; slots <= most; slots *= 2) {
            for (Int r = 0; r < now_R.size; r++) now_R[r] = std::min(grown_R[r], slots);
            try_once(problem_, now_R, found, most_s_, options_.split_effort, Change::FRESH, Draws(0), room_);
        }
    }

    // Whether levelling alone makes the step this much shorter than `now_s`.
    bool levels_better(double now_s) {
        Scope scope(room_);
        Replicas levelled = make_replicas(slots_, room_);
        level_loads(problem_, 0.0, limit_R_, levelled, room_);
        return levelled.used > 0 && estimated_cost(problem_, levelled, room_).total < now_s &&
               exact_cost(problem_, levelled, options_.split_effort, room_).cost.total < now_s;
    }

    // Goes on from the replicas in force, in place; false: plan anew. That is where a step takes longer than it may,
    // or where routing has changed by more than tries can follow. Else we try now and then, by chance.
    bool go_on(Replicas& replicas) {
        double uneven = 1.0;
        double now_s = base_.total;
        if (replicas.used > 0) {
            Scope scope(room_);
            const BestSplit split = best_split(
                problem_, index_replicas(replicas, problem_.home_E, room_), options_.split_effort, true, room_);
            uneven = split.bottleneck * speed_ / static_cast<double>(std::max(tokens_, Int{1}));
            now_s = split.cost.total;
            if (now_s > most_s_) now_s = split_cost(problem_, replicas, options_.split_effort, room_).total;
            if (now_s > most_s_) return false;
        }
        if (levels_better(now_s * (1.0 - JUMPED))) return false;
        double budget_s = std::max(options_.effort * base_.total, options_.least_s);
        if (uneven > STALE) budget_s *= HASTE;
        const Ints grown_R = grown_limits();
        Int grown_slots = 0;
        for (const Int slots : grown_R) grown_slots += slots;
        const Int work = std::max(replicas.used, grown_slots) * problem_.ranks() * problem_.ranks();
        const double pairs = static_cast<double>(problem_.experts() * problem_.ranks());
        Draws draws = draws_of(problem_);
        const double try_s = TRY_S + TRY_PAIR_S * pairs + TRY_WORK_S * static_cast<double>(work);
        if (draws.affords(try_s, budget_s) && work <= WORK) {
            draws.advance();
            const Change kind = static_cast<Change>((draws.seed() >> 16) % CHANGES);
            try_once(problem_, grown_R, replicas, most_s_, options_.split_effort, kind, draws, room_);
        }
        return true;
    }

    // The first plan; returns the seconds of its step.
    double level(Replicas& best) {
        Scope scope(room_);
        Cost cost = base_;
        Cost best_cost = base_;
        double best_saving_s = 0.0;  // what the split that it will get can save at most
        bool known = false;          // the tokens on every replica
        Replicas now = make_replicas(slots_, room_);
        Ints now_R = room_.ints(problem_.ranks());
        // Where splitting takes long, slot limits are compared by the exports' own tokens, and only the best is split.
        const bool estimated = problem_.ranks() * problem_.experts() > SPLIT_GLADLY;
        bool copies = !estimated && most_slots_ >= COPIES_FROM && base_.a2a > COPIES_GAIN * base_.total;
        bool lacking = true;  // slots for exports
        best.used = 0;
        Int slots = 1;
        while (slots <= most_slots_ && base_.total > even_s_ * (1.0 + options_.gain_margin)) {
            for (Int r = 0; r < now_R.size; r++) now_R[r] = std::min(limit_R_[r], slots);
            const Int deepest = slots;
            slots += std::max(Int{1}, slots / 2);
            if (lacking) {
                double saving_s = 0.0;
                cost = base_;
                lacking =
                    try_levels(problem_, now_R, now, cost, saving_s, options_.split_effort, estimated, room_);
                // a further slot must gain more than the split one will get could save without it
                const double least_s = best.used > 0 ? best_cost.total - best_saving_s : best_cost.total;
                if (now.used > 0 && cost.total < best_cost.total && !(least_s < cost.total)) {
                    known = true;
                    best_cost = cost;
                    best_saving_s = saving_s;
                    best.copy_from(now);
                }
            }
            if (copies && deepest >= COPIES_FROM) {
                const double seconds = copy_own(problem_, now_R, now, even_s_ / 3.0, room_);
                copies = seconds < 1e300;
                if (seconds < best_cost.total * (1.0 - COPIES_GAIN)) {
                    const ExactCost exact = exact_cost(problem_, now, options_.split_effort, room_);
                    if (exact.cost.total < best_cost.total - best_saving_s) {
                        known = false;
                        best_cost = exact.cost;
                        best_saving_s = exact.saving_s;
                        best.copy_from(now);
                    }
                }
            }
            const bool even = best_cost.expert <= even_s_ * EVEN && best_cost.exposed_trans + best_cost.exposed_agg <= 0.0;
            if (!(lacking || copies) || (even && best_cost.a2a <= 0.05 * best_cost.total)) break;
        }
        if (estimated && best.used > 0 && best_cost.total > SURELY_BETTER * base_.total) {
            best_cost = split_cost(problem_, best, 0.0, room_);
        }
        double best_s = best_cost.total;
        if (best.used > 0 && options_.spare > 0.0) {
            now.copy_from(best);
            best_s = spare(best, now, best_cost, best_saving_s, known, estimated);
        }
        if (best_s > most_s_) {
            best.used = 0;
            return base_.total;
        }
        return best_s;
    }

    // Adds replicas against drift, as long as they cost next to nothing; returns the seconds of the step.
    double spare(
        Replicas& best, Replicas& now, const Cost& best_cost, double best_saving_s, bool known, bool estimated) {
        const Int floor = std::max(
            Int{1}, static_cast<Int>(options_.spare * static_cast<double>(tokens_) /
                                     static_cast<double>(problem_.ranks())));
        add_spares(problem_, limit_R_, floor, known, now, room_);
        if (now.used == best.used) return best_cost.total;
        double least_s = best_cost.total;
        Cost cost = best_cost;
        if (estimated) {  // the further ones take no tokens yet
            const Transfers shown =
                exposed_seconds(copies_of(problem_, now, room_), best_cost.expert / 3.0, problem_.figures);
            cost.exposed_trans = shown.trans_s;
            cost.exposed_agg = shown.agg_s;
            cost.total = cost.a2a + cost.expert + cost.exposed_trans + cost.exposed_agg;
        } else {
            cost = exact_cost(problem_, now, options_.split_effort, room_).cost;
            least_s -= best_saving_s;
        }
        bool cheap = cost.total <= least_s * (1.0 + options_.spare_margin);
        if (!cheap && least_s < best_cost.total) {  // by the splits they will get
            const double without_s = split_cost(problem_, best, options_.split_effort, room_).total;
            const double with_s = split_cost(problem_, now, options_.split_effort, room_).total;
            cheap = with_s <= without_s * (1.0 + options_.spare_margin);
        }
        if (!cheap || cost.total > most_s_) return best_cost.total;
        best.copy_from(now);
        return cost.total;
    }

    const Problem& problem_;
    ConstInts limit_R_;
    const Options& options_;
    Workspace& room_;
    Cost base_;  // without replicas
    Int most_slots_ = 0;
    Int slots_ = 0;
    Int tokens_ = 0;
    double speed_ = 0.0;
    double even_s_ = 0.0;  // level products alone
    double most_s_ = 0.0;  // what a step with replicas may take
    bool growing_ = false;
};

}  // namespace

void plan(
    const Problem& problem, ConstInts limit_R, ConstBoolGrid previous_ER, const Options& options,
    Grid<bool> holds_ER, Workspace& room) {
    Scope scope(room);
    Planning planning(problem, limit_R, options, room);
    write_holders(problem, planning.run(previous_ER), holds_ER);
}

}  // namespace prophet
