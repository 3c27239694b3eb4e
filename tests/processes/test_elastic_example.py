"""The example of a job that switches layouts: it learns, and its losses are those of a run that stays in one."""

from __future__ import annotations

import re

import pytest

from pipeline_balance import elastic
from tests.helpers.launch import EXAMPLES, as_launched, torchrun

STEP = re.compile(r"step (\d+) (?:of \d+ tokens )?in [\w,]+: loss ([\d.]+)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "layouts", "learned"),
    [("elastic_training", 5, 0.3), ("elastic_experts", 4, 0.5), ("elastic_long_context", 4, 0.5)],
)
def test_layouts_train_as_one(program: str, layouts: int, learned: float) -> None:
    """float32, sums in another order."""
    if program == "elastic_long_context":
        pytest.importorskip("transformers", reason="the model is transformers'")
    how = (("--steps", "6"), ("--steps", "6", "--fixed"))
    said = [torchrun(EXAMPLES / f"{program}.py", *options, ranks=4) for options in how]
    moving, fixed = ({step: float(loss) for step, loss in STEP.findall(text)} for text in said)
    assert len(moving) == layouts
    assert moving == pytest.approx(fixed, abs=2e-5 if program == "elastic_training" else 2e-3)
    assert moving[str(6 * layouts)] < moving["6"] - learned
    assert said[0].count("held up for") == layouts - 1


RUN = re.compile(r"step (\d+) in (\S+): loss ([\d.]+)")


@pytest.mark.slow
def test_the_whole_run_trains_as_one_that_stays() -> None:
    pytest.importorskip("transformers", reason="the model is transformers'")
    program = EXAMPLES / "elastic_whole_run.py"
    moving, fixed = (RUN.findall(torchrun(program, "--steps", "6", *how, ranks=4)) for how in ((), ("--fixed",)))
    assert [layout.split(",stages")[0] for _, layout, _ in moving] == [
        "pp2,dp2",
        "pp4",
        "pp2,dp2,slices4",
        "pp2,dp2,ep2,slices4",
        "dp4,ep2",
    ]
    losses = [[float(loss) for *_, loss in run] for run in (moving, fixed)]
    assert losses[0] == pytest.approx(losses[1], abs=5e-3)  # float32, sums in another order
    assert losses[0][-1] < losses[0][0] - 0.5


LOOP = re.compile(r"step (\d+) in ([\w,]+): loss of rank 0 ([\d.]+)")


@pytest.mark.parametrize("way", [("dp4", "dp4,zero3"), ("tp4", "dp2,tp2,zero2")])
def test_a_loop_of_ones_own_learns_in_both_layouts(way: tuple[str, str]) -> None:
    first, *_ = as_launched(EXAMPLES / "elastic_own_loop.py", "--layout", way[0], "--then", way[1], ranks=4)
    said = LOOP.findall(first)
    assert [elastic.Parallelism.parse(layout) for _, layout, _ in said] == [
        elastic.Parallelism.parse(text) for text in (way[0], way[0], way[1], way[1])
    ]
    assert float(said[-1][2]) < float(said[0][2]) - 0.5
