"""How a layer talks to whoever balances it, and the port of a layer that nobody balances.

In one forward and backward pass a layer makes at most twelve calls:

| call | when |
|---|---|
| `begin` | a forward pass has reached the layer |
| `header`, `agreed` | before and after the exchange of counts |
| `split` | the counts are known |
| `remember` | the rows are being put in order for dispatch |
| `apart` | the experts are about to run |
| `replicas` | their turn has come: before the experts at home, or after them where they run apart |
| `window` | four times: FEC, FNEC in the forward pass, BEC, BNEC in the backward pass |
| `copies_done` | where they run apart: the replicas' backward pass is over, which comes before the home experts' |

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
    """What a forward pass is for.

    Attributes:
        TRAINING: A backward pass may follow.
        AGAIN: A training pass recomputed in the backward pass (activation checkpointing).
        EVALUATION: No backward pass follows.
    """

    TRAINING = "training"
    AGAIN = "recomputed"
    EVALUATION = "evaluation"

    @classmethod
    def now(cls, training: bool) -> Pass:
        """Return what a pass is for that a module in training mode, or not, begins at this moment."""
        if not training:
            return cls.EVALUATION
        # activation checkpointing recomputes inside the backward pass, and nothing else runs a layer there
        return cls.AGAIN if in_backward() else cls.TRAINING

    @property
    def averaged(self) -> bool:
        """Whether the DistributedDataParallel in whose forward pass this one runs will average its gradients.

        A rank that calls the model without its wrapper leaves the others waiting for its gradients.
        """
        if self is not Pass.TRAINING or not torch.is_grad_enabled():
            return False
        # `no_sync()` turns `require_backward_grad_sync` off: such a pass is not averaged, and the others' must not be
        # either
        wrapper = nn.parallel.DistributedDataParallel._get_active_ddp_module()
        return wrapper is not None and bool(wrapper.require_backward_grad_sync)


class PassCount:
    """Counts the passes that a layer has run; a recomputed pass has the number of the pass before it."""

    def __init__(self) -> None:
        self.forward = 0

    def next(self, forward: Pass) -> int:
        """Return the number of the pass that is about to send its counts."""
        self.forward += forward is not Pass.AGAIN
        return self.forward


class Port(Protocol):
    """The engine's side of one layer."""

    @property
    def index(self) -> int | None:
        """The layer's place in the order of execution; None where nobody balances it."""

    @property
    def stopwatch(self) -> Stopwatch:
        """Where the layer counts its seconds."""

    def begin(self, forward: Pass) -> None:
        """Note that a forward pass has reached the layer: all calls up to the next `begin` belong to it."""

    def header(self) -> Row:
        """Return what this rank sends with its counts."""

    def agreed(self, counts: Counts) -> None:
        """Take in what all ranks have sent with their counts; that they agree is checked already."""

    def split(self, counts: Counts) -> tuple[Placement, Split]:
        """Return the placement in force and the exact split of the load over it."""

    def remember(self, counts: Counts, split: Split) -> None:
        """Take in the counts of a pass and their split, which the next placement is planned from."""

    def apart(self) -> bool:
        """Return whether replicas run after the experts at home, as their transfers are not hidden otherwise.

        It is the same on all ranks, and in every run.
        """

    def replicas(self) -> list[Replica]:
        """Return this rank's replicas, their parameters in place; may wait for them."""

    def copies_done(self) -> None:
        """Note that this rank's replicas have their gradients in this backward pass; may be called again in it."""

    def window(self, kind: LayerWindow) -> None:
        """Note that a window begins: FEC and BEC when the layer's experts start to run, FNEC and BNEC when it is done.

        BNEC is thus the backward compute of what comes *before* the layer.
        """


class PlainPort:
    """Plain expert parallelism: no replicas, and nothing remembered but by the layer's `watch`.

    Args:
        ranks: How many ranks share the experts.
        experts: How many experts they share.
        watch: Compares what ranks share, where there are several; None compares nothing.
    """

    index = None

    def __init__(self, ranks: int, experts: int, watch: ExpertWatch | None = None) -> None:
        # a single rank has nobody to compare with
        self._watch = watch if ranks > 1 else None
        self.stopwatch = Stopwatch()
        # never changes, so it is built once: `split` runs in every forward pass
        self._placement = Placement.homes_only(experts, ranks)
        self._pass, self._passes = Pass.EVALUATION, PassCount()

    def begin(self, forward: Pass) -> None:
        self._pass = forward

    def header(self) -> Row:
        forward = self._pass
        # a recomputed pass must not take a digest along twice, and evaluation has no gradients
        watch = self._watch if forward is Pass.TRAINING else None
        return Row(
            forward=self._passes.next(forward),
            kind=forward.value,
            averaged=forward.averaged,
            gradients=None if watch is None else watch.report_shared(watch.device),
        )

    def agreed(self, counts: Counts) -> None:
        if self._watch is not None and counts.gradients is not None:
            self._watch.compare_shared(counts.gradients)

    def split(self, counts: Counts) -> tuple[Placement, Split]:
        with self.stopwatch("split"):
            return self._placement, Split.to_homes(counts.load, self._placement)

    def remember(self, counts: Counts, split: Split) -> None: ...

    def apart(self) -> bool:
        return False

    def replicas(self) -> list[Replica]:
        return []

    def copies_done(self) -> None: ...

    def window(self, kind: LayerWindow) -> None: ...
