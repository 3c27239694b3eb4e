#include "levelling.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace prophet {

constexpr Int TAKES_ALL = Int{1} << 62;  // above any number of tokens
constexpr Int NEAR = Int{1} << 61;
constexpr double FIRST_SLACK = 0.05;
constexpr double MOST_SLACK = 8.0;  // of the even level: nearly nothing is exported then
constexpr Int MISSES = 2;           // levels in a row that bring nothing before the ladder ends

namespace {

struct Taker {
    Int rank = -1;
    bool lacking = false;  // a rank without a free slot would be better
};

// The rank to take `ask` tokens of `expert`: one that can take all of it (in the giver's node first, then with most
// local tokens), or else the roomiest; -1: none.
Taker pick_taker(
    const Problem& problem, Ints space, Int ask, Int giver, Int expert, Span<bool> held, Ints free_R) {
    Int taker = -1, wanted = -1;
    Int taker_worth = 0, wanted_worth = 0;
    for (Int r = 0; r < space.size; r++) {
        if (space[r] <= 0 || held[r]) continue;
        Int worth = space[r];
        if (worth >= ask) {
            worth = TAKES_ALL + problem.load_RE[r][expert];
            if (problem.node_R[r] == problem.node_R[giver]) worth += NEAR;
        }
        if (worth > wanted_worth) {
            wanted = r;
            wanted_worth = worth;
        }
        if (worth > taker_worth && free_R[r] > 0) {
            taker = r;
            taker_worth = worth;
        }
    }
    return {taker, wanted != taker};
}

// Experts of every home, and replicas of every expert, as linked lists.
struct Lists {
    Ints first_R, following_E, last_E, before;

    Lists(const Problem& problem, Int most, Workspace& room)
        : first_R(room.ints(problem.ranks())),
          following_E(room.ints(problem.experts())),
          last_E(room.ints(problem.experts())),
          before(room.ints(most)) {
        first_R.fill(-1);
        last_E.fill(-1);
        for (Int e = problem.experts() - 1; e >= 0; e--) {
            following_E[e] = first_R[problem.home_E[e]];
            first_R[problem.home_E[e]] = e;
        }
    }

    void mark(Int expert, const Replicas& found, Span<bool> held, bool value) const {
        for (Int i = last_E[expert]; i >= 0; i = before[i]) held[found.rank[i]] = value;
    }
};

}  // namespace

bool level_loads(const Problem& problem, double slack, ConstInts limit_R, Replicas& found, Workspace& room) {
    Scope scope(room);
    const Int ranks = problem.ranks();
    Ints space = room.ints(ranks);  // tokens up to the level; negative above it
    Ints free_R = room.ints(ranks);
    Span<bool> stuck = room.array<bool>(ranks);
    Span<bool> held = room.array<bool>(ranks);
    Ints left_E = room.ints(problem.experts());
    Lists lists(problem, found.most(), room);
    stuck.fill(false);
    held.fill(false);
    left_E.copy_from(problem.total_E);
    free_R.copy_from(limit_R);
    double load = 0.0, speed = 0.0;
    for (Int r = 0; r < ranks; r++) {
        load += static_cast<double>(problem.home_load[r]);
        speed += problem.speed_R[r];
    }
    const double level = load / speed * (1.0 + slack);
    for (Int r = 0; r < ranks; r++) {
        space[r] = static_cast<Int>(std::floor(level * problem.speed_R[r] + 1e-6)) - problem.home_load[r];
    }
    bool short_of_slots = false;
    found.used = 0;
    while (found.used < found.most()) {
        Int giver = -1;
        for (Int r = 0; r < ranks; r++) {
            if (space[r] < 0 && !stuck[r] && (giver < 0 || space[r] < space[giver])) giver = r;
        }
        if (giver < 0) break;
        Int heaviest = -1;
        for (Int e = lists.first_R[giver]; e >= 0; e = lists.following_E[e]) {
            if (left_E[e] > 0 && (heaviest < 0 || left_E[e] > left_E[heaviest])) heaviest = e;
        }
        if (heaviest < 0) {
            stuck[giver] = true;
            continue;
        }
        const Int ask = std::min(-space[giver], left_E[heaviest]);
        held[giver] = true;
        lists.mark(heaviest, found, held, true);
        const Taker taker = pick_taker(problem, space, ask, giver, heaviest, held, free_R);
        held[giver] = false;
        lists.mark(heaviest, found, held, false);
        short_of_slots = short_of_slots || taker.lacking;
        if (taker.rank < 0) {
            stuck[giver] = true;
            continue;
        }
        const Int part = std::min(ask, space[taker.rank]);
        left_E[heaviest] -= part;
        space[giver] += part;
        space[taker.rank] -= part;
        free_R[taker.rank]--;
        lists.before[found.used] = lists.last_E[heaviest];
        lists.last_E[heaviest] = found.used;
        found.append(heaviest, taker.rank, part);
    }
    return short_of_slots;
}

Busiest copies_of(const Problem& problem, const Replicas& replicas, Workspace& room) {
    Scope scope(room);
    Ints all_E = room.ints(problem.experts());
    for (Int e = 0; e < all_E.size; e++) all_E[e] = e;
    Flow flow = make_frame(problem, all_E, replicas.used, room);
    for (Int i = 0; i < replicas.used; i++) link(flow, replicas.expert[i], replicas.rank[i], 0.0);
    return busiest_of(copies_moved(flow, room));
}

ExactCost exact_cost(const Problem& problem, const Replicas& replicas, double split_effort, Workspace& room) {
    Scope scope(room);
    const BestSplit split =
        best_split(problem, index_replicas(replicas, problem.home_E, room), split_effort, true, room);
    return {split.cost, split.above_s};
}

Cost split_cost(const Problem& problem, const Replicas& replicas, double split_effort, Workspace& room) {
    Scope scope(room);
    const Holders holders = index_replicas(replicas, problem.home_E, room);
    return best_split(problem, holders, split_effort, split_effort == 0.0, room).cost;
}

namespace {

// Who sends what where is counted as exports go: a replica takes its own rank's tokens first, then those of its node,
// then others', the home's own last. Of others' it takes the same share from every rank, as if no replica of that
// expert had taken any before.
void redirect_export(
    const Problem& problem, Int expert, Int to, Int tokens, ConstInts first_of_node, const Flow& flow) {
    const FloatGrid busy = flow.busy;
    const ConstInts node_R = problem.node_R;
    const Int home = problem.home_E[expert];
    const Int here = node_R[to], there = node_R[home];
    const auto load_of = [&](Int r) { return static_cast<double>(problem.load_RE[r][expert]); };
    double left = static_cast<double>(tokens);
    double part = std::min(left, load_of(to));
    redirect(flow, to, home, to, part);
    left -= part;
    const double own = load_of(home);
    double others = static_cast<double>(problem.total_E[expert]) - own - load_of(to);
    if (first_of_node[node_R[node_R.size - 1]] > 0) {  // several nodes
        double near = 0.0;
        for (Int r = first_of_node[here]; r < first_of_node[here + 1]; r++) {
            if (r == to || r == home) continue;
            part = std::min(left, load_of(r));
            redirect(flow, r, home, to, part);
            left -= part;
            near += load_of(r);
        }
        others -= near;
        part = std::min(left, others);
        if (there == here) {  // from other nodes either way
            busy[IN_FAR][home] -= part;
            busy[IN_FAR][to] += part;
        } else if (part > 0.0) {
            double around = 0.0;
            for (Int r = first_of_node[there]; r < first_of_node[there + 1]; r++) {
                if (r == home) continue;
                const double share = part * load_of(r) / others;
                redirect(flow, r, home, to, share);
                around += share;
            }
            busy[IN_FAR][home] -= part - around;
            busy[IN_FAR][to] += part - around;
        }
    } else {
        part = std::min(left, others);
        busy[IN_NEAR][home] -= part;
        busy[IN_NEAR][to] += part;
    }
    redirect(flow, home, home, to, left - part);
}

}  // namespace

Cost estimated_cost(const Problem& problem, const Replicas& replicas, Workspace& room) {
    Scope scope(room);
    const Int ranks = problem.ranks();
    Ints first_of_node = room.ints(problem.node_R[ranks - 1] + 2);
    for (Int r = ranks - 1; r >= 0; r--) first_of_node[problem.node_R[r]] = r;
    first_of_node[problem.node_R[ranks - 1] + 1] = ranks;
    const Flow flow = make_frame(problem, {}, 0, room);
    Ints groups = room.ints(ranks);
    groups.copy_from(problem.home_groups);
    for (Int i = 0; i < replicas.used; i++) {
        const Int to = replicas.rank[i];
        const Int home = problem.home_E[replicas.expert[i]];
        groups[to]++;
        flow.busy[PRODUCTS][home] -= static_cast<double>(replicas.tokens[i]);
        flow.busy[PRODUCTS][to] += static_cast<double>(replicas.tokens[i]);
        redirect_export(problem, replicas.expert[i], to, replicas.tokens[i], first_of_node, flow);
    }
    return cost_of_busy(flow, groups, copies_of(problem, replicas, room), problem.figures);
}

bool try_levels(
    const Problem& problem, ConstInts limit_R, Replicas& found, Cost& best, double& saving_s, double split_effort,
    bool estimated, Workspace& room) {
    Scope scope(room);
    Replicas now = make_replicas(found.most(), room);
    found.used = 0;
    saving_s = 0.0;
    double slack = 0.0;
    Int misses = 0;
    bool short_of_slots = level_loads(problem, slack, limit_R, now, room);
    while (now.used > 0) {
        const auto [cost, may_save_s] = estimated ? ExactCost{estimated_cost(problem, now, room), 0.0}
                                                  : exact_cost(problem, now, split_effort, room);
        misses++;
        if (cost.total < best.total) {
            misses = 0;
            best = cost;
            saving_s = may_save_s;
            found.copy_from(now);
        }
        if (cost.exposed_trans + cost.exposed_agg <= 0.0 || slack > MOST_SLACK || misses > MISSES) break;
        slack = slack == 0.0 ? FIRST_SLACK : 2.0 * slack;
        const bool lacking = level_loads(problem, slack, limit_R, now, room);
        short_of_slots = short_of_slots || lacking;
    }
    return short_of_slots;
}

double copy_own(const Problem& problem, ConstInts limit_R, Replicas& found, double least_s, Workspace& room) {
    Scope scope(room);
    const Int ranks = problem.ranks(), experts = problem.experts();
    const Flow flow = make_frame(problem, {}, 0, room);
    const FloatGrid busy = flow.busy;
    Span<bool> taken = room.array<bool>(experts);
    found.used = 0;
    Int groups = 0;
    for (Int r = 0; r < ranks; r++) {
        for (Int e = 0; e < experts; e++) taken[e] = problem.home_E[e] == r;
        const Int before = found.used;
        for (Int n = 0; n < limit_R[r]; n++) {
            Int wanted = -1;
            for (Int e = 0; e < experts; e++) {
                const Int tokens = problem.load_RE[r][e];
                if (!taken[e] && tokens > 0 && (wanted < 0 || tokens > problem.load_RE[r][wanted])) wanted = e;
            }
            if (wanted < 0) break;
            taken[wanted] = true;
            found.append(wanted, r);
            redirect(flow, r, problem.home_E[wanted], r, static_cast<double>(problem.load_RE[r][wanted]));
        }
        groups = std::max(groups, problem.home_groups[r] + found.used - before);
    }
    double near = 0.0, far = 0.0;
    for (Int r = 0; r < ranks; r++) {
        near = std::max(near, std::max(busy[OUT_NEAR][r], busy[IN_NEAR][r]));
        far = std::max(far, std::max(busy[OUT_FAR][r], busy[IN_FAR][r]));
    }
    const double forward_s = least_s + static_cast<double>(groups) * problem.figures.overhead_s;
    const Transfers moved = transfer_seconds(copies_of(problem, found, room), problem.figures);
    const Transfers window = windows(forward_s, problem.figures);
    if (moved.trans_s > window.trans_s || moved.agg_s > window.agg_s) return std::numeric_limits<double>::infinity();
    const Transfers shown = felt(moved, forward_s, problem.figures);
    const double exchange_s = exchange_seconds(near, far, problem.figures.token_bytes, problem.figures);
    return A2A_PER_STEP * exchange_s + FORWARD_AND_BACKWARD * forward_s + shown.trans_s + shown.agg_s;
}

}  // namespace prophet
