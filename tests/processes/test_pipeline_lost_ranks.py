"""A rank is killed, stops, is interrupted or raises: every other one says which, and all end by themselves."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

import pytest

from tests.helpers.pipeline_blows import FAILED, INTERRUPTED, LONG_S, PATIENCE_S, RANKS, End, ends

IDLE = 3
SOON_S = 5.0
DURING = {"step": "step 1", "move": "move before step 1", "evaluation": "evaluation before step 1"}


def _assert_named(found: Sequence[End], victim: int, causes: Sequence[str], *, within_s: float = SOON_S) -> None:
    """These ranks say in the same words which one failed, with which stage."""
    for end in found:
        assert end.code == FAILED, end
        assert end.kind == "StageFailed"
        assert (end.rank, end.stages) == (victim, () if victim == IDLE else (victim,)), end
        assert end.cause in causes
        assert end.noticed_s < within_s, end
    assert len({end.cause for end in found}) == 1


def _others(found: Sequence[End], victims: Sequence[int]) -> list[End]:
    return [end for rank, end in enumerate(found) if rank not in victims]


def _is_killed(where: str, victim: int, **how: bool) -> None:
    found = ends("is killed", where, [victim], **how)
    assert found[victim].code == -signal.SIGKILL
    _assert_named(_others(found, [victim]), victim, ["its process has ended"])


def _stops(where: str, victim: int, **how: bool) -> None:
    found = ends("stops", where, [victim], **how)
    assert found[victim].code == -signal.SIGKILL, "the test has ended it, once the others had noticed"
    _assert_named(_others(found, [victim]), victim, ["its process is stopped"], within_s=PATIENCE_S + SOON_S)
    assert min(end.noticed_s for end in _others(found, [victim])) > PATIENCE_S / 2, "it might have come back"


def _raises(where: str, victim: int, **how: bool) -> None:
    found = ends("raises", where, [victim], **how)
    _assert_named(found, victim, ["Broken: too hot"])
    assert found[0].action.startswith(DURING[where])


def _is_interrupted(where: str, victims: Sequence[int], *, ahead: bool = False) -> None:
    """Exit codes say that no rank was aborted, by a thread that came back while its interpreter went down."""
    found = ends("is interrupted", where, victims, ahead=ahead)
    for victim in victims:
        assert (found[victim].code, found[victim].kind) == (INTERRUPTED, "KeyboardInterrupt"), found[victim]
        assert found[victim].noticed_s < SOON_S
    for end in _others(found, victims):
        assert end.rank in victims
        _assert_named([end], end.rank, ["interrupted"])


# How a program ends then, `test_ctrl_c_in_a_step` shows for ranks that fail, too
def test_a_rank_is_killed_in_a_step() -> None:
    _is_killed("step", 1, at_once=True)


def test_a_rank_raises_in_an_evaluation() -> None:
    _raises("evaluation", 2, at_once=True)


def test_a_rank_stops_in_a_move() -> None:
    _stops("move", 0, at_once=True)


@pytest.mark.parametrize("victims", [[1], pytest.param(list(range(RANKS)), marks=pytest.mark.slow)])
def test_ctrl_c_in_a_step(victims: list[int]) -> None:
    _is_interrupted("step", victims, ahead=True)


REST: list[tuple[Callable[[str, int], None], str, int]] = [
    (_is_killed, "step", 0),
    (_is_killed, "step", IDLE),
    (_is_killed, "move", 1),
    (_is_killed, "evaluation", 2),
    (_is_killed, "evaluation", IDLE),
    (_raises, "step", 0),
    (_raises, "step", 1),
    (_raises, "move", 2),
    (_stops, "step", 1),
    (_stops, "step", IDLE),
    (_stops, "move", IDLE),
    (_stops, "evaluation", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fate", "where", "victim"), REST)
def test_a_rank_is_lost(fate: Callable[[str, int], None], where: str, victim: int) -> None:
    fate(where, victim)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "move"])
@pytest.mark.parametrize("fate", ["is killed", "raises"])
def test_a_rank_of_a_replica_is_lost(fate: str, where: str) -> None:
    """Ranks are numbered over all replicas: rank 3 runs stage 1 of the second one."""
    found = ends(fate, where, [3], replicas=2)
    for end in found if fate == "raises" else found[:3]:
        assert (end.code, end.rank, end.stages) == (FAILED, 3, (1,)), end
        assert end.noticed_s < SOON_S, end


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "move"])
@pytest.mark.parametrize("fate", [_is_killed, _stops])
def test_the_rank_with_the_store_is_lost(fate: Callable[..., None], where: str) -> None:
    """Nobody can tell another rank anything then; all know the processes."""
    fate(where, 0, tcp=True)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "move", "evaluation"])
@pytest.mark.parametrize("victims", [[0], [2], [IDLE], [1, 2], list(range(RANKS))])
def test_ctrl_c(where: str, victims: list[int]) -> None:
    _is_interrupted(where, victims)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "move", "evaluation"])
@pytest.mark.parametrize("victims", [[2], list(range(RANKS))])
def test_a_second_ctrl_c(where: str, victims: list[int]) -> None:
    """It comes while ranks tell each other of the first one, or end: no process stays, none is aborted."""
    found = ends("is interrupted twice", where, victims)
    for end in found:
        assert end.code in (FAILED, INTERRUPTED, -signal.SIGINT), "aborted, or killed by the test"
        assert end.gone_s < LONG_S / 2, "it has waited for the limit"
