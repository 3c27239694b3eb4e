"""Layers that move before a step's update: what is trained has the bits of the same run without moves."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prophet
from pipeline_balance.control.controller import Controller, ControllerConfig, Decision
from pipeline_balance.dynamics.pruning import PrunedLinear
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError, StageFailed, TransitionError
from prophet.ranks.collective import Collective
from prophet.ranks.forwarding import ForwardingCollective
from prophet.ranks.waiting import Waiter
from tests.helpers import pipeline_experts as shared
from tests.helpers import pipeline_replicas as tied
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_model import LAYERS, batch, pipeline

DIM = 6
# each goes to the next one: to and fro, an idle rank, and one that gives up all it has
TWO = [((0, 3, 7), (0, 1)), ((0, 5, 7), (0, 1)), ((0, 2, 7), (1, 0)), ((0, 7), (1,))]


def _map(number: int, maps: list[Any]) -> StageMap:
    return StageMap(*maps[number % len(maps)])


class _InStep:
    """Moves the layers of a pipeline before the update of every step."""

    def __init__(self, pipe: ElasticPipeline) -> None:
        self.pipe, self.thread = pipe, Waiter("prepares a move")
        self.side = pipe.side_collective()
        self.early_bytes = self.sent_bytes = 0
        self.held: list[bool] = []
        self.arrived: Callable[[], None] = lambda: None

    def next(self, stage_map: StageMap) -> None:
        """Move to `stage_map` in the coming step."""
        pipe = self.pipe
        ahead: list[Future[Any]] = []

        def begin() -> None:
            ahead.append(self.thread.submit(lambda: pipe.prepare(stage_map, self.side, early=True)))

        def move() -> None:
            pipe.before_update(lambda: None)
            prepared = ahead[0].result(60.0)
            self.arrived()
            done = pipe.rebuild(stage_map, prepared=prepared)
            self.early_bytes += done.early_bytes
            self.sent_bytes += done.sent_bytes + done.received_bytes
            self.held.append(done.early_bytes > 0)

        pipe.before_pass(begin)
        pipe.before_update(move)


def _all_of(pipe: ElasticPipeline) -> dict[str, Tensor]:
    """What this rank holds: parameters, gradients, buffers, optimizer state."""
    found: dict[str, Tensor] = {}
    state = pipe.optimizer.state
    for name in pipe.owned.of(pipe.stage_map.layers_on(pipe.rank)):
        p = pipe.owned.parameters[name]
        found[name] = p.detach().clone()
        if p.grad is not None:
            found[f"{name}#grad"] = p.grad.clone()
        found |= {f"{name}@{key}": torch.as_tensor(value).clone() for key, value in state.get(p, {}).items()}
    for name, buffer in pipe.owned.buffers.items():
        if not buffer.tensor.is_meta:
            found[name] = buffer.tensor.clone()
    return found


def _adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=3e-3, amsgrad=True)


def _momentum(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.05, momentum=0.9, nesterov=True)


def _plain(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.05)


SETUPS: dict[str, dict[str, Any]] = {
    "adam": {},
    "amsgrad": {"make_optimizer": _adam},
    "momentum": {"make_optimizer": _momentum},
    "sgd": {"make_optimizer": _plain},
    "clipped": {"max_norm": 0.05},
    "scaled": {"scaled": True},
    "added up": {"passes": 2},
    "frozen": {"frozen": True},
    "replicas": {"replicas": 2},
    "owners": {"replicas": 2, "zero": 1, "max_norm": 0.05},
}


def _train(rank: int, size: int, setup: str, steps: int, moves: bool) -> tuple[list[Any], list[dict[str, Tensor]]]:
    given = dict(SETUPS[setup])
    max_norm, scaled = given.pop("max_norm", None), given.pop("scaled", False)
    passes, frozen = given.pop("passes", 1), given.pop("frozen", False)
    pipe = pipeline(_map(0, TWO), **given)
    scaler = pipe.scaler(init_scale=2.0**10, growth_interval=3) if scaled else None
    in_step = _InStep(pipe)
    losses: list[Any] = []
    found: list[dict[str, Tensor]] = []
    for step in range(steps):
        if frozen:
            for name, parameter in pipe.owned.parameters.items():
                parameter.requires_grad_(pipe.owned.units_of[name][0] >= step // 3 % (LAYERS - 1))
        if moves:
            in_step.next(_map(step + 1, TWO))
        for n in range(passes):
            x, y = batch(passes * step + n)
            how = {"max_norm": max_norm, "scaler": scaler}
            losses.append(pipe.step(x, y, update=n == passes - 1, **how))
        losses.append(pipe.grad_norm)
        found.append(_all_of(pipe))
    if moves:
        assert in_step.held == [True] * steps
        losses.append(("early", in_step.early_bytes, in_step.sent_bytes))
    return losses, found


@pytest.mark.parametrize("setup", SETUPS)
def test_a_move_in_every_step_changes_no_bit(setup: str) -> None:
    ranks = 4 if "replicas" in SETUPS[setup] else 2
    steps = 12
    moved = run_gloo(_train, ranks, setup, steps, True)
    still = run_gloo(_train, ranks, setup, steps, False)
    for (losses, _), (wanted, _) in zip(moved, still, strict=True):
        assert losses[:-1] == wanted
    for step in range(steps):
        whole: dict[str, list[Tensor]] = {}
        for _, found in still:
            for name, tensor in found[step].items():
                whole.setdefault(name, []).append(tensor)
        names = set()
        for _, found in moved:
            for name, tensor in found[step].items():
                names.add(name)
                assert any(torch.equal(tensor, one) for one in whole[name]), (step, name)
        assert names == whole.keys(), step


SHARED = [((0, 3, 6), (0, 1)), ((0, 1, 6), (0, 1)), ((0, 4, 6), (1, 0)), ((0, 6), (0,))]


def _shared(rank: int, size: int, zero: int, balanced: bool, moves: bool) -> tuple[list[Any], list[dict[str, Tensor]]]:
    """Replicas share the experts of two layers, which move within the steps, and have other copies in each if
    `balanced`.
    """
    pipe = shared.pipeline(size, 2, make_optimizer=_momentum, zero=zero)
    if balanced:
        pipe.balance_experts(lambda part: prophet.attach(part, config=shared.random_placements()))
    in_step, losses, found = _InStep(pipe), list[Any](), list[dict[str, Tensor]]()
    copies = 0
    for step in range(8):
        if moves:
            in_step.next(_map(step + 1, SHARED))
        mine = (t.chunk(2)[pipe.replica] for t in shared.batch(step))
        before: Any = pipe.balancer
        losses += [pipe.step(*mine, max_norm=shared.MAX_NORM), pipe.grad_norm]
        found.append(_all_of(pipe))
        if before is not None:
            # a balancer's step is one of training, wherever its layers are, and one without layers is closed
            assert before.last_step.step == step
            copies += int(before.last_step.copies.sum())
        assert (pipe.balancer is None) == (not balanced or not pipe.experts.shared(tuple(pipe.layers)))
    assert in_step.held == [True] * 8 * moves
    # the last map has all layers on the first rank of each replica
    assert copies > 0 or not balanced
    return losses, found


@pytest.mark.parametrize(("zero", "balanced"), [(0, False), (1, False), (0, True), (1, True)])
def test_layers_whose_experts_replicas_share_move_before_an_update(zero: int, balanced: bool) -> None:
    moved, still = (run_gloo(_shared, 4, zero, balanced, moves) for moves in (True, False))
    assert [losses for losses, _ in moved] == [losses for losses, _ in still]
    for step in range(8):
        for replica in (0, 1):
            # a replica's part of the experts stays with it
            whole = {name: t for _, found in still[2 * replica : 2 * replica + 2] for name, t in found[step].items()}
            now = {name: t for _, found in moved[2 * replica : 2 * replica + 2] for name, t in found[step].items()}
            same = now.keys() & whole.keys() if zero else now.keys() | whole.keys()
            assert any(".experts." in name for name in same)
            assert all(torch.equal(now[name], whole[name]) for name in same), step


def _masked(rank: int, size: int, moves: bool) -> tuple[list[float], list[bool], int]:
    """A layer's mask changes while the layer travels: between what has gone early and the rest."""
    torch.manual_seed(0)
    layers = [PrunedLinear(DIM, DIM) for _ in range(7)]
    pipe = ElasticPipeline.from_modules(
        layers, nn.functional.mse_loss, _map(0, TWO), make_optimizer=_momentum, microbatches=4, timeout_s=60.0
    )
    in_step, losses, hooked = _InStep(pipe), [], list[list[bool]]()
    pipe.optimizer.register_step_pre_hook(
        lambda *_: hooked.append([p.grad is not None for p in pipe.module.parameters()])
    )

    def prune() -> None:
        # by a mask alone, which travels later, or by the weights too, which have been sent: they go once more
        for i, layer in pipe.layers.items():
            half = torch.arange(DIM * DIM).view(DIM, DIM) % (2 + pipe.progress.updates) > 0
            if i % 2:
                layer.mask = layer.mask & half  # type: ignore[assignment,operator]
            else:
                layer.prune(half)  # type: ignore[operator]

    in_step.arrived = prune
    x = torch.randn(8, DIM, generator=torch.Generator().manual_seed(0))
    for step in range(6):
        if moves:
            in_step.next(_map(step + 1, TWO))
        else:
            pipe.before_update(prune)
        losses.append(pipe.step(x, x.flip(0)))
        # a hook of the optimizer sees the gradients of the layers that are here by then, and no others
        here = {id(p) for layer in pipe.layers.values() for p in layer.parameters()}
        assert hooked[-1] == [id(p) in here for p in pipe.module.parameters()]
    zeros = sum(int((layer.mask == 0).sum()) for layer in pipe.layers.values())  # type: ignore[union-attr]
    return losses, in_step.held, zeros


def test_a_mask_that_changes_while_its_layer_travels_is_the_one_that_holds() -> None:
    moved, still = run_gloo(_masked, 2, True), run_gloo(_masked, 2, False)
    assert moved[0][0] == still[0][0]
    assert sum(zeros for *_, zeros in moved) == sum(zeros for *_, zeros in still) > 0
    # weights that have been pruned on their way had to travel again
    assert False in moved[0][1]


def _touched(rank: int, size: int, moves: bool, when: str) -> tuple[list[Any], list[bool]]:
    """Somebody writes to a weight that has been sent, or only while it is, in a manner that torch does not count."""
    pipe = pipeline(_map(0, TWO))
    in_step, losses = _InStep(pipe), []
    allocate, noisy = pipe.mover.allocate, []

    def times(factor: float) -> None:
        if 4 in pipe.layers:
            for p in pipe.layers[4].parameters():
                p.data.mul_(factor)

    def sending(*args: Any) -> Tensor:
        # asked for by the thread, before it packs anything
        if not noisy:
            noisy.append(True)
            times(2.0)
        return allocate(*args)

    def quiet() -> None:
        if noisy:
            noisy.clear()
            times(0.5)
            # only the first time
            pipe.mover.allocate = allocate

    after = when == "after"
    in_step.arrived = (lambda: times(1.5)) if after else quiet
    if moves and not after:
        # layer 4 has gone forward and backward by then in all microbatches but the last
        pipe.mover.allocate = sending
    for step in range(4):
        if moves:
            in_step.next(_map(step + 1, TWO))
        elif after:
            pipe.before_update(lambda: times(1.5))
        losses.append(pipe.step(*batch(step)))
    return losses, in_step.held


def test_a_weight_that_changes_once_it_was_sent_is_sent_again() -> None:
    moved, still = (run_gloo(_touched, 2, moves, "after") for moves in (True, False))
    assert moved[0][0] == still[0][0]
    # layer 4 goes from rank 1 to 0 first, where what has come is not used
    assert moved[0][1][0] is False
    assert moved[0][1] == moved[1][1]


def test_a_weight_that_was_another_one_while_it_was_sent_is_sent_again() -> None:
    found = run_gloo(_touched, 2, True, "meanwhile")
    # whatever the noise did to this step's passes, the owner's weight holds
    assert found[0][1] == found[1][1] == [False, True, True, True]


def _short(rank: int, size: int) -> tuple[list[float], list[bool], list[bool]]:
    """Rank 0 gets no memory for what is on its way; then it does."""
    pipe = pipeline(_map(0, TWO))
    in_step, allocate = _InStep(pipe), pipe.mover.allocate
    losses = [pipe.step(*batch(0))]
    refused: list[bool] = []

    def none_left(*_: Any) -> Tensor:
        raise MemoryError("none left")

    for step in range(1, 4):
        pipe.mover.allocate = none_left if rank == 0 and step == 1 else allocate
        in_step.next(_map(step, TWO))
        if step == 1:
            # what fails early is left for the move itself, which says it on all ranks
            with pytest.raises(TransitionError, match="rank 0: no memory for the new state: none left"):
                pipe.step(*batch(step))
            refused.append(pipe.stage_map == _map(0, TWO))
            pipe.mover.allocate = allocate
            pipe.drop_gradients()
        losses.append(pipe.step(*batch(step)))
    return losses, in_step.held, refused


def test_a_rank_without_memory_for_what_is_on_its_way_keeps_all() -> None:
    found = run_gloo(_short, 2)
    still = run_gloo(_train, 2, "adam", 4, False)
    assert found[0][0] == [loss for loss in still[0][0] if loss is not None]
    assert [one[2] for one in found] == [[True], [True]]
    assert found[0][1] == [True, True]


def _begins(rank: int, size: int, idle: bool) -> tuple[list[str], list[str]]:
    """What happens in which order, where the first rank has no backward pass: without a stage, or frozen."""
    pipe = pipeline(StageMap((0, LAYERS), (1,)) if idle else _map(0, TWO))
    said: list[str] = []
    for unit in range(3):
        pipe.model.units[unit].requires_grad_(idle)

    def runs(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        # not on a fake one, by which shapes are found
        if type(given[0]) is Tensor:
            said.append("layer")

    for layer in pipe.layers.values():
        layer.register_forward_pre_hook(runs)
    pipe.before_pass(lambda: said.append("begins"))
    with pytest.raises(SpecError):
        # too few rows for the microbatches
        pipe.step(*(t[:1] for t in batch(0)))
    refused = list(said)
    pipe.step(*batch(0))
    pipe.step(*batch(1))
    return refused, said


@pytest.mark.parametrize("idle", [True, False])
def test_what_begins_with_a_step_does_so_once_on_every_rank_before_any_layer(idle: bool) -> None:
    for rank, (refused, said) in enumerate(run_gloo(_begins, 2, idle)):
        assert refused == []
        assert said[0] == "begins"
        assert said.count("begins") == 1
        assert ("layer" in said) == (rank == 1 or not idle)


class _Dies(ForwardingCollective):
    """The process ends when it first sends state beside a step, and leaves a file."""

    def __init__(self, inner: Collective, mark: Path) -> None:
        super().__init__(inner)
        self.mark = mark

    def around(self, inner: Collective) -> Collective:
        return _Dies(inner, self.mark)

    def exchange(self, *args: Any, **options: Any) -> Any:
        self.mark.touch()
        os._exit(1)


def _lose_one(rank: int, size: int, mark: Path) -> tuple[str, bool, StageMap]:
    pipe = pipeline(_map(0, TWO), timeout_s=20.0)
    pipe.step(*batch(0))
    in_step, before = _InStep(pipe), _all_of(pipe)
    if rank == 1:
        in_step.side = _Dies(in_step.side, mark)
    in_step.next(_map(1, TWO))
    with pytest.raises(StageFailed) as caught:
        pipe.step(*batch(1))
    now = _all_of(pipe)
    weights = [name for name in before if "#grad" not in name and not name.endswith("seen")]
    return str(caught.value), all(torch.equal(now[n], before[n]) for n in weights), pipe.stage_map


def test_a_rank_that_dies_with_state_on_its_way_is_named_and_the_others_keep_theirs(tmp_path: Path) -> None:
    said, whole, stage_map = run_gloo(_lose_one, 2, tmp_path / "died", silent=frozenset({1}))[0]
    assert (tmp_path / "died").exists()
    assert re.search(r"rank 1 \(stage 1\) failed .*: its process has ended", said)
    assert whole
    assert stage_map == _map(0, TWO)


def _thread_fails(rank: int, size: int) -> tuple[str, int]:
    """What one rank's thread cannot do after it has sent keeps all from moving."""
    pipe = pipeline(_map(0, TWO), timeout_s=20.0)
    balanced = _told_to_move(pipe, _map(0, TWO), _map(1, TWO))
    prepare = pipe.prepare

    def failing(*args: Any, **options: Any) -> Any:
        prepare(*args, **options)
        raise MemoryError("too little for a route")

    if rank == 0:
        pipe.prepare = failing  # type: ignore[method-assign]

    def train() -> None:
        for step in range(4):
            balanced.step(*batch(step))

    with pytest.raises(StageFailed) as caught:
        train()
    assert pipe._passes.before_update() is None
    return str(caught.value), pipe.progress.updates


def test_where_one_thread_fails_no_rank_moves_and_all_hear_why() -> None:
    (first, updates), (second, others) = run_gloo(_thread_fails, 2)
    assert "MemoryError: too little for a route" in first
    assert "MemoryError: too little for a route" in second
    assert updates == others


def _told_to_move(pipe: ElasticPipeline, current: StageMap, best: StageMap) -> Controller:
    """A controller that decides for this move in its first step."""
    balanced = Controller(pipe, config=ControllerConfig(every_steps=1, measure_steps=1, prepare_in_backward=True))
    figures = {"current_makespan_s": 1.0, "best_makespan_s": 0.5, "move_s": 0.0}
    move = Decision(move=True, gains=True, current=current, best=best, reason="as it was told", **figures)
    balanced.learner.decide = lambda *_: move  # type: ignore[method-assign]
    return balanced


class _Raises(ForwardingCollective):
    """Raises where it is to send state beside a step."""

    def around(self, inner: Collective) -> Collective:
        return _Raises(inner)

    def exchange(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("too hot to send")


def _cannot_send(rank: int, size: int) -> tuple[str, bool, StageMap]:
    # Others would wait for their limit, which is longer than this test may take
    pipe = pipeline(_map(0, TWO), timeout_s=600.0)
    balanced = _told_to_move(pipe, _map(0, TWO), _map(1, TWO))
    balanced.step(*batch(0))
    if rank == 0:
        side = _Raises(pipe.side_collective())
        pipe.side_collective = lambda: side  # type: ignore[method-assign]
    before = _all_of(pipe)

    def train() -> None:
        for step in range(1, 4):
            balanced.step(*batch(step))

    with pytest.raises(StageFailed) as caught:
        train()
    now = _all_of(pipe)
    weights = [name for name in before if "#grad" not in name and not name.endswith("seen")]
    return str(caught.value), all(torch.equal(now[n], before[n]) for n in weights), pipe.stage_map


def test_a_thread_that_raises_while_others_wait_for_its_state_ends_their_waits() -> None:
    for said, whole, stage_map in run_gloo(_cannot_send, 2, timeout_s=90.0):
        assert re.search(r"rank 0 \(stage 0\) failed .*RuntimeError: too hot to send", said)
        assert whole
        assert stage_map == _map(0, TWO)


def _cannot_balance(rank: int, size: int) -> tuple[str, list[float], list[bool]]:
    """Where a layer goes in a step its experts cannot be balanced: the update is made there, and training goes on."""
    pipe = shared.pipeline(size, 2)
    calls: list[int] = []

    def attach(part: nn.Module) -> Any:
        calls.append(rank)
        if len(calls) > 1:
            raise ValueError("no room for copies")
        return prophet.attach(part, config=shared.random_placements())

    pipe.balance_experts(attach)
    balanced = _told_to_move(pipe, StageMap((0, 3, 6), (0, 1)), StageMap((0, 1, 6), (0, 1)))
    losses, said, found = list[float](), "", list[bool]()
    for step in range(6):
        mine = [t.chunk(2)[pipe.replica] for t in shared.batch(step)]
        done = pipe.progress.updates
        try:
            losses.append(balanced.step(*mine, max_norm=shared.MAX_NORM))
        except SpecError as error:
            assert not said
            said = str(error)
            found = [pipe.progress.updates == done + 1, pipe.balancer is None, pipe.stage_map.boundaries == (0, 1, 6)]
    return said, losses, found


def test_experts_that_cannot_be_balanced_where_they_went_cost_no_update() -> None:
    expected = shared.one_process(6).losses
    for said, losses, found in run_gloo(_cannot_balance, 4):
        assert "the layers have moved, but their experts are not balanced" in said
        assert "no room for copies" in said
        assert found == [True] * 3
        assert len(losses) == 5
        # the loss of the step that has raised is nobody's, the others are those of one process
        assert all(min(abs(one - loss) for one in expected) < shared.TOLERANCE for loss in losses)


def _tied(rank: int, size: int, moves: bool) -> tuple[list[float], dict[str, Tensor]]:
    maps = [((0, 3, 6), (0, 1)), ((0, 5, 6), (0, 1)), ((0, 2, 6), (1, 0)), ((0, 6), (1,))]
    pipe = ElasticPipeline.from_modules(
        tied.layers(),
        tied.loss_fn,
        _map(0, maps),
        make_optimizer=tied.make_optimizer,
        microbatches=2,
        seed=tied.SEED,
        counted=tied.counted,
        timeout_s=60.0,
    )
    in_step, losses = _InStep(pipe), []
    for step in range(8):
        if moves:
            in_step.next(_map(step + 1, maps))
        losses.append(pipe.step(*tied.batch(step, 0), max_norm=tied.MAX_NORM))
    return losses, _all_of(pipe)


def test_tied_weights_move_before_an_update() -> None:
    moved, still = run_gloo(_tied, 2, True), run_gloo(_tied, 2, False)
    # of a tied weight on one rank all microbatches are added up in turn, on two ranks each adds up its own
    assert moved[0][0] == pytest.approx(still[0][0], rel=tied.TOLERANCE)
    wanted = still[0][1] | still[1][1]
    for name, tensor in (moved[0][1] | moved[1][1]).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=tied.TOLERANCE, atol=tied.TOLERANCE)
