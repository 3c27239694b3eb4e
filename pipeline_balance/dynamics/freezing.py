"""Layer freezing: stop training layers, from the input upwards, whose change has died down.

Shape legend: L layers. After Egeria as DynMo uses it (Section 4.2.3): a layer counts as converged when its own rate of
change has fallen below a share of the largest rate seen for it and the loss, too, changes slowly; only a prefix of the
model is frozen, because a frozen layer above a trainable one saves no input gradient. The gradient's norm stands for
the rate: with gradient descent a layer changes in proportion to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import figures_of_parts
from prophet.ranks.stretches import sum_of_powers


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezingRule:
    """When a layer is frozen. Both `share` and `loss_rate` must be met in `patience` updates in a row.

    Attributes:
        share: A layer's smoothed gradient norm must be at most this share of its largest one.
        loss_rate: The smoothed loss must have changed by at most this (relative) since the last update.
        patience: In how many updates in a row.
        smoothing: Weight of the past in both averages, from 0 to below 1.
        most: At most as many layers are frozen.
        in_turn: Whether a layer is judged only once it is the first that still trains, as Egeria does; else all are
            judged all the time, and many may freeze at once.
    """

    share: float = 0.3
    loss_rate: float = 0.05
    patience: int = 2
    smoothing: float = 0.5
    most: int = 1 << 30
    in_turn: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.share < 1 and self.loss_rate > 0 and 0 <= self.smoothing < 1):
            raise SpecError(f"need 0 < share < 1, loss_rate > 0, 0 <= smoothing < 1, got {self}")
        if self.patience < 1 or self.most < 0:
            raise SpecError("patience must be at least 1 and most not negative")


@dataclass
class Freezer:
    """Watches a model of L layers and says how long its frozen prefix is. Equal figures give equal answers on all
    ranks.

    Attributes:
        layers: L.
        rule: When a layer is frozen.
        frozen: The length of the frozen prefix.
    """

    layers: int
    rule: FreezingRule = field(default_factory=FreezingRule)
    frozen: int = 0
    _smooth: list[float] = field(default_factory=list)
    _largest: list[float] = field(default_factory=list)
    _quiet: list[int] = field(default_factory=list)
    _loss: float | None = None

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise SpecError(f"layers must be at least 1, got {self.layers}")
        self._smooth = [0.0] * self.layers
        self._largest = [0.0] * self.layers
        self._quiet = [0] * self.layers

    def update(self, rates: Sequence[float], loss: float) -> int:
        """Take in every layer's rate of change [L] and the loss; returns the length of the frozen prefix from now on.

        The last layer is never frozen, and a layer that has no parameters (rate 0 from the start) is frozen with the
        trainable one before it.
        """
        if len(rates) != self.layers:
            raise SpecError(f"rates needs one figure per layer ({self.layers}), got {len(rates)}")
        keep = self.rule.smoothing
        loss = loss if self._loss is None else keep * self._loss + (1 - keep) * loss
        settled = self._loss is not None and abs(loss - self._loss) <= self.rule.loss_rate * abs(self._loss)
        self._loss = loss
        # frozen layers have no gradient, so nothing new is known of them
        for i in range(self.frozen, self.layers):
            first = self._largest[i] == 0.0
            # an average that began at zero would rise for some updates, and look unsettled
            self._smooth[i] = rates[i] if first else keep * self._smooth[i] + (1 - keep) * rates[i]
            self._largest[i] = max(self._largest[i], self._smooth[i])
            quiet = settled and self._smooth[i] <= self.rule.share * self._largest[i]
            judged = i == self.frozen or not self.rule.in_turn
            self._quiet[i] = self._quiet[i] + 1 if quiet and judged else 0
        # only a prefix: a frozen layer above a trainable one saves no input gradient
        while self.frozen < min(self.layers - 1, self.rule.most) and self._quiet[self.frozen] >= self.rule.patience:
            self.frozen += 1
        return self.frozen


def gradient_rates(layers: Mapping[int, nn.Module], count: int, collective: Collective) -> list[float]:
    """Compute the norm of every layer's gradient over that of its parameters; collective.

    Args:
        layers: This rank's layers by number.
        count: L.
        collective: Over all ranks.

    Returns:
        [L] rates on every rank; 0 for a layer without a gradient.
    """
    # squares of the gradient and of what it is of: with zero=1 a layer's gradients lie on several ranks
    mine = torch.zeros(count, 2, dtype=torch.float64)
    for i, layer in layers.items():
        # the gradient's norm stands for the rate: with gradient descent a layer changes in proportion to it
        pairs = [(p.grad, p) for p in layer.parameters() if p.grad is not None]
        mine[i, 0] = sum(_square(g) for g, _ in pairs)
        mine[i, 1] = sum(_square(p) for _, p in pairs)
    sums = collective.all_gather(mine, op=Operation("rates of change")).sum(dim=0).tolist()
    return [(change / size) ** 0.5 if size > 0 else 0.0 for change, size in sums]


def _square(x: Tensor) -> float:
    return float(figures_of_parts(x, partial(sum_of_powers, power=2)).sum())


def freeze_prefix(layers: Mapping[int, nn.Module], length: int) -> None:
    """Freeze the layers below `length`, thaw the others, and drop gradients of what was frozen; alike on all ranks."""
    for i, layer in layers.items():
        for parameter in layer.parameters():
            parameter.requires_grad_(i >= length)
            if i < length:
                parameter.grad = None
