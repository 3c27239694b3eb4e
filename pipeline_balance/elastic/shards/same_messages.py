"""FSDP2 on ranks that run different modules: see `SameMessages`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from pipeline_balance.elastic.shards.fully_sharded import fsdp_groups
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation

Half = Literal["before", "after"]
"""What FSDP2 does before a group's backward, where it gathers parameters, and after it, where it reduces gradients."""

# An attribute of the gradient, so it goes with it
_USED = "used_by_this_rank"


class SameMessages:
    """Has FSDP2 send the same messages on all ranks, whichever modules each of them runs.

    By itself FSDP2 gathers a group's parameters once its module is called, reduces the gradients that a rank has once
    autograd comes there, and says of no message what it is of. Ranks that skip different modules mix them up.

    Here every rank takes all groups in one order, that of the units and back. A group that this rank passes over is
    gathered all the same, and a gradient that it does not have counts as zeros. When autograd comes to a group, all
    that ran after it are done, since autograd goes backward through what it was given in the order of the forward.
    So whatever has not come by then never will, and takes its turn.

    Other calls of the modules, outside of `forward` and `backward`, are FSDP2's own.

    Args:
        root: What is called; `fully_shard` has cut it and, in groups, the units.
        units: Modules in the order in which they run.
    """

    def __init__(self, root: nn.Module, units: Sequence[nn.Module]) -> None:
        self._root, self._units = root, tuple(units)
        self._outer = fsdp_groups(root)
        self._order = list(self._in_order())
        # groups whose forward is still to come, and halves of a backward
        self._coming: deque[Any] = deque()
        self._left: deque[tuple[Half, Any]] = deque()
        # groups between the halves of their backward
        self._open: set[Any] = set()
        self._theirs: dict[Any, dict[str, Any]] = {}
        for group in dict.fromkeys([*(group for *_, group in self._order), *self._outer]):
            names = ("pre_forward", "post_forward", "pre_backward", "post_backward")
            self._theirs[group] = {name: getattr(group, name) for name in names}
            group.pre_forward = partial(self._forward_begins, group)
            group.pre_backward = partial(self._backward_begins, group)
            group.post_backward = partial(self._backward_ends, group)
        for group in self._outer:
            group.post_forward = partial(self._root_ends, group)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A call of the root."""
        self._coming.extend(group for _, half, group in self._order if half == "after")
        try:
            yield
        finally:
            self._coming.clear()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The backward of one call of the root, or nothing where this rank's loss needs no gradient."""
        self._left.extend(self._halves())
        try:
            yield
            if self._left:
                self._without_autograd()
        finally:
            self._left.clear()
            self._open.clear()

    def drop_unused(self, ranks: Collective) -> None:
        """Drop the gradients of parameters that no rank has used since they were dropped last; collective.

        They are zeros, with which an optimizer would still decay weights and use up momentum.

        Args:
            ranks: Those that the parameters are cut over.
        """
        parameters = [param.sharded_param for group in self._theirs for param in group.fsdp_params]
        mine = torch.tensor([p.grad is not None and _USED in vars(p.grad) for p in parameters], dtype=torch.uint8)
        every = ranks.all_gather(mine, op=Operation("which parameters have gradients"))
        for parameter, used in zip(parameters, every.amax(dim=0).tolist(), strict=True):
            if not used:
                parameter.grad = None

    # --- the order --------------------------------------------------------------------------------------------

    def _in_order(self) -> Iterator[tuple[int, Half, Any]]:
        """Halves of the units' backward, the other way round: a group's forward begins where its backward ends.

        Each has the number of the unit at which it comes.
        """
        waiting: dict[Any, set[nn.Module]] = {}
        for number, unit in enumerate(self._units):
            for group in fsdp_groups(unit):
                # as FSDP2 counts them: of modules that are gathered together, the first and the last one matter
                rest = waiting.setdefault(group, set())
                if not rest:
                    rest.update(group.modules)
                    yield number, "after", group
                rest.discard(unit)
                if not rest:
                    yield number, "before", group

    def _halves(self) -> list[tuple[Half, Any]]:
        """Halves of the backward in the order of all ranks; none where nothing trains."""
        if not _trains(self._root):
            return []
        # through what lies before it no gradient flows, so parameters are not gathered for a backward
        first = next((number for number, unit in enumerate(self._units) if _trains(unit)), len(self._units))
        inner = [(half, group) for number, half, group in self._order[::-1] if half == "after" or number >= first]
        return [*(("before", g) for g in self._outer), *inner, *(("after", g) for g in self._outer)]

    # --- what FSDP2 calls -------------------------------------------------------------------------------------

    def _forward_begins(self, group: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if group in self._coming:
            while (other := self._coming.popleft()) is not group:
                self._pass_over(other)
        return self._theirs[group]["pre_forward"](module, args, kwargs)

    def _root_ends(self, group: Any, module: nn.Module, given: Any, output: Any) -> Any:
        # before FSDP2 notes that the root is done: it gathers ahead in the order of what it has noted
        while self._coming:
            self._pass_over(self._coming.popleft())
        return self._theirs[group]["post_forward"](module, given, output)

    def _pass_over(self, group: Any) -> None:
        """Do what a forward of the group would do, without its modules."""
        self._theirs[group]["pre_forward"](group.modules[0], (), {})
        self._theirs[group]["post_forward"](group.modules[0], (), None)

    def _backward_begins(self, group: Any, prefetch: bool, *_: Any) -> None:
        # FSDP2 comes here once for every output
        if group in self._open or not self._reach("before", group):
            self._theirs[group]["pre_backward"](prefetch)

    def _backward_ends(self, group: Any, *_: Any) -> None:
        if not self._reach("after", group):
            self._theirs[group]["post_backward"]()

    def _reach(self, half: Half, group: Any) -> bool:
        """Do all that comes before this in the backward, and this; False where it does not come any more."""
        found = (half, group) in self._left
        while found:
            now = self._left.popleft()
            self._do(*now)
            if now == (half, group):
                break
        return found

    def _do(self, half: Half, group: Any) -> None:
        if half == "before":
            self._open.add(group)
            self._theirs[group]["pre_backward"](True)
            return
        self._open.discard(group)
        used = _with_zeros(group)
        self._theirs[group]["post_backward"]()
        for parameter in used:
            if parameter.grad is not None:
                vars(parameter.grad)[_USED] = True

    def _without_autograd(self) -> None:
        """Do what is left where autograd came to none of it."""
        while self._left:
            self._do(*self._left.popleft())
        root: Any = self._root
        state = root._get_fsdp_state()
        # FSDP2 ends a backward in a callback, which can only be set within one
        probe = torch.zeros((), requires_grad=True) * 1
        probe.register_hook(lambda _: state._register_root_post_backward_final_callback())
        probe.backward()


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _with_zeros(group: Any) -> list[nn.Parameter]:
    """Give parameters that train zeros for a gradient where they have none; the shards of those that have one."""
    used = []
    for param in group.fsdp_params:
        gathered = getattr(param, "_unsharded_param", None)
        if gathered is None or not gathered.requires_grad:
            continue
        if gathered.grad is None:
            gathered.grad = torch.zeros_like(gathered)
        else:
            used.append(param.sharded_param)
    return used
