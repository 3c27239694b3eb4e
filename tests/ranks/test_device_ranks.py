"""Ranks with devices that run behind their hosts: what is right on the host alone, and what is wrong there."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from benchmarks.layer.cases import Sizes, biased_gate, visits_of
from benchmarks.layer.measure import measure as measure_layer
from pipeline_balance.schedules.sliced import sliced
from pipeline_balance.schedules.transfers import Message, Step, received_ahead, with_messages
from prophet.demo.model import ModelConfig, MoEGPT
from prophet.demo.text import load_corpus
from prophet.demo.train import RunResult, TrainConfig
from prophet.demo.train import train as train_demo
from prophet.errors import CollectiveError
from prophet.experts.feed_forward import FeedForwardBank
from prophet.experts.replica import ReplicaPool
from prophet.kernels import choice
from prophet.ranks.collective import Collective, Pending
from prophet.ranks.device.side_stream import SideStream
from prophet.ranks.json_messages import gather_json
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadWorld
from prophet.scheduler.actions import Launch, Window
from prophet.scheduler.pieces import Form
from prophet.scheduler.replicas import BlockReplicas, Carrier
from prophet.scheduler.windows import Stopwatch
from prophet.spec import Placement, Topology
from tests.helpers.device_ranks import DeviceCollective, DeviceDeadlock, DeviceHazard, DeviceWorld, stream
from tests.helpers.late_operators import Late
from tests.helpers.pretend_device import NAME, skip_beside_others, values
from tests.helpers.support import FixedPlanner, everywhere
from tests.helpers.training import Case, Run, compare, expected, train

skip_beside_others()

OP = Operation("dispatch", 0)
MODES = pytest.mark.parametrize("one_queue", [False, True], ids=["own queues", "one queue"])
# Executor.SENDS: so many sends are under way before the oldest is waited for
SENDS = 4


def on_device(one_queue: bool = False, size: int = 2) -> DeviceWorld:
    return DeviceWorld(size, one_queue=one_queue, timeout_s=20.0)


# --- what is right ---


@MODES
def test_values_arrive_and_reading_them_waits(one_queue: bool) -> None:
    def body(c: DeviceCollective) -> list[Any]:
        x = torch.arange(4.0, device=NAME) + 10 * c.rank
        doubled = (
            c.all_to_all(x, [1, 3] if c.rank == 0 else [2, 2], [1, 2] if c.rank == 0 else [3, 2], op=OP).wait() * 2
        )
        assert values(doubled).isnan().all(), "the host runs ahead of its device"
        into = torch.zeros(2, device=NAME)
        c.exchange([(1 - c.rank, x[:2] + 1)], [(1 - c.rank, into)], op=OP).wait()
        every = c.all_gather(torch.tensor([c.rank], device=NAME), op=OP)
        return [doubled.tolist(), into.tolist(), every.tolist()]

    found = on_device(one_queue).run(body)
    assert found[0] == [[0.0, 20.0, 22.0], [11.0, 12.0], [[0], [1]]]
    assert found[1] == [[2.0, 4.0, 6.0, 24.0, 26.0], [1.0, 2.0], [[0], [1]]]


@MODES
def test_what_ranks_agree_by_does_not_wait_for_the_device(one_queue: bool) -> None:
    def body(c: DeviceCollective) -> list[Any]:
        mean = torch.full((2,), float(c.rank), device=NAME)
        c.all_reduce_mean_([mean])
        return [
            gather_json({"rank": c.rank, "text": "x" * 9000 * c.rank}, c, OP)[1]["rank"],
            c.decide(OP, "switch", ready=c.rank == 0).unready,
            mean.tolist(),
        ]

    world = on_device(one_queue)
    assert world.run(body) == [[1, (1,), [0.5, 0.5]]] * 2
    assert [len(waits) for waits in world.waits.values()] == [1, 1], "the mean alone is read"


def test_tensors_on_the_host_go_beside_the_device() -> None:
    def body(c: DeviceCollective) -> list[Any]:
        found = c.all_to_all(torch.arange(2) + 10 * c.rank, [1, 1], [1, 1], op=OP).wait().tolist()
        return [found, c.meet(OP, failed=c.rank == 1)]

    world = on_device()
    assert world.run(body) == [[[0, 10], [1]], [[1, 11], [1]]]
    assert world.waits == {0: [], 1: []}


def test_ranks_of_several_communicators() -> None:
    def body(c: DeviceCollective) -> list[Any]:
        members = [c.rank % 2, c.rank % 2 + 2]
        column = world.collective(c.rank, f"column {c.rank % 2}", members)
        return column.all_gather(torch.tensor([c.rank], device=NAME), op=OP).flatten().tolist()

    world = on_device(size=4)
    assert world.run(body) == [[0, 2], [1, 3], [0, 2], [1, 3]]


@MODES
def test_an_engine_trains_as_the_oracle_does(one_queue: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "triton_available", lambda: False)
    case = Case(shapes=((2, 3), (4,)), steps=2, seed=7, device=NAME)
    found = on_device(one_queue).run(lambda group: train(case, group))
    compare(expected(case), found)


def test_windows_are_as_long_as_on_the_device_and_nobody_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's clock counts operators, so its windows are whole milliseconds, which the host's are not."""
    monkeypatch.setattr(choice, "triton_available", lambda: False)
    case = Case(shapes=((2, 3), (4,)), steps=4, seed=7, device=NAME)

    def body(group: DeviceCollective) -> tuple[list[list[int]], list[dict[str, float]], list[Any]]:
        run = Run(case, group, FixedPlanner(everywhere(case.num_experts, case.ranks)), slots_per_rank=8)
        told, seconds, steps = [], [], []
        for step in range(case.steps):
            steps.append(run.whole_step(step))
            told.append([us for layer in run.engine.balanced for us in layer.windows.own_us])
            seconds.append(run.engine.last_step.seconds)  # type: ignore[union-attr]
        assert run.engine.measured_windows is not None
        run.close()
        return told, seconds, steps

    world = on_device()
    found = world.run(body)
    compare(expected(case), [steps for _, _, steps in found])
    for told, seconds, _ in found:
        assert not any(told[0]), "the first step is read at the end of the second"
        # No BNEC comes before the first backward pass of experts
        assert sum(us > 0 for us in told[-1]) == len(told[-1]) - 1
        assert not any(us % 1000 for us in told[-1])
        assert "expert" not in seconds[0]
        assert seconds[-1]["expert"] > 0
        assert round(1e6 * seconds[-1]["expert"]) % 1000 == 0
    assert not [wait for waits in world.waits.values() for wait in waits if wait.startswith("a time")]


def test_the_demo_trains_on_a_device_and_waits_for_it_before_it_reads_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "triton_available", lambda: False)
    config = TrainConfig(
        model=ModelConfig(dim=16, heads=2, blocks=2, hidden=16, experts=4, length=16),
        steps=2,
        turn=1,
        sequences_per_rank=2,
        held_out_sequences_per_rank=2,
        timeout_s=20.0,
    )
    torch.manual_seed(config.seed)
    state = MoEGPT(config.model, group=ThreadWorld(1).collective(0)).state_dict()

    def model(sizes: ModelConfig, *, group: Any) -> MoEGPT:
        # Ranks that are threads share torch's generator, so what they draw is not alike
        made = MoEGPT(sizes, group=group)
        made.load_state_dict(state)
        return made

    monkeypatch.setattr("prophet.demo.train.MoEGPT", model)
    corpus = load_corpus(None)
    planners = {"off": "static", "on": "prophet"}
    # One rank: two threads that are the first to use an operator here have crashed torch (2.13.0), one time in twelve
    world = on_device(size=1)

    ends: list[None] = []
    synchronize = Late.synchronize
    monkeypatch.setattr(Late, "synchronize", lambda self: ends.append(None) or synchronize(self))

    def body(group: Collective) -> dict[str, RunResult]:
        on = torch.device(NAME if isinstance(group, DeviceCollective) else "cpu")
        return train_demo(config, corpus, planners=planners, group=group, device=on)

    found, expected_of = world.run(body), ThreadWorld(1, timeout_s=20.0).run(body)
    assert len(ends) == 2 * config.steps * 2, "a rank waits for its device at both ends of every run's steps"
    for mine, host in zip(found, expected_of, strict=True):
        for name in planners:
            assert mine[name].loss == pytest.approx(host[name].loss, rel=1e-5)
            assert mine[name].held_out_loss == pytest.approx(host[name].held_out_loss, rel=1e-5)
            assert (mine[name].counts == host[name].counts).all()


def test_the_layer_benchmark_checks_and_times_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's clock counts operators, so every time is a whole number of milliseconds."""
    monkeypatch.setattr(choice, "triton_available", lambda: False)
    monkeypatch.setattr("benchmarks.layer.measure.measured_topology", lambda *_: Topology.uniform(2, flops_per_s=1e9))
    sizes = Sizes(dim=8, hidden=8, experts=4, top_k=2, tokens=24)
    visits = visits_of("one-expert-90%", sizes, 2)
    assert not isinstance(visits, str)
    options: dict[str, Any] = {
        "sizes": sizes,
        "gates": {"hot": biased_gate(sizes, visits).tolist()},
        "names": ("prophet", "static"),
        "repetitions": 2,
        "device": NAME,
    }
    ours, static = on_device().run(lambda group: measure_layer(group, **options))[0]
    assert ours["replicas"] > 0
    for row in (ours, static):
        times = [row["fwd_ms"], row["fwd_bwd_ms"], *row["fwd_bwd_ms_quartiles"]]
        assert 0 < row["fwd_ms"] < row["fwd_bwd_ms"]
        assert all(4 * ms == pytest.approx(round(4 * ms)) for ms in times)
        assert 0 < row["breakdown_ms"]["experts"] < row["fwd_bwd_ms"]


@pytest.mark.parametrize("side", ["late", 1])
@pytest.mark.parametrize(
    "case",
    [
        Case(transfers="direct", density=1.0, slots=8, steps=2, seed=2),
        Case(transfers="two-phase", density=1.0, slots=8, microbatches=2, steps=2, seed=3),
        Case(transfers="two-phase", refetch=True, density=0.8, slots=8, blocks=3, steps=2, seed=4),
        Case(transfers="direct", uses=2, density=1.0, slots=8, steps=2, seed=5),
        Case(
            transfers="node-once",
            ranks=3,
            ranks_per_node=2,
            shapes=((2,), (3,), (4,)),
            refetch=True,
            density=1.0,
            slots=8,
            microbatches=2,
            steps=2,
            seed=6,
        ),
        Case(
            transfers="spread",
            ranks=3,
            ranks_per_node=2,
            shapes=((2,), (3,), (4,)),
            refetch=True,
            density=1.0,
            slots=8,
            microbatches=2,
            steps=2,
            seed=7,
        ),
    ],
    ids=["direct", "two-phase, two microbatches", "fetched again", "layers used twice", "node-once", "spread"],
)
def test_transfers_in_their_own_stream_are_in_time_for_training(
    case: Case, side: Literal["late"] | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "triton_available", lambda: False)
    case = replace(case, device=NAME)
    world = DeviceWorld(case.ranks, timeout_s=20.0, side=side)
    found = world.run(lambda group: train(case, group))
    compare(expected(case), found)
    packed = {queue for _, queue in world.last if queue.startswith("stream ")}
    assert len(packed) == case.ranks, "each rank has one stream for transfers"


def test_gradients_may_be_added_once_what_is_on_its_way_is_packed() -> None:
    """As by the second backward pass of a layer that is used twice, while Agg brings home the first one's."""

    def body(c: DeviceCollective) -> list[Any]:
        bank = FeedForwardBank(2, 2, 1, first_expert=c.rank, total_experts=2, ep_size=2).to(NAME)
        carrier = Carrier(c, ReplicaPool(), Stopwatch(), [], SideStream(torch.device(NAME)))
        placement = Placement.with_replicas((0, 1), 2, ((0, 1), (1, 0)))
        block = BlockReplicas(0, bank, placement, Form(), carrier)
        replica = block.arrived()[0]
        block.use(keep=True, visited=[0, 1])
        block.backward_began()
        replica.grads += 1
        block.launch_gradients(Launch("AGG", 0, 1, Window("BNEC", 0)))
        block.backward_began()
        replica.grads += 4
        block.finish_gradients()
        home = [p.grad for p in bank.parameters() if p.grad is not None]
        return [float(g.sum()) / g.numel() for g in home] + [float(replica.grads.sum())]

    for seed in range(12):
        # The mean over the ranks, as the home experts had no rows
        for home in DeviceWorld(2, timeout_s=20.0, side=seed).run(body):
            assert home == [2.5] * (len(home) - 1) + [0.0], seed


# --- a thread beside training ---


def beside(c: Collective, own: Callable[[], AbstractContextManager[Any]], device: str) -> list[Any]:
    """A thread gathers on the ranks' second communicator while training exchanges tokens.

    On rank 0 the thread comes first, if it can, and on rank 1 training does.
    """
    first = threading.Event()

    def gather() -> Any:
        if c.rank == 1:
            first.wait(20)
        with own():
            x = torch.full((2,), float(c.rank), device=device)
            pending = c.all_to_all(x, [1, 1], [1, 1], op=Operation("gather"), channel="weights")
            found = pending.wait()
            first.set()
            return found.tolist()

    with ThreadPoolExecutor(1) as thread:
        gathered = thread.submit(gather)
        if c.rank == 0:
            # On the host the thread cannot get past its wait: training goes on all the same
            first.wait(0.5)
        tokens = c.all_to_all(torch.arange(2.0, device=device) + c.rank, [1, 1], [1, 1], op=OP).wait()
        combined = c.all_to_all(tokens * 2, [1, 1], [1, 1], op=Operation("combine", 0)).wait()
        first.set()
        return [gathered.result(20), combined.tolist()]


RIGHT = [[[0.0, 1.0], [0.0, 2.0]], [[0.0, 1.0], [2.0, 4.0]]]


@MODES
def test_a_thread_in_the_default_stream_deadlocks(one_queue: bool) -> None:
    began = time.monotonic()
    with pytest.raises(DeviceDeadlock) as raised:
        on_device(one_queue).run(lambda c: beside(c, nullcontext, NAME))
    assert time.monotonic() - began < 10
    text = str(raised.value)
    for part in ("gather (rank 0", "gather (rank 1", "dispatch of layer 0 (rank 0", "dispatch of layer 0 (rank 1"):
        assert part in text
    assert "default stream" in text


def test_a_thread_in_its_own_stream_does_not() -> None:
    assert on_device().run(lambda c: beside(c, lambda: stream("words"), NAME)) == RIGHT


def test_its_own_stream_does_not_help_where_communicators_share_a_queue() -> None:
    with pytest.raises(DeviceDeadlock, match="one queue"):
        on_device(one_queue=True).run(lambda c: beside(c, lambda: stream("words"), NAME))


def test_on_the_host_the_same_sequence_is_right() -> None:
    assert ThreadWorld(2, timeout_s=20.0).run(lambda c: beside(c, nullcontext, "cpu")) == RIGHT


# --- deadlocks ---


def test_every_rank_hears_of_a_deadlock() -> None:
    heard: dict[int, str] = {}

    def body(c: DeviceCollective) -> None:
        x = torch.zeros(1, device=NAME)
        try:
            for channel in ("tokens", "weights") if c.rank else ("weights", "tokens"):
                c.all_gather(x, op=Operation(f"gather of {channel}"), channel=channel)
            c.synchronize()
        except DeviceDeadlock as error:
            heard[c.rank] = str(error)
            raise

    with pytest.raises(DeviceDeadlock, match=r"gather of tokens \(rank 0, world tokens\)"):
        on_device().run(body)
    assert sorted(heard) == [0, 1]
    assert heard[0] == heard[1]


def test_work_that_needs_a_rank_that_has_ended() -> None:
    def body(c: DeviceCollective) -> None:
        if c.rank == 0:
            c.all_gather(torch.zeros(1, device=NAME), op=OP)

    with pytest.raises(DeviceDeadlock, match=r"rank\(s\) \[1\], which have ended"):
        on_device().run(body)


def test_hosts_that_read_in_different_orders_deadlock() -> None:
    def body(c: DeviceCollective) -> None:
        x = torch.zeros(1, device=NAME)
        for channel in ("tokens", "weights") if c.rank else ("weights", "tokens"):
            c.all_gather(x, op=OP, channel=channel).tolist()

    with pytest.raises(DeviceDeadlock):
        on_device().run(body)


def test_ranks_in_different_operations_are_told_so() -> None:
    def body(c: DeviceCollective) -> None:
        c.all_gather(torch.zeros(1, device=NAME), op=Operation("dispatch" if c.rank else "combine", 0)).tolist()

    with pytest.raises(CollectiveError, match="another rank is in"):
        on_device().run(body)


def test_a_rank_that_raises_wakes_the_others() -> None:
    def body(c: DeviceCollective) -> None:
        if c.rank == 1:
            raise ZeroDivisionError("one rank broke")
        c.all_gather(torch.zeros(1, device=NAME), op=OP).tolist()

    with pytest.raises(ZeroDivisionError, match="one rank broke"):
        on_device().run(body)


# --- point-to-point ---


def run_steps(rows: list[list[Step]], device: str, c: Collective) -> list[float]:
    """Run a rank's steps as the executor does, with numbers as activations; all that it has computed."""
    held: dict[tuple[bool, int, int], Tensor] = {}
    coming: dict[tuple[bool, int, int], Pending] = {}
    sent: list[Pending] = []
    found = []
    for step in rows[c.rank]:
        if isinstance(step, Message):
            key, op = (step.forward, step.boundary, step.microbatch), Operation(str(step).partition(" ")[2])
            if step.what == "send":
                if len(sent) == SENDS:
                    sent.pop(0).wait()
                sent.append(c.exchange([(step.peer, held.pop(key))], [], op=op))
            else:
                held[key] = torch.empty(1, dtype=torch.float64, device=device)
                coming[key] = c.exchange([], [(step.peer, held[key])], op=op)
        else:
            forward, s, m = step.kind == "F", step.stage, step.microbatch
            key = (True, s, m) if forward else (False, s + 1, m)
            if key in coming:
                coming.pop(key).wait()
            start = torch.full((1,), float(m), dtype=torch.float64, device=device)
            result = held.pop(key, start) * 1.5 + s
            held[forward, s + 1 if forward else s, m] = result
            found.append(result)
    for pending in sent:
        pending.wait()
    return torch.cat(found).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [2, 4])
def test_receives_ahead_of_their_turn_stick_in_one_queue_per_communicator(ranks: int) -> None:
    schedule = sliced(ranks, 1, 2, 8)
    plain = with_messages([list(row) for row in schedule.actions], list(range(ranks)))
    ahead = [received_ahead(row) for row in plain]
    wanted = ThreadWorld(ranks, timeout_s=20.0).run(partial(run_steps, ahead, "cpu"))
    assert on_device(size=ranks).run(partial(run_steps, plain, NAME)) == wanted
    with pytest.raises(DeviceDeadlock, match=r"\d[<>]\d of \d+ \(rank"):
        on_device(size=ranks).run(partial(run_steps, ahead, NAME))


# --- inputs and results ---


def test_an_input_changed_before_the_collective_is_over() -> None:
    def body(c: DeviceCollective) -> None:
        x = torch.zeros(2, device=NAME)
        pending = c.all_to_all(x, [1, 1], [1, 1], op=OP)
        if c.rank == 0:
            x += 1
        pending.wait()

    with pytest.raises(DeviceHazard, match="the input of dispatch of layer 0 was changed"):
        on_device().run(body)


def test_an_input_may_be_changed_after_a_wait() -> None:
    def body(c: DeviceCollective) -> list[float]:
        x = torch.zeros(2, device=NAME)
        found = c.all_to_all(x, [1, 1], [1, 1], op=OP).wait()
        x += 1
        return found.tolist()

    assert on_device().run(body) == [[0.0, 0.0]] * 2


def test_a_receive_buffer_written_to_in_the_meantime() -> None:
    def body(c: DeviceCollective) -> None:
        into = torch.zeros(1, device=NAME)
        pending = c.exchange([(1 - c.rank, torch.ones(1, device=NAME))], [(1 - c.rank, into)], op=OP)
        into.zero_()
        pending.wait()

    with pytest.raises(DeviceHazard, match="what dispatch of layer 0 fills was changed"):
        on_device().run(body)


def test_an_input_freed_before_anybody_waits() -> None:
    def body(c: DeviceCollective) -> None:
        # The handle keeps its input, and nobody keeps the handle
        c.all_to_all(torch.zeros(2, device=NAME), [1, 1], [1, 1], op=OP)

    with pytest.raises(DeviceHazard, match="the input of dispatch of layer 0 was freed"):
        on_device().run(body)


def test_a_result_used_without_a_wait_is_nan() -> None:
    def body(c: DeviceCollective) -> list[Any]:
        into, whole = torch.zeros(1, device=NAME), torch.zeros(1, dtype=torch.int64, device=NAME)
        peer = 1 - c.rank
        sends = [(peer, torch.ones(1, device=NAME)), (peer, torch.ones(1, dtype=torch.int64, device=NAME))]
        pending = c.exchange(sends, [(peer, into), (peer, whole)], op=OP)
        early = (into * 2, whole * 2)
        pending.wait()
        return [*(x.item() for x in early), (into * 2).item(), (whole * 2).item()]

    for early, early_whole, late, late_whole in on_device().run(body):
        assert math.isnan(early)
        assert abs(early_whole) > 1 << 40
        assert [late, late_whole] == [2.0, 2]
