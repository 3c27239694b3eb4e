"""What processes say to each other in a switch: how often, counted exactly, so that it does not grow unseen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, get_args

import pytest

import prophet
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from prophet.ranks import process_group
from prophet.ranks.failures.presence import Presence
from prophet.ranks.process_group import ProcessGroupCollective
from prophet.state.transition import Mode
from tests.helpers import elastic_experts, elastic_jobs
from tests.helpers.elastic_jobs import train
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_models import adam, batch_of, model_of

SAID = ["agreeing on a switch", "agreeing on a transition", "deciding on a move", "in the store: yes"]
BEGINS = "in the store: yes"
"""That a process begins to give memory up, which counts for all of them."""
# of the engine, and of what it makes of the layers
BALANCED = ["comparison of configurations", "comparing accumulation_steps", "beginning to balance experts"]


def _transformers(layout: str) -> Job:
    make = lambda: model_of("llama")  # noqa: E731
    data = [batch_of("plain")]
    return Job(make, adam, Parallelism.parse(layout), data=data, microbatches=4, seed=3, timeout_s=60.0)


def _balanced(layout: str) -> Job:
    return elastic_experts.start(layout, balance_experts=prophet.EngineConfig())


# how to begin, in which layout, and where to go from there
WALKS: dict[str, tuple[Callable[[str], Job], str, tuple[str, ...]]] = {
    "row": (elastic_jobs.start, "pp2", ("dp2,zero1", "dp2,zero3", "dp2,zero2", "pp1", "dp2")),
    "transformers": (_transformers, "pp2", ("tp2", "dp2,zero3")),
    "experts": (elastic_experts.start, "dp2", ("dp2,ep2", "pp2", "dp2,ep2,zero1")),
    "balanced": (_balanced, "dp2,ep2", ("dp2", "dp2,ep2,zero1")),
}


def _counting(patch: pytest.MonkeyPatch) -> tuple[list[str], list[int]]:
    """From now on, what this process's main thread says to all others, but for the state; bytes of what goes directly.

    What is said is noted in the order in which it is said, by its operation.
    """
    found: list[str] = []
    sizes: list[int] = []

    def counted(owner: Any, name: str, note: Callable[..., None]) -> None:
        inner = getattr(owner, name)

        def call(*given: Any, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                note(*given, **options)
            return inner(*given, **options)

        patch.setattr(owner, name, call)

    def operation(*_: Any, op: Any, **__: Any) -> None:
        if str(op) != "chunks of a transition":
            found.append(str(op))

    for name in ("all_gather", "gather_at_once", "gather_messages", "all_to_all", "exchange"):
        counted(ProcessGroupCollective, name, operation)
    counted(process_group, "gathered_at_once", lambda x, *_: sizes.append(x.numel() * x.element_size()))
    # a decision asks the store in a thread
    for owner in (ProcessGroupCollective, Presence):
        counted(owner, "settle", lambda self, key, words: found.append(f"in the store: {words}"))
    for name in ("meet", "begin", "account"):
        counted(Presence, name, lambda self, *_, name=name, **__: found.append(f"in the store: {name}"))
    return found, sizes


def _walk(rank: int, size: int, kind: str) -> list[tuple[str, list[str], list[int]]]:
    begin, first, others = WALKS[kind]
    job = begin(first)
    train(job, 1)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        said, sizes = _counting(patch)
        for mode in get_args(Mode):
            for text in (*others, first):
                job.prepare(Parallelism.parse(text), mode=mode)
                job._switching.prepared()
                said.clear()
                sizes.clear()
                job.switch(mode=mode)
                found.append((f"{text}, {mode}", list(said), list(sizes)))
                train(job, 1)
    job.close()
    return found


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("transformers", "experts")]


@pytest.mark.parametrize("kind", ["row", "balanced", *SLOW])
def test_a_switch_takes_three_messages_and_a_word_in_the_store(kind: str) -> None:
    for found in run_gloo(_walk, 2, kind):
        for switch, said, sizes in found:
            balances = BALANCED if kind == "balanced" and "ep2" in switch else []
            moved = [*SAID[:2], BEGINS, *SAID[2:]] if switch.endswith("in-place") else SAID
            assert said == [*moved, *balances], switch
            assert sizes[:3] == [4096, 56, 8], switch  # directly, and nothing is so long that it goes in two
