"""How many operators, kernels, copies and collectives a layer launches on a device, in each pass.

On a device that is none, with the kernels in Triton's interpreter, as in `test_host_waits`. Each launch takes the host
some microseconds, whatever it computes: the most of a small layer's time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from prophet.kernels.choice import triton_available
from prophet.layer.moe import MoE
from prophet.ranks.collective import Collective, Coming
from prophet.ranks.threads import ThreadCollective
from tests.helpers.paths import INTERPRETED, one_kernel_at_a_time
from tests.helpers.pretend_device import (
    NAME,
    SUPPORTED,
    OnDevice,
    Watch,
    kernels_in_the_interpreter,
    on_pretended_device,
)
from tests.helpers.support import FixedPlanner, everywhere, on_threads
from tests.helpers.training import Case, Run

if not (SUPPORTED and INTERPRETED and triton_available()):
    pytest.skip(
        "needs Triton in its interpreter, and a torch that knows devices made in Python", allow_module_level=True
    )

# they return views, or memory that nobody has written to
FREE = {"view", "t", "transpose", "split", "split_with_sizes", "unbind", "slice", "select", "detach", "expand", "alias"}
FREE |= {"_unsafe_view", "as_strided", "unsqueeze", "squeeze", "permute", "_reshape_alias", "reshape", "view_as"}
FREE |= {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "lift_fresh"}
FREE |= {"is_same_size"}
# of the test's dense layers, embedding, head and loss
OTHERS = {"addmm", "tanh", "tanh_backward", "mm", "sum", "add", "ones_like", "mul", "nll_loss_backward"}
OTHERS |= {"_log_softmax_backward_data", "embedding_dense_backward"}
BLOCKS = 2

_here = threading.local()


class Launches(Watch):
    """Counts what is launched while `into` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.into: Counter[str] | None = None

    def note(self, name: str) -> None:
        if self.into is not None:
            self.into[name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.split("::")[1]
        source = next((t for t in args if isinstance(t, torch.Tensor)), None)
        here, there = isinstance(source, OnDevice), isinstance(out, OnDevice)
        if func.namespace == "prophet" or name in FREE:
            return out
        if name in ("to", "_to_copy", "contiguous") and here and there:
            # the same tensor where nothing was to be done
            if source.dtype != out.dtype or source.host.data_ptr() != out.host.data_ptr():
                self.note(name)
        elif name in ("to", "_to_copy") and here != there:
            self.note("copy to the host" if here else "copy to the device")
        elif here or there or any(isinstance(t, OnDevice) for t in _flat(args)):
            self.note(name)
        return out


def _flat(args: Any) -> Iterator[Any]:
    for arg in args:
        yield from _flat(arg) if isinstance(arg, list | tuple) else (arg,)


def _quiet(call: Any) -> Any:
    """Count nothing inside: what thread ranks do in place of a backend."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = getattr(_here, "watch", None)
        into = None if watch is None else watch.into
        if watch is not None:
            if call.__name__ != "wait":
                watch.note(f"{call.__name__} of {kwargs.get('channel', 'tokens')}")
            watch.into = None
        try:
            return call(self, *args, **kwargs)
        finally:
            if watch is not None:
                watch.into = into

    return run


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from triton.runtime.interpreter import GridExecutor

    for name in ("all_to_all", "all_gather", "gather_messages"):
        monkeypatch.setattr(ThreadCollective, name, _quiet(getattr(ThreadCollective, name)))
    monkeypatch.setattr(Coming, "wait", _quiet(Coming.wait))
    launch = GridExecutor.__call__

    def kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        _here.watch.note(self.fn.__name__)
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", kernel)
    inside = MoE._apply_experts

    def apply(self: MoE, *args: Any, **kwargs: Any) -> Any:
        watch, _here.watch.into = _here.watch, _here.forward
        try:
            return inside(self, *args, **kwargs)
        finally:
            watch.into = None

    monkeypatch.setattr(MoE, "_apply_experts", apply)
    backwards = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        watch, _here.watch.into = _here.watch, _here.backward
        try:
            backwards(self, *args, **kwargs)
        finally:
            watch.into = None

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    with kernels_in_the_interpreter(), one_kernel_at_a_time():
        yield


def launches(replicas: int) -> list[tuple[Counter[str], Counter[str]]]:
    """By rank what a step launches in the forward passes of its layers, and in the backward pass."""
    case = Case(blocks=BLOCKS, steps=5, seed=7, impl="triton", device=NAME, activation="swiglu", bias=False)
    # of two ranks, each has a replica of every expert of the other
    case = replace(case, ranks=2, experts_per_rank=replicas or 2)

    def rank(group: Collective) -> tuple[Counter[str], Counter[str]]:
        planner = FixedPlanner(everywhere(case.num_experts, case.ranks)) if replicas else "static"
        watch = _here.watch = Launches()
        with on_pretended_device(watch):
            run = Run(case, group, planner, slots_per_rank=8, check_every=100)
            # the first steps compare parameters and gradients, as do a few later on
            for step in range(case.steps):
                _here.forward, _here.backward = Counter(), Counter()
                run.zero_grad()
                run.backward(step, 0)
                run.optimizer.step()
            run.close()
        return _here.forward, _here.backward

    return on_threads(case.ranks, rank)


@pytest.mark.parametrize("replicas", [0, 8])
def test_what_a_layer_launches(replicas: int) -> None:
    """A layer's own are 26 forward and 16 backward; replicas, however many a rank has, add 8."""
    for forward, backward in launches(replicas):
        assert forward.total() <= BLOCKS * (26 + 8 * bool(replicas)), forward
        assert forward["copy to the device"] <= 2 * BLOCKS
        assert forward["copy to the host"] == BLOCKS
        # a layer's own gate has two products and a sum of gradients, which are not told from the others
        own = Counter({name: n for name, n in backward.items() if name not in OTHERS})
        assert own.total() <= BLOCKS * (16 - 3 + 8 * bool(replicas)), own
        assert own["copy to the device"] <= BLOCKS
        assert own["copy to the host"] == 0
