"""Optimizer parameter groups: those written for a model before its conversion, and separate ones for experts."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from prophet_deepspeed.section import ConfigError

Group = dict[str, Any]
# Lists of a scheduler that have an entry for every group
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


class Groups:
    """Parameters or groups of them, as for `deepspeed.initialize`, that a conversion may change.

    Attributes:
        optimizer: Stands for them, as `prophet.convert` keeps the groups of an optimizer as they are, but for its
            experts.
    """

    def __init__(self, given: Iterable[nn.Parameter | Mapping[str, Any]]) -> None:
        items = list(given)
        kinds = {isinstance(item, Mapping) for item in items}
        if len(kinds) > 1:
            raise ConfigError("model_parameters: expected parameters or groups, got both")
        groups: list[Group] = [dict(item) for item in items if isinstance(item, Mapping)]
        if not groups:
            groups = [{"params": items, "name": "dense-params"}]
        self._settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        self.optimizer = torch.optim.SGD([{"params": group["params"]} for group in groups], lr=0.0)

    def separated(self) -> list[Group]:
        """The groups as they are now, experts apart, in the form in which DeepSpeed passes them to optimizers."""
        both = zip(self._settings, self.optimizer.param_groups, strict=True)
        groups = [{**own, "params": list(group["params"])} for own, group in both]
        # DeepSpeed's own bound on a group of experts
        largest = _utils().split_params_into_different_moe_groups_for_optimizer.__defaults__[0]
        return [group for _, group in _separated(groups, largest)]


def separate_experts(optimizer: torch.optim.Optimizer, scheduler: object = None) -> None:
    """Move experts to groups behind the others; schedulers go on with the figures of the former group.

    Args:
        optimizer: Changed in place.
        scheduler: One that is known; torch's are found.
    """
    groups = optimizer.param_groups
    before = len(groups)
    found = _separated(groups, float("inf"))
    groups[:] = [group for _, group in found]
    if len(found) == before:
        return
    for one in {id(s): s for s in (scheduler, *_schedulers(optimizer))}.values():
        for name in _BY_GROUP:
            values = getattr(one, name, None)
            if isinstance(values, list) and len(values) == before:
                setattr(one, name, [values[source] for source, _ in found])


def _separated(groups: list[Group], largest: float) -> list[tuple[int, Group]]:
    """Split experts off; groups keep their order, parts of groups follow behind.

    Args:
        groups: Of an optimizer.
        largest: Elements of a group of experts; a group's flat copy is made at once.

    Returns:
        Each group with the place of the one it comes from.
    """
    kept: list[tuple[int, Group]] = []
    apart: list[tuple[int, Group]] = []
    for at, group in enumerate(groups):
        # Frozen experts stay where they are: ZeRO takes no group without a parameter to train.
        trained = [p for p in group["params"] if p.requires_grad]
        experts = _utils().split_params_into_shared_and_expert_params(trained)[1]
        apart_now = {id(p) for p in experts}
        dense = [p for p in group["params"] if id(p) not in apart_now]
        parts = [
            {"params": chunk, "moe": True, "name": name}
            for name in sorted({p.group_name for p in experts if p.requires_grad})
            for chunk in _chunks([p for p in experts if p.requires_grad and p.group_name == name], largest)
        ]
        own = {k: v for k, v in group.items() if k not in ("params", "moe", "name")}
        # In place: schedulers may hold the groups themselves
        if experts:
            group.update({"params": dense} if dense or not parts else parts.pop(0))
        kept.append((at, group))
        apart += [(at, own | part) for part in parts]
    return kept + apart


def _chunks(params: list[nn.Parameter], largest: float) -> Iterator[list[nn.Parameter]]:
    chunk: list[nn.Parameter] = []
    for p in params:
        if chunk and sum(q.numel() for q in chunk) + p.numel() > largest:
            yield chunk
            chunk = []
        chunk.append(p)
    yield chunk


def _schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    """All schedulers of an optimizer, which has no reference to them."""
    kinds = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    # By type(): isinstance reads `__class__`, which wakes lazy objects
    found = (one for one in gc.get_objects() if issubclass(type(one), kinds))
    return [one for one in found if getattr(one, "optimizer", None) is optimizer]


def _utils() -> Any:
    return importlib.import_module("deepspeed.moe.utils")
