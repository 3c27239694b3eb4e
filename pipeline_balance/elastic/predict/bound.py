"""The least time that any plan of a switch can take, from what must enter or leave each port.

Shape legend: P ranks. A rank has four ports: in and out, within its node and out of it, each with a rate in bytes per
second. The bounds know layouts and rates alone: no route, no schedule, no latency.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.errors import SpecError
from prophet.spec import FloatArray, IntArray, Link
from prophet.state.atoms import Atoms
from prophet.state.table import distinct, numbered_lists, positions, positions_of, starts

MOST_VARIABLES = 60_000
"""Of the linear program: about what HiGHS solves in a few seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a rank's ports and its host can do.

    The bounds know nothing of latencies and hosts; the simulation does.

    Attributes:
        intra_bytes_per_s: Per direction, within the node.
        inter_bytes_per_s: Per direction, out of the node.
        intra_latency_s: Seconds before each message within the node.
        inter_latency_s: Seconds before each message out of it.
        box_s: Seconds of the host for every box that it sends or receives.
        copied_byte_s: Seconds of the host for every byte that it copies from an old piece to a new one.
    """

    intra_bytes_per_s: float
    inter_bytes_per_s: float
    intra_latency_s: float = 0.0
    inter_latency_s: float = 0.0
    box_s: float = 0.0
    copied_byte_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.intra_bytes_per_s > 0 and self.inter_bytes_per_s > 0):
            raise SpecError(
                f"rates must be positive, got {self.intra_bytes_per_s} and {self.inter_bytes_per_s} bytes/s"
            )

    @classmethod
    def of(cls, intra: Link, inter: Link) -> Rates:
        """The rates of a topology's two links."""
        return cls(
            intra_bytes_per_s=intra.bytes_per_s,
            inter_bytes_per_s=inter.bytes_per_s,
            intra_latency_s=intra.latency_s,
            inter_latency_s=inter.latency_s,
        )


@dataclass(frozen=True, eq=False)
class Demand:
    """Bytes by who holds and who misses them.

    Attributes:
        n_bytes: Bytes of every group: all of a list of ranks hold them.
        holders_start, holders: That list for each group, as ranges of `holders`.
        group, taker: Pairs by ascending group; every taker misses the bytes of its group.
        apart: No byte is in two groups.
    """

    n_bytes: IntArray
    holders_start: IntArray
    holders: IntArray
    group: IntArray
    taker: IntArray
    apart: bool


def demand_of(atoms: Atoms, item_bytes: IntArray) -> Demand:
    """The demand of a pair of layouts; groups that nobody misses are left out."""
    held, wanted, n_bytes = atoms.demand(item_bytes)
    start, values = atoms.lists.start, atoms.lists.values
    # one number per (list, rank), so that membership is one np.isin
    width = int(values.max(initial=0)) + 1
    there = np.repeat(np.arange(len(start) - 1), np.diff(start)) * width + values
    many = (start[1:] - start[:-1])[wanted]
    taker, group = values[positions(start, wanted)], np.repeat(np.arange(len(held)), many)
    # who holds the bytes already takes nothing
    missing = ~np.isin(held[group] * width + taker, there)
    taker, group = taker[missing], group[missing]
    used = distinct(group)
    number = np.zeros(len(held), np.int64)
    number[used] = np.arange(len(used))
    lengths = (start[1:] - start[:-1])[held[used]]
    return Demand(
        n_bytes[used], starts(lengths), values[positions(start, held[used])], number[group], taker, atoms.apart
    )


def least_s(demand: Demand, nodes: IntArray, rates: Rates) -> float:
    """Seconds below which no plan gets, whoever forwards what, if it keeps to two rules.

    What a rank of a node holds comes from within the node. Ranks send on only what they miss themselves. So what no
    rank of a node holds enters it at least once, by a rank that misses it. It leaves its holders at least once. Each
    of these is shared out among the ports that it can pass so that the busiest one is least busy: a linear program.

    Args:
        demand: Who holds and who misses what.
        nodes: The node of every rank [P].
        rates: Of the ports; latencies and hosts are left out.
    """
    ranks, n_bytes, group, taker = len(nodes), demand.n_bytes, demand.group, demand.taker
    if not len(group):
        return 0.0
    ports, width = np.bincount(nodes), int(nodes.max()) + 1
    if not demand.apart:
        # groups overlap: the same bytes would count twice at a sender, so only what each rank receives is a bound
        of_rank = np.where(ports[nodes] > 1, rates.intra_bytes_per_s, 0.0) + rates.inter_bytes_per_s
        return float((np.bincount(taker, n_bytes[group], ranks) / of_rank).max())
    held = np.repeat(np.arange(len(n_bytes)), np.diff(demand.holders_start))
    has, wants = held * width + nodes[demand.holders], group * width + nodes[taker]
    # pairs whose bytes no rank of the taker's node holds
    far = ~np.isin(wants, has)
    # holders whose bytes must leave their node for somebody
    outgoing = np.isin(held, group[far])
    near = np.isin(has, wants[~far])
    # They get it near a holder, and may send it out of the node
    also = ~far & np.isin(group, group[far])
    intra, inter = rates.intra_bytes_per_s, rates.inter_bytes_per_s
    # What passes, bytes of which group, by which rank it can, at which rate
    passes = [
        # in, within the node: each taker receives its own
        (group[~far] * ranks + taker[~far], group[~far], taker[~far], intra),
        # in, from outside: once per node, by any of its takers
        (wants[far], group[far], taker[far], inter),
        # out, within the node: once per node, by any of its holders
        (has[near], held[near], demand.holders[near], intra),
        (
            np.concatenate([held[outgoing], group[also]]),
            np.concatenate([held[outgoing], group[also]]),
            np.concatenate([demand.holders[outgoing], taker[also]]),
            inter,
        ),
    ]
    seconds: list[FloatArray] = []
    lengths: list[IntArray] = []
    values: list[IntArray] = []
    for k, (key, what, rank, rate) in enumerate(passes):
        # ports of one key stand together: each key is one share of the linear program
        order = np.lexsort([rank, key])
        lengths.append(np.bincount(np.unique(key, return_inverse=True)[1]))
        seconds.append(n_bytes[what[order][starts(lengths[-1])[:-1]]] / rate)
        values.append(k * ranks + rank[order])
    return _least_busy(np.concatenate(seconds), starts(np.concatenate(lengths)), np.concatenate(values))


def _least_busy(seconds: FloatArray, start: IntArray, ports: IntArray) -> float:
    """Seconds of the busiest port if each of these is shared out among its list of ports as well as can be.

    Of more than `MOST_VARIABLES` shares, those of the longest lists are left out, which makes the bound no larger.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    # equal lists of ports are one variable set: their seconds are added up
    number, first = numbered_lists(ports, start)
    total, many = np.bincount(number, seconds), np.diff(start)[first]
    # what can pass one port alone needs no choice
    one = many == 1
    alone = np.bincount(ports[start[first[one]]], total[one], int(ports.max()) + 1)
    rest = np.flatnonzero(~one)
    rest = rest[np.argsort(many[rest], kind="stable")]
    # leaving work out can only lower the bound, which stays true
    rest = rest[np.cumsum(many[rest]) <= MOST_VARIABLES]
    if not len(rest):
        return float(alone.max())
    port, at = np.unique(ports[positions(start, first[rest])], return_inverse=True)
    share, scale = np.arange(len(at)), max(float(total.max()), float(alone.max()))
    loads = csr_array(
        (
            # per port: shares that pass it + what it must pass anyway <= the maximum (the last variable)
            np.concatenate([np.ones(len(at)), -np.ones(len(port))]),
            (np.concatenate([at, np.arange(len(port))]), np.concatenate([share, np.full(len(port), len(at))])),
        )
    )
    sums = csr_array(
        (np.ones(len(at)), (np.repeat(np.arange(len(rest)), many[rest]), share)), shape=(len(rest), len(at) + 1)
    )
    cost = np.zeros(len(at) + 1)
    cost[-1] = 1.0
    found = linprog(cost, A_ub=loads, b_ub=-alone[port] / scale, A_eq=sums, b_eq=total[rest] / scale, method="highs")
    if found.status != 0:
        raise SpecError(f"the linear program of a switch has no solution: {found.message}")
    return max(float(found.x[-1] * scale), float(alone.max()))


def least_direct_s(demand: Demand, nodes: IntArray, rates: Rates) -> float | None:
    """Seconds below which no plan without forwarding gets: a linear program over ports.

    Every holder may send any share of what a rank misses, those of its node alone if there are any. The largest load
    of a port over its rate is minimised.

    Args:
        demand: Who holds and who misses what.
        nodes: The node of every rank [P].
        rates: Of the ports; latencies and hosts are left out.

    Returns:
        Seconds; None for a program of more than `MOST_VARIABLES` shares.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    ranks, rows = len(nodes), len(demand.group)
    many = np.diff(demand.holders_start)[demand.group]
    if not rows:
        return 0.0
    if int(many.sum()) > MOST_VARIABLES:
        return None
    row = np.repeat(np.arange(rows), many)
    source = demand.holders[positions_of(demand.holders_start[demand.group], many)]
    target = demand.taker[row]
    far = (nodes[source] != nodes[target]).astype(np.int64)
    # a holder in the node serves its node: the slow links are left to who has none
    some_near = np.bincount(row, 1 - far, rows) > 0
    kept = (far == 0) | ~some_near[row]
    row, source, target, far = row[kept], source[kept], target[kept], far[kept]
    # ports: out of rank r at 2 r (+ 1 for far), in at 2 P + 2 r (+ 1)
    rate = np.where(np.arange(4 * ranks) % 2, rates.inter_bytes_per_s, rates.intra_bytes_per_s)
    port_out, port_in = 2 * source + far, 2 * ranks + 2 * target + far
    needed = demand.n_bytes[demand.group].astype(np.float64)
    scale = needed.max()
    variables = len(row)
    column = np.arange(variables)
    loads = csr_array(
        (
            # loads - maximum x rate <= 0; both are scaled to about 1, for the solver
            np.concatenate([np.ones(2 * variables), -rate / rate.max()]),
            (
                np.concatenate([port_out, port_in, np.arange(4 * ranks)]),
                np.concatenate([column, column, np.full(4 * ranks, variables)]),
            ),
        ),
        shape=(4 * ranks, variables + 1),
    )
    sums = csr_array((np.ones(variables), (row, column)), shape=(rows, variables + 1))
    cost = np.zeros(variables + 1)
    cost[-1] = 1.0
    found = linprog(cost, A_ub=loads, b_ub=np.zeros(4 * ranks), A_eq=sums, b_eq=needed / scale, method="highs")
    if found.status != 0:
        raise SpecError(f"the linear program of a switch has no solution: {found.message}")
    return float(found.x[-1] * scale / rate.max())
