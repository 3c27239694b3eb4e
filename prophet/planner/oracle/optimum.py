"""The optimum of the performance model, exact for small cases (MILP).

Shape legend: R ranks, E experts, D destination ranks (equal to R).

The mixed-integer program chooses replicas and tokens together and contains every term of `model.cost.step_cost`.
Tokens are continuous in it, so its optimum is a lower bound that whole tokens miss by at most a rounding. Times are
counted in those of level forward products: the solver's tolerances are absolute, and a step may take microseconds.
Needs scipy.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from prophet.errors import SpecError
from prophet.spec import FormName, IntArray, Link, Placement, PlanContext, Windows, check_load

# The solver's status
INFEASIBLE = 2
# A known step may be exceeded by this share, so that the solver still finds that step in spite of its tolerances
SLACK = 1e-3

Terms = dict[int, float]


@dataclass(frozen=True, eq=False, slots=True)
class Optimum:
    """The best placement that the solver found.

    Attributes:
        seconds: Its predicted step.
        bound: Seconds that no placement can beat, proven.
        placement: The placement.
    """

    seconds: float
    bound: float
    placement: Placement


@dataclass(slots=True)
class _Program:
    """A minimisation under construction, row by row."""

    price: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    rows: list[Terms] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def variable(self, *, price: float = 0.0, upper: float = np.inf, integer: bool = False) -> int:
        self.price.append(price)
        self.upper.append(upper)
        self.integer.append(int(integer))
        return len(self.price) - 1

    def require(self, terms: Terms, *, low: float = -np.inf, high: float = np.inf) -> None:
        self.rows.append(terms)
        self.low.append(low)
        self.high.append(high)

    def solve(self, time_limit_s: float) -> Any:
        # Imported here: nothing else in the planner needs scipy
        from scipy import optimize, sparse

        row = [i for i, terms in enumerate(self.rows) for _ in terms]
        column = [c for terms in self.rows for c in terms]
        value = [v for terms in self.rows for v in terms.values()]
        matrix = sparse.csr_matrix((value, (row, column)), shape=(len(self.rows), len(self.price)))
        return optimize.milp(
            np.array(self.price),
            integrality=np.array(self.integer),
            bounds=optimize.Bounds(0.0, np.array(self.upper)),
            constraints=optimize.LinearConstraint(matrix, np.array(self.low), np.array(self.high)),
            options={"time_limit": time_limit_s, "mip_rel_gap": 1e-4},
        )


def _plus(*parts: tuple[Terms, float]) -> Terms:
    """Add linear expressions, each times its factor."""
    total: Terms = {}
    for terms, factor in parts:
        for variable, value in terms.items():
            total[variable] = total.get(variable, 0.0) + factor * value
    return total


def _exchange(
    program: _Program, moved: dict[tuple[int, int], Terms], context: PlanContext, unit_bytes: float, most: float
) -> Terms:
    """Add a variable that is at least as long as an exchange (Eq. 1, with levels and latencies).

    Args:
        program: The program.
        moved: Pieces from rank r to rank d, by (r, d).
        context: The machine.
        unit_bytes: Bytes of a piece.
        most: A bound on all pieces together.

    Returns:
        The variable, as an expression.
    """
    topology = context.topology
    time = program.variable()
    levels: tuple[tuple[Link, bool], ...] = ((topology.intra, True), (topology.inter, False))
    for link, same_node in levels:
        pairs = {
            pair: terms
            for pair, terms in moved.items()
            if terms and (topology.node_of(pair[0]) == topology.node_of(pair[1])) == same_node
        }
        if not pairs:
            continue
        latency: Terms = {}
        if link.latency_s > 0:
            # 1 where anything moves over this level: only then its latency counts
            active = program.variable(upper=1.0, integer=True)
            everything = _plus(*((terms, 1.0) for terms in pairs.values()))
            program.require(_plus((everything, 1.0), ({active: 1.0}, -most)), high=0.0)
            latency = {active: link.latency_s}

        # What a link or a port has to carry before the exchange ends, with its rate
        carried: list[tuple[list[Terms], float]] = []
        for end, rank in itertools.product((0, 1), range(topology.ranks)):
            carried.append(([terms for pair, terms in pairs.items() if pair[end] == rank], link.bytes_per_s))
        if topology.port_bytes_per_s is not None and not same_node:
            for end, node in itertools.product((0, 1), range(topology.nodes)):
                mine = [terms for pair, terms in pairs.items() if topology.node_of(pair[end]) == node]
                carried.append((mine, topology.port_bytes_per_s))
        for mine, rate in carried:
            if mine:
                total = _plus(*((terms, unit_bytes / rate) for terms in mine))
                program.require(_plus((total, 1.0), (latency, 1.0), ({time: 1.0}, -1.0)), high=0.0)
    return {time: 1.0}


def _build(
    load: IntArray, context: PlanContext, forms: tuple[FormName, FormName]
) -> tuple[_Program, dict[tuple[int, int], int]]:
    """Build the program in which Trans and Agg take given forms.

    Args:
        load: Tokens [R, E].
        context: The machine and the layer, with times in a unit that suits the solver.
        forms: Of Trans and of Agg: "direct", "two-phase", which stands for node-once too, or "spread".

    Returns:
        The program, and its replica variables by expert and rank.
    """
    program = _Program()
    ranks, experts = load.shape
    topology, shape = context.topology, context.shape
    total = load.sum(axis=0)
    tokens_all = float(total.sum())
    limits = np.minimum(context.slot_limits(), experts)
    copy: dict[tuple[int, int], int] = {}
    for e, r in itertools.product(range(experts), range(ranks)):
        if r != context.home[e] and limits[r] > 0 and total[e] > 0:
            copy[e, r] = program.variable(upper=1.0, integer=True)
    # Slots
    for r in range(ranks):
        held = {v: 1.0 for (_, rank), v in copy.items() if rank == r}
        if held:
            program.require(held, high=float(limits[r]))
    moved: dict[tuple[int, int], Terms] = {}
    computed: list[Terms] = [{} for _ in range(ranks)]
    overhead = topology.expert_overhead_s
    for e in range(experts):
        homeward: Terms = {}
        for r in map(int, np.flatnonzero(load[:, e])):
            here = float(load[r, e])
            parts: Terms = {}
            for d in range(ranks):
                if d != context.home[e] and (e, d) not in copy:
                    continue
                x = program.variable(upper=here)
                parts[x] = 1.0
                computed[d][x] = shape.forward_flops_per_token / topology.flops_per_s[d]
                if d == context.home[e]:
                    homeward[x] = 1.0
                else:
                    # Tokens go to a rank only if it has a replica
                    program.require({x: 1.0, copy[e, d]: -here}, high=0.0)
                if d != r:
                    moved.setdefault((r, d), {})[x] = 1.0
            program.require(parts, low=here, high=here)
        # A rank pays the fixed cost of an expert that it computes; a replica is taken to be used
        if overhead > 0 and homeward:
            active = program.variable(upper=1.0, integer=True)
            program.require(_plus((homeward, 1.0), ({active: 1.0}, -float(total[e]))), high=0.0)
            computed[context.home[e]][active] = overhead
            for d in range(ranks):
                if (e, d) in copy:
                    computed[d][copy[e, d]] = overhead
    # Eq. 2 and 3: one forward product and two for the backward pass, of the slowest rank
    forward = program.variable(price=3.0)
    for d in range(ranks):
        if computed[d]:
            program.require(_plus((computed[d], 1.0), ({forward: 1.0}, -1.0)), high=0.0)
    a2a = _exchange(program, moved, context, shape.token_bytes, tokens_all)
    # Four all-to-alls per step
    for variable in a2a:
        program.price[variable] = 4.0
    # Without levels there is one choice of groups, and one set of variables is enough
    if context.topology.has_levels:
        trans, agg = (_transfers(program, copy, context, form) for form in forms)
    else:
        trans = agg = _transfers(program, copy, context, "two-phase" if "two-phase" in forms else "direct")
    under = context.windows
    # The share of the forward products that runs beside Trans: all or nothing
    beside = float(under.experts)
    trans_s, agg_s = (beside, under.fnec_s), (2.0 * beside, under.bnec_s)
    trans_windows = ((beside, 0.0), (0.0, under.fnec_s)) if under.experts else ((0.0, under.fnec_s), (0.0, 0.0))
    agg_windows = ((0.0, under.bnec_s), (2.0 * beside, 0.0))
    most, taken = float(max(1, len(copy))) * ranks, topology.overlap_cost
    # Of what is spread, scattered and gathered
    sizes = (context.trans_bytes,) * 3, (context.agg_sum_bytes, context.agg_sum_bytes, context.agg_bytes)
    directly = (context.trans_bytes, trans_s, trans_windows), (context.agg_bytes, agg_s, agg_windows)
    for i, (form, (direct, *hops)) in enumerate(zip(forms, (trans, agg), strict=True)):
        n_bytes, whole, windows = directly[i]
        phases = [([(direct, n_bytes)], whole)]
        if form != "direct":
            # Spread, where there are relays, scatter and gather; of Agg in reverse order
            moved_in_order = [*zip(hops, sizes[i], strict=True)][form != "spread" :][:: 1 - 2 * i]
            phases = [(moved_in_order[:-1], windows[0]), (moved_in_order[-1:], windows[1])]
        for exchanges, (factor, window_s) in phases:
            # Eq. 8, with an overlap cost t: exposed >= time - (1 - t) * window, and exposed >= t * time
            exposed = program.variable(price=1.0)
            time = _plus(*((_exchange(program, pieces, context, n, most), 1.0) for pieces, n in exchanges))
            cover = {forward: factor * (1.0 - taken), exposed: 1.0}
            program.require(_plus((time, 1.0), (cover, -1.0)), high=window_s * (1.0 - taken))
            if taken > 0:
                program.require(_plus((time, taken), ({exposed: 1.0}, -1.0)), high=0.0)
    return program, copy


def _transfers(
    program: _Program, copy: dict[tuple[int, int], int], context: PlanContext, form: FormName
) -> tuple[dict[tuple[int, int], Terms], ...]:
    """Describe the copies moved from rank to rank: directly, spread over relays, scattered, gathered among receivers.

    In two phases the solver may choose every expert's groups: all replicas, or those of every node. In the spread form
    it may choose relays as well. All forms of the model are among these choices, so the optimum bounds them.

    Args:
        program: Gets the variables that two phases need.
        copy: Replica variables by expert and rank.
        context: The homes.
        form: Of the transfer; where it is direct, only the first is not empty.
    """
    direct: dict[tuple[int, int], Terms] = {}
    spread: dict[tuple[int, int], Terms] = {}
    scatter: dict[tuple[int, int], Terms] = {}
    gather: dict[tuple[int, int], Terms] = {}
    by_expert: dict[int, list[tuple[int, int]]] = {}
    for (e, r), v in copy.items():
        direct.setdefault((context.home[e], r), {})[v] = 1.0
        by_expert.setdefault(e, []).append((r, v))
    if form == "direct":
        return direct, spread, scatter, gather
    topology = context.topology
    relayed: Terms = {}
    for e, receivers in by_expert.items():
        home = context.home[e]
        nodes: dict[int, list[tuple[int, int]]] = {}
        for r, v in receivers:
            nodes.setdefault(topology.node_of(r), []).append((r, v))
        not_together: Terms = {}
        if form == "spread" and any(node != topology.node_of(home) for node in nodes):
            # 1 where relays send its parts
            by_relays = program.variable(upper=1.0, integer=True)
            not_together[by_relays] = relayed[by_relays] = 1.0
            _relay(program, home, nodes, by_relays, context, (spread, scatter, gather))
        if len(nodes) > 1 and max(map(len, nodes.values())) > 1:
            # 1 where the groups are those of every node
            once = program.variable(upper=1.0, integer=True)
            not_together[once] = 1.0
            for found in nodes.values():
                _group(program, home, found, {once: 1.0}, scatter, gather)
        if len(not_together) > 1:
            program.require(not_together, high=1.0)
        _group(program, home, receivers, dict.fromkeys(not_together, -1.0), scatter, gather)
    for v in copy.values() if form == "spread" else ():
        # Without any relays it would be another form, whose phases have other windows
        program.require(_plus(({v: 1.0}, 1.0), (relayed, -1.0)), high=0.0)
    return direct, spread, scatter, gather


def _relay(
    program: _Program,
    home: int,
    nodes: dict[int, list[tuple[int, int]]],
    by_relays: int,
    context: PlanContext,
    moved: tuple[dict[tuple[int, int], Terms], ...],
) -> None:
    """Add what the relays of an expert are sent, and send, and what is gathered from their carriers.

    Args:
        program: Gets the variables.
        home: The expert's home.
        nodes: Ranks that may have a replica, with its variable, by node.
        by_relays: The variable that is 1 where there are relays.
        context: The machine.
        moved: Gets pieces spread, scattered and gathered.
    """
    topology = context.topology
    own = topology.node_of(home)
    relays, (spread, scatter, gather) = topology.ranks_of(own), moved
    any_far: Terms = {v: 1.0 for node, found in nodes.items() if node != own for _, v in found}
    # Relays are for what crosses
    program.require(_plus(({by_relays: 1.0}, 1.0), (any_far, -1.0)), high=0.0)
    for relay in relays:
        if relay != home:
            spread.setdefault((home, relay), {})[by_relays] = 1.0 / len(relays)
    for node, found in nodes.items():
        ranks = topology.ranks_of(node)
        carriers = [ranks[j % len(ranks)] for j in range(len(relays))]
        reached = program.variable(upper=1.0)
        for rank, v in found:
            receives = program.variable(upper=1.0)
            program.require({v: 1.0, by_relays: 1.0, receives: -1.0}, high=1.0)
            program.require({receives: 1.0, reached: -1.0}, high=0.0)
            for carrier in carriers:
                if carrier != rank:
                    terms = gather.setdefault((carrier, rank), {})
                    terms[receives] = terms.get(receives, 0.0) + 1.0 / len(relays)
        for relay, carrier in zip(relays, carriers, strict=True) if node != own else ():
            scatter.setdefault((relay, carrier), {})[reached] = 1.0 / len(relays)


def _group(
    program: _Program,
    home: int,
    receivers: list[tuple[int, int]],
    where: Terms,
    scatter: dict[tuple[int, int], Terms],
    gather: dict[tuple[int, int], Terms],
) -> None:
    """Add what the receivers of a group are sent, and what they exchange.

    Args:
        program: Gets the variables.
        home: The expert's home.
        receivers: Ranks that may have a replica, with its variable.
        where: Where it is a group: a variable is 1, or with the factor -1 it is 0; empty for always.
        scatter: Gets pieces from the home.
        gather: Gets pieces among the receivers.
    """
    # How many variables have to be 1 beside a second rank's
    factors = 1.0 + sum(value > 0.0 for value in where.values())
    # chosen[n] is 1 where the group has n replicas; products of binaries are linear with one variable each
    chosen = [program.variable(upper=1.0, integer=True) for _ in range(len(receivers) + 1)]
    program.require(dict.fromkeys(chosen, 1.0), low=1.0, high=1.0)
    program.require(
        _plus(({v: 1.0 for _, v in receivers}, 1.0), ({c: float(n) for n, c in enumerate(chosen)}, -1.0)),
        low=0.0,
        high=0.0,
    )
    for r, v in receivers:
        for n in range(1, len(chosen)):
            part = program.variable(upper=1.0)
            program.require({v: 1.0, chosen[n]: 1.0, part: -1.0} | where, high=factors)
            scatter.setdefault((home, r), {})[part] = 1.0 / n
    for (r, v), (q, w) in itertools.combinations(receivers, 2):
        for n in range(2, len(chosen)):
            part = program.variable(upper=1.0)
            program.require({v: 1.0, w: 1.0, chosen[n]: 1.0, part: -1.0} | where, high=factors + 1.0)
            gather.setdefault((r, q), {})[part] = 1.0 / n
            gather.setdefault((q, r), {})[part] = 1.0 / n


def _counted_in(unit_s: float, context: PlanContext) -> PlanContext:
    """Return the context with all times counted in units of `unit_s` seconds."""
    topology, windows = context.topology, context.windows
    port = topology.port_bytes_per_s

    def link(of: Link) -> Link:
        return Link(bytes_per_s=of.bytes_per_s * unit_s, latency_s=of.latency_s / unit_s)

    return replace(
        context,
        topology=replace(
            topology,
            intra=link(topology.intra),
            inter=link(topology.inter),
            port_bytes_per_s=port and port * unit_s,
            flops_per_s=tuple(rate * unit_s for rate in topology.flops_per_s),
            expert_overhead_s=topology.expert_overhead_s / unit_s,
        ),
        windows=Windows(fnec_s=windows.fnec_s / unit_s, bnec_s=windows.bnec_s / unit_s, experts=windows.experts),
    )


def solve_exactly(
    load: IntArray,
    context: PlanContext,
    *,
    within: Placement | None = None,
    known_s: float = np.inf,
    time_limit_s: float = 60.0,
) -> Optimum:
    """Find the placement and split with the smallest predicted step; for up to about 8 ranks x 16 experts.

    Args:
        load: Tokens [R, E].
        context: The machine and the layer.
        within: Allows only the replicas of this placement, so that the best split over it is found.
        known_s: Seconds of a step that is known to be possible; longer ones are not searched.
        time_limit_s: Seconds for each combination of forms. `Optimum.bound` is proven even where it stops
            the solver.

    Raises:
        SpecError: Where sizes disagree.
    """
    load = check_load(load)
    if load.shape != (context.ranks, context.experts):
        raise SpecError(f"load must be [{context.ranks}, {context.experts}], got {list(load.shape)}")
    if within is not None and (within.experts, within.ranks) != (context.experts, context.ranks):
        raise SpecError(f"`within` is for {within.experts} experts x {within.ranks} ranks, load is {list(load.shape)}")
    # The solver's tolerances are absolute, so times are counted in those of level forward products
    unit_s = float(load.sum()) * context.shape.forward_flops_per_token / sum(context.topology.flops_per_s) or 1.0
    counted, cutoff = _counted_in(unit_s, context), known_s / unit_s * (1.0 + SLACK)
    best = Optimum(np.inf, np.inf, context.homes_only())
    topology = context.topology
    names: list[FormName] = ["direct", "two-phase"]
    # One rank that fills its node's port needs no relays
    names += ["spread"] * (topology.has_levels and topology.port_share < 1.0)
    for forms in itertools.product(names, names):
        program, copy = _build(load, counted, forms)
        if within is not None:
            for (e, r), v in copy.items():
                program.upper[v] = float(within.holds[e, r])
        if cutoff < np.inf:
            program.require({i: price for i, price in enumerate(program.price) if price}, high=cutoff)
        solved = program.solve(time_limit_s)
        bound = 0.0 if solved.mip_dual_bound is None else float(solved.mip_dual_bound)
        # No step below the cutoff in this form: the cutoff itself is the bound
        bound = cutoff if solved.status == INFEASIBLE else min(bound, cutoff)
        best = replace(best, bound=min(best.bound, bound * unit_s))
        if solved.x is not None and solved.fun * unit_s < best.seconds:
            replicas = [pair for pair, v in copy.items() if solved.x[v] > 0.5]
            placement = Placement.with_replicas(context.home, context.ranks, replicas)
            best = replace(best, seconds=float(solved.fun) * unit_s, placement=placement)
            cutoff = min(cutoff, float(solved.fun))
    return best
