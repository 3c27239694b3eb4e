"""Training on real processes while layers move: losses equal those of one process that never moves anything."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.lost_losses import LostLosses
from pipeline_balance.pipeline.model.registered import register
from pipeline_balance.pipeline.run import executor
from pipeline_balance.pipeline.run.generators import seed_generators
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.errors import BudgetError, SpecError, TransitionError
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import ProcessGroupCollective
from prophet.state.transition import empty
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_model import (
    DIM,
    LAYERS,
    TOLERANCE,
    batch,
    build_layer,
    make_optimizer,
    pipeline,
    plain_losses,
)


def _maps(step: int, size: int) -> StageMap:
    """A map for every fifth step: boundaries wander, and the ranks in use go 4, 3, 2, 4."""
    ranks = {0: size, 1: max(size - 1, 1), 2: max(size - 2, 1), 3: size}[min(step // 10, 3)]
    shift = step // 5 % 3
    cuts = sorted({min(LAYERS - ranks + k, 1 + k + shift) for k in range(ranks - 1)})
    used = range(ranks) if step // 5 % 2 == 0 else range(size - ranks, size)
    return StageMap((0, *cuts, LAYERS), tuple(used))


def _train(rank: int, size: int, steps: int, split: bool) -> dict[str, Any]:
    torch.manual_seed(rank)  # each process has another global stream; the layers' own must win
    run = pipeline(_maps(0, size), split_backward=split)
    losses: list[float] = []
    moved_bytes = rebuilds = 0
    used: list[int] = []
    for step in range(steps):
        if step and step % 5 == 0:
            done = run.rebuild(_maps(step, size))
            moved_bytes += done.sent_bytes
            rebuilds += 1
        if used[-1:] != [len(run.stage_map.used_ranks)]:
            used.append(len(run.stage_map.used_ranks))
        losses.append(run.step(*batch(step)))
    # arrays, because tensors would be shared through the sending process, which is about to end
    state = {f"{i}.{n}": t.numpy() for i, layer in run.layers.items() for n, t in layer.state_dict().items()}
    return {"losses": losses, "moved_bytes": moved_bytes, "rebuilds": rebuilds, "used": used, "state": state}


def _seeding_takes_long(rank: int, size: int) -> list[float]:
    def slowly(seed: int, device: torch.device) -> None:
        time.sleep(5e-3)
        seed_generators(seed, device)

    executor.seed_generators = slowly
    run = pipeline()
    for step in range(2):
        run.step(*batch(step))
    return [cost.forward_s for cost in run.measure()]


def test_what_seeding_takes_is_in_a_layers_time() -> None:
    # what no layer's time has, no stage map and no simulated step knows of
    (found,) = run_gloo(_seeding_takes_long, 1)
    assert min(found) >= 5e-3


@pytest.mark.parametrize(("size", "steps", "split"), [(4, 40, False), (3, 20, True)])
def test_losses_do_not_notice_moves(size: int, steps: int, split: bool) -> None:
    results = run_gloo(_train, size, steps, split)
    expected, weights = plain_losses(steps)
    got = results[0]["losses"]
    assert all(r["losses"] == got for r in results)
    assert got == pytest.approx(expected, rel=TOLERANCE)
    assert got[-1] < got[0] / 2
    assert results[0]["rebuilds"] == steps // 5 - 1
    assert results[0]["used"] == ([4, 3, 2, 4] if steps == 40 else [3, 2])
    assert sum(r["moved_bytes"] for r in results) > 0
    held = {name: t for r in results for name, t in r["state"].items()}
    assert set(held) == set(weights)
    for name, array in held.items():
        torch.testing.assert_close(torch.from_numpy(array), weights[name], rtol=1e-4, atol=1e-5)


def _any_map(rank: int, size: int) -> list[float]:
    """Stages to and fro between two ranks, as layers moved one by one leave them."""
    run = pipeline(StageMap((0, 1, 3, 4, 6, 7), (0, 0, 1, 0, 1)))
    return [run.step(*batch(step)) for step in range(5)]


def test_any_map_of_stages_to_ranks() -> None:
    results = run_gloo(_any_map, 2)
    assert results[0] == results[1] == pytest.approx(plain_losses(5)[0])


def _measure(rank: int, size: int) -> dict[str, Any]:
    run = pipeline(StageMap.contiguous((0, 3, LAYERS)))
    for step in range(4):
        run.step(*batch(step))
    return {"costs": run.measure(), "times": run.times()}


def test_measured_costs_are_equal_on_all_ranks() -> None:
    results = run_gloo(_measure, 2)
    costs = results[0]["costs"]
    assert costs == results[1]["costs"]
    assert len(costs) == LAYERS
    for i, cost in enumerate(costs):
        layer = build_layer(i)
        assert cost.parameter_bytes == sum(p.numel() * 4 for p in layer.parameters())
        # two moments and a counter per parameter
        assert cost.optimizer_bytes == 2 * cost.parameter_bytes + 4 * len(list(layer.parameters()))
        assert cost.forward_s > 0
        assert cost.backward_s > 0
    assert costs[1].activation_bytes < costs[4].activation_bytes
    assert costs[0].backward_input_s == 0.0
    for result in results:
        times = result["times"]
        assert times.steps == 4
        assert 0 < times.compute_s < times.step_s
        assert times.wait_forward_s >= 0
        assert times.compute_s + times.wait_forward_s + times.wait_backward_s <= times.step_s


def _count(rank: int, size: int) -> list[list[str]]:
    """What the ranks gather for in a move, with and without preparing it, where parameters are tied or replicated."""
    asked: list[str] = []

    def counted(inner: Any) -> Any:
        def count(self: ProcessGroupCollective, x: Tensor, *, op: Operation, **options: Any) -> Tensor:
            asked.append(op.name)
            return inner(self, x, op=op, **options)

        return count

    for name in ("all_gather", "gather_at_once"):
        setattr(ProcessGroupCollective, name, counted(getattr(ProcessGroupCollective, name)))
    found = []
    for replicas in (1, 2):
        run = pipeline(StageMap.contiguous((0, 3, LAYERS)), replicas=replicas) if replicas * 2 == size else None
        for ahead in (False, True) if run is not None else ():
            assert run is not None
            run.step(*batch(0))
            run.drop_gradients()
            to = StageMap.contiguous((0, 4 + ahead, LAYERS))
            prepared = run.prepare(to, run.collective) if ahead else None
            asked.clear()
            run.rebuild(to, prepared=prepared)
            found.append(list(asked))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_move_takes_three_agreements(size: int) -> None:
    expected = ["agreeing on a move", "agreeing on a transition", "deciding on a move"]
    assert run_gloo(_count, size) == [[expected, expected]] * size


def _concerned(rank: int, size: int, tied: bool) -> dict[str, Any]:
    """A move of layer 3 alone, from rank 0 to rank 1 of three; where layer 1 shares its weights, of both."""
    layers = [build_layer(i) for i in range(LAYERS)]
    if tied:
        # as wide as layer 3, which has the weights first in the model's order
        layers[1], layers[3] = build_layer(3), build_layer(3)
        layers[3].up = layers[1].up
    run = ElasticPipeline.from_modules(
        layers,
        nn.functional.cross_entropy,
        StageMap.contiguous((0, 4, 6, LAYERS)),
        make_optimizer=make_optimizer,
        microbatches=2,
        timeout_s=60.0,
    )
    watched = []
    monkeypatch = pytest.MonkeyPatch()
    after = LostLosses.after
    monkeypatch.setattr(LostLosses, "after", lambda *given, **how: (watched.append(given), after(*given, **how))[1])
    run.step(*batch(0))
    seen, to = len(watched), StageMap.contiguous((0, 3, 6, LAYERS))
    prepared = run.prepare(to, run.collective)
    run.rebuild(to, prepared=prepared)
    left = [name for name, p in run.module.named_parameters() if p.grad is not None]
    run.step(*batch(1))
    monkeypatch.undo()
    # by what no other layer has: a shared weight goes by the name of the first
    own = sorted(s.name for s in prepared.specs if s.name.endswith("down.weight"))
    return {"own": own, "left": left, "watched": [seen, len(watched) - seen]}


@pytest.mark.parametrize("tied", [False, True])
def test_layers_that_stay_have_no_part_in_a_move(tied: bool) -> None:
    results = run_gloo(_concerned, 3, tied)
    assert [r["own"] for r in results] == [[*["1.down.weight"] * tied, "3.down.weight"], [], []]
    # gradients that an update has used are dropped on all ranks, of layers that stay, too
    assert all(r["left"] == [] for r in results)
    # one pass shows which losses nobody adds, wherever its layers go then
    assert [r["watched"] for r in results] == [[2 * 4, 0], [2 * 2, 0], [2 * 1, 0]]


class _Shares(nn.Module):
    """A layer with a module that several layers share, which has a buffer and no parameter."""

    def __init__(self, shared: nn.Module | None) -> None:
        super().__init__()
        self.shared, self.linear = shared, nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.shared(x) if self.shared is not None else x)


def _shared(rank: int, size: int, sharing: tuple[int, ...]) -> list[float]:
    """Two moves of layers that share a buffer."""
    torch.manual_seed(0)
    scale = nn.BatchNorm1d(DIM, affine=False).eval()
    layers = [_Shares(scale if i in sharing else None) for i in range(4)]
    options: dict[str, Any] = {"make_optimizer": make_optimizer, "microbatches": 2, "timeout_s": 60.0}
    run = ElasticPipeline.from_modules(layers, nn.functional.mse_loss, StageMap.contiguous((0, 2, 4)), **options)
    given, wanted = torch.randn(4, DIM), torch.randn(4, DIM)
    losses = [run.step(given, wanted)]
    for cut in (3, 1):
        run.rebuild(StageMap.contiguous((0, cut, 4)))
        losses.append(run.step(given, wanted))
    return losses


@pytest.mark.parametrize("sharing", [(1, 2), (0, 1, 2, 3)])
def test_layers_that_share_a_buffer_move_together_or_stay(sharing: tuple[int, ...]) -> None:
    # the shared module must not be one that training changes
    two, also = run_gloo(_shared, 2, sharing)
    assert two == also
    torch.manual_seed(0)
    scale = nn.BatchNorm1d(DIM, affine=False).eval()
    model = nn.Sequential(*(_Shares(scale if i in sharing else None) for i in range(4)))
    optimizer = make_optimizer(list(model.named_parameters()))
    given, wanted = torch.randn(4, DIM), torch.randn(4, DIM)
    for loss in two:
        expected = nn.functional.mse_loss(model(given), wanted)
        assert loss == pytest.approx(expected.item(), rel=TOLERANCE)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()


def _kept_by_one(rank: int, size: int) -> list[str | float]:
    """A tensor that one of two holders keeps for a tied parameter."""
    torch.manual_seed(0)
    layers = [_Shares(None) for _ in range(4)]
    layers[2].linear = layers[1].linear
    options: dict[str, Any] = {"make_optimizer": make_optimizer, "microbatches": 2, "timeout_s": 60.0}
    run = ElasticPipeline.from_modules(layers, nn.functional.mse_loss, StageMap.contiguous((0, 2, 4)), **options)
    run.step(torch.ones(4, DIM), torch.ones(4, DIM))
    if rank == 1:
        register("mask", torch.ones(DIM, DIM), layers[1].linear.weight)
    with pytest.raises(TransitionError) as refused:
        run.rebuild(StageMap.contiguous((0, 3, 4)))
    return [str(refused.value), run.step(torch.ones(4, DIM), torch.ones(4, DIM))]


def test_what_one_holder_keeps_alone_ends_the_move_and_not_the_run() -> None:
    (why, loss), also = run_gloo(_kept_by_one, 2)
    assert also == [why, loss]
    assert "1.linear.weight%mask is not kept here, as it is by others" in why


def _stale(rank: int, size: int) -> list[float]:
    """One rank keeps more beside its parameters than when the move was prepared."""
    run = pipeline(StageMap.contiguous((0, 3, LAYERS)))
    losses = [run.step(*batch(0))]
    run.drop_gradients()
    to = StageMap.contiguous((0, 5, LAYERS))
    prepared = run.prepare(to, run.collective)
    state = run.optimizer.state
    for p in run.layers[3].parameters() if rank == 1 else ():
        state[p]["beside"] = torch.full_like(p, 7.0)
    run.rebuild(to, prepared=prepared)
    if rank == 0:
        assert all(bool((state[p]["beside"] == 7.0).all()) for p in run.layers[3].parameters())
    return losses + [run.step(*batch(step)) for step in range(1, 4)]


def test_a_prepared_move_notices_that_one_rank_has_changed() -> None:
    for losses in run_gloo(_stale, 2):
        assert losses == pytest.approx(plain_losses(4)[0], rel=TOLERANCE)


def _refuse(rank: int, size: int) -> str:
    run = pipeline(StageMap.contiguous((0, LAYERS)))
    for wrong, text in (
        (StageMap.contiguous((0, 2)), "of 2 layers"),
        (StageMap((0, LAYERS), (1,)), "names rank 1 of 1"),
    ):
        with pytest.raises(SpecError, match=text):
            run.rebuild(wrong)
    with pytest.raises(SpecError, match="every rank needs the batch"):
        run.step(None, None)  # type: ignore[arg-type]
    return "refused"


def test_wrong_maps_are_refused() -> None:
    assert run_gloo(_refuse, 1) == ["refused"]


def _failed_move(rank: int, size: int) -> list[float]:
    run = pipeline(StageMap.contiguous((0, 3, LAYERS)))
    losses = [run.step(*batch(step)) for step in range(3)]
    run.mover.budget_bytes = 1
    with pytest.raises(BudgetError):
        run.rebuild(StageMap.contiguous((0, 5, LAYERS)))
    run.mover.budget_bytes = 1 << 20
    if rank == 1:
        run.mover.allocate = _no_memory
    with pytest.raises(TransitionError, match="nothing has moved"):
        run.rebuild(StageMap.contiguous((0, 1, LAYERS)))
    run.mover.allocate = empty
    losses += [run.step(*batch(step)) for step in range(3, 6)]
    run.rebuild(StageMap.contiguous((0, 5, LAYERS)))
    return losses + [run.step(*batch(step)) for step in range(6, 9)]


def _no_memory(*_: Any) -> Tensor:
    raise MemoryError("none left")


def test_training_goes_on_after_a_move_that_failed() -> None:
    results = run_gloo(_failed_move, 2)
    assert results[1] == pytest.approx(plain_losses(9)[0], rel=TOLERANCE)


def _freeze(layers: dict[int, Any], step: int) -> None:
    """Freeze a prefix at step 3, a layer in the middle too at step 6, thaw all at step 9."""
    wanted = {3: {0, 1, 2}, 6: {0, 1, 2, 3, 5}, 9: set()}.get(step)
    if wanted is not None:
        for i, layer in layers.items():
            layer.requires_grad_(i not in wanted)


def _train_frozen(rank: int, size: int, split: bool) -> dict[str, Any]:
    run = pipeline(StageMap.contiguous((0, 2, 4, LAYERS)), split_backward=split)
    losses, costs = [], []
    for step in range(12):
        _freeze(dict(enumerate(run.model.units)), step)
        if step == 7:
            run.rebuild(StageMap.contiguous((0, 4, 5, LAYERS)))
        losses.append(run.step(*batch(step)))
        costs.append(run.measure())
    return {"losses": losses, "costs": costs}


@pytest.mark.parametrize("split", [False, True])
def test_frozen_layers_skip_what_nobody_needs(split: bool) -> None:
    results = run_gloo(_train_frozen, 3, split)
    expected, _ = plain_losses(12, _freeze)
    assert results[2]["losses"] == pytest.approx(expected, rel=TOLERANCE)
    before, frozen, middle = (results[0]["costs"][s] for s in (2, 5, 8))
    assert all(c.backward_s > 0 for c in before)
    # the prefix is free of backward work, a frozen layer above trainable ones still passes the gradient on
    assert [c.backward_s > 0 for c in frozen] == [False] * 3 + [True] * 4
    assert [c.backward_s > 0 for c in middle] == [False] * 4 + [True] * 3
    assert middle[5].backward_weight_s == 0.0 < middle[5].backward_input_s
    assert all(c.forward_s > 0 for c in middle)
