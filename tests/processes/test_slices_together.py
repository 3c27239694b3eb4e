"""All options of slices at once, on real processes: as one process trains the model whole, without any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers", reason="the models are transformers'")

from pipeline_balance import ControllerConfig, attach
from pipeline_balance.control.decide import MoveCost
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.slices import SliceOptions
from pipeline_balance.slices.parts import Sliced
from pipeline_balance.slices.saved.offload import Host
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from tests.helpers import sliced_layers as own
from tests.helpers.elastic_sliced import llama_job
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_cases import EXACT, EXCHANGE, Case, check, exchangers, on_the_host, one_step
from tests.helpers.sliced_models import FREE, alone, apart, model_of
from tests.helpers.transformers_models import LAYERS

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
UNITS, MAX_NORM = LAYERS + 2, 0.5
WITHOUT_EXCHANGE: dict[str, Any] = {"split_vocabulary": True, "offload": 0.5}
ALL: dict[str, Any] = {**WITHOUT_EXCHANGE, **EXCHANGE, "keep_bytes": 1 << 20}
SHARED: dict[str, Any] = {**ALL, "context": 2, "replicas": 2}
# gpt-oss has experts and sinks; its windows cannot be exchanged
NO_WINDOWS = ["full_attention"] * LAYERS

TWO = [
    Case("qwen3", "packed", tied=True, pipeline={**ALL, "slices": 8, "recompute": "selective"}),
    Case("gpt_oss", "packed", tied=True, layer_types=NO_WINDOWS, pipeline={**ALL, "offload": 1.0, "recompute": "full"}),
    Case("gpt_oss", "padded", tied=True, sliding_window=5, pipeline={**WITHOUT_EXCHANGE, "recompute": "full"}),
]
TWO_MORE = [
    Case("llama", "packed", dtype=torch.float32, pipeline={**ALL, "stages": 2, "recompute": "full"}),
    Case("mixtral", "silent", tied=True, output_router_logits=False, pipeline=ALL),
    Case("mistral", "packed", sliding_window=3, dtype=torch.float32, pipeline={**WITHOUT_EXCHANGE, "stages": 2}),
    Case("qwen3", "padded", tied=True, pipeline={**WITHOUT_EXCHANGE, "balance": "uneven", "recompute": "full"}),
    Case("deepseek_v3", "packed", dtype=torch.float32, pipeline={**ALL, "recompute": "selective"}),
    Case("gpt2", "packed", tied=True, pipeline={**ALL, "recompute": "model"}),
    Case("gpt_oss", "silent", sliding_window=6, pipeline={**WITHOUT_EXCHANGE, "stages": 2, "order": "aligned"}),
]
FOUR = [
    Case("qwen3", "packed", tokens=32, tied=True, pipeline={**SHARED, "recompute": "selective", "zero": 1}),
    Case("gpt_oss", "packed", tokens=32, layer_types=NO_WINDOWS, pipeline={**SHARED, "offload": 1.0}),
]
FOUR_MORE = [
    Case(
        "mixtral",
        "packed",
        tokens=64,
        tied=True,
        output_router_logits=False,
        pipeline={**SHARED, "slices": 8, "recompute": "full"},
    ),
    Case("llama", "silent", tokens=256, cut=32, dtype=torch.float32, pipeline={**SHARED, "stages": 2}),
    Case("qwen3", "packed", tied=True, num_hidden_layers=6, pipeline={**ALL, "slices": 8, "recompute": "full"}),
    Case("gpt_oss", "packed", sliding_window=5, num_hidden_layers=4, pipeline={**WITHOUT_EXCHANGE, "offload": 1.0}),
]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, TWO),
        (4, FOUR),
        pytest.param(2, TWO_MORE, marks=pytest.mark.slow),
        pytest.param(4, FOUR_MORE, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole(size: int, cases: list[Case]) -> None:
    check(cases, run_gloo(one_step, size, cases, timeout_s=120.0))


# --- training --------------------------------------------------------------------------------------------------

KINDS = ["plain", "packed", "silent", "padded"] * 5
# with a split vocabulary every rank has a stage
MAPS = [StageMap((0, 2, UNITS), (1, 0)), StageMap((0, 4, UNITS), (0, 1)), StageMap((0, 3, UNITS), (1, 0))]


class _Since:
    """What a rank has exchanged, and sent to the host, from its making on: made anew at each move."""

    def __init__(self, pipe: ElasticPipeline) -> None:
        self._pipe, self._passes, self._before = pipe, exchangers(pipe), on_the_host(pipe)[0]

    def moved_and_sent(self) -> tuple[int, int]:
        """Bytes exchanged with helpers, and bytes sent to the host."""
        moved = sum(sum(one.moved_bytes) for one in self._passes if one is not None)
        return moved, on_the_host(self._pipe)[0] - self._before


def _check_since(results: Sequence[tuple[int, int]], case: Case) -> None:
    """After the last move every replica exchanged, if its case does, and every rank sent something to the host."""
    ranks = len(results) // case.replicas
    for first in range(0, len(results), ranks):
        assert (sum(moved for moved, _ in results[first : first + ranks]) > 0) == case.exchanges
    assert all(sent > 0 for _, sent in results)


def _moving(
    rank: int, size: int, case: Case, steps: int
) -> tuple[list[float], dict[str, Tensor], tuple[int, int], int]:
    """A move in the middle of each third of the steps."""
    pipe = case.pipe(case.model())
    since, losses, third = _Since(pipe), [], steps // len(MAPS)
    for step, kind in enumerate(KINDS[:steps]):
        if step % third == third // 2:
            pipe.rebuild(MAPS[step // third])
            since = _Since(pipe)
        losses.append(pipe.step(*case.batch(pipe.replica, kind), max_norm=MAX_NORM))
    return losses, pipe.state_dict(), since.moved_and_sent(), on_the_host(pipe)[1]


@pytest.mark.parametrize(
    ("size", "steps", "case"),
    [
        (2, 10, Case("gpt_oss", tied=True, layer_types=NO_WINDOWS, pipeline={**ALL, "recompute": "selective"})),
        pytest.param(
            2,
            20,
            Case("gpt_oss", tied=True, sliding_window=5, pipeline={"split_vocabulary": True, "offload": "auto"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            20,
            Case("qwen3", tokens=32, tied=True, pipeline={**SHARED, "offload": "auto", "zero": 1, "recompute": "full"}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_steps_of_adam_with_moves(size: int, steps: int, case: Case) -> None:
    losses, _, state = alone(case.model(), KINDS[:steps], max_norm=MAX_NORM, tokens=case.tokens)
    results = run_gloo(_moving, size, case, steps, timeout_s=120.0)
    for got, *_, there in results:
        assert got == pytest.approx(losses, rel=EXACT)
        assert there == 0
    _check_since([since for *_, since, _ in results], case)
    assert results[0][1].keys() == state.keys()
    assert apart(results[0][1], state) <= 1e-8  # Adam divides by what may be nearly zero


def _balanced(rank: int, size: int, case: Case) -> tuple[list[float], list[tuple[int, ...]], tuple[int, int]]:
    """A controller moves layers within a step, while all else is on."""
    pipe = case.pipe(case.model(), stage_map=StageMap((0, UNITS - 1, UNITS), (0, 1)))
    config = ControllerConfig(
        every_steps=2,
        measure_steps=1,
        min_gain=0.0,
        horizon_steps=99,
        policy="partition-by-parameters",
        move_cost=MoveCost(fixed_s=0.0),
        prepare_in_backward=True,
    )
    controller, losses = attach(pipe, config=config), []
    since, maps = _Since(pipe), [pipe.stage_map.boundaries]
    for kind in KINDS[:8]:
        losses.append(controller.step(*case.batch(pipe.replica, kind), max_norm=MAX_NORM))
        maps.append(pipe.stage_map.boundaries)
        if maps[-1] != maps[-2]:
            since = _Since(pipe)
    return losses, maps, since.moved_and_sent()


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (2, Case("qwen3", tied=True, pipeline={**ALL, "recompute": "selective"})),
        pytest.param(4, Case("llama", tokens=32, pipeline={**SHARED, "zero": 1}), marks=pytest.mark.slow),
    ],
)
def test_a_controller_moves_layers_and_no_loss_changes(size: int, case: Case) -> None:
    losses, *_ = alone(case.model(), KINDS[:8], max_norm=MAX_NORM, tokens=case.tokens)
    results = run_gloo(_balanced, size, case, timeout_s=120.0)
    for got, maps, _ in results:
        assert got == pytest.approx(losses, rel=EXACT)
        assert maps[-1] != maps[0]
    _check_since([since for *_, since in results], case)


# --- layers of one's own ---------------------------------------------------------------------------------------

UPDATES = 4


def _words() -> nn.Sequential:
    """Layers that attend behind a plain embedding, without dropout."""
    torch.manual_seed(3)
    blocks = [own.Block(number) for number in range(own.BLOCKS)]
    ends = nn.Embedding(own.VOCABULARY, own.DIM), nn.Linear(own.DIM, own.VOCABULARY)
    own.without_dropout(model := nn.Sequential(ends[0], *blocks, ends[1]).double())
    return model


def _own_layers(rank: int, size: int, replicas: int) -> tuple[list[float], dict[str, Tensor], tuple[int, int]]:
    """Gradients are added up over two calls, and clipped."""
    slices = SliceOptions(
        3,
        order="aligned",
        balance="exchange",
        keep_bytes=1 << 16,
        exchange_costs=FREE,
        offload=0.5,
        context_parallel=replicas,
    )
    # replicas that share slices are given one batch
    options = {"split_vocabulary": True, "microbatches": own.PARTS}
    pipe = own.pipe(_words(), slices, replicas=replicas, **options)
    passes, losses = exchangers(pipe), []
    for update in range(UPDATES):
        for call in range(2):
            inputs, labels = own.batch(update, call)
            loss = pipe.step(inputs["ids"], labels, update=call == 1, max_norm=own.MAX_NORM if call else None)
        losses.append(loss)
    moved = sum(sum(one.moved_bytes) for one in passes if one is not None)
    return losses, pipe.state_dict(), (moved, on_the_host(pipe)[0])


def _whole_layers() -> tuple[list[float], dict[str, Tensor]]:
    model = _words()
    for block in model[1:-1]:
        block.attention = lambda q, k, v, layer: F.scaled_dot_product_attention(  # type: ignore[assignment]
            q, k, v, is_causal=True, enable_gqa=True
        )
    optimizer, losses = own.adam(model.named_parameters()), []
    for update in range(UPDATES):
        optimizer.zero_grad()
        given = [own.batch(update, call) for call in range(2)]
        inputs, labels = (torch.cat(some) for some in zip(*((i["ids"], its) for i, its in given), strict=True))
        loss = own.loss_fn(model(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), own.MAX_NORM)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {n: p.detach() for n, p in model.state_dict().items()}


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_layers_of_ones_own_train_as_whole(size: int, replicas: int) -> None:
    losses, state = _whole_layers()
    results = run_gloo(_own_layers, size, replicas)
    for got, _, (_, sent) in results:
        assert got == pytest.approx(losses, rel=EXACT)
        assert sent > 0
    assert sum(moved for *_, (moved, _) in results) > 0
    assert results[0][1].keys() == state.keys()
    assert apart(results[0][1], state) <= 1e-8


# --- jobs ------------------------------------------------------------------------------------------------------

LAYOUTS = (
    "pp2,dp2,slices4",
    "pp2,tp2,slices4",
    "pp4,slices8",
    "pp2,v2,dp2,zero1,slices4",
    "dp2,zero1",
    "pp2,tp2,slices8",
)


def _sliced(job: Job) -> Any:
    """What runs the job in slices, also where tp ranks have a part of its layers each."""
    return getattr(job.pipeline.model, "_runs", job.pipeline.model)


def _tour(rank: int, size: int, options: SliceOptions) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Two steps in each layout; the bytes that each has sent to the host."""
    weights: set[int] = set()
    send = Host.send

    def watched(host: Host, here: Tensor) -> Tensor:
        assert here.untyped_storage().data_ptr() not in weights
        return send(host, here)

    Host.send = watched  # type: ignore[method-assign]
    job = llama_job(LAYOUTS[0], KINDS[:3], slices=options)
    losses, moved = [], []
    for number, text in enumerate(LAYOUTS):
        if number:
            job.switch(Parallelism.parse(text))
        every: list[Any] = [p for p in job.model.parameters() if not p.is_meta]
        weights.clear()
        weights.update(getattr(p, "_local_tensor", p).untyped_storage().data_ptr() for p in every)
        losses += [job.step(max_norm=MAX_NORM) for _ in range(2)]
        offloader = getattr(_sliced(job), "offloader", None)
        host = offloader.host if offloader is not None else None
        moved.append(host.sent_bytes if host is not None else 0)
        assert host is None or offloader.host_bytes == 0
    state = job.state_dict()
    job.close()
    return losses, state, moved


def test_a_job_with_saved_tensors_on_the_host_trains_bit_for_bit_as_without() -> None:
    kinds = [KINDS[step % 3] for step in range(2 * len(LAYOUTS))]
    losses, _, state = alone(model_of("llama", tied=True), kinds, max_norm=MAX_NORM)
    shares = (0.0, 0.5)
    options = [SliceOptions(1, order="aligned", recompute="selective", offload=share) for share in shares]
    without, half = (run_gloo(_tour, 4, one, timeout_s=120.0) for one in options)
    for (got, mine, nothing), (others, other, moved) in zip(without, half, strict=True):
        assert got == pytest.approx(losses, rel=EXACT)
        assert others == got
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)
        assert not any(nothing)
        assert all(n > 0 for n, text in zip(moved, LAYOUTS, strict=True) if "slices" in text)
    assert apart(without[0][1], state) <= 1e-8
    # a tp rank passes two microbatches, a replica one; and what layers are given is whole on each tp rank
    assert half[0][2][1] >= 2 * half[0][2][0]


def _stages(rank: int, size: int) -> tuple[list[float], str, int]:
    """Stages follow the load, while slices exchange attention and saved tensors wait on the host."""
    config = ControllerConfig(
        every_steps=2,
        measure_steps=1,
        min_gain=0.0,
        horizon_steps=99,
        policy="partition-by-parameters",
        move_cost=MoveCost(fixed_s=0.0),
        prepare_in_backward=True,
    )
    slices = SliceOptions(
        1, order="aligned", recompute="full", balance="exchange", keep_bytes=1 << 20, exchange_costs=FREE, offload=1.0
    )
    job = llama_job("pp2,dp2,zero1,slices4,stages1:4", KINDS[:4], slices=slices, balance_stages=config)
    losses = [job.step(max_norm=MAX_NORM) for _ in range(8)]
    layout = str(job.layout)
    job.switch(Parallelism.parse("pp4,slices8"))
    losses += [job.step(max_norm=MAX_NORM) for _ in range(4)]
    model = job.pipeline.model
    assert isinstance(model, Sliced)
    assert model.exchanging is not None
    assert model.exchanging.verdict is not None
    assert model.exchanging.verdict.pays
    sent, there = on_the_host(job.pipeline)
    assert there == 0
    job.close()
    return losses, layout, sent


def test_stages_of_a_job_follow_the_load_with_exchange_and_offload() -> None:
    losses, *_ = alone(model_of("llama", tied=True), KINDS[:12], max_norm=MAX_NORM)
    results = run_gloo(_stages, 4, timeout_s=180.0)
    for got, layout, _ in results:
        assert got == pytest.approx(losses, rel=EXACT)
        assert "stages1:4" not in layout
    assert sum(sent for *_, sent in results) > 0


# --- what does not go together -----------------------------------------------------------------------------------


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except SpecError as error:
        return str(error)
    return "nothing"


def _refused(rank: int, size: int) -> list[str]:
    def made(case: Case, **more: Any) -> ElasticPipeline:
        return case.pipe(case.model(), **more)

    def stepped(case: Case) -> str:
        """What a step says; nothing has begun then."""
        pipe = made(case)
        passes = exchangers(pipe)
        said = _error(lambda: pipe.step(*case.batch(pipe.replica)))
        assert not passes
        assert on_the_host(pipe) == (0, 0)
        return said

    every = Case("llama", "packed", tokens=32, pipeline=SHARED)
    pipe = made(every)
    first = pipe.evaluate(*every.batch(pipe.replica))
    unexchanged = {**WITHOUT_EXCHANGE, "context": 2, "replicas": 2}
    capped: dict[str, Any] = {"layer_types": NO_WINDOWS, "attn_logit_softcapping": 1.0}
    said = [
        stepped(Case("mistral", tokens=32, sliding_window=6, pipeline=SHARED)),
        stepped(Case("mistral", tokens=32, sliding_window=6, pipeline=unexchanged)),
        stepped(Case("gemma2", pipeline={**EXCHANGE, "offload": 0.5}, **capped)),
        stepped(Case("llama", pipeline={**ALL, "keep_bytes": 1 << 60})),
        stepped(Case("llama", tokens=40, pipeline=SHARED)),
        _error(lambda: made(Case("mixtral", tokens=32, pipeline=SHARED))),
        _error(lambda: made(every, offload=0.5 if rank else 0.25)),
        _error(lambda: made(every, offload="auto" if rank else 0.5)),
        _error(lambda: made(every, split_vocabulary=rank > 0)),
        _error(lambda: made(every, order="minimal")),
        _error(lambda: pipe.rebuild(StageMap((0, UNITS), (0,)))),
    ]
    # nothing was lost
    assert pipe.evaluate(*every.batch(pipe.replica)) == first
    assert pipe.step(*every.batch(pipe.replica)) > 0
    return said


def test_what_does_not_go_together_is_one_error_on_all_ranks_before_data_moves() -> None:
    expected = [
        'balance="exchange" plans for attention to all earlier tokens: layer 0 has a sliding window',
        "context_parallel: layer 0 has a sliding window",
        'balance="exchange" knows the cost of plain attention: layer 1 has a soft cap of scores',
        f"keep_bytes={1 << 60}: there is not so much memory",
        "slices have 10 tokens here",
        "router",
        "ranks [1, 2, 3] cut microbatches by SliceOptions(slices=4",
        "ranks [1, 2, 3] cut microbatches by SliceOptions(slices=4",
        "split_vocabulary",
        'balance="exchange" needs order="aligned"',
        "have none",
    ]
    first, *others = run_gloo(_refused, 4, timeout_s=240.0)
    assert all(said == first for said in others)
    for text, part in zip(first, expected, strict=True):
        assert part in text, text
