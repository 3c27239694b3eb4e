"""Torch's masks by one threshold over all ranks are those of torch's own function in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from pipeline_balance.dynamics.pruning import global_unstructured
from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld

AMOUNTS = (0.25, 0.5, 0.3)


def _model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            # the magnitudes of layers differ, so a threshold for each would prune others
            p.copy_(torch.randn(p.shape, generator=generator) / (1 + i))
    return model


def _pairs(model: nn.Sequential) -> list[tuple[nn.Module, str]]:
    return [(layer, "weight") for layer in model] + [(model[0], "bias")]


def _pruned(collective: Collective) -> list[dict[str, torch.Tensor]]:
    """This rank's layers after each pruning; the others are on meta, as in a pipeline."""
    model = _model()
    first = collective.rank * 4 // collective.size
    mine = range(first, (collective.rank + 1) * 4 // collective.size)
    for i, layer in enumerate(model):
        if i not in mine:
            layer.to("meta")
    found = []
    for amount in AMOUNTS:
        global_unstructured(_pairs(model), amount, collective)
        state = model.state_dict()
        found.append({n: t.clone() for n, t in state.items() if not t.is_meta})
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_masks_are_those_of_torch_in_one_process(ranks: int) -> None:
    model, expected = _model(), []
    for amount in AMOUNTS:
        prune.global_unstructured(_pairs(model), prune.L1Unstructured, amount=amount)
        expected.append({n: t.clone() for n, t in model.state_dict().items()})
    every = ThreadWorld(ranks).run(_pruned)
    for step, wanted in enumerate(expected):
        got = {name: tensor for rank in every for name, tensor in rank[step].items()}
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    # one threshold for all: layers keep unequal shares
    shares = {float(wanted[f"{i}.weight_mask"].mean()) for i in range(4)}
    assert len(shares) > 1


def test_all_ranks_have_the_same_masks_by_name() -> None:
    def names(collective: Collective) -> list[str]:
        model = _model()
        model[1 - collective.rank].to("meta")
        global_unstructured(_pairs(model), 0.5, collective)
        return sorted(model.state_dict())

    first, second = ThreadWorld(2).run(names)
    assert first == second
    assert "0.weight_mask" in first


def test_what_is_no_share_is_refused() -> None:
    with pytest.raises(SpecError, match="from 0 to 1"):
        global_unstructured([], 1.5, ThreadWorld(1).collective(0))
