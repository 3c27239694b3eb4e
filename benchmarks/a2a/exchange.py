"""All-to-alls to be timed: in one step, or within nodes and then between them.

Shape legend: R ranks, S source rank, D destination rank, G ranks of a node.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Row
from prophet.machine.measure import Probe, discard
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.spec import IntArray


def pairs_of(ranks: int, elements: int, uneven: float) -> IntArray:
    """Elements that every rank sends to every rank, [S, D]: the share `uneven` to rank 0, the rest evenly."""
    pairs = np.full((ranks, ranks), int(elements * (1.0 - uneven)) // ranks, dtype=np.int64)
    pairs[:, 0] += elements - pairs.sum(axis=1)
    return pairs


def busiest(pairs: IntArray) -> int:
    """The most elements that any rank sends to or receives from others."""
    off = pairs * ~np.eye(len(pairs), dtype=np.bool_)
    return int(max(off.sum(axis=0).max(), off.sum(axis=1).max()))


def one_level(x: Tensor, pairs: IntArray, collective: Collective) -> Tensor:
    """All to all in one step; `x` lies by destination, the result by source."""
    me = collective.rank
    return collective.all_to_all(x, pairs[me].tolist(), pairs[:, me].tolist(), op=Operation("all-to-all")).wait()


def two_level(x: Tensor, pairs: IntArray, collective: Collective, per_node: int) -> Tensor:
    """The same in two steps: inside the node to the rank of the destination's number, then between nodes."""
    ranks, me = collective.size, collective.rank
    node, number = divmod(me, per_node)
    mates = [node * per_node + i for i in range(per_node)]
    peers = list(range(number, ranks, per_node))
    parts = dict(enumerate(x.split(pairs[me].tolist())))
    # by number of the destination, then by its node
    sent = torch.cat([parts[n] for m in mates for n in range(m % per_node, ranks, per_node)])
    there, back = [0] * ranks, [0] * ranks
    for m in mates:
        there[m] = int(pairs[me, m % per_node :: per_node].sum())
        back[m] = int(pairs[m, number::per_node].sum())
    got = collective.all_to_all(sent, there, back, op=Operation("all-to-all within nodes")).wait()
    pieces = iter(got.split([int(pairs[m, p]) for m in mates for p in peers]))
    held = {(m, p): next(pieces) for m in mates for p in peers}
    sent = torch.cat([held[m, p] for p in peers for m in mates])
    there, back = [0] * ranks, [0] * ranks
    for p in peers:
        there[p] = int(pairs[mates, p].sum())
        first = p - p % per_node
        back[p] = int(pairs[first : first + per_node, me].sum())
    return collective.all_to_all(sent, there, back, op=Operation("all-to-all between nodes")).wait()


def exchanged(x: Tensor, pairs: IntArray, collective: Collective, per_node: int | None) -> Tensor:
    """In two steps where a node has a size, else in one."""
    return one_level(x, pairs, collective) if per_node is None else two_level(x, pairs, collective, per_node)


def check(pairs: IntArray, collective: Collective, device: torch.device, per_node: int | None) -> None:
    """Raise RuntimeError unless every element arrives where it belongs; small whole numbers say where from."""
    me = collective.rank
    x = torch.cat([torch.full((int(n),), float(me * collective.size + d)) for d, n in enumerate(pairs[me])]).to(device)
    want = torch.cat([torch.full((int(n),), float(s * collective.size + me)) for s, n in enumerate(pairs[:, me])])
    got = exchanged(x, pairs, collective, per_node)
    if not torch.equal(got.cpu(), want):
        raise RuntimeError(f"rank {me}: the all-to-all brought other elements than were sent; nothing was timed")


def measure(
    collective: Collective,
    *,
    sizes: list[int],
    dtypes: list[str],
    uneven: list[float],
    per_node: int | None,
    repeats: int,
    device: str,
) -> list[Row]:
    """A row for every dtype, size, share and number of levels; collective, and equal on all ranks."""
    place, ranks = torch.device(device), collective.size
    levels = [None, per_node] if per_node and per_node < ranks else [None]
    probe = Probe(collective, place, repeats)
    cases, runs = [], []
    for name in dtypes:
        dtype = getattr(torch, name)
        for size in sizes:
            for share in uneven:
                pairs = pairs_of(ranks, max(ranks, size // dtype.itemsize // ranks * ranks), share)
                x = torch.zeros(int(pairs[collective.rank].sum()), dtype=dtype, device=place)
                for level in levels:
                    check(pairs, collective, place, level)
                    cases.append((name, dtype.itemsize, pairs, share, level))
                    runs.append(lambda x=x, p=pairs, g=level: discard(exchanged(x, p, collective, g)))
    (lower, median), _ = probe.typical(runs)
    rows = []
    for (name, item, pairs, share, level), s, mid in zip(cases, lower.tolist(), median.tolist(), strict=True):
        n_bytes = int(pairs.sum(axis=1).max()) * item
        rows.append(
            {
                "ranks": ranks,
                "bytes": n_bytes,
                "dtype": name,
                "uneven": share,
                "levels": 1 if level is None else 2,
                "seconds": s,
                "median_s": mid,
                "algbw_bytes_per_s": n_bytes / s,
                "busbw_bytes_per_s": busiest(pairs) * item / s,
            }
        )
    return rows
