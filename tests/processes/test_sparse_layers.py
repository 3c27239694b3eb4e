"""Layers that are stored sparse move, are saved and are measured as they are held, with the losses of dense ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.dynamics.pruning import PrunedLinear, prune_globally, pruned_modules, store_sparse
from pipeline_balance.elastic import Batches
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError, TransitionError
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from prophet.state.checkpoint.folder import DESCRIPTION
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_model import plain_step

DIM, LAYERS, ROWS, MICROBATCHES, STEPS = 8, 5, 8, 4, 12
EXACT = {torch.float32: 1e-6, torch.float64: 1e-12}
# by step, the share of weights that is zero from its update on, or, where layers move in a step, from within it
SPARSITY = {1: 0.4, 3: 0.75, 6: 0.85, 9: 0.9}
MAPS = [((0, 3, 5), (0, 1)), ((0, 2, 5), (0, 1)), ((0, 4, 5), (1, 0)), ((0, 5), (1,))]


def _map(number: int) -> StageMap:
    return StageMap(*MAPS[number % len(MAPS)])


def _layers(sparse_below: float, dtype: torch.dtype) -> list[nn.Module]:
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for _ in range(LAYERS):
        first, second = (PrunedLinear(*size, sparse_below=sparse_below) for size in ((DIM, 3 * DIM), (3 * DIM, DIM)))
        # as large as those of the first, so a threshold for all leaves some of each
        nn.init.uniform_(second.weight, -(DIM**-0.5), DIM**-0.5)
        made.append(nn.Sequential(first, nn.Tanh(), second).to(dtype))
    return made


def _adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=3e-3, weight_decay=0.1)


def _batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(step), dtype=dtype)
    return x, x.flip(1)


def _plain(dtype: torch.dtype, within: bool) -> tuple[list[float], dict[str, Tensor]]:
    """The masked dense layers in one process; masks change before a step, or `within` it before its update."""
    layers, alone, losses = _layers(0.0, dtype), ThreadWorld(1).collective(0), []
    optimizer = _adam([(f"{i}.{n}", p) for i, layer in enumerate(layers) for n, p in layer.named_parameters()])
    for step in range(STEPS):
        if not within and step in SPARSITY:
            prune_globally(layers, SPARSITY[step], alone)
        optimizer.zero_grad()
        given: dict[str, Any] = {"microbatches": MICROBATCHES, "seed": 0, "update": step}
        losses.append(plain_step(layers, *_batch(step, dtype), nn.functional.mse_loss, **given))
        if within and step in SPARSITY:
            prune_globally(layers, SPARSITY[step], alone)
        nn.utils.clip_grad_norm_([p for layer in layers for p in layer.parameters()], 0.5)
        optimizer.step()
    return losses, _masked({f"{i}.{n}": t for i, layer in enumerate(layers) for n, t in layer.state_dict().items()})


def _masked(state: dict[str, Tensor]) -> dict[str, Tensor]:
    masks = {name.removesuffix("mask"): mask for name, mask in state.items() if name.endswith("mask")}
    return {n: t * masks[n.removesuffix("weight")] if n.endswith("weight") else t for n, t in state.items()}


def _pipeline(dtype: torch.dtype, **options: Any) -> ElasticPipeline:
    given: dict[str, Any] = {"make_optimizer": _adam, "microbatches": MICROBATCHES, "timeout_s": 60.0, **options}
    return ElasticPipeline.from_modules(_layers(0.5, dtype), nn.functional.mse_loss, _map(0), **given)


def _prune(pipe: ElasticPipeline, sparsity: float) -> None:
    # replicas are alike, each prunes by itself
    prune_globally(list(pipe.layers.values()), sparsity, pipe.groups.collective, pipe.optimizer)


def _within(pipe: ElasticPipeline, stage_map: StageMap, prune: Callable[[], None], note: Callable[[Any], None]) -> None:
    """Have layers move in the coming step; masks change when the weights have been sent already."""
    side = pipe.side_collective()

    def move() -> None:
        pipe.before_update(lambda: None)
        prepared = pipe.prepare(stage_map, side, early=True)
        prune()
        note(pipe.rebuild(stage_map, prepared=prepared))

    pipe.before_update(move)


def _train(rank: int, size: int, dtype: torch.dtype, within: bool, options: dict[str, Any]) -> Any:
    pipe, losses, early = _pipeline(dtype, **options), [], list[int]()
    for step in range(STEPS):
        prune = (lambda s=SPARSITY[step]: _prune(pipe, s)) if step in SPARSITY else lambda: None
        if within:
            _within(pipe, _map(step + 1), prune, lambda done: early.append(done.early_bytes))
        else:
            prune()
            if step % 2:
                pipe.rebuild(_map(step))
        given = [t.chunk(pipe.groups.replicas)[pipe.replica] for t in _batch(step, dtype)]
        losses.append(pipe.step(given[0], given[1], max_norm=0.5))
    assert all(m.stored_sparse for m in pruned_modules(pipe.layers.values()))
    # a rule reads gradients of the form that the weights have
    assert all(p.grad is None or p.grad.shape == p.shape for p in pipe.module.parameters())
    return losses, pipe.state_dict(), early


@pytest.mark.parametrize(
    ("size", "dtype", "within", "options"),
    [
        (2, torch.float32, False, {}),
        (2, torch.float64, True, {}),
        (2, torch.float64, False, {"split_backward": True}),
        pytest.param(2, torch.float32, True, {}, marks=pytest.mark.slow),
        (4, torch.float64, True, {"replicas": 2, "zero": 1, "microbatches": MICROBATCHES // 2}),
        pytest.param(4, torch.float64, False, {"replicas": 2, "microbatches": 2}, marks=pytest.mark.slow),
    ],
)
def test_sparse_layers_that_move_train_as_dense_ones_do_alone(
    size: int, dtype: torch.dtype, within: bool, options: dict[str, Any]
) -> None:
    expected, state = _plain(dtype, within)
    results = run_gloo(_train, size, dtype, within, options)
    for losses, _, early in results:
        assert losses == pytest.approx(expected, rel=EXACT[dtype])
        # what was pruned on its way has travelled again, the rest early
        assert [n > 0 for n in early] == [step not in SPARSITY for step in range(STEPS)] * within
    found = _masked(results[0][1])
    assert found.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=100 * EXACT[dtype], atol=10 * EXACT[dtype])


def _bytes_of(layer: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of a layer's values, columns, row starts, biases, moments and counts of steps."""
    tensors = [*layer.parameters(), *layer.buffers()]
    tensors += [t for p in layer.parameters() for t in optimizer.state[p].values()]
    return sum(t.numel() * t.element_size() for t in tensors)


def _measured(rank: int, size: int) -> None:
    pipe = _pipeline(torch.float32)
    dense = 3 * 4 * (2 * 3 * DIM * DIM + 4 * DIM)
    pipe.step(*_batch(0, torch.float32))
    _prune(pipe, 0.9)
    pipe.step(*_batch(1, torch.float32))
    costs = pipe.measure()
    assert all(c.parameter_bytes < dense / 3 / 4 and c.optimizer_bytes < dense / 3 for c in costs)
    # layer 2 goes from rank 0 to rank 1
    mine = _bytes_of(pipe.layers[2], pipe.optimizer) if rank == 0 else 0
    done = pipe.rebuild(_map(1))
    theirs = _bytes_of(pipe.layers[2], pipe.optimizer) if rank == 1 else 0
    assert (done.sent_bytes, done.received_bytes) == (mine, theirs)
    assert max(mine, theirs) < 0.4 * dense


def test_a_move_sends_values_columns_and_row_starts_and_costs_count_them() -> None:
    run_gloo(_measured, 2)


def _saved(rank: int, size: int, folder: str) -> None:
    dtype = torch.float64
    pipe = _pipeline(dtype)
    pipe.step(*_batch(0, dtype))
    _prune(pipe, 0.85)
    pipe.step(*_batch(1, dtype))
    pipe.save(folder)
    state = pipe.state_dict()
    described = json.loads((Path(folder) / DESCRIPTION).read_text())["tensors"]
    shapes = {name: (tuple(shape), kind) for name, shape, kind, *_ in described}
    for name in ("0.0.weight", "0.0.weight@exp_avg", "0.0.weight@exp_avg_sq"):
        assert shapes[name] == ((3 * DIM, DIM), "float64")
    assert shapes["0.0.mask"] == ((3 * DIM, DIM), "bool")
    after = [pipe.step(*_batch(step, dtype)) for step in (2, 3)]
    # into new layers, into those that go on, and into a pipeline that never stores them sparse
    for one in (_pipeline(dtype), pipe):
        one.load(folder)
        store_sparse(one.layers.values(), one.optimizer)
        assert all(m.stored_sparse for m in pruned_modules(one.layers.values()))
        loaded = one.state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in state.items())
        assert [one.step(*_batch(step, dtype)) for step in (2, 3)] == after
    plain = ElasticPipeline.from_modules(
        _layers(0.0, dtype), nn.functional.mse_loss, make_optimizer=_adam, microbatches=MICROBATCHES, timeout_s=60.0
    )
    plain.load(folder)
    assert [plain.step(*_batch(step, dtype)) for step in (2, 3)] == pytest.approx(after, rel=1e-12)


def test_checkpoints_are_dense_and_load_into_both_forms(tmp_path: Path) -> None:
    run_gloo(_saved, 2, str(tmp_path / "saved"))


def _job(rank: int, size: int, folder: str) -> list[float]:
    def build() -> nn.Sequential:
        return nn.Sequential(*_layers(0.5, torch.float64))

    x, y = _batch(0, torch.float64)
    data = Batches(torch.utils.data.TensorDataset(x, y), ROWS, seed=0)
    given: dict[str, Any] = {"data": data, "loss_fn": nn.functional.mse_loss, "timeout_s": 60.0}
    job = Job(build, _adam, Parallelism.parse("pp2"), microbatches=MICROBATCHES, **given)
    losses = [job.step()]
    prune_globally(list(job.pipeline.layers.values()), 0.85, job.pipeline.groups.collective, job.optimizer)
    losses.append(job.step())
    before = job.state_dict()
    for layout in (Parallelism(pp=2, stages=(1, 4)), Parallelism.parse("pp2,dp2,zero1"), Parallelism.parse("dp1")):
        job.switch(layout)
        after = job.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert all(m.stored_sparse for m in pruned_modules(job.pipeline.layers.values()))
        losses.append(job.step())
        before = job.state_dict()
    with pytest.raises(TransitionError, match="weight is stored sparse, and cannot be cut into shards"):
        job.switch(Parallelism.parse("dp2,zero3"))
    losses.append(job.step())
    job.save(folder)
    job.close()
    return losses


def test_a_job_takes_sparse_layers_to_layouts_without_shards(tmp_path: Path) -> None:
    layers, alone, expected = _layers(0.0, torch.float64), ThreadWorld(1).collective(0), []
    optimizer = _adam([(str(i), p) for i, p in enumerate(p for layer in layers for p in layer.parameters())])
    for step in range(6):
        if step == 1:
            prune_globally(layers, 0.85, alone)
        optimizer.zero_grad()
        given: dict[str, Any] = {"microbatches": MICROBATCHES, "seed": 0, "update": step}
        expected.append(plain_step(layers, *_batch(0, torch.float64), nn.functional.mse_loss, **given))
        optimizer.step()
    for losses in run_gloo(_job, 4, str(tmp_path / "saved")):
        assert losses == pytest.approx(expected, rel=1e-12)


def _lacking(rank: int, size: int) -> None:
    """A wrong optimizer on one rank is an error on all, and the pipeline goes on."""
    pipe = _pipeline(torch.float64)
    pipe.step(*_batch(0, torch.float64))

    def given(collective: Collective, optimizers: Any) -> None:
        prune_globally(list(pipe.layers.values()), 0.85, collective, optimizers)

    with pytest.raises(SpecError, match="pass optimizers="):
        given(pipe.collective, None if rank else pipe.optimizer)
    odd = pipe.optimizer
    if rank == 0:
        odd.state[next(pipe.layers[0].parameters())]["rows"] = torch.zeros(3, 3)
    with pytest.raises(SpecError, match="keeps 'rows'" if rank == 0 else "another rank could not"):
        given(pipe.collective, odd)
    if rank == 0:
        del odd.state[next(pipe.layers[0].parameters())]["rows"]
    given(pipe.collective, odd)
    pipe.step(*_batch(1, torch.float64))


def test_what_one_rank_cannot_store_sparse_is_an_error_on_all() -> None:
    run_gloo(_lacking, 2)
