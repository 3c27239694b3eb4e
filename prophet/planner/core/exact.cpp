// The exact split: the lowest bottleneck, then the fewest tokens between nodes, then between ranks.
//
// Shape legend: R ranks, E experts, M experts held by more than one rank, A arcs (one per holder of those experts).
//
// An expert with one holder leaves no choice. The others form a transport problem: arcs (expert, holder) carry integer
// tokens, rank d takes at most cap[d] = floor(T * speed[d]). Start from the cheapest assignment without caps (local
// tokens stay; the rest stays in the node; the rest goes where there is room), then move excess along shortest
// augmenting paths, where a token that must leave its node costs far more than one that must leave its rank. Shortest
// paths keep the flow cheapest for the loads it has. If the excess cannot leave the set of ranks it reaches, no
// assignment at this T exists, the set itself says how far T must rise (Newton's method on the cut), and the answer at
// the final T is exact.
#include <algorithm>
#include <cmath>
#include <limits>

#include "split.h"

namespace prophet {

namespace {

constexpr Int FAR = Int{1} << 60;
constexpr Int CROSS = Int{1} << 24;  // cost of one token between nodes; one between ranks of a node costs 1
constexpr Int NONE = -1;
constexpr double ROUNDING = 1e-6;  // tokens by which a cap may be missed and still counts

Int cap_at(double level, double speed) { return static_cast<Int>(std::floor(level * speed + ROUNDING)); }

// The experts of every rank: those of rank r are row[first[r]] .. row[first[r + 1] - 1]; `first` has R + 2 places.
void list_by_rank(const Holders& holders, Ints first, Ints row) {
    first.fill(0);
    for (Int r : holders.rank_A) first[r + 2]++;
    for (Int r = 2; r < first.size; r++) first[r] += first[r - 1];
    for (Int j = 0; j < holders.experts(); j++) {
        for (Int r : holders.of(j)) row[first[r + 1]++] = j;
    }
}

// Write the indices of the segments first[i] .. first[i + 1] - 1 to `order`, shortest first, lower index among equals.
void fewest_first(ConstInts first, Ints order) {
    for (Int i = 0; i < order.size; i++) order[i] = i;
    std::sort(order.begin(), order.end(), [&](Int a, Int b) {
        Int longer = (first[a + 1] - first[a]) - (first[b + 1] - first[b]);
        return longer != 0 ? longer < 0 : a < b;
    });
}

// A group are the holders of one expert in one node. Its ranks' tokens, its supply, need not leave the node.
class Solver {
   public:
    Solver(const Problem& problem, const Holders& holders, const Exact& into, Workspace& room)
        : problem_(problem),
          holders_(holders),
          node_R_(problem.node_R),
          speed_R_(problem.speed_R),
          tokens_(into.tokens_A),
          have_(into.have_A) {
        Int arcs = holders.arcs(), ranks = problem.ranks(), many = holders.experts();
        for (Ints* by_arc : {&group_, &group_first_, &supply_, &held_, &at_expert_, &nearest_arc_, &nearest_}) {
            *by_arc = room.ints(arcs + 1);
        }
        for (Ints* by_rank : {&load_, &cap_, &fixed_, &distance_, &came_from_, &came_by_}) *by_rank = room.ints(ranks);
        at_first_ = room.ints(ranks + 2);
        expert_order_ = room.ints(many);
        stale_ = room.ints(many);
        fixed_.copy_from(problem.home_busy[PRODUCTS]);
        for (Int e : holders.expert_M) fixed_[problem.home_E[e]] -= problem.total_E[e];
        group_arcs();
        list_by_rank(holders, at_first_, at_expert_);
        group_order_ = room.ints(groups_);
        fewest_first(group_first_, group_order_);
        fewest_first(holders.start, expert_order_);
    }

    double solve() {
        double level = lowest_level();
        set_caps(level);
        // A second time from the cheapest assignment, once the caps are known.
        for (bool final = false;; final = true) {
            assign_cheapest();
            bool raised = false;
            while (mark_excess()) {
                find_paths();
                Int nearest = FAR, need = 0;  // the nearest rank with room; the tokens of all that are reached
                for (Int r = 0; r < node_R_.size; r++) {
                    if (load_[r] < cap_[r]) nearest = std::min(nearest, distance_[r]);
                    if (distance_[r] < FAR) need += load_[r];
                }
                if (nearest < FAR) {
                    push(nearest);
                    continue;
                }
                // The reached ranks are closed, none of their tokens has a holder elsewhere: they need more room.
                level = raised_level(need);
                set_caps(level);
                raised = true;
            }
            if (final || !raised) return level;
        }
    }

   private:
    struct Path {
        Int root;
        Int tokens;
        Int cost;
    };

    void group_arcs() {
        for (Int j = 0; j < holders_.experts(); j++) {
            Int e = holders_.expert_M[j], before = NONE;
            for (Int k = holders_.start[j]; k < holders_.start[j + 1]; k++) {
                Int r = holders_.rank_A[k];
                have_[k] = problem_.load_RE[r][e];
                if (node_R_[r] != before) {
                    before = node_R_[r];
                    group_first_[groups_] = k;
                    supply_[groups_] = supply_of(e, node_R_[r]);
                    groups_++;
                }
                group_[k] = groups_ - 1;
            }
        }
        group_first_[groups_] = holders_.arcs();
    }

    // Tokens that a node routes to an expert.
    Int supply_of(Int expert, Int node) const {
        if (problem_.nodes() == 1) return problem_.total_E[expert];
        Int supply = 0;
        for (Int r = problem_.node_first[node]; r < problem_.node_first[node + 1]; r++) {
            supply += problem_.load_RE[r][expert];
        }
        return supply;
    }

    // No T below this one has room for all tokens, or for those of experts with one holder.
    double lowest_level() const {
        Int need = 0;
        double level = 0.0;
        for (Int r = 0; r < node_R_.size; r++) {
            need += fixed_[r];
            level = std::max(level, static_cast<double>(fixed_[r]) / speed_R_[r]);
        }
        for (Int e : holders_.expert_M) need += problem_.total_E[e];
        distance_.fill(0);
        return std::max(level, raised_level(need));
    }

    // The smallest T at which the caps of the reached ranks add up to `need`.
    double raised_level(Int need) const {
        double total_speed = 0.0;
        for (Int r = 0; r < node_R_.size; r++) total_speed += distance_[r] < FAR ? speed_R_[r] : 0.0;
        double level = static_cast<double>(need) / total_speed;
        while (true) {
            Int room = 0;
            double following = std::numeric_limits<double>::infinity();
            for (Int r = 0; r < node_R_.size; r++) {
                if (distance_[r] >= FAR) continue;
                Int cap = cap_at(level, speed_R_[r]);
                room += cap;
                following = std::min(following, static_cast<double>(cap + 1) / speed_R_[r]);
            }
            if (room >= need) return level;
            // Of many tokens the next level rounds to this one.
            level = std::max(following, level * (1.0 + DBL_EPSILON));
        }
    }

    void set_caps(double level) {
        for (Int r = 0; r < node_R_.size; r++) cap_[r] = cap_at(level, speed_R_[r]);
    }

    // Without regard to caps; whoever has few holders to choose from chooses first.
    void assign_cheapest() {
        load_.copy_from(fixed_);
        for (Int k = 0; k < holders_.arcs(); k++) {
            tokens_[k] = have_[k];
            load_[holders_.rank_A[k]] += have_[k];
        }
        for (Int i = 0; i < groups_; i++) {
            Int g = group_order_[i], first = group_first_[g], last = group_first_[g + 1];
            pour(supply_[g], first, last);
        }
        for (Int i = 0; i < holders_.experts() && problem_.nodes() > 1; i++) {
            Int j = expert_order_[i], first = holders_.start[j], last = holders_.start[j + 1];
            pour(problem_.total_E[holders_.expert_M[j]], first, last);
        }
        held_.fill(0);
        for (Int k = 0; k < holders_.arcs(); k++) held_[group_[k]] += tokens_[k];
    }

    // Give the arcs first .. last - 1 what they lack of `tokens`, each time the roomiest rank, the lower one on ties.
    void pour(Int tokens, Int first, Int last) {
        for (Int k = first; k < last; k++) tokens -= tokens_[k];
        while (tokens > 0) {
            Int best = first, best_room = -FAR;
            for (Int k = first; k < last; k++) {
                Int r = holders_.rank_A[k], room = cap_[r] - load_[r];
                if (room > best_room) {
                    best_room = room;
                    best = k;
                }
            }
            Int part = 0 < best_room && best_room < tokens ? best_room : tokens;
            tokens_[best] += part;
            load_[holders_.rank_A[best]] += part;
            tokens -= part;
        }
    }

    // Ways begin at overloaded ranks; returns whether there are any.
    bool mark_excess() {
        bool excess = false;
        stale_.fill(0);
        for (Int r = 0; r < node_R_.size; r++) {
            came_by_[r] = came_from_[r] = NONE;
            distance_[r] = FAR;
            if (load_[r] <= cap_[r]) continue;
            distance_[r] = 0;
            excess = true;
            for (Int i = at_first_[r]; i < at_first_[r + 1]; i++) stale_[at_expert_[i]] = 1;
        }
        return excess;
    }

    // Shortest paths from all overloaded ranks (Bellman-Ford: arcs have negative costs).
    void find_paths() {
        for (Int round = 0; round <= node_R_.size; round++) {
            bool changed = false;
            for (Int j = 0; j < holders_.experts(); j++) {
                if (stale_[j] == 0) continue;
                stale_[j] = 0;
                if (relax(j)) changed = true;
            }
            if (!changed) return;
        }
    }

    // The way to the rank of `arc` leads over arc `by` of the same expert from now on.
    void reach(Int arc, Int by, Int distance) {
        Int r = holders_.rank_A[arc];
        distance_[r] = distance;
        came_from_[r] = by;
        came_by_[r] = arc;
        for (Int i = at_first_[r]; i < at_first_[r + 1]; i++) stale_[at_expert_[i]] = 1;
    }

    // Shorten the ways that lead through expert j: they stay in a group or lead to another node's. Returns whether any
    // got shorter.
    bool relax(Int j) {
        Int first = holders_.start[j], last = holders_.start[j + 1];
        Int out_distance = FAR, out_arc = NONE;
        for (Int k = first; k < last; k++) {
            Int g = group_[k];
            if (k == group_first_[g]) {
                nearest_[g] = FAR;
                nearest_arc_[g] = NONE;
            }
            Int d = distance_[holders_.rank_A[k]];
            if (d >= FAR || tokens_[k] <= 0) continue;
            if (tokens_[k] <= have_[k]) d++;
            if (d < nearest_[g]) {
                nearest_[g] = d;
                nearest_arc_[g] = k;
            }
            if (held_[g] <= supply_[g]) d += CROSS;
            if (d < out_distance) {
                out_distance = d;
                out_arc = k;
            }
        }
        if (out_arc == NONE) return false;
        bool changed = false;
        for (Int k = first; k < last; k++) {
            Int g = group_[k], d = out_distance, by = out_arc;
            if (held_[g] < supply_[g]) d -= CROSS;
            if (nearest_[g] <= d) {
                d = nearest_[g];
                by = nearest_arc_[g];
            }
            if (tokens_[k] < have_[k]) d--;
            if (by != k && d < distance_[holders_.rank_A[k]]) {
                reach(k, by, d);
                changed = true;
            }
        }
        return changed;
    }

    void push(Int nearest) {
        bool progress = false;
        for (Int sink = 0; sink < node_R_.size; sink++) {
            if (distance_[sink] != nearest || load_[sink] >= cap_[sink]) continue;
            Path path = path_to(sink);
            // An earlier path of this round may have used it up; the next round finds another.
            if (path.tokens <= 0 || (path.cost != nearest && progress)) continue;
            progress = true;
            load_[path.root] -= path.tokens;
            load_[sink] += path.tokens;
            send_along(sink, path.tokens);
        }
    }

    // Where the way to `sink` begins, how many tokens it takes as things are now, and what one of them costs.
    Path path_to(Int sink) const {
        Int room = cap_[sink] - load_[sink], cost = 0, r = sink;
        for (Int hops = 0; came_by_[r] != NONE && hops <= node_R_.size; hops++) {
            Int to = came_by_[r], by = came_from_[r];
            if (tokens_[by] > have_[by]) {
                room = std::min(room, tokens_[by] - have_[by]);
            } else {
                room = std::min(room, tokens_[by]);
                cost++;
            }
            if (tokens_[to] < have_[to]) {
                room = std::min(room, have_[to] - tokens_[to]);
                cost--;
            }
            Int from_group = group_[by], to_group = group_[to];
            if (from_group != to_group) {
                if (held_[from_group] > supply_[from_group]) {
                    room = std::min(room, held_[from_group] - supply_[from_group]);
                } else {
                    cost += CROSS;
                }
                if (held_[to_group] < supply_[to_group]) {
                    room = std::min(room, supply_[to_group] - held_[to_group]);
                    cost -= CROSS;
                }
            }
            r = holders_.rank_A[by];
        }
        return {r, std::min(room, load_[r] - cap_[r]), cost};
    }

    void send_along(Int sink, Int tokens) {
        for (Int r = sink; came_by_[r] != NONE; r = holders_.rank_A[came_from_[r]]) {
            Int to = came_by_[r], by = came_from_[r];
            tokens_[by] -= tokens;
            tokens_[to] += tokens;
            held_[group_[by]] -= tokens;
            held_[group_[to]] += tokens;
        }
    }

    const Problem& problem_;
    const Holders& holders_;
    ConstInts node_R_;
    ConstFloats speed_R_;

    Ints tokens_, load_;  // the answer, by arc and by rank
    Ints have_;           // tokens of every arc's own rank
    Ints fixed_;          // by rank: tokens of experts with one holder
    Ints cap_;            // by rank
    Ints group_, group_first_, supply_, held_;
    Ints group_order_, expert_order_;
    Int groups_ = 0;

    Ints distance_;               // of every rank from an overloaded one
    Ints came_from_, came_by_;    // the arcs over which the way to a rank leaves the one before and enters it
    Ints at_first_, at_expert_;   // the experts of every rank
    Ints stale_;                  // experts with a holder whose distance fell since they were relaxed
    Ints nearest_arc_, nearest_;  // by group: the arc that is nearest, and its distance
};

}  // namespace

Exact exact_split(const Problem& problem, const Holders& holders, Workspace& room) {
    Exact exact{room.ints(holders.arcs()), room.ints(holders.arcs()), 0.0};
    Scope scope(room);
    exact.bottleneck = Solver(problem, holders, exact, room).solve();
    return exact;
}

}  // namespace prophet
