"""Loops of one's own change their layout as one process trains, and keep every bit of their state."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipeline_balance import elastic
from pipeline_balance.elastic.groups import Groups
from pipeline_balance.elastic.shards import new_model as target
from prophet.errors import CollectiveError, ReshardedError, SpecError, TransitionError
from tests.helpers.elastic_jobs import losing
from tests.helpers.launch import run_gloo
from tests.helpers.own_loops import (
    Net,
    adamw,
    alone,
    batch,
    build,
    build_tied,
    gathered,
    momentum,
    same,
    train_step,
    whole,
)
from tests.helpers.releases import needs_orders

TOUR = ("dp4", "dp4,zero3", "dp2,tp2,zero2", "tp4", "dp2,zero2,order3:1", "dp4")
EACH = 2
COLUMN, ROW = ColwiseParallel(), RowwiseParallel()


def _tour(
    rank: int, size: int, make: Callable[[Any], torch.optim.Optimizer], made: Callable[[], Net], tour: tuple[str, ...]
) -> list[float]:
    layouts = [elastic.Parallelism.parse(text) for text in tour]
    model: nn.Module = nn.parallel.DistributedDataParallel(made())
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    losses: list[float] = []
    for before, layout in zip([layouts[0], *layouts], layouts, strict=False):
        if before != layout:
            seen = whole(model, optimizer)
            model = elastic.reshard(model, optimizer, before, layout, made, timeout_s=60.0)
            assert same(seen, whole(model, optimizer)), str(layout)
        for _ in range(EACH):
            losses.append(train_step(model, optimizer, layout, len(losses)))
            schedule.step()
    return losses


@needs_orders
@pytest.mark.parametrize(
    ("make", "made", "tour"),
    [(adamw, build, TOUR), (momentum, build_tied, ("dp4", "dp2,tp2,zero3", "dp4", "dp4,zero2", "dp1"))],
)
def test_a_loop_trains_on_as_one_process(
    make: Callable[[Any], torch.optim.Optimizer], made: Callable[[], Net], tour: tuple[str, ...]
) -> None:
    expected = alone(EACH * len(tour), make, made)
    for losses in run_gloo(_tour, 4, make, made, tour, timeout_s=100.0):
        assert losses == pytest.approx(expected, abs=1e-9)


def _mesh(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,))


def _fsdp2(size: int, **options: Any) -> Any:
    """As somebody shards it who knows nothing of this library; gloo cannot average."""
    model = build()
    for part in (*model.blocks, model):
        fully_shard(part, mesh=_mesh(size), **options).set_force_sum_reduction_for_comms(True)
    return model


def _carried(rank: int, size: int) -> list[float]:
    """What somebody has put on a model goes on; the old model refuses to run."""
    layouts = list(map(elastic.Parallelism.parse, ("dp4,zero3", "dp2,tp2,zero2", "dp3", "dp4")))
    model = _fsdp2(size)
    optimizer = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    fired = {"step": 0, "module": 0}
    optimizer.register_step_post_hook(lambda *_: fired.update(step=fired["step"] + 1))
    handle = model.blocks[1].register_forward_hook(lambda *_: fired.update(module=fired["module"] + 1))
    model.blocks[0].eval()
    model.blocks[2].mark = {"any": "thing"}
    model.head.weight.decays = False
    averages = {n: elastic.register("ema", p.detach().clone(), p) for n, p in model.named_parameters()}
    losses: list[float] = []
    for before, layout in zip([layouts[0], *layouts], layouts, strict=False):
        if before != layout:
            old, seen, means = model, whole(model, optimizer), gathered(_tensors(averages))
            if before.place(rank) is not None:
                with torch.no_grad():  # FSDP2 keeps what it has gathered
                    model(batch(0)[0])
                fired["module"] = 0
            graph = model(batch(0)[0]) if before.zero else None
            if graph is not None:
                with pytest.raises(SpecError, match=r"weight is held by an autograd graph that is alive"):
                    elastic.reshard(model, optimizer, before, layout, build, timeout_s=60.0)
            del graph
            fired["module"] = 0
            model = elastic.reshard(model, optimizer, before, layout, build, timeout_s=60.0)
            assert same(seen, whole(model, optimizer))
            assert same(means, gathered(_tensors(averages)))
            with pytest.raises(SpecError, match="was resharded"):
                old(batch(0)[0])
        root = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        assert [b.training for b in root.blocks] == [False, True, True]
        assert root.blocks[2].mark == {"any": "thing"}
        assert root.head.weight.decays is False
        count, runs = dict(fired), layout.place(rank) is not None
        for _ in range(3):
            losses.append(train_step(model, optimizer, layout, len(losses)))
            schedule.step()
            for name, p in root.named_parameters():
                averages[name].tensor.lerp_(p.detach(), 0.1)
        assert fired["step"] - count["step"] == 3 * runs
        assert fired["module"] - count["module"] == 3 * runs * (layout != layouts[3])
        if layout == layouts[2]:
            handle.remove()
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
    return losses


def _tensors(averages: dict[str, Any]) -> dict[str, Tensor]:
    return {name: handle.tensor for name, handle in averages.items()}


def test_what_belongs_to_a_model_goes_on_with_it() -> None:
    expected = alone(12, adamw)
    for losses in run_gloo(_carried, 4, timeout_s=100.0):
        assert losses == pytest.approx(expected, abs=1e-9)


def _refused(rank: int, size: int) -> tuple[list[str], list[float]]:
    """Mistakes, and a failure, leave all as it was; tensor parallelism of the user's own goes to DDP and on."""
    parse, said = elastic.Parallelism.parse, []
    model: Any = build()
    plan = {f"blocks.{b}.{name}": style for b in range(3) for name, style in (("up", COLUMN), ("down", ROW))}
    parallelize_module(model, _mesh(size), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.1, foreach=False)
    tp4, dp4 = parse("tp4"), parse("dp4")
    losses = [train_step(model, optimizer, tp4, 0)]

    def told(before: Any, after: Any, made: Any = build, error: type[Exception] = SpecError, **options: Any) -> None:
        seen, drawn = whole(model, optimizer), torch.get_rng_state()
        with pytest.raises(error) as caught:
            elastic.reshard(model, optimizer, before, after, made, **{"timeout_s": 60.0, **options})
        said.append(str(caught.value))
        assert same(seen, whole(model, optimizer))
        assert torch.equal(torch.get_rng_state(), drawn)

    model.blocks[0].heads = 1
    told(tp4, dp4, lambda: _with_heads(4))
    model = elastic.reshard(model, optimizer, tp4, dp4, build, timeout_s=60.0)
    losses.append(train_step(model, optimizer, dp4, 1))
    told(parse("dp4,zero3"), parse("dp1"))
    for after in ("pp2,dp2", "dp2,tp2", "dp4,zero1", "tp8"):
        told(dp4, parse(after))
    told(dp4, parse("dp4,zero3"), build_tied)
    told(dp4, parse("dp4,zero3" if rank else "dp2,tp2,zero3"))  # which has other groups
    weight = model.module.embed.weight
    weight.requires_grad_(rank != 2)
    told(dp4, parse("dp4,zero3"))
    weight.requires_grad_(True)
    group = optimizer.param_groups[0]["params"]
    last = [group.pop()] if rank == 1 else []
    told(dp4, parse("dp4,zero3"))
    group += last
    hook = weight.register_hook(lambda grad: grad) if rank == 1 else None
    told(dp4, parse("dp4,zero3"))
    if hook is not None:
        hook.remove()
    held = weakref.ref(model.module.embed) if rank == 1 else None
    told(dp4, parse("dp4,zero3"))
    del held
    hook = model.module.head.register_forward_hook(partial(print, model.module.embed)) if rank == 1 else None
    told(dp4, parse("dp4,zero3"))
    if hook is not None:
        hook.remove()
    if rank == 1:
        optimizer.state[weight]["odd"] = torch.zeros(3)
    told(dp4, parse("dp4,zero3"))
    optimizer.state[weight].pop("odd", None)
    if rank != 3:
        elastic.register("ema", weight.detach().clone(), weight)
    told(dp4, parse("dp4,zero3"), error=TransitionError)
    elastic.register("ema", weight.detach().clone(), weight)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(Groups, "_one", losing(Groups._one))
        told(dp4, parse("dp2,tp2,zero3"))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(target.NewModel, "_buffers", _no_memory)
        told(dp4, parse("dp2,tp2,zero3"), error=TransitionError)
    model = elastic.reshard(model, optimizer, dp4, parse("dp4,zero3"), build, timeout_s=60.0)
    losses.append(train_step(model, optimizer, parse("dp4,zero3"), 2))
    _options_go_over(rank, size)
    said += _alone_in_it(rank, size)
    return said, losses


def _options_go_over(rank: int, size: int) -> None:
    """DDP's and FSDP2's, which all processes must have alike: those that the model comes to take the others'."""
    dp4, dp2 = elastic.Parallelism(dp=4), elastic.Parallelism(dp=2)
    made: Any = nn.parallel.DistributedDataParallel(build(), find_unused_parameters=True)
    optimizer = adamw(made.parameters())
    made.broadcast_buffers = rank == 2
    with pytest.raises(SpecError, match=r"^ranks \[2\] have other options of FSDP2 or DDP than rank 0$"):
        elastic.reshard(made, optimizer, dp4, dp2, build, timeout_s=60.0)
    made.broadcast_buffers = False
    for before, layout in ((dp4, dp2), (dp2, dp4)):
        made = elastic.reshard(made, optimizer, before, layout, build, timeout_s=60.0)
    assert (made.find_unused_parameters, made.broadcast_buffers) == (True, False)
    for option in ("find_unused_parameters", "static_graph"):
        made.find_unused_parameters, made.static_graph = option == "find_unused_parameters", option == "static_graph"
        with pytest.raises(SpecError, match=rf"{option}=True: .* FSDP2 would average these modules' grad"):
            elastic.reshard(made, optimizer, dp4, replace(dp4, zero=3), build, timeout_s=60.0)
    made.find_unused_parameters, made.static_graph = True, False
    train_step(made, optimizer, dp4, 0)
    policy, dp4, dp2 = MixedPrecisionPolicy(param_dtype=torch.float32), replace(dp4, zero=3), replace(dp2, zero=3)
    made = _fsdp2(size, mp_policy=policy)
    optimizer = adamw(made.parameters())
    for before, layout in ((dp4, dp2), (dp2, dp4)):
        made = elastic.reshard(made, optimizer, before, layout, build, timeout_s=60.0)
    assert [m._get_fsdp_state()._mp_policy for m in (*made.blocks, made)] == [policy] * 4
    train_step(made, optimizer, dp4, 0)
    # torch 2.11 has no such setting
    if hasattr(made, "set_reduce_scatter_unused_params"):
        made = _fsdp2(size)
        made.set_reduce_scatter_unused_params(True)
        optimizer = adamw(made.parameters())
        made = elastic.reshard(made, optimizer, dp4, dp2, build, timeout_s=60.0)
        made = elastic.reshard(made, optimizer, dp2, dp4, build, timeout_s=60.0)
        for module in (*made.blocks, made):
            assert [g.reduce_scatter_unused_params for g in module._get_fsdp_state()._fsdp_param_groups] == [True]
        made = elastic.reshard(made, optimizer, dp4, elastic.Parallelism(dp=4), build, timeout_s=60.0)
        assert made.find_unused_parameters


def _alone_in_it(rank: int, size: int) -> list[str]:
    """Copies that differ; an optimizer from before `fully_shard`; other types; a process that stays away."""
    dp4, said, seen = elastic.Parallelism(dp=4), [], []
    model: Any = build()
    optimizer = adamw(model.parameters())
    handle = model.head.weight.register_hook(lambda grad: seen.append(1))
    model = elastic.reshard(model, optimizer, dp4, dp4, build).module  # its own way is DDP's afterwards
    train_step(model, optimizer, dp4, 0)
    handle.remove()
    train_step(model, optimizer, dp4, 1)
    assert seen == [1]
    hooked: Any = nn.parallel.DistributedDataParallel(build())
    if rank == 1:
        hooked.register_comm_hook(None, allreduce_hook)
    with pytest.raises(SpecError) as caught:
        elastic.reshard(hooked, adamw(hooked.parameters()), dp4, elastic.Parallelism(dp=4, zero=3), build)
    said.append(str(caught.value))
    model = build()
    optimizer = adamw(model.parameters())
    with torch.no_grad():
        model.head.weight[0, 0] += rank == 2
    with pytest.raises(SpecError) as caught:
        elastic.reshard(model, optimizer, dp4, elastic.Parallelism(dp=2, tp=2, zero=3), build)
    said.append(str(caught.value))
    fully_shard(model, mesh=_mesh(size), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for wrong in (optimizer, adamw(model.parameters())):
        with pytest.raises(SpecError) as caught:
            elastic.reshard(model, wrong, elastic.Parallelism(dp=4, zero=3), dp4, build)
        said.append(str(caught.value))
    if rank != 3:
        with pytest.raises(CollectiveError) as late:
            elastic.reshard(build(), optimizer, dp4, dp4, build, timeout_s=2.0)
        said.append(str(late.value))
    return said


def _fails_late(rank: int, size: int) -> list[float]:
    """On one rank a part of what follows the decision fails: it goes on with the model that the error brings."""
    dp, sharded = elastic.Parallelism(dp=size), elastic.Parallelism(dp=size, zero=3)
    old: nn.Module = nn.parallel.DistributedDataParallel(build())
    optimizer = adamw(old.parameters())
    losses, seen = [train_step(old, optimizer, dp, 0)], whole(old, optimizer)
    inner = target.Copy.make

    def make(copy: target.Copy) -> None:
        inner(copy)
        raise KeyError("a hook of yours")

    if rank != 1:
        model = elastic.reshard(old, optimizer, dp, sharded, build, timeout_s=60.0)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(target.Copy, "make", make)
            with pytest.raises(ReshardedError, match="a hook of yours") as caught:
                elastic.reshard(old, optimizer, dp, sharded, build, timeout_s=60.0)
        model = caught.value.model
    assert same(seen, whole(model, optimizer))
    with pytest.raises(SpecError, match="was resharded"):
        old(batch(0)[0])
    losses.append(train_step(model, optimizer, sharded, 1))
    model = elastic.reshard(model, optimizer, sharded, dp, build, timeout_s=60.0)
    return [*losses, train_step(model, optimizer, dp, 2)]


def test_what_fails_after_the_decision_brings_the_new_model() -> None:
    expected = alone(3, adamw)
    for losses in run_gloo(_fails_late, 2, timeout_s=100.0):
        assert losses == pytest.approx(expected, abs=1e-9)


def _with_heads(heads: int) -> Net:
    model = build()
    model.blocks[0].heads = heads
    return model


def _no_memory(*_: Any) -> None:
    raise RuntimeError("no memory for buffers")


def test_what_cannot_be_resharded_is_named_on_all_ranks_and_the_loop_goes_on() -> None:
    expected, every = alone(3, adamw), run_gloo(_refused, 4, timeout_s=100.0)
    for said, losses in every:
        assert losses == pytest.approx(expected, abs=1e-9)
        for text, wanted in zip(said, NAMED, strict=False):
            assert wanted in text
    assert [len(said) for said, _ in every] == [len(NAMED)] * 3 + [len(NAMED) - 1]


NAMED = (
    "blocks.0.heads is 1 in the model and 4 in build()",
    "embed.weight: it is not cut over the dp ranks [0, 1, 2, 3]",
    "pp2 cannot be resharded",
    "dp2 x tp2 with zero 0 cannot be resharded",
    "zero1 cannot be resharded",
    "tp8 needs rank 7, the world has 4 ranks",
    "head.weight and embed.weight are one parameter on one side only",
    "ranks [1, 2, 3] were given other layouts than rank 0",
    "ranks [2] train (requires_grad) other parameters than rank 0",
    "ranks [1] have other parameters in the optimizer's groups than rank 0",
    "rank 1: SpecError: embed.weight has a hook on the tensor",
    "rank 1: SpecError: something has a weak reference to embed",
    "rank 1: SpecError: head._forward_hooks refers to a module or parameter",
    "rank 1: LayoutError: embed.weight@odd is [3]",
    "rank 3: embed.weight%ema is not registered on this process",
    "rank 2: state of ranks [0, 1, 2, 3]: broken in group",
    "rank 2: no memory for buffers; the model and the optimizer are as they were",
    "rank 1: SpecError: DistributedDataParallel has communication hooks",
    "ranks 0 and 2 have copies of head.weight that differ",
    "group 0 of the optimizer has a parameter that the model does not have",
    "FSDP2's MixedPrecisionPolicy",
    "resharding",
)
