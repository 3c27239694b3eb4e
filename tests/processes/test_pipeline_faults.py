"""What used to go wrong in silence in a pipeline: each is right now, or an error with a name before any data moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from pipeline_balance.pipeline.move.state import collect
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError, TransitionError
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_loop import DIM, EXACT, LAYERS, LOOPS, MICROBATCHES, SEED, Named, alone, batch, layers_of
from tests.helpers.pipeline_model import plain_step

ADAM = LOOPS["Adam"]


def _pipe(layers: list[nn.Module] | None = None, stage_map: StageMap | None = None, **options: Any) -> ElasticPipeline:
    given = {"make_optimizer": ADAM.make_optimizer, "microbatches": MICROBATCHES, "seed": SEED, "timeout_s": 60.0}
    made = layers if layers is not None else layers_of(ADAM)
    return ElasticPipeline.from_modules(made, nn.functional.cross_entropy, stage_map, **{**given, **options})


def _elsewhere(size: int) -> StageMap:
    return StageMap((0, 2, LAYERS), (size - 1, 0))


# --- the rate, groups and what is kept per parameter ---


def _kept(rank: int, size: int) -> dict[str, Any]:
    """A loop that changes rates, keeps averages per parameter, and hangs things on layers and parameters."""
    calls: list[str] = []
    pipe = _pipe()
    optimizer, parameters = pipe.optimizer, dict(pipe.module.named_parameters())
    for p in parameters.values():
        p.mine = "kept"  # type: ignore[attr-defined]
    pipe.module[1].register_forward_hook(lambda *_: calls.append("forward"))  # type: ignore[index]
    pipe.module[1].up.weight.register_hook(lambda g: calls.append("gradient"))  # type: ignore[index, union-attr]
    pipe.module[1].note = "kept"  # type: ignore[index]
    averages = {}
    for update in range(6):
        if update == 3:
            pipe.rebuild(_elsewhere(size))
            optimizer.param_groups[0]["lr"] = 1e-3
            pipe.module[1].drop.eval()  # type: ignore[index, union-attr, operator]
        pipe.step(*batch(update))
        for name, p in parameters.items():
            if not p.is_meta and p in optimizer.state:
                state = optimizer.state[p]
                state["ema"] = 0.5 * state.get("ema", torch.zeros_like(p)) + 0.5 * p.detach()
                averages[name] = state["ema"].sum().item()
    now = dict(pipe.module.named_parameters())
    assert all(p is now[n] and p.mine == "kept" for n, p in parameters.items())  # type: ignore[attr-defined]
    assert pipe.module[1].note == "kept"  # type: ignore[index]
    assert pipe.optimizer is optimizer
    mine = {n for n, p in parameters.items() if not p.is_meta}
    return {
        "calls": calls,
        "ema": {n: v for n, v in averages.items() if n in mine},
        "rate": optimizer.param_groups[0]["lr"],
    }


def _kept_alone() -> dict[str, float]:
    layers = layers_of(ADAM)
    named = list(nn.ModuleList(layers).named_parameters())
    optimizer = ADAM.make_optimizer(named)
    averages: dict[str, Tensor] = {n: torch.zeros_like(p) for n, p in named}
    for update in range(6):
        optimizer.zero_grad()
        if update == 3:
            optimizer.param_groups[0]["lr"] = 1e-3
            layers[1].drop.eval()  # type: ignore[union-attr, operator]
        plain_step(
            layers, *batch(update), nn.functional.cross_entropy, microbatches=MICROBATCHES, seed=SEED, update=update
        )
        optimizer.step()
        averages = {n: 0.5 * averages[n] + 0.5 * p.detach() for n, p in named}
    return {n: v.sum().item() for n, v in averages.items()}


def test_rates_hooks_attributes_and_averages_go_with_their_layer() -> None:
    results = run_gloo(_kept, 2)
    found = {n: v for r in results for n, v in r["ema"].items()}
    assert found == pytest.approx(_kept_alone(), rel=EXACT)
    assert all(r["rate"] == 1e-3 for r in results)
    # on either rank once per microbatch and update, as long as the layer ran there
    assert [r["calls"].count("forward") for r in results] == [r["calls"].count("gradient") for r in results]
    assert sum(r["calls"].count("gradient") for r in results) == 6 * MICROBATCHES


# --- structure that changes in mid-run ---


class _Lora(nn.Module):
    """A linear layer with two small matrices beside it, made like its weight."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        generator = torch.Generator().manual_seed(1)
        first = torch.randn(2, inner.in_features, generator=generator, dtype=torch.float64) / 4
        self.first = nn.Parameter(first.to(inner.weight.device))
        self.second = nn.Parameter(torch.zeros(inner.out_features, 2, dtype=torch.float64, device=inner.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + x @ self.first.t() @ self.second.t()
        return out


def _adapt(layers: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """LoRA in two layers, a mask by magnitude in another, on every rank alike."""
    for i, layer in enumerate(layers[1:3]):
        layer.up = added = _Lora(layer.up)  # type: ignore[arg-type]
        optimizer.add_param_group({"params": [(f"{i}.first", added.first), (f"{i}.second", added.second)], "lr": 3e-2})
    prune.l1_unstructured(layers[3].up, "weight", 0.4)


def _structure(rank: int, size: int) -> list[float]:
    layers = layers_of(ADAM)
    pipe = _pipe(layers)
    losses = []
    for update in range(8):
        if update == 2:
            _adapt(layers, pipe.optimizer)
        if update in (4, 6):
            pipe.rebuild(_elsewhere(size) if update == 4 else StageMap.even(LAYERS, size))
        losses.append(pipe.step(*batch(update)))
    return losses


def _structure_alone() -> list[float]:
    layers = layers_of(ADAM)
    optimizer, losses = ADAM.make_optimizer(list(nn.ModuleList(layers).named_parameters())), []
    for update in range(8):
        optimizer.zero_grad()
        if update == 2:
            _adapt(layers, optimizer)
        losses.append(
            plain_step(
                layers, *batch(update), nn.functional.cross_entropy, microbatches=MICROBATCHES, seed=SEED, update=update
            )
        )
        optimizer.step()
    return losses


def test_lora_and_masks_put_in_while_training_goes_on_survive_moves() -> None:
    results = run_gloo(_structure, 2)
    assert results[0] == results[1] == pytest.approx(_structure_alone(), rel=EXACT)


# --- freezing without a word, random numbers, shapes, precision ---


def _thaw(layers: list[nn.Module], update: int) -> None:
    if update in (1, 3):
        for layer in layers[:3]:
            layer.requires_grad_(update == 3)


def _silent(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    layers = layers_of(ADAM)
    pipe = _pipe(layers, split_backward=True)
    losses = []
    for update in range(6):
        _thaw(layers, update)
        if update == 4:
            pipe.rebuild(_elsewhere(size))
        ids, labels = batch(update)
        rows = 8 if update != 2 else 6  # a shorter batch
        losses.append(pipe.step(ids[:rows], labels[:rows]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = _pipe([layer.float() for layer in layers_of(ADAM)])
        noisy = half.step(*batch(0))
        half.rebuild(_elsewhere(size))
        noisy = half.step(*batch(1))
    ids, labels = batch(9)
    labels = labels.clone()
    labels[:3] = -100
    value = pipe.evaluate(ids, labels)
    assert value == pipe.evaluate(ids, labels)
    assert all(layer.training for layer in layers)
    return {"losses": losses, "noisy": noisy, "value": value, "after": pipe.step(*batch(6))}


def _silent_alone(dtype: torch.dtype = torch.float64) -> tuple[list[float], float]:
    layers = layers_of(ADAM)
    optimizer, losses = ADAM.make_optimizer(list(nn.ModuleList(layers).named_parameters())), []
    value = 0.0
    for update in range(7):
        optimizer.zero_grad()
        _thaw(layers, update)
        ids, labels = batch(update)
        rows = 8 if update != 2 else 6
        if update == 6:
            model = nn.Sequential(*layers).eval()
            ids_, labels_ = batch(9)
            value = nn.functional.cross_entropy(model(ids_)[3:], labels_[3:]).item()
            model.train()
        losses.append(
            plain_step(
                layers,
                ids[:rows],
                labels[:rows],
                nn.functional.cross_entropy,
                microbatches=MICROBATCHES,
                seed=SEED,
                update=update,
            )
        )
        optimizer.step()
    return losses, value


def test_thawing_short_batches_autocast_and_evaluation() -> None:
    results = run_gloo(_silent, 2)
    losses, value = _silent_alone()
    assert results[0] == results[1]
    assert [*results[0]["losses"], results[0]["after"]] == pytest.approx(losses, rel=EXACT)
    assert results[0]["value"] == pytest.approx(value, rel=EXACT)
    whole = layers_of(ADAM)
    assert results[0]["noisy"] == pytest.approx(alone(ADAM, 2)[1], rel=0.05)
    assert len(whole) == LAYERS


# --- named errors, on all ranks, before any data moves ---


def _mistakes(rank: int, size: int) -> list[str]:
    pipe = _pipe()
    ids, labels = batch(0)
    said: list[str] = []

    def refused(call: Any) -> None:
        with pytest.raises(SpecError) as caught:
            call()
        said.append(str(caught.value))

    refused(lambda: pipe.step(ids + rank % 2, labels))
    refused(lambda: pipe.step(ids[: 8 - 2 * rank], labels[: 8 - 2 * rank]))
    refused(lambda: pipe.step(ids[:3], labels[:3]))
    refused(lambda: pipe.step(ids, labels, update=rank == 0))
    refused(lambda: pipe.step(None if rank else ids, labels))  # type: ignore[arg-type]
    refused(lambda: pipe.step(ids, labels, scaler=torch.amp.GradScaler("cpu")))
    if rank:
        pipe.module[1].requires_grad_(False)  # type: ignore[index]
    refused(lambda: pipe.step(ids, labels))
    pipe.module[1].requires_grad_(True)  # type: ignore[index]
    refused(lambda: _pipe(make_optimizer=lambda named: torch.optim.LBFGS([p for _, p in named])))
    other = layers_of(ADAM)
    other[2] = nn.Linear(DIM, DIM + rank).double()
    refused(lambda: _pipe(other))
    wrong = layers_of(ADAM)
    wrong[2] = nn.Linear(DIM, DIM + 1).double()
    refused(lambda: _pipe(wrong).step(ids, labels))
    # nothing of all this has touched the run
    assert pipe.step(ids, labels) == pytest.approx(alone(ADAM, 1)[0], rel=EXACT)
    return said


def test_mistakes_are_named_on_all_ranks() -> None:
    results = run_gloo(_mistakes, 2)
    expected = [
        ("ranks [1] were given other inputs or labels than rank 0",) * 2,
        ("ranks [1] have inputs of other shapes than rank 0",) * 2,
        ("a batch of 3 rows cannot be cut into 4 microbatches",) * 2,
        ("ranks [1] call with other arguments than rank 0",) * 2,
        ("rank 1: every rank needs the batch",) * 2,
        ("does not take a plain torch.amp",) * 2,
        ("ranks [1] train (requires_grad) other parameters than rank 0",) * 2,
        ("LBFGS mixes all layers in one step",) * 2,
        ("ranks [1] hold another model than rank 0",) * 2,
        ("layer 3 cannot run on [2, 9] of torch.float64",) * 2,
    ]
    for i, words in enumerate(expected):
        for result, text in zip(results, words, strict=True):
            assert text in result[i]


# --- a move that fails, anywhere ---


def _whole(pipe: ElasticPipeline) -> dict[str, Any]:
    held = collect(pipe.owned, pipe.optimizers, pipe.stage_map.layers_on(pipe.rank))
    return {
        "tensors": {n: t.clone() for n, t in held.tensors.items()},
        "scalars": dict(held.scalars),
        "options": pipe.optimizers.options(pipe.owned.parameters),
        "map": pipe.stage_map,
        "places": {n: p.device.type for n, p in pipe.owned.parameters.items()},
    }


def _same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    tensors, known = now.pop("tensors"), before["tensors"]
    rest = {n: v for n, v in before.items() if n != "tensors"}
    return set(tensors) == set(known) and all(torch.equal(t, known[n]) for n, t in tensors.items()) and now == rest


class _Fails:
    """Raises at its turn, on one rank; else passes on."""

    def __init__(self, inner: Any, error: Exception) -> None:
        self.inner, self.error = inner, error

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise self.error


def _broken_moves(rank: int, size: int) -> dict[str, Any]:
    pipe = _pipe()
    optimizer = pipe.optimizer
    losses = [pipe.step(*batch(0))]
    optimizer.param_groups[0]["lr"] = 2e-3
    whole = []
    for culprit in range(size):
        for place in ("collect", "allocate", "change", "builder"):
            before = _whole(pipe)
            if rank == culprit:
                error = MemoryError("none left") if place == "allocate" else RuntimeError("not today")
                if place == "builder":
                    # the new stages' schedule, which is frozen, is made by it
                    object.__setattr__(pipe.builder, "_executor", _Fails(None, error))
                elif place == "collect":
                    pipe.mover.collect = lambda *_, **__: "not today"  # type: ignore[assignment, method-assign]
                else:
                    setattr(pipe.mover, place, _Fails(getattr(pipe.mover, place), error))
            with pytest.raises(TransitionError, match=rf"rank {culprit}|ranks \[{culprit}\]") as caught:
                pipe.rebuild(_elsewhere(size))
            assert "nothing has moved" in str(caught.value) or "is whole" in str(caught.value)
            if rank == culprit:
                if place == "builder":
                    object.__delattr__(pipe.builder, "_executor")
                else:
                    pipe.mover.__dict__.pop(place)
                    pipe.mover.allocate = type(pipe.mover).allocate
            whole.append(_same(_whole(pipe), before))
    losses.append(pipe.step(*batch(1)))
    pipe.rebuild(_elsewhere(size))
    losses.append(pipe.step(*batch(2)))
    return {"whole": whole, "losses": losses, "same": pipe.optimizer is optimizer}


def _rates_alone() -> list[float]:
    layers = layers_of(ADAM)
    optimizer, losses = ADAM.make_optimizer(list(nn.ModuleList(layers).named_parameters())), []
    for update in range(3):
        optimizer.zero_grad()
        loss = plain_step(
            layers, *batch(update), nn.functional.cross_entropy, microbatches=MICROBATCHES, seed=SEED, update=update
        )
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 2e-3
        losses.append(loss)
    return losses


def test_every_step_of_a_move_may_fail_on_every_rank() -> None:
    for result in run_gloo(_broken_moves, 2):
        assert all(result["whole"])
        assert len(result["whole"]) == 8
        assert result["losses"] == pytest.approx(_rates_alone(), rel=EXACT)
        assert result["same"]


# --- checkpoints and export ---


def _grouped(named: Named) -> torch.optim.Optimizer:
    return LOOPS["cosine, groups"].make_optimizer(named)  # type: ignore[no-any-return]


def _saved(rank: int, size: int, folder: str, first: int, last: int) -> tuple[list[float], dict[str, Any]]:
    pipe = _pipe(make_optimizer=_grouped)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(pipe.optimizer, max_lr=[0.02, 0.01], total_steps=20)
    beside = {"scheduler": scheduler}
    if first:
        assert pipe.load(Path(folder), also=beside).step == first
    losses = []
    for update in range(first, last):
        losses.append(pipe.step(*batch(update), max_norm=0.1))
        scheduler.step()
    pipe.save(Path(folder), step=last, also=beside)
    state = {name: t.numpy() for name, t in pipe.state_dict(rank=size - 1).items()}
    return losses, state


def test_a_checkpoint_holds_rates_groups_and_schedulers(tmp_path: Path) -> None:
    losses: list[float] = []
    for size, first, last in ((2, 0, 3), (3, 3, 6), (1, 6, 8)):
        rows = run_gloo(_saved, size, str(tmp_path), first, last)
        losses += rows[0][0]
        assert all(not state for _, state in rows[:-1])
    names = set(rows[-1][1])
    layers = layers_of(ADAM)
    named = list(nn.ModuleList(layers).named_parameters())
    optimizer = _grouped(named)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.01], total_steps=20)
    expected = []
    for update in range(8):
        optimizer.zero_grad()
        expected.append(
            plain_step(
                layers, *batch(update), nn.functional.cross_entropy, microbatches=MICROBATCHES, seed=SEED, update=update
            )
        )
        nn.utils.clip_grad_norm_([p for _, p in named], 0.1)
        optimizer.step()
        scheduler.step()
    assert losses == pytest.approx(expected, rel=EXACT)
    whole = nn.ModuleList(layers).state_dict()
    assert names == set(whole)
    for name, array in rows[-1][1].items():
        torch.testing.assert_close(torch.from_numpy(array), whole[name], rtol=1e-9, atol=1e-12)
