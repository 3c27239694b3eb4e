"""The norm over ranks has the bits of torch's in one process, whoever holds which parameter."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.run.gradients.norm import clip_gradients_, gradient_norm
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld

CPU = torch.device("cpu")


def model(dtype: torch.dtype, fill: float = 1.0) -> nn.Sequential:
    """Five layers with gradients of very different sizes; one parameter has none."""
    torch.manual_seed(3)
    layers = nn.Sequential(*(nn.Linear(7, 7, dtype=dtype) for _ in range(5)))
    for i, p in enumerate(layers.parameters()):
        p.grad = torch.randn_like(p) * fill * 10.0 ** (i - 4)
    layers[2].bias.grad = None
    return layers


def on_rank(rank: int, held: tuple[int, ...], whole: nn.Sequential) -> dict[str, nn.Parameter]:
    """The model on a rank that holds some of its layers; the others are on `meta`, as in a pipeline."""
    mine = copy.deepcopy(whole)
    for (i, there), here in zip(enumerate(whole), mine, strict=True):
        for p, q in zip(there.parameters(), here.parameters(), strict=True):
            q.grad = None if p.grad is None or i not in held else p.grad.clone()
    return {
        name: p if int(name[0]) in held else nn.Parameter(p.detach().to("meta")) for name, p in mine.named_parameters()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cut", [((0, 1, 2, 3, 4),), ((0, 1), (2, 3, 4), ()), ((4,), (0, 2), (3,), (1,))])
def test_norm_and_clipping_have_torchs_bits(dtype: torch.dtype, cut: tuple[tuple[int, ...], ...]) -> None:
    whole = model(dtype)

    def run(world: Collective) -> tuple[Tensor, dict[str, Tensor]]:
        parameters = on_rank(world.rank, cut[world.rank], whole)
        norm = gradient_norm(parameters, parameters.keys(), world, device=CPU)
        clip_gradients_(parameters, 0.5, norm)
        return norm, {name: p.grad for name, p in parameters.items() if p.grad is not None}

    results = ThreadWorld(len(cut)).run(run)
    reference = copy.deepcopy(whole)
    for p, q in zip(whole.parameters(), reference.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    assert expected > 1.0
    clipped = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    for norm, _ in results:
        assert norm.dtype == expected.dtype
        assert torch.equal(norm, expected)
    held = {name: grad for _, grads in results for name, grad in grads.items()}
    assert held.keys() == clipped.keys()
    assert all(torch.equal(held[name], clipped[name]) for name in clipped)


def test_copies_count_once_and_parts_count_all() -> None:
    """Two replicas hold the same gradient; experts of one name are other experts on every rank."""

    def run(world: Collective) -> float:
        shared, expert = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
        shared.grad, expert.grad = torch.tensor([2.0, 1.0]), torch.tensor([2.0 + 2 * world.rank])
        counted = {"expert", "shared"} if world.rank == 0 else {"expert"}
        parameters = {"shared": shared, "expert": expert}
        return float(gradient_norm(parameters, counted, world, device=CPU))

    assert ThreadWorld(2).run(run) == [5.0, 5.0]  # 4 + 1 + 4 + 16


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_so_on_every_rank(bad: float) -> None:
    def run(world: Collective) -> tuple[float, float]:
        p = nn.Parameter(torch.zeros(2))
        p.grad = torch.full((2,), 1.0 if world.rank else bad)
        q = nn.Parameter(torch.zeros(2, device="meta"))
        parameters = {"a": p, "b": q} if world.rank == 0 else {"a": q, "b": p}
        norm = gradient_norm(parameters, parameters.keys(), world, device=CPU)
        with pytest.raises(RuntimeError, match=f"norm of all gradients is {bad}, so they cannot be clipped"):
            clip_gradients_(parameters, 1.0, norm, error_if_nonfinite=True)
        before = float(p.grad[0])
        clip_gradients_(parameters, 1.0, norm)
        assert before == (1.0 if world.rank else pytest.approx(bad, nan_ok=True))
        return float(norm), float(p.grad[0])

    expected = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    expected[0].grad, expected[1].grad = torch.full((1,), bad), torch.ones(1)
    nn.utils.clip_grad_norm_(expected, 1.0)
    for rank, (norm, grad) in enumerate(ThreadWorld(2).run(run)):
        assert norm == pytest.approx(bad, nan_ok=True)
        assert grad == pytest.approx(float(expected[rank].grad), nan_ok=True)


def test_without_gradients_the_norm_is_nothing() -> None:
    def run(world: Collective) -> float:
        parameters = {"a": nn.Parameter(torch.ones(2))}
        norm = gradient_norm(parameters, parameters.keys(), world, device=CPU)
        clip_gradients_(parameters, 1.0, norm)
        return float(norm)

    assert ThreadWorld(3).run(run) == [0.0, 0.0, 0.0]
