"""A job goes to layouts of shards, among them and back, as one process trains, and keeps every bit of its state."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance import elastic
from pipeline_balance.elastic.shards import job_state
from prophet.errors import SpecError, StageFailed, TransitionError
from tests.helpers.elastic_jobs import DIM, batches, build, check_held, dataset, plain_losses, same, start, train
from tests.helpers.launch import run_gloo
from tests.helpers.own_loops import gathered
from tests.helpers.releases import needs_orders
from tests.helpers.sliced_models import adam, batch_of, model_of

KINDS = ("plain", "packed", "padded")
TWO = ("dp2,zero3", "tp2", "pp2", "dp2,zero2")
FOUR = ("dp2,tp2", "pp2,tp2", "dp2,tp2,zero3", "dp2,tp2,zero1", "pp2,dp2", "dp4,zero2", "pp2,tp2,order3:1:0:2", "tp2")


def _whole(job: elastic.Job) -> dict[str, Tensor]:
    """Every tensor gathered by torch, once copies were compared; of shards put together from all processes."""
    names = {id(p): n for n, p in job.model.named_parameters()}
    mine: dict[str, Tensor] = {n: p.detach() for n, p in job.model.named_parameters()}
    for p, entries in job.optimizer.state.items():
        mine |= {f"{names[id(p)]}@{e}": t for e, t in entries.items()}
    return gathered(mine)


def _tour(rank: int, size: int, layouts: tuple[str, ...], options: dict[str, Any], steps: int = 1) -> list[float]:
    """With several steps per layout, each switch also goes back and there again."""
    data = [batch_of(kind) for kind in KINDS]
    first, *others = map(elastic.Parallelism.parse, layouts)
    job = elastic.Job(lambda: model_of(**options), adam, first, data=data, microbatches=4, seed=3, timeout_s=60.0)
    optimizer = job.optimizer
    losses = [job.step(max_norm=0.5) for _ in range(steps)]
    for layout in others:
        before, drawn, position, now = _whole(job), torch.get_rng_state(), job.data.position, job.layout
        for there in (layout, now, layout) if steps > 1 else (layout,):
            job.switch(there)
            after = _whole(job)
            assert before.keys() == after.keys()
            assert not [n for n in before if not torch.equal(before[n], after[n])], str(there)
            check_held(job)
            assert torch.equal(torch.get_rng_state(), drawn)
            assert job.data.position == position
        assert job.optimizer is optimizer
        losses += [job.step(max_norm=0.5) for _ in range(steps)]
    losses.append(job.evaluate(*batch_of("packed")))
    job.close()
    return losses


def _alone(steps: int, options: dict[str, Any]) -> list[float]:
    model = model_of(**options)
    optimizer = adam(model.named_parameters())
    losses = []
    for step in range(steps):
        inputs, labels = batch_of(KINDS[step % 3])
        optimizer.zero_grad()
        loss = model(**inputs, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    inputs, labels = batch_of("packed")
    with torch.no_grad():
        losses.append(float(model(**inputs, labels=labels, use_cache=False).loss))
    return losses


@needs_orders
@pytest.mark.parametrize(
    ("ranks", "layouts", "options"),
    [
        (2, TWO, {"family": "llama", "attention_bias": True, "mlp_bias": True}),
        pytest.param(2, TWO, {"family": "qwen3", "tied": True}, marks=pytest.mark.slow),
        (4, FOUR, {"family": "llama", "tied": True}),
    ],
)
def test_shards_train_as_one_process(ranks: int, layouts: tuple[str, ...], options: dict[str, Any]) -> None:
    expected = _alone(len(layouts), options)
    for losses in run_gloo(_tour, ranks, layouts, options, timeout_s=150.0):
        assert losses == pytest.approx(expected, rel=1e-9)


TEN = ("dp4,zero3", "pp2,tp2,dp2,zero1", "dp2,tp2,zero2", "pp4,dp2", "pp2,tp2,dp2", "dp1")
TEN = (*TEN, "tp2,dp4,zero3", "pp3,dp2,zero1", "pp4,tp2", "tp2,dp4,zero1")


@pytest.mark.slow
def test_two_hundred_steps_over_ten_layouts_are_those_of_one_process() -> None:
    expected = _alone(200, {"family": "llama"})
    for losses in run_gloo(_tour, 8, TEN, {"family": "llama"}, 20, timeout_s=240.0):
        assert losses == pytest.approx(expected, rel=1e-9)


CHAIN = ("pp2,dp2", "dp4,zero3", "dp3,zero2", "pp3", "dp2,zero3,order3:1", "dp4,zero2", "dp2,zero1")


def _chain(rank: int, size: int) -> list[float]:
    """Dropout, a tied weight, uneven shards, spare processes, a schedule, hooks, attributes."""
    job = start(CHAIN[0])
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 5, 0.9)
    fired = {"step": 0, "module": 0}
    job.optimizer.register_step_post_hook(lambda *_: fired.update(step=fired["step"] + 1))
    handle = job.model[1].register_forward_hook(lambda *_: fired.update(module=fired["module"] + 1))
    first = list(job.model.parameters())
    losses = train(job, 2, schedule)
    inputs, labels = dataset().tensors
    for number, text in enumerate(CHAIN[1:]):
        before, seen = _whole(job), job.evaluate(inputs, labels)
        job.switch(elastic.Parallelism.parse(text))
        after = _whole(job)
        assert before.keys() == after.keys()
        assert not [n for n in before if not torch.equal(before[n], after[n])], text
        check_held(job)
        assert job.evaluate(inputs, labels) == pytest.approx(seen, rel=1e-12)
        assert job.evaluate(inputs[:3], labels[:3]) > 0
        assert job.evaluate(inputs[:1], labels[:1]) > 0
        if job.layout.zero > 1 and job.layout.place(rank) is not None:
            assert _gathers_again(job.model[2]) == (job.layout.zero == 3)
        assert getattr(job.model[2], "mark", number) == number
        job.model[2].mark = number + 1  # on the copy in force, too
        old = dict(fired)
        losses += train(job, 2, schedule)
        assert fired["step"] == old["step"] + 2
        runs_it = job.layout.place(rank) is not None and job.layout.place(rank).pp == 0
        assert (fired["module"] > old["module"]) == (runs_it and number < 3)
        if number == 2:
            handle.remove()
        assert job.model.training
    assert all(p is q for p, q in zip(first, job.model.parameters(), strict=True))
    assert job.optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
    job.close()
    return losses


def _gathers_again(block: Any) -> bool:
    """Whether FSDP2 gives the parameters of a block back after its forward."""
    with torch.no_grad():
        block(torch.ones(1, DIM).double())
    found = hasattr(block.up.weight, "placements")
    block.reshard()
    return found


@pytest.mark.slow
def test_layers_in_a_row_go_through_shards_with_all_that_belongs_to_them() -> None:
    expected = plain_losses(2 * len(CHAIN))
    for losses in run_gloo(_chain, 4, timeout_s=150.0):
        assert losses == pytest.approx(expected, abs=1e-9)


def _frozen_and_scaled(rank: int, size: int) -> tuple[list[float], list[float]]:
    job = start("dp2", microbatches=4, loss_fn=lambda out, labels: 1e4 * nn.functional.cross_entropy(out, labels))
    job.model.float()
    job.model[1].requires_grad_(False)
    scaler = job.scaler(init_scale=2.0**120, backoff_factor=2.0**-20, growth_interval=3)
    losses, scales = [], []
    for text in ("dp2", "dp2,zero3", "pp2", "dp2,zero2"):
        job.switch(elastic.Parallelism.parse(text))
        assert [p.requires_grad for p in job.model[1].parameters()] == [False] * 4
        for _ in range(3):
            losses.append(job.step(max_norm=0.5, scaler=scaler))
            scales.append(scaler.get_scale())
    still = build().float()[1].state_dict()
    assert all(torch.equal(t, still[n]) for n, t in _blocks(job).items())
    return losses, scales


def _blocks(job: elastic.Job) -> dict[str, Tensor]:
    mine = {n.removeprefix("1."): t for n, t in _whole(job).items() if n.startswith("1.")}
    assert len(mine) == 4  # nothing was kept for them
    return mine


def test_frozen_layers_and_a_scaler_go_through_shards() -> None:
    (losses, scales), other = run_gloo(_frozen_and_scaled, 2, timeout_s=100.0)
    assert (losses, scales) == other
    assert scales == [2.0**100] * 3 + [2.0**101] * 3 + [2.0**102] * 3 + [2.0**103] * 3
    assert losses[-1] < losses[0]


def _fails_within(rank: int, size: int) -> str:
    job = elastic.Job(
        lambda: model_of("llama"), adam, elastic.Parallelism(tp=2), data=[batch_of()], microbatches=2, timeout_s=300.0
    )
    job.step()
    if rank == 1:
        job.model.model.layers[1].mlp.register_forward_pre_hook(_out_of_memory)
    with pytest.raises(StageFailed) as caught:
        job.step()
    return str(caught.value)


def test_a_failure_between_cut_modules_is_one_of_all_processes() -> None:
    for words in run_gloo(_fails_within, 2, timeout_s=100.0):
        assert "rank 1 (stage 0) failed in step 1" in words
        assert "no memory is left" in words


def _optimizers() -> dict[str, Any]:
    torchs = torch.optim
    return {
        "momentum": lambda named: torchs.SGD([p for _, p in named], lr=1e-2, momentum=0.9, nesterov=True),
        "rmsprop": lambda named: torchs.RMSprop([p for _, p in named], lr=1e-3, momentum=0.9, centered=True),
        "nadam": lambda named: torchs.NAdam([p for _, p in named], lr=1e-2),
        "amsgrad": lambda named: torchs.Adam([p for _, p in named], lr=1e-2, amsgrad=True),
    }


def _kinds(rank: int, size: int) -> None:
    for kind, make in _optimizers().items():
        losses = []
        for layouts in (("dp2", "dp2,zero3", "pp2", "dp2,zero2"), ("dp2",) * 4):
            job = elastic.Job(
                build,
                make,
                elastic.Parallelism(dp=2),
                data=batches(),
                loss_fn=nn.functional.cross_entropy,
                microbatches=12,
                seed=3,
                timeout_s=60.0,
            )
            losses.append(train(job, 1))
            for text in layouts[1:]:
                before = _whole(job)
                job.switch(elastic.Parallelism.parse(text))
                after = _whole(job)
                assert before.keys() == after.keys(), kind
                assert not [n for n in before if not torch.equal(before[n], after[n])], f"{kind} {text}"
                losses[-1] += train(job, 1)
            job.close()
        assert losses[0] == pytest.approx(losses[1], rel=1e-9), kind


@pytest.mark.slow
def test_what_other_optimizers_keep_goes_through_shards() -> None:
    run_gloo(_kinds, 2, timeout_s=100.0)


def _references(rank: int, size: int) -> None:
    job = start("dp2")
    plain = job.model
    job.switch(elastic.Parallelism.parse("dp2,zero3"))
    shards = job.model
    assert all(p.is_meta for p in plain.parameters())  # nobody evaluates or saves what was there before
    train(job, 1)
    shards[1].requires_grad_(False)
    before = _whole(job)
    train(job, 1)
    assert not _trained(before, _whole(job))
    job.switch(elastic.Parallelism.parse("pp2"))
    assert job.model is plain
    assert all(p.is_meta for p in shards.parameters())
    assert not any(p.requires_grad for p in plain[1].parameters())
    plain[1].requires_grad_(True)
    before = _whole(job)
    train(job, 1)
    assert _trained(before, _whole(job))
    job.close()


def _trained(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    """Whether layer 1 has changed, all of it or nothing; all others must have."""
    changed = {n: not torch.equal(before[n], after[n]) for n in before if "@" not in n}
    assert all(here for n, here in changed.items() if not n.startswith("1."))
    (found,) = {here for n, here in changed.items() if n.startswith("1.")}
    return found


def _apart(rank: int, size: int) -> str:
    """A norm, or what its optimizer keeps, that differs between tp ranks: in a value, or in the places of two."""
    layout, said = elastic.Parallelism(tp=2), []
    options: dict[str, Any] = {"data": [batch_of()], "microbatches": 2, "timeout_s": 60.0}
    job = elastic.Job(lambda: model_of("llama"), adam, layout, **options)
    job.step()
    weight: Any = job.model.model.norm.weight
    for tensor in (weight.detach(), job.optimizer.state[weight]["exp_avg"]):
        local: Tensor = tensor.to_local()
        kept = local.clone()
        if not said:
            local[0] += rank
        elif rank:
            local[[0, 1]] = local[[1, 0]]
        before = [p.detach().to_local().clone() for p in job.model.parameters()]
        with pytest.raises(SpecError) as caught:
            job.switch(elastic.Parallelism(pp=2))
        said.append(str(caught.value))
        assert all(torch.equal(a, p.detach().to_local()) for a, p in zip(before, job.model.parameters(), strict=True))
        local.copy_(kept)
    job.switch(elastic.Parallelism(pp=2))
    return " / ".join(said)


def test_copies_that_differ_between_tp_ranks_are_named() -> None:
    for words in run_gloo(_apart, 2, timeout_s=100.0):
        assert words.startswith("ranks 0 and 1 have copies of model.norm.weight that differ / ")
        assert words.endswith("ranks 0 and 1 have copies of model.norm.weight@exp_avg that differ")


def test_references_from_before_find_nothing_old_and_freezing_goes_through() -> None:
    run_gloo(_references, 2, timeout_s=100.0)


def _refused(rank: int, size: int) -> list[str]:
    job = start("dp2")
    train(job, 1)
    before, said = _whole(job), []

    def told(error: type[Exception], text: str) -> None:
        with pytest.raises(error) as caught:
            job.switch(elastic.Parallelism.parse(text))
        said.append(str(caught.value))
        now = _whole(job)
        assert before.keys() == now.keys()
        assert all(torch.equal(before[n], now[n]) for n in now)

    weight = job.model[2].up.weight
    handle = weight.register_hook(lambda g: g) if rank == 1 else None
    told(TransitionError, "dp2,zero3")
    if handle is not None:
        handle.remove()
    job.model[3].friend = [job.model[2]]
    told(TransitionError, "dp2,zero3")
    del job.model[3].friend
    for hook in (job.model[2].forward, lambda *_, seen=[job.model[1].up]: None, partial(_counts, weight)):
        handle = job.model[3].register_forward_hook(hook) if rank == 1 else None
        told(TransitionError, "dp2,zero3")
        if handle is not None:
            handle.remove()
    graph = job.model[2].up(torch.ones(DIM).double()) if rank == 1 else None
    for text in ("dp2,zero3", "pp2"):
        told(SpecError, text)
    graph, weak = None, weakref.ref(weight) if rank == 0 else None
    told(SpecError, "dp2,zero3")
    weak = weakref.ref(job.model[1])
    told(SpecError, "dp2,zero3")
    del graph, weak
    real = job_state.sharded
    job_state.sharded = _out_of_memory if rank == 1 else real
    told(TransitionError, "dp2,zero3")
    job_state.sharded = real
    told(SpecError, "tp2")
    job.prepare(elastic.Parallelism.parse("dp2,zero3"))
    for mode, words in (("fast", "mode 'fast': expected safe"), (("safe", "in-place")[rank], "in another mode")):
        with pytest.raises(SpecError, match=words):
            job.switch(mode=mode)  # type: ignore[arg-type]
    job.switch()  # what was prepared is still there
    with pytest.raises(SpecError, match="in shards"):
        job.pipeline.measure()
    weights, gathered = {n: t for n, t in _whole(job).items() if "@" not in n}, job.state_dict()
    assert rank or all(same({n: t}, {n: gathered[n]}) for n, t in weights.items())
    assert bool(gathered) == (rank == 0)
    job.model[2].more = nn.Linear(1, 1)
    with pytest.raises(SpecError, match="modules were added or replaced"):
        job.step()
    del job.model[2].more
    train(job, 1)
    before, allocate = _whole(job), job.pipeline.mover.allocate
    job.pipeline.mover.allocate = _out_of_memory if rank == 0 else allocate
    told(TransitionError, "pp2")
    job.pipeline.mover.allocate = allocate
    losses = [*train(job, 1), *_after(job, "pp2")]
    assert losses == pytest.approx(plain_losses(4)[2:], abs=1e-9)
    job.close()
    return said


def _counts(*_: Any) -> None:
    """Stands for a hook that was given a parameter."""


def _out_of_memory(*_: Any) -> Any:
    raise MemoryError("no memory is left")


def _after(job: elastic.Job, text: str) -> list[float]:
    job.switch(elastic.Parallelism.parse(text))
    return train(job, 1)


def test_what_cannot_go_over_is_refused_on_all_and_the_job_goes_on() -> None:
    every = run_gloo(_refused, 2, timeout_s=100.0)
    assert every[0][:2] == every[1][:2]
    hook, friend, *hooks, alive, also, weak, module, making, plan, moving = every[0]
    assert "no memory is left" in every[1][-3]
    assert ["rank 1: 3._forward_hooks refers to a module" in words for words in hooks] == [True] * 3
    for words in (alive, also):
        assert "rank 1: 2.up.weight is held by an autograd graph that is alive" in words
    assert "rank 0: something has a weak reference to 2.up.weight" in weak
    assert "something has a weak reference to 1, and" in module
    assert all("goes on" in words or "whole" in words for words in (making, moving))
    assert "rank 1: 2.up.weight has a hook on the tensor" in hook
    assert "3.friend refers to a module" in friend
    assert "no tensor-parallel plan" in plan
