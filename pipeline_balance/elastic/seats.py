"""The process groups that a layout needs, and the places that processes have in it once those are made."""

from __future__ import annotations

from typing import Any

from pipeline_balance.elastic.experts import nobody
from pipeline_balance.elastic.groups import SHARDS, Groups, Members
from pipeline_balance.elastic.parallelism import Parallelism
from pipeline_balance.elastic.reshape import mesh_axes
from pipeline_balance.pipeline.replicas import Grid
from pipeline_balance.pipeline.stages import Seats, alone
from prophet.ranks.process_group import process_rank


def groups_of(layout: Parallelism) -> list[tuple[Members, str]]:
    """The groups of a layout, in the order in which all processes make them."""
    rows = [(members, "stages") for members in layout.groups("pp")]
    # torch averages what it shards
    columns = [(members, "replicas") for members in layout.groups("dp")] if layout.zero < 2 else []
    shards = [(group, SHARDS) for axis in mesh_axes(layout) for group in layout.groups(axis)]
    experts = [(group, "experts") for group in layout.groups("ep")] if layout.ep > 1 else []
    copies = [(group, "copies of experts") for group in layout.groups("edp")] if layout.ep > 1 else []
    return [*rows, *columns, *shards, *experts, *copies]


def seats_of(layout: Parallelism, groups: Groups) -> Seats:
    """The places of a layout whose groups were made."""
    here = process_rank()
    place = layout.place(here)
    tp, every = place.tp if place is not None else 0, layout.grid.tolist()

    def rows_of_shard(t: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(stage[d][t] for stage in every) for d in range(layout.dp))

    grid = Grid(
        rows=rows_of_shard(tp), beside=tuple(rows_of_shard(t) for t in range(layout.tp) if t != tp), ep=layout.ep
    )
    experts: dict[str, Any] = {}
    if layout.ep > 1:
        group, same = layout.group("ep", here), layout.group("edp", here)
        experts["experts"] = groups.get(group, "experts") if group else nobody(layout.ep)
        experts["copies"] = groups.get(same, "copies of experts") if same else alone()
    if grid.replica_of(here) == grid.replicas:
        return Seats(grid=grid, collective=alone(grid.pipeline_ranks), column=alone(), **experts)
    row, column = grid.replica(grid.replica_of(here)), grid.column(grid.pipeline_rank_of(here))
    stages = groups.get(row, "stages")
    replicas = groups.get(column, "replicas") if layout.zero < 2 else alone()
    shards = tuple(groups.get(layout.group(axis, here), SHARDS) for axis in mesh_axes(layout))
    return Seats(grid=grid, collective=stages, column=replicas, shards=shards, **experts)
