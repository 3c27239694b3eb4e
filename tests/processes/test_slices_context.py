"""Slices whose tokens several ranks share, on real processes: loss and gradients of the whole model, counted bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers", reason="the models are transformers'")

from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.closed_forms import context_bytes_over_passed
from pipeline_balance.slices import AutoSlices, SliceOptions, attention
from pipeline_balance.slices.parts import Sliced
from pipeline_balance.slices.sharing.context import Context
from pipeline_balance.slices.store import Chunk, ChunkStore
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError, StageFailed
from tests.helpers import sliced_layers as own
from tests.helpers.launch import process_outcomes, run_gloo
from tests.helpers.sliced_cases import EXACT, EXCHANGE, Case, check, on_the_host, one_step
from tests.helpers.sliced_models import MICROBATCHES, alone, apart, batch_of, model_of, no_update, pipe_of

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")


def shared(family: str, kind: str = "plain", *, tokens: int = 32, pipeline: Any = None, **model: Any) -> Case:
    """A case whose slices two ranks share, if `pipeline` does not say otherwise."""
    return Case(family, kind, tokens=tokens, pipeline={"context": 2, "replicas": 2, **(pipeline or {})}, **model)


FOUR_RANKS = {"context": 4, "replicas": 4}
TWO = [
    shared("llama", "silent"),
    shared("qwen3", "packed", tied=True, pipeline={"recompute": "selective"}),
]
TWO_MORE = [
    shared("llama", "padded", dtype=torch.float32, pipeline={"recompute": "full"}),
    shared("llama", "packed", tokens=256, cut=32),
    shared("llama", "plain", tokens=1024, cut=64, pipeline={"balance": "uneven"}),
    shared("gpt2", "plain", pipeline={"recompute": "model"}),
    shared("gpt_oss", "packed", layer_types=["full_attention"] * 3),
    shared("gemma2", "packed", layer_types=["full_attention"] * 3, attn_logit_softcapping=1.0, dtype=torch.float32),
    shared("deepseek_v3", "plain", dtype=torch.float32),
    shared("mistral", "plain", sliding_window=32),
    shared("llama", "plain", frozen=2),
]
FOUR = [
    shared("llama", "silent", tokens=64, pipeline=FOUR_RANKS, tied=True),
    shared("qwen3", "packed", pipeline={"order": "aligned"}),
    shared("llama", "packed", tokens=64, pipeline=FOUR_RANKS),
    shared("llama", "packed", pipeline=EXCHANGE),
]
FOUR_MORE = [
    # two groups, each with half the rows
    shared("llama", "plain", pipeline={"replicas": 4}),
    shared("llama", "packed", dtype=torch.float32, pipeline={"stages": 2, "recompute": "full"}),
    shared("gpt_oss", "plain", tokens=64, pipeline=FOUR_RANKS, layer_types=["full_attention"] * 3),
    shared("llama", "plain", tied=True, pipeline={"split_vocabulary": True}),
    shared("mixtral", "packed", output_router_logits=False),
    shared("llama", "plain", tied=True, pipeline={"zero": 1}),
    shared("qwen3", "silent", pipeline=EXCHANGE | {"slices": 8, "keep_bytes": 1 << 20, "recompute": "selective"}),
    shared("gpt_oss", "packed", layer_types=["full_attention"] * 3, pipeline=EXCHANGE | {"keep_bytes": 4000}),
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
    check(cases, run_gloo(one_step, size, cases, timeout_s=300.0))


OFFLOADED = [
    shared("llama", "silent", pipeline={"recompute": "selective"}),
    shared("qwen3", "packed", pipeline=EXCHANGE),
]


def _offloaded(rank: int, size: int, cases: list[Case]) -> list[Any]:
    found = []
    for case in cases:
        outcomes = []
        for share in (0.0, 0.5, 1.0):
            pipe = case.pipe(model := case.model(), offload=share)
            batch = case.batch(pipe.replica)
            losses = [pipe.step(*batch, max_norm=0.5) for _ in range(3)]
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None and not p.is_meta]
            outcomes.append((losses, grads, on_the_host(pipe)[0]))
        found.append(outcomes)
    return found


@pytest.mark.parametrize(("size", "cases"), [(2, OFFLOADED[:1]), pytest.param(4, OFFLOADED, marks=pytest.mark.slow)])
def test_with_saved_tensors_on_the_host_all_is_bit_for_bit_the_same(size: int, cases: list[Case]) -> None:
    for found in run_gloo(_offloaded, size, cases, timeout_s=180.0):
        for (losses, grads, _), *others in found:
            assert grads
            assert 0 < others[0][2] < others[1][2]
            for other_losses, other_grads, _ in others:
                assert other_losses == losses
                assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))


# --- training --------------------------------------------------------------------------------------------------

KINDS = ["plain", "packed", "silent", "plain", "padded"] * 2
MAPS = [StageMap((0, 2, 5), (1, 0)), StageMap((0, 5), (1,)), StageMap((0, 4, 5), (0, 1))]


def _ten(rank: int, size: int) -> tuple[list[float], dict[str, Tensor]]:
    pipe = pipe_of(model_of("llama", tied=True), 4, context=2, replicas=2)
    losses = []
    for step, kind in enumerate(KINDS):
        if step % 3 == 2:
            pipe.rebuild(MAPS[step // 3])
        losses.append(pipe.step(*batch_of(kind, tokens=32), max_norm=0.5))
    return losses, pipe.state_dict()


def test_ten_steps_of_adam_with_moves() -> None:
    losses, _, state = alone(model_of("llama", tied=True), KINDS, max_norm=0.5, tokens=32)
    results = run_gloo(_ten, 4, timeout_s=180.0)
    for got, _ in results:
        assert got == pytest.approx(losses, rel=EXACT)
    assert apart(results[0][1], state) <= 1e-8  # Adam divides by what may be nearly zero


# --- bytes -----------------------------------------------------------------------------------------------------

SLICES = 16


def _bytes(rank: int, size: int, keys: int) -> tuple[list[int], int]:
    model = model_of("llama", head_dim=64, num_key_value_heads=keys, num_hidden_layers=2)
    pipe = pipe_of(model, SLICES, context=size, replicas=size, make_optimizer=no_update)
    assert isinstance(pipe.model, Sliced)
    context = pipe.model.store.context
    assert context is not None
    exchange, append = context._collective.exchange, ChunkStore.append
    sent: list[int] = []
    passed = [0]

    def count(sends: Any, *given: Any, **options: Any) -> Any:
        sent.extend(t.nbytes for _, t in sends)
        return exchange(sends, *given, **options)

    def keep(store: ChunkStore, layer: int, unit: Any, key: Tensor, value: Tensor, **options: Any) -> Chunk:
        chunk = append(store, layer, unit, key, value, **options)
        if store.context is not None:
            # keys and values of this slice and of all before it would go to every other rank
            tokens = sum(one.tokens for one in store.chunks(layer, unit.microbatch))
            passed[0] += (key.nbytes + value.nbytes) // key.shape[2] * tokens * (size - 1)
        return chunk

    context._collective.exchange = count  # type: ignore[method-assign]
    ChunkStore.append = keep  # type: ignore[method-assign]
    batch = batch_of(tokens=SLICES * 2 * size)
    pipe.step(*batch)
    both, passing = sum(sent), passed[0]
    sent.clear()
    pipe.evaluate(*batch)
    return [sum(sent), both - sum(sent)], passing


@pytest.mark.parametrize(("size", "keys"), [(2, 4), pytest.param(2, 2, marks=pytest.mark.slow), (4, 4)])
def test_bytes_over_those_of_passing_keys_and_values_are_the_form(size: int, keys: int) -> None:
    form = context_bytes_over_passed(SLICES, keys / 4)
    for (forward, backward), passed in run_gloo(_bytes, size, keys, timeout_s=180.0):
        print(forward / passed / form, backward / (2 * passed) / form)
        assert forward / passed == pytest.approx(form, rel=0.02)
        # their gradients come back as well
        assert backward / (2 * passed) == pytest.approx(form, rel=0.02)


# --- what goes wrong -------------------------------------------------------------------------------------------


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except SpecError as error:
        return str(error)
    return "nothing"


def _chosen_on_some(rank: int) -> ElasticPipeline:
    slices = AutoSlices() if rank else SliceOptions(4, context_parallel=2)
    return ElasticPipeline.from_transformers(
        model_of("llama"), slices=slices, replicas=2, microbatches=MICROBATCHES, make_optimizer=no_update
    )


def _refused(rank: int, size: int) -> list[str]:
    def pipe(family: str = "llama", replicas: int = 2, context: int = 2, **options: Any) -> ElasticPipeline:
        model = model_of(family, **options)
        return pipe_of(model, 4, context=context, replicas=replicas, make_optimizer=no_update)

    good = pipe()
    first = good.step(*batch_of(tokens=32))
    said = [
        _error(lambda: good.step(*batch_of(tokens=40))),
        _error(lambda: good.evaluate(*batch_of(tokens=24))),
        _error(lambda: good.step(*batch_of(tokens=32, seed=rank))),
        _error(lambda: good.evaluate(*batch_of(tokens=32, seed=rank))),
        _error(lambda: pipe(replicas=1)),
        _error(lambda: pipe(context=1 + rank)),
        _error(lambda: _chosen_on_some(rank)),
        _error(lambda: pipe("mistral", sliding_window=6).step(*batch_of(tokens=32))),
        _error(lambda: pipe("mixtral")),
        _error(lambda: good.change_group(None, {0: 0, 1: 1})),
    ]
    # nothing was lost
    assert good.step(*batch_of(tokens=32)) == first
    return said


def test_each_is_one_error_on_all_ranks_before_data_moves() -> None:
    expected = [
        "context_parallel=2 cuts every slice into 4 parts of equal length, and slices have 10 tokens here: pad or cut "
        "sequences to a multiple of 16 tokens",
        "slices have 6 tokens here",
        "ranks [1] were given other inputs or labels than rank 0",
        "ranks [1] were given other inputs or labels than rank 0",
        "context_parallel=2: as many replicas in a row share every slice, so it must divide replicas=1",
        "ranks [1] cut microbatches by SliceOptions(slices=4",
        "ranks [1] cut microbatches by AutoSlices(",
        "has a sliding window, and the tokens that a rank has of a slice are not side by side",
        "context_parallel: the router loss of MixtralForCausalLM is of whole microbatches",
        "context_parallel: ranks that share slices stay",
    ]
    for said in run_gloo(_refused, 2, timeout_s=120.0):
        for text, part in zip(said, expected, strict=True):
            assert part in text, text


def test_options_that_do_not_fit_are_named() -> None:
    for wrong, said in (
        ({"context_parallel": 0}, "context_parallel must be a number from 1 on, got 0"),
        ({"slices": 1}, "context_parallel needs 2 slices or more"),
    ):
        with pytest.raises(SpecError, match=said):
            SliceOptions(**{"slices": 4, "context_parallel": 2, **wrong})  # type: ignore[arg-type]
    # layers are timed on each rank alone, which has whole slices then
    with pytest.raises(TypeError, match="context_parallel"):
        AutoSlices(context_parallel=2)  # type: ignore[call-arg]


SHARED = SliceOptions(3, context_parallel=2)


class Window(own.Block):
    """Attention with a window."""

    def __init__(self, layer: int) -> None:
        super().__init__(layer)
        self.attention = lambda *given, layer: attention.attend(*given, layer=layer, window=5)


def _own(*blocks: nn.Module, slices: SliceOptions = SHARED, **options: Any) -> ElasticPipeline:
    embed, *usual, head = own.layers()
    model = nn.Sequential(embed, *(blocks or usual), head).double()
    # both are given one batch
    given = {"microbatches": own.PARTS, "seed": own.SEED, "timeout_s": 20.0, **options}
    return own.pipe(model, slices, replicas=2, **given)


def _windowed(rank: int, size: int) -> str:
    return _error(lambda: _own(own.Block(0), Window(1)).step(*own.batch(0, 0)))


def test_a_window_of_ones_own_layer_is_refused() -> None:
    for said in run_gloo(_windowed, 2):
        assert "context_parallel: layer 2 has a sliding window" in said


def _still(rank: int, size: int, slices: SliceOptions) -> tuple[list[float], dict[str, Tensor], int]:
    _, *blocks, _ = own.layers()
    pipe = _own(*blocks, slices=slices)
    own.without_dropout(pipe.module)
    assert isinstance(pipe.model, Sliced)
    losses = [pipe.step(*own.batch(update, 0), max_norm=own.MAX_NORM) for update in range(10)]
    return losses, pipe.state_dict(), len(pipe.model.store)


@pytest.mark.parametrize(
    "slices",
    # its costs are measured, and do not pay
    [SHARED, pytest.param(replace(SHARED, balance="exchange", order="aligned"), marks=pytest.mark.slow)],
)
def test_layers_of_ones_own_train_as_one_process(slices: SliceOptions) -> None:
    own.without_dropout(model := own.layers())
    losses, state = own.one_process(10, 3, 1, model)
    results = run_gloo(_still, 4, slices)
    for got, _, left in results:
        assert left == 0
        assert got == pytest.approx(losses, rel=EXACT)
    assert apart(results[0][1], state) <= 1e-8


def _failing(rank: int, size: int) -> tuple[int, str]:
    _, *blocks, _ = own.layers()
    pipe = _own(*blocks)
    pipe.step(*own.batch(0, 0))
    if rank == 3:
        for block in pipe.layers.values():
            block.fails = True  # type: ignore[assignment]
    with pytest.raises(StageFailed) as caught:
        pipe.step(*own.batch(1, 0))
    assert isinstance(pipe.model, Sliced)
    return len(pipe.model.store), str(caught.value)


def test_a_failing_layer_ends_the_step_everywhere_and_leaves_no_chunk() -> None:
    for left, said in run_gloo(_failing, 4):
        assert left == 0
        assert "rank 3" in said
        assert "asked to fail" in said


def _lost(backward: bool) -> tuple[int, str, float]:
    rank = dist.get_rank()
    pipe = _own()
    pipe.step(*own.batch(0, 0))
    if rank == 2:
        gather = Context.gather

        def leave(context: Context, tensors: Any, layer: int) -> Any:
            # backward, log-sum-exp, queries, output and its gradient go
            if len(tensors) == (4 if backward else 1):
                os._exit(3)
            return gather(context, tensors, layer)

        Context.gather = leave  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(StageFailed) as caught:
        pipe.step(*own.batch(1, 0))
    assert isinstance(pipe.model, Sliced)
    return len(pipe.model.store), str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("backward", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_amid_shared_attention_is_named_on_all_others(backward: bool) -> None:
    every = process_outcomes(4, _lost, backward, timeout_s=120.0, grace_s=90.0)
    assert every[2].exit_code == 3
    for left in (every[0], every[1], every[3]):
        assert left.well, left
        alive, said, seconds = left.result
        print(said)
        assert alive == 0
        assert "rank 2" in said
        assert seconds < 40.0
