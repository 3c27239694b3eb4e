"""What a training step takes outside its MoE layers, which balancing does not change."""

from __future__ import annotations

from dataclasses import dataclass

from prophet.machine.sizes import ModelSizes
from prophet.spec import Topology, Windows


@dataclass(frozen=True, kw_only=True, slots=True)
class RestOfStep:
    """Seconds outside the MoE layers on the slowest rank, forward and backward.

    Attributes:
        blocks_s: What is beside the experts in blocks that have some, such as attention; of one microbatch.
        dense_s: Blocks without experts; of one microbatch.
        head_s: The output head; of one microbatch.
        average_s: The average of gradients, once a step.
    """

    blocks_s: float
    dense_s: float
    head_s: float
    average_s: float

    def seconds(self, microbatches: float) -> float:
        """The seconds of a whole step."""
        return microbatches * (self.blocks_s + self.dense_s + self.head_s) + self.average_s


def rest_of_step(
    sizes: ModelSizes,
    topology: Topology,
    *,
    tokens: float,
    windows: Windows,
    element_bytes: int,
    ranks_per_node: int,
    groups: int = 1,
) -> RestOfStep:
    """Predict by the rules of `ModelSizes.windows`: 2 FLOP per weight and token, causal attention, twice that back.

    Args:
        sizes: Of the model; all of its layers are on every rank.
        topology: Of one expert-parallel group.
        tokens: Of a rank in a microbatch.
        windows: Compute of one block with experts, outside of these.
        element_bytes: Of a gradient.
        ranks_per_node: Of the machine, where a node may hold ranks of several groups.
        groups: Expert-parallel groups that train the same experts on other tokens.
    """
    flops_per_s = min(topology.flops_per_s)
    dense_blocks = sizes.layers - sizes.blocks_with_experts
    width = sizes.heads * sizes.size_of_head if sizes.attention_dim is None else sizes.attention_dim
    dense_flops = 2.0 * sizes.dense_block + 2.0 * sizes.sequence * width
    head_params = sizes.vocabulary * sizes.dim
    # A ring over all ranks for what all share, and one over the groups for the experts, on the slowest link there is.
    # The first leaves a node once; of the others, all of a node's ranks have one.
    ranks = topology.ranks * groups
    alone = ranks <= ranks_per_node
    ring, rings = (topology.intra, topology.intra) if alone else (topology.inter, topology.even_inter)
    shared = sizes.blocks_with_experts * sizes.met_by_every_token + dense_blocks * sizes.dense_block
    shared += (1 if sizes.tied else 2) * head_params
    experts = sizes.blocks_with_experts * sizes.experts // topology.ranks * _expert_params(sizes)
    return RestOfStep(
        blocks_s=sizes.blocks_with_experts * (windows.fnec_s + windows.bnec_s),
        # 3: a backward pass costs twice the forward one
        dense_s=3.0 * dense_blocks * tokens * dense_flops / flops_per_s,
        head_s=3.0 * tokens * 2.0 * head_params / flops_per_s,
        # A ring all-reduce sends 2 (n - 1) / n of the bytes from every rank
        average_s=ring.seconds(2.0 * element_bytes * shared * (ranks - 1) / ranks)
        + rings.seconds(2.0 * element_bytes * experts * (groups - 1) / groups),
    )


def _expert_params(sizes: ModelSizes) -> int:
    return sizes.shape(1).expert_params
