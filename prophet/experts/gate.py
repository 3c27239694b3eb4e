"""The router: which experts a token goes to, and with which weight.

Shape legend, also of suffixes of names: N tokens on this rank, D model dim, E experts, K top-k, R ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prophet.kernels.choice import Impl
from prophet.kernels.route import route, tally, weights_of
from prophet.spec import checked

Score = Literal["softmax", "sigmoid"]
# more would bring the shares nearer to even, but choices are not the shares
SINKHORN_ROUNDS = 12
# a single token, or tokens that are all alike, get equal shares: then scores decide, and not what was rounded
DAMPED = 0.999


@checked
@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """How the gate scores, selects and (if asked to) balances.

    Attributes:
        score: "softmax" over experts, or an independent "sigmoid" per expert.
        normalize: Divide the K selected scores by their sum.
        scale: Factor on the resulting weights.
        aux_loss: "switch" (Fedus et al. 2021, Eq. 4, over all K choices) or "gshard" (Lepikhin et al. 2020, over first
            choices); counts are those of all ranks.
        aux_loss_weight: Weight of `aux_loss`.
        z_loss_weight: Weight of the mean squared log-sum-exp of the logits (Zoph et al. 2022, Eq. 5).
        bias_update_rate: Step of the loss-free balancing bias (Wang et al. 2024), which shifts the selection only and
            never the weights; 0 turns it off.
        assignment: How a token's K experts are found while training. "top_k": those of the highest scores. "sinkhorn":
            S-BASE (Clark et al. 2022, arXiv 2202.01169, after Lewis et al. 2021): those of the largest share in the
            entropy-regularised transport of this rank's tokens of a pass to equally loaded experts. In evaluation
            tokens always take the highest scores, so that none depends on the others.
        capacity_factor: At most ceil(factor * N * K / E) tokens of this rank per expert, first choices first, then by
            position; the rest are dropped and counted. None drops nothing.
    """

    score: Score = "softmax"
    normalize: bool = True
    scale: float = 1.0
    aux_loss: Literal["none", "switch", "gshard"] = "none"
    aux_loss_weight: float = 0.01
    z_loss_weight: float = 0.0
    bias_update_rate: float = 0.0
    assignment: Literal["top_k", "sinkhorn"] = "top_k"
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("aux_loss_weight", "z_loss_weight", "bias_update_rate"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"GateConfig.{name} must be finite and not negative, got {value!r}")
        if self.assignment == "sinkhorn" and self.bias_update_rate > 0:
            raise ValueError("GateConfig: assignment='sinkhorn' balances by itself, leave out bias_update_rate")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"GateConfig.capacity_factor must be positive or None, got {self.capacity_factor!r}")


@dataclass(frozen=True, slots=True)
class Routing:
    """One rank's routing decisions.

    Attributes:
        ids: Expert of every choice, [N, K].
        weights: [N, K], zero where dropped.
        kept: Which choices are sent, [N, K] booleans; None where nothing can be dropped.
        logits: [N, E], or [0, E] where the model's own router keeps them.
        finite: Scalar boolean, or 1 or 0: whether no logit is NaN or infinite.
        score: What turns logits into scores, see `GateConfig`.
        counted: The ids that were counted when they were chosen, and the choices of each expert, [E] int64; it does not
            count for other `ids`.
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
        """Scores as shares of one, [N, E]; computed when asked for, since auxiliary losses alone need them."""
        if self.score == "softmax":
            return self.logits.softmax(dim=-1)
        scores = self.logits.sigmoid()
        return scores / scores.sum(dim=-1, keepdim=True)

    @classmethod
    def given(cls, ids: Tensor, weights: Tensor, num_experts: int, kept: Tensor | None = None) -> Routing:
        """Take decisions that were made elsewhere.

        Choices of experts that do not exist count as not finite, so that all ranks learn of them.

        Args:
            ids: Expert of every choice, [N, K] integers.
            weights: Weights of the choices, [N, K].
            num_experts: E.
            kept: Which choices are sent, [N, K] booleans; None for all.

        Raises:
            ValueError: Shapes differ.
        """
        if ids.ndim != 2 or ids.shape != weights.shape or (kept is not None and kept.shape != ids.shape):
            shapes = [list(t.shape) for t in (ids, weights, kept) if t is not None]
            raise ValueError(f"expected ids, weights (and kept) of one shape [tokens, top_k], got {shapes}")
        ids = ids.long()
        exist = ((ids >= 0) & (ids < num_experts)).all()
        none = weights.new_empty((0, num_experts))
        if kept is not None:
            weights = weights * kept
        # clamped, so that counting them cannot fail on this rank alone: `finite` carries the error to all ranks
        return cls(ids.clamp(0, num_experts - 1), weights, kept, none, all_finite(weights) & exist)

    def counts(self) -> Tensor:
        """Return the choices that are dispatched to each expert, [E] int64."""
        return self.choice_counts() if self.kept is None else tally(self.ids, self.logits.shape[1], self.kept)

    def choice_counts(self) -> Tensor:
        """Return the choices of each expert before any drop, [E] int64."""
        # by identity: `replace` may have put other ids beside the old counts
        if self.counted is not None and self.counted[0] is self.ids:
            return self.counted[1]
        return tally(self.ids, self.logits.shape[1])

    def first_choice_counts(self) -> Tensor:
        """Return the first choices of each expert before any drop, [E] int64."""
        return tally(self.ids[:, 0], self.logits.shape[1])

    def dropped(self) -> Tensor:
        """Return the choices dropped for lack of capacity, scalar int64."""
        if self.kept is None:
            return torch.zeros((), dtype=torch.int64, device=self.ids.device)
        return (~self.kept).sum()


class Router(nn.Module):
    """Stands for a router that is not part of the layer: it has no parameters and owes no loss."""

    bias: Tensor | None

    def __init__(self, config: GateConfig | None = None) -> None:
        super().__init__()
        self.config = config or GateConfig()
        # a buffer, so that it moves with the module and is saved once a gate sets it
        self.register_buffer("bias", None)

    def losses(self, routing: Routing, counts: Tensor, tokens: int, ranks: int) -> dict[str, Tensor]:
        """Return the auxiliary losses of this rank by name; none, since the model's own router has its own.

        Args:
            routing: What was decided.
            counts: Choices of all ranks, [E].
            tokens: Tokens of all ranks.
            ranks: How many ranks have each other tokens of these.
        """
        return {}

    def update_bias(self, counts: Tensor) -> None:
        """Take in the choices [E] of all ranks in the step that has ended."""


class Gate(Router):
    """Scores E experts for every token and selects K of them.

    Computed in float32 at least, whatever autocast says.

    Args:
        dim: D, of a token.
        num_experts: E.
        top_k: K, how many experts a token visits.
        config: How to score and select; None for the defaults.
        impl: Which implementation of the op `prophet.kernels.route` runs.

    Raises:
        ValueError: K is not between 1 and E.
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
        """Decide which experts the tokens `x` [N, D] visit, and with which weights."""
        config = self.config
        # as Switch Transformers' router: in half precision, rounding would decide between near scores
        with torch.autocast(x.device.type, enabled=False):
            precise = torch.promote_types(x.dtype, torch.float32)
            logits_NE = F.linear(x.to(precise), self.weight.to(precise))
            how: dict[str, Any] = {"score": config.score, "normalize": config.normalize, "scale": config.scale}
            if config.assignment == "sinkhorn" and self.training:
                wish_NE = logits_NE.detach() + DAMPED * expert_prices(logits_NE)
                ids_NK = wish_NE.topk(self.top_k, dim=-1).indices
                weights_NK, counts_E = weights_of(logits_NE, ids_NK, **how), tally(ids_NK, self.num_experts)
            else:
                bias = None if self.bias is None else self.bias.to(precise)
                ids_NK, weights_NK, counts_E = route(logits_NE, self.top_k, **how, bias=bias, impl=self.impl)
            kept_NK = None
            if config.capacity_factor is not None:
                kept_NK = within_capacity(ids_NK, self.num_experts, config.capacity_factor)
                weights_NK = weights_NK * kept_NK
        return Routing(ids_NK, weights_NK, kept_NK, logits_NE, all_finite(logits_NE), config.score, (ids_NK, counts_E))

    def losses(self, routing: Routing, counts: Tensor, tokens: int, ranks: int) -> dict[str, Tensor]:
        """Return the auxiliary losses of this rank, weighted; their mean over ranks is the loss of the whole batch.

        Args:
            routing: What this rank's gate has decided.
            counts: Choices [E] over all ranks before any drop ("switch": of all K choices, "gshard": first choices).
            tokens: Tokens on all ranks.
            ranks: How many ranks the tokens are spread over.
        """
        # a rank's sum times this averages, over ranks, to the mean over tokens
        share = ranks / max(tokens, 1)
        found: dict[str, Tensor] = {}
        if self.config.aux_loss != "none":
            probs_NE = routing.probs
            fraction_E = counts.to(probs_NE.dtype) / counts.sum().clamp_min(1)
            mean_prob_E = probs_NE.sum(dim=0) * share
            # Fedus et al. 2021, Eq. 4: alpha · E · sum over experts of f_e · P_e; the gradient flows through P alone
            found["aux"] = self.config.aux_loss_weight * self.num_experts * (fraction_E * mean_prob_E).sum()
        if self.config.z_loss_weight > 0:
            # Zoph et al. 2022, Eq. 5
            found["z"] = self.config.z_loss_weight * routing.logits.logsumexp(dim=-1).square().sum() * share
        return found

    @torch.no_grad()
    def update_bias(self, counts: Tensor) -> None:
        """Raise the bias of experts below the mean load and lower it above; `counts` [E] are of all ranks, one step."""
        if self.bias is None:
            return
        load = counts.to(self.bias, non_blocking=True)
        # Wang et al. 2024, Algorithm 1: by the sign of the error, so the step does not depend on the batch size
        self.bias += self.config.bias_update_rate * torch.sign(load.mean() - load)


@torch.no_grad()
def expert_prices(logits: Tensor, rounds: int = SINKHORN_ROUNDS) -> Tensor:
    """Return what is added to the experts' logits, [E], so that tokens spread evenly over experts.

    They are the experts' potentials in Sinkhorn's algorithm for transport between N tokens of weight 1 and E experts
    of weight N / E, with entropy of weight 1 (Cuturi 2013). A token's share at expert e is the softmax of its logits
    and prices, so its own potential does not decide.

    Args:
        logits: [N, E].
        rounds: How often tokens and experts are scaled in turn; fixed, so that no host waits for a device.
    """
    tokens, experts = logits.shape
    prices_E = logits.new_zeros(experts)
    if tokens == 0:
        return prices_E
    for _ in range(rounds):
        shares_NE = (logits + prices_E).log_softmax(dim=-1)
        # in logarithms: an expert that nearly nobody wants would underflow
        prices_E = prices_E + math.log(tokens / experts) - shares_NE.logsumexp(dim=0)
    return prices_E


def all_finite(x: Tensor) -> Tensor:
    """Return whether nothing in `x` is NaN or infinite: a scalar int64 on its device, 1 or 0, as counts carry it."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.int64, device=x.device)
    # one pass over `x`: extremes keep what is not finite, and 0 times that is NaN
    low, high = torch.aminmax(x.detach())
    return torch.eq(low.mul_(0), high.mul_(0), out=torch.empty((), dtype=torch.int64, device=x.device))


def within_capacity(ids: Tensor, num_experts: int, factor: float) -> Tensor:
    """Return which choices fit the capacity ceil(factor * N * K / E), [N, K] booleans.

    First choices are served before second ones; among equals the earlier token is served first.

    Args:
        ids: Expert of every choice, [N, K].
        num_experts: E.
        factor: Capacity over the mean load of an expert.
    """
    n, k = ids.shape
    capacity = math.ceil(factor * n * k / num_experts)
    # all first choices, then all second ones: a stable sort keeps that order within each expert
    by_choice = ids.t().reshape(-1)
    order = by_choice.argsort(stable=True)
    counts = tally(by_choice, num_experts)
    starts = counts.cumsum(0) - counts
    position = torch.empty_like(by_choice)
    # rank of each choice among its expert's: its place in the sort less where the expert's run starts
    position[order] = torch.arange(n * k, device=ids.device) - starts[by_choice[order]]
    return (position < capacity).view(k, n).t().contiguous()
