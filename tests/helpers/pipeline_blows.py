"""Ranks of a small pipeline that are struck at a chosen moment, and what each of them says when it ends.

Four ranks, three of them with a stage. A rank ends as a program does, with everything that the interpreter does then.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline_balance.control.controller import Controller, ControllerConfig
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.errors import StageFailed
from prophet.ranks.launch import leave
from tests.helpers.launch import process_outcomes
from tests.helpers.pipeline_model import LAYERS, batch, pipeline

RANKS = 4
BEFORE, AFTER = StageMap.contiguous((0, 3, 5, LAYERS)), StageMap((0, 3, 5, LAYERS), (1, 2, 0))
TWO = StageMap.contiguous((0, 3, LAYERS))
PATIENCE_S = 4.0  # the pipeline's limit where a rank does not answer
LONG_S = 60.0  # its limit where it must not matter
AGAIN_S = 0.1  # from a first Ctrl-C to the second
WELL, FAILED, INTERRUPTED = 10, 11, 12  # how a rank ends


class Broken(Exception):
    """What a layer raises."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a rank ended: exit code, error (kind, rank, stages, action, cause), seconds from the blow to that.

    gone_s: from the blow until all processes of all ranks have ended.
    """

    code: int | None
    kind: str = ""
    rank: int = -1
    stages: tuple[int, ...] = ()
    action: str = ""
    cause: str = ""
    noticed_s: float = float("inf")
    gone_s: float = float("inf")


def ends(
    fate: str,
    where: str,
    victims: Sequence[int],
    *,
    ahead: bool = False,
    tcp: bool = False,
    replicas: int = 1,
    at_once: bool = False,
    limit_s: float = 90.0,
) -> list[End]:
    """Let `victims` meet their `fate` in a step, a move or an evaluation.

    The fates: is killed, stops, is interrupted, is interrupted twice (again after `AGAIN_S`), raises.

    ahead: a controller decides beside the step. tcp: rank 0 keeps the store that the ranks have met in.
    replicas: 2 for two pipelines of two ranks. at_once: ranks end without their interpreter's shutdown, which takes
    each of them more time than all before.
    """
    told: dict[str, str] | None = {} if tcp else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        blow = name, fate, where, tuple(victims), ahead, replicas, at_once
        outcomes = process_outcomes(RANKS, _rank, *blow, timeout_s=limit_s, told=told)
        gone = time.time()
        began = float((folder / "blow").read_text())
        found = []
        for rank, outcome in enumerate(outcomes):
            path = folder / f"{rank}.json"
            said: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
            if said:
                said["noticed_s"] = said.pop("at") - began
                said["stages"] = tuple(said.get("stages", ()))
            found.append(End(code=outcome.exit_code, gone_s=gone - began, **said))
        return found


def _rank(
    name: str, fate: str, where: str, victims: tuple[int, ...], ahead: bool, replicas: int, at_once: bool
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=LONG_S))
    folder, rank = Path(name), dist.get_rank()
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    code, said = WELL, {}
    try:
        _train(folder, fate, where, victims, ahead, replicas)
    except StageFailed as error:
        code, said = FAILED, {"rank": error.rank, "stages": error.stages, "action": error.action, "cause": error.cause}
        said["kind"] = type(error).__name__
    except BaseException as error:
        code, said = INTERRUPTED, {"kind": type(error).__name__, "cause": str(error)}
    (folder / f"{rank}.json").write_text(json.dumps({**said, "at": time.time()}))
    if fate == "stops":
        _release(folder, victims)
    sys.stdout.flush()
    if at_once:
        leave(code)
    # as a program ends that has not caught this
    ctypes.pythonapi.Py_Exit(code)


def _release(folder: Path, victims: Sequence[int]) -> None:
    """End what was stopped, once all others have noticed."""
    others = [folder / f"{r}.json" for r in range(RANKS) if r not in victims]
    if all(path.exists() for path in others):
        for victim in victims:
            os.kill(int((folder / f"{victim}.pid").read_text()), signal.SIGKILL)


def _train(folder: Path, fate: str, where: str, victims: tuple[int, ...], ahead: bool, replicas: int) -> None:
    before, after = (TWO, StageMap(TWO.boundaries, (1, 0))) if replicas == 2 else (BEFORE, AFTER)
    run = pipeline(before, timeout_s=PATIENCE_S if fate == "stops" else LONG_S, replicas=replicas)
    config = ControllerConfig(every_steps=1, measure_steps=1, prepare_in_backward=True)
    step: Callable[..., Any] = Controller(run, config=config).step if ahead else run.step
    step(*batch(0))
    if dist.get_rank() == min(victims):
        _arm(run, lambda: _blow(folder, fate, victims), where)
    if where == "step":
        step(*batch(1))
    elif where == "move":
        run.rebuild(after)
    else:
        run.evaluate(*batch(1))
    for n in range(2, 5):  # where the blow has come too late for this rank
        step(*batch(n))


def _arm(run: ElasticPipeline, blow: Callable[[], None], where: str) -> None:
    """Have `blow` called in the middle of what comes next."""
    if where == "move":
        # an idle rank exchanges nothing, but decides with the others
        collective, name = run.groups.collective, "exchange" if run.layers else "decide"
        inner = getattr(collective, name)

        def struck(*args: Any, **options: Any) -> Any:
            blow()
            return inner(*args, **options)

        setattr(collective, name, struck)
    elif run.layers:
        calls = [0]

        def before(*_: object) -> None:
            calls[0] += 1
            if calls[0] == 2:
                blow()

        run.layers[max(run.layers)].register_forward_pre_hook(before)
    else:  # an idle rank: it waits for the others then
        threading.Timer(0.05, blow).start()


def _blow(folder: Path, fate: str, victims: Sequence[int]) -> None:
    (folder / "blow.new").write_text(repr(time.time()))
    (folder / "blow.new").rename(folder / "blow")
    if fate == "raises":
        raise Broken("too hot")
    number = {"is killed": signal.SIGKILL, "stops": signal.SIGSTOP}.get(fate, signal.SIGINT)
    pids = [int((folder / f"{victim}.pid").read_text()) for victim in sorted(victims, reverse=True)]
    if fate == "is interrupted twice":
        again = f"sleep {AGAIN_S}; kill -INT {' '.join(map(str, pids))}"
        subprocess.Popen(["sh", "-c", again], stderr=subprocess.DEVNULL, start_new_session=True)
    for pid in pids:
        os.kill(pid, number)
    time.sleep(0.2)  # until the signal is there
