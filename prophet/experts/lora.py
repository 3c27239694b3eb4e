"""An expert with a low-rank adapter (Hu et al. 2021, LoRA): frozen matrices, and two small factors beside each.

Shape legend: n rows, D model dim, H hidden dim, I and O inputs and outputs of a matrix, R rank of its adapter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prophet.kernels.grouped_ffn.naive import activate
from prophet.spec import Activation


class LoraMatrix(nn.Module):
    """x·(W + scaling·B·A)ᵀ + b (Hu et al. 2021, Eq. 3), or x·Wᵀ + b where there is no adapter.

    Args:
        weight: W, [O, I], or [I, O] where `transposed`.
        bias: b, [O]; None without.
        lora_A: A, [R, I]; None without an adapter.
        lora_B: B, [O, R]; None without an adapter.
        scaling: Factor on the adapter, alpha / R in the paper.
        transposed: Whether `weight` is stored as [I, O].

    Attributes:
        adapted: False leaves the adapter out of the product for a while.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        lora_A: nn.Parameter | None = None,
        lora_B: nn.Parameter | None = None,
        *,
        scaling: float = 1.0,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.weight = weight
        # PEFT's names for the factors, by which `prophet.convert` finds them
        self.bias, self.lora_A, self.lora_B = bias, lora_A, lora_B
        self.scaling, self.transposed = scaling, transposed
        self.adapted = True

    def forward(self, x: Tensor) -> Tensor:
        """Return the product [n, O] for rows `x` [n, I]."""
        weight = self.weight.t() if self.transposed else self.weight
        if self.lora_A is not None and self.lora_B is not None and self.adapted:
            # as PEFT's wrapper: the sum is rounded once, in the matrix's precision, also under autocast
            with torch.autocast(weight.device.type, enabled=False):
                a, b = self.lora_A.to(weight.dtype), self.lora_B.to(weight.dtype)
                weight = torch.addmm(weight, b, a, alpha=self.scaling)
        return F.linear(x, weight, self.bias)


class LoraExpert(nn.Module):
    """down(act(gate_up(x))): a feed-forward network of two matrices.

    Args:
        gate_up: First matrix, of the gate and of `up` where the activation is gated.
        down: Second matrix.
        activation: A name from `prophet.spec.ACTIVATIONS`.
        interleaved: Whether rows of the gate and of `up` take turns in `gate_up`.
    """

    def __init__(
        self, gate_up: LoraMatrix, down: LoraMatrix, activation: Activation, *, interleaved: bool = False
    ) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self.activation = activation
        self.interleaved = interleaved

    def forward(self, x: Tensor) -> Tensor:
        """Return answers [n, D] to rows `x` [n, D]."""
        h = self.gate_up(x)
        if self.interleaved:
            # GPT-OSS stores them so; `activate` takes the gate's columns first, then those of `up`
            h = torch.cat((h[:, 0::2], h[:, 1::2]), dim=1)
        y: Tensor = self.down(activate(h, self.activation))
        return y
