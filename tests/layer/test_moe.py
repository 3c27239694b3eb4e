"""The layer on its own: shapes, precision, and errors that say what was expected.

What depends on the kernels runs over every implementation of them; `tests/helpers/paths.py` says which are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import prophet
from prophet.engine.config import Experiment
from prophet.ranks.collective import Collective
from tests.helpers import oracle
from tests.helpers.paths import PATHS, PATHS_ON_THREADS, Path, one_kernel_at_a_time
from tests.helpers.recorder import RecordingCollective
from tests.helpers.support import FixedPlanner, RandomPlanner, TinyModel, everywhere, next_id_loss, on_threads
from tests.helpers.training import SCALE, Case, Run, average, check_on_threads, compare, expected, measure


@pytest.fixture(autouse=True)
def _interpreted_kernels_take_turns() -> Iterator[None]:
    with one_kernel_at_a_time():
        yield


def reference(layer: prophet.MoE, x: Tensor) -> Tensor:
    """The oracle's output in float64, on CPU, for one rank's layer on rows `x` [N, D]."""
    gate, bank = layer.gate.config, layer.experts
    state = {f"l.{k}": v.cpu().double() for k, v in layer.state_dict().items()}
    config = oracle.OracleConfig(
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        activation=bank.activation,
        score=gate.score,
        normalize=gate.normalize,
        scale=gate.scale,
        capacity_factor=gate.capacity_factor,
    )
    return oracle.moe(x.cpu().double(), state, "l", config, [0] * x.shape[0])[0]


def near(got: Tensor, want: Tensor, path: Path) -> None:
    """Raise unless they are equal to what the path's precision allows."""
    torch.testing.assert_close(got.cpu().double(), want.cpu().double(), rtol=0, atol=path.atol)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (2, 1, 3, 6), (6,), (0, 6), (2, 0, 6)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "swiglu", "bias": False, "gate": prophet.GateConfig(scale=2.0)},
        {"gate": prophet.GateConfig(score="sigmoid", normalize=False)},
    ],
)
def test_any_leading_shape_without_a_process_group(shape: tuple[int, ...], options: dict[str, Any], path: Path) -> None:
    torch.manual_seed(0)
    layer = prophet.MoE(6, 7, 4, 2, impl=path.impl, **options).to(path.device, path.dtype)
    x = torch.randn(shape, dtype=torch.float64).to(path.device, path.dtype)
    y = layer(x)
    assert y.shape == x.shape
    near(y.reshape(-1, 6), reference(layer, x.reshape(-1, 6)), path)


@pytest.mark.parametrize("path", PATHS)
def test_a_view_with_odd_strides(path: Path) -> None:
    layer = prophet.MoE(6, 7, 4, impl=path.impl).to(path.device, path.dtype)
    x = torch.randn(6, 3, 2, dtype=torch.float64).to(path.device, path.dtype).permute(2, 1, 0)
    near(layer(x), layer(x.contiguous()), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"activation": "swiglu", "bias": False}])
def test_the_input_and_all_parameters_get_their_gradients(top_k: int, options: dict[str, Any], path: Path) -> None:
    torch.manual_seed(0)
    layer = prophet.MoE(3, 4, 4, top_k, impl=path.impl, **options).to(path.device, path.dtype)
    wanted = prophet.MoE(3, 4, 4, top_k, impl="naive", **options).double()
    wanted.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3, dtype=torch.float64).to(path.device, path.dtype).requires_grad_()
    wide = x.detach().cpu().double().requires_grad_()
    weight = torch.randn(5, 3, dtype=torch.float64)
    got = torch.autograd.grad((layer(x) * weight.to(x)).sum(), [x, *layer.parameters()])
    want = torch.autograd.grad((wanted(wide) * weight).sum(), [wide, *wanted.parameters()])
    near(got[0], torch.autograd.grad((reference(layer, wide) * weight).sum(), wide)[0], path)
    for g, w in zip(got, want, strict=True):
        near(g, w, path)


@pytest.mark.parametrize("path", PATHS_ON_THREADS)
def test_dropped_choices_are_counted_on_all_ranks(path: Path) -> None:
    case = Case(ranks=2, shapes=((7,), (4,)), gate={"capacity_factor": 0.5}, favourites=(1,), impl=path.impl)

    def body(group: Collective) -> list[list[int]]:
        run = Run(case, group)
        drops = []
        for s in range(3):
            report = run.whole_step(s).report
            assert report is not None
            stats = [run.model.moe(b).stats for b in range(2)]
            assert [x.dropped for x in stats if x is not None] == report.dropped.tolist()
            assert report.counts.sum(axis=(1, 2)).tolist() == [22 - d for d in report.dropped.tolist()]
            drops.append(report.dropped.tolist())
        return drops

    wanted, state = [], case.state()
    rank_of = [0] * 7 + [1] * 4
    for s in range(3):
        wanted.append(oracle.tiny_model(state, torch.cat(case.ids(s, 0)), case.oracle(), rank_of)[2])
        grads = oracle.gradients(state, [case.ids(s, 0)], case.oracle(), SCALE)[1]
        state.update({k: state[k] - case.lr * g for k, g in grads.items()})
    assert min(min(w) for w in wanted) > 0
    assert on_threads(2, body) == [wanted, wanted]


@pytest.mark.parametrize("path", PATHS_ON_THREADS)
def test_nothing_is_dropped_unless_asked_for(path: Path) -> None:
    """All tokens to one expert."""
    case = Case(ranks=4, top_k=1, favourites=(5,), shapes=((9,),) * 4, impl=path.impl)
    for steps in check_on_threads(case, atol=path.atol):
        report = steps[2].report
        assert report is not None
        assert report.dropped.tolist() == [0, 0]
        assert report.counts.sum(axis=1).tolist() == [[0] * 5 + [36] + [0] * 2] * 2


@pytest.mark.parametrize("path", PATHS_ON_THREADS)
@pytest.mark.parametrize(
    "options",
    [
        {"activation": "swiglu", "bias": False, "gate": {"score": "sigmoid", "aux_loss": "switch"}},
        {"microbatches": 2, "gate": {"normalize": False, "z_loss_weight": 0.1}},
        {"refetch": True, "gate": {"capacity_factor": 0.7}},
        {"checkpointing": "non-reentrant", "favourites": (3,)},
        {"activation": "geglu_tanh", "bias": "in", "dim_out": 4},
        {"activation": "relu2", "bias": "out", "dim_out": 9, "microbatches": 2},
    ],
    ids=["swiglu", "accumulation", "refetch", "checkpointing", "smaller output", "larger output"],
)
def test_training_with_replicas_agrees_with_the_oracle(options: dict[str, Any], path: Path) -> None:
    case = Case(ranks=2, shapes=((5,), (2,)), steps=2, density=1.0, lr=0.01, impl=path.impl, **options)
    by_rank = check_on_threads(case, atol=path.atol)
    assert all(s.report is not None for steps in by_rank for s in steps)
    assert any(s.report.copies.sum() > 0 for s in by_rank[0] if s.report is not None)


def test_the_bias_moves_once_a_step_by_the_load_of_all_ranks() -> None:
    case = Case(ranks=2, microbatches=2, gate={"bias_update_rate": 0.25}, shapes=((5,), (6,)), steps=1)

    def body(group: Collective) -> list[tuple[list[float], list[int]]]:
        run = Run(case, group)
        report = run.whole_step(0).report
        assert report is not None
        return [
            (
                [0.0] * 4 if (bias := run.model.moe(b).gate.bias) is None else bias.tolist(),
                report.counts[b].sum(0).tolist(),
            )
            for b in range(2)
        ]

    both = on_threads(2, body)
    assert both[0] == both[1]
    for bias, counts in both[0]:
        assert sum(counts) == 2 * 11 * 2
        assert bias == [0.25 * float(np.sign(11 - c)) for c in counts]


# --- precision ---


def test_float32_is_close_to_the_oracle() -> None:
    """Sums of some tens of terms of order one, in another order: 1e-5 is a hundred roundings."""
    case = Case(ranks=4, shapes=((9,), (4,), (0,), (7,)), steps=1)

    def body(group: Collective) -> list[Any]:
        run = Run(replace(case, lr=0.0), group, FixedPlanner(everywhere(8, 4)), slots_per_rank=8)
        run.model.float()
        run.whole_step(5)
        return [run.whole_step(0)]

    compare(expected(case), on_threads(4, body), atol=1e-5)


def bf16(group: Collective, balanced: bool) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
    case = Case(ranks=group.size, experts_per_rank=4 // group.size, shapes=((6,),) * group.size, lr=0.0)
    model = TinyModel(blocks=2, dim=6, hidden=5, num_experts=4, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if balanced:
        prophet.attach(model, optimizer, config=case.engine_config(FixedPlanner(everywhere(4, group.size))))
    batches = Case(ranks=2, shapes=((6,), (6,))).ids(0, 0)
    mine = torch.cat(batches).chunk(group.size)[group.rank]
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(mine)
            assert out.dtype == torch.bfloat16
        loss = out.float().square().mean()
        loss.backward()
        average(model, group, loss.detach())
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        seen = measure(model, loss)
        optimizer.step()
    return out.detach().float(), seen[1], seen[2]


def test_autocast() -> None:
    """bfloat16 keeps 8 bits: outputs and gradients agree to a few parts in a hundred, whatever the placement."""
    whole = on_threads(1, lambda group: bf16(group, False))[0]
    plain = on_threads(2, lambda group: bf16(group, False))
    moved = on_threads(2, lambda group: bf16(group, True))
    for outs in (plain, moved):
        torch.testing.assert_close(torch.cat([o[0] for o in outs]), whole[0], rtol=0.05, atol=0.05)
        for out in outs:
            for name, grad in {**out[1], **out[2]}.items():
                want = {**whole[1], **whole[2]}[name]
                np.testing.assert_allclose(grad, want, rtol=0.05, atol=0.02, err_msg=name)


def test_a_bfloat16_model() -> None:
    def body(group: Collective) -> Tensor:
        model = TinyModel(group=group).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = prophet.attach(model, optimizer, config=prophet.EngineConfig(planner=RandomPlanner(0, 1.0)))
        ids = torch.arange(8)
        for _ in range(3):
            out: Tensor = model(ids)
            next_id_loss(out, ids, 0.1).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert engine.last_step is not None
        assert engine.last_step.copies.sum() > 0
        engine.close()
        return out.detach()

    for out in on_threads(2, body):
        assert out.dtype == torch.bfloat16
        assert torch.isfinite(out).all()


def test_autocast_under_checkpointing() -> None:
    def body(group: Collective) -> list[Tensor]:
        grads = []
        for recompute in (False, True):
            model = TinyModel(group=group)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            planner = FixedPlanner(everywhere(8, 2))
            engine = prophet.attach(model, optimizer, config=prophet.EngineConfig(planner=planner))
            ids = torch.arange(8) + group.rank
            for _ in range(2):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    out = checkpoint(model, ids, use_reentrant=False) if recompute else model(ids)
                next_id_loss(out.float(), ids, 0.1).backward()
                optimizer.step()
            engine.close()
            grads.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
        return grads

    for plain, recomputed in on_threads(2, body):
        assert torch.equal(plain, recomputed)


# --- errors ---


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_experts": 6}, "6 experts cannot be divided among 4 expert-parallel ranks"),
        ({"group": RecordingCollective(5, 16)}, r"ep, replicas = prophet.parallel.expert_groups\(8\), then pass group"),
        ({"num_experts": 0}, "experts and ranks must be at least 1"),
        ({"top_k": 9}, r"top_k must be between 1 and num_experts \(8\), got 9"),
        ({"top_k": 0}, "top_k must be between 1"),
        ({"dim": 0}, "dim and hidden must be positive"),
        ({"hidden": -1}, "dim and hidden must be positive"),
        ({"activation": "tanh"}, "activation: expected one of identity, .*, got 'tanh'"),
    ],
)
def test_impossible_layers(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        prophet.MoE(**{"dim": 4, "hidden": 4, "num_experts": 8, "group": RecordingCollective(0, 4), **options})


@pytest.mark.parametrize("timeout_s", [0, -1.0])
def test_impossible_time_limits(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        prophet.EngineConfig(timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slots_per_rank": -1}, "slots_per_rank must not be negative"),
        ({"replica_memory_bytes": -1}, "replica_memory_bytes must not be negative"),
        ({"accumulation_steps": 0}, "accumulation_steps must be at least 1"),
        ({"refetch": "keep"}, "refetch must be True or False, got 'keep'"),
    ],
)
def test_impossible_engine_configurations(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        prophet.EngineConfig(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"check_every": 0}, "check_every must be at least 1"),
        ({"schedule": "lazy"}, "schedule must be one of block-wise, look-ahead, operator, blocking, got 'lazy'"),
        (
            {"transfers": "by-mail"},
            "transfers must be one of auto, direct, two-phase, node-once, spread, got 'by-mail'",
        ),
        ({"look_ahead_blocks": 0}, "look_ahead_blocks must be at least 1"),
    ],
)
def test_impossible_experiments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Experiment(**options)


def test_a_planner_that_lacks_the_protocols_defaults() -> None:
    class Bare:
        name = "bare"

        def place(self) -> None: ...

        def split(self) -> None: ...

    with pytest.raises(
        TypeError,
        match=r"a prophet.planner.Planner, got Bare without replicates, withdraws, needs_core: derive",
    ):
        prophet.EngineConfig(planner=Bare())  # type: ignore[arg-type]


def test_a_topology_of_another_size() -> None:
    model = TinyModel()
    config = prophet.EngineConfig(planner=RandomPlanner(), topology=prophet.spec.Topology.uniform(4))
    with pytest.raises(ValueError, match="has 4 ranks, the expert-parallel group has 1"):
        prophet.attach(model, config=config)
    model(torch.arange(3))


@pytest.mark.parametrize("shape", [(3, 5), (5,), (2, 3, 7)])
def test_another_dim(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="has dim 6, got input of shape"):
        prophet.MoE(6, 4, 4)(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_another_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"has torch\.float32 parameters, got {dtype} input"):
        prophet.MoE(6, 4, 4)(torch.zeros(3, 6, dtype=dtype))


def test_layers_of_different_groups() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = prophet.MoE(4, 4, 4, group=RecordingCollective(0, 2))
            self.b = prophet.MoE(4, 4, 4, group=RecordingCollective(0, 4))

    with pytest.raises(ValueError, match="same expert-parallel group"):
        prophet.attach(Two(), config=prophet.EngineConfig(planner=RandomPlanner()))


def test_auxiliary_losses_that_nobody_collects() -> None:
    layer = prophet.MoE(4, 4, 4, gate=prophet.GateConfig(aux_loss="switch"))
    with pytest.raises(RuntimeError, match="collect_losses"):
        layer(torch.zeros(2, 4))
    layer.eval()
    layer(torch.zeros(2, 4))


def test_collecting_twice_at_once() -> None:
    model = TinyModel(gate=prophet.GateConfig(z_loss_weight=0.1))
    with prophet.collect_losses(model) as book:
        with pytest.raises(RuntimeError, match="already active"), prophet.collect_losses(model):
            pass
        model(torch.arange(3))
    assert [(i, n) for i, n, _ in book.entries] == [(None, "z"), (None, "z")]
    with prophet.collect_losses(model) as book:
        pass
    assert book.total().item() == 0
