"""A job in slices: it trains as one process does, and goes to other numbers of slices, stages and replicas and back."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="one of the models is of transformers'")

from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.pipeline.model.layers import ModuleChain
from pipeline_balance.slices import SliceOptions
from prophet.errors import SpecError, TransitionError
from tests.helpers import sliced_layers as own
from tests.helpers.elastic_jobs import broken, check_held, same, whole
from tests.helpers.elastic_sliced import check_cut, chunks, go, llama_job, own_job
from tests.helpers.launch import run_gloo
from tests.helpers.releases import needs_orders
from tests.helpers.sliced_models import FREE, adam, alone, apart, batch_of, model_of
from tests.helpers.transformers_models import small

EXACT = 1e-10
TOUR = ("pp2,dp2,slices4", "pp4,slices8", "pp2,v2,dp2,zero1,slices4", "dp2,zero1", "slices8", "pp2,v2", "pp3,slices4")
KINDS = ["plain", "packed", "padded"]
MAX_NORM = 0.5


def _llama(rank: int, size: int, layouts: tuple[str, ...], options: Any) -> tuple[list[float], dict[str, Tensor]]:
    job = llama_job(layouts[0], KINDS, slices=options)
    attention = job.model.config._attn_implementation
    check_cut(job)
    losses = [job.step(max_norm=MAX_NORM)]
    for text in layouts[1:]:
        losses += go(job, text, MAX_NORM, while_preparing=1)
        losses += [job.step(max_norm=MAX_NORM) for _ in range(2)]
        assert not chunks(job.pipeline.model)
        assert job.model.config._attn_implementation == attention
    kept = whole(job)
    state = job.state_dict()
    assert bool(state) == (rank == 0)
    assert all(torch.equal(state[name], tensor) for name, tensor in kept.items() if name in state)
    job.close()
    return losses, state


@pytest.mark.parametrize(
    ("layouts", "options"),
    [
        (TOUR, None),
        pytest.param(TOUR, SliceOptions(1, order="aligned", recompute="selective"), marks=pytest.mark.slow),
        pytest.param(TOUR, SliceOptions(1, recompute="full", balance="uneven"), marks=pytest.mark.slow),
        pytest.param(
            TOUR,
            SliceOptions(1, order="aligned", balance="exchange", keep_bytes=4096, exchange_costs=FREE),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_model_goes_through_slices_and_trains_as_in_one_process(layouts: tuple[str, ...], options: Any) -> None:
    steps = 1 + 3 * (len(layouts) - 1)
    losses, _, state = alone(model_of("llama", tied=True), [KINDS[k % 3] for k in range(steps)], max_norm=MAX_NORM)
    results = run_gloo(_llama, 4, layouts, options, timeout_s=240.0)
    for got, _ in results:
        assert got == pytest.approx(losses, rel=EXACT)
    assert results[0][1].keys() == state.keys()
    assert apart(results[0][1], state) <= 1e-8  # Adam divides by what may be nearly zero


OWN = ("pp2,dp2,slices4,zero1", "pp4,slices6", "dp2,zero1", "pp2,v2,slices4", "dp2,slices12", "pp2,v2,dp2,zero1")


def _own(rank: int, size: int, layouts: tuple[str, ...], options: Any) -> tuple[list[float], dict[str, Tensor]]:
    updates = 2 * len(layouts)
    job = own_job(layouts[0], updates, slices=options)
    losses = [job.step(max_norm=own.MAX_NORM) for _ in range(2)]
    for text in layouts[1:]:
        go(job, text, own.MAX_NORM)
        losses += [job.step(max_norm=own.MAX_NORM) for _ in range(2)]
    return losses, job.state_dict()


@pytest.mark.parametrize(
    ("layouts", "options"),
    [
        (OWN, None),
        pytest.param(OWN, SliceOptions(1, balance="uneven", crossover_tokens=4), marks=pytest.mark.slow),
    ],
)
def test_layers_of_ones_own_draw_dropout_by_slice(layouts: tuple[str, ...], options: Any) -> None:
    """The reference is one process that changes the number of slices with the job."""
    slices: list[own.Slices] = [own_slices(text, options) for text in layouts for _ in range(2)]
    losses, state = own.one_process(len(slices), slices, 1)
    results = run_gloo(_own, 4, layouts, options, timeout_s=120.0)
    for got, _ in results:
        assert got == pytest.approx(losses, rel=EXACT)
    assert apart(results[0][1], state) <= 1e-8


def own_slices(text: str, options: SliceOptions | None) -> own.Slices:
    """How a layout cuts a sequence."""
    number = Parallelism.parse(text).slices
    if options is None:
        return number
    return own.starts_of(SliceOptions(number, balance="uneven", crossover_tokens=options.crossover_tokens))


def _there_and_back(rank: int, size: int) -> None:
    job = own_job("pp2,dp2,slices4,zero1", 5)
    fired: list[str] = []
    job.optimizer.register_step_post_hook(lambda *_: fired.append("step"))
    job.model[1].register_forward_hook(lambda *_: fired.append("module"))
    job.model[1].q.weight.register_post_accumulate_grad_hook(lambda _: fired.append("gradient"))
    for _ in range(3):
        job.step(max_norm=own.MAX_NORM)
    before, generator, position = whole(job), torch.get_rng_state(), job.data.position
    counters = {id(p): float(s["step"]) for p, s in job.optimizer.state.items()}
    for text in ("pp4,slices12", "dp3", "pp2,dp2,zero1", "pp2,v2,slices2", "pp2,dp2,slices4,zero1"):
        go(job, text, own.MAX_NORM, mode="in-place" if text.startswith("pp2,v2") else "safe")
    assert same(whole(job), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert job.data.position == position == 3 * own.PARTS * own.ROWS
    assert {id(p): float(s["step"]) for p, s in job.optimizer.state.items()} == counters
    report = job.switch(Parallelism.parse("pp2,dp2,slices6,zero1"))
    assert report.link_bytes == {}
    job.step()  # at first, layers are tried on two slices
    fired.clear()
    job.step()
    slices = 12 if 1 in job.pipeline.layers else 0
    assert [fired.count(what) for what in ("step", "module", "gradient")] == [1, slices, slices]


@pytest.mark.slow
def test_there_and_back_is_bit_identical() -> None:
    run_gloo(_there_and_back, 4)


def _evaluates(rank: int, size: int) -> list[float]:
    job = llama_job("pp2,dp2,slices4", ["plain"])
    found = []
    for text in ("pp2,dp2,slices4", "pp3,slices8", "pp2,v2,dp2,slices2,zero1", "dp4,slices16"):
        job.switch(Parallelism.parse(text))
        found += [job.evaluate(*batch_of("packed", rows=6)), job.evaluate(*batch_of("padded", rows=2))]
        check_cut(job)
    with pytest.raises(SpecError, match="every rank needs the batch"):
        job.evaluate(None if rank == 1 else batch_of()[0]["input_ids"], batch_of()[1])
    with pytest.raises(SpecError, match="cannot be cut into 16 equal slices: pad or cut them to 16 or 32 tokens"):
        job.evaluate(*batch_of(tokens=24))
    job.step()
    return found


@pytest.mark.slow
def test_evaluation_in_slices_has_the_loss_of_the_whole() -> None:
    model = model_of("llama", tied=True).eval()
    expected = []
    with torch.no_grad():
        for kind, rows in (("packed", 6), ("padded", 2)):
            inputs, labels = batch_of(kind, rows=rows)
            expected.append(float(model(**inputs, labels=labels, use_cache=False).loss))
    for found in run_gloo(_evaluates, 4):
        assert found == pytest.approx(expected * 4, rel=EXACT)


def _steep(output: Tensor, labels: Tensor) -> Tensor:
    return 1e4 * own.loss_fn(output, labels)


def _scaled(rank: int, size: int) -> tuple[list[float], list[float], set[float]]:
    """float32 with a scaler whose first scale overflows: every rank skips that update, and only that."""
    job = own_job("pp2,dp2,slices4,zero1", 9, loss_fn=_steep)
    job.model.float()
    scaler = job.scaler(init_scale=2.0**120, backoff_factor=2.0**-20, growth_interval=3)
    losses, scales = [], []
    for text in ("pp2,dp2,slices4,zero1", "slices6", "dp4,zero1,slices2"):
        job.switch(Parallelism.parse(text))
        for _ in range(3):
            losses.append(job.step(max_norm=0.5, scaler=scaler))
            scales.append(scaler.get_scale())
    steps = {float(tensor) for name, tensor in whole(job).items() if name.endswith("@step")}
    return losses, scales, steps


@pytest.mark.slow
def test_a_scaler_goes_through_switches_of_slices() -> None:
    results = run_gloo(_scaled, 4)
    assert all(r == results[0] for r in results)
    losses, scales, steps = results[0]
    assert scales == [2.0**100] * 3 + [2.0**101] * 3 + [2.0**102] * 3
    assert steps == {8.0}
    assert losses[-1] < losses[0]


PLACES = ("collect", "group", "allocate", "pack", "unpack", "assemble", "decide")


def _broken(rank: int, size: int) -> tuple[list[str], list[float]]:
    job = own_job("pp2,dp2,slices4,zero1", len(PLACES) + 1)
    said, losses = [], [job.step(max_norm=own.MAX_NORM)]
    for place in PLACES:
        before, model = whole(job), job.pipeline.model
        with broken(job, place) if rank == 2 else nullcontext():
            job.prepare(Parallelism.parse("pp4,slices6,order3:2:1:0"))
            try:
                job.switch()
                said.append("nothing")
            except TransitionError as error:
                said.append(str(error))
        assert said[-1] != "nothing", place
        assert same(whole(job), before), place
        check_held(job)
        assert job.pipeline.model is model
        assert str(job.layout) == "pp2,dp2,zero1,slices4"
        check_cut(job)
        losses.append(job.step(max_norm=own.MAX_NORM))
    go(job, "pp4,slices6", own.MAX_NORM)
    return said, losses


@needs_orders
def test_a_failed_switch_leaves_the_slices_as_they_were() -> None:
    losses, _ = own.one_process(len(PLACES) + 1, 4, 1)
    results = run_gloo(_broken, 4)
    for said, got in results:
        assert len(said) == len(PLACES)
        assert got == pytest.approx(losses, rel=EXACT)
    assert all("broken in" in words for words in results[2][0])
    assert all("rank 2" in words or "ranks [2]" in words or "another rank" in words for words in results[0][0])


SHARDS = ("dp2,zero3", "pp2,slices4", "tp2", "dp2,slices2,zero1", "dp2,tp2,zero2", "pp2,v2,slices8")


def _shards(rank: int, size: int) -> list[float]:
    job = llama_job(SHARDS[0], KINDS)
    losses = [job.step(max_norm=MAX_NORM)]
    for text in SHARDS[1:]:
        before = whole_values(job)
        job.switch(Parallelism.parse(text))
        assert same(whole_values(job), before)
        check_cut(job)
        losses.append(job.step(max_norm=MAX_NORM))
    return losses


def whole_values(job: Job) -> dict[str, Tensor]:
    """All parameters whole, wherever they are shards."""
    every: Any = {}
    for name, parameter in job.model.named_parameters():
        tensor: Any = parameter.detach()
        if hasattr(tensor, "full_tensor"):
            every[name] = tensor.full_tensor() if not tensor.is_meta else None
        else:
            every[name] = None if tensor.is_meta else tensor
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, every)
    return {name: next(row[name] for row in gathered if row[name] is not None) for name in every}


@pytest.mark.slow
def test_slices_and_shards_follow_each_other() -> None:
    losses, *_ = alone(model_of("llama", tied=True), [KINDS[k % 3] for k in range(len(SHARDS))], max_norm=MAX_NORM)
    for got in run_gloo(_shards, 4, timeout_s=120.0):
        assert got == pytest.approx(losses, rel=EXACT)


OWN_SHARDS = ("dp2,zero3", "pp2,slices4", "dp2,zero2")


def _own_shards(rank: int, size: int) -> list[float]:
    job = own_job(OWN_SHARDS[0], len(OWN_SHARDS))
    losses = [job.step(max_norm=own.MAX_NORM)]
    for text in OWN_SHARDS[1:]:
        job.switch(Parallelism.parse(text))
        losses.append(job.step(max_norm=own.MAX_NORM))
    return losses


@pytest.mark.slow
def test_layers_attend_in_shards_too() -> None:
    losses, _ = own.one_process(len(OWN_SHARDS), [own_slices(text, None) for text in OWN_SHARDS], 1)
    for got in run_gloo(_own_shards, 2):
        assert got == pytest.approx(losses, rel=EXACT)


def _refused(rank: int, size: int) -> list[float]:
    for make, words in (
        (lambda: own_job("pp2,slices4", 1, slices=SliceOptions(4)), r"expected SliceOptions\(1, ...\)"),
        (lambda: own_job("pp2,slices4", 1, slices=SliceOptions(1, recompute="full")), "is for transformers models"),
        (lambda: own_job("pp5,slices4", 1), "needs rank 4, the world has 4|5 chunks need"),
        (
            lambda: llama_job("dp2,zero3", KINDS, slices=SliceOptions(1, recompute="full")),
            "so nothing is computed again",
        ),
        (lambda: _given("pp2,slices2"), "a ModuleChain cannot be cut into slices"),
        (lambda: _bert("pp2,slices2"), "ForMaskedLM, slices need a causal"),
    ):
        with pytest.raises(SpecError, match=words):
            make()
    job = own_job("pp2,slices4", 4)
    losses = [job.step(max_norm=own.MAX_NORM)]
    for text, words in {
        "dp2,slices2,zero2": "slices2 with zero2 cannot be trained.*FSDP2 wants the model called at once",
        "dp2,slices2,zero3": "slices2 with zero3 cannot be trained",
        "tp2,slices2": "no tensor-parallel plan",
        "pp5,slices2": "needs rank 4",
    }.items():
        with pytest.raises(SpecError, match=words):
            job.switch(Parallelism.parse(text))
        losses.append(job.step(max_norm=own.MAX_NORM)) if text == "pp5,slices2" else None
    with pytest.raises(SpecError, match=r"ranks \[1\] were given another layout"):
        job.prepare(Parallelism(pp=2, slices=3 if rank == 1 else 2))
    job.switch(Parallelism(pp=2, slices=5))
    with pytest.raises(SpecError, match="cannot be cut into 5 equal slices: pad or cut them to 10 or 15 tokens"):
        job.step(max_norm=own.MAX_NORM)
    job.switch(Parallelism(pp=2, slices=4))
    losses += [job.step(max_norm=own.MAX_NORM) for _ in range(2)]
    return losses


def _given(layout: str) -> Job:
    chain = ModuleChain(own.layers(), own.loss_fn, counted=own.counted)
    return Job(lambda: chain, own.adam, Parallelism.parse(layout), microbatches=2)


def _bert(layout: str) -> Job:
    return Job(lambda: small("bert"), adam, Parallelism.parse(layout), microbatches=2)


def test_what_cannot_be_sliced_is_refused_on_all_ranks_and_the_job_goes_on() -> None:
    losses, _ = own.one_process(4, 4, 1)
    for got in run_gloo(_refused, 4):
        assert got == pytest.approx(losses, rel=EXACT)
