"""`EngineConfig(topology="auto")`: a group measures its machine once, remembers it, and a checkpoint carries it."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import prophet
from prophet.engine import engine
from prophet.experts.feed_forward import FeedForwardBank
from prophet.files import cache_folder
from prophet.machine import auto
from prophet.machine.fit import Point
from prophet.machine.measure import Measured, Ranges, measure_experts
from prophet.machine.topology import read_topology, write_topology
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for
from prophet.ranks.threads import ThreadWorld
from prophet.scheduler.recording import ObservedCollective
from prophet.spec import Link, Topology
from tests.helpers.launch import on_processes

OLD_S = 30 * 24 * 3600.0


def bank(dim: int = 16, hidden: int = 32, experts: int = 2) -> FeedForwardBank:
    return FeedForwardBank(dim, hidden, experts)


def used_twice(home: str) -> list[Any]:
    os.environ["HOME"] = home
    group, experts = collective_for(None), bank()
    drawn = torch.get_rng_state()
    with torch.no_grad():
        first = auto.topology_of(group, experts)
    auto._measure = _never  # type: ignore[assignment]
    again = auto.topology_of(group, experts)
    # the user's random numbers are those of a run without
    assert torch.equal(torch.get_rng_state(), drawn)
    group.close()
    return [first, again]


def _never(*_: object) -> Any:
    raise AssertionError("it is remembered")


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_machine_is_measured_once_and_then_remembered(tmp_path: Path, ranks: int) -> None:
    found = [t for rank in on_processes(ranks, used_twice, str(tmp_path)) for t in rank]
    assert all(t == found[0] for t in found)
    (file,) = (tmp_path / ".cache" / "moe-prophet").iterdir()
    assert read_topology(file) == found[0]
    assert (found[0].ranks, found[0].ranks_per_node, found[0].nodes) == (ranks, ranks, 1)
    # of any machine that runs these tests
    assert 1e5 < found[0].intra.bytes_per_s < 1e12
    assert all(1e6 < f < 1e14 for f in found[0].flops_per_s)
    assert 0 < found[0].trans_rate <= 1 >= found[0].agg_rate > 0


def where_nothing_is_kept(home: str) -> list[Any]:
    os.environ["HOME"] = home
    group = collective_for(None, timeout_s=10.0)
    auto._measure = lambda *_: Topology.uniform(2, name="now")
    with torch.device("meta"):
        nowhere = bank()

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    found = []
    # a rank whose experts are not there yet, and then a user without a home
    for experts in (nowhere if group.rank else bank(), bank()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # wrapped, as that of a pipeline's layers is
            found.append(
                (auto.topology_of(ObservedCollective(group), experts).name, [str(w.message)[:40] for w in caught])
            )
        if group.rank == 0:
            auto.cache_folder = no_home  # type: ignore[attr-defined]
    group.close()
    return found


def test_a_user_without_a_home_and_experts_without_a_device(tmp_path: Path) -> None:
    first, other = on_processes(2, where_nothing_is_kept, str(tmp_path))
    assert other == [("uniform", []), ("now", [])]
    assert first == [
        ("uniform", ["experts on the meta device cannot be mea"]),
        ("now", ["the machine's topology cannot be kept, s"]),
    ]
    assert not list(tmp_path.iterdir())


def test_the_callers_modes_do_not_reach_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    casts = []

    def watched(*args: Any) -> Any:
        casts.append(torch.is_autocast_enabled("cpu"))
        return measure_experts(*args)

    def measured(c: Collective) -> Topology:
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu"):
            return auto._measure(c, bank(experts=1), torch.device("cpu"), 2, "here")

    monkeypatch.setattr(auto, "measure_experts", watched)
    assert [t.name for t in ThreadWorld(2).run(measured)] == ["here", "here"]
    assert not any(casts)


def test_a_transfer_takes_no_longer_than_the_exchange_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size follows from what was timed: the line of a disturbed measurement may be all but flat."""
    points = tuple(Point(size, 1, seconds) for size, seconds in ((1e5, 1e-3), (4e5, 1e-3), (1.6e6, auto._LONGEST_S)))
    moved = []

    def transfers(probe: Any, experts: FeedForwardBank, ranges: Ranges, *_: Any) -> Any:
        moved.append(ranges.halves[1] * experts.expert_numel // 2 * experts.dtype.itemsize)
        raise StopIteration

    monkeypatch.setattr(
        auto, "_links", lambda *_: {"a2a_intra": Measured("a2a_intra", "byte", points, (), np.zeros((3, 2)))}
    )
    monkeypatch.setattr(auto, "measure_transfers", transfers)

    def measured(c: Collective) -> None:
        with suppress(StopIteration):
            auto._measure(c, bank(experts=1), torch.device("cpu"), 2, "here")

    ThreadWorld(2).run(measured)
    assert len(moved) == 2
    assert all(1.4e6 < n <= 1.6e6 for n in moved)


@pytest.mark.parametrize(("alone", "port", "inter"), [(3e8, 2e8, 3e8), (1.1e8, None, 1e8)])
def test_a_port_that_a_nodes_ranks_share_is_found(
    monkeypatch: pytest.MonkeyPatch, alone: float, port: float | None, inter: float
) -> None:
    """Four ranks on two nodes; one that crosses alone is three times as fast, or about as fast."""
    rates = {"a2a_intra": 1e9, "a2a_inter": 1e8, "a2a_alone": alone, "trans": 1e8, "agg": 1e8}

    def told(operation: str, *n_bytes: float) -> Measured:
        points = tuple(Point(n, 1, n / rates[operation]) for n in n_bytes)
        return Measured(operation, "byte", points, (), np.zeros((len(points), 4)))

    def exchange(probe: Any, operation: str, peers: Any, experts: Any, ranges: Ranges, *_: Any) -> Measured:
        return told(operation, *(64.0 * rows for rows in ranges.rows))

    monkeypatch.setattr(auto, "measure_exchange", exchange)
    monkeypatch.setattr(auto, "measure_transfers", lambda *_: (told("trans", 1e5, 4e5), told("agg", 1e5, 4e5)))
    found = ThreadWorld(4).run(lambda c: auto._measure(c, bank(experts=1), torch.device("cpu"), 2, "here"))
    for t in found:
        assert (t.nodes, t.port_bytes_per_s) == (2, port and pytest.approx(port))
        assert (t.intra.bytes_per_s, t.inter.bytes_per_s) == pytest.approx((1e9, inter))
        assert t.even_inter.bytes_per_s == pytest.approx(1e8)


def changed_meanwhile(home: str) -> list[Any]:
    os.environ["HOME"] = home
    group = collective_for(None)
    now = Topology.uniform(2, flops_per_s=1e9, intra=Link(bytes_per_s=1e8), name="now")
    calls = []

    def measure(*_: object) -> Topology:
        calls.append(1)
        return now

    auto._measure = measure  # type: ignore[assignment]
    assert auto.topology_of(group, bank()) == now
    if group.rank == 0:
        (file,) = cache_folder().iterdir()
        write_topology(file, replace(now, intra=Link(bytes_per_s=2e8), inter=Link(bytes_per_s=2e8), name="then"))
        os.utime(file, (0, file.stat().st_mtime - OLD_S))
    group.roll_call(Operation("the file is old"))
    told, names = [], []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            names.append(auto.topology_of(group, bank()).name)
        told.append([str(w.message) for w in caught])
    if group.rank == 0:
        file.write_text("ranks = ")
    group.roll_call(Operation("the file is damaged"))
    names.append(auto.topology_of(group, bank()).name)
    group.close()
    return [told, names, len(calls)]


def test_a_machine_that_has_changed_is_named_once_and_still_planned_for(tmp_path: Path) -> None:
    first, other = on_processes(2, changed_meanwhile, str(tmp_path))
    # measured on first use, when the file was old, and when it was damaged
    assert first[1:] == other[1:] == [["then", "then", "now"], 3]
    assert other[0] == [[], []]
    ((message,), none) = first[0]
    assert not none
    assert "the network within a node is 0.50 of what it was; the network between nodes is 0.50" in message
    assert "compute" not in message
    assert str(tmp_path) in message


def resumed(home: str) -> list[Any]:
    os.environ["HOME"] = home
    saved = Topology.uniform(2, flops_per_s=1e9, name="where it was saved")
    engine.topology_of = lambda *_: Topology.uniform(2, name="here")  # type: ignore[attr-defined]

    def attached(**options: Any) -> prophet.Engine:
        torch.manual_seed(0)
        return prophet.attach(nn.Sequential(prophet.MoE(16, 32, 4)), config=prophet.EngineConfig(**options))

    state = attached(topology=saved).state_dict()
    names = []
    for options in ({}, {"topology": "uniform"}, {"topology": "h100-ib"}, {"planner": "static"}, {"slots_per_rank": 0}):
        balanced = attached(**options)
        names.append(balanced.contexts[0].topology.name)
        balanced.load_state_dict(state)
        names.append(balanced.contexts[0].topology.name)
        balanced.close()
    table = state["topology"]
    for wrong in ({**table, "ranks": 3}, {**table, "intra": 1}, {**table, 1: 2}, None, {}):
        balanced = attached()
        with pytest.raises(prophet.errors.SpecError, match="topology"):
            balanced.load_state_dict({**state, "topology": wrong})
        assert balanced.contexts[0].topology.name == "here"
    # of an earlier release
    state.pop("topology")
    balanced.load_state_dict(state)
    names.append(balanced.contexts[0].topology.name)
    # of a run that planned nothing, and so knew no machine
    balanced.load_state_dict(attached(planner="static").state_dict())
    return [*names, balanced.contexts[0].topology.name]


def test_a_checkpoint_carries_the_machine(tmp_path: Path) -> None:
    there = "where it was saved"
    for found in on_processes(2, resumed, str(tmp_path)):
        assert found == [
            *("here", there),
            *("uniform", "uniform"),
            *("h100-ib", "h100-ib"),
            # nothing is planned, so nothing was measured
            *("uniform", there),
            *("uniform", there),
            "here",
            "here",
        ]


def test_ranks_that_are_threads_have_nothing_to_measure() -> None:
    assert ThreadWorld(3).run(lambda c: auto.topology_of(c, bank())) == [Topology.uniform(3)] * 3
    assert auto.topology_of(collective_for(None), bank()) == Topology.uniform(1)


@pytest.mark.parametrize(
    ("places", "per_node"),
    [
        ([7, 7, 7, 7], 4),
        ([7, 7, 8, 8], 2),
        ([7, 7, 7, 8, 8], 3),
        ([7, 8, 9], 1),
        # no node by node order: every rank is a node of its own to the model
        ([7, 8, 7, 8], 1),
        ([7, 7, 8, 7], 1),
        ([7, 8, 8], 1),
    ],
)
def test_nodes_are_found_by_place(places: list[int], per_node: int) -> None:
    assert auto._ranks_per_node(places) == per_node


def test_a_large_expert_is_cut_and_a_small_one_is_as_it_is() -> None:
    with torch.device("meta"):
        large, small = bank(4096, 14336), bank(16, 32)
    assert (auto._expert_like(large).dim, auto._expert_like(large).hidden) == (4096, 2048)
    assert (auto._expert_like(small).dim, auto._expert_like(small).hidden) == (16, 32)


@pytest.mark.parametrize("topology", ["h100", None, 3])
def test_what_names_no_machine_is_refused(topology: Any) -> None:
    with pytest.raises((prophet.errors.TopologyError, prophet.errors.ArgumentError), match=r"h100|topology must be"):
        prophet.EngineConfig(topology=topology)
