"""What a layer asks of its port, and when: nine calls in a training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import prophet
from prophet.experts.replica import Replica
from prophet.layer.counts import Counts, Row
from prophet.layer.port import LayerWindow, Pass, PlainPort
from prophet.spec import Placement, Split

DIM, EXPERTS = 4, 3


class Listening(PlainPort):
    """A plain port that writes down what it is asked."""

    def __init__(self) -> None:
        super().__init__(1, EXPERTS)
        self.calls: list[str] = []

    def begin(self, forward: Pass) -> None:
        self.calls.append(f"begin {forward.value}")

    def header(self) -> Row:
        self.calls.append("header")
        return super().header()

    def agreed(self, counts: Counts) -> None:
        self.calls.append("agreed")

    def split(self, counts: Counts) -> tuple[Placement, Split]:
        self.calls.append("split")
        return super().split(counts)

    def remember(self, counts: Counts, split: Split) -> None:
        self.calls.append("remember")

    def replicas(self) -> list[Replica]:
        self.calls.append("replicas")
        return []

    def window(self, kind: LayerWindow) -> None:
        self.calls.append(kind)


def listening() -> tuple[prophet.MoE, Listening]:
    layer, port = prophet.MoE(DIM, 5, EXPERTS), Listening()
    layer.port = port
    return layer, port


def forward(what: Pass) -> list[str]:
    return [f"begin {what.value}", "header", "agreed", "split", "remember", "replicas", "FEC", "FNEC"]


def test_a_training_step_makes_ten_calls() -> None:
    layer, port = listening()
    layer(torch.randn(6, DIM, requires_grad=True)).sum().backward()
    assert port.calls == [*forward(Pass.TRAINING), "BEC", "BNEC"]
    assert len(port.calls) == 10


def test_evaluation_says_so() -> None:
    layer, port = listening()
    layer.eval()
    with torch.no_grad():
        layer(torch.randn(6, DIM))
    assert port.calls == forward(Pass.EVALUATION)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_pass_says_so(use_reentrant: bool) -> None:
    layer, port = listening()
    out: Any = checkpoint(layer, torch.randn(6, DIM, requires_grad=True), use_reentrant=use_reentrant)
    assert port.calls == forward(Pass.TRAINING)
    out.sum().backward()
    again = port.calls[8:]
    assert again[:7] == forward(Pass.AGAIN)[:7]
    assert again[-2:] == ["BEC", "BNEC"]


def test_a_recomputed_pass_has_the_number_of_the_pass_that_it_repeats() -> None:
    port = PlainPort(1, EXPERTS)
    said = []
    for what in (Pass.TRAINING, Pass.TRAINING, Pass.AGAIN, Pass.AGAIN, Pass.EVALUATION):
        port.begin(what)
        row = port.header()
        said.append((row.forward, row.kind))
    assert said == [(1, "training"), (2, "training"), (2, "recomputed"), (2, "recomputed"), (3, "evaluation")]
