"""Transformers models in slices over processes, experts shared and attention cut: as one process trains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the models are of transformers'")

import prophet
from pipeline_balance import elastic
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.slices import SliceOptions
from pipeline_balance.slices.options import Recompute
from prophet.errors import SpecError
from tests.helpers.elastic_jobs import same
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_models import MICROBATCHES, adam, alone, apart, batch_of, model_of

EXACT, MAX_NORM = 1e-10, 0.5
KINDS = ("plain", "packed", "padded")
Case = tuple[str, str, Recompute]


def _mixtral(dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Every layer has experts, which ranks may share."""
    model = model_of("mixtral", dtype, **{"output_router_logits": False, **options})
    prophet.convert(model, group=elastic.one_rank())
    return model


def _mixtral_in_float32() -> Any:
    return _mixtral(torch.float32)


def _mixtral_with_router_loss() -> Any:
    return _mixtral(output_router_logits=True)


def _plain_sgd(named: Any) -> torch.optim.Optimizer:
    """Steps so long that weights before and after tell the gradients, to the last bits."""
    return torch.optim.SGD((p for _, p in named), lr=2.0**20)


def _job(
    build: Callable[[], Any], layout: str, kinds: Sequence[str], recompute: Recompute = "none", **more: Any
) -> Job:
    given: dict[str, Any] = {"data": [batch_of(kind) for kind in kinds], "microbatches": MICROBATCHES}
    given |= {"timeout_s": 60.0, "slices": SliceOptions(1, order="aligned", recompute=recompute)}
    return Job(build, more.pop("optimizer", adam), Parallelism.parse(layout), **{**given, **more})


def _one_step(rank: int, size: int, build: Callable[[], Any], cases: Sequence[Case]) -> list[Any]:
    """The loss of a step by case, and its gradients by name."""
    found = []
    for layout, kind, recompute in cases:
        job = _job(build, layout, [kind], recompute, optimizer=_plain_sgd)
        before = job.state_dict()
        loss = job.step()
        after = job.state_dict()
        found.append((loss, {name: before[name] - after[name] for name in after}))
        job.close()
    return found


def _check_one_step(build: Callable[[], Any], cases: Sequence[Case], loss: float, gradients: float) -> None:
    results = run_gloo(_one_step, 4, build, cases, timeout_s=240.0)
    for number, (_, kind, _) in enumerate(cases):
        losses, _, after = alone(build(), [kind], make=_plain_sgd)
        before = build().state_dict()
        want = {name: before[name] - after[name] for name in after}
        for found in results:
            assert found[number][0] == pytest.approx(losses[0], rel=loss), cases[number]
        got = results[0][number][1]
        assert got.keys() == want.keys()
        assert apart(got, want) <= gradients, cases[number]


EP: tuple[Case, ...] = (
    ("pp2,dp2,ep2,slices4", "packed", "none"),
    ("pp2,dp2,ep2,slices8", "padded", "selective"),
    ("pp2,v2,dp2,ep2,slices4", "packed", "full"),
    ("dp4,ep4,slices2,zero1", "plain", "none"),
)


def test_a_model_whose_experts_ranks_share_has_the_gradients_of_one_process() -> None:
    _check_one_step(_mixtral, EP, EXACT, EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "loss", "gradients"), [(_mixtral_in_float32, 1e-5, 1e-5), (_mixtral_with_router_loss, 1e-6, 1e-5)]
)
def test_in_float32_and_with_router_losses_shared_experts_are_as_in_one_process(
    build: Callable[[], Any], loss: float, gradients: float
) -> None:
    _check_one_step(build, EP[:3], loss, gradients)


def _ten_steps(
    rank: int, size: int, build: Callable[[], Any], layouts: Sequence[str], folder: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Two steps in each layout; the last one goes on from files."""
    kinds = [KINDS[step % 3] for step in range(2 * len(layouts))]
    job = _job(build, layouts[0], kinds, **options)
    losses, kept = [], []
    for number, text in enumerate(layouts):
        before = job.state_dict()
        if number == len(layouts) - 1:
            job.save(folder)
            job.close()
            job = _job(build, text, kinds, **options)
            job.load(folder)
        elif number:
            job.switch(Parallelism.parse(text), mode="in-place" if number == 2 else "safe")
        kept.append(same(before, job.state_dict()))
        losses += [job.step(max_norm=MAX_NORM) for _ in range(2)]
    state = job.state_dict()
    job.close()
    return {"losses": losses, "kept": kept, "state": state}


def _check_ten_steps(build: Callable[[], Any], layouts: Sequence[str], folder: Path, **options: Any) -> None:
    kinds = [KINDS[step % 3] for step in range(2 * len(layouts))]
    losses, _, state = alone(build(), kinds, max_norm=MAX_NORM)
    results = run_gloo(_ten_steps, 4, build, layouts, str(folder), options, timeout_s=240.0)
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=EXACT)
        assert result["kept"] == [True] * len(layouts)
    got: dict[str, Tensor] = results[0]["state"]
    assert got.keys() == state.keys()
    assert apart(got, state) <= 1e-8  # Adam divides by what may be nearly zero


def test_ten_steps_through_switches_and_files_with_shared_experts(tmp_path: Path) -> None:
    layouts = ("pp2,dp2,ep2,slices4", "dp4,ep2", "pp2,dp2,ep2,zero1,slices2", "pp4", "dp2,ep2,slices8")
    _check_ten_steps(_mixtral, layouts, tmp_path, balance_experts=prophet.EngineConfig())


# --- tensor parallelism ---------------------------------------------------------------------------------------------


def _llama(dtype: torch.dtype = torch.float64) -> Any:
    """Two heads of keys and values, one for each tp rank; the head has the embedding's weight."""
    return model_of("llama", dtype, tied=True)


def _llama_in_float32() -> Any:
    return _llama(torch.float32)


def _qwen3() -> Any:
    """Its heads have norms, which every tp rank has whole and uses for its own heads."""
    return model_of("qwen3")


TP: tuple[Case, ...] = (
    ("pp2,tp2,slices4", "packed", "none"),
    ("pp2,tp2,slices8", "padded", "selective"),
    ("pp2,v2,tp2,slices4", "packed", "full"),
    ("tp2,dp2,slices2,zero1", "plain", "none"),
    ("pp2,tp2", "packed", "selective"),
)


@pytest.mark.parametrize(
    ("build", "loss", "gradients"),
    [
        (_llama, EXACT, EXACT),
        pytest.param(_llama_in_float32, 1e-5, 1e-5, marks=pytest.mark.slow),
        pytest.param(_qwen3, EXACT, EXACT, marks=pytest.mark.slow),
    ],
)
def test_tp_ranks_attend_with_their_heads_to_slices(build: Callable[[], Any], loss: float, gradients: float) -> None:
    _check_one_step(build, TP, loss, gradients)


TP_EP: tuple[Case, ...] = (
    ("pp2,tp2,ep2,slices4", "packed", "none"),
    ("pp2,tp2,slices8", "padded", "selective"),
    ("tp2,dp2,ep4,slices2", "packed", "full"),
)


def test_experts_go_over_tp_ranks_in_slices() -> None:
    _check_one_step(_mixtral, TP_EP, EXACT, EXACT)


@pytest.mark.slow
def test_routers_add_their_loss_over_tp_ranks_in_slices() -> None:
    _check_one_step(_mixtral_with_router_loss, TP_EP[:2], 1e-6, 1e-5)


def test_ten_steps_through_switches_and_files_with_tp(tmp_path: Path) -> None:
    _check_ten_steps(
        _llama, ("pp2,tp2,slices4", "pp3,slices8", "tp2,dp2,zero1,slices2", "pp2,tp2", "tp2,slices16"), tmp_path
    )


@pytest.mark.slow
def test_slices_of_equal_cost_are_the_same_for_tp_ranks(tmp_path: Path) -> None:
    layouts = ("pp2,tp2,slices3", "dp2,tp2,slices4", "pp2,slices5", "tp2,slices8")
    _check_ten_steps(_llama, layouts, tmp_path, slices=SliceOptions(1, balance="uneven", recompute="full"))


def _mixes(mlp: Any, args: Any, output: Tensor) -> Tensor:
    """Adds a state that goes from token to token."""
    return output.cumsum(dim=1)


def _refused(rank: int, size: int) -> list[float]:
    with pytest.raises(SpecError, match='tp2,pp2,slices4: balance="exchange" plans for all heads'):
        _job(_llama, "pp2,tp2,slices4", ["plain"], slices=SliceOptions(1, order="aligned", balance="exchange"))
    job = _job(_llama, "pp2,tp2,slices4", ["plain"] * 3)
    # layers are tried now, and nobody waits for the rank that has no batch
    inputs, labels = batch_of()
    with pytest.raises(SpecError, match="every rank needs the batch"):
        job.evaluate(None if rank == 3 else inputs, labels)
    losses = [job.step()]
    with pytest.raises(SpecError, match="zero2 with pp2 and slices4 with zero2 cannot be trained"):
        job.switch(Parallelism.parse("pp2,dp2,zero2,slices4"))
    before = job.state_dict()
    model: Any = job.model.model
    handles = [layer.mlp.register_forward_hook(_mixes) for layer in model.layers]
    job.switch(Parallelism.parse("pp2,tp2,slices8"))
    with pytest.raises(SpecError, match=r"layer \d \(LlamaDecoderLayer\) computes other outputs for two slices"):
        job.step()
    for handle in handles:
        handle.remove()
    assert same(before, job.state_dict())
    losses.append(job.step())
    job.close()
    return losses


def test_what_tp_ranks_cannot_do_in_slices_is_refused_on_all_and_the_job_goes_on() -> None:
    losses, *_ = alone(_llama(), ["plain"] * 2)
    for found in run_gloo(_refused, 4):
        assert found == pytest.approx(losses, rel=EXACT)
