"""A rank that skips or repeats a step, a pass or a layer is named on every rank, before rows are exchanged.

The layers have different numbers of experts and different gates, so their counts are not as long.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.errors import CollectiveError, OutOfStep
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadCollective
from tests.helpers.recorder import RecordingCollective
from tests.helpers.support import on_threads, seeded

RANKS, DIM, ODD = 4, 6, 2
LIMIT_S = 20.0
GATES = (
    prophet.GateConfig(),
    prophet.GateConfig(aux_loss="gshard", capacity_factor=1.0),
    prophet.GateConfig(aux_loss="switch"),
)
Order = tuple[int, ...]


class Varied(nn.Module):
    """Three MoE layers of 4, 16 and 8 experts. order: which of them a pass runs."""

    def __init__(self, group: Collective) -> None:
        super().__init__()
        with seeded(3):
            self.moes = nn.ModuleList(
                prophet.MoE(DIM, 5, n, group=group, gate=g) for n, g in zip((4, 16, 8), GATES, strict=True)
            )
            self.mix = nn.Linear(DIM, DIM)
        self.order: Order = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = x + self.moes[i](torch.tanh(self.mix(x)))
        return x


class Trained:
    """A rank's model, optimizer and engine, if it has one."""

    def __init__(self, group: Collective, *, balanced: bool = True) -> None:
        self.group = group
        self.model = Varied(group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.engine = prophet.attach(self.model, self.optimizer) if balanced else None

    def loss(self, step: int, order: Order = (0, 1, 2)) -> Tensor:
        self.model.order = order
        x = torch.randn(7, DIM, generator=torch.Generator().manual_seed(100 * step + self.group.rank))
        with prophet.collect_losses(self.model) as book:
            y = self.model(x)
        return y.square().mean() + book.total()

    def step(self, step: int, order: Order = (0, 1, 2)) -> None:
        self.optimizer.zero_grad()
        self.loss(step, order).backward()
        if self.engine is not None:
            self.engine.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def said(body: Callable[[Trained, bool], object], *, balanced: bool = True, ranks: int = RANKS) -> list[str]:
    """What `OutOfStep` says on every rank, where `body` is told which rank is the odd one."""

    def catch(group: ThreadCollective) -> str:
        trained = Trained(group, balanced=balanced)
        for s in range(3):
            trained.step(s)
        with pytest.raises(OutOfStep) as caught:
            body(trained, group.rank == ODD)
        return str(caught.value)

    return on_threads(ranks, catch, timeout_s=LIMIT_S)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(
    ("order", "odd", "others"),
    [
        pytest.param((0, 2), "MoE layer 2 of forward pass 4", "MoE layer 1 of forward pass 4", id="skipped"),
        pytest.param((1, 2), "MoE layer 1 of forward pass 4", "MoE layer 0 of forward pass 4", id="first skipped"),
        pytest.param((0, 0, 1, 2), "MoE layer 0 of forward pass 5", "MoE layer 1 of forward pass 4", id="twice"),
        pytest.param((0, 2, 1), "MoE layer 2 of forward pass 4", "MoE layer 1 of forward pass 4", id="other order"),
    ],
)
def test_a_layer_is_skipped_or_run_twice(order: Order, odd: str, others: str, balanced: bool) -> None:
    for text in said(lambda t, is_odd: t.step(3, order if is_odd else (0, 1, 2)), balanced=balanced):
        assert f"rank(s) [0, 1, 3] at {others} (training); rank(s) [{ODD}] at {odd} (training)" in text


def test_the_last_layer_is_run_twice() -> None:
    """The others are in their backward pass by then: rows meet a message, and nothing is waited for in vain."""

    def body(group: Collective) -> str:
        trained = Trained(group)
        with pytest.raises(CollectiveError) as caught:
            trained.step(0, (0, 1, 2, 2) if group.rank == ODD else (0, 1, 2))
        return str(caught.value)

    for rank, text in enumerate(on_threads(RANKS, body, timeout_s=LIMIT_S)):
        here, there = ("combine backward of layer 2", "exchange of counts of layer 2")[:: 1 if rank != ODD else -1]
        assert f"rank {rank}: {here} failed: rank" in text
        assert there in text


def test_an_optimizer_step_without_a_pass() -> None:
    """As of a batch that one rank computes by a part of the model without experts."""

    def body(t: Trained, odd: bool) -> None:
        if odd:
            t.model.mix(torch.ones(1, DIM)).sum().backward()
            t.optimizer.step()
        t.step(3)

    for text in said(body):
        assert f"number of optimizer steps of rank(s) [{ODD}] differs from the other ranks' ([3, 3, 4, 3] by" in text


def test_a_backward_pass_without_an_optimizer_step() -> None:
    """As where one rank finds its loss too large, and goes on to the next batch."""

    def body(t: Trained, odd: bool) -> None:
        t.optimizer.zero_grad()
        t.loss(3).backward()
        if not odd:
            t.optimizer.step()
        t.loss(4)

    for text in said(body):
        assert f"rank(s) [{ODD}]" in text
        assert "MoE layer 0" in text


def test_the_gradients_are_clipped_on_one_rank_only() -> None:
    def body(t: Trained, odd: bool) -> None:
        assert t.engine is not None
        t.optimizer.zero_grad()
        t.loss(3).backward()
        if odd:
            t.engine.clip_grad_norm_(t.model.parameters(), 1.0)
        t.optimizer.step()
        t.loss(4)

    for text in said(body):
        assert f"rank(s) [{ODD}] at gradient norm, after forward pass 4" in text


def test_one_rank_attaches_anew_while_the_others_train() -> None:

    def body(t: Trained, odd: bool) -> None:
        if odd:
            assert t.engine is not None
            t.engine.close()
            prophet.attach(t.model, t.optimizer)
        t.step(3)

    for text in said(body):
        assert f"rank(s) [{ODD}] at comparison of configurations" in text


@pytest.mark.parametrize("balanced", [True, False])
def test_the_counts_of_every_layer_have_a_length_of_their_own(balanced: bool) -> None:
    """From the second step on; whatever travels before the next counts is as long as these."""
    fake = RecordingCollective(1, RANKS)
    trained = Trained(fake, balanced=balanced)
    trained.step(0)
    begun = len(fake.calls)
    for s in range(1, 4):
        trained.step(s)
    gathered = [(c.op.name, c.sent_bytes[0]) for c in fake.calls[begun:] if c.kind == "all_gather"]
    of_counts = [length for name, length in gathered if name == "exchange of counts"]
    assert len(of_counts) == 3 * 3, "one for each layer and pass"
    assert of_counts == of_counts[:3] * 3
    assert len(set(of_counts[:3])) > 1
    # The last step's are followed by those of another one
    coming = of_counts[0]
    for name, length in reversed(gathered):
        if name == "exchange of counts":
            coming = length
        assert length == coming, name


@pytest.mark.parametrize("balanced", [True, False])
def test_layers_that_run_in_some_steps_only_are_no_mistake(balanced: bool) -> None:
    def body(group: Collective) -> None:
        t = Trained(group, balanced=balanced)
        for s, order in enumerate([(0, 1, 2), (0, 2), (2, 1), (1, 1, 1), (0, 1, 2)]):
            t.step(s, order)
        t.model.eval()
        t.loss(9)

    on_threads(RANKS, body, timeout_s=LIMIT_S)
