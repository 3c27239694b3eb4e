"""Two ranks that swap a tensor each, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from prophet.errors import TransitionError
from prophet.ranks.threads import ThreadCollective, ThreadWorld
from prophet.state.layout import Piece, layout_from
from prophet.state.route import Route, route
from prophet.state.space import Space, TensorSpec
from prophet.state.transition import Moved
from tests.helpers.pipeline_support import random_values, same_bits, states_of


def pair() -> tuple[Route, list[dict[Piece, Tensor]], dict[str, Tensor]]:
    """Two ranks swap a tensor each."""
    space = Space((TensorSpec(name="a", shape=(64,)), TensorSpec(name="b", shape=(64,), dtype="float64")))
    a, b = (("a", space["a"].box), ("b", space["b"].box))
    before, after = layout_from(space, 2, {0: [a], 1: [b]}), layout_from(space, 2, {0: [b], 1: [a]})
    values = {t.name: random_values(np.random.default_rng(0), t) for t in space.tensors}
    return route(before, after), states_of(before, values), values


def assert_whole(way: Route, states: Sequence[dict[Piece, Tensor]], values: dict[str, Tensor]) -> None:
    for row in states:
        for piece, tensor in row.items():
            assert same_bits(tensor, values[piece.name][piece.box.slices(way.space[piece.name].box)])


def outcomes(size: int, body: Callable[[ThreadCollective], Moved], timeout_s: float = 20.0) -> list[object]:
    def guarded(collective: ThreadCollective) -> object:
        try:
            return body(collective)
        except TransitionError as error:
            return error

    return ThreadWorld(size, timeout_s=timeout_s).run(guarded)
