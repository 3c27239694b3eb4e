"""The router: which experts a token goes to, and with which weight.

Shape legend: N tokens on this rank, D model dim, E experts, K top-k, R ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prophet.kernels.choice import Impl
from prophet.kernels.route import route, tally
from prophet.spec import checked

Score = Literal["softmax", "sigmoid"]


@checked
@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """How the gate scores, selects and (if asked to) balances.

    score: "softmax" over experts, or an independent "sigmoid" per expert.
    normalize: divide the K selected scores by their sum.
    scale: factor on the resulting weights.
    aux_loss: "switch" (Fedus et al. 2021, Eq. 4, over all K choices) or "gshard" (Lepikhin et al. 2020, over first
        choices), with weight `aux_loss_weight`; counts are those of all ranks.
    z_loss_weight: weight of the mean squared log-sum-exp of the logits (Zoph et al. 2022, Eq. 5).
    bias_update_rate: step of the loss-free balancing bias (Wang et al. 2024), which shifts the selection only and
        never the weights; 0 turns it off.
    capacity_factor: at most ceil(factor * N * K / E) tokens of this rank per expert, first choices first, then by
        position; the rest are dropped and counted. None drops nothing.
    """

    score: Score = "softmax"
    normalize: bool = True
    scale: float = 1.0
    aux_loss: Literal["none", "switch", "gshard"] = "none"
    aux_loss_weight: float = 0.01
    z_loss_weight: float = 0.0
    bias_update_rate: float = 0.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("aux_loss_weight", "z_loss_weight", "bias_update_rate"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"GateConfig.{name} must be finite and not negative, got {value!r}")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"GateConfig.capacity_factor must be positive or None, got {self.capacity_factor!r}")


@dataclass(frozen=True, slots=True)
class Routing:
    """One rank's routing decisions.

    ids: [N, K] expert of every choice. weights: [N, K], zero where dropped. kept: [N, K] booleans, or None where
    nothing can be dropped. logits: [N, E], or [0, E] where the model's own router keeps them. finite: scalar boolean,
    False if any logit is NaN or infinite. counted: the ids that were counted when they were chosen, and the choices of
    each expert, [E] int64; it does not count for other `ids`.
    """

    ids: Tensor
    weights: Tensor
    kept: Tensor | None
    logits: Tensor
    finite: Tensor
    score: Score = "softmax"
    counted: tuple[Tensor, Tensor] | None = None

    @property
    def probs(self) -> Tensor:
        """Scores as shares of one, [N, E]; computed when asked for: auxiliary losses alone need them."""
        if self.score == "softmax":
            return self.logits.softmax(dim=-1)
        scores = self.logits.sigmoid()
        return scores / scores.sum(dim=-1, keepdim=True)

    @classmethod
    def given(cls, ids: Tensor, weights: Tensor, num_experts: int, kept: Tensor | None = None) -> Routing:
        """Decisions that were made elsewhere: `ids` [N, K] integers and `weights` [N, K]; see the class for `kept`.

        Choices of experts that do not exist count as not finite, so that all ranks hear of them.
        """
        if ids.ndim != 2 or ids.shape != weights.shape or (kept is not None and kept.shape != ids.shape):
            shapes = [list(t.shape) for t in (ids, weights, kept) if t is not None]
            raise ValueError(f"expected ids, weights (and kept) of one shape [tokens, top_k], got {shapes}")
        ids = ids.long()
        exist = ((ids >= 0) & (ids < num_experts)).all()
        none = weights.new_empty((0, num_experts))
        if kept is not None:
            weights = weights * kept
        return cls(ids.clamp(0, num_experts - 1), weights, kept, none, all_finite(weights) & exist)

    def counts(self) -> Tensor:
        """Choices that are dispatched to each expert, [E] int64."""
        return self.choice_counts() if self.kept is None else tally(self.ids, self.logits.shape[1], self.kept)

    def choice_counts(self) -> Tensor:
        """Choices of each expert before any drop, [E] int64."""
        if self.counted is not None and self.counted[0] is self.ids:
            return self.counted[1]
        return tally(self.ids, self.logits.shape[1])

    def first_choice_counts(self) -> Tensor:
        """First choices of each expert before any drop, [E] int64."""
        return tally(self.ids[:, 0], self.logits.shape[1])

    def dropped(self) -> Tensor:
        """Choices dropped for lack of capacity, scalar int64."""
        if self.kept is None:
            return torch.zeros((), dtype=torch.int64, device=self.ids.device)
        return (~self.kept).sum()


class Router(nn.Module):
    """Stands for a router that is not part of the layer: it has no parameters and owes no loss."""

    bias: Tensor | None

    def __init__(self, config: GateConfig | None = None) -> None:
        super().__init__()
        self.config = config or GateConfig()
        self.register_buffer("bias", None)

    def losses(self, routing: Routing, counts: Tensor, tokens: int, ranks: int) -> dict[str, Tensor]:
        """Auxiliary losses of this rank by name; see `Gate.losses`."""
        return {}

    def update_bias(self, counts: Tensor) -> None:
        """A step has ended; `counts` [E] choices of all ranks."""


class Gate(Router):
    """Scores E experts for every token and selects K of them; computed in float32 at least, whatever autocast says.

    impl: which implementation of the op `prophet.kernels.route` runs.
    """

    def __init__(
        self, dim: int, num_experts: int, top_k: int, config: GateConfig | None = None, *, impl: Impl = "auto"
    ) -> None:
        super().__init__(config)
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be between 1 and num_experts ({num_experts}), got {top_k}")
        self.num_experts = num_experts
        self.top_k = top_k
        self.impl: Impl = impl
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        if self.config.bias_update_rate > 0:
            self.bias = torch.zeros(num_experts)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the router's weights anew, from a normal distribution; biases start at zero."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Routing:
        """Route `x` [N, D]."""
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            precise = torch.promote_types(x.dtype, torch.float32)
            logits = F.linear(x.to(precise), self.weight.to(precise))
            ids, weights, chosen = route(
                logits,
                self.top_k,
                score=config.score,
                normalize=config.normalize,
                scale=config.scale,
                bias=None if self.bias is None else self.bias.to(precise),
                impl=self.impl,
            )
            kept = None
            if config.capacity_factor is not None:
                kept = within_capacity(ids, self.num_experts, config.capacity_factor)
                weights = weights * kept
        return Routing(ids, weights, kept, logits, all_finite(logits), config.score, (ids, chosen))

    def losses(self, routing: Routing, counts: Tensor, tokens: int, ranks: int) -> dict[str, Tensor]:
        """Auxiliary losses of this rank, weighted; their mean over ranks is the loss of the whole batch.

        counts: [E] choices over all ranks before any drop ("switch": of all K choices, "gshard": first choices).
        tokens: tokens on all ranks.
        """
        share = ranks / max(tokens, 1)  # a rank's sum times this averages, over ranks, to the mean over tokens
        found: dict[str, Tensor] = {}
        if self.config.aux_loss != "none":
            probs = routing.probs
            fraction = counts.to(probs.dtype) / counts.sum().clamp_min(1)
            mean_prob = probs.sum(dim=0) * share
            found["aux"] = self.config.aux_loss_weight * self.num_experts * (fraction * mean_prob).sum()
        if self.config.z_loss_weight > 0:
            found["z"] = self.config.z_loss_weight * routing.logits.logsumexp(dim=-1).square().sum() * share
        return found

    @torch.no_grad()
    def update_bias(self, counts: Tensor) -> None:
        """Raise the bias of experts below the mean load and lower it above; `counts` [E] of all ranks, one step."""
        if self.bias is None:
            return
        load = counts.to(self.bias, non_blocking=True)
        self.bias += self.config.bias_update_rate * torch.sign(load.mean() - load)


def all_finite(x: Tensor) -> Tensor:
    """Whether nothing in `x` is NaN or infinite, a scalar boolean; in one pass, as extremes keep what is not finite."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=x.device)
    return torch.isfinite(torch.stack(torch.aminmax(x.detach()))).all()


def within_capacity(ids: Tensor, num_experts: int, factor: float) -> Tensor:
    """Which of the choices `ids` [N, K] fit the capacity ceil(factor * N * K / E): [N, K] booleans.

    First choices are served before second ones; among equals the earlier token is served first.
    """
    n, k = ids.shape
    capacity = math.ceil(factor * n * k / num_experts)
    by_choice = ids.t().reshape(-1)
    order = by_choice.argsort(stable=True)
    counts = tally(by_choice, num_experts)
    starts = counts.cumsum(0) - counts
    position = torch.empty_like(by_choice)
    position[order] = torch.arange(n * k, device=ids.device) - starts[by_choice[order]]
    return (position < capacity).view(k, n).t().contiguous()
