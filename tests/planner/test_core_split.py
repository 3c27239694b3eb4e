"""The split's entries in the core: bit by bit the naive twin, safe against wrong arrays, on many threads."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prophet.errors import SpecError
from prophet.machine.presets import get_preset
from prophet.planner.core import native
from prophet.planner.model.machine import Machine
from prophet.planner.split.exact import NOT_DENSE, exact_split
from prophet.spec import Placement
from tests.helpers.planner_cases import Case, cases
from tests.helpers.split_twin import Twin

NAMES = ("load_RE", "holds_ER", "home_E", "node_R", "speed_R", "seconds_per_token_R", "figures")


def arguments(case: Case) -> dict[str, Any]:
    machine = Machine.of(case.context)
    placement = case.placement
    return dict(
        zip(
            NAMES,
            (
                case.load,
                placement.holds,
                placement.home,
                machine.node,
                machine.speed,
                machine.seconds_per_token,
                machine.figures,
            ),
            strict=True,
        )
    )


def room_for(case: Case) -> np.ndarray:
    ranks, experts = case.load.shape
    return np.full((ranks, experts, ranks), -1, dtype=np.int64)


def skewed(ranks: int, experts: int, seed: int) -> dict[str, Any]:
    """Arguments of a load that descent has work with."""
    rng = np.random.default_rng(seed)
    load = rng.poisson(500 * (rng.pareto(1.2, experts) + 0.05) * rng.uniform(0.2, 1.8, (ranks, experts)))
    home = np.arange(experts) // (experts // ranks)
    replicas = zip(
        rng.integers(0, experts, 3 * ranks).tolist(), rng.integers(0, ranks, 3 * ranks).tolist(), strict=True
    )
    placement = Placement.with_replicas(home, ranks, replicas)
    figures = np.array([8192, 1e10, 1e-5, 1e9, 2e-5, 1e5, 2e5, 2e5, 1e-4, 2e-4, 1e-6, 0.1, 0.0, 0.0])
    node = np.arange(ranks) // 4
    values = (
        load.astype(np.int64),
        placement.holds,
        placement.home,
        node,
        np.ones(ranks),
        np.full(ranks, 1e-7),
        figures,
    )
    return dict(zip(NAMES, values, strict=True))


@settings(max_examples=150, deadline=None)
@given(cases(max_tokens=3000), st.sampled_from([0.0, 0.03, 1.0, 100.0]))
def test_the_timed_split_is_its_naive_twin_bit_by_bit(case: Case, effort: float) -> None:
    exact = exact_split(case.load, case.placement, case.context.topology).tokens
    wanted, wanted_s = Twin(case.load, case.placement, Machine.of(case.context)).split(exact, effort)
    tokens = room_for(case)
    assert native.split(**arguments(case), effort=effort, out_tokens_RED=tokens)[-1][0] == wanted_s
    assert np.array_equal(tokens, wanted)


@pytest.mark.parametrize(("overlap_cost", "port_share"), [(0.0, 0.0), (0.6, 0.0), (0.0, 1.0), (0.6, 1.0)])
@pytest.mark.parametrize("agg_bytes", [1e5, 3e5, 3e6])
@pytest.mark.parametrize("trans_bytes", [1e5, 3e5, 3e6])
def test_products_that_hide_transfers_weigh_less(
    trans_bytes: float, agg_bytes: float, overlap_cost: float, port_share: float
) -> None:
    """Transfers longer than their windows, of all forms: longer products hide more of them, which prices count."""
    any_context = get_preset("h100-ib:Qwen3-30B-A3B").context(8, 16, routed_per_rank=1, slots_per_rank=8)
    for seed in range(3):
        given_ = skewed(8, 16, seed)
        figures = given_["figures"]  # in the order of `Machine`
        figures[1:5] = 1e9, 1e-6, 1e9, 1e-6
        sum_bytes = (1 + seed % 2) * agg_bytes
        figures[5:10] = trans_bytes, agg_bytes, sum_bytes, 1e-5, 1e-5
        figures[11], figures[13] = overlap_cost, port_share
        arrays = {"node": given_["node_R"], "seconds_per_token": given_["seconds_per_token_R"], "figures": figures}
        machine = dataclasses.replace(Machine.of(any_context), speed=np.ones(8), **arrays)
        exact, tokens = np.empty((2, 8, 16, 8), np.int64)
        native.split(**given_, effort=0.0, out_tokens_RED=exact)
        placement = Placement.trusted(given_["home_E"], given_["holds_ER"])
        wanted, wanted_s = Twin(given_["load_RE"], placement, machine).split(exact, 100.0)
        assert native.split(**given_, effort=100.0, out_tokens_RED=tokens)[-1][0] == wanted_s
        assert np.array_equal(tokens, wanted)


@pytest.mark.parametrize("port_share", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("ranks", [8, 10])
def test_tokens_pay_for_their_nodes_ports(ranks: int, port_share: float) -> None:
    """Nodes of four ranks, whose ports descent relieves: the prices of a port are those of all its ranks, at once."""
    any_context = get_preset("h100-ib:Qwen3-30B-A3B").context(ranks, 2 * ranks, routed_per_rank=1, slots_per_rank=8)
    without = 0  # splits that are others without ports
    for seed in range(4):
        given_ = skewed(ranks, 2 * ranks, seed)
        figures = given_["figures"]  # in the order of `Machine`
        figures[5:8] = 1.0
        figures[13] = port_share
        arrays = {"node": given_["node_R"], "seconds_per_token": given_["seconds_per_token_R"], "figures": figures}
        machine = dataclasses.replace(Machine.of(any_context), speed=np.ones(ranks), **arrays)
        exact, tokens, alone = np.empty((3, ranks, 2 * ranks, ranks), np.int64)
        native.split(**given_, effort=0.0, out_tokens_RED=exact)
        placement = Placement.trusted(given_["home_E"], given_["holds_ER"])
        wanted, wanted_s = Twin(given_["load_RE"], placement, machine).split(exact, 100.0)
        assert native.split(**given_, effort=100.0, out_tokens_RED=tokens)[-1][0] == wanted_s
        assert np.array_equal(tokens, wanted)
        figures[13] = 0.0
        native.split(**given_, effort=100.0, out_tokens_RED=alone)
        without += not np.array_equal(tokens, alone)
    assert without >= 2, "the port is what the split goes by"


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([0.0, 0.03, 100.0]))
def test_rows_and_tokens_are_one_split(case: Case, effort: float) -> None:
    given_ = arguments(case)
    tokens = room_for(case)
    shared, rows, rank_load, *_ = native.split(**given_, effort=effort, out_tokens_RED=tokens)
    alone = native.split(**given_, effort=effort, out_tokens_RED=NOT_DENSE)[1]
    assert np.array_equal(rows, alone)
    assert np.array_equal(tokens.sum(axis=(0, 1)), rank_load)
    source, expert, rank, amount = rows.T
    assert np.array_equal(tokens[source, expert, rank], amount)
    assert (tokens[:, shared].sum(), (amount > 0).all()) == (amount.sum(), True)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_array_is_refused(name: str) -> None:
    right = skewed(8, 16, 0)
    array = right[name]
    wrong: dict[str, Any] = {
        "type": array.astype(np.float32),
        "list": array.tolist(),
        "dimensions": array[None],
        "strided": np.repeat(array, 2, axis=-1)[..., ::2],
        "order": np.asfortranarray(array) if array.ndim == 2 else None,
        "none": None,
    }
    before = {k: v.copy() for k, v in right.items()}
    for what, value in wrong.items():
        if what == "order" and value is None:
            continue
        with pytest.raises(TypeError, match="incompatible function arguments"):
            native.split(**(right | {name: value}), effort=0.1, out_tokens_RED=NOT_DENSE)
    for size in (array[:-1], np.concatenate([array, array[-1:]])):
        with pytest.raises(SpecError):
            native.split(**(right | {name: np.ascontiguousarray(size)}), effort=0.1, out_tokens_RED=NOT_DENSE)
    assert all(np.array_equal(before[k], right[k]) for k in NAMES)


def test_read_only_arrays_are_read_and_never_written() -> None:
    right = skewed(8, 16, 0)
    wanted = native.split(**right, effort=0.1, out_tokens_RED=NOT_DENSE)
    for array in right.values():
        array.setflags(write=False)
    assert native.split(**right, effort=0.1, out_tokens_RED=NOT_DENSE)[3:] == wanted[3:]
    tokens = np.zeros((8, 16, 8), np.int64)
    tokens.setflags(write=False)
    with pytest.raises(TypeError):
        native.split(**right, effort=0.1, out_tokens_RED=tokens)


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("load_RE", (1, 2), -1),
        ("home_E", 3, 8),
        ("home_E", 3, -1),
        ("home_E", 3, 7),  # a rank that does not hold it
        ("node_R", 0, 1),
        ("node_R", 4, 9),
        ("speed_R", 2, 0.0),
    ],
)
def test_values_that_point_outside_are_refused(name: str, index: Any, value: float) -> None:
    right = skewed(8, 16, 0)
    right["holds_ER"] = np.eye(16, 8, dtype=np.bool_) * False
    right["holds_ER"][np.arange(16), right["home_E"]] = True
    native.split(**right, effort=0.1, out_tokens_RED=NOT_DENSE)
    changed = right[name].copy()
    changed[index] = value
    with pytest.raises(SpecError):
        native.split(**(right | {name: changed}), effort=0.1, out_tokens_RED=NOT_DENSE)


@pytest.mark.parametrize("shape", [(8, 16, 7), (8, 15, 8), (7, 16, 8)])
def test_room_of_another_size_is_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(SpecError, match="out_tokens_RED"):
        native.split(**skewed(8, 16, 0), effort=0.1, out_tokens_RED=np.zeros(shape, np.int64))


def test_calls_of_one_size_allocate_once() -> None:
    def held() -> tuple[int, int, int]:
        first = native.held_bytes()
        native.split(**skewed(8, 16, 0), effort=10.0, out_tokens_RED=NOT_DENSE)
        second = native.held_bytes()
        for seed in range(50):
            native.split(**skewed(8, 16, seed), effort=10.0, out_tokens_RED=NOT_DENSE)
        return first, second, native.held_bytes()

    with ThreadPoolExecutor(1) as pool:  # a thread that holds nothing yet
        first, second, third = pool.submit(held).result(timeout=60)
    assert first == 0 < second == third < 1 << 20


def test_threads_do_not_disturb_one_another() -> None:
    sizes = [(8, 16), (12, 24), (16, 32), (4, 64)]
    given_ = [skewed(*sizes[i % 4], seed=i) for i in range(16)]
    wanted = [native.split(**g, effort=10.0, out_tokens_RED=NOT_DENSE) for g in given_]
    start = threading.Barrier(16)

    def split(i: int) -> bool:
        start.wait(60)
        same = True
        for n in range(10):
            k = (i + n) % 16
            found = native.split(**given_[k], effort=10.0, out_tokens_RED=NOT_DENSE)
            same &= found[3:] == wanted[k][3:] and all(map(np.array_equal, found[:3], wanted[k][:3]))
        return same

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(split, range(16), timeout=120))
