"""The values that flow between the rooms: frozen, validated when built, free of torch and of any process group.

Shape legend: R ranks, E experts, L layers, N routed tokens, K top-k, D destination ranks (equal to R), S replica slots.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from prophet.errors import SpecError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

Activation = Literal["gelu", "gelu_tanh", "relu", "swiglu", "swiglu_clamped"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
GATED: tuple[Activation, ...] = ("swiglu", "swiglu_clamped")  # three matrices instead of two


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise SpecError(f"{name} must be positive, got {value!r}")


def _frozen(values: Any, dtype: type[np.generic], shape: tuple[int, ...], name: str) -> npt.NDArray[Any]:
    """Return a read-only copy of `values` with `dtype` and `shape`, or raise `SpecError`."""
    source = np.asarray(values)
    if source.shape != shape:
        raise SpecError(f"{name} must have shape {list(shape)}, got {list(source.shape)}")
    if np.issubdtype(dtype, np.integer) and not np.issubdtype(source.dtype, np.integer):
        raise SpecError(f"{name} must hold integers, got {source.dtype}")
    copy = np.array(source, dtype=dtype, order="C", copy=True)
    copy.setflags(write=False)
    return copy


def digest(*arrays: npt.NDArray[Any]) -> int:
    """A 62-bit non-negative fingerprint of the arrays' bytes, equal on every rank that holds equal arrays."""
    h = hashlib.blake2b(digest_size=8)
    for a in arrays:
        h.update(repr((a.shape, a.dtype.str)).encode())
        h.update(np.ascontiguousarray(a).tobytes())
    return int.from_bytes(h.digest(), "little") >> 2


def odd_ones_out(values: npt.ArrayLike) -> list[int]:
    """Ranks whose entry of `values` [R] differs from the most common one (the smallest of several); [] if all agree."""
    array = np.asarray(values)
    found, votes = np.unique(array, return_counts=True)
    return [int(r) for r in np.flatnonzero(array != found[votes.argmax()])] if found.size > 1 else []


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One level of the network as one rank sees it."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _positive("Link.bytes_per_s", self.bytes_per_s)
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
            _positive(f"Topology.{rate}", getattr(self, rate))
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """Sizes of one MoE layer's experts; everything the performance model needs to know of the network."""

    dim: int
    hidden: int
    activation: Activation = "gelu"
    bias: bool = True
    param_bytes: int = 4
    grad_bytes: int = 4
    token_element_bytes: int = 4

    def __post_init__(self) -> None:
        for name in ("dim", "hidden", "param_bytes", "grad_bytes", "token_element_bytes"):
            _positive(f"LayerShape.{name}", getattr(self, name))
        if self.activation not in ACTIVATIONS:
            raise SpecError(f"LayerShape.activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")

    @property
    def matrices(self) -> int:
        """Matrix products per token: 2 for a plain MLP, 3 where it is gated."""
        return 3 if self.activation in GATED else 2

    @property
    def expert_params(self) -> int:
        """Parameters of one expert, biases included."""
        biases = (self.matrices - 1) * self.hidden + self.dim if self.bias else 0
        return self.matrices * self.dim * self.hidden + biases

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's parameters: what Trans moves for one replica."""
        return self.expert_params * self.param_bytes

    @property
    def expert_grad_bytes(self) -> int:
        """Bytes of one expert's gradients: what Agg moves for one replica."""
        return self.expert_params * self.grad_bytes

    @property
    def replica_bytes(self) -> int:
        """Memory one replica takes: its parameters and its gradients."""
        return self.expert_bytes + self.expert_grad_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token row: what dispatch moves, and combine again."""
        return self.dim * self.token_element_bytes

    @property
    def forward_flops_per_token(self) -> int:
        """Floating-point operations of one expert on one token, forward; the backward pass takes twice that."""
        return 2 * self.matrices * self.dim * self.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Compute under which a block's Trans and Agg are hidden (paper, Eq. 8): that of the block before.

    fnec_s, bnec_s: its compute outside the experts, forward and backward. experts: whether its experts compute, too; no
    experts come before those of a model's first block.
    """

    fnec_s: float = 0.0
    bnec_s: float = 0.0
    experts: bool = True

    def __post_init__(self) -> None:
        if self.fnec_s < 0 or self.bnec_s < 0:
            raise SpecError(f"Windows must not be negative, got {self}")

    def forward_s(self, experts_s: float) -> float:
        """Seconds that hide Trans, where experts compute for `experts_s` forward."""
        return self.fnec_s + (experts_s if self.experts else 0.0)

    def backward_s(self, experts_s: float) -> float:
        """Seconds that hide Agg, where experts compute for `experts_s` forward, and twice as long backward (Eq. 3)."""
        return self.bnec_s + (2.0 * experts_s if self.experts else 0.0)


def check_experts_per_rank(experts: int, ranks: int) -> int:
    """Return m = experts / ranks, or raise: every rank is home to the same number of experts."""
    if experts < 1 or ranks < 1:
        raise SpecError(f"experts and ranks must be at least 1, got {experts} experts on {ranks} ranks")
    if experts % ranks:
        raise SpecError(
            f"{experts} experts cannot be divided among {ranks} expert-parallel ranks: "
            f"num_experts must be a multiple of the group's size"
        )
    return experts // ranks


@dataclass(frozen=True, eq=False, slots=True)
class Placement:
    """Which ranks hold which experts during one step.

    `home[e]` is the rank that owns expert e ([E] integers); `holds[e, r]` says whether rank r holds e's parameters,
    as home or as replica ([E, R] booleans).
    """

    home: IntArray
    holds: BoolArray

    def __post_init__(self) -> None:
        experts, ranks = np.shape(self.holds) if np.ndim(self.holds) == 2 else (-1, -1)
        if experts < 1 or ranks < 1:
            raise SpecError(f"Placement.holds must have shape [experts, ranks], got {list(np.shape(self.holds))}")
        home = _frozen(self.home, np.int64, (experts,), "Placement.home")
        holds = _frozen(self.holds, np.bool_, (experts, ranks), "Placement.holds")
        if home.min() < 0 or home.max() >= ranks:
            raise SpecError(f"Placement.home must name ranks 0..{ranks - 1}, got {home.min()}..{home.max()}")
        missing = np.flatnonzero(~holds[np.arange(experts), home])
        if missing.size:
            raise SpecError(f"the home rank must hold its expert; it does not for experts {missing[:8].tolist()}")
        object.__setattr__(self, "home", home)
        object.__setattr__(self, "holds", holds)

    @classmethod
    def homes_only(cls, experts: int, ranks: int) -> Placement:
        """Plain expert parallelism: expert e lives on rank e // m and nowhere else."""
        m = check_experts_per_rank(experts, ranks)
        home = np.arange(experts, dtype=np.int64) // m
        return cls.with_replicas(home, ranks, ())

    @classmethod
    def with_replicas(
        cls, home: Sequence[int] | IntArray, ranks: int, replicas: Iterable[tuple[int, int]]
    ) -> Placement:
        """Build from homes [E] and (expert, rank) pairs."""
        home_array = np.asarray(home, dtype=np.int64)
        holds = np.zeros((home_array.size, ranks), dtype=np.bool_)
        if home_array.size and home_array.min() >= 0 and home_array.max() < ranks:
            holds[np.arange(home_array.size), home_array] = True
        for expert, rank in replicas:
            if not (0 <= expert < home_array.size and 0 <= rank < ranks):
                raise SpecError(f"replica ({expert}, {rank}) is outside {home_array.size} experts x {ranks} ranks")
            holds[expert, rank] = True
        return cls(home_array, holds)

    @classmethod
    def trusted(cls, home: IntArray, holds: BoolArray) -> Placement:
        """Wrap arrays that a tested kernel made, without copying or checking them; they become read-only."""
        placement = object.__new__(cls)
        home.setflags(write=False)
        holds.setflags(write=False)
        object.__setattr__(placement, "home", home)
        object.__setattr__(placement, "holds", holds)
        return placement

    @property
    def experts(self) -> int:
        return int(self.holds.shape[0])

    @property
    def ranks(self) -> int:
        return int(self.holds.shape[1])

    @property
    def is_static(self) -> bool:
        """Whether there is no replica at all."""
        return int(self.holds.sum()) == self.experts

    def replica_mask(self) -> BoolArray:
        """[E, R] booleans: rank r holds expert e as a replica."""
        mask: BoolArray = self.holds.copy()
        mask[np.arange(self.experts), self.home] = False
        return mask

    def replicas(self) -> list[tuple[int, int]]:
        """All (expert, rank) replica pairs, ordered by expert, then rank."""
        return [(int(e), int(r)) for e, r in np.argwhere(self.replica_mask())]

    def replicas_on(self, rank: int) -> list[int]:
        """Experts of which `rank` holds a replica, ascending: the order of its replica slots."""
        return [int(e) for e in np.flatnonzero(self.replica_mask()[:, rank])]

    def copies_per_rank(self) -> IntArray:
        """Replicas held by every rank, [R]."""
        counts: IntArray = self.replica_mask().sum(axis=0, dtype=np.int64)
        return counts

    def digest(self) -> int:
        """An integer that stands for the placement in comparisons over ranks."""
        return digest(self.home, self.holds)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return np.array_equal(self.home, other.home) and np.array_equal(self.holds, other.holds)

    __hash__ = None  # type: ignore[assignment]


def check_load(load: npt.NDArray[Any]) -> IntArray:
    """Validate `load_RE` ([ranks, experts] non-negative integers) and return it as contiguous int64."""
    array = np.asarray(load)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise SpecError(f"load must be integers [ranks, experts], got {array.dtype} {list(array.shape)}")
    if array.size and array.min() < 0:
        raise SpecError("load must not be negative")
    return np.ascontiguousarray(array, dtype=np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class Split:
    """How many tokens go where: `tokens[r, e, d]` of rank r's tokens for expert e are computed on rank d."""

    tokens: IntArray

    def __post_init__(self) -> None:
        shape = np.shape(self.tokens)
        if len(shape) != 3 or shape[0] != shape[2]:
            raise SpecError(f"Split.tokens must have shape [ranks, experts, ranks], got {list(shape)}")
        tokens = _frozen(self.tokens, np.int64, (shape[0], shape[1], shape[2]), "Split.tokens")
        if tokens.size and tokens.min() < 0:
            raise SpecError("Split.tokens must not be negative")
        object.__setattr__(self, "tokens", tokens)

    @classmethod
    def to_homes(cls, load: IntArray, placement: Placement) -> Split:
        """Every token of `load` [R, E] goes to its expert's home, whatever replicas there are."""
        ranks, experts = load.shape
        tokens = np.zeros((ranks, experts, ranks), dtype=np.int64)
        tokens[:, np.arange(experts), placement.home] = load
        return cls(tokens)

    @classmethod
    def trusted(cls, tokens: IntArray) -> Split:
        """Wrap an int64 array that a tested kernel made, without copying or checking it; it becomes read-only."""
        split = object.__new__(cls)
        tokens.setflags(write=False)
        object.__setattr__(split, "tokens", tokens)
        return split

    @property
    def ranks(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def experts(self) -> int:
        return int(self.tokens.shape[1])

    def check(self, load: IntArray, placement: Placement) -> None:
        """Raise `SpecError` unless the split conserves `load` [R, E] and uses only ranks that hold the expert."""
        if self.tokens.shape != (placement.ranks, placement.experts, placement.ranks):
            raise SpecError(
                f"split is for {self.ranks} ranks x {self.experts} experts, "
                f"placement for {placement.ranks} x {placement.experts}"
            )
        if not np.array_equal(self.tokens.sum(axis=2), load):
            bad = np.argwhere(self.tokens.sum(axis=2) != load)[0]
            raise SpecError(f"split does not conserve the tokens of rank {bad[0]} for expert {bad[1]}")
        stray = self.tokens.sum(axis=0)[~placement.holds]
        if stray.any():
            raise SpecError("split sends tokens to a rank that does not hold their expert")

    def rank_load(self) -> IntArray:
        """Tokens computed by every rank, [R] (H of the paper)."""
        load: IntArray = self.tokens.sum(axis=(0, 1), dtype=np.int64)
        return load

    def received(self) -> IntArray:
        """Tokens every rank receives from other ranks, [R] (R of the paper)."""
        local = self.tokens.sum(axis=1)
        received: IntArray = local.sum(axis=0) - np.diagonal(local)
        return received

    def max_mean(self) -> float:
        """Largest rank load over the mean; 1.0 is perfect, and what an empty step reports."""
        load = self.rank_load()
        total = int(load.sum())
        return float(load.max()) * self.ranks / total if total else 1.0

    def digest(self) -> int:
        """An integer that stands for the split in comparisons over ranks."""
        return digest(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Split):
            return NotImplemented
        return np.array_equal(self.tokens, other.tokens)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Predicted seconds of one MoE layer in one training step, forward and backward (paper, Eq. 6 and 8)."""

    a2a_s: float
    expert_s: float
    exposed_trans_s: float
    exposed_agg_s: float
    trans_s: float = 0.0
    agg_s: float = 0.0

    @property
    def total_s(self) -> float:
        """What the step waits for; `trans_s` and `agg_s` count only where they are exposed."""
        return self.a2a_s + self.expert_s + self.exposed_trans_s + self.exposed_agg_s

    def as_dict(self) -> dict[str, float]:
        return {
            "a2a_s": self.a2a_s,
            "expert_s": self.expert_s,
            "exposed_trans_s": self.exposed_trans_s,
            "exposed_agg_s": self.exposed_agg_s,
            "trans_s": self.trans_s,
            "agg_s": self.agg_s,
            "total_s": self.total_s,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanContext:
    """All that a planner may know besides the load.

    `slots_per_rank` bounds the replicas of this layer on one rank; `budget_bytes[r]`, when given, bounds their
    memory on rank r more tightly than the topology's `free_bytes`. `previous` is the placement in force, for planners
    that go on from it or keep it; None before the first plan.
    """

    topology: Topology
    shape: LayerShape
    home: tuple[int, ...]
    windows: Windows = field(default_factory=Windows)
    slots_per_rank: int = 4
    budget_bytes: tuple[int, ...] | None = None
    previous: Placement | None = None

    def __post_init__(self) -> None:
        if not self.home or min(self.home) < 0 or max(self.home) >= self.topology.ranks:
            raise SpecError(f"PlanContext.home must name ranks 0..{self.topology.ranks - 1} for every expert")
        if self.slots_per_rank < 0:
            raise SpecError(f"PlanContext.slots_per_rank must not be negative, got {self.slots_per_rank}")
        if self.budget_bytes is not None and len(self.budget_bytes) != self.topology.ranks:
            raise SpecError(f"PlanContext.budget_bytes needs one entry per rank ({self.topology.ranks})")
        if self.budget_bytes is not None and min(self.budget_bytes) < 0:
            raise SpecError("PlanContext.budget_bytes must not be negative on any rank")

    @property
    def experts(self) -> int:
        return len(self.home)

    @property
    def ranks(self) -> int:
        return self.topology.ranks

    @property
    def trans_bytes(self) -> float:
        """An expert's parameters in bytes of the all-to-all that take as long."""
        return self.shape.expert_bytes / self.topology.trans_rate

    @property
    def agg_bytes(self) -> float:
        """An expert's gradients in bytes of the all-to-all that take as long."""
        return self.shape.expert_grad_bytes / self.topology.agg_rate

    def slot_limits(self) -> IntArray:
        """Replicas that fit on every rank under all limits, [R]."""
        limits = np.empty(self.ranks, dtype=np.int64)
        for r in range(self.ranks):
            free = self.topology.free_bytes[r]
            if self.budget_bytes is not None:
                free = min(free, self.budget_bytes[r])
            limits[r] = min(self.slots_per_rank, free // self.shape.replica_bytes)
        return limits

    def homes_only(self) -> Placement:
        """The placement without replicas."""
        return Placement.with_replicas(self.home, self.ranks, ())
