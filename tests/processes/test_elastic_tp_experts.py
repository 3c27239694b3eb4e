"""A job of a model with experts goes through layouts with tp, experts over tp ranks and beside them, as one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="tp needs a transformers model")

import prophet
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from prophet.errors import SpecError, TransitionError
from tests.helpers import elastic_tp_experts as tp
from tests.helpers.elastic_jobs import same
from tests.helpers.launch import run_gloo

TOUR = ("tp2,dp2", "tp2,ep2,dp2,zero1", "pp2,tp2", "dp4,ep4")
SAVED, LOADED = "tp2,dp2,ep4,zero1", "pp2,tp2,ep2"
EXACT = 1e-10


def _saved_and_loaded(rank: int, size: int, folder: str) -> dict[str, Any]:
    steps = len(TOUR) + 2
    balance = prophet.EngineConfig()
    job = tp.start(tp.converted, TOUR[0], steps, balance_experts=balance)
    losses, kept = tp.tour(job, [*TOUR[1:], SAVED])
    job.save(folder)
    before = job.state_dict()
    job.close()
    job = tp.start(tp.converted, LOADED, steps, balance_experts=balance)
    job.load(folder)
    kept.append(same(before, job.state_dict()))
    losses += tp.stepped(job)
    job.close()
    return {"losses": losses, "kept": kept}


def test_a_model_with_experts_trains_is_saved_and_loaded_in_layouts_with_tp(tmp_path: Path) -> None:
    losses = tp.alone(tp.plain(), len(TOUR) + 2)
    for result in run_gloo(_saved_and_loaded, 4, str(tmp_path)):
        assert result["losses"] == pytest.approx(losses, rel=EXACT)
        assert result["kept"] == [True] * (len(TOUR) + 1)


def _tour(rank: int, size: int, build: Callable[[], Any], layouts: tuple[str, ...], mode: Any) -> Any:
    job = tp.start(build, layouts[0], len(layouts))
    found = tp.tour(job, layouts[1:], mode)
    job.close()
    return found


def _shared() -> Any:
    return tp.converted("qwen2_moe")


def _with_router_loss() -> Any:
    return tp.converted(output_router_logits=True)


@pytest.mark.parametrize(
    ("build", "layouts", "mode", "exact"),
    [
        (tp.own, ("tp4,ep2", "dp2,tp2,ep2,zero1", "pp2,tp2"), "in-place", EXACT),
        pytest.param(tp.own, ("tp4,ep4", "tp4", "pp2,dp2", "tp2,dp2,ep2"), "safe", EXACT, marks=pytest.mark.slow),
        pytest.param(tp.own_modules, ("dp2,tp2", "pp2,tp2", "tp4,zero1"), "safe", EXACT, marks=pytest.mark.slow),
        pytest.param(_shared, ("dp2,tp2,ep4", "pp2,tp2,ep2", "tp4"), "safe", EXACT, marks=pytest.mark.slow),
        # the sums that travel between stages are in float32
        pytest.param(_with_router_loss, ("pp2,tp2,ep2", "dp2,tp2", "pp2,dp2"), "safe", 1e-6, marks=pytest.mark.slow),
    ],
)
def test_other_models_and_their_losses_go_through_layouts_with_tp(
    build: Callable[[], Any], layouts: tuple[str, ...], mode: Any, exact: float
) -> None:
    ((losses, _),) = run_gloo(_tour, 1, build, ("dp1",) * len(layouts), mode)
    for found, kept in run_gloo(_tour, 4, build, layouts, mode):
        assert found == pytest.approx(losses, rel=exact)
        assert kept == [True] * (len(layouts) - 1)


def _scaled(rank: int, size: int, layouts: tuple[str, ...]) -> list[float]:
    job = tp.start(tp.converted, layouts[0], len(layouts))
    losses, _ = tp.tour(job, layouts[1:], scaler=job.scaler(init_scale=2.0**10))
    job.close()
    return losses


def test_a_scaler_scales_shards_and_experts_alike() -> None:
    layouts = ("pp2", "tp2,ep2")
    for losses in run_gloo(_scaled, 2, layouts):
        assert losses == pytest.approx(tp.alone(tp.plain(), len(layouts)), rel=EXACT)


def _foreach(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for _, p in named), lr=1e-3, foreach=True)


def _refused(rank: int, size: int) -> None:
    job = tp.start(tp.converted, "dp2,ep2", 2, optimizer=_foreach)
    job.step()
    before = job.state_dict()
    with pytest.raises(TransitionError, match="foreach=True cannot update shards beside experts"):
        job.switch(Parallelism.parse("tp2"))
    for text, words in (("tp2,zero2", "zero2 with experts"), ("dp2,slices2,zero2", "slices2 with zero2")):
        with pytest.raises(SpecError, match=words):
            job.switch(Parallelism.parse(text))
    assert same(before, job.state_dict())
    job.step()
    job.close()


def test_what_cannot_go_to_tp_is_refused_and_the_job_goes_on() -> None:
    run_gloo(_refused, 2)
