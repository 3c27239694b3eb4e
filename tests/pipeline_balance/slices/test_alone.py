"""Layers that slices would change are found before anything is trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import prophet
from pipeline_balance.dynamics.early_exit import EarlyExit
from pipeline_balance.dynamics.gpt import Block
from pipeline_balance.slices.chain import SlicedChain
from pipeline_balance.slices.options import SliceOptions
from prophet.errors import SpecError
from prophet.experts.gate import GateConfig
from prophet.ranks.threads import ThreadWorld
from tests.helpers import sliced_layers as own


class Counting(nn.Module):
    """Adds where a token stands, counted anew in every slice."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1])[:, None]


class Leaving(nn.Module):
    """A block from which tokens leave early, with attention of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = EarlyExit(Block(own.DIM, own.HEADS).double(), 0.9)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)
        found: Tensor = self.inner(state)[..., :-1]
        return found


def chain(*between: nn.Module) -> SlicedChain:
    layers = list(own.layers())
    return SlicedChain([*layers[:2], *between, *layers[2:]], own.loss_fn, SliceOptions(3), counted=own.counted)


@pytest.mark.parametrize("make", [Counting, own.Recurrent, Leaving, lambda: Block(own.DIM, own.HEADS).double()])
def test_a_layer_that_mixes_tokens_in_another_way_is_named(make: Callable[[], nn.Module]) -> None:
    layer = make()
    run = chain(layer)
    (whole,) = run.cut(*own.batch(0, 0), 1)
    state = torch.get_rng_state()
    with pytest.raises(SpecError, match=rf"layer 2 \({type(layer).__name__}\) computes other outputs for two slices"):
        run.sliced(whole)
    assert torch.equal(state, torch.get_rng_state())
    assert not len(run.store)
    assert layer.training


def test_layers_that_may_be_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = chain(nn.Sequential(nn.Linear(own.DIM, own.DIM), nn.Dropout(0.5)).double())
    calls: list[int] = []
    forward = own.Block.forward
    monkeypatch.setattr(own.Block, "forward", lambda block, x: calls.append(block.layer) or forward(block, x))
    (whole,) = run.cut(*own.batch(0, 0), 1)
    run.activations(run.sliced(whole)[0])
    known = len(calls)
    assert len(run.sliced(whole)) == 3
    assert len(calls) == known


class Overflowing(nn.Module):
    """Has no finite outputs for made-up inputs, though it may have for those of training."""

    def forward(self, x: Tensor) -> Tensor:
        huge = (x * 1e200).exp()
        return torch.cat([huge[..., :1], (huge - huge)[..., 1:2], x[..., 2:]], dim=-1)


def test_outputs_that_are_no_numbers_are_compared_too() -> None:
    run = chain(Overflowing())
    (whole,) = run.cut(*own.batch(0, 0), 1)
    assert len(run.sliced(whole)) == 3
    run = chain(nn.Sequential(Overflowing(), Counting()))
    with pytest.raises(SpecError, match=r"layer 2 \(Sequential\) computes other outputs for two slices"):
        run.sliced(whole)


class Scaling(nn.Module):
    """Has a buffer, and no parameters."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(own.DIM, dtype=torch.float64, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.get_buffer("scale")


def test_a_layer_whose_buffers_are_elsewhere_is_tried_there() -> None:
    layer = Scaling("meta")
    run = chain(layer)
    (whole,) = run.cut(*own.batch(0, 0), 1)
    assert len(run.sliced(whole)) == 3


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        (GateConfig(capacity_factor=1.0), "capacity_factor"),
        (GateConfig(aux_loss="switch"), "aux_loss"),
        (GateConfig(z_loss_weight=0.1), "z_loss_weight"),
    ],
)
def test_limits_and_losses_of_whole_microbatches_are_refused(gate: GateConfig, words: str) -> None:
    moe = prophet.MoE(own.DIM, 8, 4, 2, gate=gate, group=ThreadWorld(1).collective(0), impl="naive").double()
    with pytest.raises(SpecError, match=rf"layer 2 \(\) has a gate with {words}"):
        chain(moe)
    chain(prophet.MoE(own.DIM, 8, 4, 2, group=ThreadWorld(1).collective(0), impl="naive").double())


def test_attentions_of_one_name_are_found_before_training() -> None:
    """In one layer or in two, they would read each other's keys and values."""
    run = chain(own.Block(1).double())  # the blocks beside it are 0 and 1
    (whole,) = run.cut(*own.batch(0, 0), 1)
    with pytest.raises(SpecError, match=r"layers 2 and 3 both call attend with layer=1: give each attention"):
        run.sliced(whole)
    run = chain(nn.Sequential(own.Block(7), own.Block(7)).double())
    with pytest.raises(SpecError, match="two attentions of one pass call themselves layer 7"):
        run.sliced(whole)
    run = chain(own.Block(7).double())
    assert len(run.sliced(whole)) == 3


def test_a_layer_with_another_part_is_tried_again() -> None:
    between = nn.Sequential(nn.Identity())
    run = chain(between)
    (whole,) = run.cut(*own.batch(0, 0), 1)
    run.sliced(whole)
    between[0] = Counting()
    with pytest.raises(SpecError, match=r"layer 2 .* computes other outputs for two slices"):
        run.sliced(whole)
