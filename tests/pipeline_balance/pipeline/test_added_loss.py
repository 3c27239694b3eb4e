"""A layer's own loss joins what training minimises, with its microbatch's weight."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline_balance.pipeline.model.added_loss import add_loss, added_losses


def _gradients(weight: float | None) -> tuple[Tensor, list[float]]:
    x = torch.tensor([1.0, 2.0], requires_grad=True)

    def forward() -> Tensor:
        return add_loss(x * 3, (x**2).sum())

    if weight is None:
        forward().sum().backward()
        return x.grad, []  # type: ignore[return-value]
    with added_losses(weight) as added:
        y = forward()
    (y * weight).sum().backward()
    return x.grad, [float(v) for v in added.values]  # type: ignore[return-value]


def test_values_pass_and_gradients_add() -> None:
    assert torch.equal(add_loss(torch.ones(2), torch.tensor(5.0)), torch.ones(2))
    whole, _ = _gradients(None)
    assert torch.equal(whole, torch.tensor([5.0, 7.0]))
    part, values = _gradients(0.25)
    assert torch.equal(part, 0.25 * whole)
    assert values == [5.0]
