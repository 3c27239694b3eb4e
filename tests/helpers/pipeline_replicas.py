"""A run over replicas of a pipeline with all that loops do, and the same run in one process: float64, tied, dropout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.run.generators import unit_seed
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap

DIM, VOCABULARY, UNITS, SEED = 8, 13, 6, 7
PARTS, ROWS = 4, 3  # microbatches of all replicas together in one call, and rows of each
MAX_NORM = 0.5
TOLERANCE = 1e-10


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


def layers(seed: int = 0) -> nn.Sequential:
    """An embedding, four blocks and a head with the embedding's weight."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Embedding(VOCABULARY, DIM), *(_Block() for _ in range(UNITS - 2)))
    made.append(nn.Linear(DIM, VOCABULARY, bias=False))
    made[-1].weight = made[0].weight
    return made.double()


def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    decayed = [p for _, p in named if p.dim() > 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": [p for _, p in named if p.dim() <= 1]}], lr=2e-2
    )


class Decaying(torch.optim.Optimizer):
    """SGD with momentum, whose rate falls with a plain number that it keeps for each parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            state["count"] = state.get("count", 0) + 1
            state["sum"] = state["sum"] * 0.9 + p.grad if "sum" in state else p.grad.clone()
            p.sub_(0.1 / state["count"] * state["sum"])


def adam_and_decaying(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """One optimizer for matrices, another for the rest."""
    matrices = torch.optim.AdamW([p for _, p in named if p.dim() > 1], lr=1e-2)
    return [matrices, Decaying([p for _, p in named if p.dim() <= 1])]


def batch(update: int, call: int) -> tuple[Tensor, Tensor]:
    """The batch of all replicas; how many labels count differs between its parts."""
    generator = torch.Generator().manual_seed(100 * update + call)
    ids = torch.randint(VOCABULARY, (PARTS * ROWS, 5), generator=generator)
    labels = (ids * 3 + 1) % VOCABULARY
    labels[torch.rand(labels.shape, generator=generator) < torch.linspace(0, 0.9, len(ids))[:, None]] = -100
    return ids, labels.clone()


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-100)


def counted(labels: Tensor | None) -> int:
    return int((labels != -100).sum()) if labels is not None else 0


def freeze(model: nn.Module, update: int) -> None:
    """Two layers freeze for a while, one of them in front; the embedding, which is tied, later."""
    for p in model.parameters():
        p.requires_grad_(True)
    for unit in {3: (1, 3), 4: (1, 3), 5: (0, 1)}.get(update, ()):
        model[unit].requires_grad_(False)  # type: ignore[index]


def calls(update: int) -> int:
    """Every third update adds up the gradients of two batches."""
    return 2 if update % 3 == 1 else 1


class Outcome(NamedTuple):
    """Losses and norms of all updates, a loss of evaluation, and checksums of the weights at the end by name."""

    losses: list[float]
    norms: list[float]
    evaluated: float
    weights: dict[str, float]


def one_process(updates: int) -> Outcome:
    """The run without a pipeline, with the same microbatches and random numbers."""
    model = layers()
    optimizer = make_optimizer(list(model.named_parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
    losses, norms = [], []
    for update in range(updates):
        freeze(model, update)
        optimizer.zero_grad()
        given = [batch(update, call) for call in range(calls(update))]
        total, labels = 0.0, sum(counted(target) for _, target in given)
        parts = [p for x, y in given for p in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True)]
        for number, (ids, target) in enumerate(parts):
            x = ids
            for unit, layer in enumerate(model):
                torch.manual_seed(unit_seed(SEED, unit, update, number))
                x = layer(x)
            loss = loss_fn(x, target) * counted(target) / labels
            loss.backward()
            total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        schedule.step()
        losses.append(total)
    x, target = batch(999, 0)
    with torch.no_grad():
        evaluated = float(loss_fn(model.eval()(x), target))
    return Outcome(losses, norms, evaluated, {n: float(p.detach().sum()) for n, p in model.named_parameters()})


def maps(update: int, ranks: int) -> StageMap:
    """Boundaries wander, the last rank stands idle for a while, and both holders of the tie are once on one rank."""
    if ranks == 1:
        return StageMap((0, UNITS), (0,))
    turn = update // 2 % 4
    if turn == 1:
        return StageMap((0, UNITS), (0,))
    if turn == 2:
        return StageMap((0, 1, 3, 5, UNITS), (1, 0, 1, 0))
    return StageMap((0, 1, 4, UNITS), (0, 1, 0)) if turn == 3 else StageMap((0, 2, UNITS), (0, 1))


def part_of(tensor: Tensor, replica: int, replicas: int) -> Tensor:
    return tensor.chunk(replicas)[replica]


def replicated(
    rank: int, size: int, replicas: int, first: int, updates: int, folder: str, options: dict[str, Any]
) -> Outcome:
    """The run over `replicas`, from update `first` on; saved in `folder` at the end, or resumed from there."""
    # other replicas build another model, and start with the weights of the first all the same
    model = layers(seed=rank // (size // replicas))
    if rank % (size // replicas):  # and where the head runs the tied weight is another one: the embedding's holds
        nn.init.ones_(model[-1].weight)  # type: ignore[arg-type]
    pipe = ElasticPipeline.from_modules(
        model,
        loss_fn,
        maps(first, size // replicas),
        counted=counted,
        make_optimizer=make_optimizer,
        microbatches=PARTS // replicas,
        replicas=replicas,
        seed=SEED,
        timeout_s=100.0,
        **options,
    )
    schedule = torch.optim.lr_scheduler.StepLR(pipe.optimizer, 3, gamma=0.7)
    if first:
        pipe.load(Path(folder), also={"schedule": schedule})
    replica = pipe.replica
    losses, norms = [], []
    for update in range(first, updates):
        freeze(pipe.module, update)
        if update % 2 == 0 and update > first:
            pipe.rebuild(maps(update, pipe.ranks))
        for call in range(calls(update)):
            last = call == calls(update) - 1
            given = [part_of(t, replica, replicas) for t in batch(update, call)]
            loss = pipe.step(*given, update=last, max_norm=MAX_NORM)
        schedule.step()
        losses.append(loss)
        norms.append(pipe.grad_norm or 0.0)
    evaluated = pipe.evaluate(*(part_of(t, replica, replicas) for t in batch(999, 0)))
    if folder and not first:
        pipe.save(Path(folder), step=updates, also={"schedule": schedule})
    weights = {n: float(t.sum()) for n, t in pipe.state_dict().items()}
    return Outcome(losses, norms, evaluated, weights)


SCALER: dict[str, Any] = {"init_scale": 2.0**20, "growth_interval": 3}
OVERFLOWS = {(2, 3), (6, 1)}  # (update, microbatch) whose gradient of one weight is infinite


def overflowing(model: nn.Module, now: list[int]) -> None:
    """From now on the gradient of a weight in unit 3 is infinite in the passes that `OVERFLOWS` names.

    now: update, and number of the microbatch whose backward comes next; a stage's come in order.
    """

    def hook(grad: Tensor) -> Tensor:
        infinite = tuple(now) in OVERFLOWS
        now[1] += 1
        return grad * float("inf") if infinite else grad

    model[3].up.weight.register_hook(hook)  # type: ignore[index,union-attr]


def scaled_one_process(updates: int) -> tuple[list[float], list[float]]:
    """Losses and scales of a run with torch's own GradScaler in one process."""
    model, scaler, now = layers(), torch.amp.GradScaler("cpu", **SCALER), [0, 0]
    optimizer = make_optimizer(list(model.named_parameters()))
    overflowing(model, now)
    losses, scales = [], []
    for update in range(updates):
        optimizer.zero_grad()
        now[:] = update, 0
        ids, labels = batch(update, 0)
        total = 0.0
        for number, (x, target) in enumerate(zip(ids.chunk(PARTS), labels.chunk(PARTS), strict=True)):
            part = x
            for unit, layer in enumerate(model):
                torch.manual_seed(unit_seed(SEED, unit, update, number))
                part = layer(part)
            loss = loss_fn(part, target) * counted(target) / counted(labels)
            scaler.scale(loss).backward()
            total += float(loss.detach())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        losses.append(total)
        scales.append(scaler.get_scale())
    return losses, scales


def scaled(rank: int, size: int, replicas: int, updates: int) -> tuple[list[float], list[float]]:
    """The same over `replicas`, with moves."""
    now = [0, 0]
    pipe = ElasticPipeline.from_modules(
        layers(),
        loss_fn,
        maps(0, size // replicas),
        counted=counted,
        make_optimizer=make_optimizer,
        microbatches=PARTS // replicas,
        replicas=replicas,
        seed=SEED,
        timeout_s=100.0,
    )
    overflowing(pipe.module, now)
    scaler = pipe.scaler(**SCALER)
    losses, scales = [], []
    for update in range(updates):
        now[:] = update, pipe.replica * PARTS // replicas
        if update % 2 == 0 and update:
            pipe.rebuild(maps(update, pipe.ranks))
        given = [part_of(t, pipe.replica, replicas) for t in batch(update, 0)]
        losses.append(pipe.step(*given, max_norm=MAX_NORM, scaler=scaler))
        scales.append(scaler.get_scale())
    return losses, scales


def largest_difference(got: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / max(abs(b), 1e-300) for a, b in zip(got, expected, strict=True))


def compare_with_one_process(results: list[Outcome], first: int, updates: int) -> None:
    expected = one_process(updates)
    for got in results:
        assert largest_difference(got.losses, expected.losses[first:]) < TOLERANCE
        assert largest_difference(got.norms, expected.norms[first:]) < TOLERANCE
        assert got.evaluated == pytest.approx(expected.evaluated, rel=TOLERANCE)
        assert got[:3] == results[0][:3]
    weights = results[0].weights
    expected_names = {*expected.weights, "5.weight"}  # a state dict has a tied weight under both names
    assert weights.keys() == expected_names
    for name, total in expected.weights.items():
        assert weights[name] == pytest.approx(total, rel=1e-9, abs=1e-10)
