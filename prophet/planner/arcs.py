"""Compiled kernels that list who holds what: arcs by expert and by rank.

Shape legend: R ranks, E experts, M experts held by more than one rank, A arcs (one per holder of those experts).
"""

from __future__ import annotations

import numpy as np

from prophet.planner.compiled import bare, compiled
from prophet.spec import BoolArray, IntArray


@compiled
def room_for(many: int, arcs: int) -> tuple[IntArray, IntArray, IntArray]:
    """Three arrays of sizes [M], [M + 1] and [A] from one allocation, which takes longer than filling few."""
    room = np.empty(2 * many + 1 + arcs, np.int64)
    return room[:many], room[many : 2 * many + 1], room[2 * many + 1 :]


@compiled
def index_holders(holds_ER: BoolArray, home_E: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Experts with several holders [M], where their arcs start [M + 1], the arcs' ranks [A], ascending."""
    experts, ranks = holds_ER.shape
    count = np.empty(experts, np.int64)
    many = 0
    arcs = 0
    for e in range(experts):
        n = 0
        for r in range(ranks):
            if holds_ER[e, r]:
                n += 1
        count[e] = n
        if n > 1:
            many += 1
            arcs += n
    multi, start, arc_rank = room_for(many, arcs)
    j = 0
    a = 0
    for e in range(experts):
        if count[e] > 1:
            multi[j] = e
            start[j] = a
            j += 1
            for r in range(ranks):
                if holds_ER[e, r]:
                    arc_rank[a] = r
                    a += 1
    start[many] = a
    return multi, start, arc_rank


@compiled
def index_replicas(
    rep_expert: IntArray, rep_rank: IntArray, used: int, home_E: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Like `index_holders`, from a list of replicas in any order."""
    experts = home_E.size
    count = np.zeros(experts, np.int64)
    for i in range(used):
        count[rep_expert[i]] += 1
    many = 0
    for e in range(experts):
        if count[e] > 0:
            many += 1
    multi, start, arc_rank = room_for(many, used + many)
    a = 0
    j = 0
    for e in range(experts):
        n = count[e]
        if n > 0:
            multi[j] = e
            start[j] = a
            arc_rank[a] = home_E[e]
            count[e] = a + 1
            a += n + 1
            j += 1
    start[many] = a
    for i in range(used):
        e = rep_expert[i]
        k = count[e]
        arc_rank[k] = rep_rank[i]
        count[e] += 1
    for j in range(many):
        for k in range(start[j] + 1, start[j + 1]):
            r = arc_rank[k]
            q = k
            while q > start[j] and arc_rank[q - 1] > r:
                arc_rank[q] = arc_rank[q - 1]
                q -= 1
            arc_rank[q] = r
    return multi, start, arc_rank


@bare
def experts_at(start: IntArray, arc_rank: IntArray, ranks: int, first: IntArray, row: IntArray) -> None:
    """Write the list of every rank's experts, `row` [A], and where it begins, `first` [R + 2] but for the last."""
    for r in range(ranks + 2):
        first[r] = 0
    for k in range(arc_rank.size):
        first[arc_rank[k] + 2] += 1
    for r in range(2, ranks + 2):
        first[r] += first[r - 1]
    for j in range(start.size - 1):
        for k in range(start[j], start[j + 1]):
            row[first[arc_rank[k] + 1]] = j
            first[arc_rank[k] + 1] += 1


@bare
def fewest_first(first: IntArray, segments: int, place: IntArray, order: IntArray) -> None:
    """Write the segments first[i] .. first[i + 1] - 1 to `order`, shortest first; `place`: room, the longest + 2."""
    longest = 0
    for i in range(segments):
        longest = max(longest, first[i + 1] - first[i])
    for n in range(longest + 2):
        place[n] = 0
    for i in range(segments):
        place[first[i + 1] - first[i] + 1] += 1
    for n in range(1, longest + 2):
        place[n] += place[n - 1]
    for i in range(segments):
        n = first[i + 1] - first[i]
        order[place[n]] = i
        place[n] += 1
