"""A step's predicted cost, and what it depends on: the machine, the layer's sizes, the compute around it.

Shape legend: R ranks.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from prophet.errors import SpecError
from prophet.spec.arrays import FloatArray, IntArray, check_not_negative, check_positive
from prophet.spec.checked import checked
from prophet.spec.feed_forward import Activation, Bias, has_biases, parts_of
from prophet.spec.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """Sizes of one MoE layer's experts; everything the performance model needs to know of the network.

    Attributes:
        expert_params: Parameters of one expert.
        expert_bytes: Their bytes, which Trans moves for one replica.
        expert_grad_bytes: Bytes of the gradients of those that train, which Agg moves.
        half_gradients: Whether gradients are in half precision. A sum of some then travels in float32.
        token_bytes: Bytes of one row, which dispatch moves, and combine again; the mean of both where answers have
            another size.
        forward_flops_per_token: Floating-point operations of one expert on one row; the backward pass takes twice that.

    Raises:
        SpecError: For sizes that are not positive.
    """

    expert_params: int
    expert_bytes: int
    expert_grad_bytes: int
    token_bytes: float
    forward_flops_per_token: float
    half_gradients: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "expert_params", "expert_bytes", "token_bytes", "forward_flops_per_token")
        # None where all experts are frozen
        check_not_negative(self, "expert_grad_bytes")

    @classmethod
    def feed_forward(
        cls,
        *,
        dim: int,
        hidden: int,
        dim_out: int | None = None,
        activation: Activation = "gelu",
        bias: Bias = True,
        param_bytes: int = 4,
        grad_bytes: int = 4,
        token_element_bytes: int = 4,
    ) -> LayerShape:
        """Make the sizes of feed-forward networks: two matrices of dim x hidden, three where they are gated.

        Args:
            dim: Elements of a row.
            hidden: Elements between the matrices.
            dim_out: Elements of an answer, to which the last matrix leads; None for `dim`.
            activation: Decides whether there is a gate.
            bias: Which matrices have biases.
            param_bytes: Bytes of one parameter.
            grad_bytes: Bytes of one gradient.
            token_element_bytes: Bytes of one element of a row or an answer.

        Raises:
            SpecError: For sizes that are not positive.
        """
        out = dim if dim_out is None else dim_out
        if min(dim, hidden, out, param_bytes, grad_bytes, token_element_bytes) < 1:
            raise SpecError(
                f"LayerShape.feed_forward: expected positive sizes, got dim={dim}, hidden={hidden}, dim_out={dim_out}, "
                f"param_bytes={param_bytes}, grad_bytes={grad_bytes}, token_element_bytes={token_element_bytes}"
            )
        b_in, b_out = has_biases(bias)
        # A gate is a second first matrix: both make `hidden` numbers, which are multiplied
        units = 2 * hidden if parts_of(activation).gated else hidden
        params = units * (dim + b_in) + out * (hidden + b_out)
        # Biases cost memory, but no operations worth counting; a multiplication and an addition are two operations
        return cls(
            expert_params=params,
            expert_bytes=params * param_bytes,
            expert_grad_bytes=params * grad_bytes,
            token_bytes=(dim + out) * token_element_bytes / 2,
            forward_flops_per_token=2 * (units * dim + hidden * out),
            half_gradients=grad_bytes == 2,
        )

    @property
    def expert_sum_bytes(self) -> int:
        """Bytes of a sum of an expert's gradients, which the second phase of a two-phase Agg moves."""
        return self.expert_grad_bytes * (2 if self.half_gradients else 1)

    @property
    def replica_bytes(self) -> int:
        """Bytes of one replica: its parameters and its gradients."""
        return self.expert_bytes + self.expert_grad_bytes


class Cover(NamedTuple):
    """Seconds of compute under the first and the second phase of a transfer; a direct one has both.

    A phase starts in its own window, since the second sends on what the first has brought.
    """

    first: float = 0.0
    second: float = 0.0


FormName = Literal["direct", "two-phase", "node-once", "spread"]
FORM_NAMES: tuple[FormName, ...] = get_args(FormName)


class TransferSeconds(NamedTuple):
    """Seconds of a Trans or an Agg in its direct form, and in each phase of its other forms.

    Only this class defines by how much a transfer lengthens a step: by the part that its windows do not cover, and by
    `overlap_cost` times the part that they do. The form that lengthens it least is chosen, and of several alike the one
    that takes fewest seconds.

    Attributes:
        direct: Seconds of the direct form; infinite where that is not allowed, as for the others.
        first: Seconds of the first phase of the two-phase form.
        second: Seconds of its second phase.
        once_first: Seconds of the first phase of the node-once form; infinite where no expert gains by it.
        once_second: Seconds of its second phase.
        spread_first: Seconds of the first phase of the spread form; infinite where no expert gains by it.
        spread_second: Seconds of its second phase.
    """

    direct: float
    first: float
    second: float
    once_first: float = math.inf
    once_second: float = math.inf
    spread_first: float = math.inf
    spread_second: float = math.inf

    def phases(self, form: FormName) -> tuple[float, float]:
        """Return the seconds of both phases of a form; a direct one has a single phase."""
        if form == "direct":
            return self.direct, 0.0
        if form == "two-phase":
            return self.first, self.second
        return (self.once_first, self.once_second) if form == "node-once" else (self.spread_first, self.spread_second)

    def seconds(self, form: FormName) -> float:
        """Return all seconds of one form, exposed or not."""
        first, second = self.phases(form)
        return first + second

    def exposed(self, cover: Cover, form: FormName) -> float:
        """Return the seconds of one form that its windows do not cover."""
        if form == "direct":
            return max(0.0, self.direct - (cover.first + cover.second))
        # Each phase has its own window: the second cannot start early, as it sends on what the first has brought
        first, second = self.phases(form)
        return max(0.0, first - cover.first) + max(0.0, second - cover.second)

    def hidden(self, cover: Cover, form: FormName) -> float:
        """Return the seconds of one form that its windows cover."""
        if form == "direct":
            return min(self.direct, cover.first + cover.second)
        first, second = self.phases(form)
        return min(first, cover.first) + min(second, cover.second)

    def exposed_seconds(self, cover: Cover, overlap_cost: float) -> float:
        """Return by how many seconds it lengthens the step (Eq. 8, where the hidden part is free)."""
        # The form is chosen for each step, so the best one counts
        return min(self._exposed_seconds(cover, overlap_cost, form) for form in FORM_NAMES)

    def form(self, cover: Cover, overlap_cost: float) -> FormName:
        """Return the form that it takes under these windows and at this `overlap_cost`."""
        # Of forms that lengthen the step alike, the one that takes fewest seconds; the first of several
        return min(FORM_NAMES, key=lambda form: (self._exposed_seconds(cover, overlap_cost, form), self.seconds(form)))

    def _exposed_seconds(self, cover: Cover, overlap_cost: float, form: FormName) -> float:
        return self.exposed(cover, form) + overlap_cost * self.hidden(cover, form)


@checked
@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Compute under which a block's Trans and Agg are hidden (paper, Eq. 8): that of the block before.

    Attributes:
        fnec_s: Seconds of its forward compute outside the experts.
        bnec_s: Seconds of its backward compute outside the experts.
        experts: Whether its experts compute, too; no experts come before those of a model's first block.
    """

    fnec_s: float = 0.0
    bnec_s: float = 0.0
    experts: bool = True

    def __post_init__(self) -> None:
        check_not_negative(self, "fnec_s", "bnec_s")

    def over_trans(self, experts_s: float) -> Cover:
        """Return the cover of Trans, where experts compute for `experts_s` seconds forward."""
        # In the forward pass a block's experts come before the rest of it
        return Cover(experts_s, self.fnec_s) if self.experts else Cover(self.fnec_s, 0.0)

    def over_agg(self, experts_s: float) -> Cover:
        """Return the cover of Agg, where experts compute for `experts_s` seconds forward."""
        # In the backward pass it is the other way round, and products take twice as long (Eq. 3)
        return Cover(self.bnec_s, 2.0 * experts_s if self.experts else 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One level of the network as one rank sees it: `bytes_per_s`, and `latency_s` for every exchange."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "bytes_per_s")
        check_not_negative(self, "latency_s")

    def seconds(self, n_bytes: float) -> float:
        """Return the seconds to move `n_bytes` over this link; nothing to move takes no time."""
        return self.latency_s + n_bytes / self.bytes_per_s if n_bytes > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The machine an expert-parallel group runs on.

    Attributes:
        ranks: R. They are numbered node by node: ranks 0 .. ranks_per_node-1 share node 0.
        ranks_per_node: Ranks of a node; the last node may have fewer.
        intra: The network within a node.
        inter: The network between nodes, as a rank has it whose node sends and receives nothing else.
        flops_per_s: FLOP/s [R] that expert products reach on each rank, not the data sheet's peak.
        free_bytes: Bytes [R] that replicas may take on each rank.
        expert_overhead_s: Seconds for every expert that a rank computes.
        call_overhead_s: Seconds once for all experts of a rank together.
        trans_rate: Bytes per second of Trans over those of the all-to-all; below 1 where gathering the pieces takes
            time.
        agg_rate: The same for Agg, where gradients are added up.
        overlap_cost: From 0 to below 1, the share of its seconds by which a transfer lengthens the compute that hides
            it: sending takes time of the processor, or of a GPU's memory.
        backward_ratio: Seconds of the experts' backward pass over those of their forward pass. FLOP/s and overheads are
            those of a third of both.
        compute_noise: By which share of its mean a rank's compute varies from window to window while other ranks' does
            not: the standard deviation.
        exchange_noise_s: Seconds by which the moment when a rank is done with an all-to-all varies so, however long it
            takes: the standard deviation. The seconds of `Link` are the mean.
        duplex_cost: By which share of the shorter direction's seconds a port takes longer that sends and receives at
            the same time. The rate of `Link` is that of both directions at once.
        link_overlap_cost: From 0 to 1, the share of the shorter one's seconds by which an all-to-all and a transfer at
            the same time take longer than the longer one; 1 where they have one link, and each gets half of it.
        port_bytes_per_s: Bytes per second that all ranks of a node together send to other nodes, and as many that they
            receive at the same time; None where every rank has a network card of its own.
        name: Its name in messages and reports.

    Raises:
        SpecError: For values outside their ranges, or not one per rank.
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
    backward_ratio: float = 2.0
    compute_noise: float = 0.0
    exchange_noise_s: float = 0.0
    duplex_cost: float = 0.0
    link_overlap_cost: float = 1.0
    port_bytes_per_s: float | None = None
    name: str = "unnamed"

    def __post_init__(self) -> None:
        if not 0 <= self.overlap_cost < 1:
            raise SpecError(f"Topology.overlap_cost must be at least 0 and below 1, got {self.overlap_cost!r}")
        for name in ("compute_noise", "duplex_cost", "link_overlap_cost"):
            if not 0 <= getattr(self, name) <= 1:
                raise SpecError(f"Topology.{name} must be from 0 to 1, got {getattr(self, name)!r}")
        check_positive(self, "ranks", "ranks_per_node", "trans_rate", "agg_rate", "backward_ratio")
        check_not_negative(self, "expert_overhead_s", "call_overhead_s", "exchange_noise_s")
        if self.port_bytes_per_s is not None:
            check_positive(self, "port_bytes_per_s")
        for field_name, values in (("flops_per_s", self.flops_per_s), ("free_bytes", self.free_bytes)):
            if len(values) != self.ranks:
                raise SpecError(f"Topology.{field_name} needs one entry per rank ({self.ranks}), got {len(values)}")
        if not all(f > 0 for f in self.flops_per_s):
            raise SpecError("Topology.flops_per_s must be positive on every rank")
        if not all(b >= 0 for b in self.free_bytes):
            raise SpecError("Topology.free_bytes must not be negative on any rank")

    @classmethod
    def uniform(
        cls,
        ranks: int,
        *,
        ranks_per_node: int | None = None,
        flops_per_s: float = 1e12,
        intra: Link | None = None,
        inter: Link | None = None,
        port_bytes_per_s: float | None = None,
        free_bytes: int = 1 << 62,
        expert_overhead_s: float = 0.0,
        name: str = "uniform",
    ) -> Topology:
        """Make a topology whose ranks are all alike.

        Args:
            ranks: How many there are.
            ranks_per_node: Ranks of a node; None for one node.
            flops_per_s: FLOP/s that expert products reach.
            intra: The network within a node; None for 10 GB/s without latency.
            inter: The network between nodes; None for that within a node.
            port_bytes_per_s: What the ranks of a node share between nodes; None for no limit.
            free_bytes: Bytes that replicas may take on a rank; no limit by default.
            expert_overhead_s: Seconds for every expert that a rank computes.
            name: Its name in messages and reports.
        """
        intra = intra or Link(bytes_per_s=10e9)
        # Rates of Trans and Agg stay those of the all-to-all: they are measured, or set in the constructor
        return cls(
            ranks=ranks,
            ranks_per_node=ranks_per_node or ranks,
            intra=intra,
            inter=inter or intra,
            flops_per_s=(float(flops_per_s),) * ranks,
            free_bytes=(int(free_bytes),) * ranks,
            expert_overhead_s=expert_overhead_s,
            port_bytes_per_s=port_bytes_per_s,
            name=name,
        )

    @property
    def nodes(self) -> int:
        """The number of nodes, the last of which may not be full."""
        # Rounded up
        return -(-self.ranks // self.ranks_per_node)

    @property
    def has_levels(self) -> bool:
        """Whether there are several nodes, and several ranks in one of them."""
        return self.nodes not in (1, self.ranks)

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a node."""
        first = node * self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, self.ranks))

    def node_ids(self) -> IntArray:
        """Return the node of every rank, [R]."""
        return np.arange(self.ranks, dtype=np.int64) // self.ranks_per_node

    @property
    def port_share(self) -> float:
        """Seconds that a byte takes at its node's port over those at its rank's own link; 0 where no port limits."""
        port, link = self.port_bytes_per_s, self.inter.bytes_per_s
        # All links of a node together are no faster than such a port
        return 0.0 if port is None or port >= self.ranks_per_node * link else link / port

    @property
    def even_inter(self) -> Link:
        """The network between nodes as each rank has it while all ranks of its node send and receive alike."""
        slower = self.port_share * min(self.ranks_per_node, self.ranks)
        # Where no port limits, the very same numbers
        return self.inter if slower <= 1.0 else replace(self.inter, bytes_per_s=self.inter.bytes_per_s / slower)

    def port_seconds(self, moved: FloatArray) -> FloatArray:
        """Return the seconds until every node's port has sent what its ranks send to other nodes, or received it.

        Args:
            moved: Bytes [R] that each rank sends to other nodes, or receives from them.

        Returns:
            Seconds [nodes]; zeros without a port.
        """
        if self.port_bytes_per_s is None:
            return np.zeros(self.nodes)
        seconds = np.add.reduceat(moved, np.arange(0, self.ranks, self.ranks_per_node)) / self.port_bytes_per_s
        # A port that moves nothing adds no latency, as a link
        latency_s: FloatArray = np.where(seconds > 0, self.inter.latency_s, 0.0)
        return seconds + latency_s

    def relative_speed(self) -> FloatArray:
        """Return the compute speed of every rank relative to the fastest, [R] in (0, 1]."""
        speed = np.asarray(self.flops_per_s, dtype=np.float64)
        relative: FloatArray = speed / speed.max()
        return relative


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Predicted seconds of one MoE layer in one training step, forward and backward (paper, Eq. 6 and 8).

    Attributes:
        a2a_s: The four all-to-alls.
        expert_s: Products of the experts.
        exposed_trans_s: By how much Trans lengthens the step.
        exposed_agg_s: By how much Agg lengthens the step.
        trans_s: All of Trans, exposed or hidden.
        agg_s: All of Agg, exposed or hidden.
    """

    a2a_s: float
    expert_s: float
    exposed_trans_s: float
    exposed_agg_s: float
    trans_s: float = 0.0
    agg_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the whole layer; `trans_s` and `agg_s` count only where they are exposed."""
        return self.a2a_s + self.expert_s + self.exposed_trans_s + self.exposed_agg_s

    def as_dict(self) -> dict[str, float]:
        """Return all fields and the total, by name."""
        return asdict(self) | {"total_s": self.total_s}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanContext:
    """All that a planner may know besides the load.

    Attributes:
        topology: The machine.
        shape: The sizes of the layer's experts.
        home: Home rank [E] of every expert.
        windows: Compute that hides the layer's transfers.
        slots_per_rank: Replicas of this layer that a rank may hold.
        budget_bytes: Bytes [R] that they may take, besides the topology's `free_bytes`; None for no further limit.
        previous: The placement in force, for planners that go on from it or keep it; None before the first plan.

    Raises:
        SpecError: For homes that are no ranks, and for limits that are negative or not one per rank.
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
        check_not_negative(self, "slots_per_rank")
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
        """An expert's parameters, as the bytes that an all-to-all moves in the same time."""
        # A link's rate is that of the all-to-all, so a slower transfer counts as more bytes
        return self.shape.expert_bytes / self.topology.trans_rate

    @property
    def agg_bytes(self) -> float:
        """An expert's gradients, as the bytes that an all-to-all moves in the same time."""
        return self.shape.expert_grad_bytes / self.topology.agg_rate

    @property
    def agg_sum_bytes(self) -> float:
        """A sum of an expert's gradients, as the bytes that an all-to-all moves in the same time."""
        return self.shape.expert_sum_bytes / self.topology.agg_rate

    def slot_limits(self) -> IntArray:
        """Return the number of replicas that fit on every rank under all limits, [R]."""
        free = np.array(self.topology.free_bytes, dtype=np.int64)
        if self.budget_bytes is not None:
            free = np.minimum(free, self.budget_bytes)
        # Parameters and gradients of a replica exist at the same time
        return np.minimum(self.slots_per_rank, free // self.shape.replica_bytes)

    def homes_only(self) -> Placement:
        """Return the placement without replicas."""
        return Placement.with_replicas(self.home, self.ranks, ())
