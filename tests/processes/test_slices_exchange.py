"""Attention exchange on real processes: loss and gradients of the whole model, counted bytes, and what goes wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers", reason="the models are transformers'")

from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.exchange_times import ExchangeCosts, LayerSeconds
from pipeline_balance.slices.kernel import Heads
from pipeline_balance.slices.options import SliceOptions
from pipeline_balance.slices.parts import Sliced
from pipeline_balance.slices.sharing.exchange import Turn
from pipeline_balance.slices.sharing.exchanging import Exchanging
from pipeline_balance.slices.store import ChunkStore, Unit
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError, StageFailed
from tests.helpers import sliced_layers as own
from tests.helpers.launch import process_outcomes, run_gloo
from tests.helpers.sliced_cases import EXACT, EXCHANGE, Case, check, exchangers, one_step
from tests.helpers.sliced_models import FREE, TOKENS, apart, batch_of, model_of, no_update
from tests.helpers.transformers_models import LAYERS

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
UNITS = LAYERS + 2


def exchanged(family: str, kind: str = "plain", *, tokens: int = TOKENS, keep: int = 0, **others: Any) -> Case:
    """A case with exchange; `others` are options of the pipeline by these names, else of the model."""
    known = {name: others.pop(name) for name in ("slices", "stages", "recompute", "stage_map") if name in others}
    return Case(family, kind, tokens=tokens, pipeline={**EXCHANGE, "keep_bytes": keep, **known}, **others)


CASES = [
    exchanged("llama", "silent"),
    exchanged("qwen3", "packed", slices=8, keep=1 << 20, tied=True, recompute="selective"),
    # the first rank has three layers, the second one has one
    exchanged("llama", "padded", stage_map=StageMap((0, LAYERS, UNITS), (0, 1)), recompute="full"),
    exchanged("mixtral", "plain", stages=2, router_aux_loss_coef=3.0),
]
MORE = [
    exchanged("qwen2", "plain", slices=8, recompute="model", keep=4000),
    exchanged("llama", "packed", stages=2, tied=True, keep=1 << 20),
    exchanged("qwen3_moe", "packed", router_aux_loss_coef=3.0),
    exchanged("llama", "plain", slices=3, tokens=15),
    exchanged("llama", "packed", dtype=torch.float32, keep=1 << 20),
    exchanged("gpt2", "packed", tied=True, recompute="selective"),
]
FOUR = [
    exchanged("llama", "plain", keep=1 << 20, num_hidden_layers=6),
    exchanged("qwen3", "packed", slices=8, num_hidden_layers=6, tied=True),
    # two ranks without a layer can only help
    exchanged("llama", "silent", stage_map=StageMap((0, 1, 3, UNITS - 1, UNITS), (0, 1, 2, 3))),
    exchanged("mixtral", "packed", keep=1 << 20, router_aux_loss_coef=3.0),
    # three layers, one, two and none: ranks give in one position and help in the next
    exchanged(
        "llama",
        "plain",
        slices=8,
        keep=1 << 14,
        stage_map=StageMap((0, 4, 5, 7, 8), (0, 1, 2, 3)),
        num_hidden_layers=6,
    ),
]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, CASES),
        pytest.param(1, CASES[:1], marks=pytest.mark.slow),
        pytest.param(2, MORE, marks=pytest.mark.slow),
        pytest.param(4, FOUR, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole(size: int, cases: list[Case]) -> None:
    check(cases, run_gloo(one_step, size, cases, timeout_s=300.0))


# --- bytes -----------------------------------------------------------------------------------------------------


def _bytes(rank: int, size: int, keep: int) -> tuple[list[int], list[float]]:
    pipe = exchanged("llama", slices=8, keep=keep).pipe(model_of("llama"), make_optimizer=no_update)
    begun = exchangers(pipe)
    pipe.step(*batch_of())
    (one,) = begun
    assert one is not None
    heads, rows, tokens = one.heads[0][0], one.rows[0], 16 // 8
    each = rows * heads.queries * tokens * heads.dtype.itemsize
    # log-sum-exps, one number for a query, which bytes in slices leave out
    planned = [moved[one.row] * each * heads.width for moved in one.plan.slices_moved(heads.keys / heads.queries)]
    for slot, positions, help in one.plan.every():
        if help.donor == one.row:
            planned[0 if one.plan.slots[slot].forward else 1] += positions * each
    return one.moved_bytes, planned


def test_the_bytes_on_the_wire_are_those_of_the_plan() -> None:
    without, kept = (run_gloo(_bytes, 2, keep) for keep in (0, 1 << 20))
    for moved, planned in (*without, *kept):
        assert min(moved) > 0
        assert moved == planned
    assert sum(sum(moved) for moved, _ in kept) < sum(sum(moved) for moved, _ in without)


# --- training --------------------------------------------------------------------------------------------------


def _own(options: SliceOptions, *more: nn.Module, replicas: int = 1, **others: Any) -> ElasticPipeline:
    embed, *blocks, head = own.layers()
    given = {"seed": own.SEED, "timeout_s": 20.0, **others}
    return own.pipe(nn.Sequential(embed, *blocks, *more, head), options, replicas=replicas, **given)


def options(keep: int = 0, costs: ExchangeCosts | None = FREE) -> SliceOptions:
    return SliceOptions(4, order="aligned", balance="exchange", keep_bytes=keep, exchange_costs=costs)


MAPS = [StageMap((0, 2, 4), (1, 0)), StageMap((0, 1, 4), (0, 1)), StageMap((0, 4), (1,))]


def _twenty(rank: int, size: int, replicas: int, keep: int) -> tuple[list[float], dict[str, Tensor], int]:
    pipe = _own(options(keep), replicas=replicas, timeout_s=60.0)
    assert isinstance(pipe.model, Sliced)
    losses, helped = [], 0
    for update in range(20):
        if update % 6 == 3:
            pipe.rebuild(MAPS[update // 6])
        inputs, labels = own.batch(update, 0)
        mine = {n: t.chunk(replicas)[pipe.replica] for n, t in inputs.items()}
        losses.append(pipe.step(mine, labels.chunk(replicas)[pipe.replica], max_norm=own.MAX_NORM))
        assert pipe.model.exchanging is not None
        helped += pipe.stage_map.stages > 1 and pipe.model.exchanging.verdict is not None
        helped -= pipe.model.exchanging.verdict is not None and not pipe.model.exchanging.verdict.pays
    return losses, pipe.state_dict(), helped


@pytest.mark.parametrize(("size", "replicas", "keep"), [(2, 1, 1 << 16), pytest.param(4, 2, 0, marks=pytest.mark.slow)])
def test_twenty_steps_of_adam_with_moves(size: int, replicas: int, keep: int) -> None:
    losses, state = own.one_process(20, 4, 1)
    results = run_gloo(_twenty, size, replicas, keep)
    for got, _, helped in results:
        assert got == pytest.approx(losses, rel=EXACT)
        assert helped > 10
    assert apart(results[0][1], state) <= 1e-8


def _measured(rank: int, size: int) -> tuple[str, list[float]]:
    pipe = _own(options(costs=None))
    assert isinstance(pipe.model, Sliced)
    losses = [pipe.step(*own.batch(update, 0), max_norm=own.MAX_NORM) for update in range(2)]
    assert pipe.model.exchanging is not None
    return str(pipe.model.exchanging.verdict), losses


def test_measured_costs_are_those_of_all_ranks() -> None:
    (said, losses), (other, its) = run_gloo(_measured, 2)
    assert said == other
    # a few tokens are computed sooner than sent
    assert said.startswith("exchange is off: it saves ")
    assert losses == its == pytest.approx(own.one_process(2, 4, 1)[0], rel=EXACT)


def _elsewhere(rank: int, size: int) -> tuple[list[float], str]:
    ways = [(0, 1), (0, 2), (0, 1)]
    pipe = _own(options(costs=None), stage_map=StageMap((0, 2, 4), ways[0]))
    assert isinstance(pipe.model, Sliced)
    losses = []
    for update, ranks in enumerate(ways):
        pipe.rebuild(StageMap((0, 2, 4), ranks))
        losses.append(pipe.step(*own.batch(update, 0), max_norm=own.MAX_NORM))
    assert pipe.model.exchanging is not None
    return losses, str(pipe.model.exchanging.verdict)


def test_ranks_that_get_a_stage_measure_with_those_that_had_one() -> None:
    expected = pytest.approx(own.one_process(3, 4, 1)[0], rel=EXACT)
    (losses, said), (_, other), _ = found = run_gloo(_elsewhere, 3)
    assert all(its == losses for its, _ in found)
    assert losses == expected
    # of the latest step, which the first two ranks ran
    assert said == other


@pytest.mark.parametrize("packed", [False, True])
def test_the_log_says_once_that_exchange_is_off(packed: bool, caplog: pytest.LogCaptureFixture) -> None:
    dear = LayerSeconds(piece_s=1.0, diagonal_s=1.0, slice_s=100.0)
    slicing = options(costs=ExchangeCosts(forward=dear, backward=dear))
    given: Any = SimpleNamespace(schedule=slicing.schedule((0, 1), 2))
    documents = (torch.arange(12) >= 5).long()[None] if packed else None
    units = [Unit(m, n, 4, documents, (0, 3, 6, 9, 12)) for m in range(2) for n in range(4)]
    exchanging, heads = Exchanging(slicing), [[Heads(4, 2, 4, torch.float64, 0.5)]] * 2
    for _ in range(2):
        assert exchanging.begin(ChunkStore(), given, heads, units, [1] * 8, torch.device("cpu")) is None
    assert [record.getMessage() for record in caplog.records] == [str(exchanging.verdict)]


# --- what goes wrong -------------------------------------------------------------------------------------------


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except SpecError as error:
        return str(error)
    return "nothing"


def _refused(rank: int, size: int) -> list[str]:
    inputs, labels = own.batch(0, 0)
    frozen = _own(options())
    for p in frozen.module[0].parameters():  # type: ignore[index]
        p.requires_grad_(False)
    next(frozen.module[1].parameters()).requires_grad_(False)  # type: ignore[index]
    assert frozen.evaluate(inputs, labels) > 0
    said = [
        _error(lambda: frozen.step(inputs, labels)),
        _error(lambda: _own(options(1 << 60)).step(inputs, labels)),
        _error(lambda: _own(options(rank))),
        _error(lambda: _own(options()).step({n: t[:, :10] for n, t in inputs.items()}, labels[:, :10])),
    ]
    # an evaluation exchanges nothing, and needs no memory for it
    assert frozen.evaluate(inputs, labels) > 0
    assert _own(options(1 << 60)).evaluate(inputs, labels) > 0
    frozen.module.requires_grad_(True)
    assert frozen.step(inputs, labels) > 0  # nothing was lost
    return said


def test_each_is_one_error_on_all_ranks_before_data_moves() -> None:
    expected = [
        "needs a backward pass of every attention: layer 1 has frozen parameters",
        f"keep_bytes={1 << 60}: there is not so much memory",
        "ranks [1] cut microbatches by SliceOptions(slices=4",
        "pad or cut them to 8 or 12 tokens",
    ]
    for said in run_gloo(_refused, 2):
        for text, part in zip(said, expected, strict=True):
            assert part in text, text


def test_options_that_do_not_fit_are_named() -> None:
    for wrong, said in (
        ({"balance": "exchange"}, 'needs order="aligned": in the minimal order'),
        ({"keep_bytes": 5}, 'keep_bytes needs balance="exchange"'),
        ({"balance": "exchange", "order": "aligned", "keep_bytes": -1}, "keep_bytes must be a number of bytes, got -1"),
        ({"exchange_costs": FREE}, 'exchange_costs needs balance="exchange"'),
    ):
        with pytest.raises(SpecError, match=said):
            SliceOptions(4, **wrong)  # type: ignore[arg-type]


class Fails(nn.Module):
    """Fails in the third slice's forward or in its backward, once it is armed."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.backward, self.armed, self.slices = backward, False, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.armed or isinstance(x, torch._subclasses.FakeTensor):
            return x
        self.slices += 1
        if self.slices == 3:
            x = x * 1.0
            if not self.backward:
                self.fail(x)
            x.register_hook(self.fail)
        return x

    def fail(self, x: Tensor) -> None:
        raise RuntimeError("asked to fail")


def _failing(rank: int, size: int, backward: bool) -> tuple[int, str]:
    layer = Fails(backward)
    pipe = _own(options(1 << 16), layer, stage_map=StageMap((0, 2, 5), (0, 1)))
    pipe.step(*own.batch(0, 0))
    layer.armed = True
    with pytest.raises(StageFailed) as caught:
        pipe.step(*own.batch(1, 0))
    assert isinstance(pipe.model, Sliced)
    assert pipe.model.store.exchange is None
    return len(pipe.model.store), str(caught.value)


@pytest.mark.parametrize("backward", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_failing_layer_ends_the_step_everywhere_and_leaves_no_chunk(backward: bool) -> None:
    for left, said in run_gloo(_failing, 2, backward):
        assert left == 0
        assert "asked to fail" in said


def _lost(how: str) -> tuple[int, str, float]:
    rank = dist.get_rank()
    # the first rank can only help
    pipe = _own(options(), stage_map=StageMap((0, 1, 2, 4), (0, 1, 2)))
    pipe.step(*own.batch(0, 0))
    if rank == 0:
        work = Turn.work

        def leave(turn: Turn) -> None:
            forward = turn._slot.forward
            if turn._asked_for and forward == (how == "forward"):
                os._exit(3)
            work(turn)

        Turn.work = leave  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(StageFailed) as caught:
        pipe.step(*own.batch(1, 0))
    assert isinstance(pipe.model, Sliced)
    return len(pipe.model.store), str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("how", ["backward", pytest.param("forward", marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_while_it_helps_is_named_on_all_others(how: str) -> None:
    lost, *others = process_outcomes(3, _lost, how, timeout_s=120.0, grace_s=90.0)
    assert lost.exit_code == 3
    for left in others:
        assert left.well, left
        alive, said, seconds = left.result
        print(said)
        assert alive == 0
        assert "rank 0" in said
        assert seconds < 40.0
