"""What the core's entry for plans takes, and that it refuses the rest."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from prophet.machine.presets import get_preset
from prophet.planner.core import native
from prophet.planner.model.machine import Machine
from prophet.planner.split.exact import NOT_DENSE


def arguments() -> list[Any]:
    context = get_preset("h100-ib:Qwen3-30B-A3B").context(4, 8, routed_per_rank=1000, slots_per_rank=2)
    m = Machine.of(context)
    load = np.random.default_rng(0).integers(0, 500, (4, 8))
    none, holds = np.zeros((0, 0), np.bool_), np.zeros((8, 4), np.bool_)
    return [load, m.home, m.node, m.speed, m.seconds_per_token, m.figures, m.limit, none, 0.003, 0.06, holds]


def test_a_plan_is_written() -> None:
    given = arguments()
    native.plan(*given)
    assert given[-1][np.arange(8), given[1]].all()


@pytest.mark.parametrize("place", [*range(8), 10])
def test_no_array_is_converted(place: int) -> None:
    for wrong in (
        lambda a: a.astype(np.float32),
        lambda a: np.repeat(a, 2, axis=-1)[..., ::2] if a.size else a.astype(np.int8),
        lambda a: a[None],
    ):
        given = arguments()
        given[place] = wrong(given[place])
        with pytest.raises(TypeError):
            native.plan(*given)


@pytest.mark.parametrize("place", [1, 2, 3, 4, 5, 6, 10])
def test_sizes_that_disagree_are_refused(place: int) -> None:
    given = arguments()
    given[place] = np.concatenate([given[place], given[place][-1:]])
    with pytest.raises(ValueError, match=r"must be|must have"):
        native.plan(*given)


def test_values_that_would_lead_outside_are_refused() -> None:
    for place, value in ((0, -1), (1, 9), (6, -1)):
        given = arguments()
        given[place] = np.full_like(given[place], value)
        with pytest.raises(ValueError, match=r"negative|name ranks"):
            native.plan(*given)
    given = arguments()
    given[7] = np.zeros((8, 4), np.bool_)
    with pytest.raises(ValueError, match="every home must hold its expert"):
        native.plan(*given)


# What `native.plan` and `native.split` make of the counts of `drawn`, by machine. Every processor and compiler has to
# arrive at these bits. Whoever changes what the planner does writes the new ones here; nobody else may have to.
# ranks, experts, ranks per node
SMALL, APART, TWO_NODES, MANY = (8, 16, 8), (12, 24, 1), (12, 24, 6), (72, 72, 8)
SLOW_LINKS = (8192, 1e9, 1e-5, 1e8, 2e-5, 2e5, 4e5, 4e5, 1e-4, 2e-4, 1e-6, 0.25, 0.0, 0.0)  # as in `Machine`
NO_WINDOWS = (8192, 1e10, 1e-5, 2e9, 2e-5, 1e6, 2e6, 2e6, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
SHORT_WINDOWS = (4096, 1e9, 0.0, 1e9, 0.0, 1e5, 1e5, 1e5, 2e-3, 1e-3, 0.0, 0.0, 1.0, 0.0)
SHARED_PORTS = (*SLOW_LINKS[:-1], 1.0)
BITS = {
    (SMALL, SLOW_LINKS): "165ae2ad5b2e4cac",
    (SMALL, NO_WINDOWS): "42d11ca9d087a027",
    (SMALL, SHORT_WINDOWS): "c6db9b04ffb31979",
    (APART, SLOW_LINKS): "2f2802f59d338506",
    (APART, NO_WINDOWS): "e3d13225bc408eef",
    (APART, SHORT_WINDOWS): "494152d7dc0341f7",
    (TWO_NODES, SLOW_LINKS): "b19437e3bfd77cc6",
    (TWO_NODES, NO_WINDOWS): "2450570596fe3415",
    (TWO_NODES, SHORT_WINDOWS): "02063cdab9c8b710",
    (TWO_NODES, SHARED_PORTS): "9079c0d2b4cc4784",
    (MANY, SLOW_LINKS): "0c00959f97b6e83b",
    (MANY, NO_WINDOWS): "4b309389b932eb1a",
    (MANY, SHORT_WINDOWS): "16a3a4ab57e6e046",
}


def drawn(ranks: int, experts: int, seed: int) -> np.ndarray:
    """Counts without any library's arithmetic: skewed bytes, of which every rank has some of its own."""
    stream = np.frombuffer(hashlib.shake_128(b"%d" % seed).digest(experts + ranks * experts), np.uint8).astype(np.int64)
    popular, own = stream[:experts] ** 4 >> 20, stream[experts:].reshape(ranks, experts)
    return popular * own >> 6


def bits(shape: tuple[int, int, int], figures: tuple[float, ...]) -> str:
    """The digest of ten calls, each with the last one's placement in force, and of their splits."""
    ranks, experts, per_node = shape
    home, node = np.arange(experts) * ranks // experts, np.arange(ranks) // per_node
    speed = np.where(np.arange(ranks) % 5 == 3, 0.5, 1.0)
    machine = (home, node, speed, 2.0**-23 / speed, np.array(figures))
    holds = np.zeros((0, 0), np.bool_)
    found = hashlib.blake2b(digest_size=8)
    for call in range(10):
        load, following = drawn(ranks, experts, call // 5 * 100 + call), np.zeros((experts, ranks), np.bool_)
        native.plan(load, *machine, np.full(ranks, 4), holds, 10.0, 0.06, following)
        holds = following
        rows, rank_load, level, cost = native.split(load, holds, *machine, 0.06, NOT_DENSE)[1:]
        for array in (holds, rows, rank_load, np.array([level, *cost])):
            found.update(array.tobytes())
    return found.hexdigest()


@pytest.mark.parametrize(("shape", "figures"), BITS)
def test_plans_and_splits_have_the_same_bits_everywhere(
    shape: tuple[int, int, int], figures: tuple[float, ...]
) -> None:
    assert bits(shape, figures) == BITS[shape, figures]
