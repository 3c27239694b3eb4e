"""One MoE layer: the sizes of its experts, how many a rank is home to, and the compute around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from prophet.errors import SpecError
from prophet.spec.arrays import check_positive

Activation = Literal["gelu", "gelu_tanh", "relu", "swiglu", "swiglu_clamped"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
GATED: tuple[Activation, ...] = ("swiglu", "swiglu_clamped")  # three matrices instead of two


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """Sizes of one MoE layer's experts; everything the performance model needs to know of the network."""

    dim: int
    hidden: int
    activation: Activation = "gelu"
    bias: bool = True
    param_bytes: int = 4
    grad_bytes: int = 4
    token_element_bytes: int = 4

    def __post_init__(self) -> None:
        for name in ("dim", "hidden", "param_bytes", "grad_bytes", "token_element_bytes"):
            check_positive(f"LayerShape.{name}", getattr(self, name))
        if self.activation not in ACTIVATIONS:
            raise SpecError(f"LayerShape.activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")

    @property
    def matrices(self) -> int:
        """Matrix products per token: 2 for a plain MLP, 3 where it is gated."""
        return 3 if self.activation in GATED else 2

    @property
    def expert_params(self) -> int:
        """Parameters of one expert, biases included."""
        biases = (self.matrices - 1) * self.hidden + self.dim if self.bias else 0
        return self.matrices * self.dim * self.hidden + biases

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's parameters: what Trans moves for one replica."""
        return self.expert_params * self.param_bytes

    @property
    def expert_grad_bytes(self) -> int:
        """Bytes of one expert's gradients: what Agg moves for one replica."""
        return self.expert_params * self.grad_bytes

    @property
    def replica_bytes(self) -> int:
        """Memory one replica takes: its parameters and its gradients."""
        return self.expert_bytes + self.expert_grad_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token row: what dispatch moves, and combine again."""
        return self.dim * self.token_element_bytes

    @property
    def forward_flops_per_token(self) -> int:
        """Floating-point operations of one expert on one token, forward; the backward pass takes twice that."""
        return 2 * self.matrices * self.dim * self.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Compute under which a block's Trans and Agg are hidden (paper, Eq. 8): that of the block before.

    fnec_s, bnec_s: its compute outside the experts, forward and backward. experts: whether its experts compute, too; no
    experts come before those of a model's first block.
    """

    fnec_s: float = 0.0
    bnec_s: float = 0.0
    experts: bool = True

    def __post_init__(self) -> None:
        if self.fnec_s < 0 or self.bnec_s < 0:
            raise SpecError(f"Windows must not be negative, got {self}")

    def forward_s(self, experts_s: float) -> float:
        """Seconds that hide Trans, where experts compute for `experts_s` forward."""
        return self.fnec_s + (experts_s if self.experts else 0.0)

    def backward_s(self, experts_s: float) -> float:
        """Seconds that hide Agg, where experts compute for `experts_s` forward, and twice as long backward (Eq. 3)."""
        return self.bnec_s + (2.0 * experts_s if self.experts else 0.0)


def check_experts_per_rank(experts: int, ranks: int) -> int:
    """Return m = experts / ranks, or raise: every rank is home to the same number of experts."""
    if experts < 1 or ranks < 1:
        raise SpecError(f"experts and ranks must be at least 1, got {experts} experts on {ranks} ranks")
    if experts % ranks:
        raise SpecError(
            f"{experts} experts cannot be divided among {ranks} expert-parallel ranks: "
            f"num_experts must be a multiple of the group's size"
        )
    return experts // ranks
