"""Whether ranks exchange attention in a training pass, and by which plan: the same answer on all ranks.

Shape legend: U slices of all microbatches, S stages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pipeline_balance.pipeline.model.layers import TrainingPass
from pipeline_balance.schedules.actions import Schedule
from pipeline_balance.schedules.exchange import Exchange, plan
from pipeline_balance.schedules.exchange_times import ExchangeCosts, LayerSeconds, Verdict, verdict
from pipeline_balance.slices import kernel
from pipeline_balance.slices.kernel import Heads
from pipeline_balance.slices.options import SliceOptions
from pipeline_balance.slices.sharing.exchange import Exchanger, KeptMemory, piece_bytes, visible
from pipeline_balance.slices.store import ChunkStore, Unit
from prophet.ranks.collective import Channel, Collective
from prophet.ranks.device.clocks import clock_on, seconds_between
from prophet.ranks.operation import Operation

_log = logging.getLogger(__name__)
# The smallest of so many counts
_REPEATS = 3
# Pieces of the two calls from whose times those of a call and of a piece follow
_FEW, _MANY = 1, 5


class Exchanging:
    """Plans the exchange of training passes.

    Attributes:
        plan, costs, verdict: Of the latest pass: who helps whom, what it costs, and whether it pays; None before it.

    Args:
        options: Those of the slices.
    """

    def __init__(self, options: SliceOptions) -> None:
        self._given, self._keep_bytes = options.exchange_costs, options.keep_bytes
        self._memory: KeptMemory | None = None
        # by communicator, so that those of others are measured anew, and then by who has a stage and for which slices
        self._costs = WeakKeyDictionary[Collective, dict[object, ExchangeCosts]]()
        # of batches without documents, with what it was made for
        self._planned: tuple[Schedule, object, Exchange, Verdict] | None = None
        # of which it was said that exchange is off: packed documents make another plan of every batch
        self._warned: Schedule | None = None
        self.plan: Exchange | None = None
        self.costs: ExchangeCosts | None = None
        self.verdict: Verdict | None = None

    def reserve(self, device: torch.device) -> None:
        """Take memory for kept pieces, if it is not there yet. Raises `SpecError` where there is not so much."""
        if self._keep_bytes and self._memory is None:
            self._memory = KeptMemory(self._keep_bytes, device)

    def rest(self) -> None:
        """Let go of that memory."""
        self._memory = None

    def begin(
        self,
        store: ChunkStore,
        given: TrainingPass,
        heads: Sequence[Sequence[Heads]],
        units: Sequence[Unit],
        rows: Sequence[int],
        device: torch.device,
    ) -> Exchanger | None:
        """What exchanges attention in a pass; None where it does not pay. Collective over the ranks with a stage.

        Args:
            store: This rank's chunks.
            given: What runs.
            heads: The attentions of every stage in forward order [S].
            units: The slices [U].
            rows: Sequences of every slice's microbatch [U].
            device: Where ranks compute.
        """
        every = [one for some in heads for one in some]
        if not every:
            return None
        tokens = [unit.starts[unit.slice + 1] - unit.starts[unit.slice] for unit in units]
        sizes = {*zip(rows, tokens, strict=True)}
        keep = 0
        if self._memory is not None:
            keep = self._memory.cut(max(piece_bytes(one, *size) for one in {*every} for size in sizes))
        largest = max(sizes, key=lambda size: size[0] * size[1])
        self.costs = self._given
        if self.costs is None:
            self.costs = self._measured(given, every[0], largest, store.ranks, device)
        found, said = self._plan(given.schedule, heads, units, keep, self.costs, store.ranks)
        self.plan, self.verdict = found, said
        if not said.pays:
            if self._warned is not given.schedule:
                _log.warning("%s", said)
            self._warned = given.schedule
            return None
        return Exchanger(store, given, found, heads, units, rows, self._memory if keep else None, device)

    def _plan(
        self,
        schedule: Schedule,
        heads: Sequence[Sequence[Heads]],
        units: Sequence[Unit],
        keep: int,
        costs: ExchangeCosts,
        ranks: int,
    ) -> tuple[Exchange, Verdict]:
        layers = tuple(len(some) for some in heads)
        first = next(one for some in heads for one in some)
        wide = any(one.wide != one.dtype for some in heads for one in some)
        whole, key = all(unit.documents is None for unit in units), (layers, first, wide, keep, costs)
        if whole and self._planned is not None and self._planned[0] is schedule and self._planned[1] == key:
            return self._planned[2:]
        found = plan(
            schedule,
            layers,
            pieces=None if whole else [visible(unit) for unit in units],
            # queries go for all ranks that share a slice, keys of the tokens of one
            heads=(first.queries * ranks, first.keys),
            call=max(each.call_s / each.piece_s for each in (costs.forward, costs.backward)),
            keep=keep,
            gradients=1 + wide,
        )
        said = verdict(found, schedule, costs)
        if whole:
            self._planned = schedule, key, found, said
        return found, said

    def _measured(
        self, given: TrainingPass, heads: Heads, size: tuple[int, int], ranks: int, device: torch.device
    ) -> ExchangeCosts:
        """What attention and transfers cost the slowest rank; measured once for such slices."""
        # of the same ranks: those that others have measured are not known to all of these, and differ
        known, key = self._costs.setdefault(given.collective, {}), (heads, size, tuple(given.ranks))
        if key not in known:
            known[key] = measured_costs(given, heads, *size, ranks, device)
        return known[key]


def measured_costs(
    given: TrainingPass, heads: Heads, rows: int, tokens: int, ranks: int, device: torch.device
) -> ExchangeCosts:
    """What attention and transfers cost the slowest rank. Collective over the ranks with a stage.

    Args:
        given: What runs.
        heads: One attention of the model.
        rows: Sequences of a microbatch.
        tokens: Of a slice, on each of the ranks that share it.
        ranks: How many do.
        device: Where ranks compute.
    """
    timed = Timed(given.collective, device)
    kernels = kernel_seconds(timed, heads, rows, tokens, ranks)
    query = torch.zeros(rows, heads.queries, tokens * ranks, heads.width, dtype=heads.dtype, device=device)
    mine = [*kernels, timed.message(given.ranks, query, "measuring attention exchange", "tokens")]
    forward_call, forward_piece, backward_call, backward_piece, slice_s = _slowest(given, mine)
    forward, backward = (
        # torch's kernel computes the hidden half of a slice's own chunk as well, unless it is cut: about two pieces
        LayerSeconds(piece_s=piece, diagonal_s=2 * piece, call_s=call, slice_s=slice_s)
        for call, piece in ((forward_call, forward_piece), (backward_call, backward_piece))
    )
    return ExchangeCosts(forward=forward, backward=backward, kv_share=heads.keys / (heads.queries * ranks))


class Timed:
    """Times calls where ranks compute.

    Args:
        collective: Whose limit waits have.
        device: Where ranks compute.
    """

    def __init__(self, collective: Collective, device: torch.device) -> None:
        self.collective, self.device = collective, device

    def shortest(self, call: Callable[[], object]) -> float:
        """The shortest of a few calls, in seconds."""
        mark, marks = clock_on(self.device), []
        for _ in range(_REPEATS):
            began = mark()
            call()
            marks.append((began, mark()))
        # a wait for a device with a limit, unlike that for its events
        self.collective.on_host(torch.zeros(1, device=self.device), op=Operation("measuring attention"))
        return min(seconds_between(began, ended) for began, ended in marks)

    def message(self, ranks: Sequence[int], sent: Tensor, what: str, channel: Channel) -> float:
        """Seconds in which each of some ranks sends a tensor to the next one; collective over them.

        Args:
            ranks: Their numbers.
            sent: The tensor.
            what: What errors call it.
            channel: See `Collective.exchange`.
        """
        here = list(ranks).index(self.collective.rank)
        to, of = (ranks[(here + step) % len(ranks)] for step in (1, -1))
        come, op = torch.empty_like(sent), Operation(what)

        def turn() -> Tensor:
            return self.collective.exchange([(to, sent)], [(of, come)], op=op, channel=channel).wait()

        # links are made at the first message
        turn()
        return self.shortest(turn)


def kernel_seconds(timed: Timed, heads: Heads, rows: int, tokens: int, ranks: int = 1) -> list[float]:
    """Seconds of a call without its products, and of a piece's products, forward and then backward.

    Args:
        timed: Times calls.
        heads: The attention.
        rows: Sequences.
        tokens: Of a slice, on each of the ranks that share it.
        ranks: How many do.
    """
    half = -(-tokens // 2)
    # zeros: times do not depend on values, and training draws no other numbers than without this
    query = torch.zeros(rows, heads.queries, tokens * ranks, heads.width, dtype=heads.dtype, device=timed.device)
    found: list[float] = []
    taken: list[tuple[float, float]] = []
    for pieces in (_FEW, _MANY):
        keys = query.new_zeros(rows, heads.keys, pieces * half, heads.width)
        forward = partial(kernel.forward, query, keys, keys, 0.0, False, scale=heads.scale)
        out, lse = forward()
        backward = partial(kernel.backward, query, query, keys, keys, out, lse, 0.0, False, scale=heads.scale)
        taken.append((timed.shortest(forward), timed.shortest(backward)))
    for few, many in zip(*taken, strict=True):
        piece = max((many - few) / (_MANY - _FEW), 1e-9)
        found += [max(few - _FEW * piece, 0.0), piece]
    return found


def _slowest(given: TrainingPass, mine: Sequence[float]) -> list[float]:
    """The largest of every rank's figures."""
    # on the host, as all that ranks agree by
    own = torch.tensor(mine, dtype=torch.float64, device="cpu")
    others = [rank for rank in given.ranks if rank != given.collective.rank]
    come = [torch.empty_like(own) for _ in others]
    op = Operation("comparing measured attention")
    sends, recvs = [(rank, own) for rank in others], list(zip(others, come, strict=True))
    given.collective.exchange(sends, recvs, op=op, channel="tokens").wait()
    found: list[float] = torch.stack([own, *come]).amax(dim=0).tolist()
    return found
