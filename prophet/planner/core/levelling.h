// The first plan: what overloaded ranks hand over to others, in few and large pieces.
//
// Where products dominate this is all there is to do: loads come down to the even level, and the tokens that a replica
// takes are known at once. Linear in ranks for every replica.
#pragma once

#include "replicas.h"
#include "split.h"

namespace prophet {

// Brings loads down to (1 + slack) of the even level; returns whether slots were short.
//
// The most overloaded rank gives its heaviest expert to one rank that can take all of its excess (nearest first, then
// most local tokens), or else to the roomiest one. `tokens` of a replica are those that it takes over.
bool level_loads(const Problem& problem, double slack, ConstInts limit_R, Replicas& found, Workspace& room);

// Levels of a ladder: all the way where transfers are free, less far where they are not. Writes the placement that
// costs less than `best` into `found`, none where none does; returns whether slots were short. An `estimated` cost
// goes by the exports' own tokens; else by the exact split, and `saving_s` is what the split it gets can save at most.
bool try_levels(
    const Problem& problem, ConstInts limit_R, Replicas& found, Cost& best, double& saving_s, double split_effort,
    bool estimated, Workspace& room);

// Gives every rank the experts that it routes most tokens to and lacks, up to its limit, where all of their transfers
// are hidden. Returns the estimated seconds of the step; infinite where transfers show. Every rank is taken to keep
// what it can, and products to be level: they take `least_s` forward at least.
double copy_own(const Problem& problem, ConstInts limit_R, Replicas& found, double least_s, Workspace& room);

// What the busiest rank moves of experts for these replicas.
Busiest copies_of(const Problem& problem, const Replicas& replicas, Workspace& room);

// Cost of these replicas under the exact split, and how much less it can be, at most, under the split they will get.
struct ExactCost {
    Cost cost;
    double saving_s;
};
ExactCost exact_cost(const Problem& problem, const Replicas& replicas, double split_effort, Workspace& room);

// Estimated cost of exports whose tokens are known, in time that does not grow with ranks per replica.
Cost estimated_cost(const Problem& problem, const Replicas& replicas, Workspace& room);

// Cost of these replicas under the split that they will get.
Cost split_cost(const Problem& problem, const Replicas& replicas, double split_effort, Workspace& room);

}  // namespace prophet
