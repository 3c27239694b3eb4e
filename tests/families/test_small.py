"""Every family with experts has a small model that is worth training: else the walk would compare nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs transformers: pip install '.[hf]'")
from tests.helpers.families import (
    DECORATOR,
    LIMIT,
    batch,
    experts_in,
    loss_of,
    modeling_files,
    overloaded,
    small,
)


def test_every_file_that_imports_the_decorator_is_found() -> None:
    import transformers

    models = Path(transformers.__file__).parent / "models"
    using = {
        p.stem.removeprefix("modeling_") for p in models.glob("*/modeling_*.py") if f"@{DECORATOR}" in p.read_text()
    }
    assert using
    assert using < set(modeling_files())
    assert {"dbrx", "llama4", "switch_transformers"} <= set(modeling_files())  # whose experts have the name alone


@pytest.mark.parametrize("family", modeling_files())
def test_its_experts_train_and_matter(family: str) -> None:
    model, twin = small(family), small(family)
    assert sum(p.numel() for p in model.parameters()) < LIMIT
    assert all(p.dtype == torch.float32 for p in model.parameters())
    state = twin.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    given = [batch(family, model, seed) for seed in range(4)]
    loss = loss_of(model, given[0])
    loss.backward()
    assert torch.isfinite(loss)
    inside = [p for _, experts in experts_in(model) for p in experts.parameters()]
    moved = sum(p.grad is not None and bool(p.grad.any()) for p in inside)
    assert moved >= len(inside) / 2 > 0, f"{moved} of {len(inside)} of the experts' parameters have gradients"
    with torch.no_grad():
        before = [float(loss_of(twin, g)) for g in given]
        assert before[0] == float(loss.detach())
        for _, experts in experts_in(twin):
            for p in experts.parameters():
                p.zero_()
        after = [float(loss_of(twin, g)) for g in given]
    assert max(abs(b / a - 1) for a, b in zip(before, after, strict=True)) > 1e-2


@pytest.mark.parametrize("family", modeling_files())
def test_overloaded_experts_have_all_rows(family: str) -> None:
    """And others none, wherever experts are told the numbers of those that were chosen."""
    model = overloaded(small(family))
    told: list[Tensor] = []

    def hear(module: nn.Module, given: tuple[object, ...]) -> None:
        told.extend(t for t in given if isinstance(t, Tensor) and not t.is_floating_point())

    for _, experts in experts_in(model):
        experts.register_forward_pre_hook(hear)
    assert torch.isfinite(loss_of(model, batch(family, model, rows=1, tokens=3)))
    assert torch.isfinite(loss_of(model, batch(family, model)))
    for ids in told:
        if ids.dim() == 2 and ids.shape[1] < 4:
            assert (ids == ids[0]).all(), "not all tokens go to the same experts"
