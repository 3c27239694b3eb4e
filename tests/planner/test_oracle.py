"""The oracle bounds every planner from below, and its own placement reaches its bound where tokens are many."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from prophet.errors import SpecError
from prophet.machine.presets import CLUSTERS, PRESET_NAMES, get_preset
from prophet.planner import get_planner
from prophet.planner.model.cost import step_cost
from prophet.spec import IntArray, Placement, PlanContext, check_load

pytest.importorskip("scipy")


def lower_bound(load: IntArray, context: PlanContext) -> float:
    """Seconds that no placement and split can beat: the oracle's program with free transfers, without integers."""
    from prophet.planner.oracle.optimum import Terms, _exchange, _plus, _Program

    # A linear program over tokens from rank to rank. Rank r can keep local at most its tokens for its own experts and
    # for the heaviest others that its slots can hold.
    load = check_load(load)
    ranks = load.shape[0]
    home = np.asarray(context.home)
    limits = np.minimum(context.slot_limits(), context.experts)
    program = _Program()
    computed: list[Terms] = [{} for _ in range(ranks)]
    moved: dict[tuple[int, int], Terms] = {}
    for r in range(ranks):
        others = np.sort(load[r, home != r])[::-1]
        local = float(load[r, home == r].sum() + others[: limits[r]].sum())
        parts: Terms = {}
        for d in range(ranks):
            x = program.variable(upper=local if d == r else np.inf)
            parts[x] = 1.0
            computed[d][x] = context.shape.forward_flops_per_token / context.topology.flops_per_s[d]
            if d != r:
                moved[r, d] = {x: 1.0}
        program.require(parts, low=float(load[r].sum()), high=float(load[r].sum()))
    forward = program.variable(price=3.0)
    for d in range(ranks):
        program.require(_plus((computed[d], 1.0), ({forward: 1.0}, -1.0)), high=0.0)
    for level_time in _exchange(program, moved, context, context.shape.token_bytes, float(load.sum())):
        program.price[level_time] = 4.0
    # Without integers it is a linear program; latencies then count in part, which keeps it a bound
    program.integer = [0] * len(program.integer)
    return float(program.solve(60.0).fun)


# every term of the model on one machine; the others with all of them
MACHINES = [
    pytest.param(name, cost, experts, marks=[] if name.startswith("hpwnv") or (cost and experts) else pytest.mark.slow)
    for name in ("hpwnv:MoE-GPT-L", "h100-nvlink:Mixtral-8x7B", "gloo-loopback")
    for cost, experts in ((0.0, True), (0.3, True), (0.0, False), (0.3, False))
]


@pytest.mark.parametrize(("name", "overlap_cost", "experts"), MACHINES)
def test_no_planner_beats_the_oracle(name: str, overlap_cost: float, experts: bool) -> None:
    from prophet.planner.oracle.optimum import solve_exactly

    rng = np.random.default_rng(3)
    load = rng.multinomial(4096, rng.dirichlet(np.full(4, 0.4)), size=4).astype(np.int64)
    context = get_preset(name).context(4, 4, routed_per_rank=4096, slots_per_rank=2)
    topology = dataclasses.replace(context.topology, overlap_cost=overlap_cost)
    context = dataclasses.replace(
        context, topology=topology, windows=dataclasses.replace(context.windows, experts=experts)
    )
    best = solve_exactly(load, context, time_limit_s=20)
    assert best.bound <= best.seconds * (1 + 1e-3)
    assert lower_bound(load, context) <= best.bound * (1 + 1e-6)
    split = get_planner("prophet", split_effort=10.0).split(load, best.placement, context)
    assert step_cost(split, best.placement, context).total_s <= 1.03 * best.seconds, "it is what the model says"
    for policy in ("prophet", "static", "top2", "pro-prophet", "eplb"):
        planner = get_planner(policy)
        placement = planner.place(load, context)
        seconds = step_cost(planner.split(load, placement, context), placement, context).total_s
        assert seconds >= best.bound * (1 - 1e-6)


@pytest.mark.parametrize("port", [0.5, 1.0, 1.5])
def test_the_oracle_knows_ports(port: float) -> None:
    """Of two nodes of two ranks: its seconds are the model's of its placement, and no planner is below its bound."""
    from prophet.planner.oracle.optimum import solve_exactly

    rng = np.random.default_rng(5)
    load = rng.multinomial(4096, rng.dirichlet(np.full(4, 0.4)), size=4).astype(np.int64)
    context = get_preset("a100-ib:DeepSeek-V3").context(4, 4, routed_per_rank=4096, slots_per_rank=2)
    link = context.topology.inter
    topology = dataclasses.replace(context.topology, ranks_per_node=2, port_bytes_per_s=port * link.bytes_per_s)
    context = dataclasses.replace(context, topology=topology)
    best = solve_exactly(load, context, time_limit_s=20)
    assert lower_bound(load, context) <= best.bound * (1 + 1e-6)
    assert best.bound <= best.seconds * (1 + 1e-3)
    split = get_planner("prophet", split_effort=10.0).split(load, best.placement, context)
    assert step_cost(split, best.placement, context).total_s == pytest.approx(best.seconds, rel=0.02)
    for policy in ("prophet", "static", "top2", "pro-prophet"):
        planner = get_planner(policy)
        placement = planner.place(load, context)
        seconds = step_cost(planner.split(load, placement, context), placement, context).total_s
        assert seconds >= best.bound * (1 - 1e-6)
    fewer = dataclasses.replace(context, topology=dataclasses.replace(topology, port_bytes_per_s=None))
    assert solve_exactly(load, fewer, time_limit_s=20).seconds < best.seconds, "the port is what it waits for"


def test_the_timed_split_comes_close_to_the_best_one() -> None:
    """Exchange-bound cases, half of them on two nodes: where the lowest bottleneck alone is far from the best."""
    from prophet.planner.oracle.optimum import solve_exactly

    timed, exact = [], []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        ranks = (4, 6)[seed % 2]
        load = np.stack([rng.multinomial(4096, rng.dirichlet(np.full(ranks, 0.5))) for _ in range(ranks)])
        load = load.astype(np.int64)
        name = ("hpwnv:MoE-GPT-M", "h100-ib:Qwen3-30B-A3B", "a100-ib:DeepSeek-V3")[seed % 3]
        context = get_preset(name).context(ranks, ranks, routed_per_rank=4096, slots_per_rank=2)
        if seed % 4 < 2:
            topology = dataclasses.replace(context.topology, ranks_per_node=ranks // 2)
            context = dataclasses.replace(context, topology=topology)
        planned = get_planner("prophet").place(load, context)
        best = solve_exactly(load, context, within=planned, time_limit_s=20)
        placement = best.placement  # without replicas that only cost
        for gaps, effort in ((timed, 10.0), (exact, 0.0)):
            split = get_planner("prophet", split_effort=effort).split(load, placement, context)
            gaps.append(step_cost(split, placement, context).total_s / best.seconds - 1)
    assert min(timed) >= -1e-3
    assert np.median(timed) <= 0.005
    assert max(timed) <= 0.03
    assert max(exact) > 0.2  # the cases are such that it matters


def test_the_best_split_uses_the_given_replicas_only() -> None:
    from prophet.planner.oracle.optimum import solve_exactly

    load = np.array([[4000, 50], [4000, 50]], dtype=np.int64)
    context = get_preset("gloo-loopback").context(2, 2, routed_per_rank=4050, slots_per_rank=1)
    homes = context.homes_only()
    none = solve_exactly(load, context, within=homes, time_limit_s=20)
    static = step_cost(get_planner("static").split(load, homes, context), homes, context).total_s
    assert none.seconds == pytest.approx(static, rel=1e-6)
    assert solve_exactly(load, context, time_limit_s=20).seconds < 0.8 * static
    with pytest.raises(SpecError, match="`within` is for 3 experts"):
        solve_exactly(load, context, within=Placement.with_replicas((0, 1, 1), 2, ()))


@pytest.mark.parametrize("name", CLUSTERS)
def test_presets_share_a_port_or_have_a_card_per_rank(name: str) -> None:
    """A rank that crosses alone has all of a shared port, and its part of it where all cross."""
    topology = CLUSTERS[name].topology(16)
    if name in ("hpwnv", "hpnv", "lpwnv", "ethernet-25g"):
        assert topology.port_bytes_per_s == topology.inter.bytes_per_s
        assert topology.even_inter.bytes_per_s == pytest.approx(topology.inter.bytes_per_s / topology.ranks_per_node)
    else:
        assert topology.port_bytes_per_s is None


def test_presets_build_and_unknown_ones_are_refused() -> None:
    for name in PRESET_NAMES:
        context = get_preset(name).context(16, 32, routed_per_rank=4096)
        assert context.windows.bnec_s == pytest.approx(2 * context.windows.fnec_s)
        assert get_preset(name).name == name
    with pytest.raises(SpecError, match="no preset"):
        get_preset("tpu")
    with pytest.raises(SpecError, match="no model"):
        get_preset("hpwnv:Llama")
