"""Shapes and types of what layers return are those of a run on data, whatever the layer does inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from pipeline_balance.pipeline.model.shapes import KnownShapes, output_of, shape_of

CPU = torch.device("cpu")


class Several(nn.Module):
    def forward(self, x: Tensor, *, scale: float) -> dict[str, Any]:
        return {"x": x[:, :2] * scale, "more": (x.long(), None, 3)}


class ByValue(nn.Module):
    """Branches on values in a part of it, as experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.part = _Rows()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.part(self.first(x))


class _Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for row in (x[:, 0] > 0).nonzero().flatten():
            out[row] = x[row]
        return out


class Unequal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize(
    ("module", "kwargs"),
    [
        (nn.Linear(4, 6), {}),
        (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout()), {}),
        (Several(), {"scale": 2.0}),
        (ByValue(), {}),
    ],
    ids=["linear", "norm", "several", "by value"],
)
@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
def test_they_are_those_of_a_run(module: nn.Module, kwargs: dict[str, Any], cast: bool) -> None:
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
        leaves, structure = output_of(module.to("meta"), (x,), kwargs, CPU)
        want, its = torch.utils._pytree.tree_flatten(module.to_empty(device="cpu")(x, **kwargs))
    assert structure == its
    assert [shape_of(t) if isinstance(t, Tensor) else t for t in leaves] == [
        shape_of(t) if isinstance(t, Tensor) else t for t in want
    ]
    assert all(t.is_meta for t in leaves if isinstance(t, Tensor))


def test_the_module_is_not_touched() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), ByValue())
    prune.random_unstructured(module[0], "weight", 0.5)
    ran: list[int] = []
    module[1].register_forward_hook(lambda *_: ran.append(1))
    before = {n: t.clone() for n, t in module.state_dict().items()}
    weight = module[0].weight
    output_of(module, (torch.randn(3, 4),), {}, CPU)
    assert ran == []
    assert module[0].weight is weight
    assert module[2].calls == 0
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())


def test_shapes_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"size mismatch|mat1 and mat2|got \[3, 6\]"):
        output_of(Unequal(), (torch.randn(3, 4),), {}, CPU)


def test_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    output_of(ByValue(), (torch.randn(3, 4),), {}, CPU)
    assert not caplog.records


def test_batches_that_are_alike_are_traced_once_whatever_trains() -> None:
    known, traced = KnownShapes[str](), list[str]()

    def flows(key: str, *training: bool) -> tuple[list[bool], str]:
        def trace() -> tuple[list[tuple[Tensor, ...]], str]:
            traced.append(key)
            return [(), (torch.empty(2, device="meta"),), (torch.empty(3, device="meta"),)], f"of {key}"

        found, more = known.flows(key, training, trace)
        return [t.requires_grad for activations in found for t in activations], more

    assert flows("a", False, True, False) == ([True, True], "of a")
    assert flows("a", False, False, True) == ([False, True], "of a")
    # what was found first is as it was
    assert flows("a", False, True, False) == ([True, True], "of a")
    assert flows("b", False, False, False) == ([False, False], "of b")
    assert traced == ["a", "b"]
    known.clear()
    assert flows("a", False, True, False) == ([True, True], "of a")
    assert traced == ["a", "b", "a"]
