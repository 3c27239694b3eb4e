#include "partition.h"

#include <algorithm>
#include <limits>

namespace prophet {

namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();

// The boundaries after every stage that are reachable under a bottleneck, [P + 1, L + 1].
struct Reach {
    Grid<bool> at;

    bool complete() const { return at[at.rows - 1][at.columns - 1]; }
};

// Fill `reach` with what is reachable under `beta`. Returns the smallest stage time above `beta` that blocked an
// extension: no bottleneck below it reaches anything that `beta` does not.
double probe(double beta, const Pipeline& p, const Reach& reach) {
    reach.at.flat().fill(false);
    reach.at[0][0] = true;
    double next_beta = INFINITE;
    for (Int k = 0; k < p.stages(); k++) {
        Int last_end = p.layers() - (p.stages() - 1 - k);
        Int far = k, marked = k;
        for (Int i = k; i < last_end; i++) {
            if (!reach.at[k][i]) continue;
            for (far = std::max(far, i); far < last_end && p.fits(k, i, far + 1); far++) {
                double load = p.load(k, i, far + 1);
                if (load > beta) {
                    next_beta = std::min(next_beta, load);
                    break;
                }
            }
            for (Int j = std::max(i, marked) + 1; j <= far; j++) reach.at[k + 1][j] = true;
            marked = std::max(marked, far);
        }
    }
    return next_beta;
}

// The bottleneck of one partition that `reach` proves possible under `beta`.
double realised(double beta, const Pipeline& p, const Reach& reach) {
    Int j = p.layers();
    double worst = 0.0;
    for (Int k = p.stages() - 1; k >= 0; k--) {
        for (Int i = j - 1; i >= k; i--) {
            double load = p.load(k, i, j);
            // Take the longest last stages first, but never one that cannot be reached.
            if (reach.at[k][i] && load <= beta && p.fits(k, i, j)) {
                worst = std::max(worst, load);
                j = i;
                break;
            }
        }
    }
    return worst;
}

}  // namespace

// Bisection whose two ends always are stage times that occur (after Pinar and Aykanat, 2004): a feasible probe lowers
// the upper end to the bottleneck it found, an infeasible one raises the lower end to the next stage time that could
// change its answer. It stops when the ends meet, so the result is exact.
double minimal_bottleneck(const Pipeline& p, Workspace& room) {
    Scope scope(room);
    Int rows = p.stages() + 1, columns = p.layers() + 1;
    Reach reach{{room.array<bool>(rows * columns).data, rows, columns}};
    probe(INFINITE, p, reach);
    if (!reach.complete()) return NO_PARTITION;
    double all = static_cast<double>(p.units[p.layers()]), speed = 0.0;
    for (double s : p.speed) speed += s;
    double high = realised(INFINITE, p, reach);
    double low = std::min(all / speed, high);
    double step = all / (speed * static_cast<double>(p.stages()));
    while (low < high) {
        // From below in growing strides first: the optimum lies near the ideal, the first upper end far away.
        double beta = low + std::min(step, (high - low) / 2.0);
        step *= 2.0;
        double next_beta = probe(beta, p, reach);
        if (reach.complete()) {
            high = realised(beta, p, reach);
        } else {
            low = std::min(next_beta, high);
        }
    }
    return high;
}

bool best_boundaries(double beta, const Pipeline& p, double square_weight, ConstFloatGrid penalty, Ints boundaries,
                     Workspace& room) {
    Scope scope(room);
    Int stages = p.stages(), layers = p.layers();
    FloatGrid cost = room.floats(stages + 1, layers + 1);
    IntGrid start = room.ints(stages + 1, layers + 1);
    cost.flat().fill(INFINITE);
    start.flat().fill(0);
    cost[0][0] = 0.0;
    double scale = std::max(1.0, static_cast<double>(p.units[layers]));
    for (Int k = 0; k < stages; k++) {
        Int last_end = layers - (stages - 1 - k);
        for (Int i = k; i < last_end; i++) {
            if (cost[k][i] == INFINITE) continue;
            for (Int j = i + 1; j <= last_end; j++) {
                double load = p.load(k, i, j);
                if (load > beta || !p.fits(k, i, j)) break;
                double part = load / scale;
                double total = cost[k][i] + (penalty[k][j] - penalty[k][i]) + square_weight * part * part;
                if (total < cost[k + 1][j]) {
                    cost[k + 1][j] = total;
                    start[k + 1][j] = i;
                }
            }
        }
    }
    if (cost[stages][layers] == INFINITE) return false;
    boundaries[0] = 0;
    Int j = layers;
    for (Int k = stages; k > 0; k--) {
        boundaries[k] = j;
        j = start[k][j];
    }
    return true;
}

}  // namespace prophet
