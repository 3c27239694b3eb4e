"""The drop-in Mixture-of-Experts layer.

Shape legend: N tokens on this rank, K top-k, E experts, m experts per rank, R ranks, D model dim, A choices
sent, B rows received.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from prophet.errors import PlanMismatch, RoutingError
from prophet.experts.bank import ExpertBank, Replica
from prophet.experts.gate import (
    Gate,
    GateConfig,
    Router,
    Routing,
)
from prophet.kernels.choice import Impl
from prophet.kernels.grouped_ffn import grouped_ffn
from prophet.kernels.permute import permute, unpermute
from prophet.kernels.split_apply import inverse, send_order
from prophet.layer.dispatch import Route, all_to_all, on_backward
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective, Operation
from prophet.ranks.process_group import collective_for
from prophet.scheduler.actions import WindowKind
from prophet.scheduler.windows import Stopwatch
from prophet.spec import ACTIVATIONS, Activation, IntArray, Placement, Split, check_experts_per_rank, odd_ones_out

HEADER = 7  # integers before the counts: finite, step, tokens, dropped, placement digest, last split digest, stale


def recomputing() -> bool:
    """Whether a forward pass runs inside a backward pass, as activation checkpointing does."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass(frozen=True, slots=True)
class LayerStats:
    """What one forward pass of a layer did, on all ranks.

    load: [R, E] choices by source rank and expert. rank_load: [R] rows computed by every rank. dropped: choices dropped
    for lack of capacity, on all ranks.
    """

    load: IntArray
    rank_load: IntArray
    dropped: int

    @property
    def max_mean(self) -> float:
        """Largest rank load over the mean; 1.0 is perfect."""
        total = int(self.rank_load.sum())
        return float(self.rank_load.max()) * self.rank_load.size / total if total else 1.0


@dataclass(slots=True)
class Agreement:
    """What all ranks know once counts are exchanged: load [R, E], extra [R, E] or None, tokens, dropped."""

    load: IntArray
    extra: IntArray | None
    tokens: int
    dropped: int


class Port(Protocol):
    """How a layer talks to whoever balances it. `index` is the layer's place in the order of execution."""

    index: int | None
    stopwatch: Stopwatch

    def ensure_step(self) -> None:
        """A training forward pass has reached the layer."""

    def header(self, training: bool) -> tuple[int, int, int]:
        """Step, digest of the placement, digest of the previous split: equal on all ranks."""

    def notes(self, training: bool) -> list[int]:
        """What this rank adds to the exchange of counts; as many integers on every rank and in every pass."""

    def noted(self, table: IntArray) -> None:
        """The notes of all ranks, [R, n], of a training pass."""

    def stale(self, training: bool) -> bool:
        """Whether this rank's home parameters have changed since they were sent to their replicas."""

    def refresh(self) -> None:
        """Some rank's replicas are stale: send them again. Called on all ranks alike."""

    def plan(self, load: IntArray, training: bool) -> tuple[Placement, Split]:
        """The placement in force, and the exact split of `load` [R, E] over it."""

    def observe(self, load: IntArray, split: Split, choices: IntArray, dropped: int) -> None:
        """The counts of a training microbatch; `choices` [E] are those of all ranks before any drop."""

    def replicas(self, training: bool) -> list[Replica]:
        """This rank's replicas, their parameters in place."""

    def enter(self, kind: WindowKind) -> None:
        """A window of this layer's block begins."""

    def backward_ran(self) -> None:
        """The experts' backward pass begins."""


class _PlainPort:
    """Plain expert parallelism: no replicas, nothing observed."""

    index: int | None = None

    def __init__(self, ranks: int, experts: int) -> None:
        self.stopwatch = Stopwatch()
        self._placement = Placement.homes_only(experts, ranks)

    def ensure_step(self) -> None: ...

    def header(self, training: bool) -> tuple[int, int, int]:
        return 0, 0, 0

    def notes(self, training: bool) -> list[int]:
        return []

    def noted(self, table: IntArray) -> None: ...

    def stale(self, training: bool) -> bool:
        return False

    def refresh(self) -> None: ...

    def plan(self, load: IntArray, training: bool) -> tuple[Placement, Split]:
        return self._placement, Split.to_homes(load, self._placement)

    def observe(self, load: IntArray, split: Split, choices: IntArray, dropped: int) -> None: ...

    def replicas(self, training: bool) -> list[Replica]:
        return []

    def enter(self, kind: WindowKind) -> None: ...

    def backward_ran(self) -> None: ...


def plain_port(layer: MoE) -> Port:
    """A port for `layer` that balances nothing."""
    return _PlainPort(layer.collective.size, layer.num_experts)


@dataclass(slots=True)
class LossBook:
    """Auxiliary losses of one forward pass, in the order in which the layers ran."""

    entries: list[tuple[int | None, str, Tensor]] = field(default_factory=list)

    def total(self) -> Tensor:
        """Their sum, to be added to the loss; a zero where there are none."""
        if not self.entries:
            return torch.zeros(())
        if torch.is_grad_enabled() and not all(loss.requires_grad for _, _, loss in self.entries):
            raise RuntimeError(
                "an auxiliary loss was computed without a graph; reentrant activation checkpointing does that: "
                "call torch.utils.checkpoint with use_reentrant=False"
            )
        return torch.stack([loss for _, _, loss in self.entries]).sum()


class MoE(nn.Module):
    """Feed-forward layer of `num_experts` experts, of which every token visits `top_k`.

    dim, hidden: sizes of one expert. activation: a name from `prophet.spec.ACTIVATIONS`. bias: whether experts have
    biases. gate: how tokens are routed. group: the expert-parallel group; None means all processes, or a single rank
    where `torch.distributed` is not initialised. A `prophet.comm.Collective` may be given instead. impl: which kernels
    run ("auto": Triton on a GPU, library products elsewhere; "naive": their definitions).

    Every rank is home to num_experts / ranks experts. Under expert parallelism the ranks are data-parallel for all
    other parameters; expert gradients come out as the *mean* over ranks, as DDP leaves the others, so one optimizer
    step fits both. On its own the layer is plain expert parallelism; `prophet.attach` balances it, and
    keeps DDP away from the experts.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        top_k: int = 2,
        *,
        activation: Activation = "gelu",
        bias: bool = True,
        gate: GateConfig | None = None,
        group: dist.ProcessGroup | Collective | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        if dim < 1 or hidden < 1:
            raise ValueError(f"dim and hidden must be positive, got {dim} and {hidden}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        collective = collective_for(group, timeout_s=timeout_s)
        ranks = collective.size
        m = check_experts_per_rank(num_experts, ranks)
        router = Gate(dim, num_experts, top_k, gate, impl=impl)
        experts = ExpertBank(
            dim,
            hidden,
            m,
            first_expert=collective.rank * m,
            total_experts=num_experts,
            ep_size=ranks,
            activation=activation,
            bias=bias,
        )
        self._assemble(router, experts, top_k, collective, impl)

    def _assemble(self, router: Router, experts: ExpertBank, top_k: int, collective: Collective, impl: Impl) -> None:
        """Put the parts together; what a layer is made of where `__init__` does not make its parts."""
        self.collective = collective
        self.replicas: Collective | None = (
            None  # those with the same experts; see prophet.engine.parallel.ExpertReplicas
        )
        self.dim, self.hidden = experts.dim, experts.hidden
        self.num_experts, self.top_k = experts.total_experts, top_k
        self.impl: Impl = impl
        self.gate = router
        self.experts = experts
        self.stats: LayerStats | None = None
        self._port: Port = plain_port(self)
        self._book: LossBook | None = None

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, hidden={self.hidden}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"rank={self.collective.rank} of {self.collective.size}"
        )

    @property
    def label(self) -> str:
        """How messages call this layer."""
        return "MoE layer" if self._port.index is None else f"MoE layer {self._port.index}"

    def signature(self) -> str:
        """What must be equal on all ranks for the layer to work, as text."""
        e = self.experts
        return (
            f"dim={self.dim} hidden={self.hidden} num_experts={self.num_experts} top_k={self.top_k} "
            f"activation={e.activation} bias={e.b_in is not None} dtype={e.w_in.dtype} gate={self.gate.config}"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `x` [..., D]; returns the same shape. Collective over the group's ranks."""
        return self._apply_experts(x, self.gate)

    @torch._compile._disable_dynamo  # counts decide shapes: torch.compile compiles what is around the layer
    def _apply_experts(self, x: Tensor, decide: Callable[[Tensor], Routing]) -> Tensor:
        """The layer on `x` [..., D], where `decide` says for tokens [N, D] which experts they visit."""
        if x.shape[-1] != self.dim:
            raise ValueError(f"{self.label} has dim {self.dim}, got input of shape {list(x.shape)}")
        self.experts.check_parameters()
        tokens = x.reshape(-1, self.dim)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        else:
            dtype = self.experts.w_in.dtype
            if x.dtype != dtype:
                raise ValueError(f"{self.label} has {dtype} parameters, got {x.dtype} input")
        port, training = self._port, self.training
        watch = port.stopwatch
        if training and not recomputing():
            port.ensure_step()
        tokens = self._edge(tokens, "BNEC_ENDED")

        before = time.perf_counter()
        routing = decide(tokens)
        watch.add("gate", time.perf_counter() - before)
        known = self._agree(routing, tokens.shape[0], training)
        before = time.perf_counter()
        placement, split = port.plan(known.load, training)
        route = Route.build(split, placement, self.collective.rank, self.experts.first_expert, self.experts.experts)
        watch.add("split", time.perf_counter() - before)
        self._record(routing, known, split, training)
        route = route.to(x.device)

        order, position = send_order(routing.ids, routing.kept, route.send_ED, sum(route.send_rows), impl=self.impl)
        rows = permute(tokens.to(dtype), order, position, impl=self.impl)
        rows = self._exchange(rows, route.send_rows, route.recv_rows, "dispatch")
        groups = None
        if route.to_groups is not None:
            groups = route.to_groups, inverse(route.to_groups, route.to_groups.numel()).unsqueeze(1)
            rows = permute(rows, *groups, impl=self.impl)
        rows = self._edge(rows, "BEC_ENDED")
        replicas = port.replicas(training)
        self._window("FEC")
        before = time.perf_counter()
        out = grouped_ffn(
            rows,
            route.sizes,
            self.experts.stacked_weights(),
            self.experts.activation,
            replicas=[r.weights for r in replicas],
            replica_grads=[r.weight_grads() for r in replicas],
            grad_scale=self.experts.grad_scale,
            impl=self.impl,
        )
        watch.add("expert", time.perf_counter() - before)
        out = self._edge(out, "BEC")
        if groups is not None:
            out = unpermute(out, *groups, impl=self.impl)
        rows = self._exchange(out, route.recv_rows, route.send_rows, "combine")
        y = unpermute(rows, order, position, routing.weights, impl=self.impl)
        self._window("FNEC")
        return y.view(*x.shape[:-1], self.dim)

    # --- parts of the forward pass ---

    def _agree(self, routing: Routing, tokens: int, training: bool) -> Agreement:
        """Exchange counts with all ranks, and check that all are in the same place and sane."""
        config = self.gate.config
        extra = None
        if config.aux_loss == "gshard":
            extra = routing.first_choice_counts()
        elif routing.kept is not None and (config.aux_loss != "none" or config.bias_update_rate > 0):
            extra = routing.choice_counts()
        header = [0, 0, tokens, 0, 0, 0, int(self._port.stale(training))]
        header[1], header[4], header[5] = self._port.header(training)
        notes = self._port.notes(training)
        row = torch.tensor(header + notes, dtype=torch.int64).to(routing.ids.device, non_blocking=True)
        row[0] = routing.finite
        row[3] = routing.dropped()
        parts = [row, routing.counts()] + ([] if extra is None else [extra])
        watch, before = self._port.stopwatch, time.perf_counter()
        op = Operation("exchange of counts", self._port.index)
        table = self.collective.all_gather(torch.cat(parts), op=op).cpu().numpy()
        watch.add("counts", time.perf_counter() - before)
        self._check_header(table[:, :HEADER])
        if training and not recomputing():
            self._port.noted(table[:, HEADER : HEADER + len(notes)])
        if table[:, 6].any():
            self._port.refresh()
        tokens, dropped = int(table[:, 2].sum()), int(table[:, 3].sum())
        table = table[:, HEADER + len(notes) :]
        counts = table[:, : self.num_experts]
        return Agreement(
            load=np.ascontiguousarray(counts, dtype=np.int64),
            extra=None if extra is None else table[:, self.num_experts :],
            tokens=tokens,
            dropped=dropped,
        )

    def _check_header(self, header: IntArray) -> None:
        step = int(header[self.collective.rank, 1])
        broken = np.flatnonzero(header[:, 0] == 0).tolist()
        if broken:
            raise RoutingError(
                f"{self.label}, step {step}: the gate's scores are NaN or infinite on rank(s) {broken}, "
                f"or a router of the model's own chose experts that do not exist; expected finite scores"
            )
        for column, what in ((1, "step"), (4, "placement"), (5, "previous split")):
            differ = odd_ones_out(header[:, column])
            if differ:
                shown = f" ({header[:, column].tolist()} by rank)" if column == 1 else ""
                raise PlanMismatch(
                    f"{self.label}, step {step}: the {what} of rank(s) {differ} differs from the other "
                    f"ranks'{shown}; all ranks must run the same configuration and versions"
                )

    def _record(self, routing: Routing, known: Agreement, split: Split, training: bool) -> None:
        """Keep statistics, hand out auxiliary losses; a recomputed forward pass has done both already.

        It computes the losses all the same: checkpointing expects it to save what the first pass saved.
        """
        again = recomputing()
        if not again:
            self.stats = LayerStats(known.load, split.rank_load(), known.dropped)
        if not training:
            return
        config = self.gate.config
        if not again:
            extra = None if config.aux_loss == "gshard" else known.extra
            choices: IntArray = (known.load if extra is None else extra).sum(axis=0)
            self._port.observe(known.load, split, choices, known.dropped)
        if config.aux_loss == "none" and config.z_loss_weight == 0:
            return
        if self._book is None and not again:
            raise RuntimeError(
                f"{self.label} has an auxiliary loss that nothing collects: run the forward pass inside "
                f"`with prophet.collect_losses(model) as losses:` and add `losses.total()` to the loss"
            )
        counts = known.load if known.extra is None else known.extra
        total = torch.from_numpy(counts.sum(axis=0)).to(routing.logits.device, non_blocking=True)
        losses = self.gate.losses(routing, total, known.tokens, self.collective.size)
        if self._book is not None and not again:
            self._book.entries += [(self._port.index, name, loss) for name, loss in losses.items()]

    def _exchange(self, rows: Tensor, send: list[int], recv: list[int], name: str) -> Tensor:
        return all_to_all(
            rows,
            send,
            recv,
            collective=self.collective,
            name=name,
            layer=self._port.index,
            stopwatch=self._port.stopwatch,
        )

    def _window(self, kind: WindowKind) -> None:
        if self.training and not recomputing():
            self._port.enter(kind)

    def _edge(self, x: Tensor, what: str) -> Tensor:
        """Tell the port when the backward pass crosses this point."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        return on_backward(x, lambda: self._crossed(what))

    def _crossed(self, what: str) -> None:
        port = self._port
        if what == "BEC":
            port.backward_ran()
            port.enter("BEC")
            self._bec_began = time.perf_counter()
        elif what == "BEC_ENDED":
            port.stopwatch.add("expert", time.perf_counter() - self._bec_began)
        else:
            # this block's backward pass is over: the block before it starts with its non-MoE layers
            port.enter("BNEC")


def moe_layers(model: nn.Module) -> list[MoE]:
    """The model's MoE layers in the order in which it registered them."""
    return [m for m in model.modules() if isinstance(m, MoE)]


@contextmanager
def collect_losses(model: nn.Module) -> Iterator[LossBook]:
    """Collect the auxiliary losses of all MoE layers of `model` that run inside the context.

    >>> with prophet.collect_losses(model) as losses:  # doctest: +SKIP
    ...     loss = criterion(model(x), y) + losses.total()
    """
    book = LossBook()
    layers = moe_layers(model)
    if any(layer._book is not None for layer in layers):
        raise RuntimeError("collect_losses is already active for a layer of this model")
    for layer in layers:
        layer._book = book
    try:
        yield book
    finally:
        for layer in layers:
            layer._book = None
