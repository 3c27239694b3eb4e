"""The machine: its links, and the ranks and nodes that they join.

Shape legend: R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.errors import SpecError
from prophet.spec.arrays import FloatArray, IntArray, check_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One level of the network as one rank sees it."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        check_positive("Link.bytes_per_s", self.bytes_per_s)
        if self.latency_s < 0:
            raise SpecError(f"Link.latency_s must not be negative, got {self.latency_s!r}")

    def seconds(self, n_bytes: float) -> float:
        """Time to move `n_bytes` over this link; nothing to move takes no time."""
        return self.latency_s + n_bytes / self.bytes_per_s if n_bytes > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The machine an expert-parallel group runs on.

    `ranks` are numbered node by node: ranks 0 .. ranks_per_node-1 share node 0. `flops_per_s[r]` is what expert
    products reach on rank r (not the data sheet's peak). `free_bytes[r]` bounds what replicas may take on rank r.
    `expert_overhead_s` is spent on every expert that a rank computes, `call_overhead_s` once for all of them together.
    `trans_rate` and `agg_rate` are the bytes per second of Trans and Agg over those of the all-to-all: below 1 where
    gathering and adding up the pieces takes time. `overlap_cost`, from 0 to below 1, is by how much of its seconds a
    transfer lengthens the compute that hides it: sending takes time of the processor, or of a GPU's memory.
    """

    ranks: int
    ranks_per_node: int
    intra: Link
    inter: Link
    flops_per_s: tuple[float, ...]
    free_bytes: tuple[int, ...]
    expert_overhead_s: float = 0.0
    call_overhead_s: float = 0.0
    trans_rate: float = 1.0
    agg_rate: float = 1.0
    overlap_cost: float = 0.0
    name: str = "unnamed"

    def __post_init__(self) -> None:
        if not 0 <= self.overlap_cost < 1:
            raise SpecError(f"Topology.overlap_cost must be at least 0 and below 1, got {self.overlap_cost!r}")
        for rate in ("trans_rate", "agg_rate"):
            check_positive(f"Topology.{rate}", getattr(self, rate))
        if self.ranks < 1:
            raise SpecError(f"Topology.ranks must be at least 1, got {self.ranks}")
        if self.ranks_per_node < 1:
            raise SpecError(f"Topology.ranks_per_node must be at least 1, got {self.ranks_per_node}")
        for field_name, values in (("flops_per_s", self.flops_per_s), ("free_bytes", self.free_bytes)):
            if len(values) != self.ranks:
                raise SpecError(f"Topology.{field_name} needs one entry per rank ({self.ranks}), got {len(values)}")
        if not all(f > 0 for f in self.flops_per_s):
            raise SpecError("Topology.flops_per_s must be positive on every rank")
        if not all(b >= 0 for b in self.free_bytes):
            raise SpecError("Topology.free_bytes must not be negative on any rank")
        for field_name in ("expert_overhead_s", "call_overhead_s"):
            if getattr(self, field_name) < 0:
                raise SpecError(f"Topology.{field_name} must not be negative")

    @classmethod
    def uniform(
        cls,
        ranks: int,
        *,
        ranks_per_node: int | None = None,
        flops_per_s: float = 1e12,
        intra: Link | None = None,
        inter: Link | None = None,
        free_bytes: int = 1 << 62,
        expert_overhead_s: float = 0.0,
        name: str = "uniform",
    ) -> Topology:
        """A topology whose ranks are all alike; `inter` defaults to `intra`, `ranks_per_node` to one node."""
        intra = intra or Link(bytes_per_s=10e9)
        return cls(
            ranks=ranks,
            ranks_per_node=ranks_per_node or ranks,
            intra=intra,
            inter=inter or intra,
            flops_per_s=(float(flops_per_s),) * ranks,
            free_bytes=(int(free_bytes),) * ranks,
            expert_overhead_s=expert_overhead_s,
            name=name,
        )

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def node_ids(self) -> IntArray:
        """Node of every rank, [R]."""
        return np.arange(self.ranks, dtype=np.int64) // self.ranks_per_node

    def relative_speed(self) -> FloatArray:
        """Compute speed of every rank relative to the fastest, [R] in (0, 1]."""
        speed = np.asarray(self.flops_per_s, dtype=np.float64)
        relative: FloatArray = speed / speed.max()
        return relative
