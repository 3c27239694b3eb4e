"""Whole pipelines on devices that run behind their hosts have the bits of those on the host."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import prophet
from pipeline_balance.control.controller import Controller, ControllerConfig, MoveCost
from pipeline_balance.elastic import Batches, Job, Parallelism, reshard
from pipeline_balance.pipeline.measure.meter import HOOKED_EVERY, RankTimes
from pipeline_balance.pipeline.model.added_loss import add_loss
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.exchange_times import ExchangeCosts, LayerSeconds
from pipeline_balance.slices import SliceOptions
from pipeline_balance.spec import LayerCost, StageMap
from tests.helpers import pipeline_experts, sliced_layers
from tests.helpers.device_ranks import DeviceWorld
from tests.helpers.pretend_device import skip_beside_others, waits_so_far
from tests.helpers.support import FixedPlanner, everywhere
from tests.helpers.thread_pipelines import Rank, on_devices, on_host, threads_for_groups

skip_beside_others()

DIM, VOCABULARY, UNITS, PARTS, ROWS, STEPS = 6, 11, 6, 4, 2, 2
MAX_NORM = 0.3
DRAWING = threading.Lock()


class Mode(NamedTuple):
    """How the devices of a run behave: see `DeviceWorld`."""

    one_queue: bool
    side: Literal["early", "late"] | int

    def __str__(self) -> str:
        return f"{'one queue' if self.one_queue else 'own queues'}, {self.side}"


class Seen(list[tuple[str, Any]]):
    """What a rank has seen: names and values. Tensors are copied where they are, and read at the end."""

    def note(self, name: str, value: Any) -> None:
        self.append((name, value.detach().clone() if isinstance(value, Tensor) else value))

    def step(self, pipe: ElasticPipeline, loss: float) -> None:
        self.note("loss", loss)
        self.note("norm", pipe.grad_norm)
        self.gradients(pipe)

    def gradients(self, pipe: ElasticPipeline) -> None:
        for name, p in pipe.module.named_parameters():
            if p.grad is not None:
                self.note(f"gradient of {name}", p.grad)

    def end(self, pipe: ElasticPipeline) -> Seen:
        for name, p in pipe.module.named_parameters():
            if not p.is_meta:
                self.note(name, p)
        return self.read()

    def read(self) -> Seen:
        """The same, with tensors on the host."""
        return Seen((name, x.cpu() if isinstance(x, Tensor) else x) for name, x in self)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(torch.tanh(self.up(x)))
        return found


class Adding(Block):
    """Adds a loss of its own."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return add_loss(found, 0.1 * found.square().mean())


class Half(Block):
    """Computes in half precision, and hands that on."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.half()
        for layer in (self.up, self.down):
            x = torch.tanh(nn.functional.linear(x, layer.weight.half(), layer.bias.half()))
        return x


class Head(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x.to(self.weight.dtype))
        return found


def layers(kind: type[nn.Module] = Block, *, tied: bool = True) -> nn.Sequential:
    """An embedding, four blocks and a head, which may have the embedding's weight."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(VOCABULARY, DIM), *(kind() for _ in range(UNITS - 2)))
    made.append(Head(DIM, VOCABULARY, bias=False))
    if tied:
        made[-1].weight = made[0].weight
    return made


TIED, FREE, HALF, ADDING = layers(), layers(tied=False), layers(Half), layers(Adding)
SLICED = sliced_layers.layers()
for part in SLICED.modules():
    if isinstance(part, nn.Dropout):
        part.p = 0.0


def whole_batch(update: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (PARTS * ROWS,), generator=torch.Generator().manual_seed(update))
    return ids, (ids * 3 + 1) % VOCABULARY


def batch(update: int, pipe: ElasticPipeline) -> tuple[Tensor, Tensor]:
    """A replica's part of the batch of an update."""
    ids, labels = (t.chunk(pipe.groups.replicas)[pipe.replica] for t in whole_batch(update))
    return ids, labels


def adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=1e-2)


def pipeline(
    rank: Rank, stage_map: StageMap, replicas: int = 1, model: nn.Module = TIED, loss: Any = None, **options: Any
) -> ElasticPipeline:
    given = {"make_optimizer": adam, "microbatches": PARTS // replicas, "replicas": replicas, "timeout_s": 20.0}
    return ElasticPipeline.from_modules(
        copy.deepcopy(model),
        loss or nn.functional.cross_entropy,
        stage_map,
        group=rank,
        device=rank.device,
        **{**given, **options},
    )


def trained(stage_map: StageMap, replicas: int = 1, **options: Any) -> Callable[[Rank], Seen]:
    """Some steps, each clipped, and a loss of evaluation."""

    def run(rank: Rank) -> Seen:
        pipe, seen = pipeline(rank, stage_map, replicas, **options), Seen()
        for update in range(STEPS):
            seen.step(pipe, pipe.step(*batch(update, pipe), max_norm=MAX_NORM))
        seen.note("evaluated", pipe.evaluate(*batch(99, pipe)))
        return seen.end(pipe)

    return run


def sliced(stage_map: StageMap, replicas: int = 1, **options: Any) -> Callable[[Rank], Seen]:
    def run(rank: Rank) -> Seen:
        seen = Seen()
        pipe = pipeline(
            rank,
            stage_map,
            replicas,
            SLICED,
            sliced_layers.loss_fn,
            counted=sliced_layers.counted,
            slices=SliceOptions(4, **options),
            microbatches=2,
        )
        for update in range(2):
            inputs, labels = sliced_layers.batch(update, 0)
            mine = {n: t.chunk(replicas)[pipe.replica] for n, t in inputs.items()}
            seen.step(pipe, pipe.step(mine, labels.chunk(replicas)[pipe.replica], max_norm=MAX_NORM))
        exchanging = getattr(pipe.model, "exchanging", None)
        assert exchanging is None or exchanging.verdict.pays, "nothing was exchanged"
        return seen.end(pipe)

    return run


def moved(*maps: StageMap, replicas: int = 1) -> Callable[[Rank], Seen]:
    """Moves from map to map, between updates and in the middle of one."""

    def run(rank: Rank) -> Seen:
        pipe, seen = pipeline(rank, maps[0], replicas, FREE), Seen()
        for update, stage_map in enumerate(maps[1:]):
            seen.note("kept", pipe.step(*batch(10 + update, pipe), update=False))
            pipe.rebuild(stage_map)
            seen.gradients(pipe)
            seen.step(pipe, pipe.step(*batch(update, pipe), max_norm=MAX_NORM))
            pipe.rebuild(maps[update])
        return seen.end(pipe)

    return run


def prepared(stage_map: StageMap, replicas: int = 1) -> Callable[[Rank], Seen]:
    """A controller measures, and finds moves in a thread beside the step: the last layers are slow."""

    def run(rank: Rank) -> Seen:
        pipe, seen = pipeline(rank, stage_map, replicas, FREE), Seen()
        seconds = [1.0] * 4 + [3.0] * 2
        pipe.local_costs = lambda: {i: LayerCost(forward_s=seconds[i]) for i in pipe.layers}  # type: ignore[method-assign]
        config = ControllerConfig(
            every_steps=1, measure_steps=1, prepare_in_backward=True, move_cost=MoveCost(fixed_s=0.0)
        )
        controller = Controller(pipe, config=config)
        for update in range(4):
            seen.step(pipe, controller.step(*batch(update, pipe), max_norm=MAX_NORM))
            seen.note("map", str(pipe.stage_map))
        assert len({map_ for name, map_ in seen if name == "map"}) == 2, "no move was made"
        assert all(move.early > 0 for move in controller.report.moves), "nothing has travelled early"
        return seen.end(pipe)

    return run


def frozen(stage_map: StageMap, replicas: int = 1, **options: Any) -> Callable[[Rank], Seen]:
    """Layers freeze and thaw, those in front among them."""

    def run(rank: Rank) -> Seen:
        pipe, seen = pipeline(rank, stage_map, replicas, **options), Seen()
        for update, units in enumerate([(1, 3), (0, 1, 5), ()]):
            for unit, layer in enumerate(pipe.module.children()):
                layer.requires_grad_(unit not in units)
            seen.step(pipe, pipe.step(*batch(update, pipe), max_norm=MAX_NORM))
        return seen.end(pipe)

    return run


def scaled(stage_map: StageMap, replicas: int = 1) -> Callable[[Rank], Seen]:
    """Half precision with a scaler: some steps overflow."""

    def run(rank: Rank) -> Seen:
        pipe, seen = pipeline(rank, stage_map, replicas, HALF), Seen()
        scaler = pipe.scaler(init_scale=2.0**17, growth_interval=1)
        scales = [scaler.get_scale()]
        for update in range(4):
            seen.step(pipe, pipe.step(*batch(update, pipe), max_norm=MAX_NORM, scaler=scaler))
            scales.append(scaler.get_scale())
        assert {b > a for a, b in pairwise(scales)} == {True, False}, "no step overflowed, or all did"
        seen.note("scales", scales)
        return seen.end(pipe)

    return run


def experts(rank: Rank) -> Seen:
    """Two replicas share experts, of which every one has a copy on both in each step."""
    members = (rank.world.rank % 2, rank.world.rank % 2 + 2)
    # torch's generator is that of all threads
    with DRAWING:
        model = pipeline_experts.layers(rank.part(f"experts of {members}", members))
    seen, pipe = Seen(), pipeline(rank, TWO, 2, model, nn.functional.mse_loss)
    config = prophet.EngineConfig(
        planner=FixedPlanner(everywhere(pipeline_experts.EXPERTS, 2)),
        accumulation_steps=PARTS // 2,
        slots_per_rank=pipeline_experts.EXPERTS,
    )
    engine: Any = pipe.balance_experts(lambda part: prophet.attach(part, config=config))
    for update in range(2):
        mine = [t.chunk(2)[pipe.replica] for t in pipeline_experts.batch(update)]
        seen.step(pipe, pipe.step(*mine, max_norm=MAX_NORM))
    assert engine.last_step.copies.sum(), "no expert had a copy"
    engine.close()
    return seen.end(pipe)


def switched(*layouts: str, **options: Any) -> Callable[[Rank], Seen]:
    """A job that goes from layout to layout and back: every second one is prepared beside a step, and one in place."""

    def run(rank: Rank) -> Seen:
        ids = torch.arange(4 * PARTS * ROWS) % VOCABULARY
        job = Job(
            lambda: copy.deepcopy(TIED),
            adam,
            Parallelism.parse(layouts[0]),
            data=Batches(TensorDataset(ids, (ids * 3 + 1) % VOCABULARY), PARTS * ROWS, seed=1),
            loss_fn=nn.functional.cross_entropy,
            microbatches=PARTS,
            device=rank.device,
            timeout_s=20.0,
            **options,
        )
        seen = Seen()
        for number, layout in enumerate((*layouts[1:], layouts[0])):
            mode: Literal["safe", "in-place"] = "in-place" if number % 3 == 1 else "safe"
            if number % 2 == 0:
                job.prepare(Parallelism.parse(layout), mode=mode)
            seen.step(job.pipeline, job.step(max_norm=MAX_NORM))
            job.switch(None if number % 2 == 0 else Parallelism.parse(layout), mode=mode)
        seen.step(job.pipeline, job.step(max_norm=MAX_NORM))
        job.close()
        return seen.end(job.pipeline)

    return run


def resharded(rank: Rank) -> Seen:
    """A loop of one's own, whose model goes from rank to rank: layouts without shards and wrappers of torch."""
    seen, home = Seen(), Parallelism(order=(0,))
    here = rank.world.rank == 0
    model: nn.Module = copy.deepcopy(FREE).to(rank.device if here else "meta")
    optimizer = adam(list(model.named_parameters()))
    for update in range(3):
        if rank.world.rank == home.rank_of_place[0]:
            optimizer.zero_grad()
            ids, labels = (t.to(rank.device) for t in whole_batch(update))
            loss = nn.functional.cross_entropy(model(ids), labels)
            loss.backward()
            optimizer.step()
            seen.note("loss", loss)
            del loss
        before, home = home, Parallelism(order=(1 - home.rank_of_place[0],))
        model = reshard(
            model, optimizer, before, home, build=lambda: copy.deepcopy(FREE).to("meta"), device=rank.device
        )
    for name, p in model.named_parameters():
        if not p.is_meta:
            seen.note(name, p)
    return seen.read()


# transfers in no time: at this size exchange would never pay
EACH = LayerSeconds(piece_s=1.0, diagonal_s=1.0)
EXCHANGE: dict[str, Any] = {
    "order": "aligned",
    "balance": "exchange",
    "exchange_costs": ExchangeCosts(forward=EACH, backward=EACH),
}
TWO, FOUR = StageMap((0, 3, UNITS), (0, 1)), StageMap((0, 2, 3, 4, UNITS), (0, 1, 2, 3))
TURNS = StageMap((0, 1, 3, 4, UNITS), (0, 1, 0, 1))
# with one stage per rank, threads of replicas never came between different collectives of training
UNEVEN = StageMap((0, 1, 2, 3, 4, UNITS), (0, 0, 1, 0, 1))
RUNS: dict[str, tuple[int, Callable[[Rank], Seen]]] = {
    "two stages": (2, trained(TWO)),
    "four stages, one forward one backward": (4, trained(FOUR, schedule="1f1b")),
    "interleaved": (2, trained(TURNS, schedule="interleaved")),
    "split backward": (4, trained(FOUR, split_backward=True)),
    "replicas": (4, trained(UNEVEN, 2, split_backward=True)),
    "added losses": (2, trained(TWO, model=ADDING)),
    "experts, replicas": (4, experts),
    "owners": (4, trained(TURNS, 2, zero=1)),
    "slices": (2, sliced(StageMap((0, 2, 4), (0, 1)))),
    "slices, four ranks": (4, sliced(StageMap((0, 1, 2, 3, 4), (0, 1, 2, 3)), order="aligned")),
    "slices, two stages per rank": (2, sliced(StageMap((0, 1, 2, 3, 4), (0, 1, 0, 1)), stages_per_rank=2)),
    "slices, exchange": (2, sliced(StageMap((0, 2, 4), (0, 1)), **EXCHANGE)),
    # two ranks without a layer can only help
    "slices, exchange, four ranks": (
        4,
        sliced(StageMap((0, 1, 2, 3, 4), (0, 1, 2, 3)), **EXCHANGE, keep_bytes=1 << 12),
    ),
    "slices, replicas": (4, sliced(StageMap((0, 2, 4), (0, 1)), 2)),
    "moves": (4, moved(FOUR, TURNS, TWO)),
    "moves, replicas": (4, moved(TWO, UNEVEN, TURNS, replicas=2)),
    "prepared in backward": (2, prepared(TWO)),
    "prepared in backward, replicas": (4, prepared(TWO, 2)),
    "job": (2, switched("pp2", "pp1", "pp2,v2")),
    "job, replicas": (4, switched("pp4", "pp2,dp2", "pp2,dp2,zero1")),
    "reshard": (2, resharded),
    "frozen": (2, frozen(TURNS)),
    "frozen, replicas": (4, frozen(TWO, 2, split_backward=True)),
    "scaler": (2, scaled(TWO)),
    "scaler, replicas": (4, scaled(UNEVEN, 2)),
}
# Runs that devices cannot have whose communicators share one queue, and why
EXCEPTIONS = {
    name: "gradients of replicas travel beside training, which needs a queue of their own (ADR 28)"
    for name in RUNS
    if "replicas" in name or name == "owners"
}
# Beside these, what needs processes cannot run as threads. Layouts with tp, with zero 2 and 3 and with DDP talk in
# groups that torch holds itself. Checkpoints are written by torch's own processes. A rank that is lost is noticed by
# its pulse in a store, and here by the world of threads itself. Layers that draw random numbers share a generator.

# One mode runs in `make test`, all of them in `make test-all`: "early" alone shows an event that is missing
QUICK = Mode(one_queue=False, side="early")
MODES = [Mode(one_queue, side) for one_queue in (False, True) for side in ("early", "late", 1, 2)]


# Others have the same with more that goes on beside it: frozen layers, a scaler, replicas of slices, more ranks
COVERED = {"split backward", "replicas", "slices, four ranks", "slices, exchange"}


def is_quick(name: str, mode: Mode) -> bool:
    """Whether a case runs in `make test`; what the same run with replicas covers does not."""
    return mode == QUICK and f"{name}, replicas" not in RUNS and name not in COVERED


CASES = [
    pytest.param(name, mode, id=f"{mode}-{name}", marks=[] if is_quick(name, mode) else [pytest.mark.slow])
    for mode in MODES
    for name in RUNS
    if not (mode.one_queue and name in EXCEPTIONS)
]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


@pytest.fixture(scope="module")
def on_hosts() -> dict[str, list[Seen]]:
    return {}


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_device_changes_no_bit(name: str, mode: Mode, on_hosts: dict[str, list[Seen]]) -> None:
    size, body = RUNS[name]
    with threads_for_groups():
        if name not in on_hosts:
            on_hosts[name] = on_host(size, body)
        world = DeviceWorld(size, one_queue=mode.one_queue, timeout_s=20.0, side=mode.side)
        found = on_devices(world, body)
    for rank, (here, there) in enumerate(zip(found, on_hosts[name], strict=True)):
        assert [n for n, _ in here] == [n for n, _ in there]
        for (what, a), (_, b) in zip(here, there, strict=True):
            same = torch.equal(bits(a), bits(b)) if isinstance(a, Tensor) else repr(a) == repr(b)
            assert same, f"{what} on rank {rank}: {a} on the device, {b} on the host"


class Long(Block):
    """Takes seven more operators of the device forward, and as many backward."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(7):
            x = -x
        return super().forward(x)


def measured(rank: Rank) -> tuple[list[LayerCost], RankTimes, list[float]]:
    """Costs of layers of which the third is long, where the time of a rank went, and all samples of layers."""
    model = nn.Sequential(nn.Linear(1, DIM), Block(), Long(), Block(), Block(), nn.Linear(DIM, 1))
    pipe = pipeline(rank, TWO, 1, model, nn.functional.mse_loss)
    pipe.meter.enabled = True
    for update in range(4):
        x = torch.full((PARTS * ROWS, 1), float(update))
        pipe.step(x, -x)
        assert not [wait for wait in waits_so_far() if "it has not come" in wait]
    meter = pipe.meter
    found = pipe.measure(), pipe.times()
    return *found, [s for of in (meter.forward, meter.backward) for samples in of.values() for s in samples]


def test_a_meter_finds_the_devices_times_and_waits_for_none() -> None:
    """The device's clock counts operators, a millisecond each. The host's would give any numbers."""
    with threads_for_groups():
        found = on_devices(DeviceWorld(2, timeout_s=20.0), measured)
    for costs, times, samples in found:
        # forward without the microbatch whose bytes are counted; backward the first, and each third from the second on
        assert len(samples) == 3 * (PARTS * 4 - 1) + 3 * (1 + len(range(1, PARTS * 4, HOOKED_EVERY)))
        assert [1e3 * s for s in samples] == pytest.approx([round(1e3 * s) for s in samples])
        assert min(samples) > 0
        assert 1e3 * (costs[2].forward_s - costs[1].forward_s) == pytest.approx(7)
        assert costs[3].forward_s == pytest.approx(costs[1].forward_s)
        assert 1e3 * (costs[2].backward_s - costs[1].backward_s) == pytest.approx(7)
        assert times.steps == 4
        assert min(times.step_s, times.compute_s) > 0


def exchange_measured(rank: Rank) -> ExchangeCosts:
    """What ranks have measured before their first step in slices with exchange."""
    options = SliceOptions(4, order="aligned", balance="exchange")
    stage_map, counted = StageMap((0, 2, 4), (0, 1)), sliced_layers.counted
    pipe = pipeline(rank, stage_map, 1, SLICED, sliced_layers.loss_fn, counted=counted, slices=options, microbatches=2)
    pipe.step(*sliced_layers.batch(0, 0))
    exchanging: Any = pipe.model
    found: ExchangeCosts = exchanging.exchanging.costs
    return found


def test_exchange_is_measured_by_the_devices_clock() -> None:
    """A call of the kernel is one operator, which takes a millisecond however long it is."""
    with threads_for_groups():
        one, other = on_devices(DeviceWorld(2, timeout_s=20.0), exchange_measured)
    assert one == other
    for costs in (one.forward, one.backward):
        assert 1e3 * costs.call_s == pytest.approx(1)
        assert 1e3 * costs.piece_s == pytest.approx(0, abs=1e-3)
