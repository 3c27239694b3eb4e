"""Groups that the library makes out of a given one: its backends, its members and the options of its backend."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline_balance.elastic.groups import SHARDS, Groups
from pipeline_balance.pipeline.run.stages import PipelineGroups
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for, expert_groups
from prophet.ranks.works import like
from tests.helpers.launch import run_gloo

LIMIT_S, OWN_S = 40.0, 70.0


class Options:
    """As NCCL's: torch writes to it, and it knows no copy."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self.config: tuple[str, int] | None = None
        self.split_from: Any = None
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self._timeout = timedelta(seconds=1)

    def __copy__(self) -> Options:
        raise TypeError("cannot be copied")


class Noted(dist.ProcessGroupGloo):
    """gloo, with options that it shows."""

    options: Any = None


made: list[tuple[list[int], float, Any]] = []
# torch's own references do not keep what is Python's of a backend
kept: list[Noted] = []


def _create(given: Any, options: Any) -> Noted:
    backend = Noted(given.store, given.group_rank, given.group_size, given.timeout)
    backend.options = options
    made.append((list(given.global_ranks_in_group), given.timeout.total_seconds(), options))
    kept.append(backend)
    return backend


def _noted_group(options: Any) -> dist.ProcessGroup:
    """All processes, with a backend of Python for another device; to its options happens what torch does to NCCL's."""
    group: dist.ProcessGroup = dist.new_group(
        backend="cpu:gloo,cuda:noted", pg_options=options, timeout=timedelta(seconds=OWN_S)
    )
    if isinstance(options, Options):
        options.global_ranks_in_group, options.group_name, options.split_from = [0, 1], "given", "another"
    made.clear()
    return group


def _like_a_group(rank: int, size: int) -> None:
    dist.Backend.register_backend("noted", _create, extended_api=True, devices=["cuda"])
    given = Options()
    given.is_high_priority_stream, given.config = True, ("ctas", 4)
    before = _noted_group(given)
    ranks = collective_for(before, timeout_s=LIMIT_S)
    assert ranks.all_gather(torch.tensor([rank]), op=Operation("gathering")).tolist() == [[0], [1]]
    pipeline = PipelineGroups(before, LIMIT_S)
    pipeline.arrange(2)
    pipeline.divide()
    pipeline.side()
    # channels of both; a replica of one rank, a column with its channels; the side's with its channels
    assert len(made) == 2 + 2 + (1 + 1 + 2) + (1 + 2)
    for members, limit_s, options in made:
        assert rank in members
        assert limit_s == LIMIT_S
        assert type(options) is Options
        assert (options.is_high_priority_stream, options.config) == (True, ("ctas", 4))
        # else torch warns of it
        assert options._timeout == timedelta(seconds=LIMIT_S)
        assert (options.split_from, options.global_ranks_in_group, options.group_name) == (None, [], "")
    assert len({id(options) for *_, options in made}) == len(made), "torch writes to them"
    assert (given.group_name, given._timeout) == ("given", timedelta(seconds=1))
    plain = [1, 2, 3]
    assert like(_noted_group(plain), timedelta(seconds=1))["pg_options"] == plain
    assert like(_noted_group(iter(plain)), timedelta(seconds=1))["pg_options"] is not None
    assert like(_noted_group(None), timedelta(seconds=1))["pg_options"] is None


def test_groups_of_pipelines_and_layers_have_the_given_ones_backend_and_options() -> None:
    run_gloo(_like_a_group, 2)


def _like_the_world(rank: int, size: int, folder: str) -> None:
    dist.destroy_process_group()
    dist.Backend.register_backend("noted", _create, extended_api=True, devices=["cuda"])
    given = Options()
    given.is_high_priority_stream = True
    store = f"file://{folder}/store"
    dist.init_process_group("cpu:gloo,cuda:noted", init_method=store, rank=rank, world_size=size, pg_options=given)
    made.clear()
    groups = Groups(LIMIT_S)
    assert groups.make([((0, 1), "stages"), ((0, 1), SHARDS)]) == ""
    groups.close()
    expert_groups(2, timeout_s=LIMIT_S)
    # two channels and a mesh's; the EP group with its channels, and the group of one rank
    assert [limit_s for _, limit_s, _ in made] == [LIMIT_S] * (3 + 3 + 1)
    assert all(
        type(options) is Options and options.is_high_priority_stream and options is not given for *_, options in made
    )


def test_groups_of_jobs_and_of_experts_have_the_worlds_options(tmp_path: Path) -> None:
    run_gloo(_like_the_world, 2, str(tmp_path))
