"""The machine that a group of ranks runs on, measured in seconds on first use, and remembered for the next runs.

`prophet.machine.calibrate` measures longer, and keeps some sizes to check the fit. Here sizes are chosen so that each
run takes about `_LONGEST_S`, whatever the machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prophet.errors import TopologyError
from prophet.experts.bank import Bank
from prophet.experts.feed_forward import FeedForwardBank
from prophet.files import cache_folder
from prophet.machine.calibrate import calibration_of
from prophet.machine.measure import (
    Cases,
    Measured,
    Probe,
    Ranges,
    measure_exchange,
    measure_experts,
    measure_overlap,
    measure_transfers,
    peers_by_level,
)
from prophet.machine.topology import read_topology, topology_from, topology_table, write_topology
from prophet.ranks.collective import Collective
from prophet.ranks.forwarding import ForwardingCollective
from prophet.ranks.json_messages import gather_json
from prophet.ranks.operation import Operation
from prophet.ranks.places import place
from prophet.ranks.process_group import ProcessGroupCollective
from prophet.spec import Topology
from prophet.terminal import working
from prophet.trials import RandomState

_log = logging.getLogger(__name__)

# Part of the name of a remembered file: raised where what is measured changes
_VERSION = 2
# Seconds of the longest run of each operation: far above latencies, and few enough of all together
_LONGEST_S = 0.008
_TURNS, _PAIRS = 3, 5
# Seconds of an operation's samples, also where other work makes them long
_BUDGET_S = 0.4
_LEAST_ROWS, _MOST_ROWS = 16, 4096
# Of all-to-alls and transfers
_LEAST_BYTES, _MOST_BYTES = 1 << 19, 1 << 26
_NO_LIMIT = 1 << 62
# An expert is cut to this: beyond it products reach the same rate, and the ranks need the memory
_MOST_EXPERT_BYTES = 1 << 26
# Ranks whose products differ by less are taken for equal: so much lies in few samples
_NOISE = 0.1
# A remembered machine is measured again after this time, and named where a rate is off by more than _MOVED
_CHECK_AFTER_S = 7 * 24 * 3600.0
_MOVED = 0.2


def topology_of(collective: Collective, bank: Bank) -> Topology:
    """Return the machine of a group: what an earlier run has measured, or else what is measured now; collective.

    The first use takes two to five seconds on an idle machine, and shows a line meanwhile. Its result lies in a file
    of the user's cache on rank 0's host, one for every set of hosts, devices, backend and expert. Ranks that are
    threads, and a rank alone, have nothing to measure: theirs is `Topology.uniform`, as is that of experts on the
    meta device.

    Args:
        collective: The ranks.
        bank: Experts of the kind that will be balanced. They are not run.

    Returns:
        The same on all ranks, to the last bit, and in the next run.
    """
    # A pipeline's layers have one that times its waits, for instance
    while isinstance(collective, ForwardingCollective):
        collective = collective.inner
    if collective.size == 1 or not isinstance(collective, ProcessGroupCollective):
        return Topology.uniform(collective.size)
    mine = {"host": socket.gethostname(), "place": place(), "device": _device_name(bank.device)}
    rows = gather_json(mine, collective, Operation("where ranks are"))
    first = collective.rank == 0
    # On all ranks alike, though some may have loaded theirs already
    if any(row["device"] == "meta" for row in rows):
        if first:
            warnings.warn(
                'experts on the meta device cannot be measured, so plans are for topology="uniform", which is no real '
                "machine: attach once they are on their device, or give EngineConfig a topology",
                stacklevel=5,
            )
        return Topology.uniform(collective.size)
    per_node = _ranks_per_node([row["place"] for row in rows])
    expert = _expert_like(bank)
    known = {
        "version": _VERSION,
        "hosts": [row["host"] for row in rows],
        "devices": [row["device"] for row in rows],
        "ranks_per_node": per_node,
        "backend": collective.backend(),
        "threads": torch.get_num_threads() if bank.device.type == "cpu" else None,
        "expert": [expert.dim, expert.hidden, str(expert.dtype)],
    }
    file = _file_of(known) if first else None
    found = _agreed(collective, lambda: _remembered(file))
    if found is not None and not found["old"]:
        return topology_from(found["table"])
    name = f"measured on {', '.join(dict.fromkeys(row['host'] for row in rows))}"
    with working(f"Measuring the {collective.size} ranks that share experts") if first else nullcontext():
        measured = _measure(collective, expert, bank.device, per_node, name)
    if found is not None:
        remembered = topology_from(found["table"])
        if file is not None:
            _compare(remembered, measured, file)
        return remembered
    # Rank 0's: a fit may differ in its last bit on another processor
    kept = _agreed(collective, lambda: _keep(file, measured))
    assert kept is not None
    # Only now: where warnings are errors, others would wait for rank 0
    if first and kept["problem"]:
        warnings.warn(
            f"the machine's topology cannot be kept, so the next run measures again: {kept['problem']}", stacklevel=5
        )
    return topology_from(kept["table"])


def _agreed(collective: Collective, read: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    """What rank 0 reads, on all ranks."""
    mine = read() if collective.rank == 0 else None
    found: dict[str, Any] | None = gather_json(mine, collective, Operation("the machine's topology"))[0]
    return found


def _device_name(device: torch.device) -> str:
    return torch.get_device_module(device).get_device_name(device) if device.type == "cuda" else device.type


def _ranks_per_node(places: list[int]) -> int:
    """How many ranks share a node: of equal nodes in a row, of which the last may be smaller; otherwise 1."""
    size = places.count(places[0])
    nodes = [places[i : i + size] for i in range(0, len(places), size)]
    whole = all(len(set(node)) == 1 for node in nodes) and len({node[0] for node in nodes}) == len(nodes)
    return size if whole else 1


def _expert_like(bank: Bank) -> FeedForwardBank:
    """Describe, on no device, one plain expert with as many operations per row as the bank's, and not too large."""
    shape = bank.shape()
    # An expert's own dtype may be that of compressed weights
    dtype = bank.dtype if bank.dtype.is_floating_point and bank.dtype.itemsize > 1 else torch.get_default_dtype()
    dim = max(1, round(shape.token_bytes / bank.dtype.itemsize))
    hidden = round(shape.forward_flops_per_token / (4 * dim))
    hidden = max(1, min(hidden, _MOST_EXPERT_BYTES // (2 * dim * dtype.itemsize)))
    with torch.device("meta"):
        return FeedForwardBank(dim, hidden, 1, bias=False).to(dtype)


# ------------------------------------------------------------------------------------------------ what is remembered


def _file_of(known: dict[str, Any]) -> Path | None:
    """Where the machine `known` is remembered; None for a user without a home, as in some containers."""
    name = hashlib.blake2b(json.dumps(known).encode(), digest_size=8).hexdigest()
    with suppress(RuntimeError):
        return cache_folder() / f"topology-{name}.toml"
    return None


def _remembered(file: Path | None) -> dict[str, Any] | None:
    """The topology that an earlier run has measured as a table, and whether it is old; None if there is none."""
    if file is None:
        return None
    try:
        table = topology_table(read_topology(file))
        return {"table": table, "old": time.time() - file.stat().st_mtime > _CHECK_AFTER_S}
    except (TopologyError, OSError):
        # Damaged ones as well: they are measured again
        return None


def _keep(file: Path | None, topology: Topology) -> dict[str, Any]:
    """Write the file, unless another group has meanwhile.

    Args:
        file: What `_file_of` returned.
        topology: What was measured.

    Returns:
        What the file holds as a table, so that the next run plans alike, and the problem if it cannot be kept.
    """
    if file is None:
        return {"table": topology_table(topology), "problem": "the user has no home directory"}
    own = file.with_name(f"{file.stem}-{os.getpid()}{file.suffix}")
    try:
        write_topology(own, topology)
        if _remembered(file) is None:
            own.replace(file)
        _log.info("measured the machine, and wrote %s", file)
        return {"table": topology_table(read_topology(file)), "problem": ""}
    except (OSError, TopologyError) as error:
        return {"table": topology_table(topology), "problem": str(error)}
    finally:
        with suppress(OSError):
            own.unlink()


def _compare(remembered: Topology, measured: Topology, file: Path) -> None:
    """Warn where a machine has changed since it was measured; it is not compared again for some time."""
    with suppress(OSError):
        os.utime(file)
    moved = [
        f"{what} is {new / old:.2f} of what it was"
        for what, old, new in (
            ("the compute of the slowest rank", min(remembered.flops_per_s), min(measured.flops_per_s)),
            ("the network within a node", remembered.intra.bytes_per_s, measured.intra.bytes_per_s),
            ("the network between nodes", remembered.inter.bytes_per_s, measured.inter.bytes_per_s),
        )
        if not 1 / (1 + _MOVED) <= new / old <= 1 + _MOVED
    ]
    if moved:
        warnings.warn(
            f"the machine has changed since it was measured: {'; '.join(moved)}. Plans still are for what {file} says, "
            "so that runs go on alike; delete it to have the machine measured anew",
            stacklevel=6,
        )


# ------------------------------------------------------------------------------------------------- what is measured


def _measure(
    collective: Collective, expert: FeedForwardBank, device: torch.device, per_node: int, name: str
) -> Topology:
    """Measure and fit; collective, and equal on all ranks but for the last bit.

    Args:
        collective: The ranks.
        expert: What `_expert_like` returned.
        device: Where experts compute.
        per_node: Ranks of a node.
        name: Of the topology.
    """

    def bank_of(experts: int, hidden: int = expert.hidden) -> FeedForwardBank:
        with device:
            return FeedForwardBank(expert.dim, hidden, experts, bias=False).to(expert.dtype)

    began = time.perf_counter()
    before = RandomState(device)
    # Whatever is set around: the user's random numbers stay, and a backward pass can be timed, in the experts' dtype
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            one = bank_of(1)
            coarse, fine = (Probe(collective, device, turns, budget_s=_BUDGET_S) for turns in (1, _TURNS))
            links = _links(coarse, fine, one, per_node)
            # Over the slower link
            longest = links.get("a2a_inter", next(iter(links.values()))).fitted[-1]
            tokens = _grown(lambda n: measure_experts(coarse, {1: one}, _upto(n), _all)[1], _LEAST_ROWS, _MOST_ROWS)
            found = [*links.values(), *measure_experts(fine, {1: one, 2: bank_of(2)}, _upto(tokens), _all)]
            # A transfer's largest size takes as long. Not by a fit: ranks on other processors could send other sizes
            in_time = int(longest.size * _LONGEST_S / longest.seconds)
            n_bytes = min(max(in_time, _LEAST_BYTES), _MOST_BYTES)
            moved = bank_of(1, max(1, n_bytes // 8 // (one.dim * one.dtype.itemsize)))
            found += map(_undisturbed, measure_transfers(fine, moved, Ranges(halves=(1, 8), points=2), _all))
            overlap_cost = measure_overlap(
                Probe(collective, device, _PAIRS, budget_s=_BUDGET_S),
                one,
                rows=tokens,
                n_bytes=min(n_bytes, 2 * in_time),
            )
    finally:
        before.put_back()
    topology = calibration_of(
        {m.operation: m for m in found},
        one.shape(),
        collective.size,
        ranks_per_node=per_node,
        free_bytes=_NO_LIMIT,
        overlap_cost=overlap_cost,
        name=name,
    ).topology
    # Both move bytes over the same links, and transfers pack them besides: a slower all-to-all was disturbed
    faster = max(1.0, topology.trans_rate, topology.agg_rate)
    # What all ranks had at once, which is also the link within where there is one node
    even = topology.even_inter.bytes_per_s * faster
    port = topology.port_bytes_per_s and topology.port_bytes_per_s * faster
    link = replace(topology.inter, bytes_per_s=max(topology.inter.bytes_per_s, even))
    topology = replace(
        topology,
        intra=topology.intra if topology.nodes > 1 else link,
        inter=link,
        port_bytes_per_s=port,
        trans_rate=topology.trans_rate / faster,
        agg_rate=topology.agg_rate / faster,
        # Too few samples to tell, as of exchanges (`_undisturbed`)
        compute_noise=0.0,
    )
    slowest = min(topology.flops_per_s)
    if slowest > (1.0 - _NOISE) * max(topology.flops_per_s):
        topology = replace(topology, flops_per_s=(slowest,) * topology.ranks)
    _log.info("measured the machine in %.1f s: %s", time.perf_counter() - began, topology)
    return topology


def _links(coarse: Probe, fine: Probe, bank: Bank, per_node: int) -> dict[str, Measured]:
    """Time the all-to-all within nodes, between them, and between them with one rank of each; by operation.

    Args:
        coarse: Finds the sizes.
        fine: Times them.
        bank: Has the rows' width and dtype.
        per_node: Ranks of a node.
    """
    group = coarse.collective
    every = peers_by_level(group.size, per_node, group.rank)
    missing = {"intra": per_node == 1, "inter": per_node == group.size, "alone": per_node == group.size}
    peers = {f"a2a_{level}": chosen for level, chosen in every.items() if not missing[level]}

    def measured(level: str) -> Measured:
        def exchange(probe: Probe, ranges: Ranges) -> Measured:
            return measure_exchange(probe, level, peers[level], bank, ranges, _all)

        # Of few bytes it is latencies and buffers that are measured: networks with a limit let bursts pass
        least, most = (max(_LEAST_ROWS, n // (bank.dim * bank.dtype.itemsize)) for n in (_LEAST_BYTES, _MOST_BYTES))
        rows = _grown(lambda rows: exchange(coarse, _upto(rows)), least, most)
        return _undisturbed(exchange(fine, _upto(rows)))

    return {level: measured(level) for level in peers}


def _grown(measure: Callable[[int], Measured], rows: int, most: int) -> int:
    """The rows, up to `most`, whose run takes about `_LONGEST_S`; begins with few, so that none takes much longer."""
    while (took_s := _undisturbed(measure(rows)).fitted[-1].seconds) < _LONGEST_S / 2 and rows < most:
        rows = min(most, rows * (16 if took_s < _LONGEST_S / 32 else 4))
    return rows


def _undisturbed(measured: Measured) -> Measured:
    """What would have been measured without other work, as far as can be said: that only adds time.

    The median counts in a longer measurement. Of few samples it is the lower quartile, and a size takes no longer than
    larger ones do. Of the largest size's time, half at least is for its bytes.
    """
    points = measured.fitted
    lower = np.minimum.accumulate([p.seconds / (1.0 + p.spread) for p in reversed(points)])[::-1]
    sizes, longest = np.array([p.size for p in points]), float(lower[-1])
    lower = np.minimum(lower, longest * (1.0 + sizes / sizes[-1]) / 2.0)
    return replace(
        measured, noise=0.0, fitted=tuple(replace(p, seconds=float(s)) for p, s in zip(points, lower, strict=True))
    )


def _upto(rows: int) -> Ranges:
    """Two sizes: of more, a line of least relative errors could leave out the largest, which counts most."""
    ends = max(2, rows // 16), rows
    return Ranges(rows=ends, tokens=ends, groups=(1,), points=2)


def _all(fitted: Cases, between: Cases) -> tuple[Cases, Cases]:
    return fitted, []
