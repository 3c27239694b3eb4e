"""Named machines for predictions: data-sheet figures, and what is assumed to be reached of them.

Every preset pairs a cluster with a model. Peaks come from the sources named beside them; `*_efficiency` are
assumptions of this project (no measurement of those machines stands behind them), so a prediction compares
policies, it does not promise seconds. `prophet calibrate` replaces all of this by measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from prophet.errors import SpecError
from prophet.machine.models import MODELS
from prophet.machine.sizes import ModelSizes
from prophet.spec import Link, PlanContext, Topology, check_experts_per_rank

_GBIT_BYTES = 1e9 / 8
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """One kind of machine; bandwidths per direction, in bytes/s, at peak.

    Attributes:
        name: The preset's.
        ranks_per_node: None: every rank shares one fast domain.
        peak_flops_per_s: FLOP/s of one device.
        intra_bytes_per_s: Of a rank, within a node.
        inter_bytes_per_s: Of a rank that crosses between nodes alone.
        shared_port_bytes_per_s: Of the port that all ranks of a node share between nodes; None where each has its own.
        memory_bytes: Of one device.
        element_bytes: Of a parameter, gradient or activation.
        flops_efficiency: Assumed share of the peak that is reached.
        intra_efficiency: The same within a node.
        inter_efficiency: The same between nodes.
        intra_latency_s: Seconds of a message within a node.
        inter_latency_s: Seconds of a message between nodes.
        expert_overhead_s: Seconds that each expert adds to a call.
        overlap_cost: As in `Topology`.
        replica_memory_fraction: Assumed share of device memory that one layer's replicas may take.
    """

    name: str
    ranks_per_node: int | None
    peak_flops_per_s: float
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    memory_bytes: int
    element_bytes: int
    flops_efficiency: float
    intra_efficiency: float
    inter_efficiency: float
    intra_latency_s: float
    inter_latency_s: float
    expert_overhead_s: float
    shared_port_bytes_per_s: float | None = None
    overlap_cost: float = 0.0
    replica_memory_fraction: float = 0.1

    def topology(self, ranks: int) -> Topology:
        """The cluster cut to `ranks` ranks."""
        port = self.shared_port_bytes_per_s
        topology = Topology.uniform(
            ranks,
            ranks_per_node=min(self.ranks_per_node or ranks, ranks),
            flops_per_s=self.peak_flops_per_s * self.flops_efficiency,
            intra=Link(bytes_per_s=self.intra_bytes_per_s * self.intra_efficiency, latency_s=self.intra_latency_s),
            inter=Link(bytes_per_s=self.inter_bytes_per_s * self.inter_efficiency, latency_s=self.inter_latency_s),
            free_bytes=int(self.memory_bytes * self.replica_memory_fraction),
            port_bytes_per_s=None if port is None else port * self.inter_efficiency,
            expert_overhead_s=self.expert_overhead_s,
            name=self.name,
        )
        return replace(topology, overlap_cost=self.overlap_cost)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A cluster and a model, under the name `cluster:model` that tests and benchmarks give the pair."""

    cluster: Cluster
    model: ModelSizes

    @property
    def name(self) -> str:
        return f"{self.cluster.name}:{self.model.name}"

    def context(
        self,
        ranks: int,
        experts: int,
        *,
        routed_per_rank: float,
        top_k: int | None = None,
        slots_per_rank: int = 4,
    ) -> PlanContext:
        """Make what a planner needs.

        Args:
            ranks: R.
            experts: E, a multiple of R.
            routed_per_rank: Choices of one rank: every token counts once per chosen expert.
            top_k: Experts per token; None takes the model's. It turns choices into tokens, which is what the rest of
                the block computes.
            slots_per_rank: Replicas that a rank has room for.
        """
        m = check_experts_per_rank(experts, ranks)
        topology = self.cluster.topology(ranks)
        tokens = routed_per_rank / (top_k or self.model.top_k)
        return PlanContext(
            topology=topology,
            shape=self.model.shape(self.cluster.element_bytes),
            home=tuple(e // m for e in range(experts)),
            windows=self.model.windows(tokens, topology.flops_per_s[0]),
            slots_per_rank=slots_per_rank,
        )


# Pro-Prophet, section VI: 4 RTX 3090 per node on PCI-Express 3.0, one 100 Gb/s InfiniBand port per node, which the 4
# ranks share. RTX 3090: 35.6 TFLOP/s float32, 24 GB (NVIDIA, GA102 whitepaper). PCIe 3.0 x16: 15.75 GB/s a direction
# (PCI-SIG). Assumed: float32 elements (the paper names no precision), half of the compute peak, 70 % of PCIe (GeForce
# cards stage through the host), 85 % of InfiniBand. Hidden transfers cost nothing, as in the paper's Eq. 8.
_HPWNV = Cluster(
    name="hpwnv",
    ranks_per_node=4,
    peak_flops_per_s=35.6e12,
    intra_bytes_per_s=15.75e9,
    inter_bytes_per_s=100 * _GBIT_BYTES,
    shared_port_bytes_per_s=100 * _GBIT_BYTES,
    memory_bytes=24 * _GIB,
    element_bytes=4,
    flops_efficiency=0.5,
    intra_efficiency=0.7,
    inter_efficiency=0.85,
    intra_latency_s=20e-6,
    inter_latency_s=30e-6,
    expert_overhead_s=20e-6,
)
# H100 SXM: 989.4 TFLOP/s bfloat16 dense, 80 GB, NVLink 900 GB/s both ways (NVIDIA, Hopper whitepaper), all ranks in one
# NVLink domain. Assumed: 45 % of compute in grouped expert products, 70 % of NVLink. Every hidden second costs
# 18.9 %: by so much compute beside collectives took longer on four H100, A100, MI250 or MI210, in the mean of many
# models (arXiv:2507.03114). It is near the 20 of 132 multiprocessors with which DeepSeek-V3 fills NVLink and InfiniBand
# (arXiv:2412.19437, section 3.2.2).
_H100_NVLINK = Cluster(
    name="h100-nvlink",
    ranks_per_node=None,
    peak_flops_per_s=989.4e12,
    intra_bytes_per_s=450e9,
    inter_bytes_per_s=450e9,
    memory_bytes=80 * _GIB,
    element_bytes=2,
    flops_efficiency=0.45,
    intra_efficiency=0.7,
    inter_efficiency=0.7,
    intra_latency_s=10e-6,
    inter_latency_s=10e-6,
    expert_overhead_s=3e-6,
    overlap_cost=0.189,
)
# DGX H100: 8 cards per node, one 400 Gb/s port per card (NVIDIA, DGX H100 data sheet). 80 % of it assumed.
_H100_IB = replace(
    _H100_NVLINK,
    name="h100-ib",
    ranks_per_node=8,
    inter_bytes_per_s=400 * _GBIT_BYTES,
    inter_efficiency=0.8,
    inter_latency_s=20e-6,
)
# DGX A100: 312 TFLOP/s bfloat16 dense, 80 GB, NVLink 600 GB/s both ways (NVIDIA, Ampere whitepaper), one 200 Gb/s port
# per card (DGX A100 data sheet). Assumed: 50 % of compute, 70 % and 80 % of the links.
_A100_IB = replace(
    _H100_IB,
    name="a100-ib",
    peak_flops_per_s=312e12,
    flops_efficiency=0.5,
    intra_bytes_per_s=300e9,
    inter_bytes_per_s=200 * _GBIT_BYTES,
)
_CLUSTERS = (
    _HPWNV,
    # Pairs of cards on an NVLink bridge, 56.25 GB/s a direction (GA102 whitepaper). Within a node of four, one peer is
    # behind NVLink and two are behind PCIe: the harmonic mean over the three stands for both.
    replace(_HPWNV, name="hpnv", intra_bytes_per_s=3 / (1 / 56.25e9 + 2 / 15.75e9)),
    # RTX 2080 Ti: 13.4 TFLOP/s float32, 11 GB (NVIDIA, Turing whitepaper, reference clocks).
    replace(_HPWNV, name="lpwnv", peak_flops_per_s=13.4e12, memory_bytes=11 * _GIB),
    _H100_NVLINK,
    _H100_IB,
    _A100_IB,
    # A100 PCIe cards (PCIe 4.0 x16, 31.5 GB/s: NVIDIA's data sheet and PCI-SIG), 8 per node. One Ethernet port of
    # 200 Gb/s per node, 25 Gb/s for each card where all send, is this preset's premise. 70 % of either link assumed.
    replace(
        _A100_IB,
        name="ethernet-25g",
        intra_bytes_per_s=31.5e9,
        inter_bytes_per_s=200 * _GBIT_BYTES,
        shared_port_bytes_per_s=200 * _GBIT_BYTES,
        inter_efficiency=0.7,
        intra_latency_s=15e-6,
        inter_latency_s=60e-6,
    ),
    # Several CPU processes on one machine over gloo's loopback: all figures are assumptions, of the order of one
    # desktop core per process. Calibrate where it matters.
    Cluster(
        name="gloo-loopback",
        ranks_per_node=None,
        peak_flops_per_s=50e9,
        intra_bytes_per_s=1e9,
        inter_bytes_per_s=1e9,
        memory_bytes=8 * _GIB,
        element_bytes=4,
        flops_efficiency=0.5,
        intra_efficiency=1.0,
        inter_efficiency=1.0,
        intra_latency_s=300e-6,
        inter_latency_s=300e-6,
        expert_overhead_s=50e-6,
    ),
)
CLUSTERS: dict[str, Cluster] = {c.name: c for c in _CLUSTERS}

# Which models belong to which cluster; the first is taken where only the cluster is named. The paper leaves
# MoE-GPT-L out on 2080 Ti for want of memory.
_LARGE = ("Mixtral-8x7B", "Qwen3-30B-A3B", "DeepSeek-V3")
_MODELS_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("hpwnv", "hpnv"), ("MoE-GPT-M", "MoE-GPT-S", "MoE-GPT-L", "MoE-GPT-DS", "MoE-GPT-DM")),
    "lpwnv": ("MoE-GPT-M", "MoE-GPT-S", "MoE-GPT-DS", "MoE-GPT-DM"),
    **dict.fromkeys(("h100-nvlink", "h100-ib", "a100-ib", "ethernet-25g"), _LARGE),
    "gloo-loopback": ("MoE-GPT-S",),
}

PRESET_NAMES: tuple[str, ...] = tuple(f"{c}:{m}" for c, models in _MODELS_OF.items() for m in models)


def get_preset(name: str) -> Preset:
    """The preset `cluster:model`, or a cluster with its first model; `SpecError` where there is none."""
    cluster, _, model = name.partition(":")
    if cluster not in CLUSTERS:
        raise SpecError(f"there is no preset {name!r}; the clusters are {', '.join(CLUSTERS)}")
    chosen = model or _MODELS_OF[cluster][0]
    if chosen not in MODELS:
        raise SpecError(f"there is no model {model!r}; the models are {', '.join(MODELS)}")
    return Preset(cluster=CLUSTERS[cluster], model=MODELS[chosen])
