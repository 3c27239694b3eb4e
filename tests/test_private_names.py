"""Every private name of another library is on its page, with tests; torch's are there, and do what we rely on.

`make test TORCH=2.15.0 ARGS=tests/test_private_names.py` looks at another release.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.house import ROOT, sources, text_of
from tests.helpers.private_names import (
    BOTH,
    FOLDERS,
    in_backticks,
    of_the_packages,
    reached,
    read_elsewhere,
    rows,
)


def test_the_page_lists_what_is_reached() -> None:
    listed = [name for names, _, _ in rows() for name in in_backticks(names)]
    found = of_the_packages()
    assert len(listed) == len(set(listed))
    assert not {name: found[name] for name in found.keys() - set(listed)}, "not in docs/private_names.md"
    assert not set(listed) - found.keys(), "listed in docs/private_names.md, and gone"
    assert found.keys() >= BOTH


def test_the_page_names_tests_that_are_there() -> None:
    for names, breaks, tests in rows():
        assert breaks
        paths = in_backticks(tests)
        assert paths, names
        assert all((ROOT / path).is_file() for path in paths), paths


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from torch._dynamo import config", "torch._dynamo"),
        ("import torch.distributed.pipelining._backward as b", "torch.distributed.pipelining._backward"),
        ("from transformers.trainer import _is_peft_model", "transformers.trainer._is_peft_model"),
        ("def f(model):\n    return model._hooks_of_theirs", "_hooks_of_theirs"),
        ("getattr(engine, '_inner', None)", "_inner"),
        ("class A(Base):\n    def f(self):\n        self._theirs()", "_theirs"),
    ],
)
def test_a_name_is_seen(text: str, name: str) -> None:
    assert list(reached({Path("prophet/x.py"): text})) == [name]


@pytest.mark.parametrize(
    "text",
    [
        "from prophet.engine._x import y",
        "class A:\n    def __init__(self):\n        self._x = 1\n    def f(self, o):\n        return o._x, self._y()\n"
        "    def _y(self): pass",
        "x.__dict__, x.__name__, f'{x}_enabled', 'a _b'",
    ],
)
def test_our_own_are_not(text: str) -> None:
    assert not reached({Path("prophet/x.py"): text})


def test_no_file_reads_private_names_of_another() -> None:
    assert not read_elsewhere({path: text_of(path) for path in sources(*FOLDERS)})
    owner = "class A:\n    def __init__(self):\n        self._x = 1"
    for text, found in (
        ("def f(a):\n    return a._x", ["prophet/y.py:2: _x"]),
        ("class B(A):\n    def f(self):\n        return self._x, super()._x", []),
        (f"{owner}\n    def same(self, a):\n        return a._x", []),
    ):
        assert read_elsewhere({Path("prophet/x.py"): owner, Path("prophet/y.py"): text}) == found


# --- torch's, on this release ---


def _at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


THERE = [
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.tree_leaves",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    "torch._C._disabled_torch_function_impl",
    "torch._C._distributed_c10d.PrefixStore",
    "torch._compile._disable_dynamo",
    "torch._foreach_copy_",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    "torch.nn.modules.dropout._DropoutNd",
    "torch.nn.modules.loss._Loss",
    "torch.nn.modules.module._has_any_global_hook",
    "torch.autograd.forward_ad._current_level",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.distributed_c10d._get_default_store",
]


@pytest.mark.parametrize("path", THERE)
def test_torch_has_it(path: str) -> None:
    assert _at(path) is not None


def test_torch_s_classes_have_them() -> None:
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    module = vars(nn.Module())
    for name in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
        assert isinstance(module[name], dict)
    assert {"_backward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"} <= module.keys()
    assert module["_is_full_backward_hook"] is None
    assert hasattr(nn.Module, "_compiled_call_impl")
    assert hasattr(DistributedDataParallel, "_get_active_ddp_module")
    assert DistributedDataParallel._active_ddp_module is None
    assert callable(DistributedDataParallel._pre_forward)
    assert callable(FSDPModule._get_fsdp_state)
    for name in ("_unscale_grads_", "_maybe_opt_step", "_lazy_init_scale_growth_tracker"):
        assert callable(getattr(torch.amp.GradScaler, name))
    assert torch.optim.SGD([nn.Parameter(torch.ones(1))])._optimizer_step_pre_hooks == {}
    assert torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), 2)._last_lr == [1.0]


def _swap() -> bool:
    parameter, content = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2, device="meta"))
    torch._C._swap_tensor_impl(parameter, content)
    return parameter.is_meta and content.sum().item() == 2.0


def _used() -> bool:
    parameter: Any = nn.Parameter(torch.ones(2))
    before = parameter._use_count()
    graph = parameter * 2
    return bool(before == 1 and parameter._use_count() > 1 and graph is not None)


def _graph_task() -> bool:
    x, seen = torch.ones(1, requires_grad=True), []
    x.register_hook(lambda grad: seen.append(torch._C._current_graph_task_id()))
    assert torch._C._current_graph_task_id() == -1
    (x * 2).backward()
    return len(seen) == 1 and seen[0] != -1


def _callback() -> bool:
    x, seen = torch.ones(1, requires_grad=True), []
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    x.register_hook(lambda grad: engine.queue_callback(lambda: seen.append(x.grad is not None)))
    (x * 2).backward()
    return seen == [True]


def _versions() -> bool:
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    x = torch.ones(2)
    x.mul_(2)
    with _unsafe_preserve_version_counter(x):
        x.mul_(2)
    return x._version == 1


def _same_memory() -> bool:
    x = torch.ones(4)
    return x[1:].untyped_storage()._cdata == x.untyped_storage()._cdata != x.clone().untyped_storage()._cdata


def _subclass() -> bool:
    class Mine(torch.Tensor):
        pass

    return type(torch.Tensor._make_subclass(Mine, torch.ones(2), False)) is Mine


def _hooks_of_parameters() -> bool:
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda grad: grad)
    parameter.register_post_accumulate_grad_hook(lambda p: None)
    return len(parameter._backward_hooks or ()) == len(parameter._post_accumulate_grad_hooks or ()) == 1


def _flash() -> bool:
    q, k, v = (torch.arange(16.0, dtype=torch.float64).sin().view(1, 1, 4, 4).roll(n, -1) for n in range(3))
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, sums = forward(q, k, v, 0.0, True)[:2]
    found = backward(torch.ones_like(out), q, k, v, out, sums, 0.0, True)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    want = nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    want.sum().backward()
    return torch.allclose(out, want) and all(torch.allclose(g, t.grad) for g, t in zip(found, leaves, strict=True))


def _fake() -> bool:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        out = nn.functional.linear(torch.empty(2, 3), torch.empty(5, 3))
    return tuple(out.shape) == (2, 5)


def _compiled() -> bool:
    return torch.compile(inner := nn.Linear(2, 2), backend="eager")._modules["_orig_mod"] is inner


def _global_hooks() -> bool:
    from torch.nn.modules.module import _has_any_global_hook, register_module_forward_hook

    before, handle = bool(_has_any_global_hook()), register_module_forward_hook(lambda *_: None)
    during = bool(_has_any_global_hook())
    handle.remove()
    return (before, during, bool(_has_any_global_hook())) == (False, True, False)


def _derivatives() -> bool:
    from torch.autograd import forward_ad

    seen: list[bool] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            seen.append(torch._C._has_storage(grads[0]))
            return grads[0]

    def transformed(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch._C._are_functorch_transforms_active())
        return x

    x = torch.ones(2, requires_grad=True)
    y = Look.apply(x)  # type: ignore[no-untyped-call]
    for batched in (False, True):
        grad = torch.ones(3, 2) if batched else torch.ones(2)
        torch.autograd.grad(y, x, grad, retain_graph=True, is_grads_batched=batched)
    torch.func.vmap(transformed)(x)
    outside = forward_ad._current_level
    with forward_ad.dual_level():
        inside = forward_ad._current_level
    return seen == [True, False, True] and outside < 0 <= inside


DOES = (
    _swap,
    _used,
    _graph_task,
    _callback,
    _versions,
    _same_memory,
    _subclass,
    _hooks_of_parameters,
    _flash,
    _fake,
    _global_hooks,
)


@pytest.mark.parametrize("does", [*DOES, _compiled, _derivatives, _global_hooks], ids=lambda f: f.__name__.strip("_"))
def test_torch_does_what_we_rely_on(does: Callable[[], bool]) -> None:
    assert does()


def test_the_two_halves_of_a_backward_pass_are_one() -> None:
    from pipeline_balance.pipeline.model.halves_tried import check_halves

    check_halves()
