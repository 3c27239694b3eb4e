#include "plan.h"

#include <algorithm>

#include "levelling.h"

namespace prophet {

constexpr double FROM = 0.1;     // share of the step that the all-to-alls must have, else levelling is as good
constexpr double JUMPED = 0.02;  // share by which a first plan beats what is in force where routing has jumped
constexpr double UNEVEN = 0.03;  // share of the step that products must be above the even level for a look at it
constexpr double STALE = 1.5, HASTE = 8.0;  // products this far above the even level: we try so many times as often

// Assumed seconds of one slow core; they only fix how often there is a try. A call that tries nothing takes CALL_S.
constexpr double TRY_S = 2e-5, TRY_PAIR_S = 2e-7, TRY_WORK_S = 3e-9, TRY_SPLIT_S = 2e-8;
constexpr double FRESH_S = 1e-3;  // a first plan grows from none, too, where a try takes no longer
constexpr double CALL_S = 2e-5, CALL_PAIR_S = 1e-8, BURST = 8.0;  // a first plan may try for so many mean calls

namespace {

void write_holders(const Problem& problem, const Replicas& replicas, Grid<bool> holds_ER) {
    holds_ER.flat().fill(false);
    for (Int e = 0; e < problem.experts(); e++) holds_ER[e][problem.home_E[e]] = true;
    for (Int i = 0; i < replicas.used; i++) holds_ER[replicas.expert[i]][replicas.rank[i]] = true;
}

// The replicas of the placement in force; none where they no longer fit the limits.
void read_holders(const Problem& problem, ConstBoolGrid holds_ER, ConstInts limit_R, Replicas& replicas,
                  Workspace& room) {
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
        : problem_(problem),
          limit_R_(limit_R),
          options_(options),
          room_(room),
          base_(home_cost(problem)),
          draws_(draws_of(problem)) {
        Int ranks = problem.ranks(), tokens = 0;
        double rate = 0.0, speed = 0.0;
        for (Int r = 0; r < ranks; r++) {
            slots_ += limit_R[r];
            tokens += problem.home_load[r];
            rate += 1.0 / problem.seconds_per_token_R[r];
            speed += problem.speed_R[r];
        }
        slots_ = std::min(slots_, problem.experts() * ranks);
        even_level_ = static_cast<double>(tokens) / speed;
        even_s_ = FORWARD_AND_BACKWARD * static_cast<double>(tokens) / rate;
        most_s_ = base_.total * (1.0 - options.gain_margin);
        double pairs = static_cast<double>(problem.experts() * ranks);
        growing_ = base_.a2a > FROM * base_.total;
        double share =
            static_cast<double>(std::min(problem.experts(), CHOSEN)) / static_cast<double>(problem.experts());
        double work = static_cast<double>(slots_ * ranks * std::min(ranks, TARGETS));
        try_s_ = TRY_S + share * (TRY_PAIR_S * pairs + TRY_WORK_S * work) + TRY_SPLIT_S * pairs;
        budget_s_ = std::max(options.effort * base_.total, options.least_s);
        call_s_ = CALL_S + CALL_PAIR_S * pairs;
    }

    Int slots() const { return slots_; }

    // Goes on from these replicas, in place.
    void run(Replicas& now, bool given) {
        Cost cost = base_;
        double level = 0.0;
        if (now.used > 0) {
            Scope scope(room_);
            BestSplit split =
                best_split(problem_, index_replicas(now, problem_.home_E, room_), options_.split_effort, true, room_);
            cost = split.cost;
            level = split.bottleneck;
        }
        // Levelling can gain no more than what products are above the even level.
        double margin = growing_ ? JUMPED : options_.keep_margin;
        bool keeps = given && cost.total <= most_s_;
        if (keeps && cost.expert - even_s_ <= (growing_ ? UNEVEN : margin) * cost.total) return go_on(now, level);
        Replicas first = make_replicas(slots_, room_);
        level_loads(problem_, limit_R_, first, room_);
        double first_s = first.used > 0 ? quick_s(first) : base_.total;
        if (keeps && first_s >= cost.total * (1.0 - margin)) return go_on(now, level);
        plan_anew(first, first_s);
        if (now.used > 0) {
            double now_s = full_s(now), new_s = first.used > 0 ? full_s(first) : base_.total;
            if (now_s <= most_s_ && now_s <= new_s * (1.0 + options_.keep_margin)) return;
        }
        now.copy_from(first);
    }

   private:
    double quick_s(const Replicas& replicas) const {
        return split_cost(problem_, replicas, options_.split_effort, true, room_).total;
    }
    double full_s(const Replicas& replicas) const {
        return split_cost(problem_, replicas, options_.split_effort, options_.split_effort <= 0.0, room_).total;
    }

    void attempt(Replicas& replicas, Change kind, ConstInts slots_R) {
        try_once(problem_, slots_R, replicas, most_s_, options_.split_effort, kind, draws_, room_);
    }
    Change drawn() {
        draws_.advance();
        Int n = (draws_.seed() >> 16) % 8;
        return n == 0 ? Change::FRESH : n == 1 ? Change::EVERYWHERE : n < 5 ? Change::FEWER : Change::OTHERS;
    }
    void go_on(Replicas& replicas, double level) {
        double haste = level > STALE * even_level_ ? HASTE : 1.0;
        if (growing_ && draws_.affords(try_s_, budget_s_ * haste)) attempt(replicas, drawn(), limit_R_);
    }

    // Makes the best first plan of several, from one that levels loads into all slots.
    void plan_anew(Replicas& first, double first_s) {
        Scope scope(room_);
        Replicas now = make_replicas(slots_, room_);
        Ints slots_R = room_.ints(limit_R_.size);
        const auto keep = [&](double margin) {
            double now_s = quick_s(now);
            bool better = now_s < first_s * (1.0 + margin);
            if (better) {
                first.copy_from(now);
                first_s = now_s;
            }
            return better;
        };
        Int most = *std::max_element(limit_R_.begin(), limit_R_.end());
        for (Int slots = 1; slots < most; slots *= 2) {
            for (Int r = 0; r < slots_R.size; r++) slots_R[r] = std::min(limit_R_[r], slots);
            level_loads(problem_, slots_R, now, room_);
            keep(0.0);
        }
        for (Int copies = 1; copies <= static_cast<Int>(options_.spare);
             copies *= 2) {  // where they cost next to nothing
            now.copy_from(first);
            add_spares(problem_, limit_R_, copies, now, room_);
            if (now.used == first.used || !keep(options_.spare_margin)) break;
        }
        if (first_s > most_s_) first.used = 0;
        if (!growing_) return;
        if (try_s_ <= FRESH_S) attempt(first, Change::FRESH, limit_R_);
        Int slots = most / 2;  // then growth into ever fewer slots, and other tries
        double left_s = BURST * (call_s_ + std::min(try_s_, budget_s_)) - try_s_;
        for (; left_s >= try_s_; left_s -= try_s_) {
            for (Int r = 0; r < slots_R.size; r++) slots_R[r] = std::min(limit_R_[r], slots);
            attempt(first, slots > 0 ? Change::FRESH : drawn(), slots > 0 ? ConstInts(slots_R) : limit_R_);
            slots /= 2;
        }
    }

    const Problem& problem_;
    ConstInts limit_R_;
    const Options& options_;
    Workspace& room_;
    Cost base_;  // without replicas
    Draws draws_;
    Int slots_ = 0;
    double even_level_ = 0.0;
    double even_s_ = 0.0;  // level products alone
    double most_s_ = 0.0;  // what a step with replicas may take
    double try_s_ = 0.0, budget_s_ = 0.0, call_s_ = 0.0;
    bool growing_ = false;
};

}  // namespace

void plan(const Problem& problem, ConstInts limit_R, ConstBoolGrid previous_ER, const Options& options,
          Grid<bool> holds_ER, Workspace& room) {
    Scope scope(room);
    Planning planning(problem, limit_R, options, room);
    Replicas replicas = make_replicas(planning.slots(), room);
    bool given = previous_ER.rows > 0;
    if (given) read_holders(problem, previous_ER, limit_R, replicas, room);
    planning.run(replicas, given);
    write_holders(problem, replicas, holds_ER);
}

}  // namespace prophet
