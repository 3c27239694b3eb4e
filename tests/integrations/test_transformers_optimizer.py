"""The optimizer's state of experts: what some ranks wrote another number of ranks reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import prophet
from prophet.convert import converted
from prophet.errors import CheckpointError
from prophet.ranks.collective import Collective
from tests.helpers.support import on_threads, seeded

pytest.importorskip("transformers", reason="needs transformers: pip install '.[hf]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[hf]'")

from tests.helpers.small_trainer import small_mixtral


def start(group: Collective, whole: dict[str, torch.Tensor], kind: Any) -> tuple[Any, Any, Any]:
    """A converted model, an optimizer of two groups, and its parts."""
    from prophet_transformers.optimizer_parts import OptimizerParts

    with seeded(0):  # it draws, and transformers replaces functions of torch's meanwhile
        model = small_mixtral()
    model.load_state_dict(whole)
    prophet.convert(model, group=group)  # type: ignore[arg-type]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if ("experts" in n) == experts], "weight_decay": 0.1 * experts}
        for experts in (False, True)
    ]
    groups.append({"params": [], "weight_decay": 0.0})
    optimizer = kind(groups, lr=1e-2)
    return model, optimizer, OptimizerParts(model, optimizer)


def step(model: Any, optimizer: Any) -> None:
    """A step with gradients that depend on the parameter and on the expert's global number."""
    layers = [layer for *_, layer in converted(model)]
    held = {id(p): layer.experts.first_expert for layer in layers for p in layer.experts.parameters()}
    for at, p in enumerate(model.parameters()):
        grad = torch.linspace(-1, 1, p[0].numel() if id(p) in held else p.numel())
        if id(p) in held:
            grad = torch.stack([grad * (held[id(p)] + local + 1) for local in range(len(p))])
        p.grad = (grad * (at + 1)).view_as(p)
    optimizer.step()


def written(size: int, whole: dict[str, torch.Tensor], folder: Path, kind: Any = torch.optim.AdamW) -> None:
    def body(group: Collective) -> None:
        model, optimizer, parts = start(group, whole, kind)
        step(model, optimizer)
        step(model, optimizer)
        if group.rank == 0:
            torch.save(parts.shared(), folder / "optimizer.pt")
        torch.save(parts.experts(), folder / parts.experts_file())

    on_threads(size, body)


def read(size: int, whole: dict[str, torch.Tensor], folder: Path, kind: Any = torch.optim.AdamW) -> list[Any]:
    """By rank: the state of each parameter by name, and the experts the rank holds."""

    def body(group: Collective) -> Any:
        model, optimizer, parts = start(group, whole, kind)
        for settings in optimizer.param_groups[:2]:
            settings["lr"] = 1.0
        shared = torch.load(folder / "optimizer.pt", weights_only=True)
        optimizer.load_state_dict(parts.read(shared, folder))
        assert [g["lr"] for g in optimizer.param_groups] == [1e-2] * 3
        first = {
            f"{n}.experts.{part}": layer.experts.first_expert
            for n, _, _, layer in converted(model)
            for part, _ in layer.experts.named_parameters()
        }
        return {n: (first.get(n), dict(optimizer.state[p])) for n, p in model.named_parameters()}

    return on_threads(size, body)


@pytest.fixture(scope="module")
def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(small_mixtral().state_dict())


@pytest.fixture(scope="module")
def wanted(whole: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one rank has written and read."""
    folder = tmp_path_factory.mktemp("one")
    written(1, whole, folder)
    return read(1, whole, folder)[0]


SIZES = [(4, 2), (1, 4), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 4), (4, 1), (2, 2)))]


@pytest.mark.parametrize(("writers", "readers"), SIZES)
def test_another_number_of_ranks(
    tmp_path: Path, whole: dict[str, torch.Tensor], wanted: Any, writers: int, readers: int
) -> None:
    written(writers, whole, tmp_path)
    for found in read(readers, whole, tmp_path):
        assert found.keys() == wanted.keys()
        for name, (first, state) in found.items():
            assert state.keys() == wanted[name][1].keys() >= {"step", "exp_avg", "exp_avg_sq"}
            for field, value in state.items():
                right = wanted[name][1][field]
                if first is not None and value.dim():
                    right = right[first : first + len(value)]
                assert torch.equal(value, right), (name, field)


class Coupled(torch.optim.SGD):
    """Keeps a state that is not of single experts."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["columns"] = p.grad.reshape(-1, p.shape[-1]).sum(0)


def test_state_that_experts_share_needs_the_same_ranks(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    written(2, whole, tmp_path, Coupled)
    read(2, whole, tmp_path, Coupled)
    with pytest.raises(Exception, match=r"columns of model.*cannot be divided.*groups of 2"):
        read(4, whole, tmp_path, Coupled)


def test_files_that_do_not_fit(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    written(2, whole, tmp_path)
    with pytest.raises(CheckpointError, match="expected the state of SGD, got that of AdamW"):
        read(1, whole, tmp_path, torch.optim.SGD)
    part = tmp_path / "optimizer_experts_1_of_2.pt"
    data = part.read_bytes()
    part.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"optimizer_experts_1_of_2.pt: expected the optimizer's state"):
        read(1, whole, tmp_path)
    part.unlink()
    with pytest.raises(CheckpointError, match=r"optimizer_experts_1_of_2.pt: expected the optimizer's state"):
        read(1, whole, tmp_path)
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer.pt: expected the state that ProphetCallback writes"):
        read(1, whole, tmp_path)
