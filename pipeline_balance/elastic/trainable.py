"""Which layouts a job can train a model in, and how it goes there."""

from __future__ import annotations

from numbers import Integral
from typing import Any, get_args

from pipeline_balance.elastic.layouts.boxes import How
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.elastic.shards.experts import check_experts, has_experts
from pipeline_balance.elastic.shards.job_state import is_sharded
from pipeline_balance.elastic.shards.sharded import check_shardable
from pipeline_balance.elastic.shards.tp_styles import rules_for, styles_of
from pipeline_balance.pipeline.model.adapter import TransformersModel
from pipeline_balance.pipeline.model.layers import PipelineModel
from prophet.errors import SpecError
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import meet
from prophet.state.transition import Mode


def check(layout: Parallelism, model: PipelineModel, world: int) -> dict[str, How]:
    """How tp cuts `model` in this layout.

    Args:
        layout: What a user asks for.
        model: The unsplit model.
        world: How many processes there are.

    Raises:
        SpecError: Unless a `Job` of `world` processes can train it there.
    """
    if not isinstance(layout, Parallelism):
        raise SpecError(f"expected a layout, such as elastic.Parallelism(pp=2), got {layout!r:.100}")
    check_experts(model.root, layout)
    layout.check_trainable(experts=has_experts(model.root))
    # an open order may use any ranks: it is enough that there are as many
    last = layout.ranks - 1 if isinstance(layout.order, str) else max(layout.rank_of_place)
    if last >= world:
        raise SpecError(f"{layout} needs rank {last}, the world has {world} ranks")
    # raises where layers do not suffice for the stages
    layout.stage_map(len(model.units))
    rules = rules_for(styles_of(model.root, layout.tp)) if layout.tp > 1 else {}
    if layout.tp > 1 and not isinstance(model, TransformersModel):
        raise SpecError(f"{layout}: tp needs a transformers model, got a {type(model.root).__name__}")
    if is_sharded(layout):
        check_shardable(model, in_stages=layout.zero < 2)
    return rules


def check_mode(mode: Any) -> None:
    """Raise `SpecError` unless state can move in this mode."""
    if mode not in get_args(Mode):
        raise SpecError(f"mode {mode!r}: expected {' or '.join(get_args(Mode))}; the job goes on in its layout")


def check_nodes(nodes: Any, world: int) -> None:
    """Raise `SpecError` unless `nodes` has the node of every one of `world` processes; None is all on one."""
    if nodes is None:
        return
    whole = all(isinstance(n, Integral) and int(n) >= 0 for n in nodes)
    if not whole or len(nodes) != world:
        raise SpecError(f"nodes: expected {world} whole numbers from 0 on, a process's node each, got {nodes!r:.100}")


def check_alike(layout: Parallelism, nodes: Any, timeout_s: float) -> None:
    """Raise `SpecError` on all processes unless they begin with one layout and the same `nodes`. Collective.

    Args:
        layout: The job's first layout.
        nodes: The node of every process [N], checked before; None: all on one.
        timeout_s: Seconds to wait for other processes.
    """
    # compared as text: whatever kind of integers a process was given
    text = str(layout) if nodes is None else f"{layout} on nodes {[int(n) for n in nodes]}"
    texts = meet(Operation("comparing layouts"), text, timeout_s=timeout_s)
    if len(set(texts)) > 1:
        raise SpecError(f"ranks begin with different layouts: {texts}")
