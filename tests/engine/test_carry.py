"""What engines remember goes over to other groups of ranks: all tokens stay, and placements are planned at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import prophet
from prophet.engine.carry import Memory, carry, memories
from prophet.ranks.threads import ThreadCollective
from tests.helpers.support import RandomPlanner, TinyModel, next_id_loss, on_threads


def _engine(group: ThreadCollective) -> tuple[TinyModel, prophet.engine.engine.Engine]:
    model = TinyModel(group=group, blocks=2, seed=3)
    return model, prophet.attach(model, config=prophet.EngineConfig(planner=RandomPlanner(1, 0.8)))


def _steps(group: ThreadCollective, seed: int) -> list[Memory]:
    """What an engine remembers after three steps."""
    model, engine = _engine(group)
    for step in range(3):
        ids = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(seed + 10 * step + group.rank))
        next_id_loss(model(ids), ids, 0.1).backward()
        engine.runtime.finish_gradients()
        engine.finish_step()
    found = memories(engine)
    engine.close()
    return found


def _tokens(known: list[Memory], name: str) -> Any:
    """Sums over ranks, of one layer in all groups."""
    return sum(memory["history"][name].numpy().astype(np.int64).sum(axis=-2) for memory in known)


@pytest.mark.parametrize(("ranks", "groups"), [(4, 1), (1, 2), (2, 4), (4, 3)])
def test_other_groups_share_out_what_all_have_seen(ranks: int, groups: int) -> None:
    before = [on_threads(2, lambda group, seed=seed: _steps(group, seed))[0] for seed in (0, 100)]
    known = [list(layer) for layer in zip(*before, strict=True)]

    def resumed(group: ThreadCollective, number: int) -> list[Memory]:
        _, engine = _engine(group)
        carry(engine, known, number, groups)
        found = memories(engine)
        assert engine.step == 3
        engine.close()
        return found

    after = [on_threads(ranks, lambda group, g=g: resumed(group, g)) for g in range(groups)]
    for layer, memory in enumerate(known):
        mine = [every[0][layer] for every in after]
        for name in ("ring", "ema"):
            assert np.array_equal(_tokens(mine, name), _tokens(memory, name))
        for every in after:
            plans = [one[layer]["plan"] for one in every]
            assert all(torch.equal(plan["holds"], plans[0]["holds"]) for plan in plans)
            assert ranks == 1 or plans[0]["holds"].sum() > plans[0]["holds"].shape[0], "no replica was planned"


def test_as_many_groups_of_as_many_ranks_go_on_with_their_own() -> None:
    before = [on_threads(2, lambda group, seed=seed: _steps(group, seed))[0] for seed in (0, 100)]

    def resumed(group: ThreadCollective) -> list[Memory]:
        _, engine = _engine(group)
        carry(engine, [list(layer) for layer in zip(*before, strict=True)], 1, 2)
        found = memories(engine)
        engine.close()
        return found

    for one, own in zip(on_threads(2, resumed)[1], before[1], strict=True):
        assert all(torch.equal(one["history"][k], own["history"][k]) for k in own["history"])
        assert torch.equal(one["plan"]["holds"], own["plan"]["holds"])


def test_layers_that_nobody_has_balanced_begin_anew() -> None:
    def begun(group: ThreadCollective) -> list[Memory]:
        _, engine = _engine(group)
        carry(engine, [[], []], 0, 1)
        found = memories(engine)
        engine.close()
        return found

    for memory in on_threads(2, begun)[0]:
        assert memory["plan"] is None
        assert int(memory["history"]["observed"]) == 0
