"""Which schedule a pipeline follows: one of ours by its name, or what a user's function makes for every stage map.

Shape legend: S stages, P ranks, M microbatches. `ElasticPipeline(schedule=)` and `Job(schedule=)` take one of `NAMES`
or a function. "flexible" fits every map and is what None means. "1f1b" and "gpipe" are for one stage on each rank,
"interleaved" for ranks that take the stages in turn. A function gets the rank of every stage [S], where ranks in use
count from 0 to P - 1, and M. It is asked anew for every map, on every rank.

A schedule runs each stage of whole microbatches on its rank, in an order that does not wait for itself. B is allowed
with `split_backward` as well, and what is named never splits, but for "flexible". I and W need `split_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipeline_balance.schedules.actions import SHARED, Action, Schedule, ScheduleError, build
from pipeline_balance.schedules.classic import gpipe, interleaved, one_f_one_b
from pipeline_balance.schedules.flexible import flexible
from pipeline_balance.schedules.simulate import Durations, simulate
from prophet.errors import SpecError, no_such

FLEXIBLE = "flexible"
NAMES = (FLEXIBLE, "1f1b", "interleaved", "gpipe")
Rows = Iterable[Iterable[Action | str]]
MakeSchedule = Callable[[tuple[int, ...], int], Schedule | Rows]
"""From the rank of every stage [S] and M to a schedule, or to one list of actions in order for each of P ranks."""


def check_choice(choice: str | MakeSchedule) -> None:
    """Raise `SpecError` unless `choice` is a name among `NAMES` or a function."""
    if isinstance(choice, str):
        if choice not in NAMES:
            raise SpecError(no_such("schedule", choice, NAMES))
    elif not callable(choice):
        raise SpecError(f"expected a schedule's name ({', '.join(NAMES)}) or a function that makes it, got {choice!r}")


def schedule_for(
    choice: str | MakeSchedule,
    stage_ranks: Sequence[int],
    microbatches: int,
    *,
    durations: Durations | None = None,
    split_backward: bool = False,
) -> Schedule:
    """The schedule of `choice` for S = len(stage_ranks) stages.

    Args:
        choice: A name among `NAMES`, or a function.
        stage_ranks: The rank of every stage [S]; ranks in use are 0 to P - 1.
        microbatches: M.
        durations: Steer "flexible" alone.
        split_backward: Backwards for the input and for the weights may be two actions.

    Raises:
        SpecError: Where a name is not for these stages, a function raises, or its schedule cannot be run.
    """
    ranks = tuple(stage_ranks)
    if choice == FLEXIBLE:
        return flexible(ranks, microbatches, durations=durations, split_backward=split_backward)
    if isinstance(choice, str):
        return _named(choice, ranks, microbatches)
    name = getattr(choice, "__name__", type(choice).__name__)
    try:
        answer = choice(ranks, microbatches)
    # the user's function: whatever it raises is named with the function
    except Exception as error:
        raise SpecError(f"schedule {name} raised {type(error).__name__}: {error}") from error
    try:
        made = answer if isinstance(answer, Schedule) else build(_rows(answer), len(ranks), microbatches)
        _check(made, ranks, microbatches, split_backward=split_backward)
    except ScheduleError as error:
        stages = f"stages on ranks {list(ranks)} and {microbatches} microbatches"
        raise ScheduleError(f"schedule {name} for {stages}: {error}") from error
    return made


def _named(name: str, stage_ranks: tuple[int, ...], microbatches: int) -> Schedule:
    ranks = len(set(stage_ranks))
    each = len(stage_ranks) // ranks
    # ranks in turn, in any order, V times
    if stage_ranks != stage_ranks[:ranks] * each or (each > 1 and name != "interleaved"):
        wanted = "ranks that take the stages in turn" if name == "interleaved" else "one stage on each rank"
        raise ScheduleError(
            f"schedule {name!r} needs {wanted}, and these stages are on ranks {list(stage_ranks)}: "
            f'"{FLEXIBLE}" fits any'
        )
    if name == "interleaved":
        made = interleaved(ranks, each, microbatches)
    else:
        made = (gpipe if name == "gpipe" else one_f_one_b)(ranks, microbatches)
    # stage s < P is on row s there, and on its own rank here
    return build([made.actions[stage_ranks.index(rank)] for rank in range(ranks)], made.stages, microbatches)


def _rows(answer: Any) -> list[list[Action]]:
    try:
        rows = [list(row) for row in answer]
    except TypeError:
        raise ScheduleError(f"expected a Schedule, or every rank's actions, got {answer!r:.80}") from None
    return [[a if isinstance(a, Action) else Action.parse(str(a)) for a in row] for row in rows]


def _check(made: Schedule, stage_ranks: tuple[int, ...], microbatches: int, *, split_backward: bool) -> None:
    """Raise `ScheduleError` unless the schedule is of this map and a pipeline can run it."""
    if (made.stages, made.microbatches, made.slices) != (len(stage_ranks), microbatches, 1):
        got = f"{made.stages} stages, {made.microbatches} microbatches and {made.slices} slices"
        raise ScheduleError(f"expected {len(stage_ranks)} stages, {microbatches} microbatches and no slices, got {got}")
    helps = [a for row in made.actions for a in row if a.kind == "H"]
    if helps:
        raise ScheduleError(f"{helps[0]} helps other ranks, which whole microbatches do not need")
    shared = next((a for row in made.actions for a in row if a.kind in SHARED), None)
    if shared is not None:
        raise ScheduleError(f"{shared} is of a split vocabulary, whose actions a schedule gets by itself")
    ranks = len(set(stage_ranks))
    if made.ranks != ranks:
        raise ScheduleError(f"expected a row of actions for each of {ranks} ranks, got {made.ranks}")
    for stage, (there, wanted) in enumerate(zip(made.stage_ranks, stage_ranks, strict=True)):
        if there != wanted:
            raise ScheduleError(f"stage {stage} is on rank {wanted}, the schedule has it on rank {there}")
    if not split_backward:
        halves = [a for row in made.actions for a in row if a.kind in "IW"]
        if halves:
            raise ScheduleError(f"{halves[0]} is half a backward, which needs split_backward=True")
    # raises where actions wait for each other in a circle
    simulate(made, Durations.uniform(made.stages))
