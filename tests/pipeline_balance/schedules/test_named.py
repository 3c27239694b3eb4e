"""What a pipeline's `schedule=` may be, and what is said of anything else; on paper, without processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from pipeline_balance.pipeline.run.stages import PipelineConfig
from pipeline_balance.schedules.actions import Schedule, build
from pipeline_balance.schedules.classic import gpipe, interleaved, one_f_one_b
from pipeline_balance.schedules.flexible import flexible
from pipeline_balance.schedules.named import schedule_for
from pipeline_balance.schedules.sliced import sliced
from prophet.errors import SpecError
from tests.helpers.pipeline_schedules import in_pairs, zb_h1


def test_names_are_those_schedules() -> None:
    assert schedule_for("flexible", (0, 1, 0), 4) == flexible((0, 1, 0), 4)
    assert schedule_for("flexible", (0, 1), 4, split_backward=True) == flexible((0, 1), 4, split_backward=True)
    assert schedule_for("1f1b", (0, 1, 2), 5) == one_f_one_b(3, 5)
    assert schedule_for("gpipe", (0, 1), 3) == gpipe(2, 3)
    assert schedule_for("interleaved", (0, 1, 0, 1), 4) == interleaved(2, 2, 4)
    assert schedule_for("interleaved", (0, 1, 2), 6) == one_f_one_b(3, 6)
    turned = schedule_for("gpipe", (2, 0, 1), 1)
    assert str(turned) == "1F0,1B0\n2F0,2B0\n0F0,0B0"


def test_a_function_is_asked_for_stages_on_ranks_and_microbatches() -> None:
    asked: list[tuple[Any, ...]] = []

    def strings(*given: Any) -> list[list[str]]:
        asked.append(given)
        return in_pairs(*given)

    made = schedule_for(strings, [0, 1, 0], 3)
    assert asked == [((0, 1, 0), 3)]
    assert isinstance(made, Schedule)
    assert str(made).splitlines()[1] == "1F0,1F1,1F2,1B1,1B0,1B2"
    assert schedule_for(lambda *_: made, (0, 1, 0), 3) is made
    assert schedule_for(lambda *_: (row for row in made.actions), (0, 1, 0), 3) == made
    halves = zb_h1(2, 3)
    assert schedule_for(lambda *_: halves, (0, 1), 3, split_backward=True) is halves
    assert schedule_for(strings, (0, 1), 3, split_backward=True) == schedule_for(strings, (0, 1), 3)


ROWS = in_pairs((0, 1), 2)
CIRCLE = [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([[*ROWS[0]], [a for a in ROWS[1] if a != "1B1"]], "microbatch 1 in stage 1 runs F, expected F and B"),
        ([[*ROWS[0]], [a for a in ROWS[1] if a[-1] == "0"]], "microbatch 1 in stage 1 runs nothing"),
        ([[*ROWS[0], "0F1"], ROWS[1]], "0F1 appears twice"),
        (ROWS[::-1], "stage 0 is on rank 0, the schedule has it on rank 1"),
        ([[*ROWS[0], *ROWS[1]]], "expected a row of actions for each of 2 ranks, got 1"),
        ([*ROWS, []], "expected a row of actions for each of 2 ranks, got 3"),
        (in_pairs((0, 1, 1), 2), "2F0 is outside 2 stages x 2 microbatches"),
        (in_pairs((0, 1), 3), "0F2 is outside 2 stages x 2 microbatches"),
        (gpipe(3, 2), "expected 2 stages, 2 microbatches and no slices, got 3 stages, 2 microbatches and 1 slices"),
        (gpipe(2, 3), "got 2 stages, 3 microbatches and 1 slices"),
        (sliced(2, 1, 2, 2), "got 2 stages, 2 microbatches and 2 slices"),
        (build([[]] + [list(row) for row in gpipe(2, 2).actions], 2, 2), "for each of 2 ranks, got 3"),
        ([[*ROWS[0], "0H4"], ROWS[1]], "0H4 helps other ranks"),
        (zb_h1(2, 2), "0I0 is half a backward, which needs split_backward=True"),
        (CIRCLE, "the schedule waits for itself at rank 0: 0B0, rank 1: 1F1"),
        (["0F0", "1F0"], "an action reads like 2F0 (stage, F, I, W or B, microbatch), got '0'"),
        ([["0F0"], [7]], "an action reads like 2F0"),
        (None, "expected a Schedule, or every rank's actions, got None"),
        ([1, 2], "expected a Schedule, or every rank's actions, got [1, 2]"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(answer: Any, said: str) -> None:
    def mine(stage_ranks: Sequence[int], microbatches: int) -> Any:
        return answer

    with pytest.raises(SpecError) as caught:
        schedule_for(mine, (0, 1), 2)
    assert str(caught.value).startswith("schedule mine for stages on ranks [0, 1] and 2 microbatches: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_function_raises_is_said() -> None:
    with pytest.raises(SpecError, match=r"^schedule divide raised ZeroDivisionError: ") as caught:
        schedule_for(_divide(), (0, 1), 2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def _divide() -> Callable[..., Any]:
    def divide(stage_ranks: Sequence[int], microbatches: int) -> Any:
        return [microbatches // (b - a - 1) for a, b in pairwise(stage_ranks)]

    return divide


def test_other_names_and_other_stages_are_refused() -> None:
    unknown = r"no schedule '1fb1'; did you mean '1f1b'\? \(the schedules are flexible, 1f1b, interleaved, gpipe\)"
    with pytest.raises(SpecError, match=unknown):
        PipelineConfig(microbatches=2, schedule="1fb1")
    with pytest.raises(SpecError, match=r"expected a schedule's name .* or a function that makes it, got 5"):
        PipelineConfig(microbatches=2, schedule=5)  # type: ignore[arg-type]
    for name in ("1f1b", "gpipe"):
        with pytest.raises(SpecError, match=rf"'{name}' needs one stage on each rank, .* \[0, 1, 0, 1\]"):
            schedule_for(name, (0, 1, 0, 1), 2)
    with pytest.raises(SpecError, match=r"ranks that take the stages in turn, .* \[0, 0, 1\]"):
        schedule_for("interleaved", (0, 0, 1), 2)
