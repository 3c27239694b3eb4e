"""How a layer talks to whoever balances it, and the port of a layer that nobody balances.

In one forward and backward pass a layer makes at most nine calls:

| call | when |
|---|---|
| `begin` | a forward pass has reached the layer |
| `header`, `agreed` | before and after the exchange of counts |
| `split` | the counts are known |
| `replicas` | the experts are about to run |
| `window` | four times: FEC, FNEC in the forward pass, BEC, BNEC in the backward pass |

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, Protocol

import torch
from torch import nn

from prophet.experts.replica import Replica
from prophet.layer.counts import Counts, Row
from prophet.layer.expert_watch import ExpertWatch
from prophet.scheduler.replicas import in_backward
from prophet.scheduler.windows import Stopwatch
from prophet.spec import Placement, Split

LayerWindow = Literal["FEC", "FNEC", "BNEC", "BEC"]


class Pass(Enum):
    """What a forward pass is for. AGAIN: a training pass recomputed in the backward pass (activation checkpointing)."""

    TRAINING = "training"
    AGAIN = "recomputed"
    EVALUATION = "evaluation"

    @classmethod
    def now(cls, training: bool) -> Pass:
        """That of a module in training mode, or not, at this moment."""
        if not training:
            return cls.EVALUATION
        return cls.AGAIN if in_backward() else cls.TRAINING

    @property
    def averaged(self) -> bool:
        """Whether DistributedDataParallel, inside whose forward pass this one runs, is going to average its gradients.

        A rank that calls the model without its wrapper leaves the others waiting for its gradients.
        """
        if self is not Pass.TRAINING or not torch.is_grad_enabled():
            return False
        wrapper = nn.parallel.DistributedDataParallel._get_active_ddp_module()
        return wrapper is not None and bool(wrapper.require_backward_grad_sync)


class PassCount:
    """How many passes a layer has run. Those that are recomputed do not count: a number is that of the pass before."""

    def __init__(self) -> None:
        self.forward = 0

    def next(self, forward: Pass) -> int:
        """The number of the pass that is about to tell its counts."""
        self.forward += forward is not Pass.AGAIN
        return self.forward


class Port(Protocol):
    """The engine's side of one layer."""

    @property
    def index(self) -> int | None:
        """The layer's place in the order of execution; None where nobody balances it."""

    @property
    def stopwatch(self) -> Stopwatch:
        """Where the layer counts its host seconds."""

    def begin(self, forward: Pass) -> None:
        """A forward pass has reached the layer: all calls up to the next `begin` belong to it."""

    def header(self) -> Row:
        """What this rank says with its counts."""

    def agreed(self, counts: Counts) -> None:
        """What all ranks have said with theirs; their agreement is checked already."""

    def split(self, counts: Counts) -> tuple[Placement, Split]:
        """The placement in force, and the exact split of the load over it. Training counts are remembered."""

    def replicas(self) -> list[Replica]:
        """This rank's replicas, their parameters in place."""

    def window(self, kind: LayerWindow) -> None:
        """A window begins: FEC and BEC when the layer's experts start to run, FNEC and BNEC when it is done.

        BNEC is thus the backward compute of what comes *before* the layer.
        """


class PlainPort:
    """Plain expert parallelism: no replicas, nothing remembered but by the layer's `watch`."""

    index = None

    def __init__(self, ranks: int, experts: int, watch: ExpertWatch | None = None) -> None:
        self._watch = watch if ranks > 1 else None
        self.stopwatch = Stopwatch()
        self._placement = Placement.homes_only(experts, ranks)
        self._pass, self._passes = Pass.EVALUATION, PassCount()

    def begin(self, forward: Pass) -> None:
        self._pass = forward

    def header(self) -> Row:
        forward = self._pass
        watch = self._watch if forward is Pass.TRAINING else None
        return Row(
            forward=self._passes.next(forward),
            kind=forward.value,
            averaged=forward.averaged,
            gradients=None if watch is None else watch.say_shared(watch.device),
        )

    def agreed(self, counts: Counts) -> None:
        if self._watch is not None and counts.gradients is not None:
            self._watch.compare_shared(counts.gradients)

    def split(self, counts: Counts) -> tuple[Placement, Split]:
        with self.stopwatch("split"):
            return self._placement, Split.to_homes(counts.load, self._placement)

    def replicas(self) -> list[Replica]:
        return []

    def window(self, kind: LayerWindow) -> None: ...
