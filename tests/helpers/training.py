"""Train the tests' model on some ranks, train the oracle on the same batches, and compare step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import prophet
from prophet.engine.config import Experiment
from prophet.engine.step_report import StepReport
from prophet.kernels.choice import Impl
from prophet.planner.base import Planner
from prophet.ranks.collective import Collective
from prophet.ranks.process_group import collective_for
from prophet.ranks.threads import ThreadWorld
from prophet.spec import Bias, Link, Topology
from tests.helpers import oracle
from tests.helpers.support import (
    RandomPlanner,
    TinyModel,
    dense_parameters,
    expert_gradients,
    next_id_loss,
    on_threads,
    random_state,
)

Array = npt.NDArray[Any]
SCALE = 1 / 7  # any constant: a loss summed over tokens is defined for ranks without tokens


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run. shapes: of each rank's ids. favourites: experts that every token prefers.

    ranks_per_node: of nodes that share a port; None for one node. own_cards: every rank has a card instead.
    impl: the kernels that run; Triton's work in float32, the others' in float64 here. device: where the model is.
    """

    ranks: int = 2
    experts_per_rank: int = 2
    top_k: int = 2
    blocks: int = 2
    activation: str = "gelu"
    bias: Bias = True
    dim_out: int | None = None
    gate: dict[str, Any] = field(default_factory=dict)
    favourites: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ((2, 3), (2, 3))
    steps: int = 3
    microbatches: int = 1
    announced: bool = True
    schedule: str = "block-wise"
    transfers: str = "auto"
    ranks_per_node: int | None = None
    own_cards: bool = False
    refetch: bool = False
    look_ahead_blocks: int = 2
    density: float = 0.6
    slots: int = 3
    seed: int = 0
    uses: int = 1
    checkpointing: str | None = None
    lr: float = 0.1
    impl: Impl = "auto"
    device: str = "cpu"

    @property
    def num_experts(self) -> int:
        return self.ranks * self.experts_per_rank

    def gate_config(self) -> prophet.GateConfig:
        # a bias that shifts the selection is there only where balancing by bias is on; the rate is too small
        # to matter
        balances = self.gate.get("assignment") == "sinkhorn"
        rate = {"bias_update_rate": 1e-9} if self.favourites and not balances else {}
        return prophet.GateConfig(**{**rate, **self.gate})

    def oracle(self) -> oracle.OracleConfig:
        gate = self.gate_config()
        return oracle.OracleConfig(
            blocks=self.blocks,
            num_experts=self.num_experts,
            top_k=self.top_k,
            activation=self.activation,
            score=gate.score,
            normalize=gate.normalize,
            scale=gate.scale,
            aux_loss=gate.aux_loss,
            aux_loss_weight=gate.aux_loss_weight,
            z_loss_weight=gate.z_loss_weight,
            assignment=gate.assignment,
            capacity_factor=gate.capacity_factor,
            residual_uses=self.uses,
        )

    def model(self, group: Collective) -> TinyModel:
        dtype = torch.float32 if self.impl == "triton" else torch.float64
        return TinyModel(
            blocks=self.blocks,
            dim=6,
            hidden=5,
            num_experts=self.num_experts,
            top_k=self.top_k,
            group=group,
            seed=self.seed,
            uses=self.uses,
            checkpointing=self.checkpointing,
            activation=self.activation,
            bias=self.bias,
            dim_out=self.dim_out,
            gate=self.gate_config(),
            impl=self.impl,
        ).to(self.device, dtype)

    def state(self) -> dict[str, Tensor]:
        """The whole model's parameters in float64, by their names in a state dict."""
        precise = replace(self, impl="auto", device="cpu")
        state = random_state(precise.model(ThreadWorld(1).collective(0)), self.seed)
        for name, value in state.items():
            if name.endswith("gate.bias"):
                value[list(self.favourites)] = 10.0
        return state

    def ids(self, step: int, microbatch: int) -> list[Tensor]:
        """One batch, by rank."""
        rng = np.random.default_rng([self.seed, step, microbatch])
        return [torch.from_numpy(rng.integers(0, 11, shape)) for shape in self.shapes]

    def engine_config(self, planner: Planner | None = None, **options: Any) -> prophet.EngineConfig:
        return prophet.EngineConfig(
            **{
                "planner": planner or RandomPlanner(self.seed, self.density),
                "slots_per_rank": self.slots,
                "refetch": self.refetch,
                "accumulation_steps": self.microbatches if self.announced else 1,
                **self.machine(),
                **options,
            }
        )

    def machine(self) -> dict[str, Any]:
        """Nodes that share a port, which moves as much as a rank does within its node; one node by default.

        A card moves a tenth of that.
        """
        if self.ranks_per_node is None:
            return {}
        if self.own_cards:
            inter = Link(bytes_per_s=1e9)
            return {"topology": Topology.uniform(self.ranks, ranks_per_node=self.ranks_per_node, inter=inter)}
        port = Topology.uniform(self.ranks, ranks_per_node=self.ranks_per_node, port_bytes_per_s=10e9)
        return {"topology": port}

    def experiment(self, **options: Any) -> Experiment:
        return Experiment(
            **{
                "schedule": self.schedule,
                "transfers": self.transfers,
                "look_ahead_blocks": self.look_ahead_blocks,
                "check_every": 1,
                **options,
            }
        )


@dataclass(frozen=True)
class Step:
    """One rank's step: mean loss over ranks, averaged dense gradients, home experts' gradients."""

    loss: float
    dense: dict[str, Array]
    experts: dict[str, Array]
    report: StepReport | None


_VARIED = {f.name for f in fields(Experiment)}


class Run:
    """A case's model, SGD optimizer and engine on one rank of `group`, to be driven by hand.

    options: fields of `EngineConfig` and `Experiment`.
    """

    def __init__(
        self,
        case: Case,
        group: Collective,
        planner: Planner | None = None,
        *,
        balanced: bool = True,
        hooked: bool = True,
        **options: Any,
    ) -> None:
        self.case, self.group = case, group
        self.model = case.model(group)
        self.model.load_state_dict(case.state())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=case.lr)
        self.loss = torch.zeros((), dtype=torch.float64, device=case.device)
        self._engine: prophet.Engine | None = None
        if balanced:
            config = case.engine_config(planner, **{k: v for k, v in options.items() if k not in _VARIED})
            experiment = case.experiment(**{k: v for k, v in options.items() if k in _VARIED})
            optimizer = self.optimizer if hooked else None
            self._engine = prophet.attach(self.model, optimizer, config=config, experiment=experiment)

    @property
    def engine(self) -> prophet.Engine:
        if self._engine is None:
            raise RuntimeError("this run is not balanced")
        return self._engine

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.loss = torch.zeros((), dtype=torch.float64, device=self.case.device)

    def forward(self, step: int, microbatch: int = 0) -> Tensor:
        """This rank's loss on one microbatch."""
        ids = self.case.ids(step, microbatch)[self.group.rank].to(self.case.device, non_blocking=True)
        with prophet.collect_losses(self.model) as book:
            loss = next_id_loss(self.model(ids), ids, SCALE)
        return loss + book.total() if book.entries else loss

    def backward(self, step: int, microbatch: int = 0) -> None:
        loss = self.forward(step, microbatch)
        loss.backward()
        self.loss += loss.detach()

    def averaged(self) -> Step:
        """Average over ranks as DDP would, and record."""
        average(self.model, self.group, self.loss)
        return Step(*measure(self.model, self.loss), None)

    def step(self) -> Step:
        """Average over ranks as DDP would, record, and let the optimizer go on."""
        seen = self.averaged()
        self.optimizer.step()
        return replace(seen, report=self._engine.last_step if self._engine else None)

    def whole_step(self, step: int) -> Step:
        self.zero_grad()
        for microbatch in range(self.case.microbatches):
            self.backward(step, microbatch)
        return self.step()

    def step_in_two_passes(self, step: int) -> Step:
        """One step of one microbatch, with two backward passes through its graph."""
        self.zero_grad()
        loss = self.forward(step)
        (loss / 4).backward(retain_graph=True)
        (loss * 3 / 4).backward()
        self.loss += loss.detach()
        return self.step()

    def close(self) -> None:
        if self._engine is not None:
            if self._engine.pool.in_use_bytes:
                raise RuntimeError("replicas outlived their step")
            self._engine.close()


_SHAPES = ((3,), (0,), (2,), (5,), (1,), (2,), (4,), (3,))


def varied_cases(ranks: int) -> list[Case]:
    """Some of everything: threads draw it all at random, here it need only cross process boundaries."""
    shapes = _SHAPES[:ranks]
    nested = tuple((2, *s) for s in shapes)
    aux: dict[str, Any] = {"aux_loss": "gshard", "aux_loss_weight": 0.3, "z_loss_weight": 0.2}
    return [
        Case(ranks=ranks, top_k=1, experts_per_rank=1, shapes=shapes, seed=1),
        Case(ranks=ranks, top_k=2, experts_per_rank=2, activation="swiglu", bias=False, shapes=nested, seed=2),
        Case(ranks=ranks, top_k=2, favourites=(0, 1), shapes=nested, gate=aux, density=1.0, slots=32, seed=3),
        Case(
            ranks=ranks,
            top_k=2,
            experts_per_rank=4,
            schedule="blocking",
            gate={"score": "sigmoid", "normalize": False, "aux_loss": "switch"},
            shapes=shapes,
            microbatches=2,
            seed=4,
        ),
    ]


def train(case: Case, group: Collective, planner: Planner | None = None, *, balanced: bool = True) -> list[Step]:
    """Train on one rank of `group` with SGD; gradients are recorded before the optimizer uses them."""
    run = Run(case, group, planner, balanced=balanced)
    steps = [run.whole_step(step) for step in range(case.steps)]
    run.close()
    return steps


def average(model: torch.nn.Module, group: Collective, loss: Tensor) -> None:
    """What DDP would do: the mean over ranks of the loss and of the dense gradients, in place."""
    grads = [p.grad for p in dense_parameters(model).values() if p.grad is not None]
    group.all_reduce_mean_([loss, *grads])


def measure(model: torch.nn.Module, loss: Tensor) -> tuple[float, dict[str, Array], dict[str, Array]]:
    """Loss, dense and expert gradients as arrays."""
    dense = {n: p.grad.cpu().numpy().copy() for n, p in dense_parameters(model).items() if p.grad is not None}
    return float(loss.detach()), dense, {n: g.cpu().numpy() for n, g in expert_gradients(model).items()}


def expected(case: Case) -> list[tuple[float, dict[str, Array]]]:
    """The oracle's loss and gradients of every step."""
    state, config = case.state(), case.oracle()
    steps = []
    for step in range(case.steps):
        batches = [case.ids(step, m) for m in range(case.microbatches)]
        loss, grads = oracle.gradients(state, batches, config, SCALE)
        steps.append((float(loss), {n: g.numpy() for n, g in grads.items()}))
        for name, grad in grads.items():
            state[name] = state[name] - case.lr * grad
    return steps


DIVERGED = 100.0  # an element of a gradient: the parameter then moves by about its own size


def compare(
    wanted: Sequence[tuple[float, dict[str, Array]]], by_rank: Sequence[Sequence[Step]], atol: float = 1e-10
) -> None:
    """Raise unless every step's loss and every parameter's gradient agree on every rank to `atol`.

    Where values are larger than 1 that is relative to the largest of them: some random models diverge. Such a model is
    compared up to the step that makes it diverge: after it, roundings decide.
    """
    for at, (loss, grads) in enumerate(wanted):
        steps = [rank[at] for rank in by_rank]
        union = {name for s in steps for name in (*s.dense, *s.experts)}
        if union != set(grads):
            raise AssertionError(f"step {at}: parameters differ: {sorted(union ^ set(grads))}")
        for rank, step in enumerate(steps):
            limit = atol * max(1.0, abs(loss))
            np.testing.assert_allclose(step.loss, loss, rtol=0, atol=limit, err_msg=f"loss, step {at}, rank {rank}")
            for name, grad in {**step.dense, **step.experts}.items():
                where = f"{name}, step {at}, rank {rank}"
                limit = atol * max(1.0, float(np.abs(grads[name]).max(initial=0.0)))
                np.testing.assert_allclose(grad, grads[name], rtol=0, atol=limit, err_msg=where)
        if max(float(np.abs(g).max(initial=0.0)) for g in grads.values()) > DIVERGED:
            return


def check_on_threads(case: Case, planner: Planner | None = None, *, atol: float = 1e-10) -> list[list[Step]]:
    """Train `case` on thread ranks, compare it with the oracle, and return what each rank saw."""
    by_rank = on_threads(case.ranks, lambda group: train(case, group, planner))
    compare(expected(case), by_rank, atol)
    return by_rank


def train_in_process(case: Case, **options: Any) -> list[Step]:
    """`train` over all processes; the reports stay behind."""
    steps = train(case, collective_for(None), **options)
    return [Step(s.loss, s.dense, s.experts, None) for s in steps]
