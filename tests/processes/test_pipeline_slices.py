"""Pipelines over slices train as the model does whole: in every order, over moves, replicas, and after errors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the models are transformers'")

from benchmarks.slices.by_hand import Dims, chunk_gradient_bytes, unit_bytes
from benchmarks.slices.live_bytes import LiveBytes
from pipeline_balance import attach
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.closed_forms import sliced_peak_bytes, sliced_peak_units
from pipeline_balance.schedules.sliced import Order
from pipeline_balance.slices.adapter import SlicedTransformers
from pipeline_balance.slices.options import Recompute, SliceOptions
from pipeline_balance.slices.parts import Sliced
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError, StageFailed
from tests.helpers import sliced_layers as own
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_models import (
    MICROBATCHES,
    adam,
    alone,
    apart,
    batch_of,
    model_of,
    no_update,
    pipe_of,
    whole_loss,
)
from tests.helpers.transformers_models import LAYERS

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")  # older versions have no other name
UNITS = LAYERS + 2
EXACT, SINGLE = 1e-10, 1e-5
# family, kind of batch, slices, stages per rank, order, options of the model; float64 unless a router loss is float32
CASES: list[tuple[str, str, int, int, str, dict[str, Any]]] = [
    ("llama", "silent", 4, 1, "minimal", {}),
    ("qwen2", "padded", 4, 2, "aligned", {"recompute": "model"}),
    ("qwen3", "packed", 8, 2, "minimal", {"tied": True, "frozen": 2, "recompute": "selective"}),
    ("mixtral", "plain", 4, 1, "aligned", {"router_aux_loss_coef": 3.0}),
    ("qwen3_moe", "padded", 2, 2, "minimal", {"router_aux_loss_coef": 3.0, "recompute": "full"}),
]
MORE: list[tuple[str, str, int, int, str, dict[str, Any]]] = [
    (family, kind, slices, 1, order, {"tied": tied, "recompute": recompute})
    for family, kind, slices, order, tied, recompute in (
        ("llama", "packed", 4, "aligned", True, "full"),
        ("qwen2", "plain", 8, "minimal", False, "none"),
        ("qwen3", "padded", 16, "aligned", True, "none"),
        ("mixtral", "silent", 2, "minimal", True, "selective"),
        ("qwen3_moe", "packed", 4, "aligned", False, "model"),
        ("gpt2", "packed", 4, "minimal", True, "selective"),
    )
]


def _alive(pipe: ElasticPipeline) -> int:
    """Chunks that nobody has freed."""
    assert isinstance(pipe.model, Sliced)
    return len(pipe.model.store)


def _one_step(rank: int, size: int, cases: list[Any]) -> list[tuple[float, float, dict[str, torch.Tensor], list[int]]]:
    found = []
    for family, kind, slices, stages, order, options in cases:
        recompute, others = options.get("recompute", "none"), {n: o for n, o in options.items() if n != "recompute"}
        # of the options, or the model's own checkpoints
        model = model_of(family, **others, recompute=recompute == "model")
        pipe = pipe_of(
            model, slices, stages=stages, order=order, recompute="none" if recompute == "model" else recompute
        )
        loss, left = pipe.step(*batch_of(kind)), [_alive(pipe)]
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and not p.is_meta}
        evaluated = pipe.evaluate(*batch_of(kind))
        found.append((loss, evaluated, grads, [*left, _alive(pipe)]))
    return found


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, CASES),
        pytest.param(1, CASES, marks=pytest.mark.slow),
        pytest.param(2, MORE, marks=pytest.mark.slow),
        pytest.param(4, [c for c in CASES + MORE if c[3] == 1 and c[2] > 2], marks=pytest.mark.slow),
    ],
)
def test_a_model_in_slices_has_the_loss_and_gradients_of_the_whole(size: int, cases: list[Any]) -> None:
    results = run_gloo(_one_step, size, cases, timeout_s=240.0)
    for i, (family, kind, _, _, _, options) in enumerate(cases):
        allowed = SINGLE if family in ("mixtral", "qwen3_moe") else EXACT
        others = {n: o for n, o in options.items() if n != "recompute"}
        losses, want, _ = alone(model_of(family, **others), [kind], make=no_update)
        evaluated = whole_after(family, kind, others)
        seen: set[str] = set()
        for loss, evaluation, grads, left in (said[i] for said in results):
            print(family, kind, loss / losses[0] - 1, evaluation / evaluated - 1, apart(grads, want))
            assert left == [0, 0]
            assert abs(loss / losses[0] - 1) <= allowed
            assert abs(evaluation / evaluated - 1) <= allowed
            assert apart(grads, want) <= allowed, family
            seen |= grads.keys()
        assert seen == want.keys()


def whole_after(family: str, kind: str, options: dict[str, Any]) -> float:
    """The loss after one step of the whole model."""
    alone(model := model_of(family, **options), [kind])
    return whole_loss(model, kind)


STEPS = 20
TWENTY = ["plain", "packed", "silent", "plain"] * 5


def _twenty(rank: int, size: int, slices: int, stages: int, move: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    pipe = pipe_of(model_of("llama", tied=True), slices, stages=stages, order="aligned")
    losses = []
    for step, kind in enumerate(TWENTY):
        if move and step % 7 == 3:
            pipe.rebuild(MAPS[step % len(MAPS)])
        losses.append(pipe.step(*batch_of(kind), max_norm=0.5))
    return losses, pipe.state_dict()


MAPS = [StageMap((0, 2, UNITS), (1, 0)), StageMap((0, 4, UNITS), (0, 1)), StageMap((0, UNITS), (1,))]


@pytest.mark.parametrize(
    ("size", "slices", "stages", "move"),
    [(2, 4, 1, True), pytest.param(2, 4, 2, False, marks=pytest.mark.slow)],
)
def test_twenty_steps_of_adam_with_clipping_and_moves(size: int, slices: int, stages: int, move: bool) -> None:
    losses, _, state = alone(model_of("llama", tied=True), TWENTY, max_norm=0.5)
    results = run_gloo(_twenty, size, slices, stages, move)
    for got, _ in results:
        assert got == pytest.approx(losses, rel=EXACT)
    assert results[0][1].keys() == state.keys()
    assert apart(results[0][1], state) <= 1e-8  # Adam divides by what may be nearly zero


def _wrong(rank: int, size: int) -> list[str]:
    said = []
    for make in (
        lambda: pipe_of(model_of("llama"), 4 + rank),
        lambda: pipe_of(model_of("llama"), 4, order=("minimal", "aligned")[rank]),
        lambda: pipe_of(model_of("llama"), 3, stages=2),
        lambda: pipe_of(model_of("llama"), 4, split_backward=True),
    ):
        said.append(_error(make))
    pipe = pipe_of(model_of("llama"), 4, make_optimizer=no_update)
    inputs, labels = batch_of("padded")
    left = {**inputs, "attention_mask": inputs["attention_mask"].flip(1)}
    said.append(_error(lambda: pipe.step(*batch_of(tokens=14))))
    said.append(_error(lambda: pipe.step(left, labels)))
    said.append(_error(lambda: pipe.step(inputs, inputs["input_ids"])))
    said.append(_error(lambda: pipe.rebuild(StageMap((0, 1, 2, UNITS), (0, 1, 0)))))
    said.append(_error(lambda: attach(pipe_of(model_of("llama"), 4, stages=2))))
    assert pipe.step(inputs, labels) == pytest.approx(pipe.step(inputs, labels), rel=EXACT)  # nothing was lost
    assert not _alive(pipe)
    return said


def _error(call: Any) -> str:
    try:
        call()
    except SpecError as error:
        return str(error)
    return "nothing"


def test_what_is_wrong_is_said_on_all_ranks_before_a_step() -> None:
    expected = [
        "ranks [1] cut microbatches by SliceOptions(slices=5",
        "ranks [1] cut microbatches by",
        "take 2 or 4 instead of 3",
        "split_backward=False",
        "pad or cut them to 12 or 16 tokens",
        "pad on the right",
        "labels count behind padding",
        "must take the ranks in turn",
        "balancing gives every rank one stage, these slices ask for 2",
    ]
    for said in run_gloo(_wrong, 2):
        for text, part in zip(said, expected, strict=True):
            assert part in text, text


def _own_layers(
    rank: int, size: int, replicas: int, slices: int, stages: int, updates: int
) -> tuple[list[float], dict[str, torch.Tensor], Counter[int]]:
    layers, cut = own.layers(seed=rank // (size // replicas)), SliceOptions(slices, stages, "aligned")
    pipe = own.pipe(layers, cut, replicas=replicas, seed=own.SEED)
    losses, averaged = [], Counter[int]()
    means = pipe._passes.gradients._means
    start = means.start
    means.start = lambda mine, unit: (averaged.update([unit]), start(mine, unit))[1]  # type: ignore[method-assign]
    for update in range(updates):
        for call in range(2):
            inputs, labels = own.batch(update, call)
            mine = {n: t.chunk(replicas)[pipe.groups.replica] for n, t in inputs.items()}
            its = labels.chunk(replicas)[pipe.groups.replica]
            loss = pipe.step(mine, its, update=call == 1, max_norm=own.MAX_NORM if call else None)
        losses.append(loss)
    return losses, pipe.state_dict(), averaged


@pytest.mark.parametrize(
    ("size", "replicas", "slices", "stages"),
    [
        (2, 1, 4, 2),
        pytest.param(2, 1, 1, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, 3, 1, marks=pytest.mark.slow),
        pytest.param(4, 2, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_own_layers_with_dropout_replicas_and_accumulation(size: int, replicas: int, slices: int, stages: int) -> None:
    losses, state = own.one_process(5, slices, 2)
    results = run_gloo(_own_layers, size, replicas, slices, stages, 5)
    for got, _, averaged in results:
        assert got == pytest.approx(losses, rel=EXACT)
        # once per update and layer, however many slices and calls it has; tied weights count as layer 0
        assert averaged.pop(0) >= 5
        assert set(averaged.values()) <= {5}
    assert apart(results[0][1], state) <= 1e-8


def _failing(rank: int, size: int) -> tuple[int, int, int]:
    pipe = own.pipe(model := own.layers(), SliceOptions(4), timeout_s=30.0)
    pipe.step(*own.batch(0, 0))
    assert isinstance(pipe.model, Sliced)
    before = pipe.model.store.n_bytes
    pipe.step(*own.batch(1, 0))
    after = pipe.model.store.n_bytes
    model[own.BLOCKS].fails = True
    with pytest.raises(StageFailed, match="asked to fail"):
        pipe.step(*own.batch(2, 0))
    return _alive(pipe), before, after


def test_no_chunk_outlives_an_error_and_a_second_step_allocates_none() -> None:
    for alive, before, after in run_gloo(_failing, 2):
        assert alive == 0
        assert before == after


def _with_one_slice(rank: int, size: int) -> list[Any]:
    found = []
    for slices in (None, SliceOptions(1)):
        pipe = ElasticPipeline.from_transformers(
            model_of("llama"), slices=slices, make_optimizer=adam, microbatches=2, timeout_s=30.0
        )
        executor = pipe.stages.executor
        assert executor is not None
        losses = [pipe.step(*batch_of("packed")) for _ in range(3)]
        found.append((losses, " ".join(map(str, executor.training)), dict(pipe.meter.activation_bytes)))
    return found


def test_one_slice_is_a_pipeline_without_slices() -> None:
    for plain, one in run_gloo(_with_one_slice, 2):
        assert plain == one


def _bytes(rank: int, size: int, slices: int, order: Order, recompute: Recompute) -> tuple[int, int]:
    model = model_of("llama", torch.float32, num_hidden_layers=2 * size - 2, num_key_value_heads=4)
    pipe = pipe_of(model, slices, order=order, recompute=recompute)
    assert isinstance(pipe.model, SlicedTransformers)
    count = LiveBytes(pipe.model)
    pipe.step(*batch_of(tokens=64))
    layers = len(set(pipe.layers) - {0, 2 * size - 1})
    dims, each = Dims.of(model.config), (4 // MICROBATCHES, 64 // slices, layers)
    units = sliced_peak_units(rank, size, 1, MICROBATCHES, slices, order)
    form = sliced_peak_bytes(units, slices, unit_bytes(dims, *each, recompute), chunk_gradient_bytes(dims, *each))
    return count.peak, form


@pytest.mark.parametrize(
    ("size", "order", "slices", "recompute"),
    [
        (2, "minimal", 8, "selective"),
        pytest.param(4, "minimal", 8, "none", marks=pytest.mark.slow),
        pytest.param(4, "aligned", 16, "none", marks=pytest.mark.slow),
        pytest.param(4, "aligned", 8, "full", marks=pytest.mark.slow),
    ],
)
def test_a_rank_keeps_the_bytes_of_the_closed_form(size: int, order: Order, slices: int, recompute: Recompute) -> None:
    for rank, (peak, form) in enumerate(run_gloo(_bytes, size, slices, order, recompute)):
        print(rank, peak, form, peak / form)
        assert 0.95 * form <= peak <= 1.02 * form
