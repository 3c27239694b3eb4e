"""The process groups that a layout needs, and the places that processes have in it once those are made."""

from __future__ import annotations

import math
from typing import Any

from pipeline_balance.elastic.groups import SHARDS, Groups, Members
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.elastic.shards.experts import nobody
from pipeline_balance.elastic.shards.job_state import mesh_axes
from pipeline_balance.pipeline.run.replicas import Grid
from pipeline_balance.pipeline.run.stages import RankAssignment, alone
from prophet.ranks.process_group import process_rank


def groups_of(layout: Parallelism, *, experts: bool) -> list[tuple[Members, str]]:
    """The groups of a layout, in the order in which all processes make them.

    Args:
        layout: Any layout whose order is chosen.
        experts: Whether the model has experts.

    Returns:
        Members and purpose of every group.
    """
    rows = [(members, "stages") for members in layout.groups("pp")]
    # with zero 2 and 3 FSDP2 reduces gradients over its mesh, so no replicas are averaged by the pipeline
    columns = [(members, "replicas") for members in layout.groups("dp")] if layout.zero < 2 else []
    shards = [(group, SHARDS) for axis in mesh_axes(layout) for group in layout.groups(axis)]
    shares: list[tuple[Members, str]] = []
    if experts and _shares(layout):
        shares += [(group, "experts") for group in layout.groups("ep")]
        shares += [(group, "copies of experts") for group in layout.groups("edp")]
    if experts and layout.tp > 1:
        shares += [(group, "the same tokens") for group in layout.groups("tp")]
    return [*rows, *columns, *shards, *shares]


def _shares(layout: Parallelism) -> bool:
    """Whether the processes of a stage share experts, or the tokens that they are given alike."""
    return layout.ep > 1 or layout.tp > 1


def rank_assignment_of(layout: Parallelism, groups: Groups, *, experts: bool) -> RankAssignment:
    """This process's place in a layout: its pipeline ranks and replicas, and the groups that it talks in.

    A process that the layout does not use gets groups of nobody.

    Args:
        layout: A layout whose order is chosen.
        groups: Has made what `groups_of` listed.
        experts: Whether the model has experts.
    """
    here = process_rank()
    place = layout.place(here)
    tp, every = place.tp if place is not None else 0, layout.grid.tolist()

    def rows_of_shard(t: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(stage[d][t] for stage in every) for d in range(layout.dp))

    # neighbours along tp have experts of different parts, so that fewer replicas have
    beside = tuple(rows_of_shard(t) for t in range(layout.tp) if t != tp)
    grid = Grid(rows=rows_of_shard(tp), beside=beside, ep=layout.ep // math.gcd(layout.ep, layout.tp))
    shares: dict[str, Any] = {}
    if experts and _shares(layout):
        group, same = layout.group("ep", here), layout.group("edp", here)
        shares["experts"] = groups.get(group, "experts") if group else nobody(layout.ep)
        shares["copies"] = groups.get(same, "copies of experts") if same else alone()
    if experts and layout.tp > 1:
        group = layout.group("tp", here)
        shares["alike"] = groups.get(group, "the same tokens") if group else nobody(layout.tp)
    # one more than the last: the process is spare, and holds nothing
    if grid.replica_of(here) == grid.replicas:
        return RankAssignment(grid=grid, collective=alone(grid.pipeline_ranks), column=alone(), **shares)
    row, column = grid.replica(grid.replica_of(here)), grid.column(grid.pipeline_rank_of(here))
    stages = groups.get(row, "stages")
    replicas = groups.get(column, "replicas") if layout.zero < 2 else alone()
    shards = tuple(groups.get(layout.group(axis, here), SHARDS) for axis in mesh_axes(layout))
    return RankAssignment(grid=grid, collective=stages, column=replicas, shards=shards, **shares)
