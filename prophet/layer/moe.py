"""The drop-in Mixture-of-Experts layer.

Shape legend, also of suffixes of names (`tokens_ND`): N tokens on this rank, K top-k, E experts, m experts per rank, R
ranks, D model dim, O output dim, A choices sent, B rows received.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from prophet.experts.bank import Bank, RunsReplicas
from prophet.experts.build import build_bank
from prophet.experts.feed_forward import FeedForwardBank
from prophet.experts.gate import Gate, GateConfig, Router, Routing
from prophet.kernels.choice import Impl
from prophet.kernels.permute import permute, unpermute
from prophet.kernels.split_apply import order_of_runs, send_order
from prophet.layer.counts import Counts, exchange_counts
from prophet.layer.dispatch import Route, all_to_all, check_plain_autograd, on_backward
from prophet.layer.expert_watch import ExpertWatch
from prophet.layer.port import Pass, PlainPort, Port
from prophet.layer.rows import gather, part_of, take
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for
from prophet.spec import Activation, Bias, IntArray, Split, check_experts_per_rank, parts_of


@dataclass(frozen=True, slots=True)
class LayerStats:
    """What one forward pass of a layer did, on all ranks.

    Attributes:
        load: Choices by source rank and expert, [R, E].
        rank_load: Rows computed by every rank, [R].
        dropped: Choices dropped for lack of capacity, on all ranks together.
    """

    load: IntArray
    rank_load: IntArray
    dropped: int

    @property
    def max_mean(self) -> float:
        """The largest rank load over the mean; 1.0 is perfect."""
        total = int(self.rank_load.sum())
        return float(self.rank_load.max()) * self.rank_load.size / total if total else 1.0


@dataclass(slots=True)
class LossBook:
    """Auxiliary losses of one forward pass.

    Attributes:
        entries: Layer, name of the loss, and loss, in the order in which the layers ran.
    """

    entries: list[tuple[int | None, str, Tensor]] = field(default_factory=list)

    def total(self) -> Tensor:
        """Return the sum of the losses, to be added to the model's loss; a zero where there are none.

        Raises:
            RuntimeError: A loss has no graph, so adding it would train nothing.
        """
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

    Every rank is home to num_experts / ranks experts. Under expert parallelism the ranks are data-parallel for all
    other parameters. Expert gradients come out as the *mean* over ranks, as DDP leaves the others, so one optimizer
    step fits both. By itself the layer is plain expert parallelism; `prophet.attach` balances it, and keeps DDP away
    from the experts.

    Args:
        dim: D, the size of a token.
        hidden: Inner size of feed-forward experts; give this or `expert`.
        num_experts: E, over all ranks; a multiple of their number.
        top_k: K, how many experts a token visits.
        expert: Makes one expert: a module from rows [n, dim] to rows [n, any]. Expert e starts alike at any number of
            ranks.
        activation: Of feed-forward experts: a name from `prophet.spec.ACTIVATIONS`, or one with a limit, such as
            "swiglu(limit=10)".
        bias: Whether feed-forward experts have biases; "in" or "out" for one alone.
        dim_out: O, the size of feed-forward experts' answers; None for `dim`.
        gate: How tokens are routed; None for the defaults of `GateConfig`.
        group: The expert-parallel group, or a `prophet.comm.Collective`. None means all processes, or a single rank
            where `torch.distributed` is not initialised.
        timeout_s: Seconds to wait for other ranks before an error names them.
        impl: Which kernels run: "auto" (Triton on a GPU, library products elsewhere) or "naive" (their definitions).

    Raises:
        ValueError: Arguments contradict each other, or E is no multiple of the number of ranks.
    """

    # its experts have drawn their values, one by one, so they differ until something mixes them
    initialised_here = True

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        num_experts: int = 0,
        top_k: int = 2,
        *,
        expert: Callable[[], nn.Module] | None = None,
        activation: Activation = "gelu",
        bias: Bias = True,
        dim_out: int | None = None,
        gate: GateConfig | None = None,
        group: dist.ProcessGroup | Collective | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        if (hidden is None) == (expert is None):
            raise ValueError("expected either hidden, the size of feed-forward experts, or expert, which makes one")
        if expert is not None and (activation, bias, dim_out) != ("gelu", True, None):
            raise ValueError(
                "activation, bias and dim_out belong to feed-forward experts: leave them out beside expert"
            )
        if dim < 1 or (hidden is not None and hidden < 1):
            raise ValueError(f"dim and hidden must be positive, got {dim} and {hidden}")
        if dim_out is not None and dim_out < 1:
            raise ValueError(f"dim_out must be positive, got {dim_out}")
        # raises here for an unknown name, before anything is built or communicated
        parts_of(activation)
        collective = collective_for(group, timeout_s=timeout_s)
        ranks = collective.size
        m = check_experts_per_rank(num_experts, ranks)
        router = Gate(dim, num_experts, top_k, gate, impl=impl)
        first = collective.rank * m
        experts: Bank
        if hidden is None:
            assert expert is not None
            experts = build_bank(expert, dim=dim, total_experts=num_experts, first_expert=first, held=m, ep_size=ranks)
        else:
            experts = FeedForwardBank(
                dim,
                hidden,
                m,
                first_expert=first,
                total_experts=num_experts,
                ep_size=ranks,
                activation=activation,
                bias=bias,
                dim_out=dim_out,
            )
        self._assemble(router, experts, top_k, collective, impl)

    def _assemble(self, router: Router, experts: Bank, top_k: int, collective: Collective, impl: Impl) -> None:
        """Put the parts together; subclasses whose `__init__` does not make its parts call it with theirs."""
        self.collective = collective
        # the ranks with the same experts; `ExpertReplicas` sets it
        self.replicas: Collective | None = None
        # ranks that are given the same tokens: each takes a part of them to its experts
        self.alike: Collective | None = None
        # `prophet_deepspeed` sets it
        self.known_to_deepspeed = False
        self.dim, self.dim_out = experts.dim, experts.dim_out
        self.num_experts, self.top_k = experts.total_experts, top_k
        self.impl: Impl = impl
        self.gate = router
        self.experts = experts
        self.expert_watch = ExpertWatch(experts, initialised_here=self.initialised_here)
        module: Any = self  # whose hooks torch has not annotated
        # loaded experts may be equal on purpose: the watch has to start from them
        module.register_load_state_dict_post_hook(_loaded)
        self.stats: LayerStats | None = None
        # place among the group's layers that nobody balances, by their first runs
        self._number: int | None = None
        self.port: Port = self.plain_port()
        self._book: LossBook | None = None
        # called with this layer when its experts' backward pass begins, rows or not; the same on all ranks
        self.on_backward: Callable[[MoE], None] | None = None

    def keys_prefix(self, name: str) -> str:
        """Return what the experts' keys in a state dict begin with; `name` is this layer's, with a dot, or nothing."""
        return f"{name}experts."

    def names_prefix(self, name: str) -> str:
        """Return what the experts' parameters' names begin with; `name` is this layer's, with a dot, or nothing."""
        return f"{name}experts."

    def regroup(self, group: Collective, replicas: Collective | None, alike: Collective | None = None) -> None:
        """Share the experts over the ranks of another `group` from now on, between two steps.

        Whoever calls it exchanges the experts' parameters for those that this rank has then. Nobody may balance the
        layer meanwhile. The mean of the experts' gradients over `group` and `replicas` is that of all tokens.

        Args:
            group: The ranks that share the experts from now on.
            replicas: The ranks with the same experts as this one; None without any.
            alike: The ranks that are given the same tokens, of which each takes a part. They are neighbours in `group`
                where its size is a multiple of theirs. Experts that are modules compute all tokens on each of them.
        """
        self.experts.share_over(group.rank, group.size)
        self.collective, self.replicas = group, replicas
        self.alike = alike if isinstance(self.experts, FeedForwardBank) else None
        self.port, self._number = self.plain_port(), None
        # gradients so far were those of other experts
        self.expert_watch.remember()

    def plain_port(self) -> Port:
        """Return a port that balances nothing."""
        return PlainPort(self.collective.size, self.num_experts, self.expert_watch)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"rank={self.collective.rank} of {self.collective.size}"
        )

    @property
    def label(self) -> str:
        """What messages call this layer."""
        return "MoE layer" if self.port.index is None else f"MoE layer {self.port.index}"

    def signature(self) -> str:
        """Return, as text, what must be equal on all ranks for the layer to work."""
        return f"num_experts={self.num_experts} top_k={self.top_k} {self.experts.signature()} gate={self.gate.config}"

    def check(self) -> None:
        """Raise ValueError unless the experts can be trained as they are."""
        self.experts.check_parameters()

    def set_deepspeed_parallelism(self, *_: object) -> None:
        """Refuse to be trained by DeepSpeed alone, which calls this and would train the experts wrongly."""
        if not self.known_to_deepspeed:
            raise RuntimeError(
                f"{self.label}: DeepSpeed alone would average its experts over ranks that hold different ones: `import "
                f'prophet_deepspeed` and give the configuration a "prophet" section'
            )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer; collective over the group's ranks, forward and backward.

        Args:
            x: Tokens [..., D] of this rank.

        Returns:
            Answers [..., O].
        """
        return self._apply_experts(x, self.gate)

    # counts decide shapes: torch.compile compiles what is around the layer
    @torch._compile._disable_dynamo
    def _apply_experts(self, x: Tensor, decide: Callable[[Tensor], Routing]) -> Tensor:
        """Apply the layer to `x` [..., D]; `decide` returns, for tokens [N, D], which experts they visit."""
        check_plain_autograd(itertools.chain((x,), self.parameters()))
        dtype = self._checked_dtype(x)
        port, watch = self.port, self.port.stopwatch
        forward = Pass.now(self.training)
        port.begin(forward)
        # this block's backward pass ends here: the block before it starts with its non-MoE layers
        tokens_ND = on_backward(x.reshape(-1, self.dim), lambda: self.port.window("BNEC"))

        with watch("gate"):
            routing = decide(tokens_ND)
        # a router of the user's may have made a tangent that the parameters did not have
        check_plain_autograd((routing.weights,))
        chosen, every = routing, len(tokens_ND)
        if self.alike is not None:
            # the router has seen all tokens, so that its losses are whole; the experts see this rank's part
            tokens_ND, routing = take(tokens_ND, self.alike, "tokens' part"), self._part(routing)
        counts = self._exchange_counts(routing, tokens_ND.shape[0], forward)
        # before the split: replicas that have become stale must be sent again, which the port learns here
        port.agreed(counts)
        placement, split = port.split(counts)
        if counts.experts is not None:
            # a layer that nobody balances knows no step of training, only optimizer steps
            step = self.expert_watch.updates if port.index is None else int(counts.step[self.collective.rank])
            self.expert_watch.compare(counts.experts, f"{self.label}, step {step}")
        with watch("split"):
            rank, bank = self.collective.rank, self.experts
            # on the host: buffers of the all-to-alls are sized by these counts
            route = Route.build(split, placement, rank, bank.first_expert, bank.experts)
        route = route.to(x.device)

        order_A, position_NK = send_order(
            routing.ids, routing.kept, route.send_ED, sum(route.send_rows), impl=self.impl
        )
        # `rows` keeps one name through its shapes, so that each buffer is free once the next is there
        # [A, D]: one row per choice that is sent, by destination
        rows = permute(tokens_ND.to(dtype), order_A, position_NK, impl=self.impl)
        # what nothing waits for comes only now, when a device has work
        port.remember(counts, split)
        # `chosen` and not the part: the loss is about all tokens that this rank's router has seen
        self._account(chosen, counts, split, forward)
        # [B, D]: rows that this rank computes, by source
        rows = all_to_all(rows, route.send_rows, route.recv_rows, "dispatch", self._move)
        groups = None
        if route.runs is not None:
            # each group's rows in one run, as the kernels take them; undone after the experts
            order, position = order_of_runs(route.runs, len(rows), impl=self.impl)
            groups = order, position.unsqueeze(1)
            rows = permute(rows, *groups, impl=self.impl)
        out = self._run_experts(rows, route)
        if groups is not None:
            out = unpermute(out, *groups, impl=self.impl)
        # [A, O]: answers, in the order in which the choices were sent
        rows = all_to_all(out, route.recv_rows, route.send_rows, "combine", self._move)
        # the backward pass may enter through the weights alone, as where the experts are frozen: `create_graph` is
        # refused there as well
        weights = on_backward(routing.weights)
        y_NO = unpermute(rows, order_A, position_NK, weights, impl=self.impl)
        if self.alike is not None:
            # every rank of `alike` goes on with all tokens, as it came
            y_NO = gather(y_NO, every, self.alike, "answers")
        # from here on other work computes, under which the next block's transfers may hide
        port.window("FNEC")
        return y_NO.view(*x.shape[:-1], bank.dim_out)

    # --- parts of the forward pass ---

    def _checked_dtype(self, x: Tensor) -> torch.dtype:
        """Return the precision in which rows travel; raises ValueError for input that does not fit the layer."""
        if x.shape[-1] != self.dim:
            raise ValueError(f"{self.label} has dim {self.dim}, got input of shape {list(x.shape)}")
        self.experts.check_parameters()
        dtype = self.experts.row_dtype(x)
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"{self.label} has {dtype} parameters, got {x.dtype} input")
        return dtype

    def _part(self, routing: Routing) -> Routing:
        """Return what the router has decided of this rank's part of the tokens that all `alike` are given."""
        assert self.alike is not None
        mine = part_of(len(routing.ids), self.alike)
        weights = take(routing.weights, self.alike, "weights' part")
        kept = None if routing.kept is None else routing.kept[mine]
        logits = routing.logits[mine].detach()
        # `counted` holds the choices of all tokens, and the logits are needed for their number of experts alone
        return replace(routing, ids=routing.ids[mine], weights=weights, kept=kept, logits=logits, counted=None)

    def _exchange_counts(self, routing: Routing, tokens: int, forward: Pass) -> Counts:
        """Exchange counts with all ranks, and check that all are in the same place and sane; collective."""
        config, port = self.gate.config, self.port
        extra = None
        if config.aux_loss == "gshard":
            extra = routing.first_choice_counts()
        # the bias and the Switch loss are about choices before any drop, which the load lacks
        elif routing.kept is not None and (config.aux_loss != "none" or config.bias_update_rate > 0):
            extra = routing.choice_counts()
        place = port.index
        if place is None:
            # numbered at its first run: without an engine nobody else knows the layers' order
            if self._number is None:
                self._number = self.collective.frames.next_layer()
            place = self._number
        row = port.header()
        if forward is Pass.TRAINING and self.collective.size > 1:
            row = replace(row, experts=self.expert_watch.report(routing.ids.device, plain=port.index is None))
        counts = exchange_counts(
            row,
            routing,
            tokens,
            extra=extra,
            first_choices=config.aux_loss == "gshard",
            collective=self.collective,
            layer=port.index,
            place=place,
            stopwatch=port.stopwatch,
        )
        counts.check(self.collective.rank, self.label)
        return counts

    def _run_experts(self, rows: Tensor, route: Route) -> Tensor:
        """Run the experts on `rows` [B, D], which lie in the groups of `route`: homes first, then replicas."""
        port, watch, bank = self.port, self.port.stopwatch, self.experts
        apart, copies = port.apart(), route.sizes[bank.experts :]
        # backward there is no block of code to time: two hooks start and stop the clock
        backward = watch("expert")

        def begin_backward() -> None:
            self.port.window("BEC")
            # without replicas here their gradients are complete now: other ranks' can come
            if apart and not copies:
                self.port.copies_done()
            if self.on_backward is not None:
                self.on_backward(self)
            backward.start()

        def end_backward() -> None:
            backward.stop()
            if apart:
                self.port.copies_done()

        rows = on_backward(rows, end_backward)
        if apart and isinstance(bank, RunsReplicas):
            out = self._run_apart(bank, rows, route)
        else:
            # may wait for Trans, so it comes before the window whose compute is measured
            replicas = port.replicas()
            port.window("FEC")
            with watch("expert"):
                out = bank.run(rows, route.sizes, replicas, sizes_on_device=route.sizes_on_device, impl=self.impl)
        return on_backward(out, begin_backward)

    def _run_apart(self, bank: RunsReplicas, rows: Tensor, route: Route) -> Tensor:
        """Run the experts at home while replicas' parameters come, then the replicas.

        Autograd goes the other way: the replicas' gradients are complete, and go home, before the experts at home run.
        """
        port, watch = self.port, self.port.stopwatch
        m, there = bank.experts, route.sizes_on_device
        at_home, copies = route.sizes[:m], route.sizes[m:]
        first, rest = rows.split([sum(at_home), sum(copies)]) if copies else (rows, rows)
        port.window("FEC")
        with watch("expert"):
            out = bank.run(first, at_home, sizes_on_device=None if there is None else there[:m], impl=self.impl)
        # waited for on ranks without any as well: their own part of Trans has to be over
        replicas = port.replicas()
        if not copies:
            return out
        # made after the experts at home have run: autograd takes what was made last first
        rest = on_backward(rest, port.copies_done)
        with watch("expert"):
            on_device = None if there is None else there[m:]
            answers = bank.run_replicas(rest, copies, replicas, sizes_on_device=on_device, impl=self.impl)
            return torch.cat([out, answers])

    def _account(self, routing: Routing, counts: Counts, split: Split, forward: Pass) -> None:
        """Keep statistics and hand out auxiliary losses; a recomputed forward pass has done both already.

        It computes the losses all the same: checkpointing expects it to save what the first pass saved.
        """
        again = forward is Pass.AGAIN
        if not again:
            self.stats = LayerStats(counts.load, split.rank_load().copy(), int(counts.dropped.sum()))
        config = self.gate.config
        if forward is Pass.EVALUATION or (config.aux_loss == "none" and config.z_loss_weight == 0):
            return
        if self._book is None and not again:
            raise RuntimeError(
                f"{self.label} has an auxiliary loss that nothing collects: run the forward pass inside "
                f"`with prophet.collect_losses(model) as losses:` and add `losses.total()` to the loss"
            )
        losses = self.gate.losses(routing, *self._judged(routing, counts))
        if self._book is not None and not again:
            self._book.entries += [(self.port.index, name, loss) for name, loss in losses.items()]

    def _judged(self, routing: Routing, counts: Counts) -> tuple[Tensor, int, int]:
        """Return what losses are about: choices [E], tokens, and how many ranks have each other tokens of these."""
        alike = 1 if self.alike is None else self.alike.size
        # the group has only some of the ranks that are given the same tokens: its counts are of a part of them
        if self.collective.size % alike:
            first = self.gate.config.aux_loss == "gshard"
            return routing.first_choice_counts() if first else routing.choice_counts(), len(routing.ids), 1
        total = torch.from_numpy(counts.judged().sum(axis=0)).to(routing.logits.device, non_blocking=True)
        return total, int(counts.tokens.sum()), self.collective.size // alike

    def _move(self, rows: Tensor, send: list[int], recv: list[int], name: str) -> Tensor:
        with self.port.stopwatch("a2a"):
            return self.collective.all_to_all(rows, send, recv, op=Operation(name, self.port.index)).wait()


def _loaded(layer: MoE, _: object) -> None:
    layer.expert_watch.remember()


def moe_layers(model: nn.Module) -> list[MoE]:
    """Return the model's MoE layers in the order in which it registered them."""
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
