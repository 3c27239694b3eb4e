"""Trans and Agg on all ranks, in both forms: alone, and launched chunk by chunk under compute.

Shape legend: R ranks, P parameters of one expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.common import Row
from prophet.experts.feed_forward import FeedForwardBank
from prophet.experts.replica import Replica, ReplicaPool
from prophet.machine.measure import Probe
from prophet.ranks.collective import Collective
from prophet.ranks.device.side_stream import SideStream
from prophet.ranks.operation import Operation
from prophet.scheduler.pieces import Chunk, agg_chunks, trans_chunks
from prophet.scheduler.replica_transfers import Agg, Trans, Transfer
from prophet.spec import Placement

OPERATIONS = ("trans", "agg")
FORMS = ("direct", "two-phase")
HOMES = ("all", "one")
COVER = 2.0  # compute to hide a transfer under, in times of the transfer alone
_WORK = 128  # rows and columns of the products that stand for compute


def placement_of(ranks: int, copies: int, homes: str) -> Placement:
    """One expert per rank; those of all ranks, or rank 0's alone, have replicas on the next `copies` ranks."""
    moved = range(ranks) if homes == "all" else range(1)
    return Placement.with_replicas(
        range(ranks), ranks, [(e, (e + 1 + i) % ranks) for e in moved for i in range(copies)]
    )


@dataclass(slots=True)
class Mover:
    """One case on this rank: its expert, its replicas, and what is to travel."""

    operation: str
    bank: FeedForwardBank
    replicas: list[Replica]
    chunks: tuple[Chunk, ...]
    collective: Collective
    placement: Placement

    def start(self) -> Transfer:
        """A transfer, nothing of it launched."""
        kind = Trans if self.operation == "trans" else Agg
        return kind(self.chunks, self.bank, self.replicas, self.collective, 0, SideStream(self.bank.device))

    def alone(self) -> None:
        """All of it, and nothing else."""
        self.under(lambda: None)

    def under(self, work: Callable[[], None]) -> None:
        """Launch a chunk, work, launch the next, work, and wait for the rest: as the two windows of a block."""
        transfer = self.start()
        while not transfer.complete:
            transfer.launch_next()
            work()
        transfer.finish()

    def moved(self) -> list[int]:
        """By exchange, the elements that this rank sends to or receives from others, whichever are more."""
        ranks, me = self.collective.size, self.collective.rank
        found = []
        for exchange in (e for chunk in self.chunks for e in chunk):
            sent, got = exchange.counts(ranks)
            found.append(max(sum(sent) - sent[me], sum(got) - got[me]))
        return found

    def problem(self) -> str | None:
        """What a transfer brings that it should not; or None. Collective."""
        holds, me = self.placement.holds, self.collective.rank
        if self.operation == "trans":
            self.alone()
            for replica in self.replicas:
                if not torch.equal(replica.params, flat(bank_of(self.bank, replica.expert, self.collective.size))):
                    return f"rank {me}: the replica of expert {replica.expert} is not what its home has"
            return None
        for p in self.bank.parameters():
            p.grad = torch.zeros_like(p)
        for replica in self.replicas:
            replica.grads.fill_(float(me + 1))
        self.alone()
        expected = sum(r + 1 for r in range(self.collective.size) if holds[me, r] and r != me) * self.bank.grad_scale
        for p in self.bank.parameters():
            if p.grad is None or not torch.allclose(p.grad, torch.full_like(p, expected)):
                return f"rank {me}: the gradient that came home is not the sum over replicas"
        return None


def bank_of(like: FeedForwardBank, expert: int, ranks: int) -> FeedForwardBank:
    """Expert `expert` as its home has it: the same on whichever rank it is made."""
    with torch.device("meta"):
        bank = FeedForwardBank(like.dim, like.hidden, 1, first_expert=expert, total_experts=ranks, ep_size=ranks)
    bank = bank.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(100 + expert)
    with torch.no_grad():
        for p in bank.parameters():
            p.normal_(generator=generator)
    return bank.to(like.device, like.dtype)


def flat(bank: FeedForwardBank) -> torch.Tensor:
    """The parameters of a bank's first expert, [P]."""
    return torch.cat(bank.flat_views(0, 0, bank.expert_numel))


def movers(
    collective: Collective, dim: int, hidden: int, dtype: torch.dtype, copies: Sequence[int], device: str
) -> Iterator[tuple[Row, Mover]]:
    """Every case of one expert's size; what does not exist, a two-phase transfer to one replica, is left out."""
    ranks, rank = collective.size, collective.rank
    with torch.device("meta"):
        like = FeedForwardBank(dim, hidden, 1)
    like = like.to_empty(device=device).to(dtype)
    bank = bank_of(like, rank, ranks)
    numel = bank.expert_numel
    for homes in HOMES:
        for n in copies:
            placement = placement_of(ranks, n, homes)
            replicas = [bank.replica(e, ReplicaPool()) for e in placement.replicas_on(rank)]
            for form in FORMS if n > 1 else FORMS[:1]:
                for operation in OPERATIONS:
                    cut = trans_chunks if operation == "trans" else agg_chunks
                    chunks = cut(placement, rank, numel, two_phase=form == "two-phase")
                    row: Row = {"operation": operation, "ranks": ranks, "dim": dim, "hidden": hidden}
                    row |= {"dtype": str(dtype).removeprefix("torch."), "homes": homes, "copies": n, "form": form}
                    row["expert_bytes"] = numel * dtype.itemsize
                    yield row, Mover(operation, bank, replicas, chunks, collective, placement)


def measure(
    collective: Collective,
    *,
    shapes: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    copies: Sequence[int],
    repeats: int,
    device: str,
) -> list[Row]:
    """A row for every type, shape (dim, hidden), number of copies, form and operation; collective, the same on all."""
    probe = Probe(collective, torch.device(device), repeats)
    rows: list[Row] = []
    for name in dtypes:
        for dim, hidden in shapes:
            cases = list(movers(collective, dim, hidden, getattr(torch, name), copies, device))
            right = []
            for row, mover in cases:
                mine = torch.tensor([int(mover.problem() is not None), *mover.moved()], device=device)
                told = collective.all_gather(mine, op=Operation("check of a transfer")).cpu()
                row["busiest_bytes"] = int(told[:, 1:].max(dim=0).values.sum()) * getattr(torch, name).itemsize
                bad = told[:, 0].nonzero().flatten().tolist()
                if bad:
                    rows.append({**row, "wrong": f"what arrived on rank(s) {bad} is not what was sent"})
                else:
                    right.append((row, mover))
            rows += timed(probe, right, device)
    return rows


def timed(probe: Probe, cases: Sequence[tuple[Row, Mover]], device: str) -> list[Row]:
    """First every transfer alone, and a piece of compute; then compute alone and with the transfer under it."""
    if not cases:
        return []
    block = torch.randn(_WORK, _WORK, device=device)
    out = torch.empty_like(block)

    def piece() -> None:
        torch.mm(block, block, out=out)

    def pieces(n: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(n):
                piece()

        return run

    (alone, median), _ = probe.typical([*(mover.alone for _, mover in cases), pieces(16)])
    # every rank has the same figures, so all do as many pieces
    counts = [
        max(1, math.ceil(COVER * s / (float(alone[-1]) / 16) / len(m.chunks)))
        for s, (_, m) in zip(alone, cases, strict=False)
    ]
    runs: list[Callable[[], None]] = []
    for n, (_, mover) in zip(counts, cases, strict=True):
        work = pieces(n)
        runs += [pieces(n * len(mover.chunks)), lambda m=mover, w=work: m.under(w)]  # type: ignore[misc]
    (found, _), _ = probe.typical(runs)
    rows = []
    for i, (row, _) in enumerate(cases):
        compute_s, both_s, alone_s = float(found[2 * i]), float(found[2 * i + 1]), float(alone[i])
        exposed_s = max(0.0, both_s - compute_s)
        figures = {"seconds": alone_s, "median_s": float(median[i]), "compute_s": compute_s, "under_compute_s": both_s}
        figures |= {"exposed_s": exposed_s, "hidden": min(1.0, max(0.0, 1.0 - exposed_s / alone_s))}
        rows.append({**row, **figures})
    return rows
