"""Chosen slices on real processes: the same choice on all ranks, loss and gradients of the whole model, no traces."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

pytest.importorskip("transformers", reason="the models are transformers'")

from pipeline_balance import ControllerConfig, attach
from pipeline_balance.control.decide import MoveCost
from pipeline_balance.pipeline.model.adapter import TransformersModel
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.slices import AutoSlices, SliceOptions
from pipeline_balance.slices.auto.choice import SliceCosts, SliceSeconds, UnitCosts
from pipeline_balance.slices.auto.choosing import Choosing, ChosenTransformers
from pipeline_balance.slices.sharing.exchanging import Timed
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
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
    run_whole,
    whole_loss,
)
from tests.helpers.transformers_models import LAYERS

UNITS = LAYERS + 2
EXACT, SINGLE = 1e-10, 1e-5
LENGTHS = (1, 2, 4, 8, 16)


def costs(units: int = UNITS, fixed_s: float = 0.0, column_s: float = 0.0, **more: Any) -> SliceCosts:
    """Figures for layers of which a token takes a second."""
    seconds = tuple(
        SliceSeconds(
            tokens=t,
            forward_s=fixed_s + t,
            backward_s=2 * (fixed_s + t),
            forward_column_s=column_s * t,
            backward_column_s=2 * column_s * t,
        )
        for t in LENGTHS
    )
    kept = {"none": 40.0, "selective": 20.0, "full": 10.0}
    again = {"selective": 0.5, "full": 1.0}
    layer = UnitCosts(lengths=seconds, kept_bytes=kept, again_s=again, gradient_bytes=1.0, attentions=1)
    end = UnitCosts(lengths=seconds, kept_bytes={"none": 40.0})
    return SliceCosts(units=(end, *(layer,) * (units - 2), end), **more)


def pipe_of(model: Any, slices: Any, **options: Any) -> ElasticPipeline:
    given: dict[str, Any] = {"make_optimizer": no_update, "microbatches": MICROBATCHES, "timeout_s": 60.0, **options}
    return ElasticPipeline.from_transformers(model, slices=slices, **given)


def chosen(pipe: ElasticPipeline) -> SliceOptions:
    assert isinstance(pipe.model, Choosing)
    assert len(pipe.model.store) == 0
    return pipe.model.chosen.now


class Case:
    """One model on one batch, and what is to be in force."""

    def __init__(self, family: str, kind: str, slices: Any, want: dict[str, Any], **options: Any) -> None:
        self.family, self.kind, self.slices, self.want, self.options = family, kind, slices, want, options

    def model(self) -> Any:
        return model_of(self.family, **self.options)


FREE: dict[str, Any] = {"query_bytes": 1.0}
CASES = [
    # measured on these processes, whatever comes of it
    Case("llama", "packed", "auto", {}),
    Case("mixtral", "padded", AutoSlices(slices=4), {"slices": 4}, router_aux_loss_coef=3.0),
    # and from figures that leave one choice
    Case("llama", "plain", AutoSlices(costs=costs(fixed_s=1e3)), {"slices": 1}),
    Case(
        "llama",
        "silent",
        AutoSlices(slices=4, balance="exchange", costs=costs(column_s=1.0, **FREE)),
        {"exchanges": True, "order": "aligned"},
    ),
    Case(
        "qwen3",
        "packed",
        AutoSlices(recompute="full", costs=costs(column_s=1.0), memory_bytes=1 << 20),
        {"recompute": "full"},
        tied=True,
    ),
]


def _one_step(rank: int, size: int, cases: list[Case]) -> list[tuple[float, float, dict[str, Tensor], str]]:
    found = []
    for case in cases:
        pipe = pipe_of(model := case.model(), case.slices)
        batch = batch_of(case.kind)
        state = torch.get_rng_state()
        losses = [pipe.step(*batch)]
        assert torch.equal(state, torch.get_rng_state())
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and not p.is_meta}
        losses.append(pipe.step(*batch))
        assert losses[0] == losses[1]
        found.append((losses[0], pipe.evaluate(*batch), grads, repr(chosen(pipe))))
        assert {name: getattr(chosen(pipe), name) for name in case.want} == case.want
    return found


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, CASES),
        pytest.param(1, CASES[:3], marks=pytest.mark.slow),
        pytest.param(4, CASES[:1] + CASES[3:4], marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole(size: int, cases: list[Case]) -> None:
    results = run_gloo(_one_step, size, cases, timeout_s=300.0)
    for i, case in enumerate(cases):
        allowed = SINGLE if case.family == "mixtral" else EXACT
        losses, want, _ = alone(case.model(), [case.kind], make=no_update)
        evaluated = whole_loss(case.model(), case.kind)
        seen: set[str] = set()
        for loss, other, grads, now in (told[i] for told in results):
            assert now == results[0][i][3]
            assert abs(loss / losses[0] - 1) <= allowed
            assert abs(other / evaluated - 1) <= allowed
            assert apart(grads, want) <= allowed, case.family
            seen |= grads.keys()
        assert seen == want.keys()


# --- measuring leaves no trace ----------------------------------------------------------------------------------


class _Running(nn.Module):
    """Adds running means that training keeps: in place, and by binding the name to another tensor."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("changed", "bound"):
            self.register_buffer(name, torch.zeros(own.DIM, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not isinstance(x, FakeTensor):
            mean = x.detach().mean((0, 1))
            self.get_buffer("changed").mul_(0.9).add_(mean, alpha=0.1)
            self.bound = self.get_buffer("bound") * 0.9 + mean * 0.1
        return x + self.get_buffer("changed") - 2 * self.get_buffer("bound")


def _twins(rank: int, size: int, replicas: int) -> tuple[list[float], list[float], str]:
    """Updates by slices that are chosen, and by the same ones named from the start."""

    def run(slices: Any) -> tuple[list[float], ElasticPipeline]:
        first, *others = own.layers()
        # buffers of replicas go their own ways
        means = [_Running()] if replicas == 1 else []
        pipe = own.pipe(nn.Sequential(first, *means, *others), slices, replicas=replicas, seed=own.SEED)
        losses = []
        for update in range(3):
            inputs, labels = own.batch(update, 0)
            rows = len(labels) // replicas
            mine = slice(pipe.replica * rows, (pipe.replica + 1) * rows)
            loss = pipe.step({n: t[mine] for n, t in inputs.items()}, labels[mine], max_norm=own.MAX_NORM)
            losses.append(loss)
        return losses, pipe

    first, pipe = run(AutoSlices(slices=4, balance="auto", order="auto"))
    now = chosen(pipe)
    return first, run(now)[0], repr(now)


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_training_goes_as_with_the_same_slices_named(size: int, replicas: int) -> None:
    """Measuring draws no random numbers, though layers have dropout, and leaves weights, gradients, buffers alone."""
    results = run_gloo(_twins, size, replicas, timeout_s=300.0)
    for first, second, now in results:
        assert now == results[0][2]
        # with one seed and the same options, updates are equal to the last bit
        assert first == second == results[0][0]


# --- other batches, other stages --------------------------------------------------------------------------------


def _changes(rank: int, size: int) -> list[Any]:
    asked = AutoSlices(recompute="none", costs=costs(fixed_s=0.5))
    pipe = pipe_of(model_of("llama"), asked)
    found: list[Any] = []
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pipeline_balance.slices.auto.choosing")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # evaluation comes first here, and nothing is chosen for it
    assert isinstance(pipe.model, Choosing)
    pipe.evaluate(*batch_of(tokens=11))
    assert pipe.model.chosen.choice is None
    for tokens in (16, 16, 11, 16):
        pipe.step(*batch_of(tokens=tokens))
        found.append(
            (tokens, chosen(pipe).slices, chosen(pipe).balance, pipe.model.chosen.choice is not None, len(log))
        )
    pipe.evaluate(*batch_of(tokens=7))
    pipe.rebuild(StageMap((0, 1, UNITS), (0, 1)))
    pipe.step(*batch_of())
    found.append(len(log))
    # all on one rank, which waits for nobody
    pipe.rebuild(StageMap((0, UNITS), (0,)))
    pipe.step(*batch_of())
    return [*found, chosen(pipe).slices, log]


def test_it_is_chosen_again_for_another_length_and_on_other_stages() -> None:
    results = run_gloo(_changes, 2, timeout_s=300.0)
    first, again, other, back, moved, alone_, log = results[0]
    assert first[1] > 1
    assert first[4] == again[4] == 1
    # eleven tokens cannot be cut evenly
    assert other[1] == 1 or other[2] == "uneven"
    assert (other[4], back[4], moved, alone_) == (2, 3, 4, 1)
    assert back[:3] == first[:3]
    assert "sequences of 16 tokens" in log[0]
    assert "s a step predicted" in log[0]
    # one rank says it
    assert results[1][-1] == []
    assert results[1][:3] == [(*row[:4], 0) for row in results[0][:3]]


def _kept(rank: int, size: int) -> list[tuple[list[int], int]]:
    """By step, the units that this rank has measured, and how often messages were; layers are alike."""
    pipe = pipe_of(model_of("llama"), AutoSlices(recompute="none"), stage_map=StageMap((0, 2, UNITS), (0, 1)))
    assert isinstance(pipe.model, Choosing)
    piece, message, units, sent = pipe.model._piece, Timed.message, list[int](), list[str]()

    def watched(unit: int, *given: Any, **how: Any) -> Any:
        units.append(unit)
        return piece(unit, *given, **how)

    def timed(*given: Any) -> float:
        sent.append(given[3])
        return message(*given)

    pipe.model._piece = watched  # type: ignore[method-assign]
    Timed.message = timed  # type: ignore[method-assign, assignment]
    found = []

    def step(tokens: int) -> None:
        units.clear()
        sent.clear()
        pipe.step(*batch_of(tokens=tokens))
        found.append((sorted({*units}), sum("between stages" in what for what in sent)))

    step(16)
    choice = pipe.model.chosen.choice
    for boundaries, ranks in (((0, 1, UNITS), (0, 1)), ((0, 3, UNITS), (0, 1)), ((0, 2, UNITS), (1, 0))):
        pipe.rebuild(StageMap(boundaries, ranks))
        step(16)
        # chosen again, of what is known
        assert pipe.model.chosen.choice is not choice
        choice = pipe.model.chosen.choice
    step(12)
    return found


def test_after_a_move_only_what_is_new_is_measured() -> None:
    first, second = run_gloo(_kept, 2, timeout_s=300.0)
    end = UNITS - 1
    # whole stages, nothing, nothing, the end that was the other rank's, and all for another length
    assert [units for units, _ in first] == [[0, 1], [], [], [end], [2, end]]
    assert [units for units, _ in second] == [[2, end], [], [], [0], [0, 1]]
    # a small and a large one
    assert [sent for _, sent in first] == [2, 0, 0, 0, 0]


def _balanced(rank: int, size: int, ahead: bool) -> tuple[list[float], list[tuple[Any, ...]]]:
    """Losses under a controller, and its decisions: units that it counted, slices in force, the map."""
    asked = AutoSlices(recompute="none", costs=costs(fixed_s=0.5))
    first = StageMap((0, UNITS - 1, UNITS), (0, 1))
    pipe = pipe_of(model_of("llama"), asked, make_optimizer=adam, stage_map=first)
    config = ControllerConfig(
        every_steps=2,
        measure_steps=1,
        min_gain=0.0,
        horizon_steps=99,
        # the same on every machine
        policy="partition-by-parameters",
        move_cost=MoveCost(fixed_s=0.0),
        prepare_in_backward=ahead,
    )
    balanced = attach(pipe, config=config)
    decide, seen = balanced.learner.decide, list[tuple[Any, ...]]()

    def watched(found: Any, current: StageMap) -> Any:
        slices = chosen(pipe).slices
        seen.append((balanced.learner.microbatches, slices, current.boundaries))
        assert all(cost.forward_s > 0 and cost.backward_s > 0 for cost in found)
        if 1 in pipe.layers and not ahead:
            # beside a step the meter goes on
            assert found[1].activation_bytes == -(-pipe.meter.activation_bytes[1] // slices)
        # so small layers take one time or another, and a map that gains is to be found on every machine
        return decide([replace(cost, forward_s=1.0) for cost in found], current)

    balanced.learner.decide = watched  # type: ignore[method-assign]
    losses = [balanced.step(*batch_of(tokens=tokens), max_norm=0.5) for tokens in TOKENS]
    return losses, seen


# of another length in every step, so that slices are chosen in those of decisions, too
TOKENS = [16, 12] * 5


@pytest.mark.parametrize("ahead", [False, True])
def test_a_controller_counts_the_slices_that_were_chosen(ahead: bool) -> None:
    whole, losses = model_of("llama"), list[float]()
    counting, optimizer = TransformersModel(whole), adam(list(whole.named_parameters()))
    for tokens in TOKENS:
        optimizer.zero_grad()
        loss = run_whole(whole, counting, *batch_of(tokens=tokens))
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        losses.append(loss)
    for got, seen in run_gloo(_balanced, 2, ahead, timeout_s=180.0):
        assert got == pytest.approx(losses, rel=EXACT)
        assert len(seen) >= 4
        assert len({boundaries for *_, boundaries in seen}) > 1
        assert max(slices for _, slices, _ in seen) > 1
        assert all(units == MICROBATCHES * slices for units, slices, _ in seen)


# --- what goes wrong --------------------------------------------------------------------------------------------


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except SpecError as error:
        return str(error)
    return "nothing"


def _refused(rank: int, size: int) -> list[str]:
    tight = pipe_of(model_of("llama"), AutoSlices(costs=costs(), memory_bytes=8))
    other = pipe_of(model_of("llama"), AutoSlices(costs=costs(units=3)))
    uneven = pipe_of(model_of("llama"), AutoSlices(slices=5, balance="none", costs=costs()))
    recurrent = nn.Sequential(*list(own.layers())[:-1], own.Recurrent(), list(own.layers())[-1])

    def chain() -> None:
        own.pipe(recurrent, "auto").step(*own.batch(0, 0))

    failing = own.pipe(own.layers(), "auto")
    inputs, labels = own.batch(0, 0)
    said = [
        _error(lambda: tight.step(*batch_of())),
        _error(lambda: other.step(*batch_of())),
        _error(lambda: uneven.step(*batch_of())),
        _error(chain),
        _error(lambda: pipe_of(model_of("llama"), AutoSlices(memory_bytes=100 + rank))),
        _error(lambda: pipe_of(model_of("llama"), "auto", split_vocabulary=True)),
        _error(lambda: pipe_of(model_of("llama"), "other")),
        # another length on one rank
        _error(lambda: failing.step({n: t[:, rank:] for n, t in inputs.items()}, labels[:, rank:])),
    ]
    # nothing was lost: what is wrong with a batch is wrong with that batch
    assert failing.step(inputs, labels) > 0
    return said


def test_what_cannot_be_is_one_error_on_all_ranks() -> None:
    results = run_gloo(_refused, 2, timeout_s=300.0)
    expected = [
        "no slices fit in memory: the least need is",
        "costs are of 3 layers, the model has",
        "sequences of 16 tokens cannot be cut into 5 slices",
        "computes other outputs for two slices",
        "ranks [1] cut microbatches by",
        "split vocabulary",
        "expected pipeline_balance.slices.SliceOptions",
        "have inputs of other shapes",
    ]
    for told in results:
        assert told == results[0]
        for says, wanted in zip(told, expected, strict=True):
            assert wanted in says


def _one_fails(rank: int, size: int) -> tuple[str, float]:
    pipe = own.pipe(own.layers(), "auto")
    assert isinstance(pipe.model, Choosing)
    measured = pipe.model.measured

    def fails(*given: Any) -> Any:
        if rank == 1:
            raise SpecError("asked to fail")
        return measured(*given)

    pipe.model.measured = fails  # type: ignore[method-assign, assignment]
    said = _error(lambda: pipe.step(*own.batch(0, 0)))
    pipe.model.measured = measured  # type: ignore[method-assign]
    return said, pipe.step(*own.batch(0, 0))


def test_a_rank_that_cannot_measure_is_named_on_all() -> None:
    results = run_gloo(_one_fails, 2, timeout_s=120.0)
    for said, loss in results:
        assert "asked to fail" in said
        assert "1" in said
        assert loss == results[0][1] > 0


# --- what is measured -------------------------------------------------------------------------------------------


def _bytes(rank: int, size: int) -> tuple[dict[str, float], float, float]:
    from benchmarks.slices.by_hand import Dims, chunk_gradient_bytes, kept_per_token

    model = model_of("llama", torch.float32)
    pipe = pipe_of(model, AutoSlices(slices=4), make_optimizer=adam)
    pipe.step(*batch_of())
    assert isinstance(pipe.model, Choosing)
    found = pipe.model.chosen.costs
    assert found is not None
    layer, dims, rows = found.units[1], Dims.of(model.config), 2
    for how in ("none", "selective", "full"):
        by_hand = rows * sum(kept_per_token(dims, how).values())
        assert layer.kept_bytes[how] == by_hand, how
    assert layer.gradient_bytes == chunk_gradient_bytes(dims, rows, 1, 1)
    assert found.boundary_bytes == rows * dims.hidden * 4
    assert all(one.forward_s > 0 and one.backward_s > 0 for unit in found.units for one in unit.lengths)
    return dict(layer.kept_bytes), found.latency_s, found.byte_s


def test_measured_bytes_are_those_counted_by_hand() -> None:
    first, second = run_gloo(_bytes, 2, timeout_s=120.0)
    assert first == second
    assert first[1] > 0


class _Keeping(nn.Module):
    """Keeps more than its parameters show."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin().sin().sin()


def _like(rank: int, size: int) -> tuple[float, float]:
    first, *others, last = own.layers()
    plain, more = (nn.Sequential(nn.Linear(own.DIM, own.DIM), part).double() for part in (nn.Identity(), _Keeping()))
    pipe = own.pipe(nn.Sequential(first, plain, more, *others, last), AutoSlices(slices=4))
    pipe.step(*own.batch(0, 0))
    assert isinstance(pipe.model, Choosing)
    assert pipe.model.chosen.costs is not None
    _, one, other, *_ = pipe.model.chosen.costs.units
    return one.kept_bytes["none"], other.kept_bytes["none"]


def test_layers_with_other_parts_are_measured_apart() -> None:
    """Though they have parameters alike."""
    ((plain, more),) = run_gloo(_like, 1, timeout_s=120.0)
    assert more > plain > 0


HOLDS: list[tuple[int, Any, Any]] = [
    (1, "none", "minimal"),
    (4, "none", "minimal"),
    (8, "selective", "aligned"),
    (8, "full", "minimal"),
]


def _holds(rank: int, size: int) -> list[tuple[float, int]]:
    from benchmarks.slices.live_bytes import LiveBytes

    found = []
    for slices, recompute, order in HOLDS:
        asked = AutoSlices(slices=slices, recompute=recompute, order=order, balance="none")
        pipe = pipe_of(model_of("llama", torch.float32), asked)
        assert isinstance(pipe.model, ChosenTransformers)
        batch = batch_of(tokens=32)
        pipe.step(*batch)
        live = LiveBytes(pipe.model)
        pipe.step(*batch)
        choice, measured = pipe.model.chosen.choice, pipe.model.chosen.costs
        assert choice is not None
        assert measured is not None
        # messages under way are none of the layers'
        messages = 6 * measured.boundary_bytes * 32 / slices
        found.append((choice.score.peak_bytes[0] - messages, live.peak))
    return found


def test_predicted_memory_is_what_a_rank_holds() -> None:
    """On the first rank, which has layers and no head."""
    first, _ = run_gloo(_holds, 2, timeout_s=120.0)
    for predicted, held in first:
        assert predicted == held > 0


def _on_the_host(rank: int, size: int) -> list[tuple[float, float, str]]:
    """What a rank holds, and is predicted to hold, over what it does without a host; and why."""
    from benchmarks.slices.live_bytes import LiveBytes

    found = []
    for recompute, order in (("none", "minimal"), ("selective", "aligned")):
        asked = AutoSlices(slices=8, recompute=recompute, order=order, balance="none", memory_bytes=1 << 30)
        batch, model = batch_of(tokens=32), model_of("llama", torch.float32)
        first = pipe_of(copy.deepcopy(model), asked)
        losses = [first.step(*batch) for _ in range(4)]
        assert isinstance(first.model, Choosing)
        before = first.model.chosen.choice
        assert before is not None
        assert not before.options.offload
        # what is hidden by a link without end is known whatever was measured
        room = int(0.8 * max(before.score.peak_bytes))
        pipe = pipe_of(model, replace(asked, memory_bytes=room, host_bytes_per_s=1e18))
        assert isinstance(pipe.model, ChosenTransformers)
        assert [pipe.step(*batch) for _ in range(3)] == losses[:3]
        live = LiveBytes(pipe.model)
        assert pipe.step(*batch) == losses[3]
        choice, measured = pipe.model.chosen.choice, pipe.model.chosen.costs
        assert choice is not None
        assert measured is not None
        assert choice.options.offload == "auto"
        messages = 6 * measured.boundary_bytes * 32 / 8
        whole, peak = before.score.peak_bytes[0] - messages, choice.score.peak_bytes[0] - messages
        found.append((live.peak / whole, peak / whole, str(choice)))
    return found


def test_what_does_not_fit_otherwise_waits_on_the_host() -> None:
    """Predicted memory is what a rank holds, and no loss changes."""
    first, _ = run_gloo(_on_the_host, 2, timeout_s=180.0)
    for held, predicted, why in first:
        assert held == predicted < 0.8
        assert "to the host hides that, and without it nothing fits" in why


def test_a_job_says_slices_by_its_layout() -> None:
    from pipeline_balance.elastic.adapters import Adapters

    for asked in ("auto", AutoSlices(memory_bytes=1 << 30)):
        with pytest.raises(SpecError, match="a layout says how many slices it has"):
            Adapters(own.layers(), own.loss_fn, own.counted, asked, torch.device("cpu"))  # type: ignore[arg-type]
